//! Encrypted connections.

use std::io::{BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rcgen::{CertificateParams, CertifiedIssuer, KeyPair, date_time_ymd};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use crate::client::{Server, chat, events, read_reply, request, with};

/// A certificate for this machine in a folder, made for the test.
struct Made {
    certificate: PathBuf,
    key: PathBuf,
    der: CertificateDer<'static>,
}

fn make(folder: &Path, name: &str, last_year: i32) -> Made {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    params.not_after = date_time_ymd(last_year, 1, 1);
    let certificate = params.self_signed(&key).unwrap();
    let made = Made {
        certificate: folder.join(format!("{name}.pem")),
        key: folder.join(format!("{name}.key")),
        der: certificate.der().clone(),
    };
    std::fs::write(&made.certificate, certificate.pem()).unwrap();
    std::fs::write(&made.key, key.serialize_pem()).unwrap();
    made
}

fn args(made: &Made) -> [String; 4] {
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    ["--tls-cert".to_owned(), text(&made.certificate), "--tls-key".to_owned(), text(&made.key)]
}

fn start(made: &Made, more: &[&str]) -> Server {
    let args = args(made);
    let all: Vec<&str> = args.iter().map(String::as_str).chain(more.iter().copied()).collect();
    Server::with(&all)
}

/// A connection of a client that trusts this certificate.
fn connect(server: &Server, der: &CertificateDer<'static>) -> StreamOwned<ClientConnection, TcpStream> {
    let mut roots = RootCertStore::empty();
    roots.add(der.clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").unwrap();
    StreamOwned::new(ClientConnection::new(Arc::new(config), name).unwrap(), server.connect())
}

fn ask(server: &Server, der: &CertificateDer<'static>) -> std::io::Result<String> {
    let mut stream = connect(server, der);
    let body = with(chat("What is 2+2?"), serde_json::json!({"stream": true})).to_string();
    let json = [("content-type", "application/json")];
    stream.write_all(&request("POST", "/v1/chat/completions", &json, Some(body.as_bytes())))?;
    let reply = read_reply(&mut BufReader::new(stream));
    let text = |(_, data): (String, serde_json::Value)| {
        data["choices"][0]["delta"]["content"].as_str().unwrap_or_default().to_owned()
    };
    Ok(events(&reply.text()).into_iter().map(text).collect())
}

#[test]
fn answers_come_encrypted_and_plain_requests_get_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let made = make(folder.path(), "own", 2100);
    let server = start(&made, &["--client-timeout", "1"]);
    assert_eq!(ask(&server, &made.der).unwrap(), "2+2=4.");
    let other = make(folder.path(), "other", 2100);
    assert!(ask(&server, &other.der).is_err(), "the client checks whom it talks to");
    let mut plain = server.connect();
    plain.write_all(&request("GET", "/health", &[], None)).unwrap();
    let mut said = Vec::new();
    let _ = plain.read_to_end(&mut said);
    assert!(!String::from_utf8_lossy(&said).contains("HTTP/1.1"));
    // Who says nothing is hung up on, as who sends half of a request.
    let mut silent = server.connect();
    let began = Instant::now();
    let _ = silent.read_to_end(&mut said);
    assert!(began.elapsed() < Duration::from_secs(20));
    assert_eq!(ask(&server, &made.der).unwrap(), "2+2=4.");
}

#[cfg(unix)]
#[test]
fn a_new_certificate_is_taken_when_the_system_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (make(folder.path(), "old", 2100), make(folder.path(), "new", 2100));
    let server = start(&old, &[]);
    assert!(ask(&server, &old.der).is_ok());
    // One that is damaged changes nothing.
    std::fs::write(&old.certificate, "nothing").unwrap();
    server.signal("HUP");
    std::thread::sleep(Duration::from_millis(200));
    assert!(ask(&server, &old.der).is_ok());
    std::fs::copy(&new.certificate, &old.certificate).unwrap();
    std::fs::copy(&new.key, &old.key).unwrap();
    server.signal("HUP");
    server.until("the new certificate", |server| ask(server, &new.der).is_ok());
    assert!(ask(&server, &old.der).is_err());
}

#[test]
fn what_is_wrong_with_a_certificate_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (make(folder.path(), "one", 2100), make(folder.path(), "two", 2100));
    let empty = folder.path().join("empty");
    std::fs::write(&empty, "").unwrap();
    let run = |certificate: &Path, key: Option<&Path>| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(["serve", "--port", "0", "--tls-cert"]).arg(certificate).env_remove("FOREBAY_CONFIG");
        if let Some(key) = key {
            command.arg("--tls-key").arg(key);
        }
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    for (certificate, key, want) in [
        (&one.certificate, Some(&two.key), "cannot be used together"),
        (&empty, Some(&one.key), "no certificate"),
        (&one.key, Some(&one.key), "no certificate"),
        (&one.certificate, Some(&empty), "no private key"),
        (&one.certificate, Some(&one.certificate), "no private key"),
        (&folder.path().join("none"), Some(&one.key), "cannot be read"),
        (&one.certificate, None, "--tls-key"),
    ] {
        let (code, said) = run(certificate, key.map(PathBuf::as_path));
        assert!(code == Some(2) && said.contains(want), "{want}: {code:?} {said}");
    }
    // A chain of two, and one that has run out: served all the same, with a word about it.
    let issuer = CertifiedIssuer::self_signed(
        {
            let mut params = CertificateParams::new(Vec::new()).unwrap();
            params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
            params
        },
        KeyPair::generate().unwrap(),
    )
    .unwrap();
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    params.not_after = date_time_ymd(2020, 1, 1);
    let own = params.signed_by(&key, &issuer).unwrap();
    let certificate = folder.path().join("chain.pem");
    std::fs::write(&certificate, own.pem() + &issuer.pem()).unwrap();
    let file = folder.path().join("chain.key");
    std::fs::write(&file, key.serialize_pem()).unwrap();
    for made in [Made { certificate, key: file, der: own.der().clone() }, make(folder.path(), "old", 2020)] {
        let mut server = start(&made, &[]);
        let said = server.said_until("expired");
        assert!(said.contains("has expired"), "{said}");
    }
}
