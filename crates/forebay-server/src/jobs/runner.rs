//! From the requests of a batch to its results.
//!
//! A request has a place until its result is on the disk: what cannot be written keeps its place, so that a full disk
//! holds up new requests and loses nothing.

use std::io::{self, BufReader};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use serde_json::{Map, Value, json};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::task::JoinSet;

use super::files::Purpose;
use super::input::{self, Request, Requests};
use super::log::{Done, MAX_RESULT, ResultLog};
use super::record::{LineError, Status};
use super::{Batch, Jobs, Stuck, claim, is_raised, raised};
use crate::app::App;
use crate::error::{ApiError, Dialect};
use crate::ids;
use crate::openai::once::{self, Endpoint};
use crate::stream::one_line;

/// Before another try to write.
const WRITE_AGAIN: Duration = Duration::from_secs(2);
/// Before another try where the queue is full: at most.
const ASK_AGAIN: Duration = Duration::from_secs(5);
/// How often a request is run whose answer fails by no fault of its own, before that is its result.
const TRIES: u32 = 3;

/// Runs a batch to its end, or until the server ends.
pub async fn run(app: Arc<App>, batch: Arc<Batch>) {
    let Ok(jobs) = &app.jobs else { return };
    if !claim(&batch) {
        return;
    }
    // `None`: the server ends, and the batch goes on when it is back.
    _ = drive(&app, jobs, &batch).await;
    batch.running.store(false, Ordering::Release);
}

async fn drive(app: &Arc<App>, jobs: &Jobs, batch: &Arc<Batch>) -> Option<()> {
    let record = batch.record();
    if record.status.is_final() {
        return None;
    }
    let missing = record.needs().iter().find(|model| app.place_of(model).is_none());
    if record.status != Status::Cancelling
        && let Some(model) = missing
    {
        tracing::warn!(
            batch = %record.id, %model,
            "a batch waits for another model; start a server with that one, or cancel the batch"
        );
        return None;
    }
    if record.status == Status::Validating && !validate(app, jobs, batch).await? {
        return None;
    }
    let (done, logs) = Logs::open(jobs, batch).await?;
    let fault = match is_raised(&batch.cancelled) || batch.record().status == Status::Cancelling {
        true => None,
        false => answer_all(app, jobs, batch, done, &logs).await?,
    };
    close(jobs, batch, &logs, fault).await
}

/// Looks through the batch's file; false if nothing more is to be done.
async fn validate(app: &Arc<App>, jobs: &Jobs, batch: &Arc<Batch>) -> Option<bool> {
    let record = batch.record();
    let (path, most, endpoint) =
        (jobs.files.data_path(&record.input_file_id), jobs.limits.line, record.endpoint);
    let of_task = Arc::clone(app);
    let checked = tokio::task::spawn_blocking(move || match std::fs::File::open(path) {
        Ok(file) => {
            let mut places = Vec::new();
            let note = |body: &Map<String, Value>| {
                let place = of_task.place_for(body);
                if !places.contains(&place) {
                    places.push(place);
                }
            };
            let total = input::check(Requests::new(BufReader::new(file), endpoint, most), note)?;
            Ok((
                total,
                places.into_iter().map(|place| of_task.of(place).model.id.clone()).collect::<Vec<_>>(),
            ))
        }
        Err(error) => Err(vec![gone(&error)]),
    });
    let checked = checked.await.ok()?;
    let own = Arc::clone(batch);
    let record = written(jobs, None, "the batch's state", move || {
        own.change(|record| {
            // Whoever cancelled it meanwhile has been told so.
            if record.status == Status::Validating {
                match &checked {
                    Ok((total, models)) => {
                        record.total = *total;
                        record.models.clone_from(models);
                        record.enter(Status::InProgress);
                    }
                    Err(errors) => {
                        record.errors = errors.clone();
                        record.enter(Status::Failed);
                    }
                }
            }
        })
    });
    let record = record.await?;
    tracing::info!(batch = %record.id, status = record.status.name(), requests = record.total, "a batch was looked through");
    Some(record.status != Status::Failed)
}

fn gone(error: &io::Error) -> LineError {
    let message = format!("the file of requests cannot be read: {error}; upload it again");
    LineError {
        code: "unreadable_file".to_owned(),
        line: None,
        message,
        param: Some("input_file_id".to_owned()),
    }
}

