//! Answers that are sent while they grow: server-sent events, or a line of JSON each.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;
use hyper::body::Frame;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::app::App;
use crate::error::{ApiError, Dialect};
use crate::run::{Piece, Pieces, Running};

/// Writes one interface's stream.
pub trait Wire: Send + 'static {
    /// What is sent before anything is known.
    fn begin(&mut self, out: &mut Out);
    /// What is sent for a piece of answer number `choice`. Failures do not come here.
    fn piece(&mut self, choice: usize, piece: Piece, out: &mut Out);
    /// What is sent when all answers are over.
    fn end(&mut self, out: &mut Out);
    /// What is sent instead of the rest.
    fn fail(&mut self, error: &ApiError, out: &mut Out);
}

/// What is to be sent.
#[derive(Default)]
pub struct Out(String);

impl Out {
    /// An event that is only data.
    pub fn data(&mut self, data: &Value) {
        self.0 += &format!("data: {}\n\n", one_line(data));
    }

    /// An event with a name.
    pub fn event(&mut self, name: &str, data: &Value) {
        self.0 += &format!("event: {name}\ndata: {}\n\n", one_line(data));
    }

    /// Text that is no JSON.
    pub fn raw(&mut self, text: &str) {
        self.0 += text;
    }

    /// A line of JSON.
    pub fn line(&mut self, value: &Value) {
        self.0 += &one_line(value);
        self.0.push('\n');
    }
}

/// JSON in one line, whatever its reader takes for the end of one: many know more of these than JSON escapes.
pub fn one_line(value: &Value) -> String {
    let mut text = value.to_string();
    for (end, escaped) in [('\u{85}', "\\u0085"), ('\u{2028}', "\\u2028"), ('\u{2029}', "\\u2029")] {
        // They can only stand in strings.
        if text.contains(end) {
            text = text.replace(end, escaped);
        }
    }
    text
}

/// How a stream shows that it is alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Server-sent events: by comments, which every client skips.
    Events,
    /// Lines of JSON: there is no way that no client sees.
    Lines,
}

/// Chunks on their way to the socket. What else comes waits in the answer's own queue, which is bounded.
const CHUNKS: usize = 4;

/// The response that sends `running` as it grows.
pub fn response(app: &Arc<App>, mut running: Running, wire: impl Wire, kind: Kind) -> Response {
    let (send, chunks) = mpsc::channel::<Bytes>(CHUNKS);
    let keep_alive = app.settings.keep_alive;
    let headers = forecast_headers(&running);
    let (fleet, place) = (Arc::clone(&app.fleet), app.place);
    tokio::spawn(async move {
        let loading = || fleet.loading(place);
        write(&mut running.pieces, wire, kind, (keep_alive, &loading), send).await;
        // Where the client is gone, this ends the work.
        drop(running);
    });
    let mut response = growing(chunks, kind);
    response.headers_mut().extend(headers);
    response
}

/// Sends what is told of answers, until they are over or nobody takes it, and signs of life in between, which also say how
/// much of the model is loaded.
async fn write(
    pieces: &mut Pieces,
    mut wire: impl Wire,
    kind: Kind,
    (keep_alive, loading): (Duration, &(dyn Fn() -> Option<(u64, u64)> + Send + Sync)),
    send: mpsc::Sender<Bytes>,
) {
    let mut out = Out::default();
    wire.begin(&mut out);
    let mut progress = None;
    // Much is told that a client is not: what counts is when something was written.
    let mut written = Instant::now();
    loop {
        if !out.0.is_empty() {
            if send.send(Bytes::from(std::mem::take(&mut out.0))).await.is_err() {
                return;
            }
            written = Instant::now();
        }
        let next = tokio::select! {
            next = pieces.next() => next,
            () = send.closed() => return,
            () = tokio::time::sleep_until(written + keep_alive), if kind == Kind::Events => {
                out.raw(&alive(progress, loading()));
                continue;
            }
        };
        match next {
            Some((_, Piece::Failed(error))) => {
                wire.fail(&error, &mut out);
                break;
            }
            Some((choice, piece)) => {
                if let Piece::Progress { done, total, .. } = piece {
                    progress = Some((done, total));
                }
                wire.piece(choice, piece, &mut out);
            }
            None => {
                wire.end(&mut out);
                break;
            }
        }
    }
    _ = send.send(Bytes::from(out.0)).await;
}

/// A response that is sent as `chunks` come.
pub fn growing(chunks: mpsc::Receiver<Bytes>, kind: Kind) -> Response {
    let mut response = Response::new(Body::new(Chunks(chunks)));
    let content_type = match kind {
        Kind::Events => "text/event-stream",
        Kind::Lines => "application/x-ndjson",
    };
    let own = response.headers_mut();
    own.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    own.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    own.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response
}

