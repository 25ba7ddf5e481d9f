/** What the page says of a recording at a position: words that are functions of the model alone, without any view. */

import type { Entry } from "./catalogue";
import { power, type Exchange, type Layer, type Replay, type RowState } from "./model";
import { count, exact, short } from "./numbers";
import { decode, isTile, messageOf, type Cell, type Local, type Tile } from "./recording";

/** Text, some of it marked. nobreak: it stays on one line. */
export type Words = readonly (string | Marked)[];

export interface Marked {
  as: "b" | "strong" | "sup" | "var" | "nobreak";
  of: Words;
}

const marked = (as: Marked["as"], ...of: (string | Marked)[]): Marked => ({ as, of });
const bold = (text: string) => marked("b", text);
const raised = (text: string) => marked("sup", text);

/** Words as plain text: a power is e^(x). */
export function plain(words: Words): string {
  return words
    .map((each) => (typeof each === "string" ? each : each.as === "sup" ? `^(${plain(each.of)})` : plain(each.of)))
    .join("");
}

/** A row's states that are shown, by the program that holds it. */
export interface Reduction {
  program: number | null;
  /** The newest one. */
  state: RowState | null;
  /** The newest that has another maximum or sum. */
  past: RowState | null;
}

export function reductionOf(replay: Replay, row: number): Reduction {
  const program = replay.holder(row);
  // Scores in registers come block by block, and a maximum that has risen is seen before the sum that it corrects.
  const all = replay.history(row).filter((each) => each.program === program && (!each.torn || replay.imagined));
  const state = all[all.length - 1] ?? null;
  const past = all.findLast((each) => !each.torn && (each.m !== state?.m || each.s !== state.s)) ?? null;
  return { program, state, past };
}

const symbolOf = (replay: Replay) => (replay.base === Math.E ? "e" : String(replay.base));

/** The last change of a row's state, written out in its own numbers. */
export function recurrence(replay: Replay, row: number, { state, past }: Reduction): Words {
  const { base, imagined } = replay;
  const fresh = state !== null && state.position === replay.position;
  if (!state || state.m === null) {
    if (!imagined) {
      return ["Before a row can be written, the kernel needs only two numbers: the row’s maximum ", bold("m"), ", and ", bold("s"), ", the sum of its e", raised("x − m"), "."];
    }
    const { writes } = replay.tensor(replay.main);
    if (writes.subarray(row * replay.nCols, (row + 1) * replay.nCols).some((each) => each > 0)) {
      return ["The first scores are known. Next comes their maximum."];
    }
    return ["No score is known yet. Each block of keys gives the query some; then they are forgotten, but for these: the greatest, ", bold("m"), ", the sum ", bold("s"), " of the weights, and the values by their weights."];
  }
  const [m, s] = [state.m, state.s];
  if (s === null) {
    const from = past?.m ?? null;
    const before = from !== null && Number.isFinite(from) && from < m ? `; it was ${short(from, 5)} before` : "";
    return ["The maximum so far is ", bold(short(m, 5)), `${before}. The sum has no value yet.`];
  }
  const facts: Words = ["m = ", bold(short(m, 5)), ", s = ", bold(short(s, 5))];
  const compared = past !== null && past.m !== null && past.s !== null && past.s > 0 && m >= past.m;
  if (!compared || !Number.isFinite(past.m) || !Number.isFinite(m) || !Number.isFinite(s)) return facts;
  const parts = collectedBy(replay, state, past);
  if (parts.length > 0) return merged(replay, m, s, parts);
  const factor = power(base, past.m! - m);
  const times: Words = [symbolOf(replay), raised(short(past.m! - m, 4)), ` = ${short(factor, 4)}`];
  const rise = ` from ${short(past.m!, 4)} to ${short(m, 4)}`;
  if (state.torn) {
    return [marked("strong", "The maximum rises"), `${rise}. What has been added up is of the old one: it will be multiplied by `, ...times, "."];
  }
  const added = short(s - past.s! * factor, 4);
  if (m > past.m!) {
    const sum = `s = ${short(past.s!, 4)} · ${short(factor, 4)} + ${added} = `;
    return [
      marked("strong", fresh ? "The maximum rises" : "The maximum rose"), `${rise}, so the old sum is multiplied by `, ...times, ". ",
      marked("nobreak", sum, bold(short(s, 4))),
    ];
  }
  return [`The maximum stays ${short(m, 4)}, so the old sum stays as it is. `, marked("nobreak", `s = ${short(past.s!, 4)} + ${added} = `, bold(short(s, 4)))];
}

