// The little of Markdown that answers are full of: fenced code, headings, lists, bold and inline code. What is not
// understood is shown as it is; nothing becomes markup by itself.

export type Span = { kind: "text" | "code" | "bold"; text: string };
export type Block =
  | { kind: "code"; language: string; text: string; closed: boolean }
  | { kind: "heading" | "paragraph"; spans: Span[] }
  | { kind: "list"; ordered: boolean; start: number; items: Span[][] };

/** Cuts a text into blocks. A text that is still growing is fine: a fence that is open shows what there is. */
export function blocks(text: string): Block[] {
  const found: Block[] = [];
  let paragraph: string[] = [];
  const flush = () => {
    if (paragraph.length > 0) found.push({ kind: "paragraph", spans: spans(paragraph.join("\n")) });
    paragraph = [];
  };
  const lines = text.split("\n");
  for (let at = 0; at < lines.length; at += 1) {
    const line = lines[at] ?? "";
    const fence = /^\s*(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/.exec(line);
    if (fence) {
      flush();
      const mark = fence[1] ?? "```";
      const body: string[] = [];
      let closed = false;
      for (at += 1; at < lines.length; at += 1) {
        const inner = lines[at] ?? "";
        if (inner.trim().startsWith(mark) && inner.trim().replaceAll(mark[0] ?? "`", "") === "") {
          closed = true;
          break;
        }
        body.push(inner);
      }
      found.push({ kind: "code", language: fence[2] ?? "", text: body.join("\n"), closed });
      continue;
    }
    const heading = /^#{1,6}\s+(.+)$/.exec(line);
    const item = /^\s{0,3}(?:([-*+])|(\d{1,9})[.)])\s+(.*)$/.exec(line);
    if (line.trim() === "") {
      flush();
    } else if (heading) {
      flush();
      found.push({ kind: "heading", spans: spans(heading[1] ?? "") });
    } else if (item) {
      flush();
      const ordered = item[2] !== undefined;
      const last = found.at(-1);
      const content = spans(item[3] ?? "");
      if (last?.kind === "list" && last.ordered === ordered) last.items.push(content);
      else found.push({ kind: "list", ordered, start: Number(item[2] ?? 1), items: [content] });
    } else {
      paragraph.push(line);
    }
  }
  flush();
  return found;
}

/** Cuts a line into spans. */
export function spans(text: string): Span[] {
  const found: Span[] = [];
  const marks = /`([^`\n]+)`|\*\*([^*\n]+)\*\*/g;
  let end = 0;
  for (const match of text.matchAll(marks)) {
    if (match.index > end) found.push({ kind: "text", text: text.slice(end, match.index) });
    const code = match[1];
    found.push(code !== undefined ? { kind: "code", text: code } : { kind: "bold", text: match[2] ?? "" });
    end = match.index + match[0].length;
  }
  if (end < text.length) found.push({ kind: "text", text: text.slice(end) });
  return found;
}
