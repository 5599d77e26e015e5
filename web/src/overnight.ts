// Jobs that may take a night: a file of requests goes in, a file of answers comes out (OpenAI's /v1/files and /v1/batches).

import { request } from "./server";

export interface Batch {
  id: string;
  endpoint: string;
  status: "validating" | "failed" | "in_progress" | "finalizing" | "completed" | "expired" | "cancelling" | "cancelled";
  input_file_id: string;
  output_file_id?: string | null;
  error_file_id?: string | null;
  created_at: number;
  completed_at?: number | null;
  failed_at?: number | null;
  cancelled_at?: number | null;
  expired_at?: number | null;
  request_counts?: { total: number; completed: number; failed: number } | null;
  errors?: { data?: { line?: number | null; message?: string | null; code?: string | null }[] | null } | null;
  forebay?: { eta_seconds?: number | null; running?: number; tokens_per_second?: number | null; paused?: string | null } | null;
}

/** What the list holds; null where the server has no such routes. */
export type Batches = Batch[] | null;

const ENDPOINTS = ["/v1/chat/completions", "/v1/completions", "/v1/responses"];

export interface Checked {
  endpoint: string;
  requests: number;
}

/** What a file of requests holds, or in words what is wrong with it: better said before it is sent than an hour later. */
export function check(text: string): Checked | string {
  let endpoint: string | null = null;
  const seen = new Set<string>();
  for (const [at, line] of text.split("\n").entries()) {
    if (line.trim() === "") continue;
    const where = `Line ${at + 1}`;
    let found: { custom_id?: unknown; method?: unknown; url?: unknown; body?: unknown };
    try {
      found = JSON.parse(line);
    } catch {
      return `${where} is no JSON. Every line holds one request as a JSON object.`;
    }
    if (typeof found !== "object" || found === null || Array.isArray(found)) return `${where} is no JSON object.`;
    const { custom_id: id, method, url, body } = found;
    if (typeof id !== "string" || id === "") return `${where} has no custom_id, a text of your own that its answer will bear.`;
    if (seen.has(id)) return `${where} has the custom_id "${id}" of an earlier line.`;
    seen.add(id);
    if (method !== "POST") return `${where}: the method has to be "POST".`;
    if (typeof url !== "string" || !ENDPOINTS.includes(url)) return `${where}: the url has to be one of ${ENDPOINTS.join(", ")}.`;
    if (endpoint !== null && url !== endpoint) return `${where} asks ${url}, earlier ones ${endpoint}: a job has one url.`;
    if (typeof body !== "object" || body === null || Array.isArray(body)) return `${where} has no body, the request itself.`;
    endpoint = url;
  }
  return endpoint === null ? "The file holds no request." : { endpoint, requests: seen.size };
}

/** Whether something is still to come of it. */
export function isOpen(batch: Batch): boolean {
  return ["validating", "in_progress", "finalizing", "cancelling"].includes(batch.status);
}

/** When it ended, in seconds since 1970. */
export function endedAt(batch: Batch): number | null {
  return batch.completed_at ?? batch.failed_at ?? batch.cancelled_at ?? batch.expired_at ?? null;
}

/** What the server says is wrong with it. */
export function problems(batch: Batch): string[] {
  return (batch.errors?.data ?? []).map(({ line, message, code }) => {
    const text = message ?? code ?? "no reason given";
    return line == null ? text : `line ${line}: ${text}`;
  });
}

/** The last jobs, the newest first. */
export async function list(signal: AbortSignal): Promise<Batches> {
  const response = await request("/v1/batches?limit=20", { signal }, [404]);
  if (response.status === 404) return null;
  const { data } = (await response.json()) as { data: Batch[] };
  return data;
}

/** Sends a file and makes a job of it. */
export async function create(file: File, endpoint: string): Promise<Batch> {
  const form = new FormData();
  form.set("purpose", "batch");
  form.set("file", file);
  const sent = (await (await request("/v1/files", { method: "POST", body: form })).json()) as { id: string };
  const body = JSON.stringify({ input_file_id: sent.id, endpoint, completion_window: "24h" });
  const made = await request("/v1/batches", { method: "POST", headers: { "content-type": "application/json" }, body });
  return (await made.json()) as Batch;
}

export async function cancel(id: string): Promise<void> {
  await request(`/v1/batches/${encodeURIComponent(id)}/cancel`, { method: "POST" });
}

/** Fetches a file with the key, which a plain link could not send, and hands it to the browser. */
export async function download(file: string, name: string): Promise<void> {
  const response = await request(`/v1/files/${encodeURIComponent(file)}/content`);
  const address = URL.createObjectURL(await response.blob());
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  // The browser has taken it over by then.
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}
