//! The file of a batch's requests: a JSON object a line.

use std::io::BufRead;

use serde_json::{Map, Value};

use super::disk::{self, Line};
use super::log::Done;
use super::record::LineError;
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::openai::once::Endpoint;

/// Most requests of a batch.
pub const MAX_REQUESTS: u64 = 50_000;
/// Most bytes of a request's name.
pub const MAX_CUSTOM_ID: usize = 512;
/// Faults that are listed; a file that has more is not read further.
const MAX_ERRORS: usize = 100;

/// A request of a batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The client's name for it.
    pub custom_id: String,
    /// What is asked.
    pub body: Map<String, Value>,
}

/// The requests in a file, one after the other.
pub struct Requests<R> {
    reader: R,
    endpoint: Endpoint,
    /// Most bytes of a line.
    most: usize,
    line: u64,
}

impl<R: BufRead> Requests<R> {
    /// Those of a file, in lines of at most `most` bytes.
    pub fn new(reader: R, endpoint: Endpoint, most: usize) -> Self {
        Self { reader, endpoint, most, line: 0 }
    }

    /// The next request, or what is wrong with its line.
    fn read(&mut self) -> Option<Result<Request, LineError>> {
        loop {
            let fault = |code: &str, line, message: String, param: Option<&str>| {
                let (code, param) = (code.to_owned(), param.map(str::to_owned));
                Some(Err(LineError { code, line, message, param }))
            };
            let mut text = match disk::next_line(&mut self.reader, self.most) {
                Ok(None) => return None,
                Ok(Some(Line::Whole(text) | Line::Torn(text))) => text,
                Ok(Some(Line::TooLong)) => {
                    self.line += 1;
                    let message = format!(
                        "the line is longer than {} bytes; send less, or start with a larger --max-body",
                        self.most
                    );
                    return fault("line_too_long", Some(self.line), message, None);
                }
                Err(error) => {
                    let message = format!("the file cannot be read: {error}; upload it again");
                    return fault("unreadable_file", None, message, None);
                }
            };
            self.line += 1;
            if self.line == 1 && text.starts_with("\u{feff}".as_bytes()) {
                text.drain(..3);
            }
            if text.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let object = match serde_json::from_slice(&text) {
                Ok(Value::Object(object)) => object,
                Ok(_) => {
                    let message = "the line must be a JSON object".to_owned();
                    return fault("invalid_json_line", Some(self.line), message, None);
                }
                Err(error) => {
                    let message = format!("the line is not valid JSON: {error}");
                    return fault("invalid_json_line", Some(self.line), message, None);
                }
            };
            return Some(request(object, self.endpoint).map_err(|error| LineError {
                code: error.code.unwrap_or("invalid_request").to_owned(),
                line: Some(self.line),
                message: error.message,
                param: error.param,
            }));
        }
    }
}

impl<R: BufRead> Iterator for Requests<R> {
    type Item = Result<Request, LineError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read()
    }
}

fn request(object: Map<String, Value>, endpoint: Endpoint) -> Result<Request, ApiError> {
    let mut fields = Fields::new(object);
    let custom_id = fields.required_string("custom_id")?;
    if custom_id.is_empty() || custom_id.len() > MAX_CUSTOM_ID {
        let expected = format!("a text of 1 to {MAX_CUSTOM_ID} bytes");
        return Err(wrong("custom_id", &expected, &custom_id.into()));
    }
    let method = fields.required("method")?;
    if method != "POST" {
        return Err(wrong("method", "POST", &method));
    }
    let url = fields.required("url")?;
    if url != endpoint.path() {
        let expected = format!("{}, as the batch's endpoint is", endpoint.path());
        return Err(wrong("url", &expected, &url).code("mismatched_url"));
    }
    let body = fields.object("body")?.ok_or_else(|| ApiError::param("body", "body is missing"))?;
    fields.finish()?;
    if body.get("stream").is_some_and(|stream| *stream == true) {
        let message = "body.stream = true is not possible in a batch; leave it out";
        return Err(ApiError::param("body.stream", message).code("unsupported_parameter"));
    }
    Ok(Request { custom_id, body })
}

