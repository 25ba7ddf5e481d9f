/** The recordings at hand, and the choice of one by kernel, matrix, block and dtype. */

import { rowsAndCols, type Recording } from "./recording";

export type Origin = "embedded" | "preset" | "opened" | "recorded" | "computed";

export interface Entry {
  recording: Recording;
  origin: Origin;
  kernel: string;
  /** Names the input: recordings of one matrix can be compared. */
  matrix: string;
  matrixLabel: string;
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
  const named = options["matrix"] ?? options["preset"];
  const size = `${rows} × ${cols}`;
  return {
    recording,
    origin,
    kernel: recording.kernel,
    matrix: typeof named === "string" ? named : `${rows}x${cols}-${digest(input?.before ?? [])}`,
    matrixLabel: typeof named === "string" ? (named.includes(String(cols)) ? named : `${named}, ${size}`) : size,
    block: options["block"] === undefined || options["block"] === null ? "" : String(options["block"]),
    dtype: typeof options["dtype"] === "string" ? options["dtype"] : (input?.dtype ?? ""),
  };
}

/** The entry that fits a choice best: each field outweighs all that come after it. */
export function choose(entries: readonly Entry[], choice: Choice): Entry | undefined {
  const score = (entry: Entry) =>
    (["matrix", "kernel", "block", "dtype"] as const).reduce(
      (sum, field) => sum * 2 + (choice[field] !== undefined && entry[field] === choice[field] ? 1 : 0),
      0,
    );
  return entries.reduce<Entry | undefined>((best, each) => (!best || score(each) > score(best) ? each : best), undefined);
}

/** The values of a field, in the order they come, among entries that agree with `within`. */
export function valuesOf(entries: readonly Entry[], field: keyof Choice, within: Choice = {}): string[] {
  const fits = entries.filter((entry) =>
    (Object.keys(within) as (keyof Choice)[]).every((name) => within[name] === undefined || entry[name] === within[name]),
  );
  return [...new Set(fits.map((entry) => entry[field]))];
}

/** A short name of the values, coarse enough that a matrix rounded to a narrower dtype keeps it. */
function digest(values: readonly unknown[]): string {
  let hash = 2166136261;
  for (const value of values) {
    const text = typeof value === "number" ? value.toPrecision(2) : String(value);
    for (let i = 0; i < text.length; i++) hash = Math.imul(hash ^ text.charCodeAt(i), 16777619);
  }
  return (hash >>> 0).toString(36);
}
