/**
 * The state machine that replays a recording, without any view.
 *
 * A position p in 0..length counts the steps that have run; the current step is the last of them. Checkpoints keep
 * memory, so that a seek applies at most CHECKPOINT_STEPS steps. Indices that are built once answer everything else.
 */

import { formatNamed, roundTo } from "./numbers";
import {
  decode,
  isTile,
  rowsAndCols,
  type Cell,
  type Frame,
  type Local,
  type Message,
  type Recording,
  type Source,
  type Step,
  type Tensor,
} from "./recording";

export const CHECKPOINT_STEPS = 64;
/** The bytes of checkpoints that a replay may keep; a larger recording gets fewer checkpoints. */
const CHECKPOINT_BYTES = 64 * 2 ** 20;

/** The most states times columns for which the replay looks for each sum's columns. */
const MAX_TERMS_WORK = 2 ** 21;

/** A tensor's contents at a position. */
export interface Memory {
  values: Float64Array;
  /** How often each element has been read and written. */
  reads: Uint16Array;
  writes: Uint16Array;
}

/** A local variable of a frame. */
export interface Variable {
  name: string;
  value: Local;
  /** The position at which it got this value. */
  position: number;
}

/** The maximum and sum that a program knows for a row from `position` on. */
export interface RowState {
  position: number;
  row: number;
  program: number;
  /** null while unknown. */
  m: number | null;
  s: number | null;
  /** The columns whose exp(x - m) add up to s; null if no columns do. */
  terms: Uint8Array | null;
  /** Whether this is between two lines that belong together: one of m and s is new, the other is still old. */
  torn: boolean;
}

/** A row of an accumulator from `position` on. m: the maximum that its terms are of; null while unknown. */
export interface Sum {
  position: number;
  values: readonly number[];
  m: number | null;
}

/** A stretch of consecutive steps, as positions: the first is start + 1, the last is end. */
export interface Span {
  start: number;
  end: number;
  program: number;
  phase: number;
}

export interface Exchange extends Message {
  position: number;
  program: number;
}

/** One program of one launch. */
export interface Program {
  launch: number;
  id: readonly number[];
  label: string;
}

/** The k-th reads, or writes, of a tensor's elements: one picture of the traffic meter. */
export interface Layer {
  tensor: number;
  kind: "read" | "write";
  k: number;
  /** The position at which the first element is accessed for the k-th time. */
  first: number;
  /** How many elements are accessed k times by the end. */
  size: number;
  /** Whether every kernel needs it: the first read of an input, the first write of an output. */
  floor: boolean;
}

export type Unit = "line" | "block" | "program";

export class Replay {
  readonly length: number;
  readonly tensors: readonly Tensor[];
  /** Index of the tensor that the steps' rows and columns refer to. */
  readonly main: number;
  /** Index of the output of the same shape; -1 if none has it. */
  readonly result: number;
  /** Whether the main tensor is in no memory: its values appear as programs compute them. */
  readonly imagined: boolean;
  /** Index of the matrix in registers in which a program adds up each row's result; -1 if none does. */
  readonly accumulator: number;
  /** Index of the output that the accumulator becomes; -1 if there is none. */
  readonly accumulated: number;
  /** What scores are exponents of. */
  readonly base: number;
  private readonly held: readonly ReadonlySet<number>[];
  /** Whether a program writes to a tensor. */
  private readonly stored: readonly boolean[];
  /** Every tensor's rows and columns. */
  readonly layouts: readonly (readonly [number, number])[];
  readonly nRows: number;
  readonly nCols: number;
  readonly programs: readonly Program[];
  /** Index into `programs` for every step. */
  readonly programOf: Uint32Array;
  readonly programSpans: readonly Span[];
  readonly phaseSpans: readonly Span[];
  /** Positions just after a load or a store. */
  readonly accesses: readonly number[];
  /** Elements of the counted tensors that p steps have read and written. */
  readonly reads: Uint32Array;
  readonly writes: Uint32Array;
  /** Whether a tensor's accesses count as traffic. */
  readonly counted: readonly boolean[];
  readonly exchanges: readonly Exchange[];
  /** In the order in which they begin. */
  readonly layers: readonly Layer[];

  private readonly states: RowState[][];
  private readonly sums: Sum[][];
  private readonly settings: number[][];
  private readonly firstTouch: Int32Array;
  private readonly lastTouch: Int32Array;
  private readonly interval: number;
  private readonly checkpoints = new Map<number, Memory[]>();
  private readonly memory: Memory[];
  private at = 0;

