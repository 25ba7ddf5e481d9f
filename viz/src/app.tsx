import { useCallback, useEffect, useMemo, useRef, useState } from "preact/hooks";
import { announcement, columnsText, rowsText } from "./announce";
import { choiceOf, choose, entryOf, matrixNames, openingOf, sameChoice, valuesOf, type Choice, type Entry } from "./catalogue";
import { readHash, writeHash, VIEWS, type Place, type View } from "./link";
import { Replay, type Unit } from "./model";
import { short } from "./numbers";
import type { Matrix } from "./paste";
import { checkRecording, decode, encode, readRecordings, rowsAndCols } from "./recording";
import { compute, type Modelled } from "./recurrence";
import { RowChart } from "./views/chart";
import { Compare } from "./views/compare";
import { Help, Paste, type PasteRequest } from "./views/dialogs";
import { useFrames, useNarrow, useRested, type ServerKernel } from "./views/hooks";
import { Lanes } from "./views/lanes";
import { LocalsView } from "./views/locals";
import { Meter } from "./views/meter";
import { NumericsView } from "./views/numerics";
import { RowsView } from "./views/rows";
import { SourceView } from "./views/source";
import { TensorView } from "./views/tensor";
import { Story } from "./views/story";
import { SPEEDS, Transport } from "./views/transport";
import { storyOf } from "./story";

type Theme = "auto" | "light" | "dark";

const VIEW_NAMES: Record<View, string> = { replay: "Replay", compare: "Compare", numerics: "Numerics" };

interface State {
  entries: readonly Entry[];
  choice: Choice;
  versus: string | undefined;
  view: View;
  position: number;
  clock: number;
  /** The row to follow; null for the program's own row. */
  row: number | null;
  /** The card of the story that is open; null if none is. */
  card: number | null;
}

const EMPTY: Omit<State, "entries"> = { choice: {}, versus: undefined, view: "replay", position: 0, clock: 0, row: null, card: null };

interface AppProps {
  entries: Entry[];
  problem: string;
  /** The kernels that the page's server records; null for a page from a disk. */
  server: readonly ServerKernel[] | null;
}

