//! Web pages: which of them may ask, and what a browser is told about it.

use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, HOST, ORIGIN, VARY,
};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use crate::error::ApiError;

/// What a page may read of a response.
const EXPOSED: &str = "x-request-id, retry-after, x-forebay-prompt-tokens, x-forebay-queue-ahead, \
    x-forebay-forecast-wait-ms, x-forebay-forecast-prefill-ms, x-forebay-forecast-tokens-per-second";
const METHODS: &str = "GET, POST, DELETE, OPTIONS";
const HEADERS: &str = "authorization, content-type, x-api-key, anthropic-version, anthropic-beta, \
    anthropic-dangerous-direct-browser-access, openai-organization, openai-project, openai-beta, x-request-id";
/// Beginnings of further names that the clients of these interfaces send; each version has others.
const FAMILIES: [&str; 3] = ["x-stainless-", "anthropic-", "openai-"];
/// Most names of a family that are allowed at a time.
const MAX_NAMES: usize = 64;

/// Web pages that may ask, by their origin.
#[derive(Clone, Debug, Default)]
pub struct Origins {
    all: bool,
    listed: Vec<String>,
}

impl Origins {
    /// These; `*` is everybody.
    pub fn new(origins: impl IntoIterator<Item = String>) -> Self {
        let listed: Vec<String> =
            origins.into_iter().map(|origin| origin.trim_end_matches('/').to_ascii_lowercase()).collect();
        Self { all: listed.iter().any(|origin| origin == "*"), listed }
    }

    /// An error if a page that is not listed asks. Browsers send simple requests without asking first, so that not
    /// answering is not enough: a page must not make this machine work. What is no browser sends no origin.
    pub fn check(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let Some(origin) = headers.get(ORIGIN) else { return Ok(()) };
        if self.allow(origin) || is_own(origin, headers) {
            return Ok(());
        }
        let origin = String::from_utf8_lossy(origin.as_bytes()).into_owned();
        let message = format!(
            "web pages of {origin:?} may not use this server; start it with --cors-origin to allow them"
        );
        Err(ApiError::new(StatusCode::FORBIDDEN, message).code("origin_not_allowed"))
    }

    fn allow(&self, origin: &HeaderValue) -> bool {
        let named = |origin: &str| self.listed.iter().any(|listed| listed.eq_ignore_ascii_case(origin));
        self.all || origin.to_str().is_ok_and(named)
    }

    /// Tells a browser what the page may do.
    pub fn mark(&self, origin: Option<&HeaderValue>, headers: &mut HeaderMap) {
        if !self.all {
            headers.append(VARY, HeaderValue::from_static("origin"));
        }
        let Some(origin) = origin.filter(|origin| self.allow(origin)) else { return };
        let allowed = if self.all { HeaderValue::from_static("*") } else { origin.clone() };
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
        headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(EXPOSED));
    }

    /// Answers a browser that asks before it asks. `wanted` are the names of headers that it would send.
    pub fn mark_preflight(wanted: Option<&HeaderValue>, headers: &mut HeaderMap) {
        let wanted = wanted.and_then(|wanted| wanted.to_str().ok()).unwrap_or_default();
        let wanted = wanted.split(',').map(|name| name.trim().to_ascii_lowercase());
        let known = |name: &String| {
            FAMILIES.iter().any(|family| name.starts_with(family))
                && HeaderName::from_bytes(name.as_bytes()).is_ok()
        };
        let mut allowed = HEADERS.to_owned();
        wanted.filter(known).take(MAX_NAMES).for_each(|name| allowed = format!("{allowed}, {name}"));
        let allowed = HeaderValue::from_str(&allowed).unwrap_or(HeaderValue::from_static(HEADERS));
        headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static(METHODS));
        headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, allowed);
        headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    }
}

/// Whether a page comes from this server itself.
fn is_own(origin: &HeaderValue, headers: &HeaderMap) -> bool {
    let (Ok(origin), Some(Ok(host))) = (origin.to_str(), headers.get(HOST).map(HeaderValue::to_str)) else {
        return false;
    };
    origin.split_once("://").is_some_and(|(_, from)| from.eq_ignore_ascii_case(host))
}

/// An error unless the request calls this machine by a name of its own: any page can let a name of its own lead here.
pub fn check_host(headers: &HeaderMap) -> Result<(), ApiError> {
    let host = headers.get(HOST).map(|host| host.to_str().unwrap_or_default());
    // Without a name nothing was rebound; an address cannot be.
    let Some(host) = host else { return Ok(()) };
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|c| c.is_ascii_digit()) => name,
        _ => host,
    };
    let name = name.trim_start_matches('[').trim_end_matches(']').trim_end_matches('.');
    let local = name.eq_ignore_ascii_case("localhost") || name.to_ascii_lowercase().ends_with(".localhost");
    if local || name.parse::<std::net::IpAddr>().is_ok() {
        return Ok(());
    }
    let message =
        format!("this server serves this machine only, and {host:?} is no name of it; call it localhost");
    Err(ApiError::new(StatusCode::FORBIDDEN, message).code("host_not_allowed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    #[test]
    fn pages_that_are_not_listed_are_refused() {
        let origins = Origins::new(["https://a.example/".to_owned()]);
        let from =
            |origin: &str| origins.check(&headers(&[("origin", origin), ("host", "localhost:8000")])).is_ok();
        assert!(from("https://a.example") && from("HTTPS://A.example") && from("http://localhost:8000"));
        assert!(!from("https://b.example") && !from("null") && !from("http://localhost:3000"));
        assert!(origins.check(&HeaderMap::new()).is_ok());
        assert!(Origins::new(["*".to_owned()]).check(&headers(&[("origin", "null")])).is_ok());
        let mut told = HeaderMap::new();
        origins.mark(Some(&"https://b.example".parse().unwrap()), &mut told);
        assert!(told.get(ACCESS_CONTROL_ALLOW_ORIGIN).is_none());
        origins.mark(Some(&"https://a.example".parse().unwrap()), &mut told);
        assert_eq!(told[ACCESS_CONTROL_ALLOW_ORIGIN], "https://a.example");
    }

    #[test]
    fn names_that_were_led_here_are_refused() {
        let host = |host: &str| check_host(&headers(&[("host", host)])).is_ok();
        for good in
            ["localhost", "localhost:8000", "LOCALHOST.", "127.0.0.1:1", "[::1]:8000", "[::1]", "a.localhost"]
        {
            assert!(host(good), "{good}");
        }
        for bad in ["evil.example", "evil.example:8000", "localhost.evil.example", ""] {
            assert!(!host(bad), "{bad}");
        }
        assert!(check_host(&HeaderMap::new()).is_ok());
    }
}
