//! Whom `get` trusts. `tls/server.pem` is for 127.0.0.1 and signed by `tls/authority.pem`, whose key nobody has any
//! more.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_core::CancelToken;
use forebay_hub::get::{GetError, Hub, HubConfig, Listing, Watch};
use forebay_testkit::hub::{COMMIT, REPO};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, Stream};

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/get/tls").join(name)
}

/// Answers every connection with an empty repository; the port.
fn serve() -> u16 {
    let chain = vec![CertificateDer::from_pem_file(file("server.pem")).unwrap()];
    let key = PrivateKeyDer::from_pem_file(file("server.key")).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = Arc::new(config.with_no_client_auth().with_single_cert(chain, key).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for socket in listener.incoming() {
            let (mut socket, mut tls) = (socket.unwrap(), ServerConnection::new(config.clone()).unwrap());
            let mut stream = Stream::new(&mut tls, &mut socket);
            let mut head = Vec::new();
            // A client that does not trust goes away.
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                match stream.read(&mut byte) {
                    Ok(1) => head.push(byte[0]),
                    _ => break,
                }
            }
            let body = format!("{{\"sha\": \"{COMMIT}\", \"siblings\": []}}");
            let _ = write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
            let _ = stream.flush();
        }
    });
    port
}

fn list(host: &str, port: u16, ca: Option<&str>) -> Result<Listing, GetError> {
    let endpoint = format!("https://{host}:{port}");
    let config = HubConfig { endpoint, ca: ca.map(file), ..HubConfig::default() };
    let cancel = CancelToken::new();
    Hub::new(&config)?.list(&REPO.parse().unwrap(), "main", &Watch { cancel: &cancel, seen: &|_| {} })
}

#[test]
fn only_servers_that_a_trusted_authority_vouches_for_are_talked_to() {
    let port = serve();
    assert_eq!(list("127.0.0.1", port, Some("authority.pem")).unwrap().commit, COMMIT);
    let unknown = list("127.0.0.1", port, None).unwrap_err();
    assert!(matches!(&unknown, GetError::Tls { host, .. } if host == "127.0.0.1"), "{unknown}");
    assert!(unknown.to_string().contains("--ca"), "{unknown}");
    let other_name = list("localhost", port, Some("authority.pem")).unwrap_err();
    assert!(matches!(other_name, GetError::Tls { .. }), "{other_name}");
    let no_certificate = list("127.0.0.1", port, Some("server.key")).unwrap_err();
    assert!(matches!(no_certificate, GetError::Ca { .. }), "{no_certificate}");
}
