import { count } from "../numbers";
import type { Replay } from "../model";
import type { Entry } from "../catalogue";
import { sideText, verdict } from "../sentences";
import { Meter } from "./meter";
import { Said } from "./said";
import { TensorView } from "./tensor";

interface Props {
  left: Entry;
  right: Entry;
  replays: readonly [Replay, Replay];
  clock: number;
  kernels: readonly string[];
  onKernel: (side: "kernel" | "versus", kernel: string) => void;
  values: boolean;
  /** One recording of each kernel on the same matrix. */
  field: readonly Entry[];
}

/** Two kernels on one input and one clock. Both move elements at the same rate, so less traffic finishes first. */
export function Compare({ left, right, replays, clock, kernels, onKernel, values, field }: Props) {
  const whole = Math.max(...replays.map((each) => each.moved(each.length)));
  return (
    <div class="compare">
      <div class="opening">
        <p class="lede">
          Both kernels get the same matrix, and the clock counts memory traffic. They move elements at the same rate, as on a chip that
          waits for its memory, so the kernel that moves fewer finishes first.
          <span class="verdict"><Said words={verdict([left, right])} /></span>
        </p>
        <Field entries={field} clock={clock} chosen={[left, right]} />
      </div>
      <div class="pair">
        {([left, right] as const).map((entry, side) => (
          <Side
            key={side}
            entry={entry}
            replay={replays[side]!}
            whole={whole}
            clock={clock}
            kernels={kernels}
            onKernel={(kernel) => onKernel(side === 0 ? "kernel" : "versus", kernel)}
            label={side === 0 ? "First kernel" : "Second kernel"}
            values={values}
          />
        ))}
      </div>
    </div>
  );
}

/** All kernels' traffic on one scale, up to the clock's time. */
function Field({ entries, clock, chosen }: { entries: readonly Entry[]; clock: number; chosen: readonly Entry[] }) {
  const rows = entries.flatMap((entry) => (entry.recording.traffic ? [{ entry, traffic: entry.recording.traffic }] : []));
  if (rows.length < 3) return null;
  rows.sort((a, b) => b.traffic.reads + b.traffic.writes - a.traffic.reads - a.traffic.writes);
  const whole = Math.max(...rows.map(({ traffic }) => traffic.reads + traffic.writes));
  return (
    <section class="panel field" aria-label="All kernels on this matrix">
      <h2>
        All kernels <span class="what">elements moved on this matrix, by the same clock</span>
      </h2>
      <table>
        <thead class="unseen">
          <tr>
            <th scope="col">Kernel</th>
            <th scope="col">Moved so far</th>
            <th scope="col">In all</th>
          </tr>
        </thead>
        <tbody>
          {rows.map(({ entry, traffic }) => {
            const total = traffic.reads + traffic.writes;
            const floor = traffic.floor_reads + traffic.floor_writes;
            const moved = Math.min(clock, total);
            return (
              <tr key={`${entry.kernel}${entry.block}${entry.dtype}`} class={chosen.includes(entry) ? "chosen" : ""}>
                <th scope="row">{entry.kernel}</th>
                <td>
                  <span class="lane" style={{ width: `${(100 * total) / whole}%` }} role="img" aria-label={`${count(moved)} of ${count(total)}`}>
                    <span class="fill" style={{ width: `${(100 * moved) / total}%` }} />
                    <span class="floor" style={{ left: `${(100 * floor) / total}%` }} />
                  </span>
                </td>
                <td class="total">
                  {count(total)} <b>{(total / floor).toFixed(2)}×</b> {moved === total ? "✓" : ""}
                </td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </section>
  );
}

interface SideProps {
  entry: Entry;
  replay: Replay;
  whole: number;
  clock: number;
  kernels: readonly string[];
  onKernel: (kernel: string) => void;
  label: string;
  values: boolean;
}

function Side({ entry, replay, whole, clock, kernels, onKernel, label, values }: SideProps) {
  const done = replay.position === replay.length;
  const tensors = replay.tensors.map((_, index) => index).filter((index) => replay.tensors[index]!.role !== "scratch");
  return (
    <section class="side" aria-label={`${label}: ${entry.kernel}`} data-kernel={entry.kernel}>
      <label class="pick">
        <span class="unseen">{label}</span>
        <select value={entry.kernel} onChange={(event) => onKernel(event.currentTarget.value)}>
          {kernels.map((each) => (
            <option key={each} value={each}>{each}</option>
          ))}
        </select>
      </label>
      <p class={done ? "state done" : "state"}>
        <Said words={sideText(replay, clock)} />
      </p>
      <Meter replay={replay} scale={whole} of={label} />
      {tensors.map((index) => (
        <TensorView key={index} replay={replay} index={index} position={replay.position} selected={-1} values={values} of={label} />
      ))}
      <p class="summary-text">{replay.recording.summary}</p>
    </section>
  );
}
