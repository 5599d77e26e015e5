//! `/v1/files`: requests of batches on their way in, results on their way out.

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderValue, StatusCode, Uri, header};
use axum::response::Response;
use bytes::Bytes;
use multer::{Constraints, Field, Multipart, SizeLimit};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use super::pages::Query;
use crate::app::App;
use crate::body::{check_plain, told_length};
use crate::error::ApiError;
use crate::jobs::{FileError, FileRecord, Jobs, Purpose, Upload};
use crate::stream;

/// Most bytes of a form beside the file.
const FORM: u64 = 64 << 10;
/// A client has the usual time, and a second for so many bytes of its file.
const SLOWEST: u64 = 64 << 10;
/// Bytes that are read from a file at a time.
const PIECE: usize = 128 << 10;
/// Pieces on their way between socket and disk.
const PIECES: usize = 4;
/// Most letters of a file's name.
const MAX_NAME: usize = 255;

/// Files and batches, or why there are none.
pub fn jobs(app: &App) -> Result<&Jobs, ApiError> {
    app.jobs.as_deref().map_err(|why| {
        let message = format!("files and batches are not available: {why}");
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).code("batches_unavailable")
    })
}

/// An error of the disk.
pub fn not_written(error: &std::io::Error) -> ApiError {
    let message = format!("it cannot be kept: {error}; look at the server's disk");
    ApiError::new(StatusCode::INSUFFICIENT_STORAGE, message).code("not_written")
}

impl From<FileError> for ApiError {
    fn from(error: FileError) -> Self {
        let message = error.to_string();
        match error {
            FileError::TooLarge(_) => Self {
                param: Some("file".to_owned()),
                ..Self::new(StatusCode::PAYLOAD_TOO_LARGE, message).code("file_too_large")
            },
            FileError::Full { .. } => Self::new(StatusCode::PAYLOAD_TOO_LARGE, message).code("files_full"),
            FileError::Io(error) => not_written(&error),
        }
    }
}

fn shown(file: &FileRecord) -> Value {
    json!({
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": null,
        "filename": file.filename,
        "purpose": file.purpose.name(),
        "status": "processed",
        "status_details": null,
    })
}

fn known(app: &App, id: &str) -> Result<FileRecord, ApiError> {
    jobs(app)?.files.get(id).ok_or_else(|| {
        let id: String = id.chars().take(80).collect();
        ApiError {
            param: Some("id".to_owned()),
            ..ApiError::new(StatusCode::NOT_FOUND, format!("there is no file {id:?}")).code("not_found")
        }
    })
}

/// All files, a page at a time.
pub async fn list(State(app): State<Arc<App>>, uri: Uri) -> Result<Response, ApiError> {
    let query = Query::read(&uri, 10_000, 10_000, true)?;
    let mut all = jobs(&app)?.files.all();
    all.retain(|file| query.purpose.as_ref().is_none_or(|purpose| file.purpose.name() == purpose));
    Ok(stream::json(&query.page(all, |file| file.id.clone(), shown)?, Vec::new()))
}

/// What is known of a file.
pub async fn one(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    Ok(stream::json(&shown(&known(&app, &id)?), Vec::new()))
}

/// Deletes a file.
pub async fn delete(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    let FileRecord { id, .. } = known(&app, &id)?;
    let jobs = jobs(&app)?;
    if jobs.reads(&id) {
        let message = format!("a batch reads {id} and is not over; cancel it first, or wait");
        return Err(ApiError::new(StatusCode::CONFLICT, message).code("file_in_use"));
    }
    let files = jobs.files.clone();
    let name = id.clone();
    let deleted = tokio::task::spawn_blocking(move || files.delete(&name)).await;
    match deleted {
        Ok(Ok(deleted)) => {
            Ok(stream::json(&json!({"id": id, "object": "file", "deleted": deleted}), Vec::new()))
        }
        Ok(Err(error)) => Err(not_written(&error)),
        Err(error) => Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())),
    }
}

/// The bytes of a file.
pub async fn content(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, ApiError> {
    let FileRecord { id, bytes, .. } = known(&app, &id)?;
    let file = jobs(&app)?.files.open_data(&id).map_err(|error| {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, format!("{id} cannot be read: {error}"))
    })?;
    let (send, pieces) = mpsc::channel::<Bytes>(PIECES);
    tokio::task::spawn_blocking(move || {
        let mut file = file.take(bytes);
        loop {
            let mut piece = vec![0; PIECE];
            match file.read(&mut piece) {
                Ok(0) => return,
                Ok(read) => piece.truncate(read),
                // The client sees that bytes are missing: their number was told.
                Err(error) => return tracing::error!(file = %id, %error, "a file cannot be read"),
            }
            if send.blocking_send(piece.into()).is_err() {
                return;
            }
        }
    });
    let mut response = Response::new(Body::new(stream::Chunks(pieces)));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/jsonl"));
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(bytes));
    Ok(response)
}

