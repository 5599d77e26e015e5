//! `forebay chat`: a conversation.

mod conversation;
mod lines;

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use forebay_core::ByteSize;
use forebay_engine::{Finish, Sampling, Session, Stats};
use forebay_text::{ReasoningDelta, StopMatcher};
use serde_json::json;

use crate::answer::{self, Answer, Ask, Screen};
use crate::args::ChatArgs;
use crate::closing;
use crate::console::{self, Output};
use crate::failure::Failure;
use crate::hindsight::{Hindsight, Stretch};
use crate::identity;
use crate::interrupt::Interrupt;
use crate::load::{self, Loaded, TextSide};
use crate::outputs::Protected;
use crate::prefixes::{self, Keeper};
use crate::prompt::Limit;
use crate::recordings::Recordings;
use crate::report;
use crate::sessions::SavedTalk;
use crate::settings::{self, ModelDefaults};
use crate::structure::Structure;
pub use conversation::Talk;
use conversation::{Conversation, Prompt};
use lines::{Input, Lines};

const HELP: &str = "\
Every other line is a message to the model; a line with a space in front of a slash is one too.
  /system TEXT  give the model instructions; alone: show them
  /reset        forget the conversation, but not the instructions
  /save FILE    write the conversation as JSON
  /stats        what it took so far
  /help         this list
  /quit         end; so does Ctrl-D. Ctrl-C stops an answer
";

/// A new turn must leave this share of the context for its answer.
const ROOM_FOR_ANSWER: usize = 16;

/// Runs the verb.
pub fn run(args: &ChatArgs) -> Result<(), Failure> {
    let dir = settings::model_dir(args.engine.model.as_deref())?;
    let text = TextSide::read(&dir)?;
    let sampling = ModelDefaults::read(&dir)?.sampling(&args.answer);
    let structure = Structure::read(&args.structure, &text.tokenizer)?;
    StopMatcher::new(args.answer.stop.iter().cloned())?;
    let interrupt = Interrupt::install()?;
    let roots = load::roots(&dir, &args.engine.disk.mirror);
    let mut recordings = Recordings::create(&args.files, &roots, &[])?;
    let mut model = Loaded::open(dir, None, text, args.options(), &args.engine.disk)?;
    let seed = args.answer.seed.map(|seed| ("seed", seed.to_string()));
    recordings.begin(&model.dir, &model.engine, &Vec::from_iter(seed))?;
    let session = Session::new(&model.engine);
    let kept = args.session.as_deref().map(|name| kept_talk(name, &model)).transpose()?;
    let mut conversation = Conversation::new(args.answer.system.clone(), args.answer.think);
    if let Some(talk) = kept.as_ref().map(SavedTalk::load).transpose()?.flatten() {
        conversation = talk.go_on(args.answer.system.clone(), args.answer.think);
        let (turns, tokens) = (conversation.turns(), conversation.tokens());
        console::note(&format!("the conversation goes on after {turns} messages; it has {tokens} tokens"));
    }
    let folder = match (&args.prefixes.prefix_store, &args.session) {
        (Some(folder), _) => Some(folder.clone()),
        (None, Some(_)) if !args.no_prefix_store => prefixes::usual_folder(),
        _ => None,
    };
    if folder.is_none() && args.prefixes.prefix_store_size.is_some() {
        return Err(Failure::usage(
            "--prefix-store-size needs --prefix-store or --session: else nothing is kept",
        ));
    }
    let keeper = Keeper::begin(&model.dir, &mut model.engine, folder.as_deref(), args.prefixes.limit());
    let max_tokens = args.answer.max_tokens as usize;
    let totals = Totals::default();
    let limit = Limit::of_context(model.engine.plan().context, &model.text.tokenizer);
    let saved = None;
    let mut chat = Chat {
        model,
        session,
        conversation,
        sampling,
        stop: args.answer.stop.clone(),
        structure,
        max_tokens,
        interrupt,
        totals,
        limit,
        warm_up: args.warms_up(),
        recordings,
        saved,
        kept,
        keeper,
        context_shift: args.context_shift,
    };
    let mut lines = Lines::open(chat.limit.bytes)?;
    if lines.is_interactive() {
        let context = chat.model.engine.plan().context;
        console::diagnose(&format!("context {context} tokens; /help lists the commands, Ctrl-D ends\n"));
    }
    let ended = chat.talk(&mut lines, &mut Output::new());
    chat.model.remember();
    chat.close().and(ended)
}

