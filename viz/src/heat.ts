/**
 * A matrix as a heat map in a table. It updates the DOM directly, because a step changes only a few cells.
 */

import { exact, fitted } from "./numbers";
import type { Memory } from "./model";
import type { Tensor } from "./recording";

/** A box over some cells: half-open ranges of rows and columns. */
export interface Box {
  rows: [number, number];
  cols: [number, number];
  kind: "read" | "write" | "hand";
}

export interface HeatOptions {
  name: string;
  rows: number;
  cols: number;
  role: Tensor["role"];
  /** The values at the two ends of the colour ramp. */
  range: [number, number];
  /** The text of a written cell whose value is a message's bits, in so many characters. */
  word?: (at: number, room: number) => string;
  /** Whether the kernel never computes an element. */
  never?: (at: number) => boolean;
  /** Whether the values were there before the run. */
  given: boolean;
  /** What stands in a cell, in words. */
  said: (at: number) => string;
}

/** Larger matrices show one window of their rows at a time. */
const MAX_CELLS = 8192;

export class Heat {
  readonly table: HTMLTableElement;
  readonly visibleRows: number;
  private readonly cells: HTMLTableCellElement[] = [];
  private readonly headers: HTMLTableCellElement[] = [];
  private readonly boxes: HTMLDivElement[] = [];
  private readonly shown: Float64Array;
  private readonly marks: Uint16Array;
  private firstRow = 0;
  private room = 0;
  private selected = -1;

  constructor(
    private readonly plane: HTMLElement,
    private readonly options: HeatOptions,
    onRow: ((row: number) => void) | null,
  ) {
    const { rows, cols, name } = options;
    this.visibleRows = Math.max(1, Math.min(rows, Math.floor(MAX_CELLS / Math.max(1, cols))));
    this.shown = new Float64Array(this.visibleRows * cols).fill(NaN);
    this.marks = new Uint16Array(this.visibleRows * cols).fill(0xffff);
    const table = document.createElement("table");
    table.className = "heat";
    const caption = table.createCaption();
    caption.className = "unseen";
    caption.textContent = `${name}: ${rows} rows, ${cols} columns`;
    const head = table.createTHead().insertRow();
    head.append(document.createElement("td"));
    for (let col = 0; col < cols; col++) head.append(header("col", String(col)));
    const body = table.createTBody();
    for (let row = 0; row < this.visibleRows; row++) {
      const line = body.insertRow();
      const th = header("row", "");
      if (onRow) {
        const button = document.createElement("button");
        button.type = "button";
        button.addEventListener("click", () => onRow(this.firstRow + row));
        th.append(button);
      }
      this.headers.push(th);
      line.append(th);
      for (let col = 0; col < cols; col++) this.cells.push(line.insertCell());
    }
    // A cell's full value is written when the pointer is over it, not at every step.
    table.addEventListener("mouseover", (event) => {
      const cell = (event.target as HTMLElement).closest("td");
      const index = cell ? this.cells.indexOf(cell) : -1;
      if (!cell || index === -1) return;
      cell.title = options.said(index + this.firstRow * cols);
    });
    this.table = table;
    this.labelRows();
    plane.replaceChildren(table);
  }