  constructor(readonly recording: Recording) {
    const { steps, tensors, frames } = recording;
    this.length = steps.length;
    this.tensors = tensors;
    this.main = mainTensor(tensors);
    const shown = tensors[this.main];
    [this.nRows, this.nCols] = shown ? rowsAndCols(shown.shape) : [0, 0];
    this.layouts = tensors.map((each) => rowsAndCols(each.shape, this.nRows));
    this.imagined = shown?.role === "registers";
    this.result = this.imagined
      ? -1
      : tensors.findIndex(
          (each, index) =>
            each.role === "output" && each.shape.length === shown?.shape.length && sameLayout(this.layouts[index]!, [this.nRows, this.nCols]),
        );
    this.accumulator = tensors.findIndex(
      (each, index) => each.role === "registers" && index !== this.main && this.layouts[index]![0] === this.nRows,
    );
    this.accumulated = tensors.findIndex(
      (each, index) => each.role === "output" && this.accumulator >= 0 && sameLayout(this.layouts[index]!, this.layouts[this.accumulator]!),
    );
    this.base = typeof recording.options?.["base"] === "number" ? recording.options["base"] : Math.E;

    this.memory = tensors.map((each) => ({
      values: Float64Array.from(each.before, decode),
      reads: new Uint16Array(each.before.length),
      writes: new Uint16Array(each.before.length),
    }));
    const bytes = tensors.reduce((sum, each) => sum + each.before.length * 12, 0);
    const held = tensors.map(() => new Set<number>());
    for (const step of steps) for (const each of step.holds ?? []) for (const at of each.at) held[each.tensor]!.add(at);
    this.held = held;
    const stored = tensors.map(() => false);
    for (const step of steps) for (const each of step.stores ?? []) stored[each.tensor] = true;
    this.stored = stored;
    this.interval = Math.max(CHECKPOINT_STEPS, Math.ceil((this.length * bytes) / CHECKPOINT_BYTES));
    this.checkpoints.set(0, copyOf(this.memory));

    const names = new Map<string, number>();
    const programs: Program[] = [];
    const programOfFrame = frames.map((frame) => {
      const key = `${frame.launch}:${frame.program.join(",")}`;
      let index = names.get(key);
      if (index === undefined) {
        index = programs.length;
        names.set(key, index);
        programs.push({ launch: frame.launch, id: frame.program, label: labelOf(recording, frame) });
      }
      return index;
    });
    this.programs = programs;
    this.programOf = Uint32Array.from(steps, (step) => programOfFrame[step.frame]!);
    this.programSpans = spansOf(steps, this.programOf, (a, b) => this.programOf[a] === this.programOf[b]);
    this.phaseSpans = spansOf(
      steps,
      this.programOf,
      (a, b) => this.programOf[a] === this.programOf[b] && steps[a]!.phase === steps[b]!.phase,
    );

    this.counted = countedTensors(recording);
    this.reads = new Uint32Array(this.length + 1);
    this.writes = new Uint32Array(this.length + 1);
    const accesses: number[] = [];
    const exchanges: Exchange[] = [];
    this.settings = frames.map(() => []);
    this.firstTouch = new Int32Array(this.nRows).fill(-1);
    this.lastTouch = new Int32Array(this.nRows).fill(-1);
    steps.forEach((step, index) => {
      const position = index + 1;
      const elements = (list: Step["loads"]) =>
        (list ?? []).reduce((sum, each) => sum + (this.counted[each.tensor] ? each.at.length : 0), 0);
      this.reads[position] = this.reads[index]! + elements(step.loads);
      this.writes[position] = this.writes[index]! + elements(step.stores);
      if (step.loads?.length || step.stores?.length) accesses.push(position);
      if (step.message) exchanges.push({ ...step.message, position, program: this.programOf[index]! });
      if (step.set) this.settings[step.frame]!.push(index);
      for (const row of step.rows ?? []) {
        if (this.firstTouch[row] === -1) this.firstTouch[row] = position;
        this.lastTouch[row] = position;
      }
    });
    this.accesses = accesses;
    this.exchanges = exchanges;
    this.states = rowStates(this);
    this.sums = rowSums(this);
    this.layers = layersOf(recording, this.counted);
  }

  get position(): number {
    return this.at;
  }

  /** The step that has just run; null at position 0. */
  get step(): Step | null {
    return this.recording.steps[this.at - 1] ?? null;
  }

