import { useLayoutEffect, useRef } from "preact/hooks";
import type { Layer, Replay } from "../model";
import { count } from "../numbers";
import { floorOf, layerName, layerText, trafficText } from "../sentences";

/**
 * Traffic as copies of the matrix. One small picture shows the first read of every element, the next shows the second,
 * and so on. They fill as the kernel visits blocks. One read and one write are the floor; the rest is extra traffic.
 */
export function Meter({ replay, scale, of }: { replay: Replay; scale?: number; of?: string }) {
  const { position } = replay;
  const compact = of !== undefined;
  const [reads, writes] = [replay.reads[position]!, replay.writes[position]!];
  const { traffic } = replay.recording;
  const floor = floorOf(replay.recording);
  const said = trafficText(replay);
  const total = replay.moved(replay.length);
  const whole = Math.max(scale ?? total, total, floor, 1);
  const moved = reads + writes;
  const part = (elements: number) => `${(100 * elements) / whole}%`;
  return (
    <section class={`panel meter${compact ? " compact" : ""}`} aria-label={of ? `Memory traffic, ${of}` : "Memory traffic"}>
      {compact ? null : (
        <h2>
          Traffic <span class="what">elements moved between memory and the chip, against the floor</span>
        </h2>
      )}
      <div class={`layers${replay.layers.length > 6 ? " crowd" : ""}`}>
        {replay.layers.map((layer) => (
          <LayerView key={`${layer.tensor}${layer.kind}${layer.k}`} replay={replay} layer={layer} position={position} />
        ))}
      </div>
      <div
        class="gauge"
        role="meter"
        aria-label={of ? `Elements moved, ${of}` : "Elements moved"}
        aria-valuemin={0}
        aria-valuemax={whole}
        aria-valuenow={moved}
        aria-valuetext={said.moved}
      >
        <span class="fill read" style={{ width: part(reads) }} />
        <span class="fill write" style={{ width: part(writes) }} />
        {floor ? (
          <span class="floor" style={{ left: part(floor) }}>
            <span>floor {count(floor)}</span>
          </span>
        ) : null}
      </div>
      <p class="counts">
        <span class="read">
          <b data-count="reads">{count(reads)}</b> read
        </span>
        <span class="write">
          <b data-count="writes">{count(writes)}</b> written
        </span>
        <span>{said.floor}</span>
        {traffic?.formula && !compact ? <span class="quiet">{traffic.formula}</span> : null}
      </p>
    </section>
  );
}

function LayerView({ replay, layer, position }: { replay: Replay; layer: Layer; position: number }) {
  const [rows, cols] = replay.layouts[layer.tensor]!;
  const canvas = useRef<HTMLCanvasElement>(null);
  const memory = replay.tensor(layer.tensor);
  const counts = layer.kind === "read" ? memory.reads : memory.writes;
  const done = counts.reduce((sum, each) => sum + (each >= layer.k ? 1 : 0), 0);
  const drawn = useRef(-1);
  useLayoutEffect(() => {
    const element = canvas.current!;
    const mark = done;
    if (drawn.current === mark) return;
    drawn.current = mark;
    const context = element.getContext("2d")!;
    context.clearRect(0, 0, cols, rows);
    context.fillStyle = getComputedStyle(element).getPropertyValue("--fill");
    counts.forEach((each, at) => {
      if (each >= layer.k) context.fillRect(at % cols, Math.floor(at / cols), 1, 1);
    });
  }, [replay, position, done]);
  useLayoutEffect(() => () => void (drawn.current = -1), [replay, layer]);
  const vector = cols === 1;
  const aspect = Math.min(0.62, Math.max(0.2, rows / Math.max(1, cols)));
  return (
    <figure
      class={`layer ${layer.kind}${layer.floor ? "" : " over"}${vector ? " vector" : ""}${done === layer.size ? " full" : ""}`}
      style={{ "--aspect": aspect }}
    >
      <span class="paper" role="img" aria-label={layerText(replay, layer, done)}>
        <canvas ref={canvas} width={cols} height={rows} />
      </span>
      <figcaption>
        {layerName(replay, layer)}
        {layer.floor ? null : <span class="unseen">, above the floor</span>}
      </figcaption>
    </figure>
  );
}
