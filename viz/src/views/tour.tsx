import { useEffect, useRef } from "preact/hooks";
import type { Sight } from "../tour";

interface Props {
  sight: Sight;
  number: number;
  count: number;
  onGo: (number: number) => void;
  onClose: () => void;
}

const GAP = 8;

/** Scrolls so that what a stop speaks of stands between the card, where that is at the top, and the transport. */
function uncover(shown: Element | null, card: HTMLElement) {
  if (!shown) return;
  const above = getComputedStyle(card).position === "sticky" ? card.offsetHeight : 0;
  const below = document.querySelector(".transport")?.getBoundingClientRect().top ?? innerHeight;
  const { top, bottom } = shown.getBoundingClientRect();
  if (top >= above && bottom <= below) return;
  scrollBy({ top: top - above - GAP, behavior: "instant" });
}

/** What there is to see at a stop of the tour. The page stays at hand beside it. */
export function Tour({ sight, number, count, onGo, onClose }: Props) {
  const heading = useRef<HTMLHeadingElement>(null);
  const card = useRef<HTMLElement>(null);
  useEffect(() => {
    heading.current?.focus({ preventScroll: true });
    uncover(document.querySelector(sight.shows), card.current!);
  }, [number]);
  return (
    <aside class="tour" ref={card} aria-label="Tour" onKeyDown={(event) => event.key === "Escape" && onClose()}>
      <h2 tabIndex={-1} ref={heading}>
        {sight.title} <span class="what">{number + 1} of {count}</span>
      </h2>
      <p>{sight.text}</p>
      <p class="buttons">
        <button type="button" disabled={number === 0} onClick={() => onGo(number - 1)}>Back</button>
        {number + 1 < count ? (
          <button type="button" class="main" onClick={() => onGo(number + 1)}>Next</button>
        ) : (
          <button type="button" class="main" onClick={onClose}>Done</button>
        )}
        {number + 1 < count ? <button type="button" onClick={onClose}>Close</button> : null}
      </p>
    </aside>
  );
}
