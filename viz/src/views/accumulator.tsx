import { Said } from "./said";
import type { Replay } from "../model";
import { exact, short } from "../numbers";
import { sumLines, type Reduction, type SumLine } from "../sentences";

/** A row of the output as it is added up: what was there, how the maximum's rise corrects it, and what a block adds. */
export function Accumulator({ replay, row, reduction }: { replay: Replay; row: number; reduction: Reduction }) {
  const sums = replay.sumsOf(row);
  const fresh = sums[sums.length - 1]?.position === replay.position;
  return (
    <div class="scroll accumulator" tabIndex={0} role="group" aria-label={`The output of row ${row} so far`}>
      <table class={`figures${fresh ? " fresh" : ""}`}>
        <caption class="unseen">The output of row {row} so far</caption>
        <tbody>
          {sumLines(replay, row, reduction).map((line, at) => <Line key={at} {...line} />)}
        </tbody>
      </table>
    </div>
  );
}

const CLASSES = { part: "", main: "main", next: "faint" };

function Line({ title, values, kind }: SumLine) {
  return (
    <tr class={CLASSES[kind]}>
      <th scope="row">{kind === "next" ? <span class="next"><Said words={title} /></span> : <Said words={title} />}</th>
      {values.map((each, at) => <td key={at} title={Number.isNaN(each) ? "" : exact(each)}>{Number.isNaN(each) ? "–" : short(each, 4)}</td>)}
    </tr>
  );
}
