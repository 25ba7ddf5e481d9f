/** Binary floating point formats: how a double rounds to each of them, and how numbers are printed. */

export interface Format {
  readonly name: string;
  /** Significant bits, including the hidden one. */
  readonly precision: number;
  /** The smallest normal number's exponent. */
  readonly minExponent: number;
  readonly largest: number;
}

const format = (name: string, precision: number, minExponent: number): Format => ({
  name,
  precision,
  minExponent,
  largest: (2 - 2 ** (1 - precision)) * 2 ** (1 - minExponent),
});

export const FLOAT16 = format("float16", 11, -14);
export const BFLOAT16 = format("bfloat16", 8, -126);
export const FLOAT32 = format("float32", 24, -126);
export const FLOAT64: Format = { name: "float64", precision: 53, minExponent: -1022, largest: Number.MAX_VALUE };
export const FORMATS: readonly Format[] = [FLOAT16, BFLOAT16, FLOAT32, FLOAT64];

const words = new DataView(new ArrayBuffer(8));

/** floor(log2 |x|) of a finite, non-zero double. */
function exponentOf(x: number): number {
  words.setFloat64(0, x);
  const biased = (words.getUint16(0) >> 4) & 0x7ff;
  return biased === 0 ? Math.floor(Math.log2(Math.abs(x))) : biased - 1023;
}

/** The integer nearest to x, ties to even; exact where |x| < 2^52. */
function nearestEven(x: number): number {
  const floor = Math.floor(x);
  const rest = x - floor;
  if (rest !== 0.5) return rest < 0.5 ? floor : floor + 1;
  return floor % 2 === 0 ? floor : floor + 1;
}

/** x rounded to a format, to nearest with ties to even, including subnormals and overflow. */
export function roundTo(x: number, to: Format): number {
  if (to.precision === 53 || x === 0 || !Number.isFinite(x)) return x;
  if (to.precision === 24) return Math.fround(x);
  return roundByParts(x, to);
}

/** roundTo for any format narrower than a double. It covers float32 too, so that tests can compare it with Math.fround. */
export function roundByParts(x: number, to: Format): number {
  const unit = 2 ** (Math.max(exponentOf(x), to.minExponent) - to.precision + 1);
  const rounded = nearestEven(Math.abs(x) / unit) * unit;
  return Math.sign(x) * (rounded > to.largest ? Infinity : rounded);
}

export function formatNamed(name: string): Format | undefined {
  return FORMATS.find((each) => each.name === name);
}

const MINUS = "\u2212";

/** A number to read: at most `digits` significant digits, no trailing zeros, powers of ten if they are shorter. */
export function short(x: number, digits = 3): string {
  if (Number.isNaN(x)) return "nan";
  if (!Number.isFinite(x)) return x > 0 ? "inf" : `${MINUS}inf`;
  if (x === 0) return "0";
  const size = Math.abs(x);
  const sign = x < 0 ? MINUS : "";
  if (Number.isInteger(x) && size < 10 ** Math.max(digits, 5)) return sign + String(size);
  const rounded = Number(size.toPrecision(digits));
  if (rounded >= 1e5 || rounded < 1e-3) {
    const [mantissa, power] = size.toExponential(Math.min(digits - 1, 2)).split("e") as [string, string];
    return `${sign}${trimmed(mantissa)}e${power.replace("+", "").replace("-", MINUS)}`;
  }
  return sign + trimmed(rounded.toFixed(Math.max(0, digits - 1 - exponent10(rounded))));
}

/** A number in at most `room` characters if possible: it first gives up digits, then the fixed point. */
export function fitted(x: number, room: number): string {
  const plain = short(x, 3);
  if (plain.length <= room) return plain;
  const size = Math.abs(x);
  const places = room - 2 - (x < 0 ? 1 : 0);
  if (size < 1 && places > 0 && Number(size.toFixed(places)) > 0) return (x < 0 ? MINUS : "") + size.toFixed(places);
  return [2, 1].map((digits) => short(x, digits)).find((each) => each.length <= room) ?? short(x, 1);
}

/** A number in full, as the recording holds it. */
export function exact(x: number): string {
  if (Number.isNaN(x)) return "nan";
  if (!Number.isFinite(x)) return x > 0 ? "inf" : `${MINUS}inf`;
  return String(x).replaceAll("-", MINUS);
}

/** A whole number with its thousands separated. */
export function count(n: number): string {
  return String(n).replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

function exponent10(x: number): number {
  return Math.floor(Math.log10(x) + 1e-12);
}

function trimmed(text: string): string {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}
