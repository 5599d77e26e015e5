import { useState } from "preact/hooks";

import { bytes, count, percent, plural, rate, share, speed, time } from "./format";
import { Heat } from "./heatmap";
import { kinds } from "./phases";
import { Term } from "./term";
import type { Expectation, ExpertMap, Pass, State } from "./types";

export function Engine({ state, map }: { state: State | null; map: ExpertMap | null }) {
  if (!state) {
    return (
      <section class="engine" aria-label="Engine">
        <p class="quiet nothing">Nothing is known yet.</p>
      </section>
    );
  }
  return (
    <section class="engine" aria-label="Engine">
      <Figures state={state} />
      <Tiers state={state} />
      <Heat map={map} />
      <Time state={state} />
      <Bytes state={state} />
      <Outlook state={state} />
      <Plan state={state} />
    </section>
  );
}

/** The last pass that read for somebody, of whichever kind. */
function lastPass({ prefill, decode }: State): Pass | null {
  return prefill && (!decode || prefill.number > decode.number) ? prefill : decode;
}

/** What one looks at first. */
function Figures({ state }: { state: State }) {
  const { decode, experts, machine, outlook } = state;
  const per = decode && decode.tokens > 0 ? decode : null;
  const last = lastPass(state);
  const reading = last && last.ms > 0 ? (1000 * last.bytes) / last.ms : null;
  const limit = machine.disk_bytes_per_second;
  const most = outlook.now.tokens_per_second;
  const figures: { name: string; tip: string; value: string | null; beside: string }[] = [
    {
      name: "Speed",
      tip: "Tokens a second, if all took as long as the last one. The plan's figure is what disk and memory allow at most, once warm and without drafts.",
      value: per && per.ms > 0 ? speed((1000 * per.tokens) / per.ms) : null,
      beside: most === null ? "the plan's limit is unknown" : `at most ${speed(most)} planned`,
    },
    {
      name: "Hits",
      tip: "Experts that were in memory when a pass wanted them, as a share of all that passes wanted since the start.",
      value: experts.hits + experts.misses > 0 ? percent(share(experts.hits, experts.misses)) : null,
      beside: per ? `${percent(share(per.hits, per.misses))} for the last token` : "no token yet",
    },
    {
      name: "Read a token",
      tip: "Bytes of experts that came from disk for the last token. The plan's figure is the mean once the cache is warm.",
      value: per ? bytes(per.bytes / per.tokens) : null,
      beside: `${bytes(outlook.now.disk_bytes)} planned`,
    },
    {
      name: "Disk",
      tip: "Bytes of experts read a second during the last pass. What the disk gives at most is measured by forebay tune.",
      value: reading === null ? null : rate(reading),
      beside: limit === null ? "its limit is not measured" : `of ${rate(limit)} at most`,
    },
  ];
  return (
    <dl class="panel figures">
      {figures.map(({ name, tip, value, beside }) => {
        const [number, unit] = (value ?? "none yet").split(/ (.*)/);
        return (
          <div key={name}>
            <dt>
              <Term tip={tip}>{name}</Term>
            </dt>
            <dd class={value === null ? "figure none" : "figure"}>
              {value === null ? "none yet" : number} {value !== null && unit && <small>{unit}</small>}
            </dd>
            <dd class="beside">{beside}</dd>
          </div>
        );
      })}
    </dl>
  );
}

/** Where experts are: all on disk, some in memory, none on a GPU. */
function Tiers({ state }: { state: State }) {
  const { memory, experts, model } = state;
  const filled = memory.resident;
  // Every bar stands for all experts.
  const of = (part: number) => ({ width: `${(100 * part) / Math.max(1, memory.experts)}%` });
  return (
    <div class="panel tiers">
      <h2>Where the experts are</h2>
      <dl>
        <div class="ram">
          <dt>
            <Term tip="Experts in memory, ready to be multiplied. A slot is room for one; the mark shows how many slots there are.">RAM</Term>
          </dt>
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
          <dt>
            <Term tip="The model's files. An expert that a token wants and memory does not hold is read from here.">Disk</Term>
          </dt>
          <dd class="bar" aria-hidden="true">
            <i class="stored" style={of(memory.experts)} />
          </dd>
          <dd>
            <b>{count(memory.experts)}</b> experts, all of them; {bytes(model.bytes)} of files
          </dd>
        </div>
        <div class="absent">
          <dt>GPU</dt>
          <dd class="bar" aria-hidden="true" />
          <dd>not used: this version computes on the CPU</dd>
        </div>
      </dl>
      <ul class="facts">
        <li>
          <b>{bytes(experts.bytes)}</b> read for answers since the start
          {experts.wasted_bytes > 0 && `, ${bytes(experts.wasted_bytes)} of them ahead and in vain`}
          {experts.warm_up_bytes > 0 && `; ${bytes(experts.warm_up_bytes)} to warm up`}
        </li>
        {experts.read_p50_us !== null && (
          <li>
            <b>{time(experts.read_p50_us / 1000)}</b> or less for half of the reads
            {experts.read_p99_us !== null && `, ${time(experts.read_p99_us / 1000)} or less for 99% of them`}
          </li>
        )}
        {experts.failures > 0 && <li class="error">{plural(experts.failures, "read")} failed for good</li>}
      </ul>
    </div>
  );
}

