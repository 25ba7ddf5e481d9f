import { describe, expect, it } from "vitest";
import { MAX_COLS, MAX_ROWS, parseMatrix } from "../src/paste";

describe("a pasted matrix", () => {
  it.each([
    ["commas", "1,2,3\n4,5,6"],
    ["commas and spaces", " 1, 2, 3 \r\n 4, 5, 6 \r\n"],
    ["tabs", "1\t2\t3\n4\t5\t6"],
    ["spaces", "1  2 3\n\n4 5   6"],
    ["semicolons", "1;2;3\n4;5;6"],
    ["trailing commas", "1,2,3,\n4,5,6,"],
    ["JSON", "[[1, 2, 3], [4, 5, 6]]"],
    ["what torch prints", "tensor([[1., 2., 3.],\n        [4., 5., 6.]])"],
    ["what torch prints of a GPU", "tensor([[1., 2., 3.],\n        [4., 5., 6.]], device='cuda:0', dtype=torch.float16)"],
    ["what NumPy prints", "[[1. 2. 3.]\n [4. 5. 6.]]"],
    ["NumPy's repr", "array([[1., 2., 3.],\n       [4., 5., 6.]], dtype=float32)"],
    ["JSON over lines", "[\n [1.0, 2e0, 3],\n [4, 5, 6]\n]"],
  ])("is read with %s", (_, text) =>
    expect(parseMatrix(text)).toEqual([
      [1, 2, 3],
      [4, 5, 6],
    ]),
  );

  it("may be one row", () => {
    expect(parseMatrix("1 2 3")).toEqual([[1, 2, 3]]);
    expect(parseMatrix("[1, 2, 3]")).toEqual([[1, 2, 3]]);
  });

  it("may hold infinities and nan, as Python, C and JSON writers spell them", () => {
    const wanted = [[Infinity, -Infinity, NaN, -0.5, 1e-3]];
    expect(parseMatrix("inf -inf nan -.5 1e-3")).toEqual(wanted);
    expect(parseMatrix("Infinity, -Infinity, NaN, −0.5, +0.001")).toEqual(wanted);
    expect(parseMatrix("[[Infinity, -inf, NaN, -0.5, 0.001]]")).toEqual(wanted);
    expect(parseMatrix('[["inf", "-inf", "nan", -0.5, 0.001]]')).toEqual(wanted);
  });

  it.each([
    ["", "Nothing to read"],
    ["1 2\n3", "Row 2 has 1 number, but the first row has 2"],
    ["1,two,3", "“two” at line 1, number 2"],
    ["1,,3", "field at line 1, number 2 is empty"],
    ["0x10", "“0x10”"],
    ["1e400", "“1e400” at line 1, number 1 is too large for any float"],
    ["[[1, 1e400]]", "“1e400” at row 1, number 2 is too large"],
    ["tensor([[1., ..., 3.]])", "“...” at row 1, number 2"],
    ["[[1, 2], 3]", "Row 2 is not a list"],
    ["[[1, null]]", "“null” at row 1, number 2"],
    ["[1, 2", "starts like JSON"],
    ["[]", "empty"],
    ["1 2 3 -", "“-”"],
    [Array(MAX_ROWS + 1).fill("1").join("\n"), "257 rows are too many"],
    [Array(MAX_COLS + 1).fill("1").join(" "), "1025 columns are too many"],
    [Array(10).fill(Array(500).fill("1").join(" ")).join("\n"), "10 × 500 is too large: this page replays at most 4096"],
  ])("is refused with a reason: %j", (text, reason) => expect(() => parseMatrix(text)).toThrow(reason));
});
