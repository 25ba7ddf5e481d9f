/** A recording of schema 1: the file's fields, and how the page decodes them. Unknown fields are ignored. */

/** A number. Infinities, nan and integers past 2^53 are strings. */
export type Cell = number | boolean | string;

export interface Tile {
  shape: number[];
  dtype: string;
  data: Cell[];
  /** For a pointer: the tensor that its flat indices refer to. An index may also be "outside". */
  tensor?: number;
}

export type Local = Tile | number | boolean | string | null;

export interface Load {
  tensor: number;
  at: number[];
  masked?: number;
}

export interface Store extends Load {
  data: Cell[];
}

/** A tile of a matrix that no memory holds. */
export type Held = Pick<Store, "tensor" | "at" | "data">;

export interface StateEntry {
  row: number;
  m?: Cell | null;
  s?: Cell | null;
}

export interface Message {
  kind: "publish" | "collect";
  row: number;
  from?: number;
  to?: number;
  /** Whether the part had published nothing, and the program that collects has computed its state itself. */
  missing?: boolean;
  m?: Cell;
  s?: Cell;
  /** For a gradient: the one sum that its programs exchange. */
  d?: Cell;
}

export interface Step {
  frame: number;
  line: number;
  phase: number;
  rows?: number[];
  cols?: [number, number];
  set?: Record<string, Local>;
  loads?: Load[];
  stores?: Store[];
  holds?: Held[];
  state?: StateEntry[];
  message?: Message;
  note?: string;
  /** Intermediate results of the line, each with its expression in the source. */
  computed?: { text: string; value: Local }[];
}

export interface Source {
  name: string;
  file: string;
  first_line: number;
  lines: string[];
  /** The last line of each statement with several lines, by its first line. */
  ends?: Record<string, number>;
}

export interface Tensor {
  name: string;
  argument?: string;
  /** registers: no memory holds it; programs hold tiles of it. */
  role: "input" | "output" | "scratch" | "registers";
  /** Which of the matrix's axes its rows are, if it is not of the matrix's size. */
  along?: "rows" | "cols";
  dtype: string;
  shape: number[];
  before: Cell[];
  after: Cell[];
}

export interface Launch {
  name: string;
  source: number;
  grid: number[];
  constants?: Record<string, unknown>;
  arguments?: Record<string, unknown>;
}

export interface Frame {
  source: number;
  launch: number;
  program: number[];
  parent: number | null;
  call_line: number | null;
  /** The arguments of a helper function's call. */
  arguments?: Record<string, Local>;
}

export interface RowResult {
  row: number;
  max?: Cell | null;
  sum?: Cell | null;
  probability_sum?: Cell | null;
  status?: string;
  min_probability?: Cell | null;
  max_probability?: Cell | null;
  entropy?: Cell | null;
  gradient_sum?: Cell | null;
}

export interface Traffic {
  reads: number;
  writes: number;
  floor_reads: number;
  floor_writes: number;
  passes?: number;
  formula?: string;
}

export interface Recording {
  schema: number;
  title: string;
  kernel: string;
  operation: string;
  summary?: string;
  environment?: Record<string, string>;
  options?: Record<string, unknown>;
  sources: Source[];
  tensors: Tensor[];
  phases: string[];
  launches: Launch[];
  frames: Frame[];
  steps: Step[];
  rows?: RowResult[];
  traffic?: Traffic;
  /** Only the page sets it: the run is the page's own model of the recurrence, not a recording. */
  computed?: boolean;
}

export const SCHEMA = 1;

/** A recording's cell as a number. */
export function decode(cell: Cell | null | undefined): number {
  switch (cell) {
    case "inf":
      return Infinity;
    case "-inf":
      return -Infinity;
    case "nan":
    case null:
    case undefined:
      return NaN;
    default:
      return Number(cell);
  }
}

/** What the 64 bits of a message hold: two numbers in float32, of which the second has no sign, and a bit in its place. */
export function messageOf(cell: Cell): { m: number; s: number; tag: number } {
  const bits = BigInt.asUintN(64, BigInt(cell));
  const words = new DataView(new ArrayBuffer(8));
  words.setBigUint64(0, bits);
  const [m, tag] = [words.getFloat32(0), words.getUint8(4) >> 7];
  words.setUint8(4, words.getUint8(4) & 0x7f);
  return { m, s: words.getFloat32(4), tag };
}