/// Looks through all lines, and shows what each asks for to `note`: how many requests there are, or what is wrong with them.
pub fn check<R: BufRead>(
    requests: Requests<R>,
    mut note: impl FnMut(&Map<String, Value>),
) -> Result<u64, Vec<LineError>> {
    let (mut names, mut count, mut errors) = (Done::default(), 0u64, Vec::new());
    let mut requests = requests;
    while let Some(next) = requests.next() {
        let line = requests.line;
        let file_fault = |code: &str, message: String| LineError {
            code: code.to_owned(),
            line: Some(line),
            message,
            param: None,
        };
        count += 1;
        match next {
            Ok(request) if !names.add(&request.custom_id) => errors.push(LineError {
                param: Some("custom_id".to_owned()),
                ..file_fault(
                    "duplicate_custom_id",
                    format!(
                        "custom_id {:?} was there before; each may be there once",
                        brief(&request.custom_id)
                    ),
                )
            }),
            Ok(request) => note(&request.body),
            Err(error) => {
                let unreadable = error.line.is_none();
                errors.push(error);
                if unreadable {
                    break;
                }
            }
        }
        if count > MAX_REQUESTS {
            let message =
                format!("the file has more than {MAX_REQUESTS} requests; make several batches of it");
            errors.push(file_fault("too_many_requests", message));
            break;
        }
        if errors.len() >= MAX_ERRORS {
            let message = format!("{MAX_ERRORS} lines are wrong; the rest was not looked at");
            errors.push(file_fault("too_many_errors", message));
            break;
        }
    }
    if count == 0 {
        let message = "the file has no requests; write one a line".to_owned();
        errors.push(LineError { code: "empty_file".to_owned(), line: None, message, param: None });
    }
    if errors.is_empty() { Ok(count) } else { Err(errors) }
}

fn brief(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(text: &str) -> Vec<(Option<u64>, String, Option<String>)> {
        let requests = Requests::new(text.as_bytes(), Endpoint::Chat, 300);
        let errors = check(requests, |_| ()).err().unwrap_or_default();
        errors.into_iter().map(|error| (error.line, error.code, error.param)).collect()
    }

    fn line(name: &str) -> String {
        format!(r#"{{"custom_id": "{name}", "method": "POST", "url": "/v1/chat/completions", "body": {{}}}}"#)
    }

    #[test]
    fn every_fault_has_its_line_its_name_and_its_field() {
        let text = [
            "\u{feff}".to_owned() + &line("a"),
            "  ".to_owned(),
            line("a"),
            "{\"custom_id\": ".to_owned(),
            "[1]".to_owned(),
            line(""),
            line("b").replace("POST", "GET"),
            line("c").replace("chat/", ""),
            line("d").replace("{}", "[]"),
            line("e").replace("{}", r#"{"stream": true}"#),
            line("f").replace("\"body\"", "\"bogus\": 1, \"body\""),
            r#"{"method": "POST"}"#.to_owned(),
            line("g").replace("{}", &format!("{{\"x\": \"{}\"}}", "x".repeat(300))),
            line("h"),
        ]
        .join("\n");
        let want = [
            (3, "duplicate_custom_id", Some("custom_id")),
            (4, "invalid_json_line", None),
            (5, "invalid_json_line", None),
            (6, "invalid_request", Some("custom_id")),
            (7, "invalid_request", Some("method")),
            (8, "mismatched_url", Some("url")),
            (9, "invalid_request", Some("body")),
            (10, "unsupported_parameter", Some("body.stream")),
            (11, "unsupported_parameter", Some("bogus")),
            (12, "invalid_request", Some("custom_id")),
            (13, "line_too_long", None),
        ];
        let want = want.map(|(line, code, param)| (Some(line), code.to_owned(), param.map(str::to_owned)));
        assert_eq!(faults(&text), want);
    }

    #[test]
    fn files_have_bounds() {
        assert_eq!(faults("\n \n")[0].1, "empty_file");
        let many: String = (0..MAX_REQUESTS).map(|at| line(&at.to_string()) + "\n").collect();
        assert_eq!(faults(&many), []);
        let more = many + &line("more");
        assert_eq!(faults(&more), [(Some(MAX_REQUESTS + 1), "too_many_requests".to_owned(), None)]);
        let wrong = faults(&"x\n".repeat(200));
        assert_eq!((wrong.len(), wrong[100].1.as_str()), (101, "too_many_errors"));
    }

    #[test]
    fn any_bytes_are_lines_or_faults() {
        use proptest::prelude::*;
        proptest!(|(bytes in proptest::collection::vec(any::<u8>(), 0..2000))| {
            let _ = check(Requests::new(bytes.as_slice(), Endpoint::Completions, 64), |_| ());
        });
    }
}
