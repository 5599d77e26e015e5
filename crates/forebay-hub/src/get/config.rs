//! Which hub, and how to talk with it. Only the binary reads environment variables; here all is given.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::error::GetError;

/// The hub that is used when no other is named.
pub const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

/// An access token. It is sent to the hub and to nobody else, and never shown.
#[derive(Clone)]
pub struct Token(String);

impl Token {
    /// A token as it stands in a file or variable; white space around it is dropped.
    ///
    /// # Errors
    /// A text that cannot be sent in a header.
    pub fn new(text: &str) -> Result<Self, GetError> {
        let text = text.trim();
        match !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic()) {
            true => Ok(Self(text.to_owned())),
            false => Err(GetError::Token),
        }
    }

    pub(super) fn header(&self) -> String {
        format!("Bearer {}", self.0)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(...)")
    }
}

/// Proxies, as `http://[USER:PASSWORD@]HOST:PORT`.
#[derive(Clone, Default)]
pub struct Proxies {
    /// For `http` addresses.
    pub http: Option<String>,
    /// For `https` addresses.
    pub https: Option<String>,
    /// Hosts that are reached directly, as in `NO_PROXY`: names, suffixes such as `.example.com`, `*`.
    pub direct: Vec<String>,
}

impl fmt::Debug for Proxies {
    /// Without the addresses, which may hold passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (http, https) = (self.http.is_some(), self.https.is_some());
        f.debug_struct("Proxies")
            .field("http", &http)
            .field("https", &https)
            .field("direct", &self.direct)
            .finish()
    }
}

/// When to try again.
#[derive(Clone, Copy, Debug)]
pub struct Retry {
    /// Attempts without a single byte between them before a fetch fails.
    pub tries: u32,
    /// The first pause; every further one is about twice as long.
    pub first: Duration,
    /// The longest pause.
    pub longest: Duration,
    /// The longest pause that a server may ask for (`Retry-After`).
    pub longest_asked: Duration,
}

impl Default for Retry {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        // About four minutes: a router that starts anew is survived.
        Self {
            tries: 14,
            first: Duration::from_millis(500),
            longest: seconds(30),
            longest_asked: seconds(600),
        }
    }
}

/// Which hub, and how to talk with it.
#[derive(Clone, Debug)]
pub struct HubConfig {
    /// The hub's address, such as [`DEFAULT_ENDPOINT`].
    pub endpoint: String,
    /// The access token, for private and gated repositories.
    pub token: Option<Token>,
    /// A PEM file with the authorities to trust, instead of those that browsers trust.
    pub ca: Option<PathBuf>,
    /// Proxies.
    pub proxies: Proxies,
    /// Connections at the same time.
    pub connections: usize,
    /// Longest time to wait for a connection.
    pub connect: Duration,
    /// Longest silence of a server before the connection is given up.
    pub stall: Duration,
    /// When to try again.
    pub retry: Retry,
}

impl Default for HubConfig {
    fn default() -> Self {
        Self {
            endpoint: DEFAULT_ENDPOINT.to_owned(),
            token: None,
            ca: None,
            proxies: Proxies::default(),
            connections: 8,
            connect: Duration::from_secs(20),
            stall: Duration::from_secs(30),
            retry: Retry::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_trimmed_checked_and_never_shown() {
        let token = Token::new(" hf_abc\n").unwrap();
        assert_eq!(token.header(), "Bearer hf_abc");
        let config = HubConfig { token: Some(token), ..HubConfig::default() };
        assert!(!format!("{config:?}").contains("abc"));
        for bad in ["", "  ", "a b", "a\nb", "\u{e9}"] {
            assert!(Token::new(bad).is_err(), "{bad:?}");
        }
    }
}