/// Takes a file: a form with `purpose` and `file`.
pub async fn create(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let files = jobs(&app)?.files.clone();
    let headers = request.headers();
    check_plain(headers)?;
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let boundary = multer::parse_boundary(kind).map_err(|_| {
        let kind: String = kind.chars().take(80).collect();
        let message = format!("the Content-Type is {kind:?}; send multipart/form-data with its boundary");
        ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message).code("unsupported_media_type")
    })?;
    let length = told_length(headers);
    let most = files.most_file().saturating_add(FORM);
    if length.is_some_and(|length| length > most) {
        return Err(FileError::TooLarge(files.most_file()).into());
    }
    let time = app.settings.patience + Duration::from_secs(length.unwrap_or(most) / SLOWEST);
    let limits = SizeLimit::new().whole_stream(most).for_field("purpose", FORM);
    let stream = request.into_body().into_data_stream();
    let form = Multipart::with_constraints(stream, boundary, Constraints::new().size_limit(limits));
    // Until the form is read, whatever comes of it is dropped with it.
    let (upload, filename) = match timeout_at(Instant::now() + time, read_form(form, &files)).await {
        Ok(read) => read?,
        Err(_) => {
            let message = "the file did not arrive in time; send it again";
            return Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, message).code("timeout"));
        }
    };
    let kept = tokio::task::spawn_blocking(move || files.keep(upload, filename)).await;
    match kept {
        Ok(kept) => Ok(stream::json(&shown(&kept?), Vec::new())),
        Err(error) => Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())),
    }
}

/// The file of a form, and what it is called.
async fn read_form(
    mut form: Multipart<'static>,
    files: &crate::jobs::Files,
) -> Result<(Upload, String), ApiError> {
    let (mut file, mut purpose) = (None, false);
    while let Some(field) = form.next_field().await.map_err(|error| not_a_form(&error))? {
        match field.name() {
            Some("purpose") if !purpose => {
                let found = field.text().await.map_err(|error| not_a_form(&error))?;
                if found != Purpose::Batch.name() {
                    let found: String = found.chars().take(80).collect();
                    let message = format!("purpose must be batch, found {found:?}");
                    return Err(ApiError::param("purpose", message));
                }
                purpose = true;
            }
            Some("file") if file.is_none() => {
                let name = field.file_name().unwrap_or("file.jsonl");
                let name: String = name.chars().filter(|c| !c.is_control()).take(MAX_NAME).collect();
                file = Some((take(field, files.begin()?).await?, name));
            }
            name => {
                let name: String = name.unwrap_or("without a name").chars().take(80).collect();
                let message =
                    format!("the field {name} is not supported, or there twice; send purpose and file");
                return Err(ApiError::param(name, message).code("unsupported_parameter"));
            }
        }
    }
    if !purpose {
        return Err(ApiError::param("purpose", "purpose is missing; send batch"));
    }
    file.ok_or_else(|| ApiError::param("file", "file is missing"))
}

/// Writes the bytes of a file as they come, away from the threads that serve sockets.
async fn take(mut field: Field<'static>, mut upload: Upload) -> Result<Upload, ApiError> {
    let (send, mut pieces) = mpsc::channel::<Bytes>(PIECES);
    let writer = tokio::task::spawn_blocking(move || {
        while let Some(piece) = pieces.blocking_recv() {
            upload.write(&piece)?;
        }
        Ok::<_, FileError>(upload)
    });
    let mut broken = None;
    loop {
        match field.chunk().await {
            Ok(Some(piece)) => {
                // Who does not take it any more says why.
                if send.send(piece).await.is_err() {
                    break;
                }
            }
            Ok(None) => break,
            Err(error) => {
                broken = Some(not_a_form(&error));
                break;
            }
        }
    }
    drop(send);
    let written = writer.await;
    match (written, broken) {
        (Ok(written), None) => Ok(written?),
        (_, Some(error)) => Err(error),
        (Err(error), None) => Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())),
    }
}

fn not_a_form(error: &multer::Error) -> ApiError {
    match error {
        multer::Error::StreamSizeExceeded { limit } => FileError::TooLarge(*limit).into(),
        multer::Error::FieldSizeExceeded { .. } => ApiError::param("purpose", "purpose must be batch"),
        _ => ApiError::bad(format!("the form cannot be read: {error}; send it again")),
    }
}
