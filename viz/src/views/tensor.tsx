import { useLayoutEffect, useMemo, useRef } from "preact/hooks";
import { boxesOf, Heat, type Box } from "../heat";
import type { Replay } from "../model";
import { count } from "../numbers";
import { decode } from "../recording";
import { bitsText, cellText, exchangesOneSum, isOpaque } from "../sentences";
import { useWidth } from "./hooks";

/** A cell of at least this width has room for its value. */
const VALUE_WIDTH = 36;
/** The same where several tensors stand side by side. */
const NARROW_WIDTH = 24;
const MESSAGE_WIDTH = 92;
/** Tensors of no more columns stand beside others. */
const SMALL = 3;
const ROW_HEADER = 30;

interface Props {
  replay: Replay;
  index: number;
  position: number;
  selected: number;
  onRow?: (row: number) => void;
  /** The tensor's side, if the page shows two kernels. */
  of?: string;
  /** Whether a wide matrix shows its values and scrolls. Otherwise it shows colours and fits. */
  values: boolean;
}

/** One tensor of a recording: its cells, with boxes over those that the current step reads, writes or holds. */
export function TensorView({ replay, index, position, selected, onRow, values, of }: Props) {
  const tensor = replay.tensors[index]!;
  const [rows, cols] = replay.layouts[index]!;
  const [holder, width] = useWidth<HTMLDivElement>();
  const plane = useRef<HTMLDivElement>(null);
  const heat = useRef<Heat | null>(null);
  const follow = useRef(onRow);
  follow.current = onRow;
  const isMatrix = rows === replay.nRows && tensor.along !== "cols";

  const range = useMemo(() => rangeOf(tensor), [tensor]);
  useLayoutEffect(() => {
    const select = onRow && isMatrix ? (row: number) => follow.current?.(row) : null;
    const options = {
      name: tensor.name, rows, cols, role: tensor.role, range, given: replay.given(index),
      never: (at: number) => replay.never(index, at), said: (at: number) => cellText(replay, index, at),
      ...(isOpaque(replay, index) && { word: (at: number, room: number) => wordOf(replay, index, at, room) }),
    };
    heat.current = new Heat(plane.current!, options, select);
    return () => (heat.current = null);
  }, [replay, index]);

  const room = width - ROW_HEADER;
  const most = isOpaque(replay, index) ? MESSAGE_WIDTH : 64;
  const fitting = Math.min(most, Math.floor(room / Math.max(1, cols)));
  const enough = replay.imagined && cols <= 16 ? NARROW_WIDTH : VALUE_WIDTH;
  const cell = isOpaque(replay, index) ? Math.max(78, fitting) : fitting >= enough ? fitting : values ? 44 : Math.max(5, fitting);
  const bare = cell < enough;
  const boxes = boxesAt(replay, index);

  useLayoutEffect(() => {
    heat.current?.paint(replay.tensor(index), boxes, isMatrix ? selected : -1, bare ? 0 : Math.floor((cell - 2) / 6.7));
    const box = boxes[0];
    const scroll = holder.current;
    if (box && heat.current && scroll && scroll.scrollWidth > scroll.clientWidth + 1) {
      const middle = heat.current.middleOf(box);
      if (middle < scroll.scrollLeft + 48 || middle > scroll.scrollLeft + scroll.clientWidth - 24) {
        scroll.scrollLeft = middle - scroll.clientWidth / 2;
      }
    }
  }, [replay, index, position, cell, selected]);

  const memory = replay.tensor(index);
  const reads = memory.reads.reduce((sum, each) => sum + each, 0);
  const writes = memory.writes.reduce((sum, each) => sum + each, 0);
  const side = { output: "result", input: "source", scratch: "scratch", registers: "held" }[tensor.role];
  return (
    <section
      class={`tensor ${side}${cols <= SMALL ? " small" : ""}${replay.imagined && index === replay.main ? " scores" : ""}`}
      aria-label={`Tensor ${tensor.name}${of ? `, ${of}` : ""}`}
      data-tensor={tensor.name}
      style={{ "--cols": index === replay.accumulator ? 1.5 * cols : cols }}
    >
      <h2>
        <var>{tensor.name}</var>
        <span class="what">
          {tensor.role === "registers" ? "in registers" : tensor.role} · {tensor.shape.join(" × ")} {replay.imagined ? "" : tensor.dtype}
        </span>
        <span class="tally">
          {tensor.role !== "registers" && (tensor.role !== "output" || reads > 0) ? <span class="read">read {count(reads)}</span> : null}
          {tensor.role === "output" || tensor.role === "scratch" ? <span class="write">written {count(writes)}</span> : null}
        </span>
      </h2>
      <div
        class={`scroll${bare ? " bare" : ""}${cols > 24 ? " many" : ""}`}
        ref={holder}
        tabIndex={0}
        role="group"
        aria-label={`Cells of ${tensor.name}`}
        style={{ "--cell": `${cell}px`, "--row": bare ? `${Math.max(rows > 12 ? 11 : 14, Math.min(18, cell))}px` : replay.imagined ? "23px" : "32px" }}
      >
        <div class="plane" ref={plane} />
      </div>
      {replay.imagined && index === replay.main ? (
        <ul class="legend cells" aria-hidden="true">
          <li class="blank">not yet</li>
          <li class="hidden">hidden</li>
          <li class="never">skipped</li>
        </ul>
      ) : null}
    </section>
  );
}

