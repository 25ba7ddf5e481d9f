import { useEffect, useRef } from "preact/hooks";
import type { Sight } from "../tour";

interface Props {
  sight: Sight;
  number: number;
  count: number;
  onGo: (number: number) => void;
  onClose: () => void;
}

/** What there is to see at a stop of the tour. The page stays at hand beside it. */
export function Tour({ sight, number, count, onGo, onClose }: Props) {
  const heading = useRef<HTMLHeadingElement>(null);
  useEffect(() => heading.current?.focus(), [number]);
  return (
    <aside class="tour" aria-label="Tour" onKeyDown={(event) => event.key === "Escape" && onClose()}>
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
