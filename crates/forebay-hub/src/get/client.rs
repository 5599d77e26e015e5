//! One request to the hub, with its redirects, and what an answer means.

use std::fs;
use std::io::{self, Read};
use std::ops::Range;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ureq::Agent;
use ureq::http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};

use super::backoff::retry_after;
use super::config::{HubConfig, Retry, Token};
use super::error::GetError;
use super::pace::Paced;
use super::proxy;
use super::url::Url;
use super::watch::Stop;

/// Redirects that are followed.
const MAX_REDIRECTS: usize = 6;
/// Bytes of a redirect that are read; most have none.
const MAX_MOVED: u64 = 64 << 10;
/// The longest file of certificates.
const MAX_CA_BYTES: u64 = 16 << 20;

/// Talks with one hub.
pub(super) struct Client {
    pub endpoint: Url,
    pub retry: Retry,
    token: Option<Token>,
    setup: Setup,
    agents: Mutex<Agents>,
    /// No request before this moment, as the server asked.
    held: Mutex<Option<Instant>>,
}

/// What agents are made of.
struct Setup {
    tls: TlsConfig,
    http: Option<ureq::Proxy>,
    https: Option<ureq::Proxy>,
    connect: Duration,
    stall: Duration,
    connections: usize,
}

/// One for each kind of address, because each may have a proxy of its own.
#[derive(Clone)]
struct Agents {
    http: Agent,
    https: Agent,
}

/// What a request is about, for errors.
#[derive(Clone, Copy)]
pub(super) struct About<'a> {
    pub repo: &'a str,
    /// Branch, tag or commit.
    pub revision: &'a str,
    /// The file and its size, if it is about one.
    pub file: Option<(&'a str, u64)>,
}

/// An answer with a body.
pub(super) struct Reply {
    /// Where it came from, after redirects.
    pub url: Url,
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Paced<ureq::BodyReader<'static>>,
}

/// Why a request failed.
pub(super) enum Trouble {
    /// For good.
    Final(GetError),
    /// It may be better next time.
    Again(Again),
}

/// What failed, and how long the server wants to be left alone.
pub(super) struct Again {
    pub url: String,
    pub host: String,
    pub why: String,
    pub wait: Option<Wait>,
}

/// What a server answered that wants to be left alone, and for how long.
#[derive(Clone, Copy)]
pub(super) struct Wait {
    pub status: u16,
    pub pause: Duration,
}

impl Again {
    pub fn new(url: &Url, why: impl Into<String>) -> Self {
        Self { url: url.to_string(), host: url.host().to_owned(), why: why.into(), wait: None }
    }
}

impl From<Again> for Trouble {
    fn from(again: Again) -> Self {
        Self::Again(again)
    }
}

impl From<GetError> for Trouble {
    fn from(error: GetError) -> Self {
        Self::Final(error)
    }
}

impl Client {
    pub fn new(config: &HubConfig) -> Result<Self, GetError> {
        let endpoint = Url::parse(&config.endpoint)
            .map_err(|why| GetError::Endpoint { given: config.endpoint.clone(), why })?;
        let tls = TlsConfig::builder().root_certs(roots(config.ca.as_deref())?).build();
        let setup = Setup {
            tls,
            http: proxy::proxy(config.proxies.http.as_deref(), &config.proxies.direct)?,
            https: proxy::proxy(config.proxies.https.as_deref(), &config.proxies.direct)?,
            connect: config.connect,
            stall: config.stall,
            connections: config.connections,
        };
        let agents = Mutex::new(setup.agents());
        let (retry, token) = (config.retry, config.token.clone());
        Ok(Self { endpoint, retry, token, setup, agents, held: Mutex::new(None) })
    }

    pub fn has_token(&self) -> bool {
        self.token.is_some()
    }

    /// Breaks off all requests under way; later ones use new connections.
    pub fn interrupt(&self) {
        let fresh = self.setup.agents();
        let old = std::mem::replace(&mut *lock(&self.agents), fresh);
        old.http.shutdown();
        old.https.shutdown();
    }

    /// Lets no request begin for a while.
    pub fn hold(&self, pause: Duration) {
        let until = Instant::now() + pause;
        let mut held = lock(&self.held);
        *held = Some(held.map_or(until, |old| old.max(until)));
    }

