import { bytes, count, percent, plural, share, speed, time } from "./format";
import { Term } from "./term";
import type { Ended, Job, State } from "./types";

export function Requests({ state }: { state: State | null }) {
  if (!state) return null;
  const { totals, jobs, recent } = state;
  const [layersDone, layers] = state.layers_done;
  return (
    <section class="requests" aria-label="Requests">
      <div class="panel">
        <h2>Requests</h2>
        {jobs.length === 0 ? (
          <p class="quiet">Nothing runs and nothing waits.</p>
        ) : (
          <ol class="jobs">
            {jobs.map((job) => (
              <One key={job.id} job={job} />
            ))}
          </ol>
        )}
        {jobs.some((job) => job.running) && layers > 0 && layersDone < layers && (
          <p class="quiet">
            The pass that runs is through with {layersDone} of {plural(layers, "layer")}.
          </p>
        )}
        <p class="quiet">
          Since the start: {count(totals.completed)} answered, {count(totals.cancelled)} cancelled, {count(totals.failed)}{" "}
          failed, {count(totals.refused)} refused; {plural(totals.new_tokens, "token")} generated.
        </p>
      </div>
      <Kept state={state} />
      <div class="panel">
        <h2>Forecast against reality</h2>
        {recent.length === 0 ? (
          <p class="quiet">No request has ended yet.</p>
        ) : (
          <p class="quiet">
            Times to the first token count from the turn of a request, tokens a second from behind its first token. A
            forecast is what was said when its turn came.
          </p>
        )}
        {recent.length > 0 && (
          <div class="scroll" tabIndex={0} role="region" aria-label="Requests that ended">
            <table class="numbers">
              <thead>
                <tr>
                  <th scope="col">Request</th>
                  <th scope="col">prompt</th>
                  <th scope="col">answer</th>
                  <th scope="col">waited</th>
                  <th scope="col">first token</th>
                  <th scope="col">tokens/s</th>
                </tr>
              </thead>
              <tbody>
                {recent.map((job) => (
                  <Past key={job.id} job={job} />
                ))}
              </tbody>
            </table>
          </div>
        )}
      </div>
    </section>
  );
}

/** What is kept of conversations, to go on from. */
function Kept({ state }: { state: State }) {
  const { totals, memory, keeping } = state;
  const { used, all, tokens } = memory.kv_blocks;
  const cache = memory.lines.find((line) => line.name === "KV cache");
  const known = share(totals.reused_tokens, totals.prompt_tokens);
  return (
    <div class="panel kept">
      <h2>Conversations in memory</h2>
      <div class="bar" aria-hidden="true">
        <i class="held" style={{ width: `${(100 * used) / Math.max(1, all)}%` }} />
      </div>
      <p>
        <b>{count(used)}</b> of {plural(all, "block")} of the <Term tip={`What attention remembers of a text: ${plural(tokens, "token")} a block. Conversations that begin alike share blocks; the oldest give way.`}>KV cache</Term>{" "}
        hold text: room for {plural(all * tokens, "token")}
        {cache && ` in ${bytes(cache.bytes)}`}
      </p>
      <p>
        {known === null ? (
          "No prompt has come yet."
        ) : (
          <>
            <b>{percent(known)}</b> of prompt tokens were known from before: {count(totals.reused_tokens)} known,{" "}
            {count(totals.prompt_tokens)} computed
          </>
        )}
      </p>
      {keeping && <p class="error">Conversations are not kept on disk: {keeping}</p>}
    </div>
  );
}

function One({ job }: { job: Job }) {
  const { running } = job;
  const name = `Request ${job.id}${job.batch ? " (batch)" : ""}`;
  if (!running) {
    return (
      <li>
        <h3>{name} waits</h3>
        <p>
          for {time(job.waited_ms)}; {plural(job.prompt_tokens, "prompt token")}
          {job.expected_ms !== null && `; takes about ${time(job.expected_ms)} by what was measured`}
        </p>
      </li>
    );
  }
  const reads = running.new_tokens === 0 || running.done < running.prompt;
  const most = job.max_tokens;
  const { first_token_ms: expected } = running.forecast;
  return (
    <li>
      <h3>{name}</h3>
      {reads ? (
        <>
          <progress value={running.done} max={Math.max(1, running.prompt)} aria-label={`${name}: prompt`} />
          {running.new_tokens > 0 ? (
            <p>
              {plural(running.new_tokens, "token")} so far; others needed its place in memory, and it runs again:{" "}
              {count(running.done)} of {plural(running.prompt, "token")}
            </p>
          ) : (
            <p>
              prompt: {count(running.done)} of {plural(running.prompt || job.prompt_tokens, "token")} done
              {running.reused > 0 && `, of these ${count(running.reused)} known from before`}; {time(running.ms)}
              {expected !== null && ` of ${time(expected)} forecast`}
            </p>
          )}
        </>
      ) : (
        <p>
          {plural(running.new_tokens, "token")}
          {most !== null && ` of at most ${count(most)}`} in {time(running.ms)}
          {job.expected_ms !== null && ` of ${time(job.expected_ms)} forecast`}; first after {time(running.first_token_ms)}
          {expected !== null && ` (forecast ${time(expected)})`}
        </p>
      )}
    </li>
  );
}

function Past({ job }: { job: Ended }) {
  const { stats } = job;
  const rate = stats && stats.new_tokens > 1 && stats.decode_ms > 0 ? (1000 * (stats.new_tokens - 1)) / stats.decode_ms : null;
  const plain = (of: number | null) => speed(of).replace(" tokens/s", "");
  return (
    <tr>
      <th scope="row">
        {job.id} <small class={`how ${job.how}`}>{job.how}</small>
      </th>
      <td>
        {count(job.prompt_tokens)} {job.reused > 0 && <small>{count(job.reused)} known</small>}
      </td>
      <td>{stats ? count(stats.new_tokens) : "none"}</td>
      <td>{time(job.waited_ms)}</td>
      <td>
        {stats?.first_token_ms == null ? "none" : time(stats.first_token_ms)} <Said text={job.forecast.first_token_ms === null ? null : time(job.forecast.first_token_ms)} />
      </td>
      <td>
        {rate === null ? "none" : plain(rate)} <Said text={job.forecast.tokens_per_second === null ? null : plain(job.forecast.tokens_per_second)} />
      </td>
    </tr>
  );
}

/** What was said beforehand, under what came. */
function Said({ text }: { text: string | null }) {
  return <small>{text === null ? "no forecast" : `forecast ${text}`}</small>;
}