/// The two files of results.
#[derive(Clone)]
struct Logs {
    output: Arc<Mutex<ResultLog>>,
    errors: Arc<Mutex<ResultLog>>,
}

impl Logs {
    /// Opens both, and says which requests have their result.
    async fn open(jobs: &Jobs, batch: &Arc<Batch>) -> Option<(Done, Self)> {
        let record = batch.record();
        let paths = [&record.output_file_id, &record.error_file_id].map(|id| jobs.files.data_path(id));
        let opened = written(jobs, None, "the results", move || {
            let mut done = Done::default();
            let output = ResultLog::open(&paths[0], &mut done)?;
            let errors = ResultLog::open(&paths[1], &mut done)?;
            Ok((done, output, errors))
        });
        let (done, output, errors) = opened.await?;
        batch.completed.store(output.lines(), Ordering::Relaxed);
        batch.failed.store(errors.lines(), Ordering::Relaxed);
        Some((done, Self { output: Arc::new(Mutex::new(output)), errors: Arc::new(Mutex::new(errors)) }))
    }
}

/// Runs all requests that have no result. `None`: the server ends; else what is wrong with the file of requests.
async fn answer_all(
    app: &Arc<App>,
    jobs: &Jobs,
    batch: &Arc<Batch>,
    done: Done,
    logs: &Logs,
) -> Option<Option<LineError>> {
    let turn = tokio::select! {
        turn = jobs.turn.lock() => turn,
        () = raised(&batch.cancelled) => return Some(None),
        () = raised(&jobs.stop) => return None,
    };
    let mut requests = read_ahead(app, jobs, batch, done);
    let (mut tasks, mut fault, mut all) = (JoinSet::new(), None, true);
    while all {
        let next = async {
            let place = Arc::clone(&jobs.places).acquire_owned().await.ok()?;
            Some((place, requests.recv().await?))
        };
        let next = tokio::select! {
            next = next => next,
            () = raised(&batch.cancelled) => break,
            () = raised(&jobs.stop) => break,
        };
        match next {
            None => break,
            Some((_, Err(error))) => {
                fault = Some(error);
                break;
            }
            Some((place, Ok(request))) => {
                tasks.spawn(one(Arc::clone(app), Arc::clone(batch), request, logs.clone(), place));
            }
        }
        while let Some(kept) = tasks.try_join_next() {
            all &= kept.unwrap_or(false);
        }
    }
    drop((requests, turn));
    while let Some(kept) = tasks.join_next().await {
        all &= kept.unwrap_or(false);
    }
    let cancelled = is_raised(&batch.cancelled);
    if !cancelled && (!all || is_raised(&jobs.stop)) {
        if !is_raised(&jobs.stop) {
            tracing::error!(batch = %batch.record().id, "a batch cannot go on; it will when the server is started again");
        }
        return None;
    }
    Some(fault)
}

/// Reads requests that have no result, one ahead of those who run them: model by model, so that each is loaded once.
fn read_ahead(
    app: &Arc<App>,
    jobs: &Jobs,
    batch: &Batch,
    done: Done,
) -> mpsc::Receiver<Result<Request, LineError>> {
    let record = batch.record();
    let (path, most, endpoint) =
        (jobs.files.data_path(&record.input_file_id), jobs.limits.line, record.endpoint);
    let (send, requests) = mpsc::channel(1);
    let mut places: Vec<usize> = record.needs().iter().filter_map(|model| app.place_of(model)).collect();
    let resident = app.fleet.look().last.place;
    places.sort_by_key(|place| *place != resident);
    let app = Arc::clone(app);
    tokio::task::spawn_blocking(move || {
        for &place in &places {
            let file = match std::fs::File::open(&path) {
                Ok(file) => file,
                Err(error) => {
                    _ = send.blocking_send(Err(gone(&error)));
                    return;
                }
            };
            for request in Requests::new(BufReader::new(file), endpoint, most) {
                let later = |request: &Request| {
                    // What names a model that was not served stands with the first ones, and is refused there.
                    let own = app.place_for(&request.body);
                    let turn = if places.contains(&own) { own } else { places[0] };
                    turn != place || done.has(&request.custom_id)
                };
                if request.as_ref().is_ok_and(later) {
                    continue;
                }
                // Nobody takes it any more: the batch is cancelled, or the server ends.
                if send.blocking_send(request).is_err() {
                    return;
                }
            }
        }
    });
    requests
}

