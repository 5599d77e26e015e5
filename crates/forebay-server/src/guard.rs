//! What every request goes through: a name, the door, and errors in the shape of the interface that was called.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::app::App;
use crate::conn::MAX_HEAD;
use crate::cors::{self, Origins};
use crate::dashboard;
use crate::error::{ApiError, Dialect};
use crate::ids;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// What a client may call its request.
const MAX_REQUEST_ID: usize = 128;

/// Lets a request in, or not, and finishes its response.
pub async fn guard(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let began = Instant::now();
    let id = request_id(&request);
    let dialect = Dialect::of(request.uri().path());
    let origin = request.headers().get(header::ORIGIN).cloned();
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let preflight = method == Method::OPTIONS;
    let wanted = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    request.extensions_mut().insert(dialect);
    let mut response = match enter(&app, &request) {
        Err(error) => error.into_response(),
        Ok(()) if preflight => StatusCode::NO_CONTENT.into_response(),
        Ok(()) => next.run(request).await,
    };
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        let early = matches!(response.headers().get(header::CONNECTION), Some(value) if value == "close");
        response = error.response(dialect);
        // What was not read of a body must not be taken for the next request.
        if early || error.status == StatusCode::PAYLOAD_TOO_LARGE {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        let message = printable(&error.message);
        tracing::debug!(request = %id, status = error.status.as_u16(), %message, "refused");
    }
    let headers = response.headers_mut();
    if preflight {
        Origins::mark_preflight(wanted.as_ref(), headers);
    }
    app.settings.origins.mark(origin.as_ref(), headers);
    if let Ok(value) = HeaderValue::from_str(&id) {
        headers.insert(REQUEST_ID, value);
    }
    headers.entry(header::X_CONTENT_TYPE_OPTIONS).or_insert(HeaderValue::from_static("nosniff"));
    let status = response.status().as_u16();
    app.metrics.statuses[usize::from(status / 100).clamp(1, 5) - 1].add(1);
    tracing::info!(
        request = %id,
        %method,
        path = %printable(&path),
        status,
        ms = began.elapsed().as_millis() as u64,
        "served"
    );
    response
}

/// Text for a log, in which what a client wrote must not look like more lines, or command a terminal.
fn printable(text: &str) -> Cow<'_, str> {
    let bad = |c: char| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}');
    if !text.contains(bad) {
        return text.into();
    }
    let shown = |c: char| if bad(c) { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(shown).collect::<String>().into()
}

/// The client's own name for the request, if it is fit to print, or a new one.
fn request_id(request: &Request) -> String {
    let own = request.headers().get(REQUEST_ID).and_then(|id| id.to_str().ok());
    let fit = |id: &&str| {
        let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        (1..=MAX_REQUEST_ID).contains(&id.len()) && id.chars().all(good)
    };
    own.filter(fit).map_or_else(|| format!("req_{}", ids::random()), str::to_owned)
}

fn enter(app: &App, request: &Request) -> Result<(), ApiError> {
    let headers = request.headers();
    // What comes in one piece may be read whole before its size is looked at.
    if headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum::<usize>() > MAX_HEAD {
        let message =
            format!("the headers have more than {} KiB; send fewer or shorter ones", MAX_HEAD >> 10);
        let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
        return Err(ApiError::new(status, message).code("headers_too_large"));
    }
    if app.settings.local_names_only {
        cors::check_host(headers)?;
    }
    app.settings.origins.check(headers)?;
    let path = request.uri().path();
    // A browser that asks first brings no key; whoever only asks whether we live needs none.
    let open = request.method() == Method::OPTIONS
        || path == "/health"
        || path.starts_with("/health/")
        || path == "/"
        || path == "/openapi.json"
        || dashboard::is_open(path);
    if open { Ok(()) } else { app.settings.keys.check(headers) }
}

/// A route that does not exist.
pub async fn no_route(request: Request<Body>) -> ApiError {
    let message = format!("there is no {}; docs/api.md lists the routes", request.uri().path());
    ApiError::new(StatusCode::NOT_FOUND, message).code("not_found")
}

/// A route that is called in another way.
pub async fn wrong_method(request: Request<Body>) -> ApiError {
    let message = format!("{} does not answer to {}", request.uri().path(), request.method());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message).code("method_not_allowed")
}
