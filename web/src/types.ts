// What the server's feed holds (crates/forebay-server/src/dashboard/feed.rs): null is what nobody knows.

export interface Forecast {
  prefill_ms: number | null;
  first_token_ms: number | null;
  tokens_per_second: number | null;
}

export interface Pass {
  number: number;
  ms: number;
  rows: number;
  prompt_rows: number;
  sequences: number;
  tokens: number;
  hits: number;
  misses: number;
  bytes: number;
  phases: { name: string; ms: number }[];
}

export interface Expectation {
  budget: number;
  slots_per_layer: number;
  held: number;
  hit_rate: number;
  disk_bytes: number;
  memory_bytes: number;
  tokens_per_second: number | null;
  bound: "disk" | "memory" | "decoder" | null;
}

export interface RunJob {
  ms: number;
  /** Tokens of the prompt that were known when its turn came. */
  reused: number;
  /** Tokens of the whole prompt; after it gave its KV blocks up, of all that is run again. */
  prompt: number;
  /** Of these, known or computed. */
  done: number;
  new_tokens: number;
  prefill_ms: number;
  first_token_ms: number | null;
  forecast: Forecast;
}

export interface Job {
  id: number;
  batch: boolean;
  prompt_tokens: number;
  max_tokens: number | null;
  waited_ms: number;
  expected_ms: number | null;
  running: RunJob | null;
}

export interface Ended {
  id: number;
  batch: boolean;
  how: string;
  prompt_tokens: number;
  reused: number;
  waited_ms: number;
  took_ms: number;
  expected_ms: number | null;
  forecast: Forecast;
  stats: {
    computed: number;
    new_tokens: number;
    prefill_ms: number;
    decode_ms: number;
    first_token_ms: number | null;
    bytes: number;
    hits: number;
    misses: number;
    decode_bytes: number;
    drafts: { verified: number; accepted: number };
  } | null;
}

export interface State {
  version: string;
  health: "ready" | "draining" | "failed";
  reason: string | null;
  keeping: string | null;
  model: {
    id: string;
    family: string;
    context: number;
    bytes: number;
    layers: number;
    top_k: number;
    think: boolean;
    temperature: number;
  };
  machine: {
    isa: string;
    threads: number;
    reads: { by: string; access: string; at_a_time: number };
    drafting: string;
    disk_bytes_per_second: number | null;
    memory_bytes_per_second: number | null;
  };
  memory: {
    budget: number;
    lines: { name: string; bytes: number }[];
    experts: number;
    slots: number;
    planned_slots: number;
    slot_bytes: number | null;
    resident: number | null;
    kv_blocks: { used: number; all: number; tokens: number };
    vram: null;
  };
  experts: {
    hits: number;
    misses: number;
    bytes: number;
    warm_up_bytes: number;
    ahead_ready: number;
    ahead_late: number;
    wasted_bytes: number;
    wait_ms: number;
    failures: number;
    read_p50_us: number | null;
    read_p99_us: number | null;
  };
  totals: Record<
    "submitted" | "refused" | "completed" | "cancelled" | "failed" | "prompt_tokens" | "reused_tokens" | "new_tokens" | "passes",
    number
  >;
  outlook: { context: number; now: Expectation; half: Expectation | null; twice: Expectation | null };
  /** What a cache of the experts used last would have found, by the slots of the outlook. */
  reuse: { known: number; first: number; now: number | null; half: number | null; twice: number | null };
  prefill: Pass | null;
  decode: Pass | null;
  queue: number;
  layers_done: [number, number];
  jobs: Job[];
  recent: Ended[];
}

export interface ExpertMap {
  layers: { layer: number; experts: number; slots: number; mtp: boolean }[];
  cells: string | null;
  passes: number;
}
