//! Who may come in.

use axum::http::{HeaderMap, StatusCode, header};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::error::ApiError;

/// The keys that open the door. Only their digests are kept, so that comparing takes as long for any key.
#[derive(Clone, Default)]
pub struct Keys(Vec<[u8; 32]>);

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Keys({})", self.0.len())
    }
}

impl Keys {
    /// These keys.
    pub fn new<'k>(keys: impl IntoIterator<Item = &'k str>) -> Self {
        Self(keys.into_iter().map(|key| Sha256::digest(key).into()).collect())
    }

    /// Whether everybody may come in.
    pub fn are_none(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether this is one of them.
    fn fit(&self, key: &[u8]) -> bool {
        let digest: [u8; 32] = Sha256::digest(key).into();
        let fits = |fit: subtle::Choice, known: &[u8; 32]| fit | known.ct_eq(&digest);
        self.0.iter().fold(subtle::Choice::from(0), fits).into()
    }

    /// An error unless the request brings a key: as a bearer token, or in `x-api-key`.
    pub fn check(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        if self.are_none() {
            return Ok(());
        }
        let bearer = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes()).and_then(|value| {
            let (scheme, key) = value.split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"bearer ").then_some(key)
        });
        let own = headers.get("x-api-key").map(|value| value.as_bytes());
        // Some clients always send both, one of them with a word that means nothing.
        let fits = [bearer, own].map(|key| key.is_some_and(|key| self.fit(key)));
        if fits.contains(&true) {
            return Ok(());
        }
        let message = match bearer.or(own) {
            Some(_) => "the API key is wrong; send one that this server was started with",
            None => "an API key is needed; send it as `Authorization: Bearer KEY`",
        };
        Err(ApiError::new(StatusCode::UNAUTHORIZED, message).code("invalid_api_key"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_opens_in_either_header_and_nothing_else_does() {
        let keys = Keys::new(["one", "two"]);
        let check = |name: &'static str, value: &[u8]| {
            let mut headers = HeaderMap::new();
            headers.insert(name, value.try_into().unwrap());
            keys.check(&headers).is_ok()
        };
        assert!(check("authorization", b"Bearer one") && check("authorization", b"bearer two"));
        assert!(check("x-api-key", b"two"));
        for wrong in
            [&b"Bearer on"[..], b"Bearer one ", b"Bearer ", b"Basic one", b"one", b"", b"Bearer \xff\xfe"]
        {
            assert!(!check("authorization", wrong), "{wrong:?}");
        }
        assert!(!check("x-api-key", b"three"));
        let both = |bearer: &str, own: &str| {
            let headers = [("authorization", format!("Bearer {bearer}")), ("x-api-key", own.to_owned())];
            let headers = headers.map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
            keys.check(&HeaderMap::from_iter(headers)).is_ok()
        };
        assert!(both("unused", "one") && both("one", "unused") && !both("unused", "none"));
        assert!(keys.check(&HeaderMap::new()).is_err());
        assert!(Keys::default().check(&HeaderMap::new()).is_ok());
        assert_eq!(format!("{keys:?}"), "Keys(2)", "no key is ever printed");
    }
}