  /** The current step's program; at position 0 the first one. */
  get program(): number {
    return this.programOf[Math.max(0, this.at - 1)] ?? 0;
  }

  /** Moves to a position, clamped to 0..length. */
  seek(position: number): void {
    const target = Math.min(this.length, Math.max(0, Math.trunc(position) || 0));
    if (target < this.at || target - this.at > this.interval) {
      let nearest = target < this.at ? 0 : this.at;
      for (let each = target - (target % this.interval); each > nearest; each -= this.interval) {
        if (this.checkpoints.has(each)) nearest = each;
      }
      if (nearest !== this.at) this.restore(nearest);
    }
    while (this.at < target) this.advance();
  }

  /** A tensor's contents now. Do not change or keep them: the next seek writes to them. */
  tensor(index: number): Readonly<Memory> {
    return this.memory[index]!;
  }

  /** A frame's locals now: its arguments, then the others in the order of their first assignment. */
  locals(frame: number, position = this.at): Variable[] {
    const given = Object.entries(this.recording.frames[frame]?.arguments ?? {});
    const variables = new Map<string, Variable>(given.map(([name, value]) => [name, { name, value, position: 0 }]));
    for (const index of this.settings[frame] ?? []) {
      if (index >= position) break;
      for (const [name, value] of Object.entries(this.recording.steps[index]!.set!)) {
        variables.set(name, { name, value, position: index + 1 });
      }
    }
    return [...variables.values()];
  }

  /** The current frame and its callers, the innermost first, each with its current line. */
  stack(): { frame: number; line: number; source: Source; info: Frame }[] {
    const { frames, sources } = this.recording;
    const step = this.step;
    const stack: { frame: number; line: number; source: Source; info: Frame }[] = [];
    let frame: number | null = step ? step.frame : (this.recording.steps[0]?.frame ?? null);
    let line = step ? step.line : 0;
    while (frame !== null) {
      const info: Frame = frames[frame]!;
      stack.push({ frame, line, source: sources[info.source]!, info });
      line = info.call_line ?? 0;
      frame = info.parent;
    }
    return stack;
  }

  /** A row's newest state, by one program or by any; null before the first. */
  state(row: number, program?: number, position = this.at): RowState | null {
    const states = this.states[row] ?? [];
    for (let index = upperBound(states, position) - 1; index >= 0; index--) {
      if (program === undefined || states[index]!.program === program) return states[index]!;
    }
    return null;
  }

  /**
   * The program whose state of a row is shown: the current one, else the last that had a state. null while the current
   * program shares the row with others of its launch and has no state yet.
   */
  holder(row: number): number | null {
    const own = this.program;
    if (this.state(row, own)) return own;
    const last = this.state(row);
    if (!last) return null;
    const shared = this.programs[last.program]!.launch === this.programs[own]!.launch && this.step?.rows?.includes(row);
    return shared ? null : last.program;
  }

  /** A row's states up to a position, the oldest first. */
  history(row: number, position = this.at): readonly RowState[] {
    const states = this.states[row] ?? [];
    return states.slice(0, upperBound(states, position));
  }

  /** The rows of the accumulator that a row has had up to a position, the oldest first. */
  sumsOf(row: number, position = this.at): readonly Sum[] {
    return (this.sums[row] ?? []).filter((each) => each.position <= position);
  }

  /** Whether a tensor had its values before the run: an input, or scratch that no program writes. */
  given(index: number): boolean {
    const { role } = this.tensors[index]!;
    return role === "input" || (role === "scratch" && !this.stored[index]);
  }

  /** Whether an element has a value now. */
  present(index: number, at: number): boolean {
    return this.given(index) || this.memory[index]!.writes[at]! > 0;
  }

  /** An element now, as the recording has it: a double does not hold every integer. */
  cell(index: number, at: number): Cell {
    for (let position = this.at - 1; position >= 0; position--) {
      const { stores = [], holds = [] } = this.recording.steps[position]!;
      for (const { tensor, at: places, data } of [...holds, ...stores].reverse()) {
        const lane = tensor === index ? places.lastIndexOf(at) : -1;
        if (lane !== -1) return data[lane]!;
      }
    }
    return this.tensors[index]!.before[at]!;
  }

  /** Whether the kernel never computes an element of a matrix in registers. */
  never(index: number, at: number): boolean {
    const tensor = this.tensors[index]!;
    return tensor.role === "registers" && !this.held[index]!.has(at);
  }

