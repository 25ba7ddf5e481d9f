/**
 * The page's own model of two kernels, for matrices without a recording. It rounds every operation to float32, in the
 * order of the lines shown, and makes a recording of the same form that is marked as computed.
 */

import type { Matrix } from "./paste";
import { encode, type Cell, type Local, type Recording, type RowResult, type Step } from "./recording";

const f32 = Math.fround;
const exp = (x: number) => f32(Math.exp(x));
const add = (a: number, b: number) => f32(a + b);
/** The larger of two numbers, like Triton's maximum: a nan loses. */
const larger = (a: number, b: number) => (Number.isNaN(a) ? b : Number.isNaN(b) ? a : Math.max(a, b));

export type Modelled = "online" | "three_pass";

const ONLINE = `
def online(x_ptr, y_ptr, n_cols, BLOCK):
    row = tl.program_id(0)
    m, s = float("-inf"), 0.0
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=float("-inf"))
        m_new = tl.maximum(m, tl.max(x))
        origin = tl.where(m_new == float("-inf"), 0.0, m_new)
        s = s * tl.exp(m - origin) + tl.sum(tl.exp(x - origin))
        m = m_new

    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=float("-inf"))
        y = tl.exp(x - m) / s
        tl.store(y_ptr + row * n_cols + cols, y, mask=cols < n_cols)
`;

const THREE_PASS = `
def three_pass(x_ptr, y_ptr, n_cols, BLOCK):
    row = tl.program_id(0)
    m = float("-inf")
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=float("-inf"))
        m = tl.maximum(m, tl.max(x))

    s = 0.0
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=float("-inf"))
        s += tl.sum(tl.exp(x - m))

    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=float("-inf"))
        y = tl.exp(x - m) / s
        tl.store(y_ptr + row * n_cols + cols, y, mask=cols < n_cols)
`;

/** The page's own run of a modelled kernel on a matrix, in blocks of `block` columns. */
export function compute(kernel: Modelled, matrix: Matrix, block: number): Recording {
  const run = new Run(matrix.map((row) => row.map(f32)), block);
  for (let row = 0; row < run.nRows; row++) {
    if (kernel === "online") online(run, row);
    else threePass(run, row);
  }
  const [name, text, passes] = kernel === "online" ? ["online", ONLINE, 2] : ["three_pass", THREE_PASS, 3];
  const size = run.nRows * run.nCols;
  return {
    schema: 1,
    title: `${kernel === "online" ? "online" : "three passes"}, ${run.nRows} × ${run.nCols}, blocks of ${block}`,
    kernel: name,
    operation: "softmax",
    summary:
      kernel === "online"
        ? "Reads each row twice. The first pass finds the maximum and the sum together, and rescales the sum when the maximum rises. The second writes the output."
        : "Reads each row three times: for the maximum, for the sum and for the output.",
    computed: true,
    options: { dtype: "float32", block },
    sources: [{ name, file: "computed by the page", first_line: 1, lines: text.trim().split("\n") }],
    tensors: [
      {
        name: "x", role: "input", dtype: "float32", shape: [run.nRows, run.nCols],
        before: run.x.flat().map(encode), after: run.x.flat().map(encode),
      },
      {
        name: "y", role: "output", dtype: "float32", shape: [run.nRows, run.nCols],
        before: run.y.map((): Cell => "nan"), after: run.y.map(encode),
      },
    ],
    phases: kernel === "online" ? ["maximum and sum", "store"] : ["maximum", "sum", "store"],
    launches: [{ name, source: 0, grid: [run.nRows, 1, 1], constants: { BLOCK: block }, arguments: { n_cols: run.nCols } }],
    frames: Array.from({ length: run.nRows }, (_, row) => ({
      source: 0, launch: 0, program: [row, 0, 0], parent: null, call_line: null,
    })),
    steps: run.steps,
    rows: run.results,
    traffic: { reads: size * passes, writes: size, floor_reads: size, floor_writes: size, passes },
  };
}

/** The steps so far, and the memory that the model writes to. */
class Run {
  readonly nRows: number;
  readonly nCols: number;
  readonly y: number[];
  readonly steps: Step[] = [];
  readonly results: RowResult[] = [];

  constructor(readonly x: Matrix, readonly block: number) {
    this.nRows = x.length;
    this.nCols = x[0]!.length;
    this.y = new Array<number>(this.nRows * this.nCols).fill(NaN);
  }

  step(row: number, line: number, phase: number, more: Partial<Step> = {}): void {
    this.steps.push({ frame: row, line, phase, rows: [row], ...more });
  }

  /** Runs the three lines that open every loop: the range, the columns, the load. */
  load(row: number, start: number, line: number, phase: number): { x: number[]; cols: [number, number]; at: number[] } {
    const end = Math.min(start + this.block, this.nCols);
    const cols: [number, number] = [start, end];
    const columns = Array.from({ length: this.block }, (_, lane) => start + lane);
    const x = columns.map((col) => (col < this.nCols ? this.x[row]![col]! : -Infinity));
    const at = columns.slice(0, end - start).map((col) => row * this.nCols + col);
    this.step(row, line, phase, { cols, set: { start } });
    this.step(row, line + 1, phase, { cols, set: { cols: tile(columns, "int32") } });
    this.step(row, line + 2, phase, {
      cols,
      set: { x: tile(x) },
      loads: [{ tensor: 0, at, masked: this.block - at.length }],
    });
    return { x, cols, at };
  }

