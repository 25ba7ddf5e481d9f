import { describe, expect, it } from "vitest";
import { choose, choiceOf, entryOf, matrixNames, openingOf, valuesOf, type Entry } from "../src/catalogue";
import { compute } from "../src/recurrence";
import { tokens } from "../src/python";
import type { Recording } from "../src/recording";

const A = [[1, 2, 3, 4]];
const B = [[5, 6, 7, 8]];

function entry(kernel: "online" | "three_pass", matrix: number[][], block: number, more: Partial<Recording> = {}): Entry {
  return entryOf({ ...compute(kernel, matrix, block), ...more }, "preset");
}

const entries = [entry("online", A, 2), entry("online", A, 4), entry("three_pass", A, 2), entry("three_pass", B, 4)];

describe("a choice among recordings", () => {
  it("is the one that fits in all", () => {
    for (const each of entries) expect(choose(entries, choiceOf(each))).toBe(each);
  });

  it("keeps the matrix before the kernel, and the kernel before the block", () => {
    expect(choose(entries, { ...choiceOf(entries[3]!), kernel: "online" })).toBe(entries[3]);
    expect(choose(entries, { ...choiceOf(entries[1]!), kernel: "three_pass" })).toBe(entries[2]);
  });

  it("lets the field that was picked outweigh the rest", () => {
    expect(choose(entries, { ...choiceOf(entries[3]!), kernel: "online" }, "kernel")?.kernel).toBe("online");
  });

  it("offers what there is, once each", () => {
    expect(valuesOf(entries, "kernel")).toEqual(["online", "three_pass"]);
    expect(valuesOf(entries, "block", { kernel: "online" })).toEqual(["2", "4"]);
  });
});

describe("a kernel that is chosen", () => {
  const hidden = entry("three_pass", B, 2, { title: "Tiles of -inf: three_pass" });
  const worked = entry("three_pass", [[7, 8]], 4, { title: "3 x 8 worked example: three_pass" });

  it("opens its worked example, and not what is like the old one in block", () => {
    expect(openingOf([entries[0]!, hidden, worked], "three_pass", choiceOf(entries[0]!))).toBe(worked);
  });

  it("stays on the matrix that is shown, if it has been recorded there", () => {
    expect(openingOf([entries[3]!, hidden, worked, entries[2]!], "three_pass", choiceOf(entries[0]!))).toBe(entries[2]);
    expect(openingOf([entry("online", B, 2), worked, hidden], "three_pass", choiceOf(entry("online", B, 4)))).toBe(hidden);
  });

  it("opens its first recording where it has no worked example", () => {
    expect(openingOf([entries[0]!, hidden, entries[3]!], "three_pass", { matrix: "none" })).toBe(hidden);
  });
});

describe("matrices", () => {
  it("are one where their values are, whatever the kernel, block or dtype", () => {
    expect(new Set(entries.map((each) => each.matrix)).size).toBe(2);
    const narrow = compute("online", A, 2);
    narrow.tensors[0]!.before = narrow.tensors[0]!.before.map((each) => Number(each) * (1 + 2 ** -12));
    expect(entryOf(narrow, "preset").matrix).toBe(entries[0]!.matrix);
  });

  it("are called what their titles say is in them, else by their size; no two alike", () => {
    const named = [
      entry("three_pass", A, 2, { title: "three passes, 1 x 4" }),
      entry("online", A, 2, { title: "A small one: online" }),
      entry("online", B, 2, { title: "A small one: online", operation: "softmax_backward" }),
      entry("online", [[1], [2]], 2),
    ];
    expect([...matrixNames(named).values()]).toEqual(["A small one", "A small one, softmax backward", "2 × 1"]);
  });
});

describe("a line of Python", () => {
  it.each([
    'x = tl.load(x_ptr + cols, mask=cols < n_cols, other=float("-inf"))  # a tile',
    "@triton.jit",
    "    for start in range(0, n_cols, BLOCK):",
    '    """Says # what "it" does',
    "x = 'it\\'s' + \"unclosed",
    "é = 3.5e-2 @ y",
    "",
  ])("is cut into words and loses nothing: %s", (line) => {
    expect(tokens(line).map((each) => each.text).join("")).toBe(line);
  });

  it("knows keywords, strings, comments and numbers", () => {
    expect(tokens('for i in f("a", 2):  # b').filter((each) => each.kind !== "text").map((each) => [each.kind, each.text])).toEqual([
      ["keyword", "for"],
      ["keyword", "in"],
      ["string", '"a"'],
      ["number", "2"],
      ["comment", "# b"],
    ]);
  });
});
