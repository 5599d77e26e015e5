//! Files: what clients upload and fetch.

use serde_json::{Value, json};

use crate::client::{Reply, Server, chat};

/// A form with a file.
pub fn form(fields: &[(&str, &str)], file: Option<&[u8]>) -> Vec<u8> {
    let mut body = Vec::new();
    for (name, value) in fields {
        body.extend(
            format!("--xyz\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n").bytes(),
        );
    }
    if let Some(file) = file {
        let head = "--xyz\r\ncontent-disposition: form-data; name=\"file\"; filename=\"in.jsonl\"\r\n\
            content-type: application/octet-stream\r\n\r\n";
        body.extend(head.bytes());
        body.extend(file);
        body.extend(b"\r\n");
    }
    body.extend(b"--xyz--\r\n");
    body
}

pub fn post_form(server: &Server, body: &[u8]) -> Reply {
    let headers = [("content-type", "multipart/form-data; boundary=xyz")];
    server.send("POST", "/v1/files", &headers, Some(body))
}

/// Uploads requests.
pub fn upload(server: &Server, file: &[u8]) -> Value {
    post_form(server, &form(&[("purpose", "batch")], Some(file))).ok()
}

#[test]
fn files_are_kept_listed_fetched_and_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let jobs = dir.path().join("jobs");
    let args = ["--jobs", jobs.to_str().unwrap(), "--max-file", "300kB", "--max-files", "400kB"];
    let server = Server::with(&args);
    let bytes: Vec<u8> = (0..300_000u32).map(|i| (i % 251) as u8).collect();
    // Refused, and nothing of it stays.
    let large =
        post_form(&server, &form(&[("purpose", "batch")], Some(&[bytes.clone(), bytes.clone()].concat())));
    assert_eq!((large.status, &large.json()["error"]["code"]), (413, &json!("file_too_large")));
    let slightly = post_form(&server, &form(&[("purpose", "batch")], Some(&[&bytes[..], b"more"].concat())));
    assert_eq!((slightly.status, &slightly.json()["error"]["code"]), (413, &json!("file_too_large")));
    let file = upload(&server, &bytes);
    let id = file["id"].as_str().unwrap().to_owned();
    assert_eq!(
        (&file["object"], &file["bytes"], &file["filename"], &file["purpose"], &file["status"]),
        (&json!("file"), &json!(300_000), &json!("in.jsonl"), &json!("batch"), &json!("processed"))
    );
    assert_eq!(server.get(&format!("/v1/files/{id}")).ok(), file);
    assert_eq!(server.get(&format!("/v1/files/{id}/content")).body, bytes);
    assert_eq!(server.metric("forebay_files_bytes"), 300_000.0);
    let full = post_form(&server, &form(&[("purpose", "batch")], Some(&bytes)));
    assert_eq!((full.status, &full.json()["error"]["code"]), (413, &json!("files_full")));
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&jobs), 0o700, "nobody else may read what people ask");
        assert_eq!(mode(&jobs.join("files").join(format!("{id}.jsonl"))), 0o600);
    }
    server.kill();

    let server = Server::with(&args);
    let small = upload(&server, b"second");
    let list = |query: &str| {
        let list = server.get(&format!("/v1/files{query}")).ok();
        let ids = list["data"].as_array().unwrap().iter().map(|file| file["id"].as_str().unwrap().to_owned());
        (ids.collect::<Vec<_>>(), list["has_more"] == true)
    };
    let newest = small["id"].as_str().unwrap().to_owned();
    let (mut all, more) = list("");
    all.sort();
    let mut want = vec![id.clone(), newest];
    want.sort();
    assert_eq!((all, more), (want, false));
    let (first, more) = list("?limit=1");
    assert!(more && first.len() == 1);
    let (second, more) = list(&format!("?limit=1&after={}", first[0]));
    assert!(!more && second != first);
    assert_eq!(list("?purpose=batch_output").0.len(), 0);
    server.get("/v1/files?bogus=1").refused(400, "bogus");
    let gone = server.send("DELETE", &format!("/v1/files/{id}"), &[], None).ok();
    assert_eq!(gone, json!({"id": id, "object": "file", "deleted": true}));
    assert_eq!(server.get(&format!("/v1/files/{id}")).status, 404);
    assert_eq!(server.get(&format!("/v1/files/{id}/content")).status, 404);
    assert_eq!(
        std::fs::read_dir(jobs.join("files")).unwrap().count(),
        2,
        "one file is left, and what is known of it"
    );
    server.is_well();
}

#[test]
fn names_lead_nowhere_else_and_forms_are_read_strictly() {
    let dir = tempfile::tempdir().unwrap();
    let jobs = dir.path().join("jobs");
    let server = Server::with(&["--jobs", jobs.to_str().unwrap()]);
    std::fs::write(dir.path().join("secret.jsonl"), "secret").unwrap();
    std::fs::write(dir.path().join("secret.json"), "{}").unwrap();
    for id in [
        "..%2F..%2Fsecret",
        "../../secret",
        "%2e%2e%2f%2e%2e%2fsecret",
        "file-..%2f..%2f..%2fsecret",
        "%00",
        "file-%ff",
        "..",
        &"a".repeat(5000),
    ] {
        for path in
            [format!("/v1/files/{id}"), format!("/v1/files/{id}/content"), format!("/v1/batches/{id}")]
        {
            let reply = server.get(&path);
            assert!((400..500).contains(&reply.status), "{path}: {reply:?}");
            assert!(!reply.text().contains("secret\"") || reply.status == 404, "{path}: {reply:?}");
        }
        let deleted = server.send("DELETE", &format!("/v1/files/{id}"), &[], None);
        assert!((400..500).contains(&deleted.status), "{deleted:?}");
    }
    assert!(dir.path().join("secret.jsonl").exists());
    let refused = |fields: &[(&str, &str)], file, param: &str| {
        post_form(&server, &form(fields, file)).refused(400, param);
    };
    refused(&[], Some(b"x"), "purpose");
    refused(&[("purpose", "fine-tune")], Some(b"x"), "purpose");
    refused(&[("purpose", &"x".repeat(100_000))], Some(b"x"), "purpose");
    refused(&[("purpose", "batch")], None, "file");
    refused(
        &[("purpose", "batch"), ("expires_after[anchor]", "created_at")],
        Some(b"x"),
        "expires_after[anchor]",
    );
    refused(&[("purpose", "batch"), ("purpose", "batch")], Some(b"x"), "purpose");
    let torn = &form(&[("purpose", "batch")], Some(b"x"))[..120];
    assert_eq!(post_form(&server, torn).status, 400);
    assert_eq!(server.post("/v1/files", &chat("x")).status, 415);
    assert_eq!(
        std::fs::read_dir(jobs.join("files")).unwrap().count(),
        0,
        "nothing stays of what was refused"
    );
    server.is_well();
}
