/** What the cards of the story say, against the recordings: each number is worked out here, from the steps alone. */

import { readFileSync } from "node:fs";
import { describe, expect, it } from "vitest";
import { entryOf } from "../src/catalogue";
import { readHash } from "../src/link";
import { count, short } from "../src/numbers";
import { bitsOf, decode, messageOf, readRecordings, rowsAndCols, type Recording, type Step, type Tile } from "../src/recording";
import { hrefOf } from "../src/views/story";
import { storyOf, type Card } from "../src/story";

const presets = readRecordings(readFileSync(new URL("../../src/fused_softmax/trace/presets.json", import.meta.url), "utf8"));
const entries = presets.map((each) => entryOf(each, "preset"));
const story = storyOf(entries);

const WORDS = ["no", "one", "two", "three", "four", "five"];
const TIMES = ["never", "once", "twice", "three times"];
const ORDER = ["first", "second", "third"];
const NUMBER = /\d|\b(?:one|two|three|four|five|second|third|(?<!at )once|twice|both|half)\b/i;

/** A stop's recording, and the steps that have run there. */
function at(card: Card, stop = 0) {
  const { entry, position } = card.stops[stop]!;
  const recording = entry.recording;
  return { recording, position, steps: recording.steps.slice(0, position), step: recording.steps[position - 1]! };
}

type Steps = readonly Step[];
const index = (recording: Recording, name: string) => recording.tensors.findIndex((each) => each.name === name);

/** How often each element of a tensor is read, or written. */
function touched(recording: Recording, name: string, kind: "loads" | "stores", steps: Steps = recording.steps): number[] {
  const counts = recording.tensors[index(recording, name)]!.before.map(() => 0);
  for (const step of steps) for (const each of step[kind] ?? []) if (each.tensor === index(recording, name)) for (const place of each.at) counts[place]! += 1;
  return counts;
}

const moved = (recording: Recording) =>
  recording.tensors.reduce((sum, each) => sum + [...touched(recording, each.name, "loads"), ...touched(recording, each.name, "stores")].reduce((a, b) => a + b), 0);
const same = (counts: readonly number[]) => {
  expect(new Set(counts).size, counts.join()).toBe(1);
  return counts[0]!;
};
/** The states that a row has had, the newest last. */
const states = (steps: Steps, row: number) => steps.flatMap((step) => (step.state ?? []).filter((each) => each.row === row));
const values = (recording: Recording, name: string, row: number) => {
  const tensor = recording.tensors[index(recording, name)]!;
  const cols = rowsAndCols(tensor.shape, 3)[1];
  return tensor.before.slice(row * cols, (row + 1) * cols).map(decode);
};
const stateOf = (x: readonly number[]) => {
  const m = Math.max(...x);
  return { m, s: x.reduce((sum, each) => sum + Math.exp(each - m), 0) };
};
const local = (step: Step, name: string) => decode((step.set![name] as { data: number[] }).data[0]);
const program = (recording: Recording, step: Step) => recording.frames[step.frame]!.program[0]!;

