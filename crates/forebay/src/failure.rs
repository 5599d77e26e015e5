//! Why a verb ended early, and the exit status that says so to a script.

use forebay_engine::{GenerateError, OpenError, PlanError, SampleError};
use forebay_grammar::GrammarError;
use forebay_io::MirrorError;
use forebay_model::{ForwardError, SnapshotError};
use forebay_store::config::ConfigError;
use forebay_text::StopStringError;
use forebay_text::template::{RenderError, TemplateError};
use forebay_text::tokenizer::{EncodeError, TokenizerError};

/// The exit statuses, as `--help` documents them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Everything was done.
    Success = 0,
    /// Something went wrong on the way: an unreadable expert, a full disk.
    Runtime = 1,
    /// What was asked for is not possible: an option, a file, a prompt that does not fit. clap uses it too.
    Usage = 2,
    /// The model folder cannot be used.
    Model = 3,
    /// There is not enough memory.
    Memory = 4,
    /// Ctrl-C.
    Interrupted = 130,
}

/// Why a verb stopped before its end.
#[derive(Debug)]
pub enum Failure {
    /// The reader of standard output is gone (`forebay ... | head`): nothing to say, and no fault.
    PipeClosed,
    /// The user pressed Ctrl-C; what there was of an answer has been shown.
    Interrupted,
    /// The user has been told already.
    Reported {
        /// The status that the process ends with.
        exit: Exit,
    },
    /// One line for the user: what, where, and what to do next.
    Error {
        /// The status that the process ends with.
        exit: Exit,
        /// The line.
        message: String,
    },
}

impl Failure {
    /// A failure that ends the process with `exit`.
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self::Error { exit, message: message.into() }
    }

    /// Something went wrong on the way.
    pub fn runtime(message: impl Into<String>) -> Self {
        Self::new(Exit::Runtime, message)
    }

    /// What was asked for is not possible.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(Exit::Usage, message)
    }

    /// The exit status.
    pub fn exit(&self) -> Exit {
        match self {
            Self::PipeClosed => Exit::Success,
            Self::Interrupted => Exit::Interrupted,
            Self::Reported { exit } | Self::Error { exit, .. } => *exit,
        }
    }
}

impl From<SnapshotError> for Failure {
    fn from(error: SnapshotError) -> Self {
        Self::new(Exit::Model, error.to_string())
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        Self::new(Exit::Model, error.to_string())
    }
}

impl From<TokenizerError> for Failure {
    fn from(error: TokenizerError) -> Self {
        Self::new(Exit::Model, error.to_string())
    }
}

impl From<TemplateError> for Failure {
    fn from(error: TemplateError) -> Self {
        Self::new(Exit::Model, error.to_string())
    }
}

impl From<EncodeError> for Failure {
    fn from(error: EncodeError) -> Self {
        Self::new(Exit::Model, error.to_string())
    }
}

impl From<RenderError> for Failure {
    fn from(error: RenderError) -> Self {
        Self::usage(error.to_string())
    }
}

impl From<StopStringError> for Failure {
    fn from(error: StopStringError) -> Self {
        Self::usage(error.to_string())
    }
}

impl From<GrammarError> for Failure {
    fn from(error: GrammarError) -> Self {
        Self::usage(error.to_string())
    }
}

impl From<PlanError> for Failure {
    fn from(error: PlanError) -> Self {
        let exit = match error {
            PlanError::Context { .. } => Exit::Usage,
            _ => Exit::Memory,
        };
        Self::new(exit, error.to_string())
    }
}

impl From<OpenError> for Failure {
    fn from(error: OpenError) -> Self {
        let exit = match error {
            OpenError::Plan(error) => return error.into(),
            OpenError::Snapshot(_) | OpenError::Files(_) | OpenError::Weights(_) => Exit::Model,
            OpenError::Arena(_) => Exit::Memory,
            // Which of the two files cannot be read is not known.
            OpenError::Mirror(MirrorError::Read(_) | MirrorError::Size { .. }) => Exit::Runtime,
            OpenError::Isa(_) | OpenError::Mirror(_) => Exit::Usage,
            _ => Exit::Runtime,
        };
        Self::new(exit, error.to_string())
    }
}

impl From<GenerateError> for Failure {
    fn from(error: GenerateError) -> Self {
        let exit = match &error {
            GenerateError::Forward(ForwardError::Cancelled) => return Self::Interrupted,
            GenerateError::Forward(ForwardError::NoTokens | ForwardError::ContextFull { .. }) => Exit::Usage,
            GenerateError::Forward(ForwardError::Token { .. }) => Exit::Model,
            GenerateError::Sample(SampleError::NoFiniteLogit { .. }) => Exit::Runtime,
            // Settings out of range, and biases that leave no choice.
            GenerateError::Sample(_) => Exit::Usage,
            _ => Exit::Runtime,
        };
        Self::new(exit, error.to_string())
    }
}
