/**
 * Every sentence that the page can show, at every step of every recording, against what the recording holds there.
 *
 * What a sentence should say is worked out here from the steps alone: from the states, loads, stores, held tiles and
 * messages up to a position, not from the replay. PAGE_RECORDINGS names a file of other recordings.
 */

import { readFileSync } from "node:fs";
import { describe, expect, it } from "vitest";
import { announcement } from "../src/announce";
import { entryOf } from "../src/catalogue";
import { Replay } from "../src/model";
import { BFLOAT16, FLOAT16, FLOAT32, FLOAT64, formatNamed, roundTo } from "../src/numbers";
import { trials } from "../src/numerics";
import { decode, isTile, messageOf, readRecordings, rowsAndCols, type Recording, type Step, type Tile } from "../src/recording";
import { compute } from "../src/recurrence";
import {
  cellText, chartText, isMessage, lanesText, layerText, messagesText, plain, recurrence, reductionOf, rowFacts, rowFigures, sideText,
  stripText, sumLines, trafficText, verdict,
} from "../src/sentences";

const NAN = NaN;
const INF = Infinity;
/** Rows in which sentences could go wrong: hidden, lost, tied, alone, infinite, far apart. */
const ODD = [
  [[-INF, -INF, 1, 2, 0.5, -1], [1, 2, -INF, -INF, 0.5, -1], [1, 2, 0.5, -1, -INF, -INF], [-INF, -INF, -INF, -INF, -INF, -INF]],
  [[0, NAN, 1, 2], [NAN, 0, 1, 2], [1, 2, 0, NAN], [NAN, NAN, NAN, NAN]],
  [[1, 1, 1, 1, 1], [0, 1, 0, 1, 1], [2, 2, 1, 1, 0]],
  [[3], [-INF], [NAN], [0]],
  [[1, INF, 2, 3], [INF, INF, 0, 1], [-INF, INF, -INF, 0]],
  [[-1000, 1000, 999, -1000, 1000.5], [88, 90, 1, 0, -90], [1e-30, -1e-30, 0, 1e30, -1e30]],
];

const presets = readRecordings(readFileSync(new URL("../../src/fused_softmax/trace/presets.json", import.meta.url), "utf8"));
const more = process.env["PAGE_RECORDINGS"];
const own = ODD.flatMap((matrix) => (["online", "three_pass"] as const).flatMap((each) => [1, 2, 4].map((block) => compute(each, matrix, block))));
const RECORDINGS = more ? readRecordings(readFileSync(more, "utf8")) : [...presets, ...own];
const every = describe.each(RECORDINGS.map((each, at) => [`${at}: ${each.title}`, each] as const));

interface Known {
  position: number;
  program: number;
  m: number | null;
  s: number | null;
}

interface Told {
  position: number;
  program: number;
  message: NonNullable<Step["message"]>;
}

/** A recording's steps, read without the page's model. */
class Facts {
  readonly steps: readonly Step[];
  readonly programs: number[];
  readonly main: number;
  readonly imagined: boolean;
  readonly nRows: number;
  readonly nCols: number;
  readonly base: number;
  readonly messages: Told[] = [];
  readonly known: Known[][];
  private readonly launches: number[];

  constructor(readonly recording: Recording) {
    this.steps = recording.steps;
    const names: string[] = [];
    this.launches = [];
    const ids = recording.frames.map((frame) => {
      const name = `${frame.launch} ${frame.program.join()}`;
      if (!names.includes(name)) {
        names.push(name);
        this.launches.push(frame.launch);
      }
      return names.indexOf(name);
    });
    this.programs = this.steps.map((step) => ids[step.frame]!);
    this.imagined = recording.tensors[0]!.role === "registers";
    this.main = this.imagined ? 0 : recording.tensors.findIndex((each) => each.role === "input");
    [this.nRows, this.nCols] = rowsAndCols(recording.tensors[this.main]!.shape);
    this.base = typeof recording.options?.["base"] === "number" ? recording.options["base"] : Math.E;
    this.known = Array.from({ length: this.nRows }, () => []);
    this.steps.forEach((step, index) => {
      const [position, program] = [index + 1, this.programs[index]!];
      if (step.message) this.messages.push({ position, program, message: step.message });
      for (const { row, m = null, s = null } of step.state ?? []) {
        this.known[row]!.push({ position, program, m: m === null ? null : decode(m), s: s === null ? null : decode(s) });
      }
    });
  }

  /** The program whose state of a row is shown, or -1. */
  holder(row: number, position: number): number {
    const own = this.programs[Math.max(0, position - 1)]!;
    const known = this.known[row]!.filter((each) => each.position <= position);
    if (known.some((each) => each.program === own)) return own;
    const last = known.at(-1);
    if (!last) return -1;
    const shares = position > 0 && this.steps[position - 1]!.rows?.includes(row) && this.launches[last.program] === this.launches[own];
    return shares ? -1 : last.program;
  }

