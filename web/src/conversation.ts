// A conversation, and how an answer grows.

export interface ToolCall {
  id: string;
  type: "function";
  function: { name: string; arguments: string };
}

export interface Progress {
  done: number;
  total: number;
  read: number | null;
  leftMs: number | null;
}

/** What is known of an answer beside its text. */
export interface Facts {
  /** Requests that came first, and the wait that was expected. */
  ahead: number;
  waitMs: number | null;
  started: boolean;
  cached: number;
  forecastMs: number | null;
  progress: Progress | null;
  promptTokens: number | null;
  tokens: number | null;
  /** When it was sent, its first token came, and its last one; by this page's clock. */
  sentAt: number;
  firstAt: number | null;
  lastAt: number | null;
}

export interface Message {
  role: "system" | "user" | "assistant" | "tool";
  content: string;
  reasoning: string;
  calls: ToolCall[];
  /** For the result of a tool: which call. */
  callId?: string;
  state: "done" | "growing" | "stopped" | "cut" | "failed";
  error?: string;
  facts?: Facts;
}

export function message(role: Message["role"], content: string): Message {
  return { role, content, reasoning: "", calls: [], state: "done" };
}

export function growing(now: number): Message {
  const facts: Facts = {
    ahead: 0,
    waitMs: null,
    started: false,
    cached: 0,
    forecastMs: null,
    progress: null,
    promptTokens: null,
    tokens: null,
    sentAt: now,
    firstAt: null,
    lastAt: null,
  };
  return { ...message("assistant", ""), state: "growing", facts };
}

interface Chunk {
  choices?: {
    delta?: { content?: string | null; reasoning_content?: string | null; tool_calls?: (ToolCall & { index?: number })[] };
    finish_reason?: string | null;
  }[];
  usage?: { prompt_tokens: number; completion_tokens: number; prompt_tokens_details?: { cached_tokens: number } } | null;
  error?: { message?: string };
}

interface Started {
  cached_tokens: number;
  forecast: { first_token_ms: number | null };
}

interface Progressed {
  done: number;
  total: number;
  bytes_read: number | null;
  left_ms: number | null;
}

/** The answer after an event of its stream. */
export function grow(answer: Message, name: string, data: string, now: number): Message {
  const facts = answer.facts ?? growing(now).facts!;
  if (data === "[DONE]") return answer;
  let value: unknown;
  try {
    value = JSON.parse(data);
  } catch {
    return { ...answer, state: "failed", error: "the server sent something that is no JSON" };
  }
  if (name === "forebay.started") {
    const { cached_tokens, forecast } = value as Started;
    return { ...answer, facts: { ...facts, started: true, cached: cached_tokens, forecastMs: forecast.first_token_ms } };
  }
  if (name === "forebay.progress") {
    const { done, total, bytes_read, left_ms } = value as Progressed;
    return { ...answer, facts: { ...facts, progress: { done, total, read: bytes_read, leftMs: left_ms } } };
  }
  const chunk = value as Chunk;
  if (chunk.error) return { ...answer, state: "failed", error: chunk.error.message ?? "the answer failed" };
  let next = answer;
  if (chunk.usage) {
    const { prompt_tokens, completion_tokens, prompt_tokens_details } = chunk.usage;
    const cached = prompt_tokens_details?.cached_tokens ?? facts.cached;
    next = { ...next, facts: { ...facts, promptTokens: prompt_tokens, tokens: completion_tokens, cached } };
  }
  const choice = chunk.choices?.[0];
  if (!choice) return next;
  const { content, reasoning_content, tool_calls } = choice.delta ?? {};
  if (content || reasoning_content || tool_calls?.length) {
    next = {
      ...next,
      content: next.content + (content ?? ""),
      reasoning: next.reasoning + (reasoning_content ?? ""),
      calls: [...next.calls, ...(tool_calls ?? []).map(({ id, type, function: called }) => ({ id, type, function: called }))],
      facts: { ...(next.facts ?? facts), firstAt: facts.firstAt ?? now, lastAt: now },
    };
  }
  if (choice.finish_reason) next = { ...next, state: choice.finish_reason === "length" ? "cut" : "done" };
  return next;
}

/** Calls that have no result yet, in their order. */
export function openCalls(messages: Message[]): ToolCall[] {
  const answered = new Set(messages.map((found) => found.callId));
  const last = messages.findLast((found) => found.role === "assistant");
  return (last?.calls ?? []).filter((call) => !answered.has(call.id));
}

/** What the server is sent of a conversation: failed answers and empty ones are left out. */
export function toSend(messages: Message[], system: string): object[] {
  const told = messages.filter(
    (found) => found.role !== "assistant" || (found.state !== "failed" && (found.content !== "" || found.calls.length > 0)),
  );
  const sent = told.map((found) => ({
    role: found.role,
    content: found.content === "" && found.calls.length > 0 ? null : found.content,
    ...(found.reasoning ? { reasoning_content: found.reasoning } : {}),
    ...(found.calls.length > 0 ? { tool_calls: found.calls } : {}),
    ...(found.callId !== undefined ? { tool_call_id: found.callId } : {}),
  }));
  return system.trim() === "" ? sent : [{ role: "system", content: system }, ...sent];
}

/** Milliseconds below which a rate is chance: what came at once had gathered on its way. */
const LEAST = 100;

/** Tokens per second behind the first one; null where that says nothing. */
export function tokensPerSecond(facts: Facts): number | null {
  if (facts.tokens === null || facts.tokens < 2 || facts.firstAt === null || facts.lastAt === null) return null;
  const ms = facts.lastAt - facts.firstAt;
  return ms >= LEAST ? (1000 * (facts.tokens - 1)) / ms : null;
}
