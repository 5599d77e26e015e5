//! What the environment says about hubs, tokens, proxies and certificates.

use std::env;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use forebay_hub::get::config::DEFAULT_ENDPOINT;
use forebay_hub::get::{GetError, HubConfig, Proxies, Token};
use forebay_io::file::{check_irregular, open_regular};

use crate::args::HubArgs;
use crate::dirs;
use crate::failure::Failure;

/// A token has about 40 bytes.
const MAX_TOKEN: u64 = 4096;

/// The hub to use, and how.
pub fn config(args: &HubArgs) -> Result<HubConfig, Failure> {
    let ca = args.ca.clone().or_else(|| path("SSL_CERT_FILE"));
    // Whoever opened a pipe would wait for its other end.
    if let Some(path) = &ca {
        let failed = |cause: io::Error| GetError::Ca { path: path.clone(), why: cause.to_string() };
        check_irregular(path).map_err(failed)?;
    }
    let endpoint = args.endpoint.clone().or_else(|| text(&["HF_ENDPOINT"]));
    Ok(HubConfig {
        endpoint: endpoint.unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned()),
        token: token()?,
        ca,
        proxies: proxies(),
        connections: usize::from(args.connections),
        ..HubConfig::default()
    })
}

/// The cache that Hugging Face's tools use.
pub fn cache() -> Result<PathBuf, Failure> {
    let known = path("HF_HUB_CACHE").or_else(|| dirs::hugging_face().map(|home| home.join("hub")));
    known.ok_or_else(|| Failure::usage("no home folder is known for the cache; use --to DIR, or set HF_HOME"))
}

fn token() -> Result<Option<Token>, GetError> {
    if let Some(token) = text(&["HF_TOKEN"]) {
        return Token::new(&token).map(Some);
    }
    let named = path("HF_TOKEN_PATH");
    let Some(file) = named.or_else(|| dirs::hugging_face().map(|home| home.join("token"))) else {
        return Ok(None);
    };
    match read(&file) {
        Ok(token) if token.trim().is_empty() => Ok(None),
        Ok(token) => Token::new(&token).map(Some),
        // Public models need none.
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(cause) => Err(GetError::Io { action: "read the token in", path: file, cause }),
    }
}

fn read(file: &Path) -> io::Result<String> {
    let mut text = String::new();
    open_regular(file)?.take(MAX_TOKEN).read_to_string(&mut text)?;
    Ok(text)
}

fn proxies() -> Proxies {
    let direct = text(&["NO_PROXY", "no_proxy"]).unwrap_or_default();
    let all = text(&["ALL_PROXY", "all_proxy"]);
    let with_scheme = |proxy: String| if proxy.contains("://") { proxy } else { format!("http://{proxy}") };
    let proxy = |names: &[&str]| text(names).or_else(|| all.clone()).map(with_scheme);
    Proxies {
        http: proxy(&["HTTP_PROXY", "http_proxy"]),
        https: proxy(&["HTTPS_PROXY", "https_proxy"]),
        direct: direct.split(',').map(str::trim).filter(|host| !host.is_empty()).map(str::to_owned).collect(),
    }
}

/// The first of these variables that is set and not empty.
fn text(names: &[&str]) -> Option<String> {
    names.iter().find_map(|name| env::var(name).ok().filter(|value| !value.trim().is_empty()))
}

fn path(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}