  /** A program's states of a row. half: between two lines of which one sets the sum and the other the maximum. */
  statesOf(row: number, program: number): (Known & { half: boolean })[] {
    const list = this.known[row]!.filter((each) => each.program === program);
    const only = (a: Known, b: Known, name: "m" | "s", other: "m" | "s") => !Object.is(a[name], b[name]) && Object.is(a[other], b[other]);
    return list.map((each, at) => {
      const [last, next] = [list[at - 1], list[at + 1]];
      const sumFirst = last && next && only(last, each, "s", "m") && only(each, next, "m", "s") && next.position - each.position <= 2;
      const maxFirst = this.imagined && last && next && each.s !== null && only(last, each, "m", "s") && only(each, next, "s", "m");
      return { ...each, half: Boolean(sumFirst || maxFirst) };
    });
  }

  /** The main matrix's values in a row that a program has loaded or computed after one position and up to another. */
  columns(row: number, program: number | null, after: number, upTo: number): Map<number, number> {
    const found = new Map<number, number>();
    for (let index = after; index < upTo; index++) {
      if (program !== null && this.programs[index] !== program) continue;
      const step = this.steps[index]!;
      for (const { tensor, at, data } of [...(this.imagined ? [] : (step.loads ?? []).map((each) => ({ ...each, data: null }))), ...(this.imagined ? (step.holds ?? []) : [])]) {
        if (tensor !== this.main) continue;
        at.forEach((place, lane) => {
          if (Math.floor(place / this.nCols) !== row) return;
          found.set(place % this.nCols, decode(data ? data[lane]! : this.recording.tensors[tensor]!.before[place]!));
        });
      }
    }
    return found;
  }

  /** The maxima of a row's parts that a program has read from scratch up to a position. */
  partsOf(row: number, program: number, upTo: number): number[] {
    const at = this.recording.tensors.findIndex((each) => each.role === "scratch" && each.name === "m");
    if (at === -1) return [];
    const read = this.steps.slice(0, upTo).flatMap((step, index) => (this.programs[index] === program && step.rows?.includes(row) ? (step.loads ?? []) : []));
    const { cells } = this.memory(upTo)[at]!;
    return read.filter((each) => each.tensor === at).flatMap((each) => each.at.map((place) => decode(cells[place])));
  }

  power(x: number): number {
    return this.base === Math.E ? Math.exp(x) : this.base ** x;
  }

  sumOf(values: Iterable<number>, m: number): number {
    return [...values].reduce((sum, x) => sum + this.power(x - m), 0);
  }

  /** A tensor's elements after some steps, and which of them the run has written. */
  memory(position: number): { cells: (string | number | boolean)[]; written: boolean[] }[] {
    const memory = this.recording.tensors.map((each) => ({ cells: [...each.before], written: each.before.map(() => false) }));
    for (const step of this.steps.slice(0, position)) {
      for (const { tensor, at, data } of [...(step.stores ?? []), ...(step.holds ?? [])]) {
        at.forEach((place, lane) => {
          memory[tensor]!.cells[place] = data[lane]!;
          memory[tensor]!.written[place] = true;
        });
      }
    }
    return memory;
  }
}

/** A printed number. */
function read(text: string): number {
  const value = text.replaceAll("\u202f", "").replaceAll("−", "-");
  if (value === "inf" || value === "-inf") return value === "inf" ? INF : -INF;
  if (value !== "nan" && !/^-?\d+(\.\d+)?(e[+-]?\d+)?$/.test(value)) throw new Error(`no number: ${text}`);
  return Number(value);
}

/** Fails unless a printed number is a value, rounded to `digits` digits. */
function same(text: string, value: number, digits: number, what: string, slack = 0): void {
  const shown = read(text);
  if (!Number.isFinite(value)) return expect(shown, what).toBe(value);
  const places = text.includes("e") ? Math.min(digits, 3) : digits;
  const off = Math.abs(value) * 0.51 * 10 ** (1 - places) + slack;
  if (!(Math.abs(shown - value) <= off)) throw new Error(`${what}: ${text} is shown of ${value}`);
}

/** Fails unless m is the greatest of some values. A nan among them is passed over, or makes it nan. */
function isMaximum(m: number, values: readonly number[], what: string): void {
  const numbers = values.filter((each) => !Number.isNaN(each));
  if (Number.isNaN(m)) expect(numbers.length, what).toBeLessThan(values.length);
  else expect(m, what).toBe(numbers.reduce((a, b) => Math.max(a, b), -INF));
}

const N = "(−?(?:[\\d.]+(?:e[+−]?\\d+)?|inf)|nan)";
const FORMS = {
  nothing: /^Before a row can be written, the kernel needs only two numbers: the row’s maximum m, and s, the sum of its e\^\(x − m\)\.$/,
  noScore: /^No score is known yet\. Each block of keys gives the query some; then they are forgotten, but for these: the greatest, m, the sum s of the weights, and the values by their weights\.$/,
  scores: /^The first scores are known\. Next comes their maximum\.$/,
  maximum: new RegExp(`^The maximum so far is ${N}(?:; it was ${N} before)?\\. The sum has no value yet\\.$`),
  facts: new RegExp(`^m = ${N}, s = ${N}$`),
  rises: new RegExp(`^The maximum (rises|rose) from ${N} to ${N}, so the old sum is multiplied by (e|2)\\^\\(${N}\\) = ${N}\\. s = ${N} · ${N} \\+ ${N} = ${N}$`),
  torn: new RegExp(`^The maximum rises from ${N} to ${N}\\. What has been added up is of the old one: it will be multiplied by (e|2)\\^\\(${N}\\) = ${N}\\.$`),
  stays: new RegExp(`^The maximum stays ${N}, so the old sum stays as it is\\. s = ${N} \\+ ${N} = ${N}$`),
  merged: new RegExp(`^The parts are merged\\. Each part’s sum is multiplied by e to the power of its maximum − ${N}: (.*)$`),
} as const;
type Form = keyof typeof FORMS;
const seen = new Map<Form, number>();