/// What all answers together took.
#[derive(Default)]
struct Totals {
    answers: usize,
    stats: Stats,
    stretch: Stretch,
    /// Bytes of experts read for them.
    read: u64,
    /// Prompt tokens that were not run, because what they come to was known.
    reused: usize,
}

impl Totals {
    fn add(&mut self, stats: &Stats) {
        self.answers += 1;
        self.stretch.add(&Stretch::of(stats));
        self.read += stats.experts.step_bytes();
        self.stats.prompt_tokens += stats.prompt_tokens;
        self.stats.new_tokens += stats.new_tokens;
        self.stats.prefill += stats.prefill;
        self.stats.decode += stats.decode;
        self.stats.decode_passes += stats.decode_passes;
        self.stats.drafts.join(&stats.drafts);
    }
}

/// What a line led to.
enum Next {
    Continue,
    /// Ctrl-C stopped an answer.
    Stopped,
    Quit,
}

struct Chat {
    model: Loaded,
    session: Session,
    conversation: Conversation,
    sampling: Sampling,
    stop: Vec<String>,
    structure: Option<Structure>,
    max_tokens: usize,
    interrupt: Interrupt,
    totals: Totals,
    /// What a message may have in bytes.
    limit: Limit,
    /// Whether free memory is filled while the user thinks.
    warm_up: bool,
    recordings: Recordings,
    /// The file that `/save` wrote in this conversation; it may be written again.
    saved: Option<PathBuf>,
    /// Where the conversation is kept for the next time.
    kept: Option<SavedTalk>,
    keeper: Keeper,
    /// Whether the oldest turns make room in a full context.
    context_shift: bool,
}

/// The place of a named conversation.
fn kept_talk(name: &str, model: &Loaded) -> Result<SavedTalk, Failure> {
    let identity = identity::of(&model.dir, &model.engine).map_err(|error| {
        Failure::runtime(format!("cannot read the model's config again: {error}; check the folder"))
    })?;
    SavedTalk::new(name, identity)
}

impl Chat {
    /// Goes on until the user leaves. What goes wrong in a turn is said, and the conversation goes on; without
    /// a person at the other end it also becomes the result, and Ctrl-C ends the program as it ends any other.
    fn talk(&mut self, lines: &mut Lines, out: &mut Output) -> Result<(), Failure> {
        let mut result = Ok(());
        loop {
            let input = self.model.engine.idle_during(self.warm_up, || lines.next())?;
            let done = match input {
                Input::End => {
                    if lines.is_interactive() {
                        out.write("\n")?;
                    }
                    return result;
                }
                Input::Abandoned => Ok(Next::Continue),
                Input::TooLong => {
                    Err(Failure::usage("this line is too long for a message; it was not sent: shorten it"))
                }
                Input::NotText => Err(Failure::usage("this line is not UTF-8 text; convert it to UTF-8")),
                Input::Line(line) => match line.strip_prefix('/') {
                    Some(command) => self.obey(command.trim(), out),
                    None if line.trim().is_empty() => Ok(Next::Continue),
                    None => self.say(&line, out),
                },
            };
            match done {
                Ok(Next::Stopped) if !lines.is_interactive() => return Err(Failure::Interrupted),
                Ok(Next::Continue | Next::Stopped) => {}
                Ok(Next::Quit) => return result,
                Err(Failure::Error { exit, message }) => {
                    console::error(&message);
                    if !lines.is_interactive() {
                        result = Err(Failure::Reported { exit });
                    }
                }
                Err(other) => return Err(other),
            }
        }
    }

