// Server-sent events, read from a response: unlike an EventSource, a request can bring a key and a body.

export interface ServerEvent {
  name: string;
  data: string;
}

/** Cuts text into events, however it is cut on its way. */
export class SseParser {
  private rest = "";
  private name = "";
  private data: string[] = [];

  push(text: string): ServerEvent[] {
    const events: ServerEvent[] = [];
    const lines = (this.rest + text).split("\n");
    this.rest = lines.pop() ?? "";
    for (const line of lines) this.line(line.endsWith("\r") ? line.slice(0, -1) : line, events);
    return events;
  }

  private line(line: string, events: ServerEvent[]) {
    if (line === "") {
      if (this.data.length > 0) events.push({ name: this.name || "message", data: this.data.join("\n") });
      this.name = "";
      this.data = [];
      return;
    }
    const colon = line.indexOf(":");
    // A line that begins with a colon is a comment.
    if (colon === 0) return;
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "event") this.name = value;
    if (field === "data") this.data.push(value);
  }
}

/** The events of a response, as they come. */
export async function* events(response: Response): AsyncGenerator<ServerEvent> {
  if (!response.body) return;
  const parser = new SseParser();
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(decoder.decode(value, { stream: true }));
    }
  } finally {
    reader.cancel().catch(() => undefined);
  }
}
