//! Addresses: what a hub and its redirects may be.

use std::fmt;

use ureq::http::Uri;

/// An `http` or `https` address with a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Url(Uri);

impl Url {
    pub fn parse(text: &str) -> Result<Self, String> {
        let uri: Uri = text.parse().map_err(|error| format!("{error}"))?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) {
            return Err("it begins neither with http:// nor with https://".to_owned());
        }
        if uri.host().is_none_or(str::is_empty) {
            return Err("it has no host".to_owned());
        }
        if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
            return Err("it holds a user name".to_owned());
        }
        Ok(Self(uri))
    }

    pub fn is_https(&self) -> bool {
        self.0.scheme_str() == Some("https")
    }

    pub fn host(&self) -> &str {
        self.0.host().unwrap_or_default()
    }

    /// Whether both are on the same server, so that what is meant for one may be sent to the other.
    pub fn same_origin(&self, other: &Self) -> bool {
        let port = |url: &Self| url.0.port_u16().unwrap_or(if url.is_https() { 443 } else { 80 });
        self.is_https() == other.is_https()
            && self.host().eq_ignore_ascii_case(other.host())
            && port(self) == port(other)
    }

    /// The address of `path`, which begins with `/`, below this one.
    pub fn below(&self, path: &str) -> Result<Self, String> {
        Self::parse(&format!("{}{}{path}", self.origin(), self.0.path().trim_end_matches('/')))
    }

    /// Where a redirect from here to `location` leads.
    pub fn join(&self, location: &str) -> Result<Self, String> {
        let scheme = if self.is_https() { "https" } else { "http" };
        let lower = location.to_ascii_lowercase();
        if lower.starts_with("http://") || lower.starts_with("https://") {
            Self::parse(location)
        } else if location.starts_with("//") {
            Self::parse(&format!("{scheme}:{location}"))
        } else if location.starts_with('/') {
            Self::parse(&format!("{}{location}", self.origin()))
        } else if location.split(['/', '?']).next().is_some_and(|first| first.contains(':')) {
            Err("it begins neither with http:// nor with https://".to_owned())
        } else {
            let folder = self.0.path().rsplit_once('/').map_or("", |(folder, _)| folder);
            Self::parse(&format!("{}{folder}/{location}", self.origin()))
        }
    }

    fn origin(&self) -> String {
        let authority = self.0.authority().map_or("", |authority| authority.as_str());
        format!("{}://{authority}", if self.is_https() { "https" } else { "http" })
    }
}

/// Without the query, which may hold a signature.
impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.origin(), self.0.path().trim_end_matches('/'))
    }
}

impl From<&Url> for Uri {
    fn from(url: &Url) -> Self {
        url.0.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn url(text: &str) -> Url {
        Url::parse(text).unwrap()
    }

    #[test]
    fn redirects_lead_where_browsers_go() {
        let from = url("https://hub.example:8443/a/b?c=d");
        let leads = |to: &str| from.join(to).map(|url| Uri::from(&url).to_string()).ok();
        let at = |text: &str| Some(text.to_owned());
        assert_eq!(leads("http://x/y?z"), at("http://x/y?z"));
        assert_eq!(leads("//x/y"), at("https://x/y"));
        assert_eq!(leads("/y?z"), at("https://hub.example:8443/y?z"));
        assert_eq!(leads("y"), at("https://hub.example:8443/a/y"));
        for bad in ["ftp://x/y", "file:///etc/passwd", "https://", "https://u:p@x/", "data:x"] {
            assert_eq!(leads(bad), None, "{bad}");
        }
        assert_eq!(from.to_string(), "https://hub.example:8443/a/b");
        assert_eq!(url("http://h/hf/").below("/api/x").unwrap().to_string(), "http://h/hf/api/x");
    }

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        let hub = url("https://hub.example/a");
        assert!(hub.same_origin(&url("https://HUB.example:443/b?c")));
        for other in ["http://hub.example/a", "https://hub.example:444/a", "https://hub.example.org/a"] {
            assert!(!hub.same_origin(&url(other)), "{other}");
        }
    }

    proptest! {
        #[test]
        fn no_text_from_a_server_is_a_panic(text in ".{0,40}") {
            let _ = url("http://h/a").join(&text);
        }
    }
}