    /// Sends a message and shows the answer.
    fn say(&mut self, line: &str, out: &mut Output) -> Result<Next, Failure> {
        self.limit.check(line.len(), "this message was not sent: it")?;
        let context = self.model.engine.plan().context;
        let mut prompt = self.conversation.prompt(line, &self.model.text)?;
        let room = (context / ROOM_FOR_ANSWER).max(1);
        let mut forgets = None;
        if prompt.ids.len() + room > context && !self.conversation.is_empty() {
            if !self.context_shift {
                return Err(self.full(prompt.ids.len()));
            }
            let (rest, turns, shorter) = self.without_oldest(line, context - room)?;
            prompt = shorter;
            forgets = Some((rest, turns));
        }
        if prompt.ids.len() >= context {
            let tokens = prompt.ids.len();
            return Err(Failure::usage(format!(
                "this message makes a prompt of {tokens} tokens, and the context is {context}; it was not sent: shorten it or raise --context"
            )));
        }
        // Only for a message that is sent.
        if let Some((rest, turns)) = forgets {
            let turns =
                if turns == 1 { "oldest turn is".to_owned() } else { format!("{turns} oldest turns are") };
            console::note(&format!(
                "the context of {context} tokens is full; the {turns} forgotten, and what is left is run again"
            ));
            self.conversation = rest;
        }
        let reused = self.session.start_from(&mut self.model.engine, &prompt.ids)?;
        let answer = self.answer(&prompt, reused.tokens, out)?;
        self.totals.add(&answer.stats);
        self.totals.reused += reused.tokens;
        match answer.finish {
            Finish::Cancelled if answer.tokens.is_empty() => {
                console::note("stopped before the answer began; the message is forgotten");
                return Ok(Next::Stopped);
            }
            Finish::Cancelled => console::note("stopped"),
            _ => {}
        }
        let next = if answer.finish == Finish::Cancelled { Next::Stopped } else { Next::Continue };
        if let Some(note) = answer.ending_note(self.max_tokens, context) {
            console::note(&note);
        }
        self.conversation.answered(line, prompt, &answer);
        if let Some(kept) = &self.kept {
            kept.save(&self.conversation.talk());
        }
        self.keeper.keep(&mut self.model.engine);
        Ok(next)
    }

    /// The refusal of a message for which a conversation leaves no room.
    fn full(&self, tokens: usize) -> Failure {
        let context = self.model.engine.plan().context;
        Failure::usage(format!(
            "with this message the conversation has {tokens} tokens, and a context of {context} leaves too little room for \
             an answer; it was not sent: /reset begins anew, --context may allow more, and --context-shift forgets the \
             oldest turns"
        ))
    }

    /// The conversation without as many of its oldest turns as it takes for a prompt of up to `most` tokens, how many
    /// those are, and the prompt. Without any turn, if nothing else will do.
    fn without_oldest(&self, line: &str, most: usize) -> Result<(Conversation, usize, Prompt), Failure> {
        let mut turns = 1;
        loop {
            let rest = self.conversation.without_oldest(turns);
            let prompt = rest.prompt(line, &self.model.text)?;
            if prompt.ids.len() <= most || rest.is_empty() {
                return Ok((rest, turns, prompt));
            }
            turns += 1;
        }
    }

    /// Generates on the screen behind the first `kept` tokens of the prompt; the last line is ended whatever happens.
    fn answer(&mut self, prompt: &Prompt, kept: usize, out: &mut Output) -> Result<Answer, Failure> {
        let ask = &Ask {
            prompt: &prompt.ids[kept..],
            max_tokens: self.max_tokens,
            sampling: Sampling { seed: self.turn_seed(), ..self.sampling.clone() },
            form: prompt.form,
            stop: &self.stop,
            structure: self.structure.as_ref(),
            count: false,
        };
        let (model, session, recordings) = (&mut self.model, &mut self.session, &mut self.recordings);
        let mut screen = Screen::new(out);
        let show = &mut |delta: &ReasoningDelta| screen.show(delta);
        let answer =
            self.interrupt.during(|cancel| answer::generate(model, session, ask, cancel, recordings, show));
        screen.end().and(answer)
    }

