import { describe, expect, it } from "vitest";
import { readHash, writeHash, type Place } from "../src/link";

describe("a link", () => {
  it.each<Place>([
    { view: "replay", kernel: "online", matrix: "3 × 8", block: "4", dtype: "float32", step: 17 },
    { view: "compare", kernel: "naive", versus: "row", clock: 120 },
    { view: "replay", kernel: "online", step: 19, story: 2 },
    { view: "replay", kernel: "split", bare: 1, play: 10 },
    { view: "numerics", kernel: "three pass & more #1", row: 2 },
    { view: "replay", data: [[1, -2.5, Infinity], [-Infinity, NaN, 1e-7]], step: 0 },
  ])("says again what it was made of: %j", (place) => expect(readHash(writeHash(place))).toEqual(place));

  it.each(["", "#", "#step=-3", "#step=1e9", "#view=nowhere", "#data=1,x", "#data=1,2;3", "#%%%"])("that is damaged opens the page: %s", (hash) =>
    expect(readHash(hash)).toEqual({ view: "replay" }),
  );

  it("does not carry a matrix that would make it too long", () => {
    const data = Array.from({ length: 40 }, () => Array.from({ length: 100 }, (_, i) => i / 7));
    expect(writeHash({ view: "replay", data })).toBe("#");
  });
});
