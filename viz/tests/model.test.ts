import { describe, expect, it } from "vitest";
import { compute, type Modelled } from "../src/recurrence";
import { CHECKPOINT_STEPS, Replay } from "../src/model";
import { softmax64 } from "../src/numerics";
import { checkRecording, decode, type Recording } from "../src/recording";

const SEED = [
  [2.0, -1.0, 3.0, 0.5, -0.5, 1.5, -2.0, 1.0],
  [4.0, -3.0, 2.5, 1.0, -1.5, 0.0, -0.5, 2.0],
  [-1.0, 3.5, -2.5, 1.5, 0.0, -3.0, 2.5, -0.5],
];
const KERNELS: Modelled[] = ["online", "three_pass"];

/** What memory holds when every step up to a position is applied, without checkpoints. */
function replayed(recording: Recording, position: number): number[][] {
  const memory = recording.tensors.map((each) => each.before.map(decode));
  for (const step of recording.steps.slice(0, position)) {
    for (const store of step.stores ?? []) store.at.forEach((at, lane) => (memory[store.tensor]![at] = decode(store.data[lane])));
  }
  return memory;
}

describe.each(KERNELS)("a replay of %s", (kernel) => {
  const recording = checkRecording(compute(kernel, SEED, 4));

  it("ends with what the recording says is there after the run, which is the softmax", () => {
    const replay = new Replay(recording);
    replay.seek(replay.length);
    const y = replay.tensor(1);
    expect([...y.values]).toEqual(recording.tensors[1]!.after.map(decode));
    SEED.forEach((row, r) =>
      softmax64(row).forEach((p, c) => expect(Math.abs(y.values[r * 8 + c]! - p)).toBeLessThan(1e-7)),
    );
    expect([...y.writes].every((n) => n === 1)).toBe(true);
  });

  it("holds the same memory at a position whichever way it came there", () => {
    const replay = new Replay(recording);
    let state = 1;
    for (let i = 0; i < 300; i++) {
      state = (state * 48271) % 2147483647;
      const position = state % (replay.length + 1);
      replay.seek(position);
      expect(replay.position).toBe(position);
      expect(replay.tensors.map((_, index) => [...replay.tensor(index).values])).toEqual(replayed(recording, position));
      const reads = replay.tensor(0).reads.reduce((a, b) => a + b, 0);
      expect(reads).toBe(replay.reads[position]);
    }
    expect(replay.length).toBeGreaterThan(CHECKPOINT_STEPS);
  });

  it("clamps a seek", () => {
    const replay = new Replay(recording);
    replay.seek(1e9);
    expect(replay.position).toBe(replay.length);
    replay.seek(-4);
    expect(replay.position).toBe(0);
    replay.seek(NaN);
    expect(replay.position).toBe(0);
  });

  it("counts the traffic that its kernel is known for", () => {
    const replay = new Replay(recording);
    expect(replay.reads[replay.length]).toBe(kernel === "online" ? 48 : 72);
    expect(replay.writes[replay.length]).toBe(24);
    replay.seek(replay.length);
    expect(new Set(replay.tensor(0).reads)).toEqual(new Set([kernel === "online" ? 2 : 3]));
  });

  it("lays its traffic out in layers, each of the whole matrix, in the order they begin", () => {
    const { layers } = new Replay(recording);
    const reads = kernel === "online" ? [1, 2] : [1, 2, 3];
    expect(layers.filter((each) => each.kind === "read").map((each) => each.k)).toEqual(reads);
    expect(layers.every((each) => each.size === 24)).toBe(true);
    expect(layers.filter((each) => each.floor).map((each) => each.kind)).toEqual(["read", "write"]);
    expect(layers.map((each) => each.first)).toEqual(layers.map((each) => each.first).toSorted((a, b) => a - b));
  });

  it("goes to the next load or store, program and phase, and back", () => {
    const replay = new Replay(recording);
    const block = replay.neighbour("block", 1);
    expect(recording.steps[block - 1]!.loads).toBeDefined();
    replay.seek(block);
    expect(replay.neighbour("block", -1)).toBe(0);
    const program = replay.neighbour("program", 1);
    expect(recording.frames[recording.steps[program]!.frame]!.program[0]).toBe(1);
    replay.seek(program);
    expect(replay.neighbour("program", -1)).toBe(0);
    replay.seek(0);
    const phase = replay.phaseNeighbour(1);
    expect(recording.steps[phase]!.phase).toBe(recording.steps[phase - 1]!.phase + 1);
    replay.seek(replay.length);
    expect(replay.neighbour("line", 1)).toBe(replay.length);
  });

  it("knows the locals of a frame, and which have just changed", () => {
    const replay = new Replay(recording);
    const index = recording.steps.findIndex((step) => step.set?.["s"] !== undefined && step.cols !== undefined);
    replay.seek(index + 1);
    const locals = replay.locals(recording.steps[index]!.frame);
    expect(locals.map((each) => each.name)).toContain("cols");
    expect(locals.filter((each) => each.position === replay.position).map((each) => each.name)).toEqual(["s"]);
  });

  it("finds the columns whose terms add up to the sum", () => {
    const replay = new Replay(recording);
    const seen = recording.steps.flatMap((step, index) => (step.state?.some(({ s }) => Number(s) > 0) ? [index + 1] : []));
    expect(seen.length).toBe(6);
    seen.forEach((position, which) => {
      const row = Math.floor(which / 2);
      const state = replay.state(row, undefined, position)!;
      expect([...state.terms!]).toEqual(which % 2 === 0 ? [1, 1, 1, 1, 0, 0, 0, 0] : Array(8).fill(1));
    });
  });

  it("reports rows as waiting, running and done", () => {
    const replay = new Replay(recording);
    expect([0, 1, 2].map((row) => replay.progress(row))).toEqual(["waiting", "waiting", "waiting"]);
    replay.seek(replay.programSpans[1]!.start + 1);
    expect([0, 1, 2].map((row) => replay.progress(row))).toEqual(["done", "running", "waiting"]);
    expect(replay.written(0).sum).toBeCloseTo(1, 6);
    expect(replay.written(1).n).toBe(0);
  });

  it("finds the position of an amount moved", () => {
    const replay = new Replay(recording);
    for (let elements = 0; elements <= replay.moved(replay.length); elements++) {
      const position = replay.positionMoved(elements);
      expect(replay.moved(position)).toBeLessThanOrEqual(elements);
      if (position < replay.length) expect(replay.moved(position + 1)).toBeGreaterThan(elements);
    }
  });
});

