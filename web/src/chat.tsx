import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

import { grow, growing, type Message, message, openCalls, toSend, tokensPerSecond } from "./conversation";
import { bytes, count, plural, speed, time } from "./format";
import { ask, KeyNeeded } from "./server";
import { type Block, blocks, type Span } from "./text";
import type { State } from "./types";

interface Settings {
  temperature: string;
  maxTokens: string;
  think: boolean | null;
  system: string;
  tools: string;
}

const USUAL: Settings = { temperature: "", maxTokens: "", think: null, system: "", tools: "" };
const TRY = ["What is 2+2?", "What is the capital of France?", "Name three colours."];

interface Props {
  model: State["model"] | null;
  onKeyNeeded: (message: string) => void;
}

export function Chat({ model, onKeyNeeded }: Props) {
  const [messages, setMessages] = useState<Message[]>([]);
  const [draft, setDraft] = useState("");
  const [settings, setSettings] = useState(USUAL);
  const [said, setSaid] = useState("");
  const cancel = useRef<AbortController | null>(null);
  const log = useRef<HTMLDivElement>(null);
  const box = useRef<HTMLTextAreaElement>(null);
  const stays = useRef(true);
  const busy = messages.at(-1)?.state === "growing";
  const open = busy ? undefined : openCalls(messages)[0];
  const wrong = problem(settings);

  useEffect(() => () => cancel.current?.abort(), []);
  useLayoutEffect(() => {
    // Who has scrolled up reads: the answer goes on below.
    if (stays.current && log.current) log.current.scrollTop = log.current.scrollHeight;
  }, [messages]);
  useLayoutEffect(() => {
    const area = box.current;
    if (!area) return;
    area.style.height = "auto";
    area.style.height = `${Math.min(area.scrollHeight + 2, 220)}px`;
  }, [draft]);

  async function answer(history: Message[]) {
    const controller = new AbortController();
    cancel.current = controller;
    let last = growing(performance.now());
    let frame = 0;
    const show = () => {
      frame = 0;
      setMessages([...history, last]);
    };
    const soon = () => {
      frame ||= requestAnimationFrame(show);
    };
    show();
    setSaid("The answer is under way.");
    try {
      const found = await ask(body(history, settings, model), controller.signal);
      last = { ...last, facts: { ...last.facts!, ahead: found.ahead, waitMs: found.waitMs } };
      soon();
      for await (const event of found.events) {
        last = grow(last, event.name, event.data, performance.now());
        soon();
      }
      if (last.state === "growing") last = { ...last, state: "failed", error: "the connection ended before the answer did" };
      setSaid(last.state === "failed" ? "The answer failed." : "The answer is complete.");
    } catch (error) {
      if (controller.signal.aborted) {
        last = { ...last, state: "stopped" };
        setSaid("The answer was stopped.");
      } else {
        const text = error instanceof Error ? error.message : String(error);
        last = { ...last, state: "failed", error: text };
        setSaid("The answer failed.");
        if (error instanceof KeyNeeded) onKeyNeeded(text);
      }
    }
    cancelAnimationFrame(frame);
    cancel.current = null;
    show();
  }

  function send(text: string) {
    if (busy || text.trim() === "" || wrong || !model) return;
    const next: Message = open ? { ...message("tool", text), callId: open.id } : message("user", text);
    const history = [...messages, next];
    setDraft("");
    stays.current = true;
    // Several calls are answered one after the other, and the model goes on when it has all results.
    if (openCalls(history).length > 0) setMessages(history);
    else void answer(history);
  }

  const again = () => {
    const at = messages.findLastIndex((found) => found.role !== "assistant");
    if (at >= 0) void answer(messages.slice(0, at + 1));
  };

  return (
    <section class="chat" aria-labelledby="chat">
      <h2 id="chat" class="unseen">
        Chat
      </h2>
      <div
        class="log"
        ref={log}
        role="log"
        aria-live="off"
        aria-label="Conversation"
        tabIndex={0}
        onScroll={({ currentTarget: { scrollTop, scrollHeight, clientHeight } }) => {
          stays.current = scrollHeight - scrollTop - clientHeight < 40;
        }}
      >
        {messages.length === 0 && (
          <div class="empty">
            <h3>Ask something</h3>
            <p>
              The model runs on this machine; the experts it needs come from disk as tokens ask for them. Watch them arrive
              beside the chat.
            </p>
            <ul>
              {TRY.map((text) => (
                <li key={text}>
                  <button type="button" onClick={() => send(text)} disabled={!model}>
                    {text}
                  </button>
                </li>
              ))}
            </ul>
          </div>
        )}
        {messages.map((found, at) => (
          <One key={at} message={found} onAgain={!busy && at === messages.length - 1 ? again : undefined} />
        ))}
      </div>
      <p class="unseen" role="status">
        {said}
      </p>
      <form
        class="composer"
        onSubmit={(event) => {
          event.preventDefault();
          send(draft);
        }}
      >
        <label for="message" class={open ? "asks" : "unseen"}>
          {open ? (
            <>
              Result of <code>{open.function.name}</code>
            </>
          ) : (
            "Message"
          )}
        </label>
        <div class="row">
          <textarea
            id="message"
            ref={box}
            rows={1}
            value={draft}
            placeholder={open ? "What the tool returned" : "Message"}
            onInput={(event) => setDraft(event.currentTarget.value)}
            onKeyDown={(event) => {
              if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
                event.preventDefault();
                send(draft);
              }
              if (event.key === "Escape" && busy) cancel.current?.abort();
            }}
          />
          {busy ? (
            <button type="button" class="stop" onClick={() => cancel.current?.abort()}>
              Stop
            </button>
          ) : (
            <button type="submit" class="primary" disabled={draft.trim() === "" || !!wrong || !model}>
              Send
            </button>
          )}
        </div>
        <div class="below">
          <details class="settings">
            <summary>Settings{wrong && <span class="error"> need a look</span>}</summary>
            <Form settings={settings} model={model} onChange={setSettings} wrong={wrong} />
          </details>
          {messages.length > 0 && (
            <button
              type="button"
              class="plain"
              onClick={() => {
                cancel.current?.abort();
                setMessages([]);
                box.current?.focus();
              }}
              disabled={busy}
            >
              New conversation
            </button>
          )}
        </div>
      </form>
    </section>
  );
}