/** Where the time of a pass went. */
function Time({ state }: { state: State }) {
  const [chosen, setChosen] = useState<"decode" | "prefill">("decode");
  const pass = state[chosen];
  return (
    <div class="panel time">
      <div class="title">
        <h2>Where the time went</h2>
        <div class="choice" role="group" aria-label="Which pass">
          <button type="button" aria-pressed={chosen === "decode"} onClick={() => setChosen("decode")}>
            Last token
          </button>
          <button type="button" aria-pressed={chosen === "prefill"} onClick={() => setChosen("prefill")}>
            Last prompt
          </button>
        </div>
      </div>
      {pass ? <Phases pass={pass} /> : <p class="quiet">No such pass has run yet.</p>}
    </div>
  );
}

function Phases({ pass }: { pass: Pass }) {
  const all = Math.max(pass.ms, 1e-9);
  const found = kinds(pass.phases);
  return (
    <>
      <p>
        <b class="big">{time(pass.ms)}</b> for{" "}
        {pass.prompt_rows > 0 ? plural(pass.prompt_rows, "prompt token") : plural(pass.tokens, "token")}
        {pass.sequences > 1 && ` of ${pass.sequences} requests`}
        {pass.prompt_rows === 0 && pass.rows > pass.sequences && `, with ${plural(pass.rows - pass.sequences, "draft")}`};{" "}
        {plural(pass.hits, "expert")} in memory, {count(pass.misses)} read
      </p>
      <div class="stack" aria-hidden="true">
        {found.map(({ kind, ms }) => (
          <i key={kind} class={kind} style={{ width: `${(100 * ms) / all}%` }} />
        ))}
      </div>
      <table>
        <caption class="unseen">Time by kind of work</caption>
        <thead class="unseen">
          <tr>
            <th scope="col">Work</th>
            <th scope="col">Time</th>
            <th scope="col">Share</th>
          </tr>
        </thead>
        <tbody>
          {found.map(({ kind, name, tip, ms }) => (
            <tr key={kind}>
              <th scope="row">
                <i class={`key ${kind}`} aria-hidden="true" />
                <Term tip={tip}>{name}</Term>
              </th>
              <td>{time(ms)}</td>
              <td>{percent(ms / all)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <details>
        <summary>Every part</summary>
        <table class="numbers">
          <caption class="unseen">Time by part of the pass</caption>
          <tbody>
            {[...pass.phases]
              .sort((a, b) => b.ms - a.ms)
              .map(({ name, ms }) => (
                <tr key={name}>
                  <th scope="row">{name}</th>
                  <td>{time(ms)}</td>
                  <td>{percent(ms / all)}</td>
                </tr>
              ))}
          </tbody>
        </table>
      </details>
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
    [counted.length === 1 ? "the last answer, mean" : `the last ${count(counted.length)} answers, mean`, mean, meanMs(counted)],
    ["planned, once warm", outlook.now.disk_bytes, inverse(outlook.now.tokens_per_second)],
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
            <th scope="col">
              <Term tip="Bytes of experts read from disk for one token of an answer.">from disk</Term>
            </th>
            <th scope="col">
              <Term tip="The time in which the disk, at its measured limit, reads so many bytes. No token that reads them can be faster.">
                disk needs
              </Term>
            </th>
            <th scope="col">
              <Term tip="What a token took, measured; in the line of the plan, what it takes at best.">took</Term>
            </th>
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

/** Uses from which a measured share says something. */
const ENOUGH = 1000;

/** What more memory would give: by the planner's formulas, and by what was watched. */
function Outlook({ state }: { state: State }) {
  const { outlook, reuse } = state;
  const rows: [string, Expectation | null, number | null][] = [
    ["half of it", outlook.half, reuse.half],
    ["this budget", outlook.now, reuse.now],
    ["twice as much", outlook.twice, reuse.twice],
  ];
  return (
    <div class="panel outlook">
      <h2>What more memory would give</h2>
      <table class="numbers">
        <thead>
          <tr>
            <th scope="col">
              <span class="unseen">Memory</span>
            </th>
            <th scope="col">
              <Term tip="Share of experts found in memory once the cache is warm, by the planner's formulas.">hits planned</Term>
            </th>
            <th scope="col">
              <Term tip="Share of the uses watched here that a cache of this size would have found, had it kept the experts used last. Forebay's own cache weighs more than the last use.">
                hits by use
              </Term>
            </th>
            <th scope="col">
              <Term tip="Bytes of experts that a token reads from disk, as planned.">read a token</Term>
            </th>
            <th scope="col">
              <Term tip="Tokens a second that disk and memory allow at most, as planned: a limit, not a promise.">at most</Term>
            </th>
          </tr>
        </thead>
        <tbody>
          {rows.map(([name, of, used]) => (
            <tr key={name} class={of === outlook.now ? "now" : undefined}>
              <th scope="row">
                {name}
                {of && <small>{bytes(of.budget)}</small>}
              </th>
              {of ? (
                <>
                  <td>{percent(of.hit_rate)}</td>
                  <td>{reuse.known >= ENOUGH ? percent(used) : "–"}</td>
                  <td>{bytes(of.disk_bytes)}</td>
                  <td>{speed(of.tokens_per_second)}</td>
                </>
              ) : (
                <td colSpan={4}>the model does not run in that</td>
              )}
            </tr>
          ))}
        </tbody>
      </table>
      <p class="quiet">
        Planned: once warm, for a conversation of {count(outlook.context)} tokens without drafts
        {outlook.now.bound && `; what sets the speed is ${BOUNDS[outlook.now.bound]}`}. By use:{" "}
        {reuse.known >= ENOUGH
          ? `${plural(reuse.known, "use")} that answers made of experts while somebody looked; ${count(reuse.first)} first ones do not count.`
          : `shown from ${count(ENOUGH)} uses on; ${count(reuse.known)} so far, watched while answers are generated.`}
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
        {bytes(all)} planned of a budget of {bytes(memory.budget)}
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
    </details>
  );
}