/** The parts' messages that a state is made of: those that its program has collected since the one before. */
function collectedBy(replay: Replay, state: RowState, past: RowState): readonly Exchange[] {
  return replay.exchanges.filter(
    (each) =>
      each.kind === "collect" && each.row === state.row && each.program === state.program && each.m !== undefined &&
      each.position > past.position && each.position <= state.position,
  );
}

const MOST_PARTS = 8;

function merged(replay: Replay, m: number, s: number, parts: readonly Exchange[]): Words {
  const opening: Words = [marked("strong", "The parts are merged"), `. Each part’s sum is multiplied by ${symbolOf(replay)} to the power of its maximum − ${short(m, 4)}: `];
  const total = bold(short(s, 4));
  if (parts.length > MOST_PARTS) return [...opening, `the ${parts.length} of them add up to s = `, total];
  const terms = parts.flatMap((part, at): Words => {
    const [own, sum] = [decode(part.m), decode(part.s)];
    const factor: Words = own === m ? [] : [` · ${symbolOf(replay)}`, raised(short(own - m, 4))];
    return [at ? " + " : "", short(sum, 4), ...factor];
  });
  return [...opening, "s = ", ...terms, " = ", total];
}

export function chartText(replay: Replay, row: number, { state }: Reduction): string {
  const { reads, writes } = replay.tensor(replay.main);
  const counts = (replay.imagined ? writes : reads).subarray(row * replay.nCols, (row + 1) * replay.nCols);
  const seen = counts.filter((each) => each > 0).length;
  const m = state?.m ?? null;
  const s = state?.s ?? null;
  const known = `${m === null ? "no maximum yet" : `running maximum ${exact(m)}`}, ${s === null ? "no sum yet" : `running sum ${short(s, 4)}`}`;
  return `Row ${row}: ${seen} of ${replay.nCols} columns ${replay.imagined ? "computed" : "read"}, ${known}.`;
}

/** A line of the table that adds up a row of the output. Values that are not there yet are nan. */
export interface SumLine {
  title: Words;
  values: readonly number[];
  kind: "part" | "main" | "next";
}

/** A row of the output as it is added up: what was there, how the maximum's rise corrects it, and what a block adds. */
export function sumLines(replay: Replay, row: number, { state }: Reduction): SumLine[] {
  const name = marked("var", replay.tensors[replay.accumulator]!.name);
  const sums = replay.sumsOf(row);
  const [now, before] = [sums[sums.length - 1], sums[sums.length - 2]];
  if (!now) {
    return [{ title: [name], values: new Array<number>(replay.layouts[replay.accumulator]![1]).fill(NaN), kind: "part" }];
  }
  const lines: SumLine[] = [];
  const factor = (by: number): Words => [`× ${symbolOf(replay)}`, raised(short(by, 4)), ` = ${short(power(replay.base, by), 4)}`];
  if (before) {
    const [from, to] = [before.m ?? NaN, now.m ?? NaN];
    const rise = from === to ? 0 : from - to;
    const old = before.values.map((each) => each * power(replay.base, rise));
    lines.push({ title: [name, " before"], values: before.values, kind: "part" });
    if (!Number.isNaN(rise)) {
      lines.push({ title: rise === 0 ? ["× 1, as m stays"] : factor(rise), values: old, kind: "part" });
      lines.push({ title: ["+ this block"], values: now.values.map((each, at) => each - old[at]!), kind: "part" });
    }
  }
  lines.push({ title: before ? ["= ", name] : [name, " of the first block"], values: now.values, kind: "main" });
  const divided = dividedRow(replay, row);
  if (divided) {
    const output = marked("var", replay.tensors[replay.accumulated]!.name);
    const by: Words = state?.s === 0 ? [output, ", as no key counts"] : ["÷ ", marked("var", "s"), " = ", output];
    lines.push({ title: by, values: divided, kind: "main" });
  }
  else if (now.m !== null && state && state.m !== null && state.m > now.m) {
    const by = now.m - state.m;
    lines.push({ title: ["next: ", ...factor(by)], values: now.values.map((each) => each * power(replay.base, by)), kind: "next" });
  }
  return lines;
}

/** A row of the output that the accumulator becomes, once all of it is written. */
function dividedRow(replay: Replay, row: number): number[] | null {
  if (replay.accumulated < 0) return null;
  const { values, writes } = replay.tensor(replay.accumulated);
  const cols = replay.layouts[replay.accumulated]![1];
  const whole = writes.subarray(row * cols, (row + 1) * cols).every((each) => each > 0);
  return whole ? [...values.subarray(row * cols, (row + 1) * cols)] : null;
}

/** What a message holds, in a few words. */
export function told(message: Exchange): string {
  if (message.d !== undefined) return `d ${short(decode(message.d), 3)}`;
  return `(${short(decode(message.m), 3)}, ${short(decode(message.s), 3)})`;
}

