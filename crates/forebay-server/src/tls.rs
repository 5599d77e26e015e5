//! The server's certificate: read, checked, and read again when the system says that it has changed.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::{SystemTime, UNIX_EPOCH};

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{CertificateError, RootCertStore, ServerConfig};

/// A certificate and its key, as files in PEM have them.
pub struct Pem {
    /// The server's certificate, then those of the authorities between it and one that clients know.
    pub certificates: Vec<u8>,
    /// The private key of the first one.
    pub key: Vec<u8>,
}

/// Reads certificate and key; the text says why it cannot.
pub type ReadPem = Box<dyn Fn() -> Result<Pem, String> + Send + Sync>;

/// Why a certificate cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// It cannot be read.
    #[error("{0}")]
    Read(String),
    /// There is none.
    #[error("there is no certificate in --tls-cert; it must be a PEM file (-----BEGIN CERTIFICATE-----)")]
    NoCertificate,
    /// A certificate is damaged.
    #[error("--tls-cert cannot be read as PEM: {0}")]
    Certificate(String),
    /// There is no key.
    #[error(
        "there is no private key in --tls-key; it must be a PEM file without a password (-----BEGIN PRIVATE KEY-----): {0}"
    )]
    NoKey(String),
    /// They do not fit together, or the key is of a kind that is not known.
    #[error("--tls-cert and --tls-key cannot be used together: {0}")]
    Pair(String),
}

/// What connections are encrypted with.
pub struct Tls {
    read: ReadPem,
    config: RwLock<Arc<ServerConfig>>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

impl Tls {
    /// Reads the certificate and its key.
    ///
    /// # Errors
    /// If they cannot be read, or do not belong together.
    pub fn open(read: ReadPem) -> Result<Self, TlsError> {
        let config = RwLock::new(config(&read)?);
        Ok(Self { read, config })
    }

    /// Reads them again, for connections that come from now on.
    ///
    /// # Errors
    /// As before; the old ones stay in use.
    pub fn reload(&self) -> Result<(), TlsError> {
        let new = config(&self.read)?;
        *self.config.write().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(())
    }

    /// What a connection that comes now uses.
    pub fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.config.read().unwrap_or_else(PoisonError::into_inner))
    }
}

fn config(read: &ReadPem) -> Result<Arc<ServerConfig>, TlsError> {
    let Pem { certificates, key } = read().map_err(TlsError::Read)?;
    let chain = CertificateDer::pem_slice_iter(&certificates)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| TlsError::Certificate(error.to_string()))?;
    if chain.is_empty() {
        return Err(TlsError::NoCertificate);
    }
    let key = PrivateKeyDer::from_pem_slice(&key).map_err(|error| TlsError::NoKey(error.to_string()))?;
    let provider = Arc::new(ring::default_provider());
    if let Some(odd) = odd_time(&chain, &provider) {
        tracing::warn!(
            "the certificate of --tls-cert {odd}: clients will refuse it; renew it and send SIGHUP"
        );
    }
    let pair = |error: rustls::Error| TlsError::Pair(error.to_string());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(pair)?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(pair)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// Whether the certificate is too old or too new. Nothing else is asked: who trusts it is the clients' business.
fn odd_time(chain: &[CertificateDer<'static>], provider: &Arc<CryptoProvider>) -> Option<&'static str> {
    let (own, last) = (chain.first()?, chain.last()?);
    let mut roots = RootCertStore::empty();
    roots.add(last.clone()).ok()?;
    let verifier =
        WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider)).build().ok()?;
    let now = UnixTime::since_unix_epoch(SystemTime::now().duration_since(UNIX_EPOCH).ok()?);
    let name = ServerName::try_from("localhost").ok()?;
    // The times are looked at before anything else.
    match verifier.verify_server_cert(own, chain.get(1..)?, &name, &[], now) {
        Err(rustls::Error::InvalidCertificate(
            CertificateError::Expired | CertificateError::ExpiredContext { .. },
        )) => Some("has expired"),
        Err(rustls::Error::InvalidCertificate(
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. },
        )) => Some("is not valid yet"),
        _ => None,
    }
}