export function App({ entries: given, problem, server }: AppProps) {
  const [state, setState] = useState<State>(() => arrive({ entries: given, ...EMPTY }, readHash(location.hash)));
  const [{ bare, play: asked }] = useState(() => readHash(location.hash));
  const [playing, setPlaying] = useState(() => asked !== undefined && !matchMedia("(prefers-reduced-motion: reduce)").matches);
  const [unit, setUnit] = useState<Unit>("line");
  const [speed, setSpeed] = useState<number>(() => SPEEDS.find((each) => each === asked) ?? 5);
  const [values, setValues] = useState(false);
  const [dialog, setDialog] = useState<"help" | "paste" | null>(null);
  const [message, setMessage] = useState(() => problem || missing(given, readHash(location.hash)));
  const [theme, setTheme] = useTheme();
  const [keys, setKeys] = useState(true);
  const [bits, setBits] = useState(false);
  const [menu, setMenu] = useState(false);
  const narrow = useNarrow();
  const file = useRef<HTMLInputElement>(null);

  const { entries, choice, view } = state;
  const entry = choose(entries, choice)!;
  const replay = useMemo(() => new Replay(entry.recording), [entry]);
  const names = useMemo(() => matrixNames(entries), [entries]);
  const story = useMemo(() => storyOf(entries), [entries]);
  const field = useMemo(() => fieldOf(entries, entry), [entries, entry]);
  const rival = useMemo(() => rivalOf(field, entry, state.versus), [field, entry, state.versus]);
  const pair = useMemo(() => [new Replay(entry.recording), new Replay(rival.recording)] as const, [entry, rival]);
  const clocks = useMemo(() => clocksOf(pair), [pair]);

  replay.seek(state.position);
  const position = replay.position;
  const clock = Math.min(state.clock, clocks[clocks.length - 1] ?? 0);
  for (const each of pair) each.seek(clock === 0 ? 0 : each.positionMoved(clock));
  const card = state.card !== null && story[state.card] && view === "replay" ? state.card : null;
  const stop = card === null ? null : (story[card]!.stops.find((each) => each.entry === entry && each.position === position) ?? null);
  const row = Math.min(Math.max(0, replay.nRows - 1), state.row ?? rowAt(replay));

  const patch = useCallback((change: Partial<State>) => setState((old) => ({ ...old, ...change })), []);
  const seek = (to: number) => patch(view === "compare" ? { clock: to } : { position: to });
  const step = (by: 1 | -1, by_: Unit = unit) => {
    if (view === "compare") {
      const index = clocks.findLastIndex((each) => each <= clock) + by;
      seek(clocks[Math.max(0, Math.min(clocks.length - 1, index))] ?? 0);
    } else seek(replay.neighbour(by_, by));
  };
  const length = view === "compare" ? (clocks[clocks.length - 1] ?? 0) : replay.length;
  const at = view === "compare" ? clock : position;
  const play = () => {
    if (!playing && at >= length) seek(0);
    setPlaying(!playing);
  };

  const owed = useRef(0);
  useFrames(playing && view !== "numerics", (seconds) => {
    owed.current += seconds * speed;
    const steps = Math.min(8, Math.floor(owed.current));
    if (steps === 0) return;
    owed.current -= Math.floor(owed.current);
    if (view === "compare") {
      const index = clocks.findLastIndex((each) => each <= clock) + steps;
      seek(clocks[Math.min(clocks.length - 1, index)] ?? 0);
      if (index >= clocks.length - 1) setPlaying(false);
    } else {
      let to = replay.position;
      for (let i = 0; i < steps; i++) {
        replay.seek(to);
        to = replay.neighbour(unit, 1);
      }
      replay.seek(position);
      seek(to);
      if (to >= replay.length) setPlaying(false);
    }
  });

  const place: Place = {
    view,
    kernel: entry.kernel,
    matrix: entry.matrix,
    ...(entry.block ? { block: entry.block } : {}),
    dtype: entry.dtype,
    ...(view === "compare" ? { versus: rival.kernel, clock } : { step: position }),
    ...(state.row === null ? {} : { row: state.row }),
    ...(card === null ? {} : { story: card + 1 }),
    ...(bare ? { bare } : {}),
    ...(entry.origin === "computed" ? { data: matrixOf(entry) } : {}),
  };
  const hash = writeHash(place);
  const rested = useRested(hash, 300);
  const written = useRef("");
  useEffect(() => {
    written.current = rested;
    remember(rested);
  }, [rested]);
  useEffect(() => {
    const onHash = () => {
      if (location.hash === written.current) return;
      setPlaying(false);
      setState((old) => arrive(old, readHash(location.hash)));
      setMessage(missing(state.entries, readHash(location.hash)));
    };
    addEventListener("hashchange", onHash);
    return () => removeEventListener("hashchange", onHash);
  }, [state.entries]);

  const add = (fresh: Entry[]) => {
    const first = fresh[0];
    if (!first) return;
    setPlaying(false);
    setState((old) => ({
      ...old,
      entries: [...fresh, ...old.entries.filter((each) => !fresh.some((one) => sameChoice(one, each)))],
      choice: choiceOf(first),
      position: 0,
      clock: 0,
      row: null,
      view: old.view === "numerics" ? "replay" : old.view,
    }));
  };
  const open = async (files: readonly File[]) => {
    try {
      const texts = await Promise.all(files.map((each) => each.text()));
      const fresh = texts.flatMap((text, index) => {
        try {
          return readRecordings(text);
        } catch (error) {
          throw new Error(`${files[index]!.name}: ${(error as Error).message}.`);
        }
      });
      add(fresh.map((each) => entryOf(each, "opened")));
      setMessage("");
    } catch (error) {
      setMessage((error as Error).message);
    }
  };
  const submit = async ({ matrix, kernel, block, dtype }: PasteRequest) => {
    if (!server) {
      const models: Modelled[] = kernel === "online" ? ["online", "three_pass"] : ["three_pass", "online"];
      return add(models.map((each) => entryOf(compute(each, matrix, block), "computed")));
    }
    const body = JSON.stringify({ kernel, matrix: matrix.map((line) => line.map(encode)), block, dtype });
    const answer = await fetch("record", { method: "POST", headers: { "Content-Type": "application/json" }, body });
    const text = await answer.text();
    if (!answer.ok) throw new Error(reasonOf(text) || `The server answered ${answer.status}.`);
    add([entryOf(checkRecording(JSON.parse(text)), "recorded")]);
  };
  const copyLink = async () => {
    remember(hash);
    const carried = entry.origin === "preset" || place.data;
    const absent = carried ? "" : " It does not carry the recording: it works where this recording is open.";
    try {
      await navigator.clipboard.writeText(location.href);
      setMessage(`Copied the link to this step.${absent}`);
    } catch {
      setMessage(`The link to this step is in the address bar.${absent}`);
    }
  };
  const select = (field_: keyof Choice, value: string) => {
    setPlaying(false);
    const found = field_ === "kernel" ? openingOf(entries, value, choiceOf(entry)) : choose(entries, { ...choiceOf(entry), [field_]: value }, field_)!;
    patch({ choice: choiceOf(found), position: 0, clock: 0, row: null });
  };
  const visit = (number: number, which = 0) => {
    const found = story[number]?.stops[which];
    if (!found) return;
    setPlaying(false);
    patch({ card: number, choice: choiceOf(found.entry), position: found.position, clock: 0, row: found.row ?? null, view: "replay" });
  };
  const last = useRef(0);
  if (card !== null) last.current = card;
  const leave = () => {
    patch({ card: null });
    document.getElementById("open-story")?.focus();
  };
  const follow = (to: number) => patch({ row: state.row === to ? null : to });

  const actions: Record<string, () => void> = {
    ArrowRight: () => step(1, "line"),
    ArrowLeft: () => step(-1, "line"),
    "Shift+ArrowRight": () => step(1, "block"),
    "Shift+ArrowLeft": () => step(-1, "block"),
    Home: () => seek(0),
    End: () => seek(length),
    " ": play,
    "]": () => step(1, "program"),
    "[": () => step(-1, "program"),
    ".": () => view === "replay" && seek(replay.phaseNeighbour(1)),
    ",": () => view === "replay" && seek(replay.phaseNeighbour(-1)),
    "+": () => setSpeed(SPEEDS.find((each) => each > speed) ?? speed),
    "=": () => setSpeed(SPEEDS.find((each) => each > speed) ?? speed),
    "-": () => setSpeed(SPEEDS.findLast((each) => each < speed) ?? speed),
    j: () => patch({ row: Math.min(replay.nRows - 1, row + 1) }),
    k: () => patch({ row: Math.max(0, row - 1) }),
    v: () => setValues(!values),
    p: () => setDialog("paste"),
    o: () => file.current?.click(),
    l: () => void copyLink(),
    t: () => setTheme(next(theme)),
    s: () => !bare && (card === null ? visit(last.current) : leave()),
    n: () => card !== null && visit(card + 1),
    b: () => card !== null && visit(card - 1),
    "1": () => patch({ view: "replay" }),
    "2": () => patch({ view: "compare" }),
    "3": () => patch({ view: "numerics" }),
    "?": () => setDialog("help"),
  };
  const act = useRef(actions);
  act.current = actions;
  const listening = useRef(true);
  listening.current = keys;
  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || !listening.current) return;
      if (document.querySelector("dialog[open]")) return;
      const target = event.target as HTMLElement;
      if (target.closest("textarea, select, input:not([type=range]):not([type=radio])")) return;
      if (target.closest("button, a, [role=tab], input[type=radio]") && /^( |Enter)$/.test(event.key)) return;
      if (target.closest("input, [role=tab]") && /^(Arrow|Home|End)/.test(event.key) && !event.shiftKey) return;
      const key = event.shiftKey && event.key.startsWith("Arrow") ? `Shift+${event.key}` : event.key;
      const action = act.current[key];
      if (!action) return;
      event.preventDefault();
      setPlayingUnless(key);
      action();
    };
    const setPlayingUnless = (key: string) => {
      if (/^(Shift\+)?Arrow|^(Home|End|\]|\[|\.|,)$/.test(key)) setPlaying(false);
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);

  const sentence = view === "compare" ? `${clock} elements moved` : announcement(replay);
  useEffect(() => {
    document.title = `${entry.recording.title} · softmax, as the kernel does it`;
  }, [entry]);
  const spoken = useRested(playing ? "" : sentence, 120);
  const drop = useDrop((files) => void open([...files]));

  const hint = `${narrow ? "Press ▶ to play, or → for one line." : "Press → to run the first line, or Space to play."}${story.length && !bare ? " The Story tells the rest in ten cards." : ""}`;
  const about = (
    <p class="about">
      {entry.recording.summary} <span class="origin">{originOf(entry, server !== null)}</span>
    </p>
  );
  const storyButton = story.length ? (
    <button type="button" class="main" id="open-story" aria-expanded={card !== null} onClick={() => (card === null ? visit(last.current) : leave())}>Story</button>
  ) : null;

  return (
    <div class={`page${drop ? " dropping" : ""}`}>
      <header class="top" hidden={Boolean(bare)}>
        <div class="title">
          <h1>
            Softmax<em>, as the kernel does it</em>
          </h1>
          <nav role="tablist" aria-label="Views">
            {VIEWS.map((each) => (
              <button
                key={each}
                type="button"
                role="tab"
                id={`tab-${each}`}
                aria-selected={each === view}
                aria-controls="view"
                tabIndex={each === view ? 0 : -1}
                onClick={() => patch({ view: each })}
                onKeyDown={(event) => {
                  const by = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
                  if (!by || event.shiftKey) return;
                  event.preventDefault();
                  const other = VIEWS[(VIEWS.indexOf(view) + by + VIEWS.length) % VIEWS.length]!;
                  patch({ view: other });
                  document.getElementById(`tab-${other}`)?.focus();
                }}
              >
                {VIEW_NAMES[each]}
              </button>
            ))}
          </nav>
          {narrow ? (
            <button type="button" class="more" aria-expanded={menu} aria-controls="tools" aria-label="More" onClick={() => setMenu(!menu)}>⋯</button>
          ) : null}
          <div class="tools" id="tools" role="toolbar" aria-label="Page" hidden={narrow && !menu}>
            {narrow ? null : storyButton}
            <button type="button" onClick={() => setDialog("paste")}>Your numbers</button>
            <button type="button" onClick={() => file.current?.click()}>Open</button>
            <button type="button" onClick={() => void copyLink()}>Link</button>
            <button type="button" onClick={() => setTheme(next(theme))} aria-label={`Theme: ${theme}`}>
              {theme === "auto" ? "◐ auto" : theme === "light" ? "○ light" : "● dark"}
            </button>
            <button type="button" onClick={() => setDialog("help")} aria-label="Help and keyboard">?</button>
            <input
              ref={file}
              type="file"
              accept=".json,application/json"
              multiple
              hidden
              onChange={(event) => {
                void open([...(event.currentTarget.files ?? [])]);
                event.currentTarget.value = "";
              }}
            />
          </div>
        </div>
        {card !== null ? (
          <Story cards={story} number={card} shown={stop} onGo={visit} onClose={leave} />
        ) : (
        <div class="choices">
          <Pick label="kernel" value={entry.kernel} options={valuesOf(entries, "kernel")} onPick={(kernel) => select("kernel", kernel)} first />
          <Pick
            label="matrix"
            value={entry.matrix}
            options={valuesOf(entries, "matrix")}
            names={names}
            onPick={(matrix) => select("matrix", matrix)}
          />
          <Pick label="block" value={entry.block} options={valuesOf(entries, "block", { kernel: entry.kernel, matrix: entry.matrix })} onPick={(block) => select("block", block)} />
          <Pick label="dtype" value={entry.dtype} options={valuesOf(entries, "dtype", { kernel: entry.kernel, matrix: entry.matrix })} onPick={(dtype) => select("dtype", dtype)} />
          {narrow ? storyButton : about}
        </div>
        )}
        {message ? (
          <p class="message" role="alert">
            {message}{" "}
            <button type="button" aria-label="Dismiss" onClick={() => setMessage("")}>✕</button>
          </p>
        ) : null}
      </header>

      <main>
        <div id="view" role="tabpanel" aria-labelledby={`tab-${view}`} class={view}>
        {view === "replay" ? <ReplayView {...{ replay, position, row, follow, values, entry, narrow, bits, hint }} onValues={setValues} onBits={setBits} pinned={state.row !== null} first={card === null ? null : (stop ?? story[card]!.stops[0]!).shows} /> : null}
        {view === "compare" ? (
          <Compare
            left={entry}
            right={rival}
            replays={pair}
            clock={clock}
            kernels={[...new Set(field.map((each) => each.kernel))]}
            onKernel={(side, kernel) => (side === "kernel" ? select("kernel", kernel) : patch({ versus: kernel, clock: 0 }))}
            values={values}
            field={field}
          />
        ) : null}
        {view === "numerics" ? <NumericsView row={rowValues(replay, row)} rowName={`row ${row} of the matrix`} /> : null}
        {narrow || card !== null ? about : null}
        </div>
      </main>

      {view === "numerics" ? null : (
        <Transport
          position={at}
          length={length}
          playing={playing}
          unit={unit}
          speed={speed}
          onSeek={(to) => {
            setPlaying(false);
            seek(to);
          }}
          onStep={(by) => {
            setPlaying(false);
            step(by);
          }}
          onPlay={play}
          onUnit={setUnit}
          narrow={narrow}
          onSpeed={setSpeed}
          {...(view === "replay" ? { replay } : {})}
          place={view === "compare" ? `${clock} of ${length} elements` : `Step ${position} of ${length}`}
        />
      )}
      <p class="unseen" role="status" aria-live="polite">{spoken}</p>
      <Help open={dialog === "help"} onClose={() => setDialog((now) => (now === "help" ? null : now))} keys={keys} onKeys={setKeys} />
      <Paste
        open={dialog === "paste"}
        onClose={() => setDialog((now) => (now === "paste" ? null : now))}
        server={server}
        onSubmit={submit}
      />
    </div>
  );
}

