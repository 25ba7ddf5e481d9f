import { describe, expect, it } from "vitest";
import { BFLOAT16, count, exact, fitted, FLOAT16, FLOAT32, FLOAT64, roundByParts, roundTo, short } from "../src/numbers";

/** Doubles of every size, the same each run. */
function* doubles(n: number): Generator<number> {
  let state = 12345;
  const next = () => (state = (Math.imul(state, 1664525) + 1013904223) >>> 0);
  const view = new DataView(new ArrayBuffer(8));
  for (let i = 0; i < n; ) {
    view.setUint32(0, next());
    view.setUint32(4, next());
    const x = i % 2 ? view.getFloat64(0) : (next() / 2 ** 32 - 0.5) * 2 ** ((next() % 320) - 160);
    if (Number.isFinite(x)) {
      i++;
      yield x;
    }
  }
}

/** Every finite value of a 16-bit format, decoded from its bits. */
function values16(fractionBits: number, bias: number): number[] {
  const exponents = 2 ** (15 - fractionBits);
  const values: number[] = [];
  for (let exponent = 0; exponent < exponents - 1; exponent++) {
    for (let fraction = 0; fraction < 2 ** fractionBits; fraction++) {
      const mantissa = fraction / 2 ** fractionBits;
      values.push(exponent === 0 ? mantissa * 2 ** (1 - bias) : (1 + mantissa) * 2 ** (exponent - bias));
    }
  }
  return values;
}

describe("rounding", () => {
  it("to float32 is what Math.fround does, bit for bit", () => {
    for (const x of doubles(200_000)) expect(Object.is(roundByParts(x, FLOAT32), Math.fround(x)), String(x)).toBe(true);
  });

  for (const [format, values] of [
    [FLOAT16, values16(10, 15)],
    [BFLOAT16, values16(7, 127)],
  ] as const) {
    it(`to ${format.name} keeps every one of its values and sends others to the nearest, ties to even`, () => {
      expect(values.at(-1)).toBe(format.largest);
      for (let i = 0; i < values.length; i++) {
        const x = values[i]!;
        expect(roundTo(x, format)).toBe(x);
        expect(roundTo(-x, format)).toBe(-x);
        if (i + 1 === values.length) break;
        const above = values[i + 1]!;
        const middle = (x + above) / 2;
        expect(roundTo(middle, format)).toBe(i % 2 === 0 ? x : above);
        expect(roundTo(middle - (above - x) / 64, format)).toBe(x);
        expect(roundTo(middle + (above - x) / 64, format)).toBe(above);
      }
    });
  }

  it("overflows from halfway past the largest on", () => {
    expect(roundTo(65519, FLOAT16)).toBe(65504);
    expect(roundTo(65520, FLOAT16)).toBe(Infinity);
    expect(roundTo(-65520, FLOAT16)).toBe(-Infinity);
    expect(roundTo(Math.exp(11), FLOAT16)).toBeLessThan(65504);
    expect(roundTo(Math.exp(12), FLOAT16)).toBe(Infinity);
    expect(roundTo(3.4e38, BFLOAT16)).toBe(Infinity);
  });

  it("leaves infinities, nan, zeros and doubles alone", () => {
    for (const format of [FLOAT16, BFLOAT16, FLOAT32, FLOAT64]) {
      expect(roundTo(Infinity, format)).toBe(Infinity);
      expect(roundTo(NaN, format)).toBeNaN();
      expect(Object.is(roundTo(-0, format), -0)).toBe(true);
    }
    expect(roundTo(0.1, FLOAT64)).toBe(0.1);
    expect(Object.is(roundTo(-1e-30, FLOAT16), -0)).toBe(true);
  });
});

describe("numbers as text", () => {
  it.each([
    [0, "0"],
    [3, "3"],
    [0.5, "0.5"],
    [-1, "−1"],
    [1.863_27, "1.86"],
    [0.196_7, "0.197"],
    [0.009_99, "0.00999"],
    [0.000_12, "1.2e−4"],
    [999.9, "1000"],
    [1024, "1024"],
    [12_345.6, "12300"],
    [2_684_000, "2.68e6"],
    [-1e-9, "−1e−9"],
    [Infinity, "inf"],
    [-Infinity, "−inf"],
    [NaN, "nan"],
  ])("%d is %s", (x, text) => expect(short(x)).toBe(text));

  it.each([
    [0.00983, 5, "0.010"],
    [0.0036, 5, "0.004"],
    [0.00021, 5, "2e−4"],
    [-0.0123, 5, "−0.01"],
    [0.197, 5, "0.197"],
    [-2.5, 5, "−2.5"],
    [-12.34, 4, "−12"],
    [-Infinity, 4, "−inf"],
  ])("%d in %i characters is %s", (x, room, text) => expect(fitted(x, room)).toBe(text));

  it("are in full where asked", () => expect(exact(-0.1234567)).toBe("−0.1234567"));
  it("have their thousands apart", () => expect(count(1234567)).toBe("1\u202f234\u202f567"));
});
