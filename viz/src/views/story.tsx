import { useEffect, useRef } from "preact/hooks";
import { writeHash } from "../link";
import type { Card, Stop } from "../story";

interface Props {
  cards: readonly Card[];
  number: number;
  /** The stop whose recording and step are shown; null if the reader has gone elsewhere. */
  shown: Stop | null;
  onGo: (number: number, stop?: number) => void;
  onClose: () => void;
}

/** A card of the story. The page stays at hand below it. */
export function Story({ cards, number, shown, onGo, onClose }: Props) {
  const card = cards[number]!;
  const heading = useRef<HTMLHeadingElement>(null);
  useEffect(() => {
    scrollTo({ top: 0, behavior: "instant" });
    heading.current?.focus({ preventScroll: true });
  }, [number]);
  return (
    <aside class="story" aria-label="Story" onKeyDown={(event) => event.key === "Escape" && onClose()}>
      <div class="told">
        <h2 tabIndex={-1} ref={heading}>
          {card.title} <span class="count">{number + 1} of {cards.length}</span>
        </h2>
        {card.text.map((each, at) => <p key={at}>{each}</p>)}
      </div>
      <nav class="places" aria-label="Steps of this card">
        {card.stops.map((stop, at) => (
          <a
            key={at}
            href={hrefOf(stop, number)}
            {...(stop === shown ? { "aria-current": "step" as const } : {})}
            onClick={(event) => {
              event.preventDefault();
              onGo(number, at);
            }}
          >
            {stop.name} <span class="what">{stop.kernel}, step {stop.position}</span>
          </a>
        ))}
      </nav>
      <div class="turn">
        <ol class="dots" aria-label="Cards">
          {cards.map((each, at) => (
            <li key={at}>
              <button type="button" aria-label={`Card ${at + 1}: ${each.title}`} title={each.title} {...(at === number ? { "aria-current": "step" as const } : {})} onClick={() => onGo(at)} />
            </li>
          ))}
        </ol>
        <p class="buttons">
          <button type="button" disabled={number === 0} onClick={() => onGo(number - 1)}>Back</button>
          {number + 1 < cards.length ? (
            <button type="button" class="main" onClick={() => onGo(number + 1)}>Next</button>
          ) : (
            <button type="button" class="main" onClick={onClose}>Done</button>
          )}
          <button type="button" aria-label="Close the story" onClick={onClose}>✕</button>
        </p>
      </div>
    </aside>
  );
}

/** The link to a stop of a card. */
export function hrefOf({ entry, position, row }: Stop, card: number): string {
  const { kernel, matrix, block, dtype } = entry;
  return writeHash({ view: "replay", kernel, matrix, ...(block ? { block } : {}), dtype, step: position, ...(row === undefined ? {} : { row }), story: card + 1 });
}
