/** A story in ten cards for who has never seen a kernel: places in the presets, and what to see there. */

import { WORKED, type Entry } from "./catalogue";
import type { Recording, Step } from "./recording";

/** A step of a recording. */
interface Place {
  /** The link's words. */
  name: string;
  kernel: string;
  /** How the title of the recording begins. */
  matrix: string;
  /** The number of steps that have run. */
  at: (recording: Recording) => number;
  /** What the card speaks of: it comes first on the stage. */
  shows: "tensors" | "chart" | "lanes" | "meter";
  /** A row to follow; without it that of the step. */
  row?: number;
}

interface Told {
  title: string;
  /** Paragraphs. Tests compare each number in them with the recordings. */
  text: readonly string[];
  places: readonly Place[];
}

export interface Stop extends Place {
  entry: Entry;
  position: number;
}

export interface Card extends Told {
  /** The first is where the card opens. */
  stops: readonly Stop[];
}

const end = (recording: Recording) => recording.steps.length;

/** Behind the first step of which something is true. */
const after = (is: (step: Step, recording: Recording) => boolean) => (recording: Recording) =>
  recording.steps.findIndex((step) => is(step, recording)) + 1;

/** Behind the first step that runs a line which begins so. */
const line = (opening: string, is: (step: Step) => boolean = () => true) =>
  after((step, recording) => {
    const source = recording.sources[recording.frames[step.frame]!.source]!;
    return source.lines[step.line - source.first_line]!.trim().startsWith(opening) && is(step);
  });

const worked = (name: string, kernel: string, at: Place["at"], shows: Place["shows"]): Place => ({ name, kernel, matrix: WORKED, at, shows });