    /// Says what the conversation came to, and ends the files.
    fn close(mut self) -> Result<(), Failure> {
        let Totals { answers, stats, stretch, read, reused } = &self.totals;
        let model = &mut self.model;
        let hindsight = Hindsight::of(&mut model.engine, stretch);
        if *answers > 0 {
            let plural = if *answers == 1 { "" } else { "s" };
            let what = format!("{answers} answer{plural}: {}", report::summary(stats));
            closing::show(&mut model.engine, &model.roots, &hindsight, &what, *read);
        }
        let mut settings = report::settings_json(&model.engine, &self.sampling, self.max_tokens);
        settings.insert("seed".to_owned(), json!(self.sampling.seed));
        settings.insert("warm_up".to_owned(), json!(self.warm_up));
        let mut all = json!({
            "answers": answers,
            "prompt_tokens": stats.prompt_tokens,
            "reused_tokens": reused,
            "new_tokens": stats.new_tokens,
            "timings": report::stats_json(stats, model.load_time),
            "hindsight": hindsight.json(),
            "model": report::model_json(&model.dir, &model.engine),
            "settings": settings,
        });
        let (load, work) = (model.load_time, stats.prefill + stats.decode);
        closing::add_cost(&mut all, &mut model.engine, &model.roots, load, work);
        self.recordings.finish(&all)
    }

    /// A turn has its own seed, so that asking the same again need not answer the same again, and a seeded
    /// conversation can still be repeated.
    fn turn_seed(&self) -> u64 {
        self.sampling.seed.wrapping_add(self.totals.answers as u64)
    }

    fn obey(&mut self, command: &str, out: &mut Output) -> Result<Next, Failure> {
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        match (name, rest.trim()) {
            ("quit" | "exit", _) => return Ok(Next::Quit),
            ("help", _) => out.write(HELP)?,
            ("stats", _) => out.write(&self.stats())?,
            ("reset", _) => {
                self.conversation.clear();
                console::note("the conversation starts anew");
            }
            ("system", "") => out.write(&match self.conversation.system() {
                Some(text) => format!("{text}\n"),
                None => "no instructions are set; /system TEXT sets them\n".to_owned(),
            })?,
            ("system", text) => {
                self.conversation.set_system(text);
                console::note("the instructions are set; what was said so far stays");
            }
            ("save", "") => return Err(Failure::usage("/save needs a file name: /save talk.json")),
            ("save", file) => self.save(Path::new(file))?,
            _ => {
                return Err(Failure::usage(format!(
                    "there is no command /{name}; /help lists the commands, a space before the slash makes it a message"
                )));
            }
        }
        Ok(Next::Continue)
    }

    fn save(&mut self, path: &Path) -> Result<(), Failure> {
        let failed = |error: io::Error| {
            let advice = match error.kind() {
                io::ErrorKind::AlreadyExists => "choose a name that is free",
                _ => "choose another place",
            };
            Failure::runtime(format!("cannot write {}: {error}; {advice}", path.display()))
        };
        Protected::of_run(&self.model.roots, &[]).check(path, "the conversation to")?;
        let messages: Vec<_> = self
            .conversation
            .messages()
            .iter()
            .map(|message| json!({"role": message.role.name(), "content": message.content}))
            .collect();
        let talk = json!({"model": self.model.dir.display().to_string(), "messages": messages});
        let mut file = self.create(path).map_err(failed)?;
        writeln!(file, "{talk:#}").map_err(failed)?;
        self.saved = Some(path.to_owned());
        console::note(&format!("saved to {}", path.display()));
        Ok(())
    }

    /// A new file, or the one that was saved before; nothing else is overwritten.
    fn create(&self, path: &Path) -> io::Result<File> {
        match self.saved.as_deref() == Some(path) {
            true => OpenOptions::new().write(true).truncate(true).create(true).open(path),
            false => File::create_new(path),
        }
    }

    fn stats(&self) -> String {
        let (engine, stats) = (&self.model.engine, &self.totals.stats);
        let plan = engine.plan();
        let speed = |rate: Option<f64>| rate.map_or("not measured".to_owned(), |r| format!("{r:.1} tok/s"));
        format!(
            "conversation  {} of {} tokens of context\n\
             prompts       {} tokens, {}\n\
             answers       {}: {} tokens, {}\n\
             memory        {} planned of {}, {} expert slots\n\
             {}{}\n",
            self.conversation.tokens(),
            plan.context,
            stats.prompt_tokens,
            speed(report::rate(stats.prompt_tokens, stats.prefill)),
            self.totals.answers,
            stats.new_tokens,
            speed(report::decode_rate(stats)),
            ByteSize(plan.total()),
            ByteSize(plan.budget),
            plan.resident_slots(),
            report::experts_summary(&engine.counters()),
            report::deviations(engine.options()),
        )
    }
}