interface ReplayProps {
  replay: Replay;
  position: number;
  row: number;
  follow: (row: number) => void;
  pinned: boolean;
  values: boolean;
  onValues: (values: boolean) => void;
  bits: boolean;
  onBits: (bits: boolean) => void;
  entry: Entry;
  narrow: boolean;
  /** What comes first, below the step; null for the order of the page. */
  first: string | null;
  /** What to do before the first step. */
  hint: string;
}

function ReplayView({ replay, position, row, follow, pinned, values, onValues, bits, onBits, entry, narrow, first, hint }: ReplayProps) {
  const { recording, step } = replay;
  // Scratch that counts as traffic stands in the order of the computation; the programs' messages stand aside.
  const aside = (index: number) => recording.tensors[index]!.role === "scratch" && !replay.counted[index];
  const indices = recording.tensors.map((_, index) => index);
  // Beside scores that are in registers stand the tensors that have the same rows, in the order of the computation.
  const factors = indices.filter((each) => recording.tensors[each]!.along === "rows" && recording.tensors[each]!.role === "input");
  const ofRows = [...factors, replay.main, replay.accumulator].filter((each) => each >= 0);
  const messages = replay.exchanges.some((each) => each.row === row);
  const holder = replay.holder(row);
  const state = holder === null ? null : replay.state(row, holder);
  const reduces = replay.state(row, undefined, replay.length) !== null;
  const tensor = (index: number) => (
    <TensorView
      key={`${entry.matrix}${entry.kernel}${index}`}
      replay={replay}
      index={index}
      position={position}
      selected={row}
      onRow={follow}
      values={values}
    />
  );
  const shown = indices.filter((each) => !aside(each));
  const [one, others] = messages && narrow ? [shown.slice(0, 1), shown.slice(1)] : [shown, []];
  return (
    <>
      <div class="left" {...(first ? { "data-first": first } : {})}>
        <dl class="at-hand" aria-label="Current step">
          <div>
            <dt>program</dt>
            <dd>{step ? replay.programs[replay.program]!.label : "–"}</dd>
          </div>
          <div>
            <dt>{replay.imagined ? "queries" : "row"}</dt>
            <dd>{step?.rows?.length ? rowsText(step.rows).replace(/^rows? /, "") : "–"}</dd>
          </div>
          <div>
            <dt>{replay.imagined ? "keys" : "block"}</dt>
            <dd>{step?.cols ? columnsText(step.cols).replace(/^columns? /, "") : "–"}</dd>
          </div>
          <div class="phase-name">
            <dt>phase</dt>
            <dd>{step ? recording.phases[step.phase] : "not started"}</dd>
          </div>
          {reduces
            ? (["m", "s"] as const).map((name) => (
                <div key={name} class="figure">
                  <dt>{name}{replay.imagined ? <span class="whose"> of query {row}</span> : null}</dt>
                  <dd>{state?.[name] == null ? "–" : short(state[name], 4)}</dd>
                </div>
              ))
            : null}
        </dl>
        <p class="note">
          <span>{step ? (step.note ?? "") : hint}</span>
          {replay.nCols > 12 ? (
            <button type="button" aria-pressed={values} onClick={() => onValues(!values)}>
              {values ? "whole width" : "values"}
            </button>
          ) : null}
        </p>
        {replay.imagined ? <div class="tensors product">{ofRows.map(tensor)}</div> : null}
        {replay.imagined ? null : (
          <div class={`tensors${replay.nCols > 12 ? " wide" : ""}`}>{one.map(tensor)}</div>
        )}
        {messages ? <Lanes replay={replay} row={row} bits={bits} onBits={onBits} /> : null}
        {others.length && !replay.imagined ? <div class="tensors">{others.map(tensor)}</div> : null}
        {reduces ? <RowChart replay={replay} row={row} /> : null}
        {replay.imagined ? <div class="tensors product">{indices.filter((each) => !aside(each) && !ofRows.includes(each)).map(tensor)}</div> : null}
        <Meter replay={replay} />
        {indices.some(aside) ? <div class="tensors aside">{indices.filter(aside).map(tensor)}</div> : null}
        <RowsView replay={replay} selected={row} onRow={follow} />
        <p class="quiet follow">{pinned ? `Following row ${row}. Choose it again to follow the program.` : "Following the program’s row. Choose a row to stay with it."}</p>
      </div>
      <div class="right">
        <SourceView replay={replay} />
        <LocalsView replay={replay} />
      </div>
    </>
  );
}

