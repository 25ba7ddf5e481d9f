import { useLayoutEffect, useRef } from "preact/hooks";
import { exact, short } from "../numbers";
import { reveal } from "./hooks";
import type { Replay } from "../model";
import type { RowResult } from "../recording";
import { rowFacts, rowFigures } from "../sentences";

/** Every row's facts so far: maximum, sum of exponentials, sum of the written values, status. */
export function RowsView({ replay, selected, onRow }: { replay: Replay; selected: number; onRow: (row: number) => void }) {
  const results = new Map((replay.recording.rows ?? []).map((each) => [each.row, each]));
  const current = new Set(replay.step?.rows ?? []);
  const shown = window_(replay.nRows, selected);
  const softmax = isSoftmax(replay) || replay.imagined;
  const reduces = replay.recording.steps.some((step) => step.state?.length) || [...results.values()].some((each) => each.max !== undefined);
  const box = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    if (box.current) reveal(box.current, box.current.querySelector(`[data-row="${selected}"]`), 34);
  }, [selected, replay]);
  return (
    <section class="panel rows" aria-label="Rows">
      <h2>
        Rows <span class="what">each row’s newest state</span>
      </h2>
      <div class="scroll" ref={box} tabIndex={0} role="group" aria-label="Table of rows">
        <table class="figures">
          <thead>
            <tr>
              <th scope="col">Row</th>
              {reduces ? <th scope="col">Maximum <var>m</var></th> : null}
              {reduces ? <th scope="col">Sum of exponentials <var>s</var></th> : null}
              <th scope="col">{softmax ? "Probability sum" : "Sum written"}</th>
              <th scope="col">Status</th>
            </tr>
          </thead>
          <tbody>
            {shown.map((row) => (
              <Line key={row} {...{ replay, row, selected, onRow }} result={results.get(row)} here={current.has(row)} reduces={reduces} />
            ))}
          </tbody>
        </table>
      </div>
      <Selected replay={replay} row={selected} />
    </section>
  );
}

interface LineProps {
  replay: Replay;
  row: number;
  selected: number;
  onRow: (row: number) => void;
  result: RowResult | undefined;
  here: boolean;
  reduces: boolean;
}

function Line({ replay, row, selected, onRow, result, here, reduces }: LineProps) {
  const progress = replay.progress(row);
  const facts = rowFacts(replay, row);
  return (
    <tr class={`${here ? "here" : ""} ${progress}`} data-row={row}>
      <th scope="row">
        <button type="button" aria-pressed={row === selected} onClick={() => onRow(row)}>
          {row}
        </button>
      </th>
      {reduces ? <td>{facts.m}</td> : null}
      {reduces ? <td>{facts.s}</td> : null}
      <td>{facts.sum}</td>
      <td class={`status ${progress === "done" ? (result?.status ?? "") : progress}`}>{facts.status}</td>
    </tr>
  );
}

function isSoftmax(replay: Replay): boolean {
  return replay.recording.operation === "softmax";
}

function Selected({ replay, row }: { replay: Replay; row: number }) {
  const some = replay.written(row).n > 0 || (replay.imagined && replay.progress(row) === "done");
  return (
    <dl class="summary" aria-label={`Row ${row}`}>
      <div class="which">
        <dt>row</dt>
        <dd>{row}</dd>
      </div>
      {rowFigures(replay, row).map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd title={some ? exact(value) : ""}>{some ? short(value, 4) : "–"}</dd>
        </div>
      ))}
    </dl>
  );
}

/** All rows, or, if they are many, the rows around one. */
function window_(rows: number, around: number): number[] {
  const most = 64;
  const first = Math.max(0, Math.min(rows - most, around - most / 2));
  return Array.from({ length: Math.min(rows, most) }, (_, index) => first + index);
}