  /** Whether the program of the current step still holds the rows of a tensor that lie along the matrix's axis. */
  holds(index: number, first: number, last: number): boolean {
    for (let at = this.at - 1; at >= 0 && this.programOf[at] === this.program; at--) {
      const load = this.recording.steps[at]!.loads?.find((each) => each.tensor === index);
      const cols = this.layouts[index]![1];
      if (load) return load.at[0] === first * cols && load.at[load.at.length - 1] === last * cols - 1;
    }
    return false;
  }

  /** How far a row has come. */
  progress(row: number): "waiting" | "running" | "done" {
    const first = this.firstTouch[row]!;
    if (first === -1 || this.at < first) return "waiting";
    return this.at < this.lastTouch[row]! ? "running" : "done";
  }

  /** Sum, minimum, maximum and entropy in nats of the values written so far to a row of the result. */
  written(row: number): { n: number; sum: number; min: number; max: number; entropy: number } {
    let [n, sum, min, max, entropy] = [0, 0, Infinity, -Infinity, 0];
    if (this.result >= 0) {
      const { values, writes } = this.memory[this.result]!;
      const format = formatNamed(this.tensors[this.result]!.dtype);
      for (let at = row * this.nCols; at < (row + 1) * this.nCols; at++) {
        if (!writes[at]) continue;
        // Of a narrow dtype a recording has the shortest decimals, which are not the numbers that it adds up to.
        const p = format ? roundTo(values[at]!, format) : values[at]!;
        n += 1;
        sum += p;
        min = Number.isNaN(p) ? NaN : Math.min(min, values[at]!);
        max = Number.isNaN(p) ? NaN : Math.max(max, values[at]!);
        entropy -= p === 0 ? 0 : p * Math.log(p);
      }
    }
    return { n, sum, min, max, entropy };
  }

  /** The position one unit forward (by: 1) or back (by: -1). */
  neighbour(unit: Unit, by: 1 | -1): number {
    if (unit === "line") return clamp(this.at + by, this.length);
    if (unit === "block") return adjacent(this.accesses, this.at, by, this.length);
    return adjacent(
      this.programSpans.map((each) => each.start),
      this.at,
      by,
      this.length,
    );
  }

  /** The position at which the next or previous phase begins. */
  phaseNeighbour(by: 1 | -1): number {
    return adjacent(
      this.phaseSpans.map((each) => each.start),
      this.at,
      by,
      this.length,
    );
  }

  /** Elements read and written after p steps. */
  moved(position = this.at): number {
    return this.reads[position]! + this.writes[position]!;
  }

  /** The last position at which no more than `elements` have been moved. */
  positionMoved(elements: number): number {
    let [low, high] = [0, this.length];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.moved(middle) <= elements) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  private advance(): void {
    const step = this.recording.steps[this.at]!;
    for (const load of step.loads ?? []) {
      const { reads } = this.memory[load.tensor]!;
      for (const at of load.at) reads[at]!++;
    }
    for (const store of [...(step.stores ?? []), ...(step.holds ?? [])]) {
      const { values, writes } = this.memory[store.tensor]!;
      store.at.forEach((at, lane) => {
        values[at] = decode(store.data[lane]);
        writes[at]!++;
      });
    }
    this.at += 1;
    if (this.at % this.interval === 0 && !this.checkpoints.has(this.at)) {
      this.checkpoints.set(this.at, copyOf(this.memory));
    }
  }

  private restore(position: number): void {
    this.checkpoints.get(position)!.forEach((saved, index) => {
      const memory = this.memory[index]!;
      memory.values.set(saved.values);
      memory.reads.set(saved.reads);
      memory.writes.set(saved.writes);
    });
    this.at = position;
  }
}

/** A power of a base, of which e and 2 are the usual. */
export function power(base: number, x: number): number {
  return base === Math.E ? Math.exp(x) : base ** x;
}

/** Whether a local changed in the current step. */
export function changed(variable: Variable, replay: Replay): boolean {
  return variable.position === replay.position;
}

/** A local's numbers: all of a tile's, or the number itself; null for anything else. */
export function numbersOf(value: Local): Float64Array | null {
  if (isTile(value)) return Float64Array.from(value.data, decode);
  return typeof value === "number" ? Float64Array.of(value) : null;
}

export function programLabel(id: readonly number[]): string {
  let last = id.length;
  while (last > 1 && id[last - 1] === 0) last--;
  return last === 1 ? String(id[0]) : `(${id.slice(0, last).join(", ")})`;
}

