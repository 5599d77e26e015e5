import type { ComponentChildren } from "preact";
import { useId } from "preact/hooks";

/** A word with its meaning, which shows for a pointer, a finger and the keyboard alike. */
export function Term({ tip, children }: { tip: string; children: ComponentChildren }) {
  const id = useId();
  return (
    <>
      <button type="button" class="term" aria-describedby={id}>
        {children}
      </button>
      <span id={id} role="tooltip" class="tip">
        {tip}
      </span>
    </>
  );
}