/** Fails unless a sentence is true of a row after some steps. */
function checkRecurrence(facts: Facts, row: number, position: number, text: string): void {
  const form = (Object.keys(FORMS) as Form[]).find((each) => FORMS[each].test(text));
  if (!form) throw new Error(`a sentence that this test does not know: ${text}`);
  seen.set(form, (seen.get(form) ?? 0) + 1);
  const found = FORMS[form].exec(text)!.slice(1) as string[];
  const holder = facts.holder(row, position);
  const all = holder === -1 ? [] : facts.statesOf(row, holder);
  const past = all.filter((each) => each.position <= position);
  const last = past.at(-1);
  const held = () => facts.columns(row, null, 0, position);

  if (form === "nothing" || form === "noScore" || form === "scores") {
    expect(last?.m ?? null).toBe(null);
    expect(form === "nothing").toBe(!facts.imagined);
    if (form === "noScore") expect(held().size).toBe(0);
    if (form === "scores") {
      expect(held().size).toBeGreaterThan(0);
      const next = facts.known[row]!.find((each) => each.position > position)!;
      isMaximum(next.m!, [...facts.columns(row, next.program, 0, next.position).values()], text);
    }
    return;
  }
  // Of a state between two lines the one before is shown, unless nothing is claimed of it, or its next line is told.
  if (!last) throw new Error(`a state is shown that no program has: ${text}`);
  const before = past.filter((each) => !each.half).at(-1);
  const shown = last.half && form !== "facts" && !(form === "torn") ? before! : last;
  const fresh = shown.position === position;
  const earlier = past.filter((each) => each.position < shown.position && !each.half && !(Object.is(each.m, shown.m) && Object.is(each.s, shown.s))).at(-1);

  if (form === "maximum") {
    expect(shown.s).toBe(null);
    same(found[0]!, shown.m!, 5, text);
    const columns = [...facts.columns(row, shown.program, 0, shown.position).values()];
    isMaximum(shown.m!, [...columns, ...facts.partsOf(row, shown.program, shown.position)], text);
    const rose = earlier !== undefined && earlier.m !== null && Number.isFinite(earlier.m) && earlier.m < shown.m!;
    expect(found[1] !== undefined).toBe(rose);
    if (rose) same(found[1]!, earlier.m!, 5, text);
    return;
  }
  if (form === "facts") {
    const one = [last, before].some((each) => {
      try {
        same(found[0]!, each?.m ?? NaN, 5, text);
        same(found[1]!, each?.s ?? NaN, 5, text);
        return each !== undefined;
      } catch {
        return false;
      }
    });
    if (!one) throw new Error(`${text}, where the program has m = ${last.m}, s = ${last.s}`);
    return;
  }
  if (!earlier || earlier.m === null || earlier.s === null) throw new Error(`nothing was known before: ${text}`);
  const [m0, s0, m, s] = [earlier.m, earlier.s, shown.m!, shown.s!];
  const collected = facts.messages.filter(
    (each) => each.message.kind === "collect" && each.message.row === row && each.program === holder && each.position > earlier.position && each.position <= shown.position,
  );
  expect(form === "merged", text).toBe(collected.length > 0);
  if (form === "merged") {
    const whole = [...facts.columns(row, null, 0, facts.steps.length).values()];
    same(found[0]!, m, 4, text);
    same(found[0]!, Math.max(...whole), 4, text);
    const total = collected.reduce((sum, { message }) => sum + decode(message.s) * facts.power(decode(message.m) - m), 0);
    expect(Math.abs(total - s) <= 1e-5 * s && Math.abs(facts.sumOf(whole, m) - s) <= 1e-5 * s, text).toBe(true);
    const many = new RegExp(`^the (\\d+) of them add up to s = ${N}$`).exec(found[1]!);
    if (many) {
      expect(Number(many[1])).toBe(collected.length);
      return same(many[2]!, s, 4, text);
    }
    const [terms, sum] = found[1]!.replace(/^s = /, "").split(" = ") as [string, string];
    same(sum, s, 4, text);
    const parts = terms.split(" + ");
    expect(parts.length).toBe(collected.length);
    parts.forEach((part, at) => {
      const term = new RegExp(`^${N}(?: · e\\^\\(${N}\\))?$`).exec(part);
      if (!term) throw new Error(`no term: ${part}`);
      const message = collected[at]!.message;
      same(term[1]!, decode(message.s), 4, text);
      expect(term[2] === undefined, text).toBe(decode(message.m) === m);
      if (term[2] !== undefined) same(term[2], decode(message.m) - m, 4, text);
    });
    return;
  }
  const added = facts.sumOf(facts.columns(row, holder, earlier.position, shown.position).values(), m);
  const factor = facts.power(m0 - m);
  if (form === "stays") {
    expect(m, text).toBe(m0);
    same(found[0]!, m, 4, text);
    same(found[1]!, s0, 4, text);
    same(found[2]!, added, 4, text, 2e-6 * s);
    same(found[3]!, s, 4, text);
    return;
  }
  expect(m, text).toBeGreaterThan(m0);
  const numbers = form === "rises" ? found.slice(1) : found;
  same(numbers[0]!, m0, 4, text);
  same(numbers[1]!, m, 4, text);
  expect(numbers[2]).toBe(facts.base === Math.E ? "e" : String(facts.base));
  same(numbers[3]!, m0 - m, 4, text);
  same(numbers[4]!, factor, 4, text);
  if (form === "torn") {
    expect([last.half, last.s]).toEqual([true, s0]);
    const next = all.find((each) => each.position > last.position)!;
    const then = s0 * factor + facts.sumOf(facts.columns(row, holder, earlier.position, next.position).values(), m);
    expect(Math.abs(then - next.s!) <= 1e-5 * then, text).toBe(true);
    return;
  }
  expect(found[0], text).toBe(fresh ? "rises" : "rose");
  same(numbers[5]!, s0, 4, text);
  same(numbers[6]!, factor, 4, text);
  same(numbers[7]!, added, 4, text, 2e-6 * s);
  same(numbers[8]!, s, 4, text);
}

