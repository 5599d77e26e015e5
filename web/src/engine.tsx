import { useState } from "preact/hooks";

import { bytes, count, percent, plural, rate, share, speed, time } from "./format";
import { Heat } from "./heatmap";
import type { Expectation, ExpertMap, Pass, State } from "./types";

export function Engine({ state, map }: { state: State | null; map: ExpertMap | null }) {
  if (!state) {
    return (
      <section class="engine" aria-label="Engine">
        <p class="quiet">Nothing is known yet.</p>
      </section>
    );
  }
  return (
    <section class="engine" aria-label="Engine">
      <Tiers state={state} />
      <Heat map={map} />
      <Time state={state} />
      <Bytes state={state} />
      <Outlook state={state} />
      <Plan state={state} />
    </section>
  );
}

/** Where experts are: most on disk, some in memory, none on a GPU. */
function Tiers({ state }: { state: State }) {
  const { memory, machine, experts, model } = state;
  const filled = memory.resident;
  const last = state.prefill && (!state.decode || state.prefill.number > state.decode.number) ? state.prefill : state.decode;
  const reading = last && last.ms > 0 ? (1000 * last.bytes) / last.ms : null;
  const hits = share(experts.hits, experts.misses);
  const limit = machine.disk_bytes_per_second;
  // Every bar stands for all experts.
  const of = (part: number) => ({ width: `${(100 * part) / Math.max(1, memory.experts)}%` });
  return (
    <div class="panel tiers">
      <h2>Where the experts are</h2>
      <dl>
        <div class="absent">
          <dt>VRAM</dt>
          <dd class="bar" aria-hidden="true" />
          <dd>not used: this version computes on the CPU</dd>
        </div>
        <div class="ram">
          <dt>RAM</dt>
          <dd class="bar" aria-hidden="true">
            <i class="room" style={of(memory.slots)} />
            <i class="held" style={of(filled ?? 0)} />
          </dd>
          <dd>
            {filled === null ? (
              <>{plural(memory.slots, "slot")}; what they hold is unknown yet</>
            ) : (
              <>
                <b>{count(filled)}</b> of {plural(memory.slots, "slot")} hold an expert
              </>
            )}
            {memory.slots < memory.planned_slots && `, ${count(memory.planned_slots - memory.slots)} given back to other programs`};{" "}
            {bytes(memory.slot_bytes)} planned
          </dd>
        </div>
        <div class="disk">
          <dt>Disk</dt>
          <dd class="bar" aria-hidden="true">
            <i class="stored" style={of(memory.experts)} />
          </dd>
          <dd>
            <b>{count(memory.experts)}</b> experts, all of them; {bytes(model.bytes)} of files
          </dd>
        </div>
      </dl>
      <ul class="facts">
        <li>
          {hits === null ? (
            "No pass has run yet."
          ) : (
            <>
              <b>{percent(hits)}</b> of the experts that passes wanted were in memory
            </>
          )}
        </li>
        <li>
          <b>{bytes(experts.bytes)}</b> read for answers since the start
          {experts.warm_up_bytes > 0 && `, ${bytes(experts.warm_up_bytes)} to warm up`}
        </li>
        {reading !== null && (
          <li>
            <b>{rate(reading)}</b> read during the last pass;{" "}
            {limit === null ? (
              <>
                what the disk can give is unknown until <code>forebay tune</code> measures it
              </>
            ) : (
              `the disk gives ${rate(limit)} at most`
            )}
          </li>
        )}
        {experts.read_p50_us !== null && (
          <li>
            <b>{time(experts.read_p50_us / 1000)}</b> or less for half of the reads
            {experts.read_p99_us !== null && `, ${time(experts.read_p99_us / 1000)} or less for 99% of them`}
          </li>
        )}
      </ul>
    </div>
  );
}