/** What is wrong with the settings, if anything. */
function problem(settings: Settings): string | null {
  const temperature = Number(settings.temperature);
  if (settings.temperature !== "" && !(temperature >= 0 && temperature <= 2)) return "The temperature is a number from 0 to 2.";
  const most = Number(settings.maxTokens);
  if (settings.maxTokens !== "" && !(Number.isInteger(most) && most >= 1)) return "The limit is a whole number from 1.";
  if (settings.tools.trim() !== "") {
    try {
      if (!Array.isArray(JSON.parse(settings.tools))) return "Tools are a JSON list.";
    } catch (error) {
      return `Tools are no JSON: ${error instanceof Error ? error.message : ""}`;
    }
  }
  return null;
}

function body(history: Message[], settings: Settings, model: Props["model"]): object {
  return {
    model: model?.id,
    messages: toSend(history, settings.system),
    stream: true,
    stream_options: { include_usage: true, include_progress: true },
    ...(settings.temperature !== "" ? { temperature: Number(settings.temperature) } : {}),
    ...(settings.maxTokens !== "" ? { max_tokens: Number(settings.maxTokens) } : {}),
    ...(settings.think !== null ? { enable_thinking: settings.think } : {}),
    ...(settings.tools.trim() !== "" ? { tools: JSON.parse(settings.tools) } : {}),
  };
}

interface FormProps {
  settings: Settings;
  model: Props["model"];
  wrong: string | null;
  onChange: (settings: Settings) => void;
}

function Form({ settings, model, wrong, onChange }: FormProps) {
  const set = (change: Partial<Settings>) => onChange({ ...settings, ...change });
  return (
    <div class="form">
      <label>
        Temperature
        <input
          type="number"
          min="0"
          max="2"
          step="0.1"
          value={settings.temperature}
          placeholder={model ? `${Number(model.temperature.toPrecision(4))}, the model's own` : ""}
          onInput={(event) => set({ temperature: event.currentTarget.value })}
        />
      </label>
      <label>
        Most tokens
        <input
          type="number"
          min="1"
          step="1"
          value={settings.maxTokens}
          placeholder="as the server has it"
          onInput={(event) => set({ maxTokens: event.currentTarget.value })}
        />
      </label>
      <label class="check">
        <input
          type="checkbox"
          checked={settings.think ?? model?.think ?? false}
          onChange={(event) => set({ think: event.currentTarget.checked })}
        />
        Think first
      </label>
      <label class="whole">
        System message
        <textarea rows={2} value={settings.system} onInput={(event) => set({ system: event.currentTarget.value })} />
      </label>
      <label class="whole">
        Tools, as JSON
        <textarea
          rows={2}
          class="mono"
          spellcheck={false}
          value={settings.tools}
          placeholder='[{"type": "function", "function": {"name": "…", "parameters": {…}}}]'
          onInput={(event) => set({ tools: event.currentTarget.value })}
        />
      </label>
      {wrong && (
        <p class="error whole" role="alert">
          {wrong}
        </p>
      )}
    </div>
  );
}