export function lanesText(replay: Replay, row: number): string {
  const passed = replay.exchanges.filter((each) => each.row === row && each.position <= replay.position);
  const said = passed
    .filter((each) => each.kind === "publish")
    .map((each) => `program ${replay.programs[each.program]!.label} published ${each.d === undefined ? "(m, s) = " : ""}${told(each)}`);
  const [collected, missing] = [false, true].map((each) => passed.filter(({ kind, missing = false }) => kind === "collect" && missing === each).length);
  const instead = missing ? ` States computed in place of a message: ${missing}.` : "";
  return said.length === 0 ? "No message yet." : `${said.join("; ")}. Messages collected: ${collected}.${instead}`;
}

/** Whether the programs' messages are one sum each, d, and not m and s. */
export function exchangesOneSum(replay: Replay): boolean {
  return replay.exchanges.some((each) => each.d !== undefined);
}

/** What the 64 bits of a message say: "(3, 1.468)" of m and s. No program writes 0. */
export function bitsText(replay: Replay, cell: Cell, digits = 4): string {
  if (Number(cell) === 0) return "none";
  const { m, s } = messageOf(cell);
  return exchangesOneSum(replay) ? `d ${short(m, digits)}` : `(${short(m, digits)}, ${short(s, digits)})`;
}

/** Whether a local's numbers are messages: integers of more bits than a double has, in a kernel that sends any. */
export function isMessage(replay: Replay, value: Local): boolean {
  return replay.exchanges.length > 0 && isTile(value) && value.dtype === "int64" && value.data.some((each) => typeof each === "string");
}

/** A tile of messages, each said once. */
export function messagesText(replay: Replay, value: Local): string {
  const each = (value as Tile).data.map((cell) => bitsText(replay, cell));
  const state = exchangesOneSum(replay) ? "" : "(m, s) = ";
  return state + (each.every((one) => one === each[0]) ? `${each[0]}${each.length > 1 ? `, ${each.length} times` : ""}` : each.join(", "));
}

/** What stands in a cell of a tensor, for who points at it. */
export function cellText(replay: Replay, index: number, at: number): string {
  const tensor = replay.tensors[index]!;
  const cols = replay.layouts[index]![1];
  const name = `${tensor.name}[${Math.floor(at / cols)}, ${at % cols}]`;
  if (replay.present(index, at)) {
    const opaque = isOpaque(replay, index);
    return `${name} = ${opaque ? `${exchangesOneSum(replay) ? "" : "(m, s) = "}${bitsText(replay, replay.cell(index, at))}, tag ${messageOf(replay.cell(index, at)).tag}` : exact(replay.tensor(index).values[at]!)}`;
  }
  if (replay.never(index, at)) return `${name} is never computed`;
  return `${name} ${tensor.role === "registers" ? "not computed yet" : "not written yet"}`;
}

/** Whether a tensor holds the programs' messages. */
export function isOpaque(replay: Replay, index: number): boolean {
  const { role, dtype } = replay.tensors[index]!;
  return replay.exchanges.length > 0 && role === "scratch" && dtype === "int64" && !replay.given(index);
}

/** A tile that is drawn in colours only, in words. */
export function stripText(tile: Tile, name: string): string {
  const finite = tile.data.map(decode).filter(Number.isFinite);
  const low = finite.reduce((a, b) => Math.min(a, b), Infinity);
  const high = finite.reduce((a, b) => Math.max(a, b), -Infinity);
  return `${name}: ${tile.shape.join(" by ")} ${tile.dtype}, ${finite.length ? `from ${short(low, 3)} to ${short(high, 3)}` : "none finite"}`;
}

/** The state, the written values and the status of a row, as the table of rows has them. */
export interface RowFacts {
  m: string;
  s: string;
  sum: string;
  status: string;
}

const STATUS: Record<string, string> = { ok: "✓ ok", nan: "✕ nan", empty: "∅ empty" };

export function rowFacts(replay: Replay, row: number): RowFacts {
  const result = replay.recording.rows?.find((each) => each.row === row);
  const progress = replay.progress(row);
  const state = replay.state(row);
  const written = replay.written(row);
  const done = progress === "done";
  const m = state?.m ?? (done && result?.max !== undefined ? decode(result.max) : null);
  const s = state?.s ?? (done && result?.sum !== undefined ? decode(result.sum) : null);
  const here = replay.step?.rows?.includes(row);
  const known = (value: number | null) => (value === null ? "–" : short(value, 5));
  return {
    m: known(m),
    s: known(s),
    sum: written.n > 0 ? short(written.sum, 4) : done && replay.imagined ? short(decode(result?.probability_sum), 4) : "–",
    status: done ? (STATUS[result?.status ?? ""] ?? "done") : progress === "running" ? (here ? "▶ running" : "started") : "waiting",
  };
}

