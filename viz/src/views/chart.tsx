import { exact, short } from "../numbers";
import type { Replay, RowState } from "../model";
import { useWidth } from "./hooks";

const [TOP, MIDDLE, BOTTOM] = [92, 26, 84];
const STACK = 74;

/**
 * The row that is being reduced: its logits under the running maximum, the exponentials in the running sum, and the sum
 * as a stack of them. When the maximum rises, every term in the stack shrinks: that is the recurrence.
 */
export function RowChart({ replay, row }: { replay: Replay; row: number }) {
  const [holder, width] = useWidth<HTMLDivElement>();
  const { nCols } = replay;
  const input = replay.tensor(replay.main);
  const values = input.values.subarray(row * nCols, (row + 1) * nCols);
  const reads = input.reads.subarray(row * nCols, (row + 1) * nCols);
  const output = replay.result >= 0 ? replay.tensor(replay.result) : null;
  const program = replay.holder(row);
  const history = replay.history(row).filter((each) => each.program === program && !each.torn);
  const state = history[history.length - 1] ?? null;
  const past = history.findLast((each) => each.m !== state?.m || each.s !== state.s) ?? null;
  const step = replay.step;
  const justNow = state !== null && state.position === replay.position;

  const left = 30;
  const plot = Math.max(60, width - left - STACK - 10);
  const pitch = plot / Math.max(1, nCols);
  const bar = Math.max(1, Math.min(34, pitch * 0.68));
  const finite = [...values].filter(Number.isFinite);
  const low = finite.reduce((a, b) => Math.min(a, b), 0);
  const high = finite.reduce((a, b) => Math.max(a, b), 0.001);
  const y = (x: number) => 14 + (TOP - 26) * (1 - (x - low) / (high - low || 1));
  const x = (col: number) => left + (col + 0.5) * pitch;
  const base = TOP + MIDDLE + BOTTOM;
  const here = (col: number) => step?.rows?.includes(row) && step.cols && col >= step.cols[0] && col < step.cols[1];

  const m = state?.m ?? NaN;
  const sum = state?.s ?? NaN;
  const terms = [...values].map((value) => (Number.isFinite(m) ? Math.exp(value - m) : NaN));
  const top = Math.max(1, highest(replay, row));
  let stacked = 0;

  return (
    <section class="panel chart" aria-label={`Row ${row} as it is reduced`}>
      <h2>
        Row {row} <span class="what">logits, running maximum, running sum</span>
      </h2>
      <div ref={holder} class="plot">
        {width > 0 ? (
          <svg width={width} height={base + 20} role="img" aria-label={chartText(replay, row)}>
            <text class="axis" x={0} y={12}><tspan class="it">x</tspan></text>
            <line class="rule" x1={left} x2={left + plot} y1={y(Math.max(low, 0))} y2={y(Math.max(low, 0))} />
            {[...values].map((value, col) => {
              const seen = reads[col]! > 0;
              const mark = `dot${seen ? " seen" : ""}${here(col) ? " here" : ""}`;
              if (!Number.isFinite(value)) {
                return (
                  <text key={col} class={`${mark} odd`} x={x(col)} y={value === Infinity ? 12 : TOP - 2}>
                    {nCols <= 16 ? short(value) : value === Infinity ? "↑" : value === -Infinity ? "↓" : "×"}
                  </text>
                );
              }
              return (
                <g key={col} class={mark}>
                  <line x1={x(col)} x2={x(col)} y1={y(Math.max(low, 0))} y2={y(value)} />
                  <circle cx={x(col)} cy={y(value)} r={Math.max(1.5, Math.min(4.5, pitch * 0.3))} />
                </g>
              );
            })}
            {Number.isFinite(m) ? (
              <g class="maximum" style={{ transform: `translateY(${y(m)}px)` }}>
                <line x1={left} x2={left + plot} y1={0} y2={0} />
                <text x={left + plot + 6} y={4}>m = {short(m, 4)}</text>
              </g>
            ) : null}

            <text class="axis" x={0} y={TOP + MIDDLE - 2}>
              <tspan class="it">e</tspan>
              <tspan dy={-4} class="sup">x−m</tspan>
            </text>
            <line class="rule" x1={left} x2={left + plot} y1={base} y2={base} />
            {terms.map((term, col) => {
              if (!Number.isFinite(term) || reads[col] === 0) return null;
              const within = state?.terms?.[col] === 1;
              const written = output !== null && output.writes[row * nCols + col]! > 0;
              // A term above the maximum, or written, but not in the sum is another program's, unless it is in use.
              if (state?.terms && !within && (term > 1 || written) && !here(col)) return null;
              const height = Math.max(0.5, Math.min(1.08, term) * (BOTTOM - 12));
              const kind = written ? "term written" : within ? "term within" : "term";
              return (
                <rect
                  key={col}
                  class={kind}
                  x={x(col) - bar / 2}
                  width={bar}
                  y={base - height}
                  height={height}
                />
              );
            })}
            {width > 520 && nCols <= 16
              ? Array.from({ length: nCols }, (_, col) => (
                  <text key={col} class={`tick${here(col) ? " here" : ""}`} x={x(col)} y={base + 14}>{col}</text>
                ))
              : (width > 420 ? [0, nCols - 1] : [0]).map((col) => (
                  <text key={col} class="tick" x={x(col)} y={base + 14}>{col}</text>
                ))}
            {state?.terms
              ? terms.map((term, col) => {
                  if (!state.terms![col] || !Number.isFinite(term)) return null;
                  const height = (term / top) * (BOTTOM + 4);
                  stacked += height;
                  return <rect key={`s${col}`} class="term within" x={left + plot + 8} width={18} y={base - stacked} height={Math.max(0, height - 0.5)} />;
                })
              : null}
            <text class="sum" x={left + plot + 30} y={base - Math.max(4, stacked / 2 - 4)}>
              {stacked > 0 ? <tspan class="it">s</tspan> : null}
            </text>
            {Number.isNaN(sum) ? null : (
              <text class="sum" x={left + plot + 8} y={base + 14}>s = {short(sum, 4)}</text>
            )}
          </svg>
        ) : null}
      </div>
      <p class={`recurrence${justNow ? " fresh" : ""}`}>{recurrence(state, past, justNow)}</p>
    </section>
  );
}


