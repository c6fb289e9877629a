// A value that can be watched: what the screens share.
import { useLayoutEffect, useReducer } from "preact/hooks";

export class Cell<T> {
  #watchers = new Set<() => void>();
  #value: T;

  constructor(value: T) {
    this.#value = value;
  }

  get value(): T {
    return this.#value;
  }

  set(value: T): void {
    if (Object.is(value, this.#value)) return;
    this.#value = value;
    for (const tell of [...this.#watchers]) tell();
  }

  watch(tell: () => void): () => void {
    this.#watchers.add(tell);
    return () => void this.#watchers.delete(tell);
  }
}

/** The value of a cell; the component is drawn again when it changes. */
export function use<T>(cell: Cell<T>): T {
  const [, again] = useReducer((n: number, _: void) => n + 1, 0);
  const drawn = cell.value;
  useLayoutEffect(() => {
    if (!Object.is(cell.value, drawn)) again();
    return cell.watch(again);
  }, [cell]);
  return drawn;
}