every("%s", (_, recording) => {
  const facts = new Facts(recording);
  const replay = new Replay(recording);
  const { steps } = facts;
  const positions = Array.from({ length: steps.length + 1 }, (_, at) => at);
  const rows = Array.from({ length: facts.nRows }, (_, row) => row);
  const some = positions.filter((each) => each % Math.ceil(positions.length / 40) === 0 || each === steps.length);

  it("says what has become of maximum and sum", () => {
    for (const position of positions) {
      replay.seek(position);
      for (const row of rows) {
        if (facts.known[row]!.length === 0) continue;
        const reduction = reductionOf(replay, row);
        checkRecurrence(facts, row, position, plain(recurrence(replay, row, reduction)));
        const chart = new RegExp(`^Row (\\d+): (\\d+) of (\\d+) columns (read|computed), (?:no maximum yet|running maximum ${N}), (?:no sum yet|running sum ${N})\\.$`).exec(chartText(replay, row, reduction));
        if (!chart) throw new Error(chartText(replay, row, reduction));
        expect(chart.slice(1, 5)).toEqual([String(row), String(facts.columns(row, null, 0, position).size), String(facts.nCols), facts.imagined ? "computed" : "read"]);
        const states = facts.statesOf(row, facts.holder(row, position)).filter((each) => each.position <= position);
        const fits = [states.at(-1), states.filter((each) => !each.half).at(-1)].some(
          (each) => (chart[5] === undefined ? (each?.m ?? null) === null : Object.is(read(chart[5]), each?.m)) && (chart[6] === undefined) === ((each?.s ?? null) === null),
        );
        expect(fits, `${chart[0]} after ${position} steps`).toBe(true);
      }
    }
  });

  it("says who has told whom what", () => {
    for (const position of positions) {
      replay.seek(position);
      for (const row of rows) {
        const passed = facts.messages.filter((each) => each.message.row === row && each.position <= position);
        const published = passed.filter((each) => each.message.kind === "publish");
        const text = lanesText(replay, row);
        if (published.length === 0) {
          expect(text).toBe("No message yet.");
          continue;
        }
        const end = / Messages collected: (\d+)\.(?: States computed in place of a message: (\d+)\.)?$/.exec(text)!;
        const instead = passed.filter((each) => each.message.kind === "collect" && !published.some((one) => one.position < each.position && one.message.from === each.message.from));
        expect([Number(end[1]), Number(end[2] ?? 0)]).toEqual([passed.length - published.length - instead.length, instead.length]);
        const said = text.slice(0, end.index - 1).split("; ");
        expect(said.length).toBe(published.length);
        said.forEach((each, at) => {
          const { message, position: when } = published[at]!;
          const found = new RegExp(`^program (\\d+) published (?:d ${N}|\\(m, s\\) = \\(${N}, ${N}\\))$`).exec(each)!;
          expect(Number(found[1])).toBe(recording.frames[steps[when - 1]!.frame]!.program[0]);
          if (message.d !== undefined) same(found[2]!, decode(message.d), 3, each);
          else {
            same(found[3]!, decode(message.m), 3, each);
            same(found[4]!, decode(message.s), 3, each);
          }
        });
      }
    }
  });

  it("says in each message's bits what it holds", () => {
    const last = new Map<string, { m: number; s: number; d: boolean }>();
    for (const position of positions) {
      replay.seek(position);
      const step = steps[position - 1];
      for (const value of Object.values(step?.set ?? {})) {
        if (!isTile(value) || value.dtype !== "int64" || !isMessage(replay, value)) continue;
        const text = messagesText(replay, value);
        const sent = facts.messages.find((each) => each.position > position && each.message.kind === "publish" && steps[each.position - 1]!.frame === step!.frame);
        if (!sent) continue;
        const found = new RegExp(`^(?:d ${N}|\\(m, s\\) = \\(${N}, ${N}\\))(?:, (\\d+) times)?$`).exec(text);
        if (!found) throw new Error(text);
        const { d, m, s } = sent.message;
        if (d !== undefined) same(found[1]!, decode(d), 4, text);
        else {
          same(found[2]!, decode(m), 4, text);
          same(found[3]!, decode(s), 4, text);
        }
        expect(Number(found[4] ?? 1)).toBe(value.data.length);
      }
      if (step?.message?.kind !== "publish") continue;
      for (const store of step.stores ?? []) {
        const { m, s, d } = step.message;
        for (const at of store.at) last.set(`${store.tensor} ${at}`, { m: decode(d ?? m), s: decode(s ?? 0), d: d !== undefined });
      }
      for (const [place, sent] of last) {
        const [tensor, at] = place.split(" ").map(Number) as [number, number];
        const text = cellText(replay, tensor, at);
        const found = new RegExp(` = (?:d ${N}|\\(m, s\\) = \\(${N}, ${N}\\)), tag [01]$`).exec(text);
        if (!found) throw new Error(text);
        same(sent.d ? found[1]! : found[2]!, sent.m, 4, text);
        if (!sent.d) same(found[3]!, sent.s, 4, text);
      }
    }
  });

  it("says how a row of the output is added up", () => {
    if (replay.accumulator < 0) return;
    const sumCols = replay.layouts[replay.accumulator]![1];
    const v = recording.tensors.find((each) => each.name === "v")!;
    let lines = 0;
    for (const position of positions) {
      replay.seek(position);
      for (const row of rows) {
        const held = steps.slice(0, position).flatMap((step, index) =>
          (step.holds ?? [])
            .filter((each) => each.tensor === replay.accumulator && each.at.includes(row * sumCols))
            .map((each) => ({ position: index + 1, values: Array.from({ length: sumCols }, (_, col) => decode(each.data[each.at.indexOf(row * sumCols + col)]!)) })),
        );
        const stateAt = (when: number) => facts.known[row]!.filter((each) => each.position <= when).at(-1)!;
        const [now, before] = [held.at(-1), held.at(-2)];
        const text = sumLines(replay, row, reductionOf(replay, row)).map(({ title, values }) => ({ title: plain(title), values }));
        if (!now) {
          expect(text).toEqual([{ title: "o", values: new Array(sumCols).fill(NaN) }]);
          continue;
        }
        const output = recording.tensors.findIndex((each) => each.name === "output");
        const stored = steps.slice(0, position).flatMap((step) => (step.stores ?? []).filter((each) => each.tensor === output).flatMap((each) => each.at));
        for (const { title, values } of text) {
          lines += 1;
          const close = (wanted: readonly number[]) => wanted.forEach((each, at) => {
            if (Number.isFinite(each)) expect(Math.abs(each - values[at]!), `${title}, ${values}`).toBeLessThanOrEqual(1e-5 * (1 + Math.abs(each)));
            else expect(values[at], title).toBe(each);
          });
          const by = new RegExp(`^(next: )?× 2\\^\\(${N}\\) = ${N}$`).exec(title);
          if (title === "o before") close(before!.values);
          else if (title === "o of the first block" || title === "= o") {
            expect(title === "= o").toBe(before !== undefined);
            close(now.values);
          } else if (title === "× 1, as m stays") {
            expect(stateAt(before!.position).m).toBe(stateAt(now.position).m);
            close(before!.values);
          } else if (by) {
            const [from, to] = by[1] ? [now, { position }] : [before!, now];
            const rise = stateAt(from.position).m! - stateAt(to.position).m!;
            expect(rise).toBeLessThan(0);
            same(by[2]!, rise, 4, title);
            same(by[3]!, 2 ** rise, 4, title);
            close(from.values.map((each) => each * 2 ** rise));
          } else if (title === "+ this block") {
            const block = facts.columns(row, null, before!.position, now.position);
            const m = stateAt(now.position).m!;
            close(Array.from({ length: sumCols }, (_, col) => [...block].reduce((sum, [key, z]) => sum + 2 ** (z - m) * decode(v.before[key * sumCols + col]!), 0)));
          } else if (title === "output, as no key counts") {
            expect(stateAt(position).s).toBe(0);
            close(new Array(sumCols).fill(0));
          } else if (title === "÷ s = output") {
            expect(stateAt(position).s).not.toBe(0);
            expect(stored.filter((at) => Math.floor(at / sumCols) === row).length).toBe(sumCols);
            close(now.values.map((each) => each / stateAt(position).s!));
          } else throw new Error(`a line that this test does not know: ${title}`);
        }
        expect(text.some((each) => each.title.startsWith("next"))).toBe(stateAt(position).m! > stateAt(now.position).m!);
      }
    }
    expect(lines).toBeGreaterThan(0);
  });

  it("announces each step as it was", () => {
    for (const position of positions.slice(1)) {
      replay.seek(position);
      const step = steps[position - 1]!;
      const text = announcement(replay);
      const cols = step.cols ? (step.cols[1] - step.cols[0] === 1 ? `, column ${step.cols[0]}` : `, columns ${step.cols[0]} to ${step.cols[1] - 1}`) : "";
      const start = new RegExp(`^Step ${position} of ${steps.length}\\. Program (.+?), phase (.+?)(, rows? .+?)?${cols}\\. Line ${step.line}\\.`).exec(text);
      if (!start) throw new Error(text);
      expect(start[2]).toBe(recording.phases[step.phase]);
      const list = (start[3] ?? "").match(/\d+/g)?.map(Number) ?? [];
      const named = start[3]?.includes(" to ") ? Array.from({ length: list[1]! - list[0]! + 1 }, (_, at) => list[0]! + at) : list;
      expect(named).toEqual(step.rows ?? []);
      const moved = (verb: string) =>
        [...text.matchAll(new RegExp(`${verb} (\\S+) elements? of ([^\\s,.]+)(?:, (\\S+) times)?\\.`, "g"))].flatMap((each) => new Array(read(each[3] ?? "1")).fill([read(each[1]!), each[2]]));
      const told = (moves: Step["loads"]) => (moves ?? []).map((each) => [each.at.length, recording.tensors[each.tensor]!.name]);
      expect(moved("Reads")).toEqual(told(step.loads));
      expect(moved("Writes")).toEqual(told(step.stores));
      const message = new RegExp(`(Publishes|Collects|Has computed) (?:d = ${N}|m = ${N}, s = ${N})(?: (?:from|of) part (\\d+))?(?: itself,)? for row (\\d+)\\.`).exec(text);
      expect(message !== null).toBe(step.message !== undefined);
      if (message && step.message) {
        const { kind, m, s, d, from, row } = step.message;
        expect([message[1], Number(message[6])]).toEqual([kind === "publish" ? "Publishes" : step.message.missing ? "Has computed" : "Collects", row]);
        expect(message[5]).toBe(kind === "publish" || from === undefined ? undefined : String(from));
        if (d !== undefined) same(message[2]!, decode(d), 4, text);
        else {
          expect(read(message[3]!)).toBe(decode(m));
          same(message[4]!, decode(s), 4, text);
        }
      }
      if (step.note) expect(text.endsWith(step.note)).toBe(true);
    }
  });

  it("says of each cell what it holds, or that nothing has written it", () => {
    for (const position of some) {
      replay.seek(position);
      facts.memory(position).forEach(({ cells, written }, index) => {
        const tensor = recording.tensors[index]!;
        const changes = steps.some((step) => step.stores?.some((each) => each.tensor === index));
        const everHeld = new Set(steps.flatMap((step) => (step.holds ?? []).filter((each) => each.tensor === index).flatMap((each) => each.at)));
        const [, cols] = replay.layouts[index]!;
        cells.forEach((cell, at) => {
          const name = `${tensor.name}[${Math.floor(at / cols)}, ${at % cols}]`;
          const text = cellText(replay, index, at);
          expect(text.startsWith(`${name} `)).toBe(true);
          const said = text.slice(name.length + 1);
          if (said === "not written yet") expect([written[at], tensor.role === "input", changes], text).toEqual([false, false, true]);
          else if (said === "not computed yet") expect([written[at], everHeld.has(at)], text).toEqual([false, true]);
          else if (said === "is never computed") expect(everHeld.has(at), text).toBe(false);
          else if (said.includes("tag")) {
            const { m, s, tag } = messageOf(cell);
            const found = new RegExp(`^= (?:d ${N}|\\(m, s\\) = \\(${N}, ${N}\\)), tag ([01])$`).exec(said)!;
            same(found[1] ?? found[2]!, m, 4, text);
            if (found[3]) same(found[3], s, 4, text);
            expect([written[at], found[4]]).toEqual([true, String(tag)]);
          } else {
            expect(written[at] || !changes, text).toBe(true);
            expect(read(said.slice(2)) + 0, text).toBe(decode(cell) + 0); // both zeros are shown as 0
          }
        });
      });
    }
  });

  it("counts what has been moved, and what is above the floor", () => {
    const { traffic } = recording;
    for (const position of some) {
      replay.seek(position);
      const total = (list: "loads" | "stores", upTo: number) =>
        steps.slice(0, upTo).reduce((sum, step) => sum + (step[list] ?? []).reduce((all, each) => all + (replay.counted[each.tensor] ? each.at.length : 0), 0), 0);
      const [reads, writes, end] = [total("loads", position), total("stores", position), total("loads", steps.length) + total("stores", steps.length)];
      if (traffic) expect(end).toBe(traffic.reads + traffic.writes);
      const { moved, floor } = trafficText(replay);
      const [all, read_, written, least] = moved.match(/[\d\u202f]+/g)!.map(read);
      expect([all, read_, written, least]).toEqual([reads + writes, reads, writes, traffic ? traffic.floor_reads + traffic.floor_writes : undefined]);
      const times = floor.match(/[\d.]+(?=×)/g)!.map(Number);
      expect(Math.abs(times[0]! - (reads + writes) / least!)).toBeLessThan(0.0051);
      expect(times.length).toBe(position < steps.length ? 2 : 1);
      if (times[1] !== undefined) expect(Math.abs(times[1] - end / least!)).toBeLessThan(0.0051);
      for (const layer of replay.layers) {
        const counts = new Map<number, number>();
        for (const step of steps.slice(0, position)) {
          for (const each of (layer.kind === "read" ? step.loads : step.stores) ?? []) if (each.tensor === layer.tensor) for (const at of each.at) counts.set(at, (counts.get(at) ?? 0) + 1);
        }
        const done = [...counts.values()].filter((each) => each >= layer.k).length;
        const text = layerText(replay, layer, done);
        const found = /^(read|write) (\S+?)( again| a (\d+)(st|nd|rd|th) time)?: (\S+) of (\S+) elements(, above the floor)?$/.exec(text)!;
        const { name, role } = recording.tensors[layer.tensor]!;
        expect([found[1], found[2]]).toEqual([layer.kind, name]);
        expect(found[4] ? Number(found[4]) : found[3] ? 2 : 1).toBe(layer.k);
        expect(read(found[6]!)).toBe(done);
        if (position === steps.length) expect(found[7]).toBe(found[6]);
        expect(found[8] === undefined, text).toBe(layer.k === 1 && role === (layer.kind === "read" ? "input" : "output"));
      }
    }
    if (!traffic) return;
    const floor = replay.layers.filter((each) => each.floor).reduce((sum, each) => sum + each.size, 0);
    expect(floor).toBe(traffic.floor_reads + traffic.floor_writes);
  });

  it("says in each row of the table what is known of it", () => {
    const touched = rows.map((row) => steps.flatMap((step, index) => (step.rows?.includes(row) ? [index + 1] : [])));
    const result = replay.result;
    for (const position of positions) {
      replay.seek(position);
      const memory = some.includes(position) ? facts.memory(position) : null;
      for (const row of rows) {
        const known = facts.known[row]!.filter((each) => each.position <= position).at(-1);
        const { m, s, sum, status } = rowFacts(replay, row);
        const started = touched[row]![0]! <= position;
        const done = touched[row]!.at(-1)! <= position;
        if (known) {
          for (const [text, value] of [[m, known.m], [s, known.s]] as const) {
            if (value !== null) same(text, value, 5, `row ${row}`);
          }
        } else if (!done) expect([m, s]).toEqual(["–", "–"]);
        expect(status === "waiting", `row ${row} at ${position}: ${status}`).toBe(!started);
        expect(["✓ ok", "✕ nan", "∅ empty", "done"].includes(status)).toBe(done);
        expect(status === "▶ running").toBe(started && !done && Boolean(steps[position - 1]?.rows?.includes(row)));
        if (!memory || result < 0) continue;
        const cells = memory[result]!.cells.slice(row * facts.nCols, (row + 1) * facts.nCols).map(decode);
        const format = formatNamed(recording.tensors[result]!.dtype)!;
        const there = cells.map((each) => roundTo(each, format)).filter((_, col) => memory[result]!.written[row * facts.nCols + col]);
        if (there.length === 0) expect(sum).toBe("–");
        else same(sum, there.reduce((a, b) => a + b, 0), 4, `the sum of row ${row}`, 1e-6);
        for (const [name, value] of rowFigures(replay, row)) {
          const wanted =
            there.length === 0 ? NaN
            : name.startsWith("min") ? Math.min(...there)
            : name.startsWith("max") ? Math.max(...there)
            : name === "sum" ? there.reduce((a, b) => a + b, 0)
            : there.reduce((total, p) => total - (p === 0 ? 0 : p * Math.log(p)), 0);
          if (Number.isNaN(wanted)) expect(value, name).toBeNaN();
          else expect(Math.abs((/^m(in|ax)/.test(name) ? roundTo(value, format) : value) - wanted), `${name} of row ${row}: ${value}, not ${wanted}`).toBeLessThanOrEqual(2e-6 * (1 + Math.abs(wanted)));
        }
        if (status === "✓ ok") expect(there.every((each) => !Number.isNaN(each))).toBe(true);
        if (status === "✕ nan") expect(there.some(Number.isNaN)).toBe(true);
        // The gradient's kernel reads no logits: the probabilities of an empty row are nan.
        const hidden = recording.operation === "softmax_backward" ? NAN : -INF;
        if (status === "∅ empty") expect(recording.tensors[facts.main]!.before.slice(row * facts.nCols, (row + 1) * facts.nCols).every((each) => Object.is(decode(each), hidden))).toBe(true);
      }
    }
  });

  it("describes wide tiles by their ends", () => {
    for (const step of steps) {
      for (const [name, value] of Object.entries(step.set ?? {})) {
        if (!isTile(value) || value.dtype === "pointer") continue;
        const finite = value.data.map(decode).filter(Number.isFinite);
        const text = stripText(value as Tile, name);
        const found = new RegExp(` from ${N} to ${N}$`).exec(text);
        expect(found === null, text).toBe(finite.length === 0);
        if (!found) continue;
        same(found[1]!, Math.min(...finite), 3, text);
        same(found[2]!, Math.max(...finite), 3, text);
      }
    }
  });

  it("says of the page's own model how a sum was corrected", () => {
    if (!recording.computed) return;
    for (const [index, step] of steps.entries()) {
      if (recording.kernel !== "online" || !step.state || !step.cols) continue;
      const before = facts.known[step.rows![0]!]!.filter((each) => each.position <= index).at(-1)!;
      const [m, s] = [decode(step.state[0]!.m), decode(step.state[0]!.s)];
      const rose = m > before.m! && before.m! > -INF;
      expect(step.note).toBe(rose ? `The maximum rose from ${before.m} to ${m}, so the old sum is multiplied by exp(${before.m} - ${m}).` : undefined);
      const added = facts.sumOf([...facts.columns(step.rows![0]!, null, before.position, index + 1).values()], m);
      const wanted = (before.m! === -INF ? 0 : before.s! * Math.exp(before.m! - m)) + added;
      if (Number.isFinite(m) && !Number.isNaN(s)) expect(Math.abs(s - wanted)).toBeLessThanOrEqual(1e-5 * wanted);
    }
    const { traffic } = recording;
    expect(traffic!.reads).toBe(traffic!.passes! * facts.nRows * facts.nCols);
    expect(recording.summary).toContain(traffic!.passes === 2 ? "Reads each row twice" : "Reads each row three times");
  });

  it("judges each arithmetic by what it gives", () => {
    if (facts.imagined || facts.nCols > 24) return;
    for (const row of rows) {
      const x = recording.tensors[facts.main]!.before.slice(row * facts.nCols, (row + 1) * facts.nCols).map(decode);
      for (const shift of [0, 89, -200, 710]) {
        for (const trial of trials(x.map((each) => each + shift), [FLOAT16, BFLOAT16, FLOAT32, FLOAT64])) {
          const { verdict: text, y, s, sum } = trial;
          const lost = [...y].filter((each) => !Number.isFinite(each)).length;
          if (text.startsWith("The row has no softmax")) expect(x.some((each) => Number.isNaN(each) || each === INF) || x.every((each) => each === -INF)).toBe(true);
          else if (/every probability is nan/.test(text)) expect(lost).toBe(x.length);
          else if (/ probabilities are nan/.test(text)) expect(text).toContain(`${lost} of ${x.length} probabilities are nan`);
          else if (text.includes("every probability is 0")) expect([...y].every((each) => each === 0)).toBe(true);
          else if (text.includes("The sum ends at")) {
            const found = new RegExp(`The sum ends at ${N}, so the probabilities add up to ${N}\\.$`).exec(text)!;
            same(found[1]!, s, 6, text);
            same(found[2]!, sum, 3, text);
          } else if (text.startsWith("Equal to float64")) expect(trial.error).toBe(0);
          else same(/by (?:up to|at most) (\S+) %/.exec(text)![1]!, 100 * trial.error, 2, text);
        }
      }
    }
  });
});

