import { power, type Replay } from "../model";
import { short } from "../numbers";
import { decode } from "../recording";
import { chartText, recurrence, reductionOf } from "../sentences";
import { Accumulator } from "./accumulator";
import { useWidth } from "./hooks";
import { Said } from "./said";

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
  const reduction = reductionOf(replay, row);
  const { state, past } = reduction;
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
  const words = <p class={`recurrence${justNow ? " fresh" : ""}`}><Said words={recurrence(replay, row, reduction)} /></p>;
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
            <svg width={width} height={base + 20} role="img" aria-label={chartText(replay, row, reduction)}>
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
            <Accumulator replay={replay} row={row} reduction={reduction} />
          </div>
        ) : null}
      </div>
      {adds ? null : words}
    </section>
  );
}

/** The row's largest sum in the whole run. */
function highest(replay: Replay, row: number): number {
  const sums = replay.history(row, replay.length).map((each) => each.s ?? 0);
  return sums.filter(Number.isFinite).reduce((a, b) => Math.max(a, b), 0);
}
