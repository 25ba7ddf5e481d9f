import { useLayoutEffect, useRef } from "preact/hooks";
import { reveal } from "./hooks";
import { memo } from "./memo";
import { localText } from "../announce";
import type { Replay } from "../model";
import { tokens } from "../python";
import { isTile, type Local } from "../recording";
import { isMessage, messagesText } from "../sentences";

/** The current frame's source, with the line that has just run and the frames that called it. */
export function SourceView({ replay }: { replay: Replay }) {
  const stack = replay.stack();
  const top = stack[0];
  const list = useRef<HTMLOListElement>(null);
  const started = replay.position > 0;
  const line = top?.line || (replay.recording.steps[0]?.line ?? 0); // before the start, the line that comes first
  useLayoutEffect(() => {
    if (list.current) reveal(list.current, list.current.querySelector("[aria-current], .next"), 24);
  }, [line, started, top?.source]);
  if (!top) return null;
  const { source } = top;
  const last = source.ends?.[String(line)] ?? line;
  // A NamedTuple's fields would cover the line that sets them, so only the locals show them.
  const set = Object.entries(replay.step?.set ?? {}).filter(([name, value]) => isShort(value) && !name.includes("."));
  const inline = set.map(([name, value]) => `${name} = ${isMessage(replay, value) ? messagesText(replay, value) : localText(value)}`).join("   ");
  const called = new Map(stack.slice(1).map((each) => [`${each.info.source}:${each.line}`, true]));
  const width = String(source.first_line + source.lines.length).length;
  return (
    <section class="panel source" aria-label="Source">
      <h2>
        Source <span class="what">{source.file}</span>
      </h2>
      <p class="stack">
        {[...stack].reverse().map((each, depth) => (
          <span key={depth} class={depth === stack.length - 1 ? "frame top" : "frame"}>
            {each.source.name}
            {each.line ? <span class="at">:{each.line}</span> : null}
          </span>
        ))}
      </p>
      <ol class="code" ref={list} tabIndex={0} aria-label={`Source of ${source.name}`} style={{ "--digits": width }}>
        {source.lines.map((text, index) => {
          const number = source.first_line + index;
          const here = number >= line && number <= last;
          const now = started && here;
          return (
            <CodeLine
              key={number}
              text={text}
              number={number}
              now={now}
              first={number === line}
              next={!started && here}
              caller={called.has(`${top.info.source}:${number}`)}
              inline={number === last && now ? inline : ""}
            />
          );
        })}
      </ol>
    </section>
  );
}

interface LineProps {
  text: string;
  number: number;
  now: boolean;
  first: boolean;
  /** Whether it runs next, as nothing has run yet. */
  next: boolean;
  caller: boolean;
  inline: string;
}

const CodeLine = memo(function CodeLine({ text, number, now, first, next, caller, inline }: LineProps) {
  return (
    <li class={now ? "now" : next ? "next" : caller ? "caller" : ""} {...(first && now ? { "aria-current": "step" as const } : {})}>
      <span class="number">{number}</span>
      <span class="marker" aria-hidden="true">
        {first && now ? "▶" : first && next ? "▷" : caller ? "↳" : ""}
      </span>
      <code style={{ "--indent": text.length - text.trimStart().length }}>
        {tokens(text).map((token, index) =>
          token.kind === "text" ? token.text : <span key={index} class={`t-${token.kind}`}>{token.text}</span>,
        )}
      </code>
      {inline ? <span class="inline">{inline}</span> : null}
    </li>
  );
});

function isShort(value: Local): boolean {
  return !isTile(value) || value.data.length <= 1;
}