const WHO = { system: "System", user: "You", assistant: "Model", tool: "Tool" };

function One({ message: found, onAgain }: { message: Message; onAgain: (() => void) | undefined }) {
  const waits = found.state === "growing" && found.content === "" && found.reasoning === "" && found.calls.length === 0;
  const reasons = found.state === "growing" && found.content === "" && found.calls.length === 0;
  return (
    <article class={`message ${found.role}`}>
      <h3>{WHO[found.role]}</h3>
      {found.reasoning && (
        <details class="reasoning">
          <summary>{reasons ? "Thinking…" : "Thought first"}</summary>
          <p class="pre">{found.reasoning}</p>
        </details>
      )}
      {found.role === "assistant" ? <Rich text={found.content} /> : <p class="pre">{found.content}</p>}
      {found.calls.map((call) => (
        <div class="call" key={call.id}>
          <h4>
            calls <code>{call.function.name}</code>
          </h4>
          <pre tabIndex={0}>{pretty(call.function.arguments)}</pre>
        </div>
      ))}
      {waits && <Waiting message={found} />}
      {found.state === "failed" && (
        <p class="error" role="alert">
          {found.error}
        </p>
      )}
      {found.role === "assistant" && found.state !== "growing" && (
        <footer>
          <span>{summary(found)}</span>
          {onAgain && (
            <button type="button" class="plain" onClick={onAgain}>
              Again
            </button>
          )}
        </footer>
      )}
    </article>
  );
}

/** What happens before the first token. */
function Waiting({ message: { facts } }: { message: Message }) {
  if (!facts) return null;
  const { progress, started, ahead, waitMs } = facts;
  if (progress && progress.done < progress.total) {
    const left = progress.leftMs === null ? "" : `, about ${time(progress.leftMs)} left`;
    const read = progress.read ? `, ${bytes(progress.read)} read` : "";
    return (
      <div class="waiting">
        <progress value={progress.done} max={progress.total} aria-label="Prompt" />
        <p>
          Reading the prompt: {count(progress.done)} of {plural(progress.total, "token")}
          {left}
          {read}
        </p>
      </div>
    );
  }
  let text = "Sent.";
  if (started || progress) {
    text = facts.forecastMs === null ? "Reading the prompt." : `Reading the prompt, about ${time(facts.forecastMs)}.`;
  } else if (ahead > 0) {
    text = `${plural(ahead, "request")} came first${waitMs === null ? "" : `; your turn in about ${time(waitMs)}`}.`;
  }
  return (
    <div class="waiting">
      <progress aria-label="Prompt" />
      <p>{text}</p>
    </div>
  );
}

/** What an answer cost. */
function summary(found: Message): string {
  const { facts } = found;
  const parts: string[] = [];
  if (found.state === "stopped") parts.push("stopped by you");
  if (found.state === "cut") parts.push("cut at the limit of tokens");
  if (facts) {
    if (facts.tokens !== null) parts.push(plural(facts.tokens, "token"));
    const rate = tokensPerSecond(facts);
    if (rate !== null) parts.push(speed(rate));
    if (facts.firstAt !== null) {
      const forecast = facts.forecastMs === null ? "" : ` (forecast ${time(facts.forecastMs)})`;
      parts.push(`first after ${time(facts.firstAt - facts.sentAt)}${forecast}`);
    }
    if (facts.cached > 0 && facts.promptTokens !== null) {
      parts.push(`${facts.cached} of ${facts.promptTokens} prompt tokens were known`);
    }
  }
  return parts.join(" · ");
}

function pretty(json: string): string {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

function Rich({ text }: { text: string }) {
  return (
    <div class="rich">
      {blocks(text).map((block, at) => (
        <BlockOf key={at} block={block} />
      ))}
    </div>
  );
}

function BlockOf({ block }: { block: Block }) {
  switch (block.kind) {
    case "code":
      return (
        <pre tabIndex={0} data-language={block.language || undefined}>
          <code>{block.text}</code>
        </pre>
      );
    case "heading":
      return (
        <p class="heading">
          <Spans spans={block.spans} />
        </p>
      );
    case "paragraph":
      return (
        <p class="pre">
          <Spans spans={block.spans} />
        </p>
      );
    case "list": {
      const items = block.items.map((item, at) => (
        <li key={at}>
          <Spans spans={item} />
        </li>
      ));
      return block.ordered ? <ol start={block.start}>{items}</ol> : <ul>{items}</ul>;
    }
  }
}

function Spans({ spans }: { spans: Span[] }) {
  return (
    <>
      {spans.map(({ kind, text }, at) =>
        kind === "code" ? <code key={at}>{text}</code> : kind === "bold" ? <strong key={at}>{text}</strong> : text,
      )}
    </>
  );
}