describe("two kernels", () => {
  const entries = presets.map((each) => entryOf(each, "preset"));
  const pairs = entries.flatMap((left) => entries.filter((each) => each.matrix === left.matrix).map((right) => [left, right] as const));

  it("are compared by what they moved, each against its own floor", () => {
    for (const pair of pairs) {
      const text = plain(verdict(pair));
      const sides = pair.map(({ kernel, recording: { traffic } }) => ({ kernel, moved: traffic!.reads + traffic!.writes, floor: traffic!.floor_reads + traffic!.floor_writes }));
      const one = new Map(sides.map((each) => [each.kernel, each]));
      const [slow, fast] = sides[0]!.moved >= sides[1]!.moved ? sides : [sides[1]!, sides[0]!];
      const floors = [...text.matchAll(/(?:(\d+) for ([\w-]+))/g)].map((each) => [Number(each[1]), one.get(each[2]!)!.floor]);
      const least = /No kernel can move fewer than (\d+)\./.exec(text);
      expect(least !== null, text).toBe(slow!.floor === fast!.floor);
      if (least) expect(Number(least[1])).toBe(slow!.floor);
      else expect(floors.length).toBe(2);
      for (const [said, is] of floors) expect(said).toBe(is);
      const moves = [...text.matchAll(/([\w-]+) moves (\d+)/g)];
      for (const each of moves) expect(Number(each[2])).toBe(one.get(each[1]!)!.moved);
      const faster = /([\w-]+) is ([\d.]+)× as fast\.$/.exec(text);
      expect(faster !== null).toBe(slow!.moved !== fast!.moved);
      if (faster) expect([faster[1], faster[2]]).toEqual([fast!.kernel, (slow!.moved / fast!.moved).toFixed(2)]);
      else expect(text).toContain(`${slow!.moved} elements`);
    }
    expect(pairs.some(([a, b]) => plain(verdict([a, b])).includes("is not the same"))).toBe(true);
  });

  it("are each as far as the clock says", () => {
    for (const { recording } of entries) {
      const replay = new Replay(recording);
      const total = recording.traffic!.reads + recording.traffic!.writes;
      for (const clock of [0, 1, Math.floor(total / 2), total - 1, total, total + 7]) {
        replay.seek(clock === 0 ? 0 : replay.positionMoved(clock));
        const text = plain(sideText(replay, clock));
        const moved = recording.steps.slice(0, replay.position).reduce((sum, step) => sum + [...(step.loads ?? []), ...(step.stores ?? [])].reduce((all, each) => all + (replay.counted[each.tensor] ? each.at.length : 0), 0), 0);
        if (clock < total) expect(text).toContain(`${total - moved} elements to go`);
        else expect(text).toBe(`✓ done after ${total} elements${clock > total ? `, ${clock - total} ago` : ""}`);
      }
    }
  });
});

describe("the recordings", () => {
  it.skipIf(more)("bring up every sentence of the recurrence", () => {
    expect([...seen.keys()].sort()).toEqual((Object.keys(FORMS) as Form[]).sort());
  });
});