describe("the page's own model", () => {
  it.each(KERNELS)("%s copes with infinities, nan and blocks that do not divide the row", (kernel) => {
    const rows = [
      [-Infinity, -Infinity, -Infinity, 1, 2],
      [1, 2, NaN, 3, 4],
      [1, Infinity, 2, 3, 4],
      [-Infinity, -Infinity, -Infinity, -Infinity, -Infinity],
    ];
    const replay = new Replay(checkRecording(compute(kernel, rows, 2)));
    replay.seek(replay.length);
    const y = (row: number) => [...replay.tensor(1).values.slice(row * 5, row * 5 + 5)];
    if (kernel === "online") expect(y(0)).toEqual([0, 0, 0, expect.closeTo(0.26894, 4), expect.closeTo(0.73106, 4)]);
    expect(y(1).every(Number.isNaN)).toBe(true);
    expect(y(2).some(Number.isNaN)).toBe(true);
    expect(y(3).every(Number.isNaN)).toBe(true);
    expect(replay.recording.rows!.map((each) => each.status)).toEqual(["ok", "nan", "nan", "empty"]);
  });
});

describe("a recording", () => {
  const good = () => structuredClone(compute("online", SEED, 4));

  it.each<[string, (broken: Recording) => unknown, string]>([
    ["not an object", () => 3, "not a recording"],
    ["a list", () => [], "not a recording"],
    ["another schema", (r) => ({ ...r, schema: 9 }), "schema 9"],
    ["no steps", (r) => ({ ...r, steps: [] }), "no steps"],
    ["no list of frames", (r) => ({ ...r, frames: undefined }), "no list “frames”"],
    ["a short tensor", (r) => (r.tensors[0]!.before.pop(), r), "shape 3 × 8, but 23 elements"],
    ["a frame without a source", (r) => ((r.frames[1]!.source = 7), r), "frame 1 names source 7"],
    ["a step without a frame", (r) => ((r.steps[2]!.frame = 99), r), "step 2 names frame 99"],
    ["a load outside", (r) => ((r.steps.find((s) => s.loads)!.loads![0]!.at[0] = 24), r), "touches element 24"],
    ["a caller after its callee", (r) => ((r.frames[0]!.parent = 0), r), "comes before its caller"],
  ])("with %s is refused with a reason", (_, broken, reason) => {
    expect(() => checkRecording(broken(good()))).toThrow(reason);
  });
});

