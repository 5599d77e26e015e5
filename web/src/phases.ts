// The parts of a pass, gathered to kinds that say what it was busy with.

export interface Kind {
  kind: "wait" | "experts" | "attention" | "head" | "other";
  name: string;
  tip: string;
  ms: number;
}

/** The engine's names for the parts of a pass (forebay-model, `Phase`), by kind; others are `other`. */
const PARTS: Record<string, Kind["kind"]> = {
  "waiting for experts": "wait",
  "routed experts": "experts",
  "shared expert": "experts",
  "dense MLP": "experts",
  router: "experts",
  "attention projections": "attention",
  indexer: "attention",
  "absorb (kv_b keys)": "attention",
  attend: "attention",
  "expand (kv_b values)": "attention",
  "attention output": "attention",
  head: "head",
  drafting: "head",
};

const KINDS: Omit<Kind, "ms">[] = [
  { kind: "wait", name: "Waiting for experts", tip: "Nothing left to compute until the disk delivers." },
  { kind: "experts", name: "Experts", tip: "Multiplying: routed and shared experts, the dense layers, and the choice among experts." },
  { kind: "attention", name: "Attention", tip: "Looking back at the text so far." },
  { kind: "head", name: "Choosing words", tip: "Scores of all tokens, and drafts of the next ones." },
  { kind: "other", name: "Everything else", tip: "Norms, sums, sampling, and what no clock is set on." },
];

/** What every kind took, all five of them, in the order in which they are drawn. */
export function kinds(phases: { name: string; ms: number }[]): Kind[] {
  return KINDS.map((of) => {
    const own = phases.filter(({ name }) => (PARTS[name] ?? "other") === of.kind);
    return { ...of, ms: own.reduce((sum, { ms }) => sum + ms, 0) };
  });
}