/// A sign of life: tokens of the prompt that are computed, or bytes of the model that are loaded.
fn alive(prompt: Option<(usize, usize)>, load: Option<(u64, u64)>) -> String {
    match (prompt, load) {
        (Some((done, total)), _) => format!(": prompt {done}/{total}\n\n"),
        (None, Some((done, total))) => format!(": loading {done}/{total}\n\n"),
        (None, None) => ": waiting\n\n".to_owned(),
    }
}

/// A whole answer as JSON, with what was expected of it.
pub fn json(value: &Value, headers: Vec<(HeaderName, HeaderValue)>) -> Response {
    let mut response = Response::new(Body::from(value.to_string()));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response.headers_mut().extend(headers);
    response
}

/// What was expected of a request when it was taken on.
pub fn forecast_headers(running: &Running) -> Vec<(HeaderName, HeaderValue)> {
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let mut headers = vec![
        (HeaderName::from_static("x-forebay-prompt-tokens"), HeaderValue::from(running.prompt_tokens)),
        (HeaderName::from_static("x-forebay-queue-ahead"), HeaderValue::from(running.ahead)),
    ];
    let forecast = &running.forecast;
    for (name, time) in
        [("x-forebay-forecast-wait-ms", forecast.wait), ("x-forebay-forecast-prefill-ms", forecast.prefill)]
    {
        headers.extend(time.map(|time| (HeaderName::from_static(name), HeaderValue::from(millis(time)))));
    }
    if let Some(rate) = forecast.tokens_per_second
        && let Ok(value) = HeaderValue::from_str(&format!("{rate:.3}"))
    {
        headers.push((HeaderName::from_static("x-forebay-forecast-tokens-per-second"), value));
    }
    headers
}

/// The error of a stream that has begun, as an event.
pub fn fail_event(error: &ApiError, dialect: Dialect, out: &mut Out) {
    match dialect {
        Dialect::Anthropic => out.event("error", &error.body(dialect)),
        Dialect::OpenAi => out.data(&error.body(dialect)),
        Dialect::Ollama => out.line(&error.body(dialect)),
    }
}

/// A body made of chunks as they come.
pub struct Chunks(pub mpsc::Receiver<Bytes>);

impl hyper::body::Body for Chunks {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|chunk| chunk.map(|chunk| Ok(Frame::data(chunk))))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use serde_json::json;

    use super::*;

    /// An interface that says nothing but its end.
    struct Silent;

    impl Wire for Silent {
        fn begin(&mut self, _: &mut Out) {}
        fn piece(&mut self, _: usize, _: Piece, _: &mut Out) {}
        fn end(&mut self, _: &mut Out) {}
        fn fail(&mut self, _: &ApiError, out: &mut Out) {
            out.raw("failed");
        }
    }

    /// What is sent while a prompt tells of its progress all the time.
    async fn told(kind: Kind) -> String {
        let (tell, pieces) = mpsc::unbounded_channel();
        let unread = Arc::new(AtomicUsize::new(0));
        let mut pieces = Pieces::new(pieces, Arc::clone(&unread), 1);
        let (send, mut chunks) = mpsc::channel::<Bytes>(CHUNKS);
        tokio::spawn(async move {
            for done in 0..100 {
                tokio::time::sleep(Duration::from_millis(10)).await;
                unread.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                tell.send((0, Piece::Progress { done, total: 100, read: None, left: None })).unwrap();
            }
        });
        let write = write(&mut pieces, Silent, kind, (Duration::from_millis(300), &|| None), send);
        let read = async {
            let mut all = String::new();
            while let Some(chunk) = chunks.recv().await {
                all += std::str::from_utf8(&chunk).unwrap();
            }
            all
        };
        tokio::join!(write, read).1
    }

    #[tokio::test]
    async fn a_stream_shows_signs_of_life_while_there_is_news_that_it_does_not_tell() {
        let said = told(Kind::Events).await;
        assert!(said.starts_with(": prompt ") && said.ends_with("/100\n\nfailed"), "{said}");
        assert_eq!(told(Kind::Lines).await, "failed");
    }

    #[test]
    fn what_some_readers_take_for_the_end_of_a_line_is_escaped() {
        let value = json!({"a\u{2028}": "\u{85}\u{2029}\r\n\u{b}\u{c}\u{1c}\u{1d}\u{1e}"});
        let text = one_line(&value);
        // As Python's str.splitlines() has them.
        let ends =
            ['\n', '\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}', '\u{2029}'];
        assert!(!text.contains(ends), "{text:?}");
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
    }
}
