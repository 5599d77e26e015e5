//! `forebay serve --config FILE`: options in a TOML file, by their long names.
//!
//! A file is turned into what could have been typed, so that both have the same names, values and errors. What is typed
//! wins.

use std::ffi::OsString;
use std::path::Path;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, CommandFactory, FromArgMatches, Parser};
use toml::de::{DeTable, DeValue};

use crate::args::Cli;
use crate::failure::Failure;
use crate::prompt;

/// The command line, with what a file adds to it. Ends the process as clap does where the command line is wrong.
pub fn command_line(typed: impl IntoIterator<Item = OsString>) -> Result<Cli, Failure> {
    let mut typed: Vec<OsString> = typed.into_iter().collect();
    let matches = Cli::command().get_matches_from(&typed);
    if let Some(("serve", serve)) = matches.subcommand()
        && let Some(path) = serve.get_one::<std::path::PathBuf>("config")
    {
        let text = prompt::read_file(path)?;
        let added = options(&text, &|id| is_typed(serve, id))
            .map_err(|fault| Failure::usage(format!("{}, {fault}", place(path))))?;
        typed.extend(added.into_iter().map(OsString::from));
        return Ok(Cli::parse_from(typed));
    }
    Ok(Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit()))
}

fn place(path: &Path) -> String {
    crate::console::one_line(&path.display().to_string())
}

fn is_typed(matches: &ArgMatches, id: &str) -> bool {
    matches.value_source(id) == Some(ValueSource::CommandLine)
}

/// The options in `text`, as one would type them, but for those that are typed.
fn options(text: &str, is_typed: &dyn Fn(&str) -> bool) -> Result<Vec<String>, String> {
    let line = |at: usize| text[..at.min(text.len())].matches('\n').count() + 1;
    let table = DeTable::parse(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        format!("line {}: this is no TOML: {}", line(at), error.message())
    })?;
    let mut command = Cli::command();
    command.build();
    let serve = command.find_subcommand("serve").cloned().unwrap_or_default();
    let mut all = Vec::new();
    for (key, value) in table.get_ref() {
        let at = line(key.span().start);
        let name: &str = key.get_ref();
        let found = option(&serve, name).ok_or_else(|| unknown(&serve, name, at))?;
        let typed = words(found, name, value.get_ref()).map_err(|why| format!("line {at}: {name} {why}"))?;
        check(&typed, name == "api-key").map_err(|why| format!("line {at}: {why}"))?;
        if !is_typed(found.get_id().as_str()) {
            all.extend(typed);
        }
    }
    Ok(all)
}

fn option<'c>(serve: &'c Command, name: &str) -> Option<&'c Arg> {
    let no_settings = ["config", "help"];
    serve.get_arguments().find(|arg| arg.get_long() == Some(name) && !no_settings.contains(&name))
}

fn unknown(serve: &Command, name: &str, line: usize) -> String {
    let name: String = name.chars().take(80).collect();
    let dashes = name.trim_start_matches('-').replace('_', "-");
    match option(serve, &dashes) {
        Some(_) => format!("line {line}: there is no option {name:?}; write {dashes}"),
        None => format!("line {line}: there is no option {name:?}; `forebay serve --help` lists them"),
    }
}

/// An option with its value or values.
fn words(arg: &Arg, name: &str, value: &DeValue<'_>) -> Result<Vec<String>, String> {
    let with = |value: &DeValue<'_>| scalar(value).map(|text| format!("--{name}={text}"));
    match (arg.get_action(), value) {
        (ArgAction::SetTrue, DeValue::Boolean(true)) => Ok(vec![format!("--{name}")]),
        (ArgAction::SetTrue, DeValue::Boolean(false)) => Ok(Vec::new()),
        (ArgAction::SetTrue, _) => Err("is true or false".to_owned()),
        (ArgAction::Append, DeValue::Array(values)) => {
            values.iter().map(|value| with(value.get_ref())).collect()
        }
        (_, DeValue::Array(_)) => Err("takes one value, no list".to_owned()),
        (_, value) => Ok(vec![with(value)?]),
    }
}

fn scalar(value: &DeValue<'_>) -> Result<String, String> {
    match value {
        DeValue::String(text) => Ok(text.to_string()),
        DeValue::Integer(number) => Ok(number.to_string()),
        DeValue::Float(number) => Ok(number.to_string()),
        DeValue::Boolean(_) => Err("takes a text or a number, not true or false".to_owned()),
        _ => Err("takes a text or a number".to_owned()),
    }
}

/// What clap says about one option by itself. What it says about several is said of all, later.
fn check(typed: &[String], is_secret: bool) -> Result<(), String> {
    let line = ["forebay", "serve"].into_iter().chain(typed.iter().map(String::as_str));
    match Cli::command().try_get_matches_from(line) {
        Err(error)
            if !matches!(error.kind(), ErrorKind::MissingRequiredArgument | ErrorKind::ArgumentConflict) =>
        {
            if is_secret {
                return Err("this is no API key: use letters, digits and signs without spaces".to_owned());
            }
            let text = error.to_string();
            let first = text.lines().next().unwrap_or_default();
            Err(first.trim_start_matches("error: ").to_owned())
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<String>, String> {
        options(text, &|id| id == "port")
    }

    #[test]
    fn a_file_is_what_could_have_been_typed() {
        let text = "\
            # A comment.\n\
            model = \"/models/a b\"\n\
            memory = \"16G\"\n\
            think = true\n\
            allow-public = false\n\
            max-queue = 7\n\
            cors-origin = [\"https://a.example\", \"https://b.example\"]\n\
            port = 1\n";
        let want = [
            "--model=/models/a b",
            "--memory=16G",
            "--think",
            "--max-queue=7",
            "--cors-origin=https://a.example",
            "--cors-origin=https://b.example",
        ];
        let mut found = read(text).unwrap();
        found.sort();
        let mut want = want.map(str::to_owned).to_vec();
        want.sort();
        assert_eq!(found, want, "what was typed, the port, is left out");
        assert_eq!(read(""), Ok(Vec::new()));
    }

    #[test]
    fn faults_have_their_line() {
        for (text, line, what) in [
            ("memory = \"16G\"\nprot = 1", 2, "\"prot\""),
            ("max_queue = 1", 1, "write max-queue"),
            ("\n\nport = \"abc\"", 3, "abc"),
            ("port = 70000", 1, "70000"),
            ("port = true", 1, "true or false"),
            ("think = 1", 1, "true or false"),
            ("think = \"yes\"", 1, "true or false"),
            ("max-queue = [1, 2]", 1, "no list"),
            ("cors-origin = [[1]]", 1, "text or a number"),
            ("[server]\nport = 1", 1, "\"server\""),
            ("config = \"other.toml\"", 1, "\"config\""),
            ("port = 1\nport = 2", 2, "TOML"),
            ("port = ", 1, "TOML"),
            ("memory = 1979-05-27", 1, "text or a number"),
        ] {
            let fault = read(text).unwrap_err();
            assert!(
                fault.starts_with(&format!("line {line}: ")) && fault.contains(what),
                "{text:?}: {fault}"
            );
        }
        let fault = read("api-key = \"a secret\"").unwrap_err();
        assert!(!fault.contains("secret"), "{fault}");
    }
}