/** A program's label: its number, or the operation if the program is a whole launch. */
function labelOf(recording: Recording, frame: Frame): string {
  const { name, grid } = recording.launches[frame.launch]!;
  const alone = recording.launches.length > 1 && grid.every((extent) => extent === 1);
  return alone ? name.replace(/^aten\./, "") : programLabel(frame.program);
}

function copyOf(memory: readonly Memory[]): Memory[] {
  return memory.map(({ values, reads, writes }) => ({
    values: values.slice(),
    reads: reads.slice(),
    writes: writes.slice(),
  }));
}

function clamp(position: number, length: number): number {
  return Math.min(length, Math.max(0, position));
}

/** The nearest of sorted positions after or before one, else the end or the start. */
function adjacent(positions: readonly number[], from: number, by: 1 | -1, length: number): number {
  if (by === 1) return positions.find((each) => each > from) ?? length;
  for (let index = positions.length - 1; index >= 0; index--) {
    if (positions[index]! < from) return positions[index]!;
  }
  return 0;
}

/** How many of the states, which are sorted by position, are no later than a position. */
function upperBound(states: readonly RowState[], position: number): number {
  let [low, high] = [0, states.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (states[middle]!.position <= position) low = middle + 1;
    else high = middle;
  }
  return low;
}

function sameLayout(a: readonly [number, number], b: readonly [number, number]): boolean {
  return a[0] === b[0] && a[1] === b[1];
}

function spansOf(steps: readonly Step[], programOf: Uint32Array, same: (a: number, b: number) => boolean): Span[] {
  const spans: Span[] = [];
  steps.forEach((step, index) => {
    const last = spans[spans.length - 1];
    if (last && same(index - 1, index)) last.end = index + 1;
    else spans.push({ start: index, end: index + 1, program: programOf[index]!, phase: step.phase });
  });
  return spans;
}

function mainTensor(tensors: readonly Tensor[]): number {
  if (tensors[0]?.role === "registers") return 0;
  const matrix = tensors.findIndex((each) => each.role === "input" && each.shape.length >= 2);
  if (matrix !== -1) return matrix;
  const input = tensors.findIndex((each) => each.role === "input");
  return Math.max(0, input);
}

/** The tensors that the recording's traffic counts: inputs and outputs, and scratch if its totals include scratch. */
function countedTensors(recording: Recording): boolean[] {
  const plain = recording.tensors.map((each) => each.role === "input" || each.role === "output");
  const { traffic } = recording;
  if (!traffic) return plain;
  const total = (counted: readonly boolean[]) =>
    recording.steps.reduce(
      (sum, step) =>
        [...(step.loads ?? []), ...(step.stores ?? [])].reduce(
          (inner, each) => inner + (counted[each.tensor] ? each.at.length : 0),
          sum,
        ),
      0,
    );
  const wanted = traffic.reads + traffic.writes;
  const every = recording.tensors.map((each) => each.role !== "registers");
  return total(plain) !== wanted && total(every) === wanted ? every : plain;
}

function layersOf(recording: Recording, counted: readonly boolean[]): Layer[] {
  const layers = new Map<string, Layer>();
  const counts = recording.tensors.map((each) => ({
    read: new Uint16Array(each.before.length),
    write: new Uint16Array(each.before.length),
  }));
  recording.steps.forEach((step, index) => {
    for (const [kind, list] of [["read", step.loads], ["write", step.stores]] as const) {
      for (const { tensor, at } of list ?? []) {
        if (!counted[tensor]) continue;
        for (const place of at) {
          const k = ++counts[tensor]![kind][place]!;
          const key = `${kind} ${tensor} ${k}`;
          const layer = layers.get(key);
          if (layer) layer.size += 1;
          else {
            const floor = k === 1 && recording.tensors[tensor]!.role === (kind === "read" ? "input" : "output");
            layers.set(key, { tensor, kind, k, first: index + 1, size: 1, floor });
          }
        }
      }
    }
  });
  return [...layers.values()].sort((a, b) => a.first - b.first || Number(a.kind === "write") - Number(b.kind === "write"));
}

/**
 * Each row's states, with the columns that each sum covers.
 *
 * A recording does not name these columns, but they follow from it: for some k, a program adds up the columns that it has
 * read k times, or those that the row's programs have read together. The right k is the one whose terms add up to s.
 */
