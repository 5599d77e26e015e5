//! `/v1/batches`: requests that are answered when nobody waits.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::{StatusCode, Uri};
use axum::response::Response;
use serde_json::{Map, Value, json};

use super::files::{jobs, not_written};
use super::once::Endpoint;
use super::pages::Query;
use crate::app::App;
use crate::body::JsonBody;
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::jobs::{Batch, BatchRecord, MAX_UNFINISHED, Purpose, Status};
use crate::stream;

/// Most things that a client may write on a batch, and their sizes.
const MAX_METADATA: (usize, usize, usize) = (16, 64, 512);

fn known(app: &App, id: &str) -> Result<Arc<Batch>, ApiError> {
    jobs(app)?.batch(id).ok_or_else(|| {
        let id: String = id.chars().take(80).collect();
        ApiError {
            param: Some("id".to_owned()),
            ..ApiError::new(StatusCode::NOT_FOUND, format!("there is no batch {id:?}")).code("not_found")
        }
    })
}

fn shown(app: &App, batch: &Batch) -> Result<Response, ApiError> {
    Ok(stream::json(&jobs(app)?.shown(batch), Vec::new()))
}

/// All batches, a page at a time.
pub async fn list(State(app): State<Arc<App>>, uri: Uri) -> Result<Response, ApiError> {
    let query = Query::read(&uri, 20, 100, false)?;
    let jobs = jobs(&app)?;
    let page = query.page(jobs.all(), |batch| batch.record().id, |batch| jobs.shown(batch))?;
    Ok(stream::json(&page, Vec::new()))
}

/// One batch.
pub async fn one(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    shown(&app, &*known(&app, &id)?)
}

/// Takes on a batch.
pub async fn create(State(app): State<Arc<App>>, body: JsonBody) -> Result<Response, ApiError> {
    let jobs = jobs(&app)?;
    let read = |body: Map<String, Value>, _: &App| {
        let mut fields = Fields::new(body);
        let endpoint = fields.one_of("endpoint", &Endpoint::ALL)?;
        let endpoint = endpoint.ok_or_else(|| ApiError::param("endpoint", "endpoint is missing"))?;
        let input = fields.required_string("input_file_id")?;
        let window = fields.required_string("completion_window")?;
        if window != "24h" {
            return Err(wrong("completion_window", "24h", &window.into()));
        }
        let metadata = metadata(&mut fields)?;
        fields.finish()?;
        Ok((endpoint, input, metadata))
    };
    let (_, (endpoint, input, metadata), _) = body.read(&app, read).await?;
    match jobs.files.get(&input) {
        Some(file) if file.purpose == Purpose::Batch => {}
        Some(_) => {
            let message = format!("{input} holds results; upload requests with the purpose batch");
            return Err(ApiError::param("input_file_id", message));
        }
        None => {
            let input: String = input.chars().take(80).collect();
            let message = format!("there is no file {input:?}; upload it first");
            return Err(ApiError::param("input_file_id", message).code("file_not_found"));
        }
    }
    if jobs.count_unfinished() >= MAX_UNFINISHED {
        let message = format!("{MAX_UNFINISHED} batches are not over; wait for one, or cancel some");
        return Err(ApiError::new(StatusCode::TOO_MANY_REQUESTS, message).code("too_many_batches"));
    }
    let record = BatchRecord { metadata, ..BatchRecord::new(endpoint, input, app.model.id.clone()) };
    let of_task = Arc::clone(&app);
    let batch = on_disk(move || match &of_task.jobs {
        Ok(jobs) => jobs.add(record),
        Err(why) => Err(std::io::Error::other(why.clone())),
    });
    let batch = batch.await?;
    let response = shown(&app, &batch)?;
    jobs.run(&app, batch);
    Ok(response)
}

/// What a client writes on a batch.
fn metadata(fields: &mut Fields) -> Result<Option<Map<String, Value>>, ApiError> {
    let Some(found) = fields.object("metadata")? else { return Ok(None) };
    let (most, key, value) = MAX_METADATA;
    let fits = |(name, text): (&String, &Value)| {
        name.len() <= key && text.as_str().is_some_and(|text| text.len() <= value)
    };
    if found.len() > most || !found.iter().all(fits) {
        let expected = format!("up to {most} texts of up to {value} bytes, with names of up to {key}");
        return Err(wrong("metadata", &expected, &json!({})));
    }
    Ok(Some(found))
}

/// Gives up a batch: what is under way ends at once, and what was answered can be fetched.
pub async fn cancel(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    let batch = known(&app, &id)?;
    let own = Arc::clone(&batch);
    let cancel = |record: &mut BatchRecord| {
        if matches!(record.status, Status::Validating | Status::InProgress) {
            record.enter(Status::Cancelling);
        }
    };
    let record = on_disk(move || own.change(cancel)).await?;
    if record.status != Status::Cancelling {
        let message = format!("{} cannot be cancelled any more: it is {}", record.id, record.status.name());
        return Err(ApiError::new(StatusCode::CONFLICT, message).code("batch_over"));
    }
    batch.cancelled.send_replace(true);
    let response = shown(&app, &batch)?;
    // A batch that waits for another model, say, is run by nobody.
    jobs(&app)?.run(&app, batch);
    Ok(response)
}

async fn on_disk<T: Send + 'static>(
    write: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> Result<T, ApiError> {
    match tokio::task::spawn_blocking(write).await {
        Ok(done) => done.map_err(|error| not_written(&error)),
        Err(error) => Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())),
    }
}
