import type { Exchange, Replay } from "../model";
import { exchangesOneSum, lanesText, told } from "../sentences";
import { useWidth } from "./hooks";

const LANE = 46;
const LEFT = 108;

/** Programs that wait for each other, one lane for each, with the messages that they publish and collect, in order. */
export function Lanes({ replay, row }: { replay: Replay; row: number }) {
  const [holder, width] = useWidth<HTMLDivElement>();
  const messages = replay.exchanges.filter((each) => each.row === row);
  const state = exchangesOneSum(replay) ? "d" : "(m, s)";
  const lanes = [...new Set(messages.map((each) => each.program))].sort((a, b) => a - b);
  const events = eventsOf(replay, row, lanes);
  const right = Math.max(LEFT + 40, width - 14);
  const pitch = (right - LEFT) / Math.max(1, events.length);
  const x = (position: number) => LEFT + (events.findIndex((each) => each.position >= position) + 0.5) * pitch;
  const y = (program: number) => 24 + lanes.indexOf(program) * LANE + LANE / 2;
  const now = Math.min(right, LEFT + events.filter((each) => each.position <= replay.position).length * pitch);
  const published = new Map<number, Exchange>();
  messages.forEach((each) => each.kind === "publish" && published.set(each.from ?? lanes.indexOf(each.program), each));
  return (
    <section class="panel lanes" aria-label="Programs that exchange their state">
      <h2>
        Row {row} is split <span class="what">each program reduces a part, publishes its {state} and waits for the others’</span>
      </h2>
      <div ref={holder}>
        {width > 0 && lanes.length > 0 ? (
          <svg width={width} height={30 + lanes.length * LANE} role="img" aria-label={lanesText(replay, row)}>
            <rect class="past" x={LEFT} y={14} width={Math.max(0, now - LEFT)} height={8 + lanes.length * LANE} />
            {lanes.map((program) => {
              const active = replay.program === program && replay.position > 0;
              return (
                <g key={program} class={active ? "lane active" : "lane"}>
                  <text x={0} y={y(program) + 4}>
                    {active ? "▶ " : ""}program {replay.programs[program]!.label}
                  </text>
                  <line x1={LEFT} x2={right} y1={y(program)} y2={y(program)} />
                </g>
              );
            })}
            {messages
              .filter((each) => each.kind === "collect")
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
              if (event.kind === "collect") return <circle key={event.position} class={mark} cx={cx} cy={cy} r={size} />;
              return <rect key={event.position} class={mark} x={cx - size} y={cy - size} width={size * 2} height={size * 2} />;
            })}
            {messages
              .filter((each) => each.kind === "publish" && each.position <= replay.position)
              .map((each) => (
                <text key={each.position} class="message" x={Math.min(x(each.position), right - 96)} y={y(each.program) - 10}>
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
        <li class="store">writes</li>
      </ul>
    </section>
  );
}

interface Event {
  position: number;
  program: number;
  kind: "load" | "store" | "publish" | "collect";
}

/** The lanes' events in order of time: accesses of inputs and outputs in this row, and messages. */
function eventsOf(replay: Replay, row: number, lanes: readonly number[]): Event[] {
  const events: Event[] = [];
  replay.recording.steps.forEach((step, index) => {
    const program = replay.programOf[index]!;
    if (!lanes.includes(program)) return;
    const position = index + 1;
    const touches = (list: typeof step.loads) => list?.some((each) => replay.tensors[each.tensor]!.role !== "scratch");
    if (step.message?.row === row) events.push({ position, program, kind: step.message.kind });
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
