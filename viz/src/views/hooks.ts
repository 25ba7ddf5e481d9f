import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import type { RefObject } from "preact";

/** The width of an element's content, kept up to date. */
export function useWidth<T extends HTMLElement>(): [RefObject<T | null>, number] {
  const ref = useRef<T>(null);
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const element = ref.current!;
    setWidth(element.clientWidth);
    const observer = new ResizeObserver(() => setWidth(element.clientWidth));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  return [ref, width];
}

/** Scrolls a box, and nothing around it, until an element in it is visible, with `margin` pixels above and below. */
export function reveal(box: HTMLElement, element: Element | null, margin: number): void {
  if (!element) return;
  const [outer, inner] = [box.getBoundingClientRect(), element.getBoundingClientRect()];
  if (inner.top < outer.top + margin || inner.bottom > outer.bottom - margin) {
    box.scrollTop += inner.top - outer.top - box.clientHeight / 3;
  }
}

/**
 * Calls back on every animation frame while `running`, with the seconds since the last frame. No frame follows the
 * event that ends it: an effect that waits for a paint would be cleaned up some frames later.
 */
export function useFrames(running: boolean, onFrame: (seconds: number) => void): void {
  const callback = useRef(onFrame);
  callback.current = onFrame;
  useLayoutEffect(() => {
    if (!running) return;
    let last = performance.now();
    let handle = requestAnimationFrame(function frame(now) {
      callback.current(Math.min(0.25, (now - last) / 1000));
      last = now;
      handle = requestAnimationFrame(frame);
    });
    return () => cancelAnimationFrame(handle);
  }, [running]);
}

/** A kernel that the page's server records. */
export interface ServerKernel {
  name: string;
  title?: string;
  /** Whether it works in blocks. */
  block?: boolean;
  dtypes?: readonly string[];
}

/** Whether the page is as narrow as a phone. */
export function useNarrow(): boolean {
  const [query] = useState(() => matchMedia("(max-width: 639px)"));
  const [narrow, setNarrow] = useState(query.matches);
  useEffect(() => {
    const onChange = () => setNarrow(query.matches);
    query.addEventListener("change", onChange);
    return () => query.removeEventListener("change", onChange);
  }, [query]);
  return narrow;
}

/** A value that follows its source once the source has not changed for a while. */
export function useRested<T>(value: T, milliseconds: number): T {
  const [rested, setRested] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => setRested(value), milliseconds);
    return () => clearTimeout(timer);
  }, [value, milliseconds]);
  return rested;
}
