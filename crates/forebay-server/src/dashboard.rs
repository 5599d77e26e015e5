//! The page for people: a chat, and a live view of what the engine does.
//!
//! The page is built from `web/` and kept here as files, so that building Forebay needs Rust alone. It asks nobody but
//! this server, and is open as the list of interfaces is; what it shows comes from [`state`] and [`events`], which need a
//! key like everything else. While nobody has the page open, nothing is noted for it (docs/dashboard.md).

mod feed;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::Response;
use axum::routing::get;
use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::app::App;
use crate::health;
use crate::stream::{self, Kind};

/// Between two looks while something runs, or may have begun to.
const BUSY: Duration = Duration::from_millis(250);
/// Between two looks at everything while nothing does.
const QUIET: Duration = Duration::from_secs(1);

const PAGE: &str = include_str!("../assets/index.html");
const SCRIPT: &str = include_str!("../assets/app.js");
const STYLE: &str = include_str!("../assets/app.css");
const ICON: &str = include_str!("../assets/icon.svg");

/// What the page may do: run its own script, and talk to this server.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The routes of the page.
pub fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/dashboard", get(async || page()))
        .route("/dashboard/app.js", get(async || file("text/javascript; charset=utf-8", SCRIPT)))
        .route("/dashboard/app.css", get(async || file("text/css; charset=utf-8", STYLE)))
        .route("/dashboard/icon.svg", get(async || file("image/svg+xml", ICON)))
        .route("/dashboard/state", get(state))
        .route("/dashboard/events", get(events))
}

/// Whether a path is a part of the page itself, which holds nothing that needs a key.
pub fn is_open(path: &str) -> bool {
    matches!(path, "/dashboard" | "/dashboard/app.js" | "/dashboard/app.css" | "/dashboard/icon.svg")
}

/// The page for browsers, the list of interfaces for everybody else.
pub async fn root(State(app): State<Arc<App>>, headers: HeaderMap) -> Response {
    let accepted = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    let mut response = match accepted.is_some_and(wants_html) {
        true => page(),
        false => health::root(State(app)).await,
    };
    response.headers_mut().append(header::VARY, HeaderValue::from_static("accept"));
    response
}

fn wants_html(accept: &str) -> bool {
    let kind = |part: &str| part.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    accept.split(',').any(|part| kind(part) == "text/html")
}

fn page() -> Response {
    file("text/html; charset=utf-8", PAGE)
}

fn file(kind: &'static str, text: &'static str) -> Response {
    let mut response = Response::new(Body::from(text));
    for (name, value) in [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::REFERRER_POLICY, "no-referrer"),
        // Another version may be served from the same address tomorrow.
        (header::CACHE_CONTROL, "no-cache"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

/// How everything stands.
pub async fn state(State(app): State<Arc<App>>) -> Response {
    let (app, resident, view) = app.seen();
    let about = resident.scheduler.about();
    let mut value = feed::state(&app, about, &view);
    value["map"] = feed::map(about, &view);
    stream::json(&value, Vec::new())
}

/// The same as events, whenever something has changed: `state`, and `map` for the experts. Silent otherwise, but for a
/// sign of life.
pub async fn events(State(app): State<Arc<App>>) -> Response {
    let (send, chunks) = mpsc::channel(1);
    tokio::spawn(async move {
        let mut told = [String::new(), String::new()];
        let mut last = Instant::now();
        while !app.ending.load(Ordering::Relaxed) {
            let submitted = app.state().totals.submitted;
            let (shown, resident, view) = app.seen();
            let about = resident.scheduler.about();
            let busy = !view.jobs.is_empty();
            let now = [feed::map(about, &view), feed::state(&shown, about, &view)]
                .map(|value| stream::one_line(&value));
            let mut text = String::new();
            for (name, (old, new)) in ["map", "state"].iter().zip(told.iter_mut().zip(now)) {
                if *old != new {
                    text += &format!("event: {name}\ndata: {new}\n\n");
                    *old = new;
                }
            }
            if text.is_empty() && last.elapsed() >= app.settings.keep_alive {
                text.push_str(": nothing new\n\n");
            }
            if !text.is_empty() {
                last = Instant::now();
                if send.send(Bytes::from(text)).await.is_err() {
                    return;
                }
            }
            let quiet_until = Instant::now() + if busy { Duration::ZERO } else { QUIET };
            loop {
                tokio::select! {
                    () = send.closed() => return,
                    () = tokio::time::sleep(BUSY) => {}
                }
                let came = app.state().totals.submitted != submitted;
                if came || Instant::now() >= quiet_until {
                    break;
                }
            }
        }
    });
    stream::growing(chunks, Kind::Events)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn browsers_get_the_page_and_programs_do_not() {
        for browser in ["text/html,application/xhtml+xml,*/*;q=0.8", "application/json, TEXT/HTML;q=0.1"] {
            assert!(wants_html(browser), "{browser}");
        }
        for program in ["*/*", "application/json", "", "text/plain, text/htmlx"] {
            assert!(!wants_html(program), "{program}");
        }
    }

    #[test]
    fn the_page_asks_nobody_else() {
        for text in [PAGE, SCRIPT, STYLE] {
            assert!(!text.contains("@import") && !text.contains("url(http"));
        }
        // Without anything inline, the policy needs no exception.
        assert!(!PAGE.contains("<style") && !PAGE.contains(" style=") && !PAGE.contains("onclick"));
        for (at, _) in PAGE.match_indices("<script") {
            assert!(PAGE[at..].starts_with("<script type=\"module\" src=\"/dashboard/app.js\"></script>"));
        }
        assert!(PAGE.contains("/dashboard/app.js") && !POLICY.contains("unsafe") && !POLICY.contains('*'));
    }
}
