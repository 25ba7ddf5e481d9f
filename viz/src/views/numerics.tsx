import { useMemo, useState } from "preact/hooks";
import { BFLOAT16, FLOAT16, FLOAT32, FLOAT64, count, exact, short } from "../numbers";
import { trials, type Trial } from "../numerics";
import { parseMatrix } from "../paste";

const FORMATS = [FLOAT16, BFLOAT16, FLOAT32, FLOAT64];
const MAX_TERMS = 8192;
const WIDTHS: Record<string, string> = { float16: "fp16", bfloat16: "bf16", float32: "fp32", float64: "fp64" };

interface Props {
  row: Float64Array;
  rowName: string;
}

/** One row in every arithmetic, with the maximum subtracted and without. The reader can shift and repeat the row. */
export function NumericsView({ row, rowName }: Props) {
  const [text, setText] = useState("");
  const [shift, setShift] = useState(0);
  const [repeat, setRepeat] = useState(0);
  const pasted = useMemo(() => {
    if (text.trim() === "") return null;
    try {
      const matrix = parseMatrix(text);
      if (matrix.length > 1) throw new Error(`Enter one row at a time; this has ${matrix.length} rows.`);
      return { row: Float64Array.from(matrix[0]!), error: "" };
    } catch (error) {
      return { row: null, error: (error as Error).message };
    }
  }, [text]);
  const base = pasted?.row ?? row;
  const times = Math.max(1, Math.min(2 ** repeat, Math.floor(MAX_TERMS / Math.max(1, base.length))));
  const x = useMemo(() => Float64Array.from({ length: base.length * times }, (_, at) => base[at % base.length]! + shift), [base, shift, times]);
  const results = useMemo(() => trials(x, FORMATS), [x]);
  return (
    <div class="numerics">
      <p class="lede">
        Adding a constant to every logit does not change softmax, but it changes the arithmetic. Shift the row until the formula that does
        not subtract the maximum breaks. Repeat the row until a format with too few bits stops counting. This page computes every
        operation and rounds it to its format, to nearest even.
      </p>
      <div class="knobs">
        <label>
          <span>
            add to every logit <b>{shift > 0 ? "+" : ""}{short(shift, 4)}</b>
          </span>
          <input type="range" min={-800} max={800} step={1} value={shift} onInput={(event) => setShift(Number(event.currentTarget.value))} />
          <span class="stops">
            {[-120, 0, 12, 89, 710].map((each) => (
              <button key={each} type="button" onClick={() => setShift(each)}>{each > 0 ? `+${each}` : short(each)}</button>
            ))}
          </span>
        </label>
        <label>
          <span>
            repeat the row <b>{times}×</b>: {count(x.length)} terms
          </span>
          <input type="range" min={0} max={12} step={1} value={repeat} onInput={(event) => setRepeat(Number(event.currentTarget.value))} />
        </label>
        <label class="own">
          <span>your own row; leave it empty for {rowName}</span>
          <input
            type="text"
            value={text}
            placeholder={[...row].slice(0, 8).map((each) => short(each, 4).replace("−", "-")).join(", ")}
            aria-invalid={pasted?.error ? "true" : "false"}
            aria-describedby="row-error"
            onInput={(event) => setText(event.currentTarget.value)}
          />
          <span id="row-error" class="error" role="status">{pasted?.error ?? ""}</span>
        </label>
      </div>
      {[true, false].map((subtract) => (
        <section key={String(subtract)} aria-label={subtract ? "Maximum subtracted" : "Maximum not subtracted"}>
          <h2>
            {subtract ? "With the maximum subtracted" : "Without subtracting the maximum"}{" "}
            <span class="what">{subtract ? <>exp(x − m) / Σ exp(x − m)</> : <>exp(x) / Σ exp(x)</>}</span>
          </h2>
          <div class="scroll" tabIndex={0} role="group" aria-label="Table of formats">
            <table class="trials">
              <thead>
                <tr>
                  <th scope="col">Arithmetic</th>
                  <th scope="col">Verdict</th>
                  <th scope="col">Largest term</th>
                  <th scope="col">Sum <var>s</var></th>
                  <th scope="col">Probability sum</th>
                  <th scope="col">Probabilities</th>
                </tr>
              </thead>
              <tbody>
                {results.filter((each) => each.subtract === subtract).map((each) => (
                  <Line key={each.format.name} trial={each} shown={Math.min(x.length, Math.max(8, Math.min(base.length, 32)))} />
                ))}
              </tbody>
            </table>
          </div>
        </section>
      ))}
    </div>
  );
}

function Line({ trial, shown }: { trial: Trial; shown: number }) {
  const { format, largest, s, y, sum, status, verdict } = trial;
  const top = [...y].filter(Number.isFinite).reduce((a, b) => Math.max(a, b), 0) || 1;
  const words = { ok: "✓", inexact: "≈", nan: "✕" };
  return (
    <tr class={status} data-trial={`${format.name}${trial.subtract ? "" : "-raw"}`} data-status={status}>
      <th scope="row">
        {WIDTHS[format.name]}
        <span class="type">{format.precision} bits</span>
      </th>
      <td class="verdict">
        <span class="sign" aria-hidden="true">{words[status]}</span> {verdict}
      </td>
      <td class={Number.isFinite(largest) ? "" : "odd"}>{short(largest, 4)}</td>
      <td class={Number.isFinite(s) && s > 0 ? "" : "odd"}>{short(s, 6)}</td>
      <td class={Number.isFinite(sum) ? "" : "odd"}>{short(sum, 5)}</td>
      <td>
        <span class="bars" role="img" aria-label={[...y].slice(0, shown).map((each) => short(each, 3)).join(", ")}>
          {[...y].slice(0, shown).map((each, at) =>
            Number.isFinite(each) ? (
              <i key={at} style={{ height: `${Math.max(4, (100 * each) / top)}%` }} title={exact(each)} />
            ) : (
              <i key={at} class="odd" title="nan">×</i>
            ),
          )}
        </span>
      </td>
    </tr>
  );
}