function rowStates(replay: Replay): RowState[][] {
  const { recording, main, nRows, nCols } = replay;
  const states: RowState[][] = Array.from({ length: nRows }, () => []);
  const values = replay.tensor(main)?.values.slice() ?? new Float64Array();
  const scale = typeof recording.options?.["scale"] === "number" ? recording.options["scale"] : 1;
  const entries = recording.steps.reduce((sum, step) => sum + (step.state?.length ?? 0), 0);
  const affordable = entries * nCols <= MAX_TERMS_WORK;
  const seenBy = new Map<string, Uint8Array>();
  const counts = (key: string) => {
    let found = seenBy.get(key);
    if (!found) seenBy.set(key, (found = new Uint8Array(nCols)));
    return found;
  };

  recording.steps.forEach((step, index) => {
    const program = replay.programOf[index]!;
    for (const load of step.loads ?? []) {
      if (load.tensor !== main) continue;
      for (const at of load.at) {
        const row = Math.floor(at / nCols);
        counts(`${row}:${program}`)[at % nCols]!++;
        counts(`${row}:any`)[at % nCols] = 1;
      }
    }
    for (const held of step.holds ?? []) {
      if (held.tensor !== main) continue;
      held.at.forEach((at, lane) => {
        values[at] = decode(held.data[lane]);
        counts(`${Math.floor(at / nCols)}:${program}`)[at % nCols] = 1;
      });
    }
    for (const entry of step.state ?? []) {
      if (!states[entry.row]) continue;
      const m = entry.m === undefined || entry.m === null ? null : decode(entry.m);
      const s = entry.s === undefined || entry.s === null ? null : decode(entry.s);
      const row = values.subarray(entry.row * nCols, (entry.row + 1) * nCols);
      const own = counts(`${entry.row}:${program}`);
      const terms = affordable ? termsOf(row, m, s, scale, replay.base, [own, counts(`${entry.row}:any`)]) : null;
      states[entry.row]!.push({ position: index + 1, row: entry.row, program, m, s, terms, torn: false });
    }
  });
  for (const list of states) {
    list.forEach((state, index) => {
      if (state.s === null || (state.terms && !replay.imagined)) return;
      const next = list.slice(index + 1).find((each) => each.program === state.program);
      if (replay.imagined) {
        // Scores in registers may be few, so that an old sum is nearly the new one: it is old if the next state has another.
        const last = list.slice(0, index).findLast((each) => each.program === state.program);
        state.torn = last?.m !== state.m && next !== undefined && next.m === state.m && next.s !== state.s;
        return;
      }
      const last = list.slice(0, index).findLast((each) => each.program === state.program);
      if (!last || !next) return;
      const [newM, newS] = [!Object.is(last.m, state.m), last.s !== null && !Object.is(last.s, state.s)];
      const half = newM !== newS && Object.is(next.s, state.s) === newS && Object.is(next.m, state.m) === newM;
      state.torn = half && next.terms !== null && next.position - state.position <= 4;
    });
  }
  return states;
}

/** Each row's accumulator after every step that holds it anew. */
function rowSums(replay: Replay): Sum[][] {
  const sums: Sum[][] = Array.from({ length: replay.nRows }, () => []);
  const cols = replay.layouts[replay.accumulator]?.[1] ?? 0;
  replay.recording.steps.forEach((step, index) => {
    for (const held of step.holds ?? []) {
      if (held.tensor !== replay.accumulator || cols === 0) continue;
      for (let lane = 0; lane + cols <= held.at.length; lane += cols) {
        const row = Math.floor(held.at[lane]! / cols);
        const position = index + 1;
        const m = replay.state(row, replay.programOf[index]!, position)?.m ?? null;
        sums[row]!.push({ position, values: held.data.slice(lane, lane + cols).map(decode), m });
      }
    }
  });
  return sums;
}

function termsOf(row: Float64Array, m: number | null, s: number | null, scale: number, base: number, seen: Uint8Array[]): Uint8Array | null {
  if (m === null || s === null || !Number.isFinite(m) || !(s > 0 && Number.isFinite(s))) return null;
  for (const counts of seen) {
    const most = counts.reduce((a, b) => Math.max(a, b), 0);
    for (let k = most; k >= 1; k--) {
      let sum = 0;
      for (let col = 0; col < row.length; col++) {
        if (counts[col]! >= k) sum += power(base, row[col]! * scale - m);
      }
      if (Math.abs(sum - s) <= 0.02 * s) return counts.map((count) => (count >= k ? 1 : 0));
    }
  }
  return null;
}
