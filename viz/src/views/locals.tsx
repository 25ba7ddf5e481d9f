import { useLayoutEffect, useRef } from "preact/hooks";
import { localText } from "../announce";
import { reveal } from "./hooks";
import { changed, numbersOf, type Replay, type Variable } from "../model";
import { exact, short } from "../numbers";
import { isTile, type Local, type Tile } from "../recording";
import { isMessage, messagesText, stripText } from "../sentences";

/** The current frame's locals, with a mark at those that the step has just set. */
export function LocalsView({ replay }: { replay: Replay }) {
  const frame = replay.stack()[0];
  const variables = frame && replay.step ? replay.locals(frame.frame) : [];
  const box = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    if (box.current) reveal(box.current, box.current.querySelector(".fresh"), 0);
  }, [replay, replay.position]);
  const interim = replay.step?.computed ?? [];
  const launch = frame && frame.info.parent === null ? replay.recording.launches[frame.info.launch] : undefined;
  const given = Object.entries({ ...launch?.arguments, ...launch?.constants }).filter(([, value]) => typeof value !== "object");
  return (
    <section class="panel locals" aria-label="Local variables">
      <h2>
        Locals <span class="what">{frame ? `of ${frame.source.name}` : "nothing runs yet"}</span>
      </h2>
      {given.length ? (
        <details>
          <summary>
            launched on {launch!.grid.filter((extent, at) => at === 0 || extent > 1).join(" × ")}{" "}
            {launch!.grid.every((extent) => extent === 1) ? "program" : "programs"}; its arguments
          </summary>
          <p>{given.map(([name, value]) => `${name} = ${String(value)}`).join(", ")}</p>
        </details>
      ) : null}
      {variables.length === 0 && interim.length === 0 ? <p class="quiet">No local has a value yet.</p> : null}
      <div class="scroll" ref={box} tabIndex={0} role="group" aria-label="Table of local variables">
        {interim.length ? (
          <ul class="interim" aria-label="Intermediate results of this line">
            {interim.map(({ text, value }, index) => (
              <li key={index}>
                <code>{text}</code> = <Value value={value} name={text} replay={replay} />
              </li>
            ))}
          </ul>
        ) : null}
        <table class="variables">
          <thead class="unseen">
            <tr>
              <th scope="col">Name</th>
              <th scope="col">Value</th>
            </tr>
          </thead>
          <tbody>
            {variables.map((variable) => (
              <Row key={variable.name} variable={variable} fresh={changed(variable, replay)} replay={replay} />
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function Row({ variable, fresh, replay }: { variable: Variable; fresh: boolean; replay: Replay }) {
  const { name, value } = variable;
  return (
    <tr class={fresh ? "fresh" : ""}>
      <th scope="row">
        {fresh ? (
          <span class="dot">
            <span aria-hidden="true">●</span>
            <span class="unseen">just changed: </span>
          </span>
        ) : null}
        {name}
        <span class="type">{typeOf(value)}</span>
      </th>
      <td>
        <Value value={value} name={name} replay={replay} />
      </td>
    </tr>
  );
}

function Value({ value, name, replay }: { value: Local; name: string; replay: Replay }) {
  if (!isTile(value)) return <>{localText(value, 8)}</>;
  if (value.dtype === "pointer") return <>{pointerText(value, replay)}</>;
  if (isMessage(replay, value)) return <>{messagesText(replay, value)}</>;
  return value.data.length > 1 ? <TileRow tile={value} name={name} /> : <>{localText(value, 8)}</>;
}

/** A pointer's target: "→ x[0, 4]". A tile of pointers shows its first and last targets. */
function pointerText(tile: Tile, replay: Replay): string {
  const tensor = replay.tensors[tile.tensor ?? -1];
  if (!tensor) return "a pointer";
  const cols = replay.layouts[tile.tensor!]![1];
  const place = (at: Tile["data"][number]) =>
    typeof at === "number" ? `${tensor.name}[${Math.floor(at / cols)}, ${at % cols}]` : `outside ${tensor.name}`;
  const [first, last] = [place(tile.data[0]!), place(tile.data[tile.data.length - 1]!)];
  return first === last ? `→ ${first}` : `→ ${first} … ${last}`;
}

function typeOf(value: Variable["value"]): string {
  if (isTile(value)) return value.shape.length ? `${value.dtype}[${value.shape.join(",")}]` : value.dtype;
  return value === null ? "" : typeof value === "number" ? "" : typeof value;
}

/** A tile as a heat map: with values if they fit, else in colours only, with the smallest and largest value. */
function TileRow({ tile, name }: { tile: Tile; name: string }) {
  const numbers = numbersOf(tile)!;
  const cols = tile.shape[tile.shape.length - 1] ?? 1;
  const rows = numbers.length / cols;
  const holder = useRef<HTMLCanvasElement>(null);
  const small = cols <= 8 && rows <= 8;
  const bool = /bool|int1$/.test(tile.dtype);
  const finite = numbers.filter(Number.isFinite);
  const low = finite.reduce((a, b) => Math.min(a, b), Infinity);
  const high = finite.reduce((a, b) => Math.max(a, b), -Infinity);
  const part = (value: number) => (high > low ? (value - low) / (high - low) : 0.5);

  useLayoutEffect(() => {
    const canvas = holder.current;
    if (!canvas) return;
    const [ink, ground, odd] = ["--state", "--sheet", "--alert"].map((each) =>
      getComputedStyle(canvas).getPropertyValue(each).trim(),
    ) as [string, string, string];
    const context = canvas.getContext("2d")!;
    context.globalAlpha = 1;
    context.fillStyle = ground;
    context.fillRect(0, 0, canvas.width, canvas.height);
    numbers.forEach((value, at) => {
      context.globalAlpha = Number.isFinite(value) ? 0.08 + 0.82 * part(value) : 0.5;
      context.fillStyle = Number.isFinite(value) || value === -Infinity ? ink : odd;
      if (value === -Infinity) context.globalAlpha = 0;
      context.fillRect(at % cols, Math.floor(at / cols), 1, 1);
    });
  });

  if (!small) {
    return (
      <span class="strip">
        <canvas ref={holder} width={cols} height={rows} role="img" aria-label={stripText(tile, name)} />
        <span class="ends">
          {bool ? `${numbers.filter((each) => each === 1).length} of ${numbers.length} on` : finite.length ? `${short(low, 3)} … ${short(high, 3)}` : ""}
          {finite.length < numbers.length ? ` · ${numbers.length - finite.length} not finite` : ""}
        </span>
      </span>
    );
  }
  return (
    <span class="tile" style={{ "--cols": cols }} role="img" aria-label={`${name}: ${[...numbers].map((each) => exact(each)).join(", ")}`}>
      {[...numbers].map((value, at) => (
        <span
          key={at}
          class={bool ? (value ? "lane on" : "lane off") : Number.isFinite(value) ? "lane" : "lane odd"}
          style={bool ? {} : { "--t": Number.isFinite(value) ? part(value).toFixed(3) : 0 }}
        >
          {bool ? (value ? "✓" : "–") : short(value, 3)}
        </span>
      ))}
    </span>
  );
}
