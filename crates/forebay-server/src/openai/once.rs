//! A request answered in one piece, whoever brought it: a connection, or a batch.

use std::sync::Arc;

use axum::http::{HeaderName, HeaderValue};
use forebay_engine::Priority;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{chat, completions, responses};
use crate::app::App;
use crate::error::ApiError;

/// A whole answer.
pub struct Once {
    /// The object that the interface answers with.
    pub value: Value,
    /// What was expected of the request when it was taken on.
    pub headers: Vec<(HeaderName, HeaderValue)>,
}

/// The interfaces whose requests may stand in a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Endpoint {
    /// Conversations.
    #[serde(rename = "/v1/chat/completions")]
    Chat,
    /// Continuations of a text.
    #[serde(rename = "/v1/completions")]
    Completions,
    /// Conversations, in the newer interface.
    #[serde(rename = "/v1/responses")]
    Responses,
}

impl Endpoint {
    /// All of them, by their paths.
    pub const ALL: [(&str, Self); 3] = [
        (Self::Chat.path(), Self::Chat),
        (Self::Completions.path(), Self::Completions),
        (Self::Responses.path(), Self::Responses),
    ];

    /// Its path.
    pub const fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Responses => "/v1/responses",
        }
    }
}

/// Answers the body of a request, when nobody waits for anything else.
pub async fn in_background(
    app: &Arc<App>,
    endpoint: Endpoint,
    body: Map<String, Value>,
) -> Result<Value, ApiError> {
    let app = &app.of(app.place_for(&body));
    let once = match endpoint {
        Endpoint::Chat => {
            let mut request = chat::Request::read(body, app)?;
            request.ask.priority = Priority::Batch;
            chat::once(app, request).await
        }
        Endpoint::Completions => {
            let mut request = completions::Request::read(body, app)?;
            request.ask.priority = Priority::Batch;
            completions::once(app, request).await
        }
        Endpoint::Responses => {
            let mut request = responses::Request::read(body, app)?;
            request.ask.priority = Priority::Batch;
            responses::once(app, request).await
        }
    };
    Ok(once?.value)
}
