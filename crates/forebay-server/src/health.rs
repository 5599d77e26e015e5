//! Whether the server lives, whether it takes requests, and what it counted.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use forebay_engine::scheduler::Health;
use serde_json::json;

use crate::app::App;
use crate::fleet::Standing;
use crate::stream;

/// The process answers: restarting it would change nothing.
pub async fn live(State(app): State<Arc<App>>) -> Response {
    // An engine that failed does not come back by itself: then a restart helps. A model that could not be loaded is tried
    // again when it is asked for.
    let look = app.fleet.look();
    match look.last.scheduler.state().health {
        Health::Failed { .. } if !matches!(look.standing, Standing::Resident(_)) => {
            stream::json(&json!({"status": "ok"}), Vec::new())
        }
        Health::Failed { reason } => not_well(&json!({"status": "failed", "reason": reason})),
        Health::Ready | Health::Draining => stream::json(&json!({"status": "ok"}), Vec::new()),
    }
}

/// Whether requests are taken, and how many wait.
pub async fn ready(State(app): State<Arc<App>>) -> Response {
    let state = app.state();
    let look = app.fleet.look();
    let ending = app.ending.load(Ordering::Relaxed);
    let (status, reason) = match &state.health {
        Health::Ready if !ending => ("ok", None),
        Health::Ready | Health::Draining => ("draining", None),
        Health::Failed { reason } => ("failed", Some(reason)),
    };
    let value = json!({
        "status": status,
        "reason": reason,
        "model": app.model.id,
        "context": app.model.context,
        "models": app.served_names(),
        "resident": resident(&app, look.standing),
        "state": standing(&app, look.standing),
        "running": state.running,
        "waiting": state.waiting,
        "waiting_batch": state.waiting_batch,
        "max_queue": state.queue,
        "batches": app.jobs.as_ref().ok().map(|jobs| jobs.health()),
    });
    if status == "ok" { stream::json(&value, Vec::new()) } else { not_well(&value) }
}

fn resident(app: &App, standing: Standing) -> Option<String> {
    match standing {
        Standing::Resident(place) => Some(app.of(place).model.id.clone()),
        _ => None,
    }
}

/// What is in memory, in words.
fn standing(app: &App, standing: Standing) -> String {
    let name = |place| app.of(place).model.id.clone();
    match standing {
        Standing::Empty => "unloaded (idle)".to_owned(),
        Standing::Loading(place, _) => format!("loading {}", name(place)),
        Standing::Resident(place) => format!("loaded {}", name(place)),
        Standing::Unloading(place) => format!("unloading {}", name(place)),
    }
}

fn not_well(value: &serde_json::Value) -> Response {
    let mut response = stream::json(value, Vec::new());
    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    response
}

/// What was counted, for Prometheus.
pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    let mut text = app.metrics.text(&app.state(), &app.model.id);
    text += &crate::metrics::of_models(&app.served_names(), &app.fleet.look());
    if let Ok(jobs) = &app.jobs {
        text += &crate::metrics::of_batches(&jobs.counts());
    }
    let mut response = Response::new(Body::from(text));
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

/// What this is, for people who look with a browser.
pub async fn root(State(app): State<Arc<App>>) -> Response {
    let value = json!({
        "name": "forebay",
        "version": env!("CARGO_PKG_VERSION"),
        "model": app.model.id,
        "interfaces": ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat"],
    });
    stream::json(&value, Vec::new())
}