interface PickProps {
  label: string;
  value: string;
  options: readonly string[];
  names?: ReadonlyMap<string, string>;
  onPick: (value: string) => void;
  first?: boolean;
}

function Pick({ label, value, options, names, onPick, first }: PickProps) {
  if (options.length === 0 || (options.length === 1 && options[0] === "")) return null;
  return (
    <label class={`pick ${label}${first ? " first" : ""}`}>
      <span>{label}</span>
      <select name={label} value={value} onChange={(event) => onPick(event.currentTarget.value)} disabled={options.length < 2}>
        {options.map((each) => (
          <option key={each} value={each}>{names?.get(each) ?? each}</option>
        ))}
      </select>
    </label>
  );
}

/** The state that a link describes. A link with a matrix brings its own entries. */
function arrive(old: State, place: Place): State {
  let { entries } = old;
  let choice: Choice = { kernel: place.kernel, matrix: place.matrix, block: place.block, dtype: place.dtype };
  if (place.data) {
    const block = Number(place.block) || 4;
    const fresh = (["online", "three_pass"] as const).map((each) => entryOf(compute(each, place.data!, block), "computed"));
    entries = [...fresh, ...entries.filter((each) => !fresh.some((one) => sameChoice(one, each)))];
    choice = { ...choice, matrix: fresh[0]!.matrix };
  }
  if (Object.values(choice).every((each) => each === undefined)) {
    const stop = place.story ? storyOf(entries)[place.story - 1]?.stops[0] : undefined;
    if (stop) return { ...old, ...EMPTY, choice: choiceOf(stop.entry), position: stop.position, row: stop.row ?? null, card: place.story! - 1 };
    choice = choiceOf(opening(entries));
  }
  return {
    entries,
    choice,
    versus: place.versus,
    view: place.view,
    position: place.step ?? 0,
    clock: place.clock ?? 0,
    row: place.row ?? null,
    card: place.story ? place.story - 1 : null,
  };
}

