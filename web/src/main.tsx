import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { Chat } from "./chat";
import { Engine } from "./engine";
import { plural } from "./format";
import { Jobs } from "./jobs";
import { Requests } from "./requests";
import { type Feed, follow, key } from "./server";

/** Where there is room the chat stays beside the others. */
const VIEWS = ["Chat", "Engine", "Requests", "Overnight"] as const;

function App() {
  const [feed, setFeed] = useState<Feed>({ state: null, map: null, trouble: null, message: "" });
  const [view, setView] = useState<(typeof VIEWS)[number]>("Chat");
  const [entry, setEntry] = useState(0);
  useEffect(() => {
    const end = new AbortController();
    void follow(end.signal, (change) => setFeed((feed) => ({ ...feed, ...change })));
    return () => end.abort();
  }, [entry]);
  const needsKey = feed.trouble === "key";
  const onKeyNeeded = (message: string) => setFeed((feed) => ({ ...feed, trouble: "key", message }));
  return (
    <div class="page" data-view={view}>
      {!needsKey && (
        <a class="skip" href="#message" onClick={() => setView("Chat")}>
          Skip to the message box
        </a>
      )}
      <Head feed={feed} />
      {!needsKey && (
        <nav aria-label="Views">
          {VIEWS.map((name) => (
            <button key={name} type="button" aria-current={view === name ? "page" : undefined} onClick={() => setView(name)}>
              {name}
            </button>
          ))}
        </nav>
      )}
      {needsKey ? (
        <KeyForm
          message={feed.message}
          onKey={(given) => {
            key.set(given);
            setFeed((feed) => ({ ...feed, trouble: null, message: "" }));
            setEntry((entry) => entry + 1);
          }}
        />
      ) : (
        <main>
          <Chat model={feed.state?.model ?? null} onKeyNeeded={onKeyNeeded} />
          <div class="side" tabIndex={-1}>
            <Engine state={feed.state} map={feed.map} />
            <Requests state={feed.state} />
            <Jobs shown={view === "Overnight"} onKeyNeeded={onKeyNeeded} />
          </div>
        </main>
      )}
    </div>
  );
}

function Head({ feed }: { feed: Feed }) {
  const { state } = feed;
  const running = state?.jobs.filter((job) => job.running).length ?? 0;
  const waiting = (state?.jobs.length ?? 0) - running;
  let [kind, text] = ["quiet", "connecting"];
  if (feed.trouble === "key") [kind, text] = ["bad", "locked"];
  else if (feed.trouble === "gone") [kind, text] = ["bad", "no connection"];
  else if (state?.health === "failed") [kind, text] = ["bad", "the engine has failed"];
  else if (state?.health === "draining") [kind, text] = ["quiet", "shutting down"];
  else if (state && running + waiting > 0) {
    [kind, text] = ["busy", waiting > 0 ? `${running} running, ${waiting} waiting` : `${running} running`];
  } else if (state) [kind, text] = ["good", "idle"];
  let problem = "";
  if (feed.trouble === "gone") problem = `No connection (${feed.message}). What is shown is what was known last; the page tries again by itself.`;
  else if (state?.health === "failed") problem = `The engine has stopped: ${state.reason ?? "no reason is known"}. Restart the server.`;
  return (
    <header>
      <h1>
        <img src="/dashboard/icon.svg" alt="" width="26" height="26" /> Forebay
      </h1>
      <p class="model">
        {state && (
          <>
            <strong>{state.model.id}</strong>{" "}
            <span class="wide">
              {plural(state.model.layers, "layer")}, context {state.model.context.toLocaleString("en")}, {state.machine.isa},{" "}
              {plural(state.machine.threads, "thread")}
            </span>
          </>
        )}
      </p>
      <p class={`status ${kind}`} role="status">
        <i aria-hidden="true" /> {text}
      </p>
      {problem && (
        <p class="problem" role="alert">
          {problem}
        </p>
      )}
    </header>
  );
}

function KeyForm({ message, onKey }: { message: string; onKey: (key: string) => void }) {
  const input = useRef<HTMLInputElement>(null);
  useEffect(() => input.current?.focus(), []);
  return (
    <main class="locked">
      <form
        onSubmit={(event) => {
          event.preventDefault();
          const given = input.current?.value.trim() ?? "";
          if (given) onKey(given);
        }}
      >
        <h2>This server asks for a key</h2>
        <p>It is one of those that it was started with. This tab keeps it until you close it.</p>
        <label for="key">API key</label>
        <div class="row">
          <input id="key" ref={input} type="password" autocomplete="off" spellcheck={false} required />
          <button class="primary" type="submit">
            Open
          </button>
        </div>
        {message && (
          <p class="error" role="alert">
            {message}
          </p>
        )}
      </form>
    </main>
  );
}

const root = document.getElementById("app");
if (root) render(<App />, root);