describe("programs that share a row", () => {
  /** Two programs of a row of four: each reduces two columns, tells, collects, merges and writes. */
  function split(): Recording {
    const recording = structuredClone(compute("online", [[1, 3, 2, 5]], 4));
    const frame = (program: number) => ({ source: 0, launch: 0, program: [program, 0, 0], parent: null, call_line: null });
    const s = (row: number[], m: number) => row.reduce((sum, x) => sum + Math.exp(x - m), 0);
    const own = [
      { m: 3, s: s([1, 3], 3) },
      { m: 5, s: s([2, 5], 5) },
    ];
    const all = { row: 0, m: 5, s: s([1, 3, 2, 5], 5) };
    const step = (program: number, more: object) => ({ frame: program, line: 3, phase: 0, rows: [0], ...more });
    return {
      ...recording,
      frames: [frame(0), frame(1)],
      steps: [
        step(0, { loads: [{ tensor: 0, at: [0, 1] }] }),
        step(0, { state: [{ row: 0, ...own[0]! }] }),
        step(0, { message: { kind: "publish", row: 0, from: 0, ...own[0]! } }),
        step(1, { loads: [{ tensor: 0, at: [2, 3] }] }),
        step(1, { state: [{ row: 0, ...own[1]! }] }),
        step(1, { message: { kind: "publish", row: 0, from: 1, ...own[1]! } }),
        step(0, { message: { kind: "collect", row: 0, from: 1, to: 0, ...own[1]! } }),
        step(0, { state: [all] }),
      ],
    };
  }

  it("show the state of the one at hand, and nothing while it knows nothing", () => {
    const replay = new Replay(checkRecording(split()));
    const held = (position: number) => {
      replay.seek(position);
      const holder = replay.holder(0);
      return holder === null ? null : replay.state(0, holder)!.m;
    };
    expect([1, 2, 3, 4, 5, 6, 7, 8].map(held)).toEqual([null, 3, 3, null, 5, 5, 3, 5]);
  });

  it("add up their own columns, and after the merge all of them", () => {
    const replay = new Replay(checkRecording(split()));
    const terms = [2, 5, 8].map((position) => [...replay.state(0, undefined, position)!.terms!]);
    expect(terms).toEqual([
      [1, 1, 0, 0],
      [0, 0, 1, 1],
      [1, 1, 1, 1],
    ]);
  });

  it("are runs of steps of their own, where they take turns", () => {
    const replay = new Replay(checkRecording(split()));
    expect(replay.programSpans.map((each) => [each.program, each.end])).toEqual([[0, 3], [1, 6], [0, 8]]);
    expect(replay.exchanges.map((each) => [each.kind, each.program])).toEqual([["publish", 0], ["publish", 1], ["collect", 0]]);
  });
});

describe("a state whose maximum and sum are set by two lines", () => {
  it("is torn between them", () => {
    const recording = structuredClone(compute("online", [[1, 3, 2, 5]], 2));
    const torn = recording.steps.findLastIndex((step) => step.state);
    const [before] = recording.steps.filter((step) => step.state && step.cols).map((step) => step.state![0]!);
    const after = recording.steps[torn]!.state![0]!;
    recording.steps[torn]!.state = [{ row: 0, m: before!.m!, s: after.s! }];
    recording.steps[torn + 1]!.state = [after];
    const replay = new Replay(checkRecording(recording));
    expect(replay.history(0, replay.length).map((each) => each.torn)).toEqual([false, false, true, false]);
  });
});

describe("what a line computes on its way", () => {
  it.each(KERNELS)("stands in its source, in %s", (kernel) => {
    const { steps, sources } = compute(kernel, SEED, 4);
    const seen = steps.flatMap((step) => (step.computed ?? []).map(({ text }) => [sources[0]!.lines[step.line - 1]!, text] as const));
    expect(seen.length).toBeGreaterThan(0);
    for (const [line, text] of seen) expect(line).toContain(text);
  });
});

