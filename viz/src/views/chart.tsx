import { exact, short } from "../numbers";
import { power, type Replay, type RowState } from "../model";
import { decode } from "../recording";
import { Accumulator } from "./accumulator";
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
  const seen = (replay.imagined ? input.writes : input.reads).subarray(row * nCols, (row + 1) * nCols);
  const output = replay.result >= 0 ? replay.tensor(replay.result) : null;
  const program = replay.holder(row);
  // Scores in registers come block by block, and a maximum that has risen is seen before the sum that it corrects.
  const all = replay.history(row).filter((each) => each.program === program && (!each.torn || replay.imagined));
  const history = all.filter((each) => !each.torn);
  const state = all[all.length - 1] ?? null;
  const past = history.findLast((each) => each.m !== state?.m || each.s !== state.s) ?? null;
  const added = state?.torn ? past : state;
  const step = replay.step;
  const justNow = state !== null && state.position === replay.position;

  const left = 30;
  const plot = Math.max(60, width - left - STACK - 10);
  const pitch = plot / Math.max(1, nCols);
  const bar = Math.max(1, Math.min(34, pitch * 0.68));
  const known = replay.imagined ? replay.tensors[replay.main]!.after.slice(row * nCols, (row + 1) * nCols).map(decode) : [...values];
  const finite = known.filter(Number.isFinite);
  const low = finite.reduce((a, b) => Math.min(a, b), 0);
  const high = finite.reduce((a, b) => Math.max(a, b), 0.001);
  const y = (x: number) => 14 + (TOP - 26) * (1 - (x - low) / (high - low || 1));
  const x = (col: number) => left + (col + 0.5) * pitch;
  const base = TOP + MIDDLE + BOTTOM;
  const here = (col: number) => step?.rows?.includes(row) && step.cols && col >= step.cols[0] && col < step.cols[1];

  const m = state?.m ?? NaN;
  const sum = state?.s ?? NaN;
  const terms = [...values].map((value) => (Number.isFinite(m) ? power(replay.base, value - m) : NaN));
  const top = Math.max(1, highest(replay, row));
  const letter = replay.imagined ? replay.tensors[replay.main]!.name : "x";
  const adds = replay.accumulator >= 0;
  const words = <p class={`recurrence${justNow ? " fresh" : ""}`}>{recurrence(replay, state, past, justNow)}</p>;
  let stacked = 0;

  return (
    <section class="panel chart" aria-label={`Row ${row} as it is reduced`}>
      <h2>
        {replay.imagined ? `Query ${row}` : `Row ${row}`}{" "}
        <span class="what">
          {replay.imagined ? "its scores, their running maximum and sum, and the output so far" : "logits, running maximum, running sum"}
        </span>
      </h2>
      <div class={adds ? "reduction" : ""}>
        <div ref={holder} class="plot">
          {width > 0 ? (
            <svg width={width} height={base + 20} role="img" aria-label={chartText(replay, row)}>
              <text class="axis" x={0} y={12}><tspan class="it">{letter}</tspan></text>
              <line class="rule" x1={left} x2={left + plot} y1={y(Math.max(low, 0))} y2={y(Math.max(low, 0))} />
              {[...values].map((value, col) => {
                const mark = `dot${seen[col] ? " seen" : ""}${here(col) ? " here" : ""}`;
                if (replay.imagined && !Number.isFinite(value)) {
                  return seen[col] ? <text key={col} class={mark} x={x(col)} y={TOP - 2}>{nCols <= 16 ? "−∞" : "·"}</text> : null;
                }
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
                {replay.base === Math.E ? <tspan class="it">e</tspan> : <tspan>{replay.base}</tspan>}
                <tspan dy={-4} class="sup">{letter}−m</tspan>
              </text>
              <line class="rule" x1={left} x2={left + plot} y1={base} y2={base} />
              {terms.map((term, col) => {
                if (!Number.isFinite(term) || !seen[col] || (replay.imagined && term === 0)) return null;
                const whole = state?.torn ? null : state?.terms;
              const within = whole?.[col] === 1;
                const written = output !== null && output.writes[row * nCols + col]! > 0;
                // A term above the maximum, or written, but not in the sum is another program's, unless it is in use.
                if (whole && !within && (term > 1 || written) && !here(col)) return null;
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
              {width > (replay.imagined ? 330 : 520) && nCols <= 16
                ? Array.from({ length: nCols }, (_, col) => (
                    <text key={col} class={`tick${here(col) ? " here" : ""}`} x={x(col)} y={base + 14}>{col}</text>
                  ))
                : (width > 420 ? [0, nCols - 1] : [0]).map((col) => (
                    <text key={col} class="tick" x={x(col)} y={base + 14}>{col}</text>
                  ))}
              {added?.terms
                ? [...values].map((value, col) => {
                    const term = power(replay.base, value - added.m!);
                    if (!added.terms![col] || !Number.isFinite(term)) return null;
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
        {adds ? (
          <div class="so-far">
            {words}
            <Accumulator replay={replay} row={row} program={program} />
          </div>
        ) : null}
      </div>
      {adds ? null : words}
    </section>
  );
}


/** The last change of the state, written out in its own numbers. */
function recurrence(replay: Replay, state: RowState | null, past: RowState | null, fresh: boolean) {
  const { base } = replay;
  const symbol = base === Math.E ? "e" : String(base);
  if ((!state || state.m === null) && replay.imagined) {
    return <>No score is known yet. Each block of keys gives the query some; then they are forgotten, but for these: the greatest, <b>m</b>, the sum <b>s</b> of the weights, and the values by their weights.</>;
  }
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
  const factor = power(base, past.m - m);
  if (state.torn) {
    return (
      <>
        <strong>The maximum rises</strong> from {short(past.m, 4)} to {short(m, 4)}. What has been added up is of the old one: it will be
        multiplied by {symbol}
        <sup>{short(past.m - m, 4)}</sup> = {short(factor, 4)}.
      </>
    );
  }
  const added = s - past.s * factor;
  if (m > past.m) {
    return (
      <>
        <strong>{fresh ? "The maximum rises" : "The maximum rose"}</strong> from {short(past.m, 4)} to {short(m, 4)}, so the old sum is
        multiplied by {symbol}
        <sup>{short(past.m - m, 4)}</sup> = {short(factor, 4)}.{" "}
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
  const { reads, writes } = replay.tensor(replay.main);
  const counts = (replay.imagined ? writes : reads).subarray(row * replay.nCols, (row + 1) * replay.nCols);
  const seen = counts.filter((each) => each > 0).length;
  const m = state?.m ?? null;
  const s = state?.s ?? null;
  const known = `${m === null ? "no maximum yet" : `running maximum ${exact(m)}`}, ${s === null ? "no sum yet" : `running sum ${short(s, 4)}`}`;
  return `Row ${row}: ${seen} of ${replay.nCols} columns ${replay.imagined ? "computed" : "read"}, ${known}.`;
}
