import type { Exchange, Replay } from "../model";
import { bitsOf, type Cell } from "../recording";
import { exchangesOneSum, isOpaque, lanesText, told } from "../sentences";
import { useWidth } from "./hooks";

const LANE = 38;
const LEFT = 108;
/** Below this width lanes have no room for words. */
const NARROW = 520;

/** Programs that wait for each other, one lane for each, with the messages that they publish and collect, in order. */
export function Lanes({ replay, row, bits, onBits }: { replay: Replay; row: number; bits: boolean; onBits: (on: boolean) => void }) {
  const [holder, width] = useWidth<HTMLDivElement>();
  const left = width < NARROW ? 34 : LEFT;
  const messages = replay.exchanges.filter((each) => each.row === row);
  const state = exchangesOneSum(replay) ? "d" : "(m, s)";
  const lanes = [...new Set(messages.map((each) => each.program))].sort((a, b) => a - b);
  const events = eventsOf(replay, row, lanes);
  const right = Math.max(left + 40, width - 14);
  const pitch = (right - left) / Math.max(1, events.length);
  const x = (position: number) => left + (events.findIndex((each) => each.position >= position) + 0.5) * pitch;
  const y = (program: number) => 24 + lanes.indexOf(program) * LANE + LANE / 2;
  const now = Math.min(right, left + events.filter((each) => each.position <= replay.position).length * pitch);
  const published = new Map<number, Exchange>();
  messages.forEach((each) => each.kind === "publish" && published.set(each.from ?? lanes.indexOf(each.program), each));
  return (
    <section class="panel lanes" aria-label="Programs that exchange their state">
      <h2>
        Row {row} is split <span class="what">each program reduces a part, publishes its {state} and waits for the others’</span>
        <button type="button" class="small" aria-pressed={bits} onClick={() => onBits(!bits)}>bits</button>
      </h2>
      <div ref={holder}>
        {width > 0 && lanes.length > 0 ? (
          <svg width={width} height={30 + lanes.length * LANE} role="img" aria-label={lanesText(replay, row)}>
            <rect class="past" x={left} y={14} width={Math.max(0, now - left)} height={8 + lanes.length * LANE} />
            {lanes.map((program) => {
              const active = replay.program === program && replay.position > 0;
              return (
                <g key={program} class={active ? "lane active" : "lane"}>
                  <text x={0} y={y(program) + 4}>
                    {active ? "▶ " : ""}{width < NARROW ? "" : "program "}{replay.programs[program]!.label}
                  </text>
                  <line x1={left} x2={right} y1={y(program)} y2={y(program)} />
                </g>
              );
            })}
            {messages
              .filter((each) => each.kind === "collect" && !each.missing)
              .flatMap((each) =>
                sendersOf(each, published).map((sender) => (
                  <line
                    key={`${each.position}-${sender.position}`}
                    class={`arrow${each.position <= replay.position ? " passed" : ""}${each.position === replay.position ? " now" : ""}`}
                    x1={x(sender.position)}
                    y1={y(sender.program)}
                    x2={x(each.position)}
                    y2={y(each.program)}
                  />
                )),
              )}
            {events.map((event) => {
              const seen = event.position <= replay.position;
              const mark = `event ${event.kind}${seen ? " seen" : ""}${event.position === replay.position ? " now" : ""}`;
              const [cx, cy] = [x(event.position), y(event.program)];
              const size = Math.max(2.5, Math.min(6, pitch * 0.4));
              if (event.kind === "publish") return <circle key={event.position} class={mark} cx={cx} cy={cy} r={size + 1} />;
              if (event.kind === "missing") return <path key={event.position} class={mark} d={`M${cx} ${cy - size - 2}l${size + 2} ${size + 2}l${-size - 2} ${size + 2}l${-size - 2} ${-size - 2}z`} />;
              if (event.kind === "collect") return <circle key={event.position} class={mark} cx={cx} cy={cy} r={size} />;
              return <rect key={event.position} class={mark} x={cx - size} y={cy - size} width={size * 2} height={size * 2} />;
            })}
            {messages
              .filter((each) => each.kind === "publish" && each.position <= replay.position)
              .map((each) => (
                <text key={each.position} class="message" x={Math.min(x(each.position) - 8, right - 70)} y={y(each.program) - 10}>
                  {told(each)}
                </text>
              ))}
          </svg>
        ) : null}
      </div>
      <ul class="legend" aria-hidden="true">
        <li class="load">reads</li>
        <li class="publish">publishes {state}</li>
        <li class="collect">collects</li>
        {events.some((each) => each.kind === "missing") ? <li class="missing">computes what is missing</li> : null}
        <li class="store">writes</li>
      </ul>
      {bits ? <Bits replay={replay} messages={messages.filter((each) => each.kind === "publish" && each.position <= replay.position)} /> : null}
    </section>
  );
}

/** The 64 bits of each message that has been published. */
function Bits({ replay, messages }: { replay: Replay; messages: readonly Exchange[] }) {
  const one = exchangesOneSum(replay);
  const sent = messages.flatMap((each) => {
    const cell = sentAt(replay, each.position);
    return cell === undefined ? [] : [{ message: each, bits: bitsOf(cell) }];
  });
  return (
    <div class="bits">
      <p class="quiet">
        {sent.length ? "" : "No message yet. "}A message is one integer of 64 bits: 32 of <b class="m">{one ? "d" : "m"}</b>, 1 of the{" "}
        <b class="tag">tag</b>, which flips at every launch, {one ? "and 31 that are not used" : <>and 31 of <b class="s">s</b>, which has no sign</>}.
      </p>
      <ul>
        {sent.map(({ message, bits }) => (
          <li key={message.position}>
            program {replay.programs[message.program]!.label} <b>{told(message)}</b>{" "}
            <code><span class="m">{bits.m}</span> <span class="tag">{bits.tag}</span> <span class="s">{bits.s}</span></code>
          </li>
        ))}
      </ul>
    </div>
  );
}

/** The integer that a step has published. */
function sentAt(replay: Replay, position: number): Cell | undefined {
  return replay.recording.steps[position - 1]!.stores?.find((each) => isOpaque(replay, each.tensor))?.data[0];
}

interface Event {
  position: number;
  program: number;
  kind: "load" | "store" | "publish" | "collect" | "missing";
}

/** The lanes' events in order of time: accesses of inputs and outputs in this row, and messages. */
function eventsOf(replay: Replay, row: number, lanes: readonly number[]): Event[] {
  const events: Event[] = [];
  replay.recording.steps.forEach((step, index) => {
    const program = replay.programOf[index]!;
    if (!lanes.includes(program)) return;
    const position = index + 1;
    const touches = (list: typeof step.loads) => list?.some((each) => replay.tensors[each.tensor]!.role !== "scratch");
    if (step.message?.row === row) events.push({ position, program, kind: step.message.missing ? "missing" : step.message.kind });
    else if (step.rows?.includes(row) && touches(step.loads)) events.push({ position, program, kind: "load" });
    else if (step.rows?.includes(row) && touches(step.stores)) events.push({ position, program, kind: "store" });
  });
  return events;
}

/** The messages that a program collects: the one that it names, or all that were published before. */
function sendersOf(collect: Exchange, published: ReadonlyMap<number, Exchange>): Exchange[] {
  if (collect.from !== undefined) {
    const sender = published.get(collect.from);
    return sender ? [sender] : [];
  }
  return [...published.values()].filter((each) => each.position < collect.position);
}
