/** A row's softmax in other arithmetic: in each format, with the maximum subtracted and without. */

import { exact, roundTo, short, FLOAT64, type Format } from "./numbers";

export interface Trial {
  format: Format;
  subtract: boolean;
  /** The largest exponential, and the sum, as the format holds them. */
  largest: number;
  s: number;
  y: Float64Array;
  /** The sum of the probabilities, added in float64. */
  sum: number;
  /** The largest |y - truth|, divided by the largest true probability; nan if an element is not finite. */
  error: number;
  /** How many terms above zero did not change the sum. */
  absorbed: number;
  status: "ok" | "inexact" | "nan";
  /** A sentence that says what went wrong, or how good the result is. */
  verdict: string;
}

/** Softmax with every operation rounded to `format` and terms added from left to right, compared with `truth`. */
export function trial(x: ArrayLike<number>, format: Format, subtract: boolean, truth: Float64Array): Trial {
  const round = (value: number) => roundTo(value, format);
  const n = x.length;
  const m = subtract ? maximumOf(x) : 0;
  const terms = new Float64Array(n);
  let [s, largest, absorbed, overflow, full] = [0, 0, 0, -1, -1];
  for (let i = 0; i < n; i++) {
    const term = round(Math.exp(round(x[i]! - m)));
    terms[i] = term;
    if (!(term <= largest)) largest = Number.isNaN(largest) ? NaN : term;
    if (term === Infinity && overflow === -1) overflow = i;
    const next = round(s + term);
    if (next === s && term > 0 && Number.isFinite(s)) absorbed += 1;
    if (next === Infinity && term < Infinity && full === -1) full = i;
    s = next;
  }
  const y = terms.map((term) => round(term / s));
  const top = maximumOf(truth);
  let [sum, error] = [0, 0];
  for (let i = 0; i < n; i++) {
    sum += y[i]!;
    const off = Math.abs(y[i]! - truth[i]!);
    error = Number.isNaN(off) || Number.isNaN(error) ? NaN : Math.max(error, off / top);
  }
  const bad = y.some((each) => !Number.isFinite(each));
  // Terms, sum and quotient are each rounded once, so an error of that size is due to the format, not the method.
  const status = bad || Number.isNaN(error) ? "nan" : error > 2 ** (2 - format.precision) ? "inexact" : "ok";
  return {
    format,
    subtract,
    largest,
    s,
    y,
    sum,
    error,
    absorbed,
    status,
    verdict: verdictOf(),
  };

  function verdictOf(): string {
    const wrong = y.reduce((many, each) => many + (Number.isFinite(each) ? 0 : 1), 0);
    const all = wrong === n ? "every probability is nan" : `${wrong} of ${n} probabilities are nan`;
    if (truth.some(Number.isNaN)) return "The row has no softmax: the true result is nan.";
    if (overflow !== -1) {
      return `Overflow: exp(${exact(x[overflow]!)}) is above ${short(format.largest, 5)}, so it becomes inf. inf / inf is nan, so ${all}.`;
    }
    if (full !== -1) return `The sum passes ${short(format.largest, 5)} at column ${full} and becomes inf, so every probability is 0.`;
    if (s === 0) return `Underflow: every exponential is 0. 0 / 0 is nan, so ${all}.`;
    if (absorbed > 0 && status !== "ok") {
      return `${absorbed} of ${n} terms were too small to change the sum. The sum ends at ${short(s, 6)}, so the probabilities add up to ${short(sum, 3)}.`;
    }
    if (status === "inexact") return `Off by up to ${percent(error)}: later operations cannot undo the terms’ rounding.`;
    return error === 0 ? "Equal to float64, bit for bit." : `Off by at most ${percent(error)} of the largest probability.`;
  }
}

/** All formats, with the maximum subtracted and without. The truth is float64 with the maximum subtracted. */
export function trials(x: ArrayLike<number>, formats: readonly Format[]): Trial[] {
  const truth = softmax64(x);
  return [true, false].flatMap((subtract) => formats.map((format) => trial(x, format, subtract, truth)));
}

export function softmax64(x: ArrayLike<number>): Float64Array {
  const m = maximumOf(x);
  const terms = Float64Array.from(x, (each) => Math.exp(each - m));
  const s = terms.reduce((sum, each) => sum + each, 0);
  return terms.map((each) => roundTo(each / s, FLOAT64));
}

function percent(x: number): string {
  return `${short(x * 100, 2)} %`;
}

function maximumOf(x: ArrayLike<number>): number {
  let m = -Infinity;
  for (let i = 0; i < x.length; i++) if (x[i]! > m) m = x[i]!;
  return m;
}
