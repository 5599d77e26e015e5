//! The body of a request, read within limits.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use axum::http::{Method, StatusCode, header};
use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde_json::{Map, Value};

use crate::app::App;
use crate::error::{ApiError, Dialect};

/// The body of a request: one JSON object.
pub struct JsonBody(pub Map<String, Value>);

impl FromRequest<Arc<App>> for JsonBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let dialect = request.extensions().get::<Dialect>().copied().unwrap_or(Dialect::OpenAi);
        check_type(&request, dialect)?;
        let bytes = read(request, app, app.settings.max_body).await?;
        match serde_json::from_slice(&bytes) {
            Ok(Value::Object(object)) => Ok(Self(object)),
            Ok(_) => Err(ApiError::bad("the body must be a JSON object").code("invalid_json")),
            Err(error) => {
                let message = format!("the body is not valid JSON: {error}");
                Err(ApiError::bad(message).code("invalid_json"))
            }
        }
    }
}

/// The body of a request about a model: the server as it is for that model, and the body.
pub struct ModelBody(pub Arc<App>, pub Map<String, Value>);

impl FromRequest<Arc<App>> for ModelBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let JsonBody(body) = JsonBody::from_request(request, app).await?;
        Ok(Self(app.of(app.place_for(&body)), body))
    }
}

/// The body of a request, whatever it is, with at most `most` bytes.
pub async fn read(request: Request, app: &App, most: usize) -> Result<Bytes, ApiError> {
    let headers = request.headers();
    if let Some(coding) = headers.get(header::CONTENT_ENCODING).filter(|coding| *coding != "identity") {
        let message = format!("bodies encoded as {coding:?} are not read; send it plain");
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message).code("unsupported_encoding"));
    }
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
    let length =
        headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    if length.is_some_and(|length| length > most as u64) {
        return Err(too_large());
    }
    let body: Body = request.into_body();
    let read = tokio::time::timeout(app.settings.patience, Limited::new(body, most).collect());
    match read.await {
        Ok(Ok(whole)) => Ok(whole.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large()),
        Ok(Err(error)) => Err(ApiError::bad(format!("the body could not be read: {error}"))),
        Err(_) => {
            let message = "the body did not arrive in time; send it again";
            Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, message).code("timeout"))
        }
    }
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