  /** The last loop: exp(x - m) / s, written block by block. */
  store(row: number, m: number, s: number, line: number, phase: number): void {
    for (let start = 0; start < this.nCols; start += this.block) {
      const { x, cols, at } = this.load(row, start, line, phase);
      const y = x.map((each) => f32(exp(f32(each - m)) / s));
      this.step(row, line + 3, phase, { cols, set: { y: tile(y) } });
      at.forEach((place, lane) => (this.y[place] = y[lane]!));
      this.step(row, line + 4, phase, {
        cols,
        stores: [{ tensor: 1, at, data: at.map((_, lane) => encode(y[lane]!)), masked: this.block - at.length }],
      });
    }
    const empty = this.x[row]!.every((each) => each === -Infinity);
    this.results.push(resultOf(row, m, s, this.y.slice(row * this.nCols, (row + 1) * this.nCols), empty));
  }
}

function online(run: Run, row: number): void {
  let [m, s] = [-Infinity, 0];
  run.step(row, 2, 0, { set: { row } });
  run.step(row, 3, 0, { set: { m: number(m), s: number(s) }, state: [{ row, m: encode(m), s }] });
  for (let start = 0; start < run.nCols; start += run.block) {
    const { x, cols } = run.load(row, start, 4, 0);
    const next = larger(m, x.reduce(larger));
    run.step(row, 7, 0, { cols, set: { m_new: number(next) }, computed: [way("tl.max(x)", x.reduce(larger))] });
    const origin = next === -Infinity ? 0 : next;
    run.step(row, 8, 0, { cols, set: { origin: number(origin) } });
    const factor = exp(f32(m - origin));
    const terms = x.map((each) => exp(f32(each - origin)));
    const sum = terms.reduce(add);
    s = add(f32(s * factor), sum);
    const computed = [
      way("tl.exp(m - origin)", factor),
      { text: "tl.exp(x - origin)", value: tile(terms) },
      way("tl.sum(tl.exp(x - origin))", sum),
    ];
    const note =
      next > m && m > -Infinity ? `The maximum rose from ${m} to ${next}, so the old sum is multiplied by exp(${m} - ${next}).` : undefined;
    run.step(row, 9, 0, { cols, set: { s: number(s) }, state: [{ row, m: encode(next), s: encode(s) }], computed, ...(note && { note }) });
    m = next;
    run.step(row, 10, 0, { cols, set: { m: number(m) } });
  }
  run.store(row, m, s, 12, 1);
}

function threePass(run: Run, row: number): void {
  let [m, s] = [-Infinity, 0];
  run.step(row, 2, 0, { set: { row } });
  run.step(row, 3, 0, { set: { m: number(m) }, state: [{ row, m: encode(m), s: null }] });
  for (let start = 0; start < run.nCols; start += run.block) {
    const { x, cols } = run.load(row, start, 4, 0);
    m = larger(m, x.reduce(larger));
    run.step(row, 7, 0, {
      cols,
      set: { m: number(m) },
      state: [{ row, m: encode(m), s: null }],
      computed: [way("tl.max(x)", x.reduce(larger))],
    });
  }
  run.step(row, 9, 1, { set: { s: number(s) }, state: [{ row, m: encode(m), s }] });
  for (let start = 0; start < run.nCols; start += run.block) {
    const { x, cols } = run.load(row, start, 10, 1);
    const terms = x.map((each) => exp(f32(each - m)));
    s = add(s, terms.reduce(add));
    run.step(row, 13, 1, {
      cols,
      set: { s: number(s) },
      state: [{ row, m: encode(m), s: encode(s) }],
      computed: [{ text: "tl.exp(x - m)", value: tile(terms) }, way("tl.sum(tl.exp(x - m))", terms.reduce(add))],
    });
  }
  run.store(row, m, s, 15, 2);
}

function tile(data: readonly number[], dtype = "float32"): Local {
  return { shape: [data.length], dtype, data: data.map(encode) };
}

function way(text: string, x: number): { text: string; value: Local } {
  return { text, value: number(x) };
}

function number(x: number): Local {
  return Number.isFinite(x) ? x : { shape: [], dtype: "float32", data: [encode(x)] };
}

function resultOf(row: number, m: number, s: number, y: readonly number[], empty: boolean): RowResult {
  const bad = y.some(Number.isNaN);
  return {
    row,
    max: encode(m),
    sum: encode(s),
    probability_sum: encode(y.reduce((a, b) => a + b, 0)),
    status: bad ? (empty ? "empty" : "nan") : "ok",
    min_probability: encode(bad ? NaN : Math.min(...y)),
    max_probability: encode(bad ? NaN : Math.max(...y)),
    entropy: encode(y.reduce((sum, p) => sum - (p === 0 ? 0 : p * Math.log(p)), 0)),
  };
}