const STORY: readonly Told[] = [
  {
    title: "Three reads, two, one",
    text: [
      "Before softmax can write a row it needs the row’s maximum and a sum. The plain way reads the row three times: for the maximum, for the sum, for the output. One pass can find both, so two reads are enough. A program that keeps the row in registers reads it once.",
      "Count the strokes under the numbers of x: each is one read from memory.",
    ],
    places: [
      worked("three reads", "hybrid-tiled", end, "tensors"),
      worked("two reads", "online", end, "tensors"),
      worked("one read", "row", end, "tensors"),
    ],
  },
  {
    title: "The tile whose maximum rises",
    text: [
      "e to the power of a large number overflows, so the maximum m is subtracted first. Who reads tile by tile does not know it yet. Here the second tile raises m from 1 to 3, and the sum so far is of the old maximum. It is multiplied by e to the power of −2, which is 0.1353, and nothing has to be read again.",
    ],
    places: [
      {
        name: "the maximum rises",
        kernel: "online",
        matrix: "Every tile raises the maximum",
        at: line("m = m_new", (step) => step.cols?.[0] === 2),
        shows: "chart",
      },
    ],
  },
  {
    title: "The row that does not fit",
    text: [
      "A row can be too long for one program. Then it is cut: here each row of 8 numbers has 2 programs, and each keeps 4 of them in registers. Program 1 knows the maximum and the sum of its own part, 1.5 and 1.772, and not the row’s.",
      "A row that not even the whole chip can keep is read twice, in 2 launches.",
    ],
    places: [
      worked("a part", "split", line("s = sum_of_row", (step) => step.cols?.[0] === 4), "tensors"),
      worked("read twice", "stream", end, "tensors"),
    ],
  },
  {
    title: "The message",
    text: [
      "Program 0 tells the others of its row (3, 1.468): its maximum and its sum. Both are in one integer of 64 bits, which is written whole, so nobody can read half of it. One bit is a tag that flips at every launch: an old message never passes for a new one, and nothing is cleared. The button “bits” shows them.",
    ],
    places: [
      worked("published", "split", after((step) => step.message?.kind === "publish"), "lanes"),
      worked("merged", "split", line("m, s = merged("), "lanes"),
    ],
  },
  {
    title: "The helper",
    text: [
      "A chip does not promise that all programs run at once. Here program 1 has not begun. Program 0 has looked for its message 512 times, and has stopped waiting: it reads columns 4 to 7 itself, finds (1.5, 1.772), and goes on with the same bits. No program waits without an end.",
      "Program 1 comes late, and writes its own part as if nothing had happened.",
    ],
    places: [
      { name: "program 0 helps itself", kernel: "split", matrix: "A part that comes late", at: line("m, s = STATE("), shows: "lanes" },
      { name: "both are done", kernel: "split", matrix: "A part that comes late", at: end, shows: "lanes" },
    ],
  },
  {
    title: "The floor that no kernel passes",
    text: [
      "Each number must be read once and each result written once: 24 and 24 on this matrix, 48 in all. split has moved 48. torch’s five operations move 204, which is 4.25 times the floor.",
      "Memory takes nearly all of the time, so a kernel at the floor is as fast as a copy.",
    ],
    places: [
      worked("at the floor", "split", end, "meter"),
      worked("five operations", "naive", end, "meter"),
    ],
  },
  {
    title: "A loss and its gradient in one pass",
    text: [
      "Cross-entropy needs m, s and one logit of the row. Row 0 loses 3 + log 1.864 − 2 = 1.623. The logits are still in registers, so the gradient is written at once. The 24 logits are read once, and the 3 at the targets a second time.",
      "The gradient is p, and p − 1 at the target, divided by the 3 rows. At the target of row 0 it is −0.2675.",
    ],
    places: [
      worked("the gradient at the target", "cross-entropy", line("tl.store(dx_ptr + T.t"), "tensors"),
      worked("the loss", "cross-entropy", line("tl.store(loss_ptr"), "tensors"),
    ],
  },
  {
    title: "A draw",
    text: [
      "To draw a token, no probability is written and nothing is sorted. Each 8 columns are a group with noise of its own; of the 3 groups of row 0 the second has the greatest score. Its 8 columns are read a second time and drawn alike: token 13.",
    ],
    places: [
      { name: "the group’s columns", kernel: "draw", matrix: "Three groups of columns", at: line("drawn = tl.where(x == NEG_INF"), shows: "tensors" },
      { name: "the token", kernel: "draw", matrix: "Three groups of columns", at: line("tl.store(token_ptr"), shows: "tensors" },
    ],
  },
  {
    title: "Attention",
    text: [
      "Attention is the same recurrence, with an output beside the sum. The second block of keys raises the maximum of query 8 from 2 to 4. Here weights are powers of 2, so the sum and the output so far are multiplied by 2 to the power of −2 = 0.25.",
      "The 12 × 12 scores are never in memory.",
    ],
    places: [
      {
        name: "the second block",
        kernel: "attention",
        matrix: "12 tokens",
        at: line("o = tl.dot", (step) => step.rows?.[0] === 8 && step.cols?.[0] === 4),
        shows: "chart",
        row: 8,
      },
    ],
  },
  {
    title: "A router",
    text: [
      "A router sends each token to its 2 best of 8 experts. Token 0 goes to experts 2 and 0, whose logits are 3 and 2. Their weights are the softmax of these two alone: 0.7311 and 0.2689.",
      "A row is read once. Nothing is sorted in memory, and the other 6 logits are not added up.",
    ],
    places: [
      worked("the weights", "route", line("tl.store(indices_ptr"), "tensors"),
      worked("the first choice", "route", line("found, ids = recorded"), "tensors"),
    ],
  },
];

/** The cards, if all their recordings are here; else none. */
export function storyOf(entries: readonly Entry[]): Card[] {
  const cards = STORY.map((told) => {
    const stops = told.places.flatMap((place) => {
      const entry = entries.find((each) => each.kernel === place.kernel && each.recording.title.startsWith(place.matrix));
      const position = entry ? place.at(entry.recording) : 0;
      return entry && position ? [{ ...place, entry, position }] : [];
    });
    return { ...told, stops };
  });
  return cards.every((each) => each.stops.length === each.places.length) ? cards : [];
}