/** The bits of a message, from the highest: 32 of m, one of the tag, 31 of s. */
export function bitsOf(cell: Cell): { m: string; tag: string; s: string } {
  const bits = BigInt.asUintN(64, BigInt(cell)).toString(2).padStart(64, "0");
  return { m: bits.slice(0, 32), tag: bits[32]!, s: bits.slice(33) };
}

/** A number as a recording's cell. */
export function encode(x: number): Cell {
  if (Number.isNaN(x)) return "nan";
  if (!Number.isFinite(x)) return x > 0 ? "inf" : "-inf";
  return x;
}

export function isTile(value: Local | undefined): value is Tile {
  return typeof value === "object" && value !== null && Array.isArray(value.data) && Array.isArray(value.shape);
}

export function sizeOf(shape: readonly number[]): number {
  return shape.reduce((product, extent) => product * extent, 1);
}

/** A tensor's rows and columns: the last dim is a row. A vector is a row, or a column if it has `nRows` elements. */
export function rowsAndCols(shape: readonly number[], nRows = 1): [number, number] {
  if (shape.length === 0) return [1, 1];
  if (shape.length === 1) return nRows > 1 && shape[0] === nRows ? [nRows, 1] : [1, shape[0]!];
  const cols = shape[shape.length - 1]!;
  return [cols === 0 ? 0 : sizeOf(shape) / cols, cols];
}

/** Throws an Error that says what is wrong, unless `value` can be replayed. */
export function checkRecording(value: unknown): Recording {
  const recording = value as Recording;
  if (typeof value !== "object" || value === null || Array.isArray(value) || !("schema" in value)) {
    throw new Error("this is not a recording: it has no field “schema”");
  }
  if (recording.schema !== SCHEMA) {
    throw new Error(`this recording has schema ${String(recording.schema)}; this page reads schema ${SCHEMA}`);
  }
  for (const name of ["sources", "tensors", "phases", "launches", "frames", "steps"] as const) {
    if (!Array.isArray(recording[name])) throw new Error(`this recording has no list “${name}”`);
  }
  if (recording.steps.length === 0) throw new Error("this recording has no steps");
  for (const tensor of recording.tensors) {
    const size = sizeOf(tensor.shape);
    for (const when of ["before", "after"] as const) {
      if (tensor[when]?.length !== size) {
        throw new Error(
          `tensor “${tensor.name}” has shape ${tensor.shape.join(" × ")}, but ${tensor[when]?.length ?? "no"} ` +
            `elements in “${when}” instead of ${size}`,
        );
      }
    }
  }
  recording.frames.forEach((frame, index) => {
    if (!recording.sources[frame.source]) throw new Error(`frame ${index} names source ${frame.source}, which is missing`);
    if (!recording.launches[frame.launch]) throw new Error(`frame ${index} names launch ${frame.launch}, which is missing`);
    if (frame.parent !== null && !(frame.parent < index)) throw new Error(`frame ${index} comes before its caller`);
  });
  recording.steps.forEach((step, index) => {
    if (!recording.frames[step.frame]) throw new Error(`step ${index} names frame ${step.frame}, which is missing`);
    for (const access of [...(step.loads ?? []), ...(step.stores ?? []), ...(step.holds ?? [])]) {
      const tensor = recording.tensors[access.tensor];
      if (!tensor) throw new Error(`step ${index} touches tensor ${access.tensor}, which is missing`);
      const size = tensor.before.length;
      const outside = access.at.find((at) => !(at >= 0 && at < size));
      if (outside !== undefined) throw new Error(`step ${index} touches element ${outside} of “${tensor.name}”, which has ${size} elements`);
    }
    for (const store of [...(step.stores ?? []), ...(step.holds ?? [])]) {
      if (store.data.length !== store.at.length) throw new Error(`step ${index} stores ${store.data.length} values at ${store.at.length} places`);
    }
  });
  return recording;
}

/** The recordings in the text of an element: as in that of a file, or packed, as base64 of gzip of it. */
export async function readEmbedded(text: string): Promise<Recording[]> {
  const value: unknown = JSON.parse(text);
  if (typeof value !== "string") return readRecordings(text);
  const bytes = Uint8Array.from(atob(value), (each) => each.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return readRecordings(await new Response(unpacked).text());
}

/** The recordings in the text of a file, which holds one, a list of them, or null for none. */
export function readRecordings(text: string): Recording[] {
  const value: unknown = JSON.parse(text);
  if (value === null) return [];
  return (Array.isArray(value) ? value : [value]).map(checkRecording);
}