/** A message in a cell: its numbers if they fit, else their names. */
function wordOf(replay: Replay, index: number, at: number, room: number): string {
  const said = bitsText(replay, replay.cell(index, at), 3);
  return said.length <= room ? said : exchangesOneSum(replay) ? "d" : "m, s";
}

/** The cells of a tensor that the current step touches, else those that the program holds. */
export function boxesAt(replay: Replay, index: number): Box[] {
  const { step } = replay;
  if (!step) return [];
  const [rows, cols] = replay.layouts[index]!;
  const stores = (step.stores ?? []).filter((each) => each.tensor === index).flatMap((each) => each.at);
  const loads = (step.loads ?? []).filter((each) => each.tensor === index).flatMap((each) => each.at);
  const touched = [...boxesOf(loads, cols, "read"), ...boxesOf(stores, cols, "write")];
  if (touched.length > 0 || !step.rows?.length) return touched.slice(0, 32);
  // If intermediates live in memory, a program holds nothing between operations.
  if (replay.tensors.some((each, other) => each.role === "scratch" && replay.counted[other])) return [];
  const { role, along } = replay.tensors[index]!;
  if (index === replay.accumulator || (along && role === "input")) {
    const [first, end] = along === "cols" ? (step.cols ?? [0, 0]) : [step.rows[0]!, step.rows[step.rows.length - 1]! + 1];
    const held = end > first && (role === "registers" || replay.holds(index, first, end));
    return held ? [{ rows: [first, end], cols: [0, cols], kind: "hand" }] : [];
  }
  if (rows !== replay.nRows || cols !== replay.nCols || along || role === "scratch") return [];
  if (replay.imagined && !step.cols) return [];
  const range = step.cols ?? ([0, cols] as const);
  const places = step.rows.flatMap((row) => [row * cols + range[0], row * cols + Math.max(range[0], range[1] - 1)]);
  return boxesOf(places, cols, "hand").slice(0, 32);
}

function rangeOf(tensor: Replay["tensors"][number]): [number, number] {
  const finite = (tensor.role === "input" ? tensor.before : tensor.after).map(decode).filter(Number.isFinite);
  if (finite.length === 0) return [0, 1];
  const low = finite.reduce((a, b) => Math.min(a, b));
  const high = finite.reduce((a, b) => Math.max(a, b));
  return tensor.role === "output" && low >= 0 ? [0, high] : [low, high];
}
