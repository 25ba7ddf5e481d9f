/** A tour of six stops for who has never seen a kernel: places in the presets, and what to see there. */

import type { Entry } from "./catalogue";
import type { Recording } from "./recording";

interface Stop {
  title: string;
  text: string;
  kernel: string;
  /** How the title of the recording begins. */
  matrix: string;
  /** A selector of what the text speaks of. */
  shows: string;
  /** The number of steps that have run. */
  at: (recording: Recording) => number;
}

export interface Sight extends Stop {
  entry: Entry;
  position: number;
}

const EXAMPLE = "3 x 8 worked example";

/** Behind the first step of which something is true. */
const after = (is: (step: Recording["steps"][number], recording: Recording) => boolean) => (recording: Recording) =>
  recording.steps.findIndex((step) => is(step, recording)) + 1;
const phase = (name: string) => after((step, recording) => recording.phases[step.phase] === name);
const end = (recording: Recording) => recording.steps.length;

const STOPS: readonly Stop[] = [
  {
    title: "Five trips to memory",
    text: "softmax divides e to the power of each number by the sum of its row. Written as five operations of torch, each reads a whole matrix from memory, and writes one back, or a number for each row. Each box under Traffic is one read or one write of a tensor; the bar passes the floor, which is one read and one write.",
    kernel: "naive",
    matrix: EXAMPLE,
    shows: ".meter",
    at: end,
  },
  {
    title: "One row, on the chip",
    text: "A kernel does all five where the numbers are. This program takes one row: it has read it once, and holds it in registers. The source shows the line that has just run; the locals, below the source, what the program holds.",
    kernel: "row",
    matrix: EXAMPLE,
    shows: "[aria-label='Source']",
    at: phase("maximum"),
  },
  {
    title: "A tile",
    text: "A program does not go element by element. It takes a tile, a block of rows and columns, and each line computes all of it at once. The dashed frame is the tile; here it has two rows.",
    kernel: "tile",
    matrix: EXAMPLE,
    shows: ".tensors",
    at: phase("sum"),
  },
  {
    title: "The maximum that rises",
    text: "e to the power of a large number overflows, so the row's maximum is subtracted first. A program that reads a row tile by tile does not know it yet. Whenever a tile raises the maximum m, it rescales the sum s so far. Step on and watch m and s.",
    kernel: "online",
    matrix: "Every tile raises the maximum",
    shows: ".at-hand",
    at: after((step, recording) => (step.note ?? "").startsWith("The old sum") && step.cols?.[0] === 2 && recording.phases[step.phase] !== "output"),
  },
  {
    title: "Programs that talk",
    text: "A long row does not fit into one program. Several share it: each keeps its part, tells the others its m and s in one message, and waits for theirs. The lanes show who has told and who has heard. Nobody reads the row again.",
    kernel: "split",
    matrix: EXAMPLE,
    shows: ".lanes",
    at: after((step) => step.message?.kind === "collect"),
  },
  {
    title: "The floor",
    text: "The row was read once and written once. No softmax can move less, so the time is the memory's. That is what this package does, for rows of one element up to millions.",
    kernel: "split",
    matrix: EXAMPLE,
    shows: ".meter",
    at: end,
  },
];

/** The stops whose recordings are here: all of them, or none. */
export function sights(entries: readonly Entry[]): Sight[] {
  const found = STOPS.flatMap((stop) => {
    const entry = entries.find((each) => each.kernel === stop.kernel && each.recording.title.startsWith(stop.matrix));
    return entry ? [{ ...stop, entry, position: stop.at(entry.recording) }] : [];
  });
  return found.length === STOPS.length ? found : [];
}
