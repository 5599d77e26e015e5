//! What a client is told when something is wrong, in the shape of the interface that it speaks.

use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use forebay_engine::scheduler::{JobError, Refused};
use forebay_engine::{GenerateError, SampleError};
use forebay_grammar::GrammarError;
use forebay_text::StopStringError;
use forebay_text::template::RenderError;
use serde_json::{Value, json};

use crate::fleet::Refusal;

/// Whose shapes a route has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// `/v1/...`, and everything that belongs to nobody.
    OpenAi,
    /// `/v1/messages`.
    Anthropic,
    /// `/api/...`.
    Ollama,
}

impl Dialect {
    /// The dialect of a path.
    pub fn of(path: &str) -> Self {
        if path == "/v1/messages" || path.starts_with("/v1/messages/") {
            Self::Anthropic
        } else if path.starts_with("/api/") {
            Self::Ollama
        } else {
            Self::OpenAi
        }
    }
}

/// Why a request has no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// The status of the response, if nothing of it was sent yet.
    pub status: StatusCode,
    /// What, where, and what to do.
    pub message: String,
    /// The parameter at fault.
    pub param: Option<String>,
    /// A short name that programs can look at.
    pub code: Option<&'static str>,
    /// When another try may succeed.
    pub retry_after: Option<Duration>,
}

impl ApiError {
    /// An error with this status.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None, retry_after: None }
    }

    /// A request that cannot be served as it is.
    pub fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// The same, because of one parameter.
    pub fn param(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::bad(message) }
    }

    /// With a short name.
    pub fn code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// Because of this parameter, unless one is named already.
    pub fn at(self, param: &str) -> Self {
        Self { param: self.param.or_else(|| Some(param.to_owned())), ..self }
    }

    fn openai_type(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        }
    }

    fn anthropic_type(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            500.. => "api_error",
            _ => "invalid_request_error",
        }
    }

    /// The error as a client of `dialect` expects it.
    pub fn body(&self, dialect: Dialect) -> Value {
        match dialect {
            Dialect::OpenAi => json!({"error": {
                "message": self.message,
                "type": self.openai_type(),
                "param": self.param,
                "code": self.code,
            }}),
            Dialect::Anthropic => {
                let message = match &self.param {
                    Some(param) if !self.message.contains(param.as_str()) => {
                        format!("{param}: {}", self.message)
                    }
                    _ => self.message.clone(),
                };
                json!({"type": "error", "error": {"type": self.anthropic_type(), "message": message}})
            }
            Dialect::Ollama => match &self.param {
                Some(param) if !self.message.contains(param.as_str()) => {
                    json!({"error": format!("{param}: {}", self.message)})
                }
                _ => json!({"error": self.message}),
            },
        }
    }

    /// The response, where nothing was sent yet.
    pub fn response(&self, dialect: Dialect) -> Response {
        let mut response = Response::new(Body::from(self.body(dialect).to_string()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(after) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(after.as_secs().clamp(1, 3600)));
        }
        response
    }
}

impl IntoResponse for ApiError {
    /// Leaves the shape to [`crate::guard`], which knows the dialect.
    fn into_response(self) -> Response {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = self.status;
        response.extensions_mut().insert(self);
        response
    }
}

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> Self {
        let message = refused.to_string();
        match refused {
            Refused::QueueFull { retry_after, .. } => Self {
                retry_after: Some(retry_after),
                ..Self::new(StatusCode::TOO_MANY_REQUESTS, message).code("queue_full")
            },
            Refused::Draining => Self {
                retry_after: Some(Duration::from_secs(10)),
                ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message).code("shutting_down")
            },
            Refused::EngineFailed { .. } => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, message).code("engine_failed")
            }
            Refused::TooLong { .. } => Self::bad(message).code("context_length_exceeded"),
            Refused::Sampling(error) => error.into(),
            _ => Self::bad(message),
        }
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        let message = refusal.to_string();
        let (status, code, after) = match refusal {
            Refusal::Failed { again, .. } => (StatusCode::SERVICE_UNAVAILABLE, "model_unavailable", again),
            Refusal::Full { .. } => (StatusCode::TOO_MANY_REQUESTS, "queue_full", Duration::from_secs(10)),
            Refusal::Ending => (StatusCode::SERVICE_UNAVAILABLE, "shutting_down", Duration::from_secs(10)),
        };
        Self { retry_after: Some(after), ..Self::new(status, message).code(code) }
    }
}

impl From<JobError> for ApiError {
    fn from(error: JobError) -> Self {
        let message = error.to_string();
        match error {
            JobError::ShuttingDown => Self {
                retry_after: Some(Duration::from_secs(10)),
                ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message).code("shutting_down")
            },
            JobError::EngineFailed { .. } => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, message).code("engine_failed")
            }
            JobError::Generate(GenerateError::Sample(error)) => error.into(),
            JobError::Generate(GenerateError::Constraint(_)) => Self::bad(message).code("grammar_failed"),
            _ => Self::new(StatusCode::INTERNAL_SERVER_ERROR, message).code("generation_failed"),
        }
    }
}

impl From<SampleError> for ApiError {
    fn from(error: SampleError) -> Self {
        let message = error.to_string();
        match error {
            SampleError::NoFiniteLogit { .. } => Self::new(StatusCode::INTERNAL_SERVER_ERROR, message),
            SampleError::Logprobs { .. } => Self::param("top_logprobs", message),
            SampleError::BiasToken { .. } => Self::param("logit_bias", message),
            _ => Self::bad(message),
        }
    }
}

impl From<RenderError> for ApiError {
    fn from(error: RenderError) -> Self {
        let message = error.to_string();
        match error {
            RenderError::NoMessages => Self::param("messages", message),
            RenderError::BadTool { .. } => Self::param("tools", message),
            RenderError::UnknownTool { .. } | RenderError::ToolChoiceWithoutTools => {
                Self::param("tool_choice", message)
            }
            // Whatever a conversation does to a template, it is the conversation that can be changed.
            _ => Self::bad(message),
        }
    }
}

impl From<StopStringError> for ApiError {
    fn from(error: StopStringError) -> Self {
        Self::param("stop", error.to_string())
    }
}

impl From<GrammarError> for ApiError {
    fn from(error: GrammarError) -> Self {
        Self::bad(error.to_string()).code("invalid_schema")
    }
}