/// Runs one request and keeps its result; false if it has none now.
async fn one(
    app: Arc<App>,
    batch: Arc<Batch>,
    request: Request,
    logs: Logs,
    place: OwnedSemaphorePermit,
) -> bool {
    let Ok(jobs) = &app.jobs else { return false };
    let endpoint = batch.record().endpoint;
    batch.pace().begin(Instant::now());
    jobs.pace().begin(Instant::now());
    let result = result(&app, jobs, &batch, endpoint, &request.body).await;
    let tokens = result.as_ref().map(|result| result.as_ref().map_or(0, tokens));
    let kept = match result {
        None => false,
        Some(result) => keep(jobs, &batch, logs, &request.custom_id, result).await,
    };
    let tokens = tokens.filter(|_| kept);
    batch.pace().end(Instant::now(), tokens);
    jobs.pace().end(Instant::now(), tokens);
    drop(place);
    kept
}

/// What becomes of a request; `None` if nothing does now.
async fn result(
    app: &Arc<App>,
    jobs: &Jobs,
    batch: &Batch,
    endpoint: Endpoint,
    body: &Map<String, Value>,
) -> Option<Result<Value, ApiError>> {
    let mut tries = 1;
    loop {
        let result = tokio::select! {
            result = ask(app, endpoint, body.clone()) => result,
            () = raised(&batch.cancelled) => return None,
        };
        match result {
            Err(error) if matches!(error.code, Some("shutting_down" | "engine_failed")) => return None,
            Err(error) if error.code == Some("queue_full") => {
                let pause = error.retry_after.unwrap_or(ASK_AGAIN).min(ASK_AGAIN);
                tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    () = raised(&batch.cancelled) => return None,
                    () = raised(&jobs.stop) => return None,
                }
            }
            // A model that could not be loaded is tried again after a while, when others may have left it room.
            Err(error) if error.code == Some("model_unavailable") && tries < TRIES => {
                tracing::warn!(batch = %batch.record().id, error = %error.message, "a model is not to be had; it is tried again");
                tries += 1;
                tokio::select! {
                    () = tokio::time::sleep(error.retry_after.unwrap_or(ASK_AGAIN)) => {}
                    () = raised(&batch.cancelled) => return None,
                    () = raised(&jobs.stop) => return None,
                }
            }
            // A disk that could not be read may be readable the next time, and nobody waits.
            Err(error) if error.status.is_server_error() && tries < TRIES => {
                tracing::warn!(batch = %batch.record().id, error = %error.message, "a request failed; it is run again");
                tries += 1;
            }
            result => return Some(result),
        }
    }
}

/// Runs a request on a task of its own, so that a fault of ours is the result of that request and of nothing else.
async fn ask(app: &Arc<App>, endpoint: Endpoint, body: Map<String, Value>) -> Result<Value, ApiError> {
    let app = Arc::clone(app);
    // Unlike a task by itself, a set ends what it holds when it is dropped.
    let mut task = JoinSet::new();
    task.spawn(async move { once::in_background(&app, endpoint, body).await });
    match task.join_next().await {
        Some(Ok(result)) => result,
        Some(Err(_)) | None => {
            let message = "the request could not be answered, by a fault of the server; please report this";
            Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message).code("internal_error"))
        }
    }
}

/// Tokens of an answer.
fn tokens(answer: &Value) -> u64 {
    let usage = &answer["usage"];
    usage["completion_tokens"].as_u64().or_else(|| usage["output_tokens"].as_u64()).unwrap_or(0)
}

