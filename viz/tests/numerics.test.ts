import { describe, expect, it } from "vitest";
import { BFLOAT16, FLOAT16, FLOAT32, FLOAT64, FORMATS } from "../src/numbers";
import { softmax64, trial, trials } from "../src/numerics";

const run = (x: number[], format: (typeof FORMATS)[number], subtract: boolean) => trial(x, format, subtract, softmax64(x));

describe("softmax in other arithmetic", () => {
  it("survives large logits in every format, once the maximum is subtracted", () => {
    for (const format of FORMATS) expect(run([1000, 999, 998], format, true).status).toBe("ok");
  });

  it.each([
    [FLOAT16, 11, 12],
    [BFLOAT16, 88, 89],
    [FLOAT32, 88, 89],
    [FLOAT64, 709, 710],
  ])("overflows without it where exp leaves $name", (format, last, first) => {
    expect(run([last, 0], format, false).status).toBe("ok");
    const over = run([first, 0], format, false);
    expect(over.status).toBe("nan");
    expect(over.y[0]).toBeNaN();
    expect(over.verdict).toContain("Overflow");
    expect(over.verdict).toContain("1 of 2 probabilities are nan");
  });

  it("underflows without it to 0 / 0", () => {
    const under = run([-200, -201], FLOAT32, false);
    expect(under.s).toBe(0);
    expect(under.verdict).toContain("Underflow");
    expect(run([-200, -201], FLOAT64, false).status).toBe("ok");
  });

  it("stops adding in bfloat16 at 256 terms of one", () => {
    const equal = Array<number>(1000).fill(0);
    const stopped = run(equal, BFLOAT16, true);
    expect(stopped.s).toBe(256);
    expect(stopped.absorbed).toBe(744);
    expect(stopped.verdict).toContain("744 of 1000 terms");
    expect(run(equal, FLOAT16, true).s).toBe(1000);
    expect(run(Array<number>(4096).fill(0), FLOAT16, true).s).toBe(2048);
  });

  it("has no result to hold against where the row has none", () => {
    for (const each of trials([1, NaN], FORMATS)) expect(each.verdict).toContain("no softmax");
    for (const each of trials([-Infinity, -Infinity], FORMATS)) expect(each.status).toBe("nan");
  });

  it("in float64 is torch's, to the last bits", () => {
    const y = softmax64([2, -1, 3, 0.5, -0.5, 1.5, -2, 1]);
    expect(y[2]).toBeCloseTo(0.5365725567570512, 15);
    expect(y.reduce((a, b) => a + b, 0)).toBeCloseTo(1, 15);
  });
});
