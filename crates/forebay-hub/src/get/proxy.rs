//! Proxies as they are written in variables.

use ureq::{Proxy, ProxyProtocol};

use super::error::GetError;

/// The proxy at `address`, passed by for the hosts in `direct`.
pub(super) fn proxy(address: Option<&str>, direct: &[String]) -> Result<Option<Proxy>, GetError> {
    let Some(address) = address else { return Ok(None) };
    let shown = address.rsplit_once('@').map_or(address, |(_, host)| host);
    let failed = |why: &str| GetError::Proxy { given: shown.to_owned(), why: why.to_owned() };
    let parsed = Proxy::new(address).map_err(|error| failed(&error.to_string()))?;
    let protocol = parsed.protocol();
    if !matches!(protocol, ProxyProtocol::Http | ProxyProtocol::Https) {
        return Err(failed("only HTTP proxies are spoken to"));
    }
    if direct.is_empty() {
        return Ok(Some(parsed));
    }
    let mut builder = Proxy::builder(protocol).host(parsed.host()).port(parsed.port());
    if let Some(user) = parsed.username() {
        builder = builder.username(user);
    }
    if let Some(password) = parsed.password() {
        builder = builder.password(password);
    }
    let builder = direct.iter().fold(builder, |builder, host| builder.no_proxy(host));
    builder.build().map(Some).map_err(|error| failed(&error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_exceptions_are_understood() {
        let direct = ["localhost".to_owned(), ".internal.example".to_owned(), "10.0.0.1".to_owned()];
        let proxy = proxy(Some("http://user:pa%20ss@proxy.example:3128"), &direct).unwrap().unwrap();
        assert_eq!((proxy.host(), proxy.port()), ("proxy.example", 3128));
        assert_eq!((proxy.username(), proxy.password()), (Some("user"), Some("pa ss")));
        let passed_by = |uri: &'static str| proxy.is_no_proxy(&ureq::http::Uri::from_static(uri));
        assert!(
            passed_by("http://localhost:1/x")
                && passed_by("https://a.internal.example")
                && passed_by("http://10.0.0.1")
        );
        assert!(!passed_by("https://huggingface.co"));
    }

    #[test]
    fn others_are_refused_without_showing_a_password() {
        for bad in ["socks5://u:secret@h:1", "http://u:secret@", "::"] {
            let message = proxy(Some(bad), &[]).unwrap_err().to_string();
            assert!(!message.contains("secret"), "{message}");
        }
        assert!(proxy(None, &[]).unwrap().is_none());
    }
}
