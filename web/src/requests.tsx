import { count, plural, speed, time } from "./format";
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
          failed, {count(totals.refused)} refused. {plural(totals.new_tokens, "token")} generated;{" "}
          {count(totals.prompt_tokens)} prompt tokens computed and {count(totals.reused_tokens)} known from before.
        </p>
      </div>
      <div class="panel">
        <h2>Forecast against reality</h2>
        {recent.length === 0 ? (
          <p class="quiet">No request has ended yet.</p>
        ) : (
          <div class="scroll" tabIndex={0} role="region" aria-label="Requests that ended">
            <table class="numbers">
              <thead>
                <tr>
                  <th scope="col">Request</th>
                  <th scope="col">prompt</th>
                  <th scope="col">answer</th>
                  <th scope="col">waited</th>
                  <th scope="col">first token</th>
                  <th scope="col">forecast</th>
                  <th scope="col">tokens/s</th>
                  <th scope="col">forecast</th>
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

function One({ job }: { job: Job }) {
  const { running } = job;
  const name = `Request ${job.id}${job.batch ? " (batch)" : ""}`;
  if (!running) {
    return (
      <li>
        <h3>{name} waits</h3>
        <p>
          for {time(job.waited_ms)}; {plural(job.prompt_tokens, "prompt token")}; takes {time(job.expected_ms)} by what was
          measured
        </p>
      </li>
    );
  }
  const reads = running.new_tokens === 0;
  const most = job.max_tokens;
  return (
    <li>
      <h3>{name}</h3>
      {reads ? (
        <>
          <progress value={running.computed} max={Math.max(1, running.to_compute)} aria-label={`${name}: prompt`} />
          <p>
            prompt: {count(running.computed)} of {plural(running.to_compute, "token")} computed
            {running.reused > 0 && `, ${count(running.reused)} known`}; {time(running.ms)} of {time(running.forecast.first_token_ms)}{" "}
            forecast
          </p>
        </>
      ) : (
        <p>
          {plural(running.new_tokens, "token")}
          {most !== null && ` of at most ${count(most)}`} in {time(running.ms)}
          {job.expected_ms !== null && ` of ${time(job.expected_ms)} forecast`}; first after {time(running.first_token_ms)}{" "}
          (forecast {time(running.forecast.first_token_ms)})
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
        {job.id} <span class={`how ${job.how}`}>{job.how}</span>
      </th>
      <td>
        {count(job.prompt_tokens)}
        {job.reused > 0 && <small> {count(job.reused)} known</small>}
      </td>
      <td>{stats ? count(stats.new_tokens) : "none"}</td>
      <td>{time(job.waited_ms)}</td>
      <td>{time(stats?.first_token_ms)}</td>
      <td class="expected">{time(job.forecast.first_token_ms)}</td>
      <td>{plain(rate)}</td>
      <td class="expected">{plain(job.forecast.tokens_per_second)}</td>
    </tr>
  );
}
