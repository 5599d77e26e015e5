//! The engine behind HTTP: the interfaces of OpenAI, Anthropic and Ollama, streaming, health and metrics.
//!
//! Every interface translates its requests into one kind of [`ask::Ask`], and what comes of it, piece by piece, back.
//! In between, [`run`] hands it to the engine's scheduler as tokens and hears tokens; [`pipe`] makes text of them: think
//! block, stop strings, tool calls.
//!
//! - Several models, one at a time in memory: [`app`], [`fleet`], [`resident`].
//! - The way in: [`conn`] (sockets), [`tls`], [`guard`] (keys, pages, names), [`body`], [`fields`] and [`params`].
//! - The interfaces: [`openai`], [`anthropic`], [`ollama`]; [`health`] for programs that watch, [`openapi`]
//!   for those that ask what there is, [`dashboard`] for people.
//! - Work for the night, which outlives the server: [`jobs`].
//! - What they share: [`tools`], [`grammars`], [`stream`], [`error`], [`metrics`].
//!
//! Nothing of a request is trusted: sizes, times and numbers have limits, what is not understood is refused by its name,
//! and no text of a client becomes a control token. This crate reads no environment variables. docs/api.md is its
//! reference for users.

pub mod anthropic;
pub mod app;
pub mod ask;
pub mod auth;
pub mod body;
pub mod conn;
pub mod cors;
pub mod dashboard;
pub mod error;
pub mod fields;
pub mod fleet;
pub mod grammars;
pub mod guard;
pub mod health;
pub mod ids;
pub mod jobs;
pub mod metrics;
pub mod ollama;
pub mod openai;
pub mod openapi;
pub mod params;
pub mod pipe;
pub mod resident;
pub mod run;
mod signals;
pub mod stream;
pub mod tls;
pub mod tools;

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};
use tokio::sync::watch;

pub use app::{App, Model, Models, Served, Settings};
pub use auth::Keys;
pub use cors::Origins;
pub use jobs::Jobs;
pub use resident::{Afterwards, Open, Opened};
pub use tls::{Pem, Tls, TlsError};

/// Threads that serve sockets: little is done there.
const SOCKET_THREADS: usize = 2;

/// For the last words of answers to be taken, when the server ends and all answers are over.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// Why a server could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The address is not to be had.
    #[error("cannot listen on {address}: {cause}; choose another --port, or end what uses it")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        cause: std::io::Error,
    },
    /// Threads or signals are not to be had.
    #[error("cannot start the server: {0}")]
    Start(#[from] std::io::Error),
}

/// Takes the address, so that a busy one is found before a model is loaded.
pub fn listen(address: SocketAddr) -> Result<TcpListener, ServeError> {
    let listener = TcpListener::bind(address).map_err(|cause| ServeError::Listen { address, cause })?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Serves until the process is asked to end, finishes what is under way, and puts the engine away; false if that had
/// failed. From then on, and also behind this, asking a second time ends the process at once.
pub fn serve(app: App, listener: TcpListener) -> Result<bool, ServeError> {
    let asked = signals::watch()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(SOCKET_THREADS)
        .thread_name("http")
        .enable_all()
        .build()?;
    let app = Arc::new(app);
    let well = runtime.block_on(until_the_end(app, listener, asked))?;
    // What still hangs on a socket has had its time.
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(well)
}

async fn until_the_end(
    app: Arc<App>,
    listener: TcpListener,
    mut asked: watch::Receiver<bool>,
) -> Result<bool, ServeError> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let (end, ending) = watch::channel(false);
    let serving = tokio::spawn(conn::serve(Arc::clone(&app), router(Arc::clone(&app)), listener, ending));
    let loading = tokio::spawn(Arc::clone(&app.fleet).run());
    if let Ok(jobs) = &app.jobs {
        jobs.start(&app);
    }
    let renewed = app.settings.tls.clone().map(|tls| tokio::spawn(signals::renew(tls)));
    _ = asked.wait_for(|asked| *asked).await;
    tracing::info!("ending: what is under way is finished, nothing new is taken");
    _ = end.send(true);
    if let Ok(jobs) = &app.jobs {
        jobs.stop();
    }
    app.fleet.close();
    let well = put_away(&app, app.settings.drain).await;
    // Who waits for a model that takes too long to come is told so.
    app.fleet.abandon();
    if let Ok(jobs) = &app.jobs {
        jobs.finished().await;
    }
    if tokio::time::timeout(LAST_WORDS, serving).await.is_err() {
        tracing::warn!("clients that did not take what was sent are hung up on");
    }
    loading.abort();
    renewed.inspect(tokio::task::JoinHandle::abort);
    // An engine that is not there did not fail.
    Ok(well.unwrap_or(true))
}

/// Finishes what is under way, for as long as `patience`, and lets the engine go: whether it had not failed. `None` if none is
/// in memory.
async fn put_away(app: &App, patience: Duration) -> Option<bool> {
    let began = Instant::now();
    let resident = app.fleet.settled(patience).await?;
    let left = patience.saturating_sub(began.elapsed());
    Some(tokio::task::spawn_blocking(move || resident.put_away(left)).await.unwrap_or(false))
}

/// All routes.
pub fn router(app: Arc<App>) -> Router {
    // What asks for an answer is refused before it is read where none can be taken on.
    let answers = Router::new()
        .route("/v1/chat/completions", post(openai::chat::answer))
        .route("/v1/completions", post(openai::completions::answer))
        .route("/v1/responses", post(openai::responses::answer))
        .route("/v1/messages", post(anthropic::messages))
        .route("/api/chat", post(ollama::chat))
        .route("/api/generate", post(ollama::generate))
        .route_layer(from_fn_with_state(Arc::clone(&app), body::room_in_queue));
    Router::new()
        .merge(answers)
        .route("/", get(dashboard::root))
        .merge(dashboard::routes())
        .route("/openapi.json", get(openapi::describe))
        .route("/health", get(health::ready))
        .route("/health/live", get(health::live))
        .route("/health/ready", get(health::ready))
        .route("/metrics", get(health::metrics))
        .route("/v1/models", get(openai::models::list))
        // Names of models may have parts.
        .route("/v1/models/{*id}", get(openai::models::one))
        .route("/v1/files", get(openai::files::list).post(openai::files::create))
        .route("/v1/files/{id}", get(openai::files::one).delete(openai::files::delete))
        .route("/v1/files/{id}/content", get(openai::files::content))
        .route("/v1/batches", get(openai::batches::list).post(openai::batches::create))
        .route("/v1/batches/{id}", get(openai::batches::one))
        .route("/v1/batches/{id}/cancel", post(openai::batches::cancel))
        .route("/tokenize", post(openai::tokens::tokenize))
        .route("/detokenize", post(openai::tokens::detokenize))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/api/tags", get(ollama::tags))
        .route("/api/ps", get(ollama::running))
        .route("/api/version", get(ollama::version))
        .route("/api/show", post(ollama::show))
        .fallback(guard::no_route)
        .method_not_allowed_fallback(guard::wrong_method)
        .layer(from_fn_with_state(Arc::clone(&app), guard::guard))
        .with_state(app)
}