/** What a link asks for that the page does not have. */
function missing(entries: readonly Entry[], place: Place): string {
  if (place.data) return "";
  if (place.kernel && !entries.some((each) => each.kernel === place.kernel)) {
    return `This page has no recording of a kernel “${place.kernel}”, so it shows another one.`;
  }
  if (place.matrix && !entries.some((each) => each.matrix === place.matrix)) {
    return "This page has no recording of the matrix that the link names, so it shows another one.";
  }
  return "";
}

/** The entry to show first: the recording that the page was made for, else the online recurrence. */
function opening(entries: readonly Entry[]): Entry {
  const first = entries[0]!;
  return first.origin === "embedded" ? first : (entries.find((each) => each.kernel === "online") ?? first);
}

/** For each kernel, its recording on the entry's matrix that is nearest to the entry in block and dtype. */
function fieldOf(entries: readonly Entry[], entry: Entry): Entry[] {
  const same = entries.filter((each) => each.matrix === entry.matrix);
  return valuesOf(same, "kernel").map((kernel) => (kernel === entry.kernel ? entry : choose(same, { ...choiceOf(entry), kernel })!));
}

/** The entry to compare with: the kernel asked for, else the one whose traffic differs most. */
function rivalOf(field: readonly Entry[], entry: Entry, versus: string | undefined): Entry {
  const asked = field.find((each) => each.kernel === versus);
  if (asked) return asked;
  const moved = (each: Entry) => (each.recording.traffic ? each.recording.traffic.reads + each.recording.traffic.writes : 0);
  return field.reduce((best, each) => (Math.abs(moved(each) - moved(entry)) > Math.abs(moved(best) - moved(entry)) ? each : best), entry);
}

