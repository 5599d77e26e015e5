//! What is known of a batch: what its client asked for, and how far it is.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::ids;
use crate::openai::once::Endpoint;

/// The first letters of a batch's id.
pub const PREFIX: &str = "batch_";

/// Where a batch stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Its file is being looked through.
    Validating,
    /// It has no results: the file is wrong.
    Failed,
    /// Its requests are answered, or wait for it.
    InProgress,
    /// All are answered, and the files of results are being closed.
    Finalizing,
    /// Its results can be fetched.
    Completed,
    /// It is being given up.
    Cancelling,
    /// It was given up; what was answered before can be fetched.
    Cancelled,
}

impl Status {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Validating,
        Self::Failed,
        Self::InProgress,
        Self::Finalizing,
        Self::Completed,
        Self::Cancelling,
        Self::Cancelled,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Validating => "validating",
            Self::Failed => "failed",
            Self::InProgress => "in_progress",
            Self::Finalizing => "finalizing",
            Self::Completed => "completed",
            Self::Cancelling => "cancelling",
            Self::Cancelled => "cancelled",
        }
    }

    /// Whether nothing more happens.
    pub fn is_final(self) -> bool {
        matches!(self, Self::Failed | Self::Completed | Self::Cancelled)
    }
}

/// What is wrong with a line of a batch's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LineError {
    /// A short name that programs can look at.
    pub code: String,
    /// The line, from 1; none where it is the file.
    pub line: Option<u64>,
    /// What, and what to do.
    pub message: String,
    /// The field at fault.
    pub param: Option<String>,
}

/// A batch, as it is kept on disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BatchRecord {
    /// Its name in requests.
    pub id: String,
    /// Which interface its requests speak.
    pub endpoint: Endpoint,
    /// The file of its requests.
    pub input_file_id: String,
    /// When the client would like to have it; nothing depends on that.
    pub completion_window: String,
    /// What the client wrote on it.
    pub metadata: Option<Map<String, Value>>,
    /// The model that was the first of the server when it was made.
    pub model: String,
    /// The models that its requests name, of those that were served when it was looked through: no others answer it.
    #[serde(default)]
    pub models: Vec<String>,
    /// Where it stands.
    pub status: Status,
    /// When it came into its states, in seconds since 1970.
    pub created_at: u64,
    #[allow(missing_docs)]
    pub in_progress_at: Option<u64>,
    #[allow(missing_docs)]
    pub finalizing_at: Option<u64>,
    #[allow(missing_docs)]
    pub completed_at: Option<u64>,
    #[allow(missing_docs)]
    pub failed_at: Option<u64>,
    #[allow(missing_docs)]
    pub cancelling_at: Option<u64>,
    #[allow(missing_docs)]
    pub cancelled_at: Option<u64>,
    /// The file of answers, from the beginning; a client sees it at the end.
    pub output_file_id: String,
    /// The file of requests that have no answer.
    pub error_file_id: String,
    /// Requests, once they were counted.
    pub total: u64,
    /// Answers, as of the last change of the status.
    pub completed: u64,
    /// Requests that have no answer, likewise.
    pub failed: u64,
    /// What is wrong with its file.
    pub errors: Vec<LineError>,
}

impl BatchRecord {
    /// A batch that nothing was done for yet.
    pub fn new(endpoint: Endpoint, input_file_id: String, model: String) -> Self {
        Self {
            id: format!("{PREFIX}{}", ids::random()),
            endpoint,
            input_file_id,
            completion_window: "24h".to_owned(),
            metadata: None,
            model,
            models: Vec::new(),
            status: Status::Validating,
            created_at: ids::now(),
            in_progress_at: None,
            finalizing_at: None,
            completed_at: None,
            failed_at: None,
            cancelling_at: None,
            cancelled_at: None,
            output_file_id: super::files::new_id(),
            error_file_id: super::files::new_id(),
            total: 0,
            completed: 0,
            failed: 0,
            errors: Vec::new(),
        }
    }

    /// The models that it takes to answer it.
    pub fn needs(&self) -> &[String] {
        if self.models.is_empty() { std::slice::from_ref(&self.model) } else { &self.models }
    }

    /// Brings it into a state, now.
    pub fn enter(&mut self, status: Status) {
        self.status = status;
        let time = match status {
            Status::Validating => return,
            Status::InProgress => &mut self.in_progress_at,
            Status::Finalizing => &mut self.finalizing_at,
            Status::Completed => &mut self.completed_at,
            Status::Failed => &mut self.failed_at,
            Status::Cancelling => &mut self.cancelling_at,
            Status::Cancelled => &mut self.cancelled_at,
        };
        *time = Some(ids::now());
    }

    /// The batch as clients see it, with what it says of itself beyond their interface.
    pub fn shown(&self, extension: Value) -> Value {
        let ended = self.status.is_final();
        let file = |id: &str, lines: u64| (ended && lines > 0).then(|| id.to_owned());
        let errors = (!self.errors.is_empty()).then(|| json!({"object": "list", "data": self.errors}));
        json!({
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint.path(),
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status.name(),
            "output_file_id": file(&self.output_file_id, self.completed),
            "error_file_id": file(&self.error_file_id, self.failed),
            "created_at": self.created_at,
            "in_progress_at": self.in_progress_at,
            "expires_at": null,
            "finalizing_at": self.finalizing_at,
            "completed_at": self.completed_at,
            "failed_at": self.failed_at,
            "expired_at": null,
            "cancelling_at": self.cancelling_at,
            "cancelled_at": self.cancelled_at,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
            "forebay": extension,
        })
    }
}