/** The colour of a phase: what waits, what multiplies experts, what attends, what is left. */
function kindOf(name: string): string {
  if (/wait/.test(name)) return "wait";
  if (/attend|attention|absorb|expand|indexer/.test(name)) return "attention";
  if (/expert|mlp|router/i.test(name)) return "experts";
  if (/head|draft/.test(name)) return "head";
  return "other";
}

/** Where the time of a pass went. */
function Time({ state }: { state: State }) {
  const [chosen, setChosen] = useState<"decode" | "prefill">("decode");
  const pass = state[chosen];
  return (
    <div class="panel time">
      <h2>Where the time went</h2>
      <div class="choice" role="group" aria-label="Which pass">
        <button type="button" aria-pressed={chosen === "decode"} onClick={() => setChosen("decode")}>
          Last token
        </button>
        <button type="button" aria-pressed={chosen === "prefill"} onClick={() => setChosen("prefill")}>
          Last of a prompt
        </button>
      </div>
      {pass ? <Phases pass={pass} /> : <p class="quiet">No such pass has run yet.</p>}
    </div>
  );
}

function Phases({ pass }: { pass: Pass }) {
  const all = Math.max(pass.ms, 1e-9);
  const sorted = [...pass.phases].sort((a, b) => b.ms - a.ms);
  return (
    <>
      <p>
        <b class="big">{time(pass.ms)}</b> for {pass.tokens > 0 ? plural(pass.tokens, "token") : "no token yet"}, with{" "}
        {plural(pass.rows, "row")} of {plural(pass.sequences, "sequence")}; {plural(pass.hits, "expert")} in memory,{" "}
        {count(pass.misses)} read
      </p>
      <div class="stack" aria-hidden="true">
        {pass.phases.map(({ name, ms }) => (
          <i key={name} class={kindOf(name)} title={`${name}: ${time(ms)}`} style={{ width: `${(100 * ms) / all}%` }} />
        ))}
      </div>
      <table>
        <caption class="unseen">Time by part of the pass</caption>
        <thead class="unseen">
          <tr>
            <th scope="col">Part</th>
            <th scope="col">Time</th>
            <th scope="col">Share</th>
          </tr>
        </thead>
        <tbody>
          {sorted.map(({ name, ms }) => (
            <tr key={name}>
              <th scope="row">
                <i class={`key ${kindOf(name)}`} aria-hidden="true" />
                {name}
              </th>
              <td>{time(ms)}</td>
              <td>{percent(ms / all)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </>
  );
}

/** What tokens read, and what the disk needs for that at best. */
function Bytes({ state }: { state: State }) {
  const { decode, machine, recent, outlook } = state;
  const limit = machine.disk_bytes_per_second;
  const last = decode && decode.tokens > 0 ? decode.bytes / decode.tokens : null;
  const lastMs = decode && decode.tokens > 0 ? decode.ms / decode.tokens : null;
  const counted = recent.filter((job) => job.stats && job.stats.new_tokens > 1);
  const tokens = counted.reduce((sum, job) => sum + job.stats!.new_tokens - 1, 0);
  const mean = tokens > 0 ? counted.reduce((sum, job) => sum + job.stats!.decode_bytes, 0) / tokens : null;
  const least = (of: number | null) => (of === null || limit === null ? null : (1000 * of) / limit);
  const rows: [string, number | null, number | null][] = [
    ["the last token", last, lastMs],
    [`tokens of the last ${plural(counted.length, "answer")}`, mean, meanMs(counted)],
    ["expected of this plan once warm", outlook.now.disk_bytes, inverse(outlook.now.tokens_per_second)],
  ];
  // What was not measured yet takes no line; the plan is there from the start.
  const shown = rows.filter(([, of], at) => of !== null || at === rows.length - 1);
  return (
    <div class="panel">
      <h2>Bytes per token</h2>
      <table class="numbers">
        <thead>
          <tr>
            <th scope="col">
              <span class="unseen">Of what</span>
            </th>
            <th scope="col">from disk</th>
            <th scope="col">disk needs</th>
            <th scope="col">took</th>
          </tr>
        </thead>
        <tbody>
          {shown.map(([name, of, took]) => (
            <tr key={name}>
              <th scope="row">{name}</th>
              <td>{bytes(of)}</td>
              <td>{time(least(of))}</td>
              <td>{time(took)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {limit === null && (
        <p class="quiet">
          What the disk needs at best is unknown until <code>forebay tune</code> has measured it.
        </p>
      )}
    </div>
  );
}

const inverse = (perSecond: number | null): number | null => (perSecond ? 1000 / perSecond : null);

function meanMs(jobs: State["recent"]): number | null {
  const tokens = jobs.reduce((sum, job) => sum + job.stats!.new_tokens - 1, 0);
  return tokens > 0 ? jobs.reduce((sum, job) => sum + job.stats!.decode_ms, 0) / tokens : null;
}

/** What more memory would give, by the planner's formulas. */
function Outlook({ state }: { state: State }) {
  const { outlook, experts } = state;
  const rows: [string, Expectation | null][] = [
    ["half of it", outlook.half],
    ["this budget", outlook.now],
    ["twice as much", outlook.twice],
  ];
  const measured = share(experts.hits, experts.misses);
  return (
    <div class="panel">
      <h2>What more memory would give</h2>
      <table class="numbers">
        <thead>
          <tr>
            <th scope="col">
              <span class="unseen">Memory</span>
            </th>
            <th scope="col">budget</th>
            <th scope="col">hits</th>
            <th scope="col">read a token</th>
            <th scope="col">at most</th>
          </tr>
        </thead>
        <tbody>
          {rows.map(([name, of]) => (
            <tr key={name} class={of === outlook.now ? "now" : undefined}>
              <th scope="row">{name}</th>
              {of ? (
                <>
                  <td>{bytes(of.budget)}</td>
                  <td>{percent(of.hit_rate)}</td>
                  <td>{bytes(of.disk_bytes)}</td>
                  <td>{of.tokens_per_second === null ? "unknown" : speed(of.tokens_per_second)}</td>
                </>
              ) : (
                <td colSpan={4}>does not run</td>
              )}
            </tr>
          ))}
        </tbody>
      </table>
      <p class="quiet">
        Expected once warm, for a conversation of {count(outlook.context)} tokens without drafts
        {outlook.now.bound && `; what sets the speed is ${BOUNDS[outlook.now.bound]}`}. Measured here so far:{" "}
        {percent(measured)} hits.
      </p>
    </div>
  );
}

const BOUNDS = { disk: "the disk", memory: "memory", decoder: "decoding of coded experts" };

/** How memory is divided. */
function Plan({ state }: { state: State }) {
  const { memory, machine } = state;
  const all = memory.lines.reduce((sum, line) => sum + line.bytes, 0);
  const sorted = [...memory.lines].sort((a, b) => b.bytes - a.bytes);
  return (
    <details class="panel">
      <summary>
        <h2>Memory and machine</h2>
      </summary>
      <p>
        {bytes(all)} planned of a budget of {bytes(memory.budget)}; KV blocks in use: {count(memory.kv_blocks.used)} of{" "}
        {count(memory.kv_blocks.all)}
      </p>
      <table class="numbers">
        <caption class="unseen">Planned memory</caption>
        <tbody>
          {sorted.map((line) => (
            <tr key={line.name}>
              <th scope="row">{line.name}</th>
              <td>{bytes(line.bytes)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <p class="quiet">
        {plural(machine.threads, "compute thread")} with {machine.isa}; {machine.reads.at_a_time} reads at a time by{" "}
        {machine.reads.by}, {machine.reads.access}; drafts: {machine.drafting}; memory measured at{" "}
        {rate(machine.memory_bytes_per_second)}. Forebay {state.version}.
      </p>
      {state.keeping && <p class="error">Prefixes are not kept: {state.keeping}</p>}
    </details>
  );
}