    /// Asks for `url`, or for some of its bytes. Redirects are followed; the token goes to the hub alone.
    pub fn get(
        &self,
        url: &Url,
        range: Option<&Range<u64>>,
        about: About<'_>,
        stop: &Stop<'_>,
    ) -> Result<Reply, Trouble> {
        let mut url = url.clone();
        for _ in 0..=MAX_REDIRECTS {
            let held = *lock(&self.held);
            let left = held.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()));
            stop.sleep(left)?;
            let response = self.send(&url, range)?;
            let status = response.status();
            if matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308) {
                url = self.redirect(&url, response.headers())?;
                // Read to its end, the connection can be used again; if that fails, it is not.
                let body = Paced::new(response.into_body().into_reader(), self.setup.stall);
                let _ = read_body(body, MAX_MOVED);
                continue;
            }
            if matches!(status.as_u16(), 200 | 206) {
                let (parts, body) = response.into_parts();
                check_encoding(&url, &parts.headers)?;
                let body = Paced::new(body.into_reader(), self.setup.stall);
                return Ok(Reply { url, status, headers: parts.headers, body });
            }
            return Err(self.refusal(&url, status, response.headers(), range, about));
        }
        let (url, to) = (self.endpoint.to_string(), url.to_string());
        Err(GetError::Redirect { url, to, why: "there is no end to it" }.into())
    }

    fn send(&self, url: &Url, range: Option<&Range<u64>>) -> Result<Response<ureq::Body>, Trouble> {
        let mut request = Request::get(ureq::http::Uri::from(url)).header("accept-encoding", "identity");
        if let Some(range) = range {
            request =
                request.header("range", format!("bytes={}-{}", range.start, range.end.saturating_sub(1)));
        }
        if let Some(token) = self.token.as_ref().filter(|_| url.same_origin(&self.endpoint)) {
            request = request.header("authorization", token.header());
        }
        let failed = |why: String| GetError::Endpoint { given: url.to_string(), why };
        let request = request.body(()).map_err(|error| failed(error.to_string()))?;
        let agents = lock(&self.agents).clone();
        let agent = if url.is_https() { agents.https } else { agents.http };
        agent.run(request).map_err(|error| self.failure(url, error))
    }

    fn redirect(&self, from: &Url, headers: &HeaderMap) -> Result<Url, Trouble> {
        let refused = |to: &str, why| GetError::Redirect { url: from.to_string(), to: to.to_owned(), why };
        let Some(to) = header(headers, "location") else {
            return Err(refused("", "it does not say where to").into());
        };
        let shown = to.split('?').next().unwrap_or_default();
        let url = from.join(to).map_err(|_| refused(shown, "that is no address"))?;
        if from.is_https() && !url.is_https() {
            return Err(refused(shown, "it gives up encryption").into());
        }
        Ok(url)
    }

    /// What a status other than success means.
    fn refusal(
        &self,
        url: &Url,
        status: StatusCode,
        headers: &HeaderMap,
        range: Option<&Range<u64>>,
        about: About<'_>,
    ) -> Trouble {
        let repo = || about.repo.to_owned();
        let number = status.as_u16();
        let again = Again::new(url, format!("the server answers HTTP {number}"));
        if matches!(number, 408 | 429 | 500..=599) {
            let wait = header(headers, "retry-after").and_then(retry_after);
            // Whoever allows no more requests without saying for how long means a moment.
            let wait = wait.or((number == 429).then_some(self.retry.first));
            let wait = wait.map(|pause| Wait { status: number, pause });
            return Again { wait, ..again }.into();
        }
        if let (416, Some((file, size)), Some(range)) = (number, about.file, range) {
            let file = file.to_owned();
            return GetError::Range { file, start: range.start, end: range.end, size }.into();
        }
        if !url.same_origin(&self.endpoint) && matches!(number, 401 | 403 | 404 | 410) {
            // Addresses of a storage host are signed for a while; the hub gives a new one.
            return again.into();
        }
        let token = self.has_token();
        let code = header(headers, "x-error-code").unwrap_or_default();
        let no_repo = || GetError::NoRepo { endpoint: self.endpoint.to_string(), repo: repo() };
        let no_revision = || GetError::NoRevision { repo: repo(), revision: about.revision.to_owned() };
        let error = match (number, code, about.file) {
            (401 | 403, "GatedRepo", _) | (403, _, Some(_)) => {
                let page = format!("{}/{}", self.endpoint, about.repo);
                GetError::Gated { repo: repo(), page, status: number, token }
            }
            (401 | 403, ..) => GetError::Refused { repo: repo(), status: number, token },
            (404, "RevisionNotFound", _) => no_revision(),
            (404, "RepoNotFound", _) => no_repo(),
            (404, _, Some((file, _))) => {
                GetError::NoFile { repo: repo(), commit: about.revision.to_owned(), file: file.to_owned() }
            }
            (404, ..) if about.revision != "main" => no_revision(),
            (404, ..) => no_repo(),
            _ => GetError::Status {
                url: url.to_string(),
                found: format!("HTTP {number}"),
                expected: "the file",
            },
        };
        error.into()
    }

    /// What a request without an answer means.
    fn failure(&self, url: &Url, error: ureq::Error) -> Trouble {
        use ureq::Error as E;
        let host = || url.host().to_owned();
        match error {
            E::Tls(why) => GetError::Tls { host: host(), why: why.to_owned() }.into(),
            E::Rustls(error) => GetError::Tls { host: host(), why: error.to_string() }.into(),
            // So the TLS library reports through a stream; everything else of a socket has another kind.
            E::Io(error) if error.kind() == io::ErrorKind::InvalidData => {
                GetError::Tls { host: host(), why: error.to_string() }.into()
            }
            E::Timeout(ureq::Timeout::PerRead) => Again::new(url, self.silence()).into(),
            E::Timeout(_) => Again::new(url, "the server does not answer in time").into(),
            E::HostNotFound => Again::new(url, format!("the name {} is not known", url.host())).into(),
            other => Again::new(url, other.to_string()).into(),
        }
    }

    /// What a body that ended early or failed means.
    pub fn broken(&self, url: &Url, error: &io::Error) -> Again {
        let why = match error.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => self.silence(),
            _ => format!("the connection broke: {error}"),
        };
        Again::new(url, why)
    }

    fn silence(&self) -> String {
        format!("next to nothing came for {} s", self.setup.stall.as_secs_f64().ceil())
    }
}

