//! `forebay chat`, with standard input as the conversation.

use std::io::Write;

use serde_json::Value;

use crate::support::{Live, arg, demo_copy, forebay, forebay_reading, smallest_memory};

fn chat(args: &[&str], lines: &str) -> crate::support::Done {
    forebay_reading(&[&["chat"], args].concat(), lines.as_bytes())
}

#[test]
fn turns_follow_one_another() {
    let done = chat(&[], "What is 2+2?\n\nWhat is the capital of France?\n").ok();
    assert_eq!(done.stdout, "2+2=4.\nThe capital of France is Paris.\n");
}

#[test]
fn earlier_turns_are_not_run_again() {
    let done = chat(&[], "What is 2+2?\n/stats\nWhat is 2+2?\n/stats\n").ok();
    let prompts: Vec<u64> = done
        .stdout
        .lines()
        .filter_map(|line| line.strip_prefix("prompts")?.split_whitespace().next()?.parse().ok())
        .collect();
    // 13 tokens for the first turn. The second adds 11: the whole prompt but [gMASK]<sop>, and the answer's last
    // token is already run, because choosing the stop token needed it.
    assert_eq!(prompts, [13, 24], "{}", done.stdout);
}

#[test]
fn commands_do_what_help_says() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("talk.json");
    let save = format!("/save {}", arg(&file));
    let lines = [
        "/help",
        "/system",
        "/system Be brief.",
        "/system",
        "What is 2+2?",
        &save,
        &save,
        "/reset",
        &save,
        "/quit",
        "never read",
    ];
    let done = chat(&[], &lines.join("\n")).ok();
    assert!(
        done.stdout.contains("/save FILE") && done.stdout.contains("no instructions are set"),
        "{done:#?}"
    );
    assert_eq!(done.stdout.matches("Be brief.\n").count(), 1);
    assert_eq!(done.stderr.matches("saved to").count(), 3);
    let talk: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(talk["messages"], serde_json::json!([{"role": "system", "content": "Be brief."}]));
}

#[test]
fn saving_keeps_the_files_of_others() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("mine");
    std::fs::write(&file, "precious").unwrap();
    let done = chat(&[], &format!("/save {}\nWhat is 2+2?\n/unknown\n /etc\n", arg(&file)));
    // Both mistakes are told, the conversation goes on, and the status remembers.
    assert_eq!(done.code, 2, "{done:#?}");
    assert!(done.stderr.contains("choose a name that is free") && done.stderr.contains("/help"), "{done:#?}");
    assert!(done.stdout.starts_with("2+2=4.\n") && done.stdout.lines().count() >= 2, "{done:#?}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
}

#[test]
fn a_full_context_refuses_or_forgets_the_oldest_turns_if_asked() {
    let line = "What is 2+2?\n";
    let done = chat(&["--context", "40"], &format!("{}/reset\n{line}", line.repeat(5)));
    let answers = done.stdout.lines().count();
    assert!((2..5).contains(&answers) && done.stdout == "2+2=4.\n".repeat(answers), "{done:#?}");
    assert_eq!(done.code, 2);
    assert!(done.stderr.contains("--context-shift forgets the oldest turns"), "{done:#?}");
    assert!(!done.stderr.contains("forgotten"), "{done:#?}");

    let done = chat(&["--context", "40", "--context-shift"], &line.repeat(5)).ok();
    assert_eq!(done.stdout, "2+2=4.\n".repeat(5));
    assert!(
        done.stderr.contains("the context of 40 tokens is full; the oldest turn is forgotten"),
        "{done:#?}"
    );

    let done = chat(&["--context", "40"], &format!("{}\n{line}", "word ".repeat(60)));
    assert_eq!(done.stdout, "2+2=4.\n");
    assert_eq!(done.code, 2);
    assert!(done.stderr.contains("not sent"), "{done:#?}");
}

#[test]
fn a_message_that_is_not_sent_forgets_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("talk.json");
    // The second fits into no context of 40 tokens, as tokens can tell; the third as bytes can.
    let (some, many) = ("word ".repeat(60), "word ".repeat(60_000));
    let done = chat(&["--context", "40"], &format!("What is 2+2?\n{some}\n{many}\n/save {}\n", arg(&file)));
    assert_eq!((done.code, done.stdout.as_str()), (2, "2+2=4.\n"), "{done:#?}");
    assert_eq!(done.stderr.matches("not sent").count(), 2, "{done:#?}");
    assert!(!done.stderr.contains("forgotten"), "{done:#?}");
    let talk: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(talk["messages"].as_array().unwrap().len(), 2);
}

#[test]
fn lines_that_are_not_text_are_refused_one_by_one() {
    let done = forebay_reading(&["chat"], b"\xff\xfe\nWhat is 2+2?\n");
    assert_eq!((done.code, done.stdout.as_str()), (2, "2+2=4.\n"), "{done:#?}");
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_a_chat_without_a_terminal() {
    let slow = ["chat", "--cpu-features", "scalar", "--arith", "exact", "--threads", "1"];
    let mut live = Live::start(&slow);
    live.say("/help");
    while !live.line().contains("/quit") {}
    // Reading this takes many seconds.
    live.say(&"word ".repeat(1500));
    std::thread::sleep(std::time::Duration::from_secs(1));
    live.interrupt();
    // Not read any more; the pipe may be closed already.
    let _ = writeln!(live.stdin, "What is 2+2?");
    let done = live.end();
    assert_eq!((done.code, done.stdout.as_str()), (130, ""), "{done:#?}");
    assert!(done.stderr.contains("stopped before the answer began"), "{done:#?}");
}

/// Only a chat waits for somebody and has the time to warm up; elsewhere the switch would do nothing.
#[test]
fn only_a_chat_can_warm_up() {
    for verb in [&["run", "x"][..], &["score", "x"], &["bench", "stream"]] {
        forebay(&[verb, &["--warm-up", "on"]].concat()).fails(2, &["--warm-up"]);
    }
    let dir = tempfile::tempdir().unwrap();
    let record = dir.path().join("record");
    for (args, expected) in [(&[][..], true), (&["--warm-up", "off"], false)] {
        chat(&[&["--record", arg(&record)], args].concat(), "What is 2+2?\n").ok();
        let lines = std::fs::read_to_string(&record).unwrap();
        let run: Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
        assert_eq!(run["run"]["settings"]["warm_up"], expected, "{run}");
    }
}

/// The weights vanish under a running conversation: the turn fails, says where, and the next one is tried.
#[test]
fn an_unreadable_expert_fails_one_turn() {
    let dir = demo_copy();
    let weights = dir.path().join("model.safetensors");
    let memory = smallest_memory(&[]);
    let mut live = Live::start(&["chat", "--model", arg(dir.path()), "--memory", &memory]);
    live.say("What is 2+2?");
    assert_eq!(live.line(), "2+2=4.");
    let whole = std::fs::read(&weights).unwrap();
    // In place: the program holds the file open.
    std::fs::OpenOptions::new().write(true).open(&weights).unwrap().set_len(1000).unwrap();
    live.say("What is the capital of France?");
    live.say("/stats");
    while !live.line().starts_with("experts:") {}
    std::fs::write(&weights, whole).unwrap();
    live.say("What is the capital of France?");
    let done = live.end();
    assert_eq!(done.code, 1, "{done:#?}");
    assert!(done.stderr.contains("error: ") && done.stderr.contains("model.safetensors"), "{done:#?}");
    assert_eq!(done.stdout, "The capital of France is Paris.\n");
}
