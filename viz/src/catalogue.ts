/** The page's recordings, and the choice of one by kernel, matrix, block and dtype. */

import { rowsAndCols, type Recording } from "./recording";

export type Origin = "embedded" | "preset" | "opened" | "recorded" | "computed";

export interface Entry {
  recording: Recording;
  origin: Origin;
  kernel: string;
  /** A name for the input. Recordings with the same name can be compared. */
  matrix: string;
  matrixLabel: string;
  /** Whether the label comes from the title and says more than the size. */
  titled: boolean;
  block: string;
  dtype: string;
}

export interface Choice {
  kernel?: string | undefined;
  matrix?: string | undefined;
  block?: string | undefined;
  dtype?: string | undefined;
}

export function entryOf(recording: Recording, origin: Origin): Entry {
  const { options = {}, tensors } = recording;
  const input = tensors.find((each) => each.role === "input" && each.shape.length >= 2) ?? tensors[0];
  const [rows, cols] = input ? rowsAndCols(input.shape) : [0, 0];
  const size = `${rows} × ${cols}`;
  // A title of the form "contents: kernel" names the matrix.
  const ending = `: ${recording.kernel}`;
  const about = recording.title.endsWith(ending) ? recording.title.slice(0, -ending.length) : "";
  return {
    recording,
    origin,
    kernel: recording.kernel,
    matrix: `${rows}x${cols}-${digest(input?.before ?? [])}`,
    matrixLabel: about || size,
    titled: about !== "",
    block: options["block"] === undefined || options["block"] === null ? "" : String(options["block"]),
    dtype: typeof options["dtype"] === "string" ? options["dtype"] : (input?.dtype ?? ""),
  };
}

const FIELDS = ["matrix", "kernel", "block", "dtype"] as const;

/** The entry that fits a choice best. `first` outweighs the other fields, and each field outweighs all later ones. */
export function choose(entries: readonly Entry[], choice: Choice, first?: keyof Choice): Entry | undefined {
  const fields: readonly (keyof Choice)[] = first ? [first, ...FIELDS.filter((each) => each !== first)] : FIELDS;
  const score = (entry: Entry) =>
    fields.reduce(
      (sum, field) => sum * 2 + (choice[field] !== undefined && entry[field] === choice[field] ? 1 : 0),
      0,
    );
  return entries.reduce<Entry | undefined>((best, each) => (!best || score(each) > score(best) ? each : best), undefined);
}

/** How the titles of recordings on the worked example begin. */
export const WORKED = "3 x 8 worked example";

/** The recording that a kernel opens with: on the matrix that is shown, else on the worked example, else its first. */
export function openingOf(entries: readonly Entry[], kernel: string, shown: Choice): Entry {
  const own = entries.filter((each) => each.kernel === kernel);
  const same = own.filter((each) => each.matrix === shown.matrix);
  if (same.length) return choose(same, shown)!;
  return own.find((each) => each.recording.title.startsWith(WORKED)) ?? own[0]!;
}

/** A field's values among the entries that agree with `within`, in the order of the entries. */
export function valuesOf(entries: readonly Entry[], field: keyof Choice, within: Choice = {}): string[] {
  const fits = entries.filter((entry) =>
    (Object.keys(within) as (keyof Choice)[]).every((name) => within[name] === undefined || entry[name] === within[name]),
  );
  return [...new Set(fits.map((entry) => entry[field]))];
}

export function choiceOf(entry: Entry): Choice {
  return { kernel: entry.kernel, matrix: entry.matrix, block: entry.block, dtype: entry.dtype };
}

export function sameChoice(a: Entry, b: Entry): boolean {
  return FIELDS.every((each) => a[each] === b[each]);
}

/** A name for every matrix: its title's words, else its size. If two are alike, the later one adds its operation. */
export function matrixNames(entries: readonly Entry[]): Map<string, string> {
  const names = new Map<string, string>();
  const taken = new Set<string>();
  for (const { matrix } of entries) {
    if (names.has(matrix)) continue;
    const same = entries.filter((each) => each.matrix === matrix);
    const { matrixLabel, recording } = same.find((each) => each.titled) ?? same[0]!;
    names.set(matrix, taken.has(matrixLabel) ? `${matrixLabel}, ${recording.operation.replaceAll("_", " ")}` : matrixLabel);
    taken.add(matrixLabel);
  }
  return names;
}

/** A short digest of the values, coarse enough that rounding to a narrower dtype does not change it. */
function digest(values: readonly unknown[]): string {
  let hash = 2166136261;
  for (const value of values) {
    const text = typeof value === "number" ? value.toPrecision(2) : String(value);
    for (let i = 0; i < text.length; i++) hash = Math.imul(hash ^ text.charCodeAt(i), 16777619);
  }
  return (hash >>> 0).toString(36);
}
