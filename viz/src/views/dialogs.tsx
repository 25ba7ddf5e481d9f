import { useEffect, useRef, useState } from "preact/hooks";
import type { ComponentChildren } from "preact";
import { MAX_COLS, MAX_ELEMENTS, MAX_ROWS, parseMatrix, type Matrix } from "../paste";
import type { Modelled } from "../recurrence";
import type { ServerKernel } from "./hooks";

interface DialogProps {
  title: string;
  open: boolean;
  onClose: () => void;
  children: ComponentChildren;
}

export function Dialog({ title, open, onClose, children }: DialogProps) {
  const ref = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const dialog = ref.current!;
    if (open && !dialog.open) {
      dialog.showModal();
      dialog.querySelector<HTMLElement>("[data-first]")?.focus();
    }
    if (!open && dialog.open) dialog.close();
  }, [open]);
  return (
    <dialog ref={ref} aria-label={title} onClose={onClose}>
      {open ? (
        <>
          <header>
            <h2>{title}</h2>
            <button type="button" class="close" aria-label="Close" onClick={onClose}>✕</button>
          </header>
          {children}
        </>
      ) : null}
    </dialog>
  );
}

export const SHORTCUTS: readonly [string, string][] = [
  ["→  ←", "one line forward, one line back"],
  ["Shift + →  ←", "the next or previous load or store"],
  [".  ,", "the next or previous phase"],
  ["]  [", "the next or previous program"],
  ["Space", "play or pause, by the chosen unit"],
  ["Home  End", "the start, the end"],
  ["+  −", "faster, slower"],
  ["j  k", "follow the row below, above"],
  ["s", "the story: open or close it"],
  ["n  b", "the story's next card, the one before"],
  ["1  2  3", "replay, compare, numerics"],
  ["v", "in wide matrices: the values, or the whole width"],
  ["p  o", "paste a matrix, open a recording"],
  ["l", "copy a link to this step"],
  ["t", "light, dark or automatic theme"],
  ["?", "this list"],
];

export function Help({ open, onClose, keys, onKeys }: { open: boolean; onClose: () => void; keys: boolean; onKeys: (on: boolean) => void }) {
  return (
    <Dialog title="How to read and control this page" open={open} onClose={onClose}>
      <p>
        Each step is one line of a real kernel, as it ran on this matrix. A box marks the cells that the line uses. The line reads the cells
        in a <span class="key read">solid</span> box and writes the cells in a <span class="key write">double</span> box. The program holds
        the cells in a <span class="key hand">dashed</span> box. Every stroke under a cell is one read of it.
      </p>
      <table class="shortcuts">
        <caption class="unseen">Keyboard</caption>
        <tbody>
          {SHORTCUTS.map(([key, what]) => (
            <tr key={key}>
              <th scope="row">
                <kbd>{key}</kbd>
              </th>
              <td>{what}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <label class="check">
        <input type="checkbox" checked={keys} onChange={(event) => onKeys(event.currentTarget.checked)} /> Use the keys of a single letter or sign
      </label>
    </Dialog>
  );
}

export interface PasteRequest {
  matrix: Matrix;
  kernel: string;
  block: number;
  dtype: string;
}

interface PasteProps {
  open: boolean;
  onClose: () => void;
  /** The kernels that a server can record; null without a server. */
  server: readonly ServerKernel[] | null;
  onSubmit: (request: PasteRequest) => Promise<void>;
}

const MODELS: readonly [Modelled, string][] = [
  ["online", "online: maximum and sum in one pass"],
  ["three_pass", "three passes"],
];
const DTYPES = ["float32", "float16", "bfloat16", "float64"];

/** Asks for a matrix, a kernel and its options. */
export function Paste({ open, onClose, server, onSubmit }: PasteProps) {
  const [text, setText] = useState("2.0, -1.0, 3.0, 0.5\n-inf, 1.5, -2.0, 1.0\n");
  const [wanted, setKernel] = useState("online");
  const [block, setBlock] = useState(4);
  const [wantedDtype, setDtype] = useState("float32");
  const [busy, setBusy] = useState(false);
  const [failure, setFailure] = useState("");
  const known = server?.find((each) => each.name === wanted) ?? server?.[0];
  const kernel = known?.name ?? wanted;
  const dtypes = known?.dtypes ?? DTYPES;
  const dtype = dtypes.includes(wantedDtype) ? wantedDtype : dtypes[0]!;
  let matrix: Matrix | null = null;
  let problem = "";
  try {
    matrix = parseMatrix(text);
  } catch (error) {
    problem = (error as Error).message;
  }
  const shape = matrix ? `${matrix.length} × ${matrix[0]!.length}` : "";
  async function submit(event: Event) {
    event.preventDefault();
    if (!matrix) return setFailure(problem);
    setBusy(true);
    setFailure("");
    try {
      await onSubmit({ matrix, kernel, block, dtype });
      onClose();
    } catch (error) {
      setFailure((error as Error).message);
    } finally {
      setBusy(false);
    }
  }
  return (
    <Dialog title="Your own numbers" open={open} onClose={onClose}>
      <form class="paste" onSubmit={submit}>
        <label>
          <span>A matrix, with commas, tabs or spaces, or as JSON. It may contain inf, -inf and nan</span>
          <textarea
            name="matrix"
            data-first
            rows={8}
            spellcheck={false}
            value={text}
            aria-invalid={problem ? "true" : "false"}
            aria-describedby="paste-state"
            onInput={(event) => {
              setText(event.currentTarget.value);
              setFailure("");
            }}
          />
        </label>
        <p id="paste-state" class={problem || failure ? "error" : "quiet"} role="status">
          {failure || problem || `${shape}. At most ${MAX_ROWS} rows, ${MAX_COLS} columns, ${MAX_ELEMENTS} elements.`}
        </p>
        <div class="fields">
          <label>
            <span>kernel</span>
            <select name="kernel" value={kernel} onChange={(event) => setKernel(event.currentTarget.value)}>
              {server
                ? server.map(({ name, title }) => <option key={name} value={name}>{title ? `${name}: ${title}` : name}</option>)
                : MODELS.map(([value, name]) => <option key={value} value={value}>{name}</option>)}
            </select>
          </label>
          <label>
            <span>block, columns</span>
            <select name="block" value={block} disabled={known?.block === false} onChange={(event) => setBlock(Number(event.currentTarget.value))}>
              {[1, 2, 4, 8, 16, 32, 64, 128].map((each) => <option key={each} value={each}>{each}</option>)}
            </select>
          </label>
          {server ? (
            <label>
              <span>dtype</span>
              <select name="dtype" value={dtype} onChange={(event) => setDtype(event.currentTarget.value)}>
                {dtypes.map((each) => <option key={each} value={each}>{each}</option>)}
              </select>
            </label>
          ) : null}
        </div>
        {server ? (
          <p class="quiet">The server runs the kernel under Triton’s interpreter and records it.</p>
        ) : (
          <p class="quiet">
            This page has no server, and cannot run Triton. It computes the recurrence itself, in float32, and says so. To record the real kernel, run{" "}
            <code>fused-softmax serve</code> and paste the matrix there, or run{" "}
            <code>fused-softmax trace --kernel online --matrix matrix.csv -o page.html</code>.
          </p>
        )}
        <div class="actions">
          <button type="submit" class="primary" disabled={busy || matrix === null}>
            {busy ? "Recording…" : server ? "Record and replay" : "Replay"}
          </button>
        </div>
      </form>
    </Dialog>
  );
}
