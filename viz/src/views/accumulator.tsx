import { power, type Replay } from "../model";
import { exact, short } from "../numbers";

/** A row of the output as it is added up: what was there, how the maximum's rise corrects it, and what a block adds. */
export function Accumulator({ replay, row, program }: { replay: Replay; row: number; program: number | null }) {
  const name = replay.tensors[replay.accumulator]!.name;
  const sums = replay.sumsOf(row);
  const now = sums[sums.length - 1];
  const before = sums[sums.length - 2];
  const state = program === null ? null : replay.state(row, program);
  const fresh = now?.position === replay.position;
  const symbol = replay.base === Math.E ? "e" : String(replay.base);
  const cols = replay.layouts[replay.accumulator]![1];
  const [output, divided] = written(replay, row);
  const risen = now && now.m !== null && state && state.m !== null && state.m > now.m ? now.m - state.m : 0;
  const rise = before && before.m !== null && now!.m !== null ? before.m - now!.m : 0;
  const old = before ? before.values.map((each) => each * power(replay.base, rise)) : null;
  const factor = (by: number) => (
    <>
      × {symbol}
      <sup>{short(by, 4)}</sup> = {short(power(replay.base, by), 4)}
    </>
  );
  return (
    <div class="scroll accumulator" tabIndex={0} role="group" aria-label={`The output of row ${row} so far`}>
      <table class={`figures${fresh ? " fresh" : ""}`}>
        <caption class="unseen">The output of row {row} so far</caption>
        <tbody>
          {before && old ? (
            <>
              <Line title={<><var>{name}</var> before</>} values={before.values} />
              <Line title={rise < 0 ? factor(rise) : "× 1, as m stays"} values={old} />
              <Line title="+ this block" values={now!.values.map((each, at) => each - old[at]!)} />
            </>
          ) : null}
          {now ? (
            <Line
              title={before ? <>= <var>{name}</var></> : <><var>{name}</var> of the first block</>}
              values={now.values}
              main
            />
          ) : (
            <Line title={<><var>{name}</var></>} values={new Array<number>(cols).fill(NaN)} />
          )}
          {risen < 0 && !divided ? (
            <Line title={<span class="next">next: {factor(risen)}</span>} values={now!.values.map((each) => each * power(replay.base, risen))} faint />
          ) : null}
          {divided ? <Line title={<>÷ <var>s</var> = <var>{output}</var></>} values={divided} main /> : null}
        </tbody>
      </table>
    </div>
  );
}

function Line({ title, values, main, faint }: { title: preact.ComponentChildren; values: readonly number[]; main?: boolean; faint?: boolean }) {
  return (
    <tr class={main ? "main" : faint ? "faint" : ""}>
      <th scope="row">{title}</th>
      {values.map((each, at) => <td key={at} title={Number.isNaN(each) ? "" : exact(each)}>{Number.isNaN(each) ? "–" : short(each, 4)}</td>)}
    </tr>
  );
}

/** The name of the output that the accumulator becomes, and a row of it once it is written. */
function written(replay: Replay, row: number): [string, number[] | null] {
  if (replay.accumulated < 0) return ["", null];
  const { values, writes } = replay.tensor(replay.accumulated);
  const cols = replay.layouts[replay.accumulated]![1];
  const whole = writes.subarray(row * cols, (row + 1) * cols).every((each) => each > 0);
  return [replay.tensors[replay.accumulated]!.name, whole ? [...values.subarray(row * cols, (row + 1) * cols)] : null];
}
