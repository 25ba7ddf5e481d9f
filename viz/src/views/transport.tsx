import { useState } from "preact/hooks";
import type { Replay, Unit } from "../model";
import { memo } from "./memo";

export const SPEEDS = [1, 2, 5, 10, 20, 30, 60] as const;

interface Props {
  position: number;
  length: number;
  playing: boolean;
  unit: Unit;
  speed: number;
  onSeek: (position: number) => void;
  onStep: (by: 1 | -1) => void;
  onPlay: () => void;
  onUnit: (unit: Unit) => void;
  onSpeed: (speed: number) => void;
  /** Absent in a comparison: its clock has no lines. */
  replay?: Replay;
  /** The slider's position, in words. */
  place: string;
  narrow: boolean;
}

/** The line that has just run, for screens on which the source is out of sight. The announcer speaks it. */
function NowLine({ replay }: { replay: Replay }) {
  const top = replay.stack()[0];
  const line = top?.line || replay.recording.steps[0]?.line;
  if (!top || !line) return null;
  const { source } = top;
  const last = source.ends?.[String(line)] ?? line;
  const lines = source.lines.slice(line - source.first_line, last - source.first_line + 1);
  return (
    <p class="now-line" aria-hidden="true">
      <span class="what">{line}</span> <code>{lines.map((each) => each.trim()).join(" ")}</code>
    </p>
  );
}

/** Buttons to step and play, and a slider. A map above the slider shows the steps' programs and phases. */
export function Transport(props: Props) {
  const { position, length, playing, unit, speed, onSeek, onStep, onPlay, onUnit, onSpeed, replay, place, narrow } = props;
  const [more, setMore] = useState(false);
  return (
    <section class="transport" aria-label="Playback">
      {replay ? <NowLine replay={replay} /> : null}
      <div class={replay ? "track mapped" : "track"}>
        {replay ? <Map_ replay={replay} position={position} /> : null}
        <input
          type="range"
          min={0}
          max={length}
          value={position}
          aria-label={replay ? "Step" : "Elements moved"}
          aria-valuetext={place}
          onInput={(event) => onSeek(Number(event.currentTarget.value))}
        />
      </div>
      <div class="buttons">
        <div class="group" role="group" aria-label="Steps">
          <button type="button" onClick={() => onSeek(0)} aria-label="To the start" title="Home">⇤</button>
          <button type="button" onClick={() => onStep(-1)} aria-label="Back" title="←">←</button>
          <button type="button" class="play" onClick={onPlay} aria-label={playing ? "Pause" : "Play"} title="Space">
            {playing ? "❚❚" : "▶"}
          </button>
          <button type="button" onClick={() => onStep(1)} aria-label="Step" title="→">→</button>
          <button type="button" onClick={() => onSeek(length)} aria-label="To the end" title="End">⇥</button>
        </div>
        <span class="where">
          <b data-position={position}>{position}</b> / {length}
        </span>
        {narrow ? (
          <button type="button" class="more" aria-expanded={more} aria-label="More controls" onClick={() => setMore(!more)}>⋯</button>
        ) : null}
        {replay && (more || !narrow) ? (
          <div class="group choice" role="radiogroup" aria-label="Step by">
            {(["line", "block", "program"] as const).map((each) => (
              <label key={each} class={each === unit ? "on" : ""}>
                <input type="radio" name="unit" checked={each === unit} onChange={() => onUnit(each)} />
                {each}
              </label>
            ))}
          </div>
        ) : null}
        {more || !narrow ? (
        <label class="speed">
          <span>per second</span>
          <select value={speed} onChange={(event) => onSpeed(Number(event.currentTarget.value))} aria-label="Steps per second">
            {SPEEDS.map((each) => (
              <option key={each} value={each}>{each}</option>
            ))}
          </select>
        </label>
        ) : null}
        {replay && (more || !narrow) ? <Jump replay={replay} onSeek={onSeek} /> : null}
      </div>
    </section>
  );
}

/** Later phases are not listed. */
const MAX_LISTED = 600;

/** A list of programs and their phases to jump to. */
function Jump({ replay, onSeek }: { replay: Replay; onSeek: (position: number) => void }) {
  const spans = replay.phaseSpans;
  const at = spans.findLastIndex((each) => each.start < Math.max(1, replay.position));
  return (
    <label class="jump">
      <span>go to</span>
      <select
        aria-label="Go to program and phase"
        value={Math.min(at, MAX_LISTED - 1)}
        onChange={(event) => onSeek(spans[Number(event.currentTarget.value)]!.start + 1)}
      >
        <Places replay={replay} />
      </select>
    </label>
  );
}

const Places = memo(function Places({ replay }: { replay: Replay }) {
  const { phases } = replay.recording;
  const spans = replay.phaseSpans.slice(0, MAX_LISTED);
  let program = -1;
  const groups: { label: string; spans: { index: number; text: string }[] }[] = [];
  spans.forEach((span, index) => {
    if (span.program !== program) {
      program = span.program;
      const { launch, label } = replay.programs[program]!;
      const { name } = replay.recording.launches[launch]!;
      const alone = name.endsWith(label);
      const prefix = replay.recording.launches.length > 1 && !alone ? `${name}, ` : "";
      groups.push({ label: alone ? label : `${prefix}program ${label}`, spans: [] });
    }
    groups[groups.length - 1]!.spans.push({ index, text: phases[span.phase] ?? `phase ${span.phase}` });
  });
  return (
    <>
      {groups.map((group, index) => (
        <optgroup key={index} label={group.label}>
          {group.spans.map((each) => (
            <option key={each.index} value={each.index}>
              {group.label.replace(/^.*program /, "")} · {each.text}
            </option>
          ))}
        </optgroup>
      ))}
    </>
  );
});

/** A map of the steps: programs are blocks, phases are bands in them. */
function Map_({ replay, position }: { replay: Replay; position: number }) {
  return (
    <div class="map" aria-hidden="true">
      <Spans replay={replay} />
      <span class="needle" style={{ left: `${(100 * position) / replay.length}%` }} />
    </div>
  );
}

const Spans = memo(function Spans({ replay }: { replay: Replay }) {
  const part = (steps: number) => `${(100 * steps) / replay.length}%`;
  const many = replay.phaseSpans.length > 400;
  return (
    <>
      {replay.programSpans.map((span) => (
        <span key={span.start} class="program" style={{ left: part(span.start), width: part(span.end - span.start) }}>
          {replay.programSpans.length <= 24 ? <i>{replay.programs[span.program]!.label}</i> : null}
        </span>
      ))}
      {many
        ? null
        : replay.phaseSpans.map((span) => (
            <span key={span.start} class={`phase p${span.phase % 6}`} style={{ left: part(span.start), width: part(span.end - span.start) }} />
          ))}
    </>
  );
});