/** The numbers of moved elements at which either replay has just read or written. */
function clocksOf(pair: readonly Replay[]): number[] {
  const values = new Set(pair.flatMap((each) => each.accesses.map((position) => each.moved(position))));
  return [0, ...[...values].filter((each) => each > 0).sort((a, b) => a - b)];
}

/** The row of the current step, or of the last step that had one. */
function rowAt(replay: Replay): number {
  for (let index = replay.position - 1; index >= 0; index--) {
    const row = replay.recording.steps[index]!.rows?.[0];
    if (row !== undefined) return row;
  }
  return 0;
}

function rowValues(replay: Replay, row: number): Float64Array {
  const [first, end] = [row * replay.nCols, (row + 1) * replay.nCols];
  if (!replay.imagined) return Float64Array.from(replay.tensor(replay.main).values.subarray(first, end));
  const computed = replay.tensors[replay.main]!.after.filter((_, at) => at >= first && at < end && !replay.never(replay.main, at));
  return Float64Array.from(computed, decode);
}

function matrixOf(entry: Entry): Matrix {
  const tensor = entry.recording.tensors[0]!;
  const [rows, cols] = rowsAndCols(tensor.shape);
  return Array.from({ length: rows }, (_, row) => tensor.before.slice(row * cols, (row + 1) * cols).map(decode));
}

