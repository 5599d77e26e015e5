//! `GET /v1/models` and `GET /v1/models/{id}`.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::Response;
use serde_json::{Value, json};

use crate::app::App;
use crate::error::ApiError;
use crate::params;
use crate::stream;

fn model(app: &App) -> Value {
    json!({
        "id": app.model.id,
        "object": "model",
        "created": app.model.created,
        "owned_by": "forebay",
        "max_model_len": app.model.context,
    })
}

/// All models.
pub async fn list(State(app): State<Arc<App>>) -> Response {
    let data: Vec<Value> = app.all().map(|app| model(&app)).collect();
    stream::json(&json!({"object": "list", "data": data}), Vec::new())
}

/// One model.
pub async fn one(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    let app = app.of(app.place_of(&id).unwrap_or(0));
    params::named_model(&id, &app)?;
    Ok(stream::json(&model(&app), Vec::new()))
}
