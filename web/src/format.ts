// Numbers as people read them.

export const unknown = "unknown";

const UNITS = ["B", "kB", "MB", "GB", "TB"];

/** Bytes in decimal units, with three digits. */
export function bytes(value: number | null | undefined): string {
  if (value == null) return unknown;
  let unit = 0;
  while (value >= 999.5 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${digits(value, unit === 0 ? 0 : 2)} ${UNITS[unit]}`;
}

/** Bytes per second. */
export function rate(value: number | null | undefined): string {
  return value == null ? unknown : `${bytes(value)}/s`;
}

/** A time, given in milliseconds. */
export function time(ms: number | null | undefined): string {
  if (ms == null) return unknown;
  if (ms < 0.95) return `${digits(ms, 2)} ms`;
  if (ms < 999.5) return `${digits(ms, 1)} ms`;
  const seconds = ms / 1000;
  if (seconds < 99.5) return `${digits(seconds, 1)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 100) return `${minutes} min`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** A moment, in seconds since 1970, by the clock of whoever reads; with its day where that is not today. */
export function moment(seconds: number, now = new Date()): string {
  const then = new Date(1000 * seconds);
  const clock = then.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  if (then.toDateString() === now.toDateString()) return `at ${clock}`;
  return `on ${then.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} at ${clock}`;
}

/** A share between 0 and 1. */
export function percent(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return unknown;
  const of = 100 * value;
  // What is nearly everything is not everything.
  if (of > 99.9 && of < 100) return "99.9%";
  return `${digits(of, 1)}%`;
}

/** Tokens per second. */
export function speed(value: number | null | undefined): string {
  return value == null || !Number.isFinite(value) ? unknown : `${digits(value, 2)} tokens/s`;
}

/** A whole number with its thousands apart. */
export function count(value: number): string {
  return Math.round(value).toLocaleString("en");
}

/** `a` of `a + b`, or null where there is nothing to take a share of. */
export function share(a: number, b: number): number | null {
  return a + b > 0 ? a / (a + b) : null;
}

/** One thing, several things. */
export function plural(n: number, one: string, more = `${one}s`): string {
  return `${count(n)} ${n === 1 ? one : more}`;
}

function digits(value: number, most: number): string {
  if (value >= 999.5) return count(value);
  const places = value >= 99.95 ? 0 : value >= 9.995 ? Math.min(most, 1) : most;
  return value.toFixed(places);
}
