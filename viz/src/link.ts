/** A link to a place in the page: the recording, the step and the view. */

import type { Matrix } from "./paste";
import { checkMatrix } from "./paste";
import { decode, encode, type Cell } from "./recording";

export const VIEWS = ["replay", "compare", "numerics"] as const;
export type View = (typeof VIEWS)[number];

export interface Place {
  view: View;
  kernel?: string;
  /** The second kernel of a comparison. */
  versus?: string;
  matrix?: string;
  block?: string;
  dtype?: string;
  step?: number;
  /** A comparison's clock: elements moved. */
  clock?: number;
  row?: number;
  /** A card of the story, the first is 1. */
  story?: number;
  /** 1: without the page's head, for a frame in another page. */
  bare?: number;
  /** Play at once, at so many steps a second, unless the reader asks for less motion. */
  play?: number;
  /** A pasted matrix, which no recording holds. */
  data?: Matrix;
}

/** Links longer than this do not carry their matrix. */
const MAX_DATA = 6000;

export function writeHash(place: Place): string {
  const fields = new URLSearchParams();
  if (place.view !== "replay") fields.set("view", place.view);
  for (const name of ["kernel", "versus", "matrix", "block", "dtype"] as const) {
    const value = place[name];
    if (value !== undefined) fields.set(name, value);
  }
  for (const name of ["step", "clock", "row", "story", "bare", "play"] as const) {
    const value = place[name];
    if (value !== undefined) fields.set(name, String(value));
  }
  if (place.data) {
    const text = place.data.map((row) => row.map((each) => String(encode(each))).join(",")).join(";");
    if (text.length <= MAX_DATA) fields.set("data", text);
  }
  return "#" + fields.toString().replaceAll("%2C", ",").replaceAll("%3B", ";");
}

/** The place that a hash names. Parts that cannot be read are left out. */
export function readHash(hash: string): Place {
  const fields = new URLSearchParams(hash.replace(/^#/, ""));
  const view = VIEWS.find((each) => each === fields.get("view")) ?? "replay";
  const place: Place = { view };
  for (const name of ["kernel", "versus", "matrix", "block", "dtype"] as const) {
    const value = fields.get(name);
    if (value) place[name] = value;
  }
  for (const name of ["step", "clock", "row", "story", "bare", "play"] as const) {
    const value = fields.get(name);
    if (value && /^\d{1,9}$/.test(value)) place[name] = Number(value);
  }
  const data = fields.get("data");
  if (data) {
    try {
      place.data = checkMatrix(data.split(";").map((row) => row.split(",").map(cell)));
    } catch {
      // A damaged link opens the page without its matrix.
    }
  }
  return place;
}

function cell(text: string): number {
  const value = decode(text === "inf" || text === "-inf" || text === "nan" ? text : (Number(text) as Cell));
  if (text.trim() === "" || (Number.isNaN(value) && text !== "nan")) throw new Error(`${text} is not a number`);
  return value;
}
