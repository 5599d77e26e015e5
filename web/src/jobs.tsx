import { useEffect, useRef, useState } from "preact/hooks";

import { count, moment, plural, time } from "./format";
import { type Batch, type Batches, cancel, check, create, download, endedAt, isOpen, list, problems } from "./overnight";
import { KeyNeeded } from "./server";

/** Between two looks at the list, in milliseconds: while something is under way, and otherwise. */
const BUSY = 3000;
const QUIET = 15_000;

interface Props {
  /** Whether it is looked at: otherwise nothing is asked. */
  shown: boolean;
  onKeyNeeded: (message: string) => void;
}

export function Jobs({ shown, onKeyNeeded }: Props) {
  const [batches, setBatches] = useState<Batches | undefined>(undefined);
  const [trouble, setTrouble] = useState("");
  const [said, setSaid] = useState("");
  const [sending, setSending] = useState(false);
  const [round, setRound] = useState(0);
  const input = useRef<HTMLInputElement>(null);

  function failed(error: unknown) {
    const text = error instanceof Error ? error.message : String(error);
    if (error instanceof KeyNeeded) onKeyNeeded(text);
    else setTrouble(text);
  }

  useEffect(() => {
    if (!shown) return;
    const end = new AbortController();
    let timer = 0;
    const look = async () => {
      let wait = QUIET;
      try {
        if (!document.hidden) {
          const found = await list(end.signal);
          setBatches(found);
          setTrouble("");
          // A server without the routes does not get them while it runs.
          if (found === null) return;
          if (found.some(isOpen)) wait = BUSY;
        }
      } catch (error) {
        if (end.signal.aborted) return;
        failed(error);
      }
      timer = window.setTimeout(look, wait);
    };
    void look();
    return () => {
      end.abort();
      clearTimeout(timer);
    };
  }, [shown, round]);

  async function send() {
    const file = input.current?.files?.[0];
    if (!file || sending) return;
    setSaid("");
    setTrouble("");
    setSending(true);
    try {
      const found = check(await file.text());
      if (typeof found === "string") {
        setTrouble(found);
      } else {
        await create(file, found.endpoint);
        setSaid(`${plural(found.requests, "request")} of ${file.name} taken.`);
        if (input.current) input.current.value = "";
        setRound((round) => round + 1);
      }
    } catch (error) {
      failed(error);
    }
    setSending(false);
  }

  const act = (work: Promise<void>) => void work.then(() => setRound((round) => round + 1), failed);

  return (
    <section class="overnight" aria-label="Overnight">
      <div class="panel">
        <h2>Overnight</h2>
        <p class="quiet">
          A file of requests that nobody waits for. They run while nobody else is served, go on after a restart, and their
          answers come as one file.
        </p>
        {batches === null ? (
          <p class="note">This server has no queue for such jobs: it answers 404 to /v1/batches.</p>
        ) : (
          <>
            <form
              class="send"
              onSubmit={(event) => {
                event.preventDefault();
                void send();
              }}
            >
              <label for="requests">
                Requests, one JSON object a line{" "}
                <code class="example">{'{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {…}}'}</code>
              </label>
              <div class="row">
                <input id="requests" ref={input} type="file" accept=".jsonl,application/jsonl,application/x-ndjson" required />
                <button type="submit" class="primary" disabled={sending || batches === undefined}>
                  {sending ? "Sending" : "Start"}
                </button>
              </div>
            </form>
            {trouble && (
              <p class="error" role="alert">
                {trouble}
              </p>
            )}
            <p class="quiet" role="status">
              {said}
            </p>
            {batches === undefined && !trouble && <p class="quiet">Asking the server.</p>}
            {batches?.length === 0 && <p class="quiet">No job has been given to this server.</p>}
            {batches && batches.length > 0 && (
              <ol class="batches">
                {batches.map((batch) => (
                  <One
                    key={batch.id}
                    batch={batch}
                    onCancel={() => act(cancel(batch.id))}
                    onDownload={(file, name) => act(download(file, name))}
                  />
                ))}
              </ol>
            )}
          </>
        )}
      </div>
    </section>
  );
}

const STATUS: Record<Batch["status"], string> = {
  validating: "being checked",
  failed: "refused",
  in_progress: "under way",
  finalizing: "being written",
  completed: "complete",
  expired: "out of time",
  cancelling: "being cancelled",
  cancelled: "cancelled",
};

interface OneProps {
  batch: Batch;
  onCancel: () => void;
  onDownload: (file: string, name: string) => void;
}

function One({ batch, onCancel, onDownload }: OneProps) {
  const counts = batch.request_counts ?? { total: 0, completed: 0, failed: 0 };
  const done = counts.completed + counts.failed;
  const eta = batch.forebay?.eta_seconds;
  const ended = endedAt(batch);
  const wrong = problems(batch);
  return (
    <li>
      <h3>
        {batch.id} <span class={`how ${batch.status}`}>{STATUS[batch.status] ?? batch.status}</span>
      </h3>
      {counts.total > 0 && <progress value={done} max={counts.total} aria-label={`${batch.id}: requests`} />}
      <p>
        {counts.total > 0 && (
          <>
            <b>{count(counts.completed)}</b> of {plural(counts.total, "request")} answered
            {counts.failed > 0 && `, ${count(counts.failed)} failed`}
            {batch.forebay?.running ? `, ${count(batch.forebay.running)} under way` : ""};{" "}
          </>
        )}
        {isOpen(batch) && batch.status === "in_progress" && (eta == null ? "how long it takes is unknown yet; " : `about ${time(1000 * eta)} left; `)}
        given {moment(batch.created_at)}
        {ended !== null && `, ended ${moment(ended)}`}
      </p>
      {batch.forebay?.paused && <p class="error">It waits: {batch.forebay.paused}</p>}
      {wrong.slice(0, 3).map((text) => (
        <p key={text} class="error">
          {text}
        </p>
      ))}
      {wrong.length > 3 && <p class="error">and {plural(wrong.length - 3, "more problem")}</p>}
      <div class="actions">
        {batch.output_file_id && (
          <button type="button" class="plain" onClick={() => onDownload(batch.output_file_id ?? "", `${batch.id}-answers.jsonl`)}>
            Answers<span class="unseen"> of {batch.id}</span>
          </button>
        )}
        {batch.error_file_id && (
          <button type="button" class="plain" onClick={() => onDownload(batch.error_file_id ?? "", `${batch.id}-errors.jsonl`)}>
            Errors<span class="unseen"> of {batch.id}</span>
          </button>
        )}
        {isOpen(batch) && batch.status !== "cancelling" && (
          <button type="button" class="plain" onClick={onCancel}>
            Cancel<span class="unseen"> {batch.id}</span>
          </button>
        )}
      </div>
    </li>
  );
}