/** The last change of the state, written out in its own numbers. */
function recurrence(state: RowState | null, past: RowState | null, fresh: boolean) {
  if (!state || state.m === null) {
    return (
      <>
        Before a row can be written, the kernel needs only two numbers: the row’s maximum <b>m</b>, and <b>s</b>, the sum of its
        e<sup>x − m</sup>.
      </>
    );
  }
  const [m, s] = [state.m, state.s];
  if (s === null) {
    const from = past?.m ?? null;
    return (
      <>
        The maximum so far is <b>{short(m, 5)}</b>
        {from !== null && Number.isFinite(from) && from < m ? `; it was ${short(from, 5)} before` : ""}. The sum has not started.
      </>
    );
  }
  if (!past || past.m === null || past.s === null || !Number.isFinite(past.m) || !(past.s > 0) || !Number.isFinite(s)) {
    return (
      <>
        m = <b>{short(m, 5)}</b>, s = <b>{short(s, 5)}</b>
      </>
    );
  }
  const factor = Math.exp(past.m - m);
  const added = s - past.s * factor;
  if (m > past.m) {
    return (
      <>
        <strong>{fresh ? "The maximum rises" : "The maximum rose"}</strong> from {short(past.m, 4)} to {short(m, 4)}, so the old sum is
        multiplied by e<sup>{short(past.m - m, 4)}</sup> = {short(factor, 4)}.{" "}
        <span class="nobreak">
          s = {short(past.s, 4)} · {short(factor, 4)} + {short(added, 4)} = <b>{short(s, 4)}</b>
        </span>
      </>
    );
  }
  return (
    <>
      The maximum stays {short(m, 4)}, so nothing is rescaled.{" "}
      <span class="nobreak">
        s = {short(past.s, 4)} + {short(added, 4)} = <b>{short(s, 4)}</b>
      </span>
    </>
  );
}

/** The row's largest sum in the whole run. */
function highest(replay: Replay, row: number): number {
  const sums = replay.history(row, replay.length).map((each) => each.s ?? 0);
  return sums.filter(Number.isFinite).reduce((a, b) => Math.max(a, b), 0);
}

function chartText(replay: Replay, row: number): string {
  const state = replay.state(row, replay.holder(row) ?? undefined);
  const { reads } = replay.tensor(replay.main);
  const seen = reads.subarray(row * replay.nCols, (row + 1) * replay.nCols).filter((each) => each > 0).length;
  const m = state?.m ?? null;
  const s = state?.s ?? null;
  const known = `${m === null ? "no maximum yet" : `running maximum ${exact(m)}`}, ${s === null ? "no sum yet" : `running sum ${short(s, 4)}`}`;
  return `Row ${row}: ${seen} of ${replay.nCols} columns read, ${known}.`;
}
