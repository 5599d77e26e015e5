//! Options in a file.

use crate::client::Server;

#[test]
fn a_file_sets_options_and_what_is_typed_wins() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("forebay.toml");
    std::fs::write(
        &file,
        "served-name = \"night-owl\"\nmax-queue = 3\ncontext = 128\napi-key = [\"a\", \"b\"]\n",
    )
    .unwrap();
    let server = Server::with(&["--config", file.to_str().unwrap(), "--max-queue", "5"]);
    let health = server.get("/health").ok();
    assert_eq!(
        (&health["model"], &health["max_queue"], &health["context"]),
        (&"night-owl".into(), &5.into(), &128.into())
    );
    assert_eq!(server.get("/v1/models").status, 401);
    assert_eq!(server.send("GET", "/v1/models", &[("x-api-key", "b")], None).status, 200);
}

#[test]
fn a_file_that_is_wrong_is_refused_with_its_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("forebay.toml");
    std::fs::write(&file, "port = 0\nmax-que = 3\n").unwrap();
    let run = |file: &std::path::Path, by_name: bool| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.arg("serve").env_remove("FOREBAY_CONFIG");
        match by_name {
            true => command.arg("--config").arg(file),
            false => command.env("FOREBAY_CONFIG", file),
        };
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    for by_name in [true, false] {
        let (code, said) = run(&file, by_name);
        assert!(
            code == Some(2) && said.contains("forebay.toml, line 2") && said.contains("max-que"),
            "{said}"
        );
    }
    let (code, said) = run(&folder.path().join("none.toml"), true);
    assert!(code == Some(2) && said.contains("none.toml"), "{said}");
    std::fs::write(&file, "tls-cert = \"a.pem\"\n").unwrap();
    let (code, said) = run(&file, true);
    assert!(code == Some(2) && said.contains("--tls-key"), "{said}");
}
