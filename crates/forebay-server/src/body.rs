//! The body of a request, read within limits.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequest, Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use http_body_util::BodyExt;
use serde_json::{Map, Value};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::app::App;
use crate::error::{ApiError, Dialect};
use crate::openai::tokens::off_thread;

/// All bodies that are read or worked on have room for so many of the largest size.
const LARGEST: usize = 4;
/// Bytes in which that room is counted.
const UNIT: usize = 1 << 10;
/// Bodies up to this size are parsed where they arrive.
const SMALL: usize = 64 << 10;
/// Larger ones that are parsed at a time: what comes of them can be many times as large.
const PARSED_AT_ONCE: usize = 2;

/// Room for bodies.
pub struct Bodies {
    room: Arc<Semaphore>,
    bytes: usize,
    parsing: Arc<Semaphore>,
}

impl Bodies {
    /// For bodies of at most `most` bytes each.
    pub fn new(most: usize) -> Self {
        let units = most.saturating_mul(LARGEST).div_ceil(UNIT).min(Semaphore::MAX_PERMITS);
        let semaphore = |permits| Arc::new(Semaphore::new(permits));
        Self { room: semaphore(units), bytes: units.saturating_mul(UNIT), parsing: semaphore(PARSED_AT_ONCE) }
    }

    fn full(&self) -> ApiError {
        let message = format!(
            "other requests fill the {} KiB that there are for bodies; try again in a moment, or start with a larger --max-body",
            self.bytes / UNIT
        );
        ApiError {
            retry_after: Some(Duration::from_secs(1)),
            ..ApiError::new(StatusCode::TOO_MANY_REQUESTS, message).code("bodies_full")
        }
    }
}

/// A body's share of the room for bodies, kept for as long as what was made of it.
#[derive(Clone, Debug, Default)]
pub struct Share {
    _permit: Option<Arc<OwnedSemaphorePermit>>,
}

/// The body of a request, which says that it is JSON.
pub struct JsonBody {
    bytes: Vec<u8>,
    share: Share,
}

impl JsonBody {
    /// The server as it is for the model that the body names, what `read` makes of the body, which must be an object; and
    /// its share, to be kept until that is used up. Where it is large, this is not done on the threads that serve sockets.
    pub async fn read<T: Send + 'static>(
        self,
        app: &Arc<App>,
        read: impl FnOnce(Map<String, Value>, &App) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<(Arc<App>, T, Share), ApiError> {
        let Self { bytes, share } = self;
        let read = move |bytes: &[u8], app: &App| -> Result<(Arc<App>, T), ApiError> {
            let object = object(bytes)?;
            let app = app.of(app.place_for(&object));
            let made = read(object, &app)?;
            Ok((app, made))
        };
        if bytes.len() <= SMALL {
            let (app, made) = read(&bytes, app)?;
            return Ok((app, made, share));
        }
        let turn = Arc::clone(&app.bodies.parsing).acquire_owned().await;
        let of_task = Arc::clone(app);
        let work = move || {
            // Held by the work itself, which goes on where the client goes away.
            let _turn = turn;
            let (app, made) = read(&bytes, &of_task)?;
            Ok((app, made, share))
        };
        off_thread(work).await
    }
}

fn object(bytes: &[u8]) -> Result<Map<String, Value>, ApiError> {
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(ApiError::bad("the body must be a JSON object").code("invalid_json")),
        Err(error) => Err(ApiError::bad(format!("the body is not valid JSON: {error}")).code("invalid_json")),
    }
}

/// Refuses a request for an answer where none can be taken on, before its body is read.
pub async fn room_in_queue(
    State(app): State<Arc<App>>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    app.check_room()?;
    Ok(next.run(request).await)
}

impl FromRequest<Arc<App>> for JsonBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let dialect = request.extensions().get::<Dialect>().copied().unwrap_or(Dialect::OpenAi);
        check_type(&request, dialect)?;
        read(request, app).await
    }
}

async fn read(request: Request, app: &App) -> Result<JsonBody, ApiError> {
    let most = app.settings.max_body;
    let headers = request.headers();
    check_plain(headers)?;
    let sized =
        headers.contains_key(header::CONTENT_LENGTH) || headers.contains_key(header::TRANSFER_ENCODING);
    if !sized && request.method() == Method::POST {
        let message = "a body with a Content-Length is needed";
        return Err(ApiError::new(StatusCode::LENGTH_REQUIRED, message).code("length_required"));
    }
    let too_large = || {
        let message =
            format!("the body is larger than {most} bytes; send less, or start with a larger limit");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message).code("request_too_large")
    };
    let length = told_length(headers);
    if length.is_some_and(|length| length > most as u64) {
        return Err(too_large());
    }
    let bodies = &app.bodies;
    if length.is_some_and(|length| length.div_ceil(UNIT as u64) > bodies.room.available_permits() as u64) {
        return Err(bodies.full());
    }
    let mut body: Body = request.into_body();
    let read = async {
        let (mut bytes, mut share) = (Vec::new(), None::<OwnedSemaphorePermit>);
        while let Some(frame) = body.frame().await {
            let frame =
                frame.map_err(|error| ApiError::bad(format!("the body could not be read: {error}")))?;
            let Ok(data) = frame.into_data() else { continue };
            if data.len() > most - bytes.len() {
                return Err(too_large());
            }
            bytes.extend_from_slice(&data);
            // Only what has come takes room: whoever promises much and sends little keeps nobody out.
            let more =
                bytes.len().div_ceil(UNIT) - share.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
            let more = u32::try_from(more).map_err(|_| too_large())?;
            let more = Arc::clone(&bodies.room).try_acquire_many_owned(more).map_err(|_| bodies.full())?;
            match &mut share {
                Some(share) => share.merge(more),
                None => share = Some(more),
            }
        }
        Ok(JsonBody { bytes, share: Share { _permit: share.map(Arc::new) } })
    };
    match tokio::time::timeout(app.settings.patience, read).await {
        Ok(read) => read,
        Err(_) => {
            let message = "the body did not arrive in time; send it again";
            Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, message).code("timeout"))
        }
    }
}

/// An error if a body is compressed.
pub fn check_plain(headers: &HeaderMap) -> Result<(), ApiError> {
    match headers.get(header::CONTENT_ENCODING).filter(|coding| *coding != "identity") {
        Some(coding) => {
            let message = format!("bodies encoded as {coding:?} are not read; send it plain");
            Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message).code("unsupported_encoding"))
        }
        None => Ok(()),
    }
}

/// The length that a body is said to have.
pub fn told_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// An error unless the body says that it is JSON. Ollama's clients may leave that out.
fn check_type(request: &Request, dialect: Dialect) -> Result<(), ApiError> {
    let found = request.headers().get(header::CONTENT_TYPE).map(|value| value.to_str().unwrap_or_default());
    if dialect == Dialect::Ollama {
        return Ok(());
    }
    let kind = found.unwrap_or_default().split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if kind == "application/json" || (kind.starts_with("application/") && kind.ends_with("+json")) {
        return Ok(());
    }
    let message = match found {
        Some(found) => format!("the Content-Type is {found:?}; send application/json"),
        None => "the Content-Type is missing; send application/json".to_owned(),
    };
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message).code("unsupported_media_type"))
}