/** Attention of one query over four keys in blocks of two: scores and output are in registers, in powers of 2. */
function registers(): Recording {
  const tensor = (name: string, role: Recording["tensors"][number]["role"], shape: number[], after: number[]) => ({
    name, role, dtype: "float32", shape, before: role === "input" ? after : after.map(() => "nan"), after,
  });
  const step = (more: Partial<Recording["steps"][number]>) => ({ frame: 0, line: 1, phase: 0, rows: [0], ...more });
  return {
    schema: 1,
    title: "four keys: attention",
    kernel: "attention",
    operation: "attention",
    options: { base: 2 },
    sources: [{ name: "visit", file: "attention.py", first_line: 1, lines: ["top = max"] }],
    tensors: [
      tensor("z", "registers", [1, 4], [0, 1, 3, 3]),
      { ...tensor("k", "input", [4, 1], [0, 1, 3, 3]), along: "cols" },
      tensor("o", "registers", [1, 2], [10, 2.375]),
      { ...tensor("output", "output", [1, 2], [10 / 2.375, 1]), along: "rows" },
    ],
    phases: ["keys"],
    launches: [{ name: "visit", source: 0, grid: [1, 1, 1], constants: {}, arguments: {} }],
    frames: [{ source: 0, launch: 0, program: [0, 0, 0], parent: null, call_line: null }],
    steps: [
      step({ cols: [0, 2], loads: [{ tensor: 1, at: [0, 1] }] }),
      step({ cols: [0, 2], holds: [{ tensor: 0, at: [0, 1], data: [0, 1] }] }),
      step({ cols: [0, 2], state: [{ row: 0, m: 1 }] }),
      step({ cols: [0, 2], state: [{ row: 0, m: 1, s: 1.5 }] }),
      step({ cols: [0, 2], holds: [{ tensor: 2, at: [0, 1], data: [8, 1.5] }] }),
      step({ cols: [2, 4], loads: [{ tensor: 1, at: [2, 3] }] }),
      step({ cols: [2, 4], holds: [{ tensor: 0, at: [2, 3], data: [3, 3] }] }),
      step({ cols: [2, 4], state: [{ row: 0, m: 3, s: 1.5 }] }),
      step({ cols: [2, 4], state: [{ row: 0, m: 3, s: 2.375 }] }),
      step({ cols: [2, 4], holds: [{ tensor: 2, at: [0, 1], data: [10, 2.375] }] }),
      step({ stores: [{ tensor: 3, at: [0, 1], data: [10 / 2.375, 1] }] }),
    ],
  };
}

describe("scores in registers", () => {
  const replay = new Replay(checkRecording(registers()));

  it("are the matrix, and appear as they are computed", () => {
    expect([replay.main, replay.imagined, replay.result, replay.accumulator, replay.accumulated]).toEqual([0, true, -1, 2, 3]);
    replay.seek(2);
    expect([...replay.tensor(0).values]).toEqual([0, 1, NaN, NaN]);
    replay.seek(8);
    replay.seek(1);
    expect([...replay.tensor(0).writes]).toEqual([0, 0, 0, 0]);
    replay.seek(replay.length);
    expect([...replay.tensor(0).values]).toEqual([0, 1, 3, 3]);
  });

  it("move nothing", () => {
    expect([replay.reads[replay.length], replay.writes[replay.length]]).toEqual([4, 2]);
    expect(replay.layers.map((each) => each.tensor)).toEqual([1, 3]);
    expect(replay.accesses).toEqual([1, 6, 11]);
  });

  it("have a sum that is torn from the step at which the maximum rises until it is corrected", () => {
    const states = replay.history(0, replay.length);
    expect(states.map((each) => [each.m, each.s, each.torn])).toEqual([[1, null, false], [1, 1.5, false], [3, 1.5, true], [3, 2.375, false]]);
    expect(states.filter((each) => each.s !== null && !each.torn).map((each) => [...each.terms!])).toEqual([[1, 1, 0, 0], [1, 1, 1, 1]]);
  });

  it("leave an output that knows of which maximum it is", () => {
    expect(replay.sumsOf(0, replay.length)).toEqual([
      { position: 5, values: [8, 1.5], m: 1 },
      { position: 10, values: [10, 2.375], m: 3 },
    ]);
    expect(replay.sumsOf(0, 4)).toEqual([]);
  });

  it("know which keys the program holds, and which scores are never computed", () => {
    replay.seek(7);
    expect([replay.holds(1, 2, 4), replay.holds(1, 0, 2)]).toEqual([true, false]);
    const skipping = registers();
    skipping.steps = skipping.steps.slice(0, 5);
    const half = new Replay(checkRecording(skipping));
    expect([0, 1, 2, 3].map((at) => half.never(0, at))).toEqual([false, false, true, true]);
    expect(half.never(1, 3)).toBe(false);
  });

  it("are refused if they are of no tensor, or fewer than their places", () => {
    const broken = registers();
    broken.steps[1]!.holds![0]!.tensor = 9;
    expect(() => checkRecording(broken)).toThrow("tensor 9, which is missing");
    broken.steps[1]!.holds = [{ tensor: 0, at: [0, 1], data: [0] }];
    expect(() => checkRecording(broken)).toThrow("stores 1 values at 2 places");
  });
});
