// The server that this page came from: its key, its feed, its answers.

import { events, type ServerEvent } from "./sse";
import type { ExpertMap, State } from "./types";

const KEY = "forebay-key";

/** The key that the user gave, for as long as the tab is open. */
export const key = {
  get: (): string => sessionStorage.getItem(KEY) ?? "",
  set: (value: string) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/** A request was refused because the key is missing or wrong. */
export class KeyNeeded extends Error {}

/** Asks with the key; an answer that is none is an error, unless its status is `allowed`. */
export async function request(path: string, init: RequestInit = {}, allowed: number[] = []): Promise<Response> {
  const headers = new Headers(init.headers);
  if (key.get()) headers.set("authorization", `Bearer ${key.get()}`);
  const response = await fetch(path, { ...init, headers, cache: "no-store", credentials: "omit" });
  if (response.ok || allowed.includes(response.status)) return response;
  const body = await response.json().catch(() => null);
  const message: string = body?.error?.message ?? `the server answered ${response.status} ${response.statusText}`;
  if (response.status === 401) throw new KeyNeeded(message);
  throw new Error(message);
}

export interface Answer {
  ahead: number;
  waitMs: number | null;
  events: AsyncGenerator<ServerEvent>;
}

/** Asks for an answer, which comes as events. */
export async function ask(body: object, signal: AbortSignal): Promise<Answer> {
  const response = await request("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const wait = response.headers.get("x-forebay-forecast-wait-ms");
  return {
    ahead: Number(response.headers.get("x-forebay-queue-ahead") ?? 0),
    waitMs: wait === null ? null : Number(wait),
    events: events(response),
  };
}

export interface Feed {
  state: State | null;
  map: ExpertMap | null;
  /** Why nothing comes, if nothing comes. */
  trouble: "key" | "gone" | null;
  message: string;
}

/** Follows the feed until `signal`, and comes back to a server that was away. While the page is hidden it asks nothing. */
export async function follow(signal: AbortSignal, tell: (change: Partial<Feed>) => void) {
  for (;;) {
    await visible(signal);
    if (signal.aborted) return;
    const hidden = new AbortController();
    const stop = () => hidden.abort();
    const onChange = () => document.hidden && stop();
    signal.addEventListener("abort", stop);
    document.addEventListener("visibilitychange", onChange);
    try {
      const response = await request("/dashboard/events", { signal: hidden.signal });
      for await (const { name, data } of events(response)) {
        if (name === "state") tell({ state: JSON.parse(data), trouble: null, message: "" });
        if (name === "map") tell({ map: JSON.parse(data) });
      }
      if (!hidden.signal.aborted) tell({ trouble: "gone", message: "the server ended the connection" });
    } catch (error) {
      if (signal.aborted) return;
      const message = error instanceof Error ? error.message : String(error);
      if (error instanceof KeyNeeded) {
        tell({ trouble: "key", message: key.get() ? message : "" });
        return;
      }
      if (!hidden.signal.aborted) tell({ trouble: "gone", message });
    } finally {
      signal.removeEventListener("abort", stop);
      document.removeEventListener("visibilitychange", onChange);
    }
    await pause(2000, signal);
  }
}

function visible(signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const check = () => {
      if (document.hidden && !signal.aborted) return;
      document.removeEventListener("visibilitychange", check);
      signal.removeEventListener("abort", check);
      resolve();
    };
    document.addEventListener("visibilitychange", check);
    signal.addEventListener("abort", check);
    check();
  });
}

function pause(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
  });
}