/// Writes a result; false if the server ends before that is possible.
async fn keep(
    jobs: &Jobs,
    batch: &Arc<Batch>,
    logs: Logs,
    custom_id: &str,
    result: Result<Value, ApiError>,
) -> bool {
    let line = |status: StatusCode, body: &Value| {
        one_line(&json!({
            "id": format!("batch_req_{}", ids::random()),
            "custom_id": custom_id,
            "response": {
                "status_code": status.as_u16(),
                "request_id": format!("req_{}", ids::random()),
                "body": body,
            },
            "error": null,
        }))
    };
    let refused =
        |error: &ApiError| (line(error.status, &error.body(Dialect::OpenAi)), &logs.errors, &batch.failed);
    let (line, log, count) = match result {
        Ok(answer) => {
            let whole = line(StatusCode::OK, &answer);
            if whole.len() <= MAX_RESULT {
                (whole, &logs.output, &batch.completed)
            } else {
                let message = format!(
                    "the answer has more than {MAX_RESULT} bytes; ask for fewer choices or log-probabilities"
                );
                let error =
                    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message).code("answer_too_large");
                refused(&error)
            }
        }
        Err(error) => refused(&error),
    };
    let log = Arc::clone(log);
    let kept = written(jobs, Some(batch), "a result", move || {
        log.lock().unwrap_or_else(PoisonError::into_inner).append(&line)
    });
    let kept = kept.await.is_some();
    count.fetch_add(u64::from(kept), Ordering::Relaxed);
    kept
}

/// Makes files of the results, and ends the batch.
async fn close(jobs: &Jobs, batch: &Arc<Batch>, logs: &Logs, fault: Option<LineError>) -> Option<()> {
    let record = batch.record();
    if record.status == Status::InProgress {
        let own = Arc::clone(batch);
        let change = move || {
            own.change(|record| {
                if record.status == Status::InProgress {
                    record.enter(Status::Finalizing);
                }
            })
        };
        written(jobs, None, "the batch's state", change).await?;
    }
    for (id, log, name) in
        [(&record.output_file_id, &logs.output, "output"), (&record.error_file_id, &logs.errors, "error")]
    {
        let own = Arc::clone(log);
        let settle = move || {
            let mut log = own.lock().unwrap_or_else(PoisonError::into_inner);
            log.settle()?;
            Ok((log.lines(), log.bytes()))
        };
        let (lines, bytes) = written(jobs, None, "a file of results", settle).await?;
        if lines == 0 {
            _ = std::fs::remove_file(jobs.files.data_path(id));
            continue;
        }
        let (id, name) = (id.clone(), format!("{}_{name}.jsonl", record.id));
        let files = jobs.files.clone();
        let publish = move || files.publish(id.clone(), bytes, name.clone(), Purpose::BatchOutput);
        written(jobs, None, "a file of results", publish).await?;
    }
    let own = Arc::clone(batch);
    let change = move || {
        own.change(|record| match (record.status, &fault) {
            (Status::Cancelling, _) => record.enter(Status::Cancelled),
            (_, Some(fault)) => {
                record.errors = vec![fault.clone()];
                record.enter(Status::Failed);
            }
            _ => record.enter(Status::Completed),
        })
    };
    let record = written(jobs, None, "the batch's state", change).await?;
    tracing::info!(
        batch = %record.id, status = record.status.name(), completed = record.completed, failed = record.failed,
        "a batch is over"
    );
    Some(())
}

/// Does what has to last, until it is done. `None` if the server ends before, or the batch is given up.
async fn written<T: Send + 'static>(
    jobs: &Jobs,
    batch: Option<&Arc<Batch>>,
    what: &str,
    write: impl Fn() -> io::Result<T> + Send + Sync + 'static,
) -> Option<T> {
    let write = Arc::new(write);
    let mut stuck = None;
    loop {
        let again = Arc::clone(&write);
        let error = match tokio::task::spawn_blocking(move || again()).await {
            Ok(Ok(done)) => {
                if stuck.is_some() {
                    tracing::info!(what, "written at last; batches go on");
                }
                return Some(done);
            }
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        if stuck.is_none() {
            tracing::error!(what, %error, "cannot be written; batches pause until it can");
            stuck = Some(Stuck::new(jobs, format!("{what} cannot be written: {error}")));
        }
        if is_raised(&jobs.stop) || batch.is_some_and(|batch| is_raised(&batch.cancelled)) {
            return None;
        }
        let cancelled = async {
            match batch {
                Some(batch) => raised(&batch.cancelled).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = tokio::time::sleep(WRITE_AGAIN) => {}
            () = raised(&jobs.stop) => {}
            () = cancelled => {}
        }
    }
}