function originOf(entry: Entry, served: boolean) {
  const { environment } = entry.recording;
  if (entry.origin === "computed") {
    return (
      <>
        <b class="badge">Computed by the page, not recorded.</b>{" "}
        {served ? (
          <>To record the real kernel, enter the matrix under “Your numbers”.</>
        ) : (
          <>To record the real kernel, run <code>fused-softmax serve</code> and paste the matrix there.</>
        )}
      </>
    );
  }
  const versions = environment ? ["triton", "torch"].flatMap((name) => (environment[name] ? [`${name} ${environment[name]}`] : [])) : [];
  const what = entry.recording.launches.every((each) => each.name.startsWith("aten."))
    ? "torch’s own operations, as they ran"
    : "the real kernel under Triton’s interpreter";
  return `Recorded: ${[what, ...versions].join(", ")}.`;
}

/** Puts a hash into the address bar. A frame without an origin has none. */
function remember(hash: string): void {
  try {
    history.replaceState(null, "", hash);
  } catch {
    // The page works without a link.
  }
}

function reasonOf(text: string): string {
  try {
    const value = JSON.parse(text) as { error?: unknown };
    return typeof value.error === "string" ? value.error : "";
  } catch {
    return text.length < 300 && !text.trimStart().startsWith("<") ? text : "";
  }
}