/** Of each card what its text says with numbers in it. */
const CLAIMS: Record<string, (card: Card) => string[]> = {
  "Three reads, two, one": (card) => {
    const reads = card.stops.map((_, stop) => same(touched(at(card, stop).recording, "x", "loads")));
    expect(card.stops.map((each) => each.name)).toEqual(reads.map((n) => `${WORDS[n]} ${n === 1 ? "read" : "reads"}`));
    return [
      `reads the row ${TIMES[reads[0]!]}: for the maximum, for the sum, for the output`,
      `One pass can find both, so ${WORDS[reads[1]!]} reads are enough`,
      `in registers reads it ${TIMES[reads[2]!]}`,
      "each is one read from memory",
    ];
  },
  "The tile whose maximum rises": (card) => {
    const { recording, steps, step } = at(card);
    const block = Number(recording.options!["block"]);
    const [m, before] = states(steps, 0).map((each) => decode(each.m)).filter((each, n, all) => each > -Infinity && each !== all[n - 1]).reverse();
    expect(stateOf(values(recording, "x", 0).slice(0, step.cols![1])).m).toBe(m);
    return [`the ${ORDER[step.cols![0] / block]} tile raises m from ${before} to ${m}`, `to the power of ${short(before! - m!)}, which is ${short(Math.exp(before! - m!), 4)}`];
  },
  "The row that does not fit": (card) => {
    const { recording, step } = at(card);
    const [rows, cols] = rowsAndCols(recording.tensors[0]!.shape);
    const [first, end] = step.cols!;
    const { m, s } = stateOf(values(recording, "x", step.rows![0]!).slice(first, end));
    expect(decode(step.state![0]!.s)).toBeCloseTo(s, 5);
    expect(m).toBeLessThan(stateOf(values(recording, "x", 0)).m);
    const twice = at(card, 1).recording;
    return [
      "too long for one program",
      `each row of ${cols} numbers has ${recording.launches[0]!.grid[0]! / rows} programs, and each keeps ${end - first} of them`,
      `Program ${program(recording, step)} knows the maximum and the sum of its own part, ${short(m, 4)} and ${short(s, 4)}`,
      `is read ${TIMES[same(touched(twice, "x", "loads"))]}, in ${twice.launches.length} launches`,
    ];
  },
  "The message": (card) => {
    const { recording, step } = at(card);
    const { message } = step;
    expect(message!.kind).toBe("publish");
    const store = step.stores![0]!;
    const sent = messageOf(store.data[0]!);
    const bits = bitsOf(store.data[0]!);
    expect([sent.m, sent.s]).toEqual([decode(message!.m), Math.fround(decode(message!.s))]);
    expect(bits.tag).toBe(String(sent.tag));
    const [merged, row] = [at(card, 1).step.state![0]!, stateOf(values(recording, "x", 0))];
    expect([decode(merged.m), short(decode(merged.s), 5)]).toEqual([row.m, short(row.s, 5)]);
    return [
      `Program ${program(recording, step)} tells the others of its row (${short(decode(message!.m), 4)}, ${short(decode(message!.s), 4)})`,
      `in ${WORDS[store.at.length]} integer of ${bits.m.length + bits.tag.length + bits.s.length} bits`,
      "so nobody can read half of it",
      `${bits.tag.length === 1 ? "One bit is" : ""} a tag`,
      "for a new one",
      "Both are",
    ];
  },
  "The helper": (card) => {
    const { recording, steps, step } = at(card);
    expect(new Set(steps.map((each) => program(recording, each)))).toEqual(new Set([0]));
    const looks = steps.map((each) => (each.loads ?? []).filter((load) => load.tensor === index(recording, "slots")).length);
    const polls = Math.max(...looks);
    const waited = steps.slice(0, looks.indexOf(polls));
    const found = { m: local(step, "m"), s: local(step, "s") };
    const before = touched(recording, "x", "loads", waited);
    const again = touched(recording, "x", "loads", steps).flatMap((n, col) => (n > before[col]! ? [col] : []));
    const truth = stateOf(values(recording, "x", 0).slice(again[0], again.at(-1)! + 1));
    expect([found.m, short(found.s, 5)]).toEqual([truth.m, short(truth.s, 5)]);
    const late = recording.steps.filter((each) => program(recording, each) === 1);
    const told = late.find((each) => each.message?.kind === "publish")!.message!;
    expect([decode(told.m), decode(told.s)]).toEqual([found.m, found.s]); // the same bits
    expect(late.flatMap((each) => (each.stores ?? []).filter((store) => store.tensor === index(recording, "y")).flatMap((store) => store.at))).toEqual(again);
    return [
      `Here program 1 has not begun. Program ${program(recording, step)} has looked for its message ${polls} times`,
      `it reads columns ${again[0]} to ${again.at(-1)} itself, finds (${short(found.m, 4)}, ${short(found.s, 4)})`,
      "Program 1 comes late",
    ];
  },
  "The floor that no kernel passes": (card) => {
    const [ours, naive] = [at(card).recording, at(card, 1).recording];
    const size = ours.tensors[0]!.before.length;
    expect([same(touched(ours, "x", "loads")), same(touched(ours, "y", "stores"))]).toEqual([1, 1]);
    const split = [...touched(ours, "x", "loads"), ...touched(ours, "y", "stores")].reduce((a, b) => a + b);
    expect(card.stops[1]!.name).toBe(`${WORDS[naive.launches.length]} operations`);
    return [
      "be read once and each result written once",
      `${size} and ${size} on this matrix, ${2 * size} in all`,
      `split has moved ${split}`,
      `torch’s ${WORDS[naive.launches.length]} operations move ${moved(naive)}, which is ${short(moved(naive) / (2 * size), 3)} times the floor`,
    ];
  },
  "A loss and its gradient in one pass": (card) => {
    const { recording, step } = at(card);
    const x = values(recording, "x", 0);
    const target = decode(recording.tensors[index(recording, "target")]!.before[0]);
    const { m, s } = stateOf(x);
    const loss = m + Math.log(s) - x[target]!;
    expect(local(at(card, 1).steps.findLast((each) => each.set?.["loss"])!, "loss")).toBeCloseTo(loss, 5);
    const reads = touched(recording, "x", "loads");
    const twice = reads.filter((n) => n === 2).length;
    expect(reads.every((n) => n === 1 || n === 2)).toBe(true);
    const rows = rowsAndCols(recording.tensors[0]!.shape)[0];
    const gradient = (Math.exp(x[target]! - m) / s - 1) / rows;
    expect(decode(step.stores![0]!.data[0])).toBeCloseTo(gradient, 6);
    return [
      "one logit of the row",
      `Row 0 loses ${m} + log ${short(s, 4)} − ${x[target]} = ${short(loss, 4)}`,
      `The ${reads.length} logits are read once, and the ${twice} at the targets a second time`,
      "is p, and p − 1 at the target",
      `divided by the ${rows} rows`,
      `At the target of row 0 it is ${short(gradient, 4)}`,
    ];
  },
  "A draw": (card) => {
    const { recording, steps } = at(card);
    const reads = touched(recording, "x", "loads", steps).slice(0, rowsAndCols(recording.tensors[0]!.shape)[1]);
    const again = steps.findLast((each) => each.loads?.length)!.loads![0]!.at;
    const scores = (steps.find((each) => each.set?.["score"])!.set!["score"] as Tile).data.map(decode).filter(Number.isFinite);
    const best = scores.indexOf(Math.max(...scores));
    expect(again).toEqual(again.map((_, n) => best * again.length + n));
    expect(again.every((col) => reads[col] === 2)).toBe(true);
    const token = recording.tensors[index(recording, "tokens")]!.after[0];
    expect(at(card, 1).step.stores![0]!.data).toEqual([token]);
    return [
      `Each ${again.length} columns are a group`,
      `of the ${scores.length} groups of row 0 the ${ORDER[best]} has the greatest score`,
      `Its ${again.length} columns are read a second time and drawn alike: token ${token}`,
    ];
  },
  Attention: (card) => {
    const { recording, steps, step } = at(card);
    const query = card.stops[0]!.row!;
    const block = Number(recording.options!["block"]);
    const [now, before] = states(steps, query).map((each) => decode(each.m)).filter((each, n, all) => each !== all[n - 1]).reverse();
    const base = Number(recording.options!["base"]);
    const tokens = recording.tensors[0]!.shape[0];
    expect(recording.tensors[0]!.role).toBe("registers");
    const held = steps.flatMap((each) => (each.holds ?? []).filter((one) => one.tensor === index(recording, "o") && one.at.includes(query * 4)).map((one) => decode(one.data[one.at.indexOf(query * 4)])));
    const v = recording.tensors[index(recording, "v")]!.before.map(decode);
    const z = recording.tensors[0]!.after.slice(query * tokens!, (query + 1) * tokens!).map(decode);
    const added = [...Array(block).keys()].reduce((sum, n) => sum + base ** (z[block + n]! - now!) * v[(block + n) * 4]!, 0);
    expect(held.at(-1)).toBeCloseTo(held.at(-2)! * base ** (before! - now!) + added, 5);
    return [
      `The ${ORDER[step.cols![0] / block]} block of keys raises the maximum of query ${query} from ${before} to ${now}`,
      `Here weights are powers of ${base}`,
      `by ${base} to the power of ${short(before! - now!)} = ${base ** (before! - now!)}`,
      `The ${tokens} × ${tokens} scores are never in memory`,
    ];
  },
  "A router": (card) => {
    const { recording, step } = at(card);
    const x = values(recording, "x", 0);
    const chosen = step.stores![0]!.data.map(decode);
    expect(chosen).toEqual([...x.keys()].sort((a, b) => x[b]! - x[a]!).slice(0, chosen.length));
    const e = chosen.map((each) => Math.exp(x[each]!));
    const weights = e.map((each) => each / e.reduce((a, b) => a + b));
    recording.tensors[index(recording, "weights")]!.after.slice(0, 2).forEach((each, n) => expect(decode(each)).toBeCloseTo(weights[n]!, 6));
    return [
      `to its ${chosen.length} best of ${x.length} experts`,
      `Token ${step.rows![0]} goes to experts ${chosen[0]} and ${chosen[1]}, whose logits are ${x[chosen[0]!]} and ${x[chosen[1]!]}`,
      `the softmax of these ${WORDS[chosen.length]} alone: ${short(weights[0]!, 4)} and ${short(weights[1]!, 4)}`,
      `A row is read ${TIMES[same(touched(recording, "x", "loads"))]}`,
      `the other ${x.length - chosen.length} logits are not added up`,
    ];
  },
};

describe("the story", () => {
  it("has ten cards, and needs all of their recordings", () => {
    expect(story.map((each) => each.title)).toEqual(Object.keys(CLAIMS));
    expect(count(story.length)).toBe("10");
    expect(storyOf(entries.filter((each) => each.kernel !== "route"))).toEqual([]);
  });

  it.each(story.map((each) => [each.title, each] as const))("says nothing with a number that is not so: %s", (title, card) => {
    const claims = CLAIMS[title]!(card);
    let rest = card.text.join(" ");
    for (const each of claims) {
      expect(rest).toContain(each);
      rest = rest.replace(each, "…");
    }
    expect(NUMBER.exec(rest)?.[0], rest).toBe(undefined);
  });

  it("links each stop to its recording and step", () => {
    story.forEach((card, number) => {
      for (const stop of card.stops) {
        const place = readHash(hrefOf(stop, number));
        expect(place).toMatchObject({ view: "replay", kernel: stop.kernel, matrix: stop.entry.matrix, dtype: stop.entry.dtype, step: stop.position, story: number + 1 });
        expect(stop.position).toBeGreaterThan(0);
        expect(stop.position).toBeLessThanOrEqual(stop.entry.recording.steps.length);
      }
    });
  });
});