impl Setup {
    fn agents(&self) -> Agents {
        Agents { http: self.agent(self.http.clone()), https: self.agent(self.https.clone()) }
    }

    fn agent(&self, proxy: Option<ureq::Proxy>) -> Agent {
        Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            // Never ureq's default, which reads the environment.
            .proxy(proxy)
            .tls_config(self.tls.clone())
            .user_agent(concat!("forebay/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(Some(self.connect))
            .timeout_connect(Some(self.connect))
            .timeout_per_read(Some(self.stall))
            // All headers, however they trickle.
            .timeout_recv_response(Some(self.stall))
            .timeout_per_write(Some(self.stall))
            .max_idle_connections(2 * self.connections.max(1))
            .max_idle_connections_per_host(self.connections.max(1))
            .input_buffer_size(256 << 10)
            .build()
            .new_agent()
    }
}

/// An error if a body is not sent as it is. Nothing else was asked for, and what is counted, placed and hashed are the
/// bytes of the file.
fn check_encoding(url: &Url, headers: &HeaderMap) -> Result<(), GetError> {
    let plain = |value: &&HeaderValue| {
        value.to_str().is_ok_and(|value| matches!(&*value.trim().to_ascii_lowercase(), "" | "identity"))
    };
    match headers.get_all("content-encoding").iter().find(|value| !plain(value)) {
        None => Ok(()),
        Some(encoding) => {
            let found: String =
                format!("with a body in the encoding {encoding:?}").chars().take(100).collect();
            Err(GetError::Status { url: url.to_string(), found, expected: "its bytes as they are" })
        }
    }
}

/// The text of a header, if it has one.
pub(super) fn header<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name)?.to_str().ok()
}

/// Reads at most `most` bytes of a body; `None` if there are more.
pub(super) fn read_body(body: impl Read, most: u64) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    body.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    Ok((bytes.len() as u64 <= most).then_some(bytes))
}

/// A thread that died while it held one of these locks left them usable.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whom to trust.
fn roots(ca: Option<&Path>) -> Result<RootCerts, GetError> {
    let Some(path) = ca else { return Ok(RootCerts::WebPki) };
    let failed = |why: String| GetError::Ca { path: path.to_owned(), why };
    let file = fs::File::open(path).map_err(|cause| failed(cause.to_string()))?;
    let bytes = read_body(file, MAX_CA_BYTES).map_err(|cause| failed(cause.to_string()))?;
    let bytes = bytes.ok_or_else(|| failed("it is too large".to_owned()))?;
    let mut found = Vec::new();
    for item in parse_pem(&bytes) {
        match item {
            Ok(PemItem::Certificate(certificate)) => found.push(certificate),
            Ok(_) => {}
            Err(error) => return Err(failed(error.to_string())),
        }
    }
    match found.is_empty() {
        true => Err(failed("it holds no certificate".to_owned())),
        false => Ok(RootCerts::new_with_certs(&found)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_redirect_never_gives_up_encryption() {
        let client = Client::new(&HubConfig::default()).unwrap_or_else(|error| panic!("{error}"));
        let leads = |to: &'static str| {
            let headers = [("location", to)].map(|(name, value)| {
                (ureq::http::HeaderName::from_static(name), ureq::http::HeaderValue::from_static(value))
            });
            client.redirect(&client.endpoint, &headers.into_iter().collect())
        };
        for to in ["https://cdn.example/x?sig=secret", "/api/resolve-cache/x"] {
            assert!(leads(to).is_ok_and(|url| url.is_https()), "{to}");
        }
        for to in ["http://cdn.example/x?sig=secret", "ftp://cdn.example/x"] {
            let Err(Trouble::Final(error)) = leads(to) else { panic!("{to} is followed") };
            assert!(!error.to_string().contains("secret"), "{error}");
        }
    }
}