  /** Shows memory's values, each in `room` characters (none if it is 0), with boxes over the cells in use. */
  paint(memory: Readonly<Memory>, boxes: readonly Box[], selected: number, room: number): void {
    if (room !== this.room) {
      this.room = room;
      this.marks.fill(0xffff);
    }
    const { cols, role, rows, given } = this.options;
    const wanted = boxes[0] ? Math.min(boxes[0].rows[0], rows - 1) : this.firstRow;
    const firstRow = Math.floor(wanted / this.visibleRows) * this.visibleRows;
    if (firstRow !== this.firstRow) {
      this.firstRow = firstRow;
      this.marks.fill(0xffff);
      this.labelRows();
    }
    const [low, high] = this.options.range;
    const base = this.firstRow * cols;
    for (let index = 0; index < this.cells.length; index++) {
      const at = base + index;
      if (at >= memory.values.length) continue;
      const value = memory.values[at]!;
      const reads = Math.min(6, memory.reads[at]!);
      const written = memory.writes[at]! > 0 || given;
      const mark = reads | (written ? 8 : 0);
      const fresh = this.marks[index] === 0xffff;
      if (!fresh && mark === this.marks[index] && Object.is(value, this.shown[index])) continue;
      const cell = this.cells[index]!;
      if (fresh || mark !== this.marks[index]) {
        cell.className = `r${reads}${written ? "" : this.options.never?.(at) ? " never" : " blank"}`;
      }
      const hidden = role === "registers" && value === -Infinity;
      cell.classList.toggle("odd", written && !Number.isFinite(value) && !hidden);
      cell.classList.toggle("hidden", written && hidden);
      if (fresh || (mark & 8) !== (this.marks[index]! & 8) || !Object.is(value, this.shown[index])) {
        cell.textContent = !written || room === 0 ? "" : (this.options.word?.(at, room) ?? (hidden ? "−∞" : fitted(value, room)));
        cell.dataset["value"] = written ? exact(value) : "";
        const t = !written || Number.isNaN(value) ? 0 : Math.min(1, Math.max(0, (value - low) / (high - low || 1)));
        cell.style.setProperty("--t", t.toFixed(3));
      }
      this.marks[index] = mark;
      this.shown[index] = value;
    }
    if (selected !== this.selected) {
      this.headers.forEach((th, row) => {
        const on = this.firstRow + row === selected;
        th.classList.toggle("chosen", on);
        th.firstElementChild?.setAttribute("aria-pressed", String(on));
      });
      this.selected = selected;
    }
    this.place(boxes);
  }

  /** Puts the boxes over their cells, whose size may have changed. */
  place(boxes: readonly Box[]): void {
    while (this.boxes.length < boxes.length) {
      const box = document.createElement("div");
      box.setAttribute("aria-hidden", "true");
      this.plane.append(box);
      this.boxes.push(box);
    }
    const first = this.cells[0];
    const last = this.cells[this.cells.length - 1];
    if (!first || !last) return;
    const [left, top] = [first.offsetLeft, first.offsetTop];
    const width = (last.offsetLeft + last.offsetWidth - left) / this.options.cols;
    const height = (last.offsetTop + last.offsetHeight - top) / this.visibleRows;
    this.boxes.forEach((element, index) => {
      const box = boxes[index];
      element.hidden = !box;
      if (!box) return;
      element.className = `visor ${box.kind}`;
      const [row, col] = [Math.max(0, box.rows[0] - this.firstRow), box.cols[0]];
      const rows = Math.min(this.visibleRows, box.rows[1] - this.firstRow) - row;
      element.style.transform = `translate(${left + col * width}px, ${top + row * height}px)`;
      element.style.width = `${(box.cols[1] - col) * width}px`;
      element.style.height = `${rows * height}px`;
    });
  }

  /** The horizontal middle of a box in the plane, in pixels. */
  middleOf(box: Box): number {
    const first = this.cells[0]!;
    return first.offsetLeft + ((box.cols[0] + box.cols[1]) / 2) * first.offsetWidth;
  }

  private labelRows(): void {
    this.selected = -1;
    this.headers.forEach((th, row) => {
      const label = String(this.firstRow + row);
      const button = th.firstElementChild;
      if (button) {
        button.textContent = label;
        button.setAttribute("aria-label", `Follow row ${label}`);
      } else th.textContent = label;
    });
  }
}

function header(scope: string, text: string): HTMLTableCellElement {
  const th = document.createElement("th");
  th.scope = scope;
  th.textContent = text;
  return th;
}

/** The smallest boxes that hold all elements at the given places, one box for each run of equal rows. */
export function boxesOf(at: readonly number[], cols: number, kind: Box["kind"]): Box[] {
  if (at.length === 0) return [];
  const byRow = new Map<number, [number, number]>();
  for (const place of at) {
    const row = Math.floor(place / cols);
    const col = place % cols;
    const range = byRow.get(row);
    if (!range) byRow.set(row, [col, col + 1]);
    else {
      if (col < range[0]) range[0] = col;
      if (col >= range[1]) range[1] = col + 1;
    }
  }
  const boxes: Box[] = [];
  for (const row of [...byRow.keys()].sort((a, b) => a - b)) {
    const range = byRow.get(row)!;
    const last = boxes[boxes.length - 1];
    if (last && last.rows[1] === row && last.cols[0] === range[0] && last.cols[1] === range[1]) last.rows[1] = row + 1;
    else boxes.push({ rows: [row, row + 1], cols: [range[0], range[1]], kind });
  }
  return boxes;
}