function next(theme: Theme): Theme {
  return theme === "auto" ? "light" : theme === "light" ? "dark" : "auto";
}

function useTheme(): [Theme, (theme: Theme) => void] {
  const [theme, setTheme] = useState<Theme>(() => {
    try {
      const saved = localStorage.getItem("fused-softmax-theme");
      return saved === "light" || saved === "dark" ? saved : "auto";
    } catch {
      return "auto";
    }
  });
  useEffect(() => {
    document.documentElement.dataset["theme"] = theme;
  }, [theme]);
  useEffect(() => {
    // A page that has this one in a frame may answer with its own theme, now and whenever it changes.
    if (parent === window) return;
    const onMessage = ({ data }: MessageEvent) => {
      if (data?.theme === "light" || data?.theme === "dark") setTheme(data.theme);
    };
    addEventListener("message", onMessage);
    parent.postMessage({ ask: "theme" }, "*");
    return () => removeEventListener("message", onMessage);
  }, []);
  const keep = (chosen: Theme) => {
    setTheme(chosen);
    try {
      localStorage.setItem("fused-softmax-theme", chosen);
    } catch {
      // A page without storage forgets the theme.
    }
  };
  return [theme, keep];
}

/** Whether files are held over the page. Calls back with the dropped files. */
function useDrop(onFiles: (files: FileList) => void): boolean {
  const [over, setOver] = useState(false);
  const callback = useRef(onFiles);
  callback.current = onFiles;
  useEffect(() => {
    const onOver = (event: DragEvent) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      setOver(true);
    };
    const onLeave = (event: DragEvent) => event.relatedTarget === null && setOver(false);
    const onDrop = (event: DragEvent) => {
      if (!event.dataTransfer?.files.length) return;
      event.preventDefault();
      setOver(false);
      callback.current(event.dataTransfer.files);
    };
    addEventListener("dragover", onOver);
    addEventListener("dragleave", onLeave);
    addEventListener("drop", onDrop);
    return () => {
      removeEventListener("dragover", onOver);
      removeEventListener("dragleave", onLeave);
      removeEventListener("drop", onDrop);
    };
  }, []);
  return over;
}
