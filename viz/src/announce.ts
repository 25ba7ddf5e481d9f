/** A step as a sentence, for the line under the stage and for screen readers. */

import { count, exact, short } from "./numbers";
import type { Replay } from "./model";
import { decode, isTile, type Load, type Local } from "./recording";
import { isMessage, messagesText } from "./sentences";

/** "columns 4 to 7" of the half-open range [4, 8). */
export function columnsText(cols: readonly [number, number]): string {
  return cols[1] - cols[0] === 1 ? `column ${cols[0]}` : `columns ${cols[0]} to ${cols[1] - 1}`;
}

export function rowsText(rows: readonly number[]): string {
  const [first, last] = [rows[0]!, rows[rows.length - 1]!];
  if (rows.length === 1) return `row ${first}`;
  return last - first === rows.length - 1 ? `rows ${first} to ${last}` : `rows ${rows.join(", ")}`;
}

/** A local in a few words: a number in full, a tile by its first values. */
export function localText(value: Local, digits = 4): string {
  if (value === null) return "None";
  if (typeof value === "string") return value;
  if (typeof value === "boolean") return value ? "True" : "False";
  if (!isTile(value)) return short(value, digits);
  if (value.dtype === "pointer") return value.data.length === 1 ? `→ ${String(value.data[0])}` : `→ ${String(value.data[0])} …`;
  if (value.data.length === 1) {
    const cell = value.data[0]!;
    return typeof cell === "boolean" ? (cell ? "True" : "False") : short(decode(cell), digits);
  }
  const shown = value.data.slice(0, 4).map((cell) => (typeof cell === "boolean" ? (cell ? "1" : "0") : short(decode(cell), 3)));
  return `[${shown.join(", ")}${value.data.length > 4 ? ", …" : ""}]`;
}

/** The current step in full sentences. */
export function announcement(replay: Replay): string {
  const { step, recording } = replay;
  if (!step) return `Start of ${recording.title}: ${count(replay.length)} steps. None has run yet.`;
  const parts = [`Step ${replay.position} of ${replay.length}.`, `Program ${replay.programs[replay.program]!.label},`];
  parts.push(`phase ${recording.phases[step.phase] ?? "unnamed"}`);
  if (step.rows?.length) parts.push(`, ${rowsText(step.rows)}`);
  if (step.cols) parts.push(`, ${columnsText(step.cols)}`);
  let text = parts.join(" ").replaceAll(" ,", ",") + `. Line ${step.line}.`;
  text += movesText(replay, "Reads", step.loads ?? []) + movesText(replay, "Writes", step.stores ?? []);
  const set = Object.entries(step.set ?? {}).filter(([, value]) => !isTile(value) || value.data.length === 1);
  if (set.length) text += ` ${set.map(([name, value]) => `${name} = ${isMessage(replay, value) ? messagesText(replay, value) : localText(value)}`).join(", ")}.`;
  if (step.message) text += ` ${messageText(step.message)}.`;
  if (step.note) text += ` ${step.note}`;
  return text;
}

export function messageText(message: NonNullable<NonNullable<Replay["step"]>["message"]>): string {
  const state =
    message.d !== undefined
      ? `d = ${short(decode(message.d), 4)}`
      : `m = ${exact(decode(message.m))}, s = ${short(decode(message.s), 4)}`;
  if (message.kind === "publish") return `Publishes ${state} for row ${message.row}`;
  if (message.missing) return `Has computed ${state} of part ${message.from} itself, for row ${message.row}`;
  const from = message.from === undefined ? "" : ` from part ${message.from}`;
  return `Collects ${state}${from} for row ${message.row}`;
}

/** What a line reads, or writes. A line that waits may ask for the same many times. */
function movesText(replay: Replay, verb: string, moves: readonly Load[]): string {
  const said = moves.map((each) => ` ${verb} ${elements(each.at.length)} of ${replay.recording.tensors[each.tensor]!.name}`);
  return [...new Set(said)].map((each) => {
    const times = said.filter((other) => other === each).length;
    return `${each}${times > 1 ? `, ${count(times)} times` : ""}.`;
  }).join("");
}

function elements(n: number): string {
  return n === 1 ? "1 element" : `${count(n)} elements`;
}