/** Figures of the values that a row of the result has so far, by name; nan where there is none yet. */
export function rowFigures(replay: Replay, row: number): [string, number][] {
  const { operation, rows } = replay.recording;
  const result = rows?.find((each) => each.row === row);
  const written = replay.written(row);
  const done = replay.imagined && replay.progress(row) === "done";
  const none = written.n === 0 && !done;
  const figure = (name: string, own: number, whole?: Cell | null): [string, number] => {
    const all = (done || written.n === replay.nCols) && result !== undefined && whole !== undefined;
    return [name, none ? NaN : all ? decode(whole) : own];
  };
  if (operation !== "softmax" && !replay.imagined) {
    return [figure("min", written.min), figure("max", written.max), figure("sum", written.sum)];
  }
  return [
    figure("min probability", written.min, result?.min_probability),
    figure("max probability", written.max, result?.max_probability),
    figure("sum", written.sum, result?.probability_sum),
    figure("entropy, nats", written.entropy, result?.entropy),
  ];
}

/** "read x a 3rd time": what a picture of the traffic shows. */
export function layerName(replay: Replay, { tensor, kind, k }: Layer): string {
  const again = k === 1 ? "" : k === 2 ? " again" : ` a ${ordinal(k)} time`;
  return `${kind} ${replay.tensors[tensor]!.name}${again}`;
}

export function layerText(replay: Replay, layer: Layer, done: number): string {
  return `${layerName(replay, layer)}: ${count(done)} of ${count(layer.size)} elements${layer.floor ? "" : ", above the floor"}`;
}

function ordinal(n: number): string {
  const teen = n % 100 > 10 && n % 100 < 14;
  return `${n}${teen ? "th" : (["th", "st", "nd", "rd"][n % 10] ?? "th")}`;
}

/** The traffic so far: in elements, and as a multiple of the floor. */
export function trafficText(replay: Replay): { moved: string; floor: string } {
  const { position, length } = replay;
  const floor = floorOf(replay.recording);
  const moved = replay.moved();
  const rate = (elements: number) => `${(elements / floor).toFixed(2)}×`;
  return {
    moved: `${count(moved)} elements moved: ${count(replay.reads[position]!)} read, ${count(replay.writes[position]!)} written; ${floor ? `the floor is ${count(floor)}` : "no floor recorded"}`,
    floor: floor ? `${rate(moved)} the floor${position < length ? `, of ${rate(replay.moved(length))} in all` : ""}` : "no floor recorded",
  };
}

export function floorOf({ traffic }: Entry["recording"]): number {
  return traffic ? traffic.floor_reads + traffic.floor_writes : 0;
}

/** What the comparison of two recordings of one matrix comes to; nothing if they do not say what they moved. */
export function verdict(entries: readonly [Entry, Entry]): Words {
  const sides = entries.map(({ kernel, recording }) => {
    const { traffic } = recording;
    return { kernel, moved: traffic ? traffic.reads + traffic.writes : 0, floor: floorOf(recording) };
  });
  sides.sort((a, b) => b.moved - a.moved);
  const [most, least] = sides as [(typeof sides)[0], (typeof sides)[0]];
  if (sides.some((each) => each.moved === 0 || each.floor === 0)) return [];
  const floors: Words =
    most.floor === least.floor
      ? [`No kernel can move fewer than ${count(most.floor)}.`]
      : [`What they compute is not the same: the floor is ${count(most.floor)} for ${most.kernel} and ${count(least.floor)} for ${least.kernel}.`];
  if (most.moved === least.moved) {
    const both: Words = most.kernel === least.kernel ? [bold(most.kernel)] : [bold(most.kernel), " and ", bold(least.kernel)];
    return [...both, ` ${most.kernel === least.kernel ? "moves" : "move"} ${count(most.moved)} elements. `, ...floors];
  }
  return [
    bold(most.kernel), ` moves ${count(most.moved)} elements and `, bold(least.kernel), ` moves ${count(least.moved)}. `, ...floors,
    ` If memory takes all the time, ${least.kernel} is `, bold(`${(most.moved / least.moved).toFixed(2)}×`), " as fast.",
  ];
}

/** How far one side of a comparison has come, at a clock that counts elements. */
export function sideText(replay: Replay, clock: number): Words {
  const total = replay.moved(replay.length);
  if (replay.position === replay.length) {
    return [bold("✓ done"), ` after ${count(total)} elements${clock > total ? `, ${count(clock - total)} ago` : ""}`];
  }
  const phase = replay.step ? `phase ${replay.recording.phases[replay.step.phase]}` : "not started";
  return [`${phase}, ${count(total - replay.moved())} elements to go`];
}
