//! `forebay run`: one prompt, one answer.

use forebay_engine::{Finish, Session};
use forebay_model::Trace;
use forebay_text::template::Role;
use forebay_text::{ChatMessage, ReasoningDelta, RenderOptions};
use serde_json::{Value, json};

use crate::answer::{self, Answer, Ask, Form, Screen};
use crate::args::RunArgs;
use crate::console::{self, Output};
use crate::failure::Failure;
use crate::hindsight::Hindsight;
use crate::interrupt::Interrupt;
use crate::load::{Loaded, TextSide};
use crate::prompt::{self, Limit, Source};
use crate::record::Record;
use crate::report;
use crate::route_trace;
use crate::settings::{self, ModelDefaults};

/// Runs the verb.
pub fn run(args: &RunArgs) -> Result<(), Failure> {
    let dir = settings::model_dir(args.engine.model.as_deref())?;
    let text = TextSide::read(&dir)?;
    let sampling = ModelDefaults::read(&dir)?.sampling(&args.answer);
    let limit = || Limit::of_model(&dir, &args.engine.options(), &text.tokenizer);
    let (typed, source) = prompt::read(args.prompt.as_deref(), args.file.as_deref(), "prompt", limit)?;
    let (ids, form) = encode(args, &text, &typed, source)?;
    let interrupt = Interrupt::install()?;
    if args.record.is_some() && args.record == args.route_trace {
        return Err(Failure::usage("--record and --route-trace cannot share a file; name two"));
    }
    // Before the model is loaded: a path that cannot be written should not take minutes to show.
    let recording = args.route_trace.as_deref().map(|path| route_trace::create(path, &dir)).transpose()?;
    let mut record = args.record.as_deref().map(|path| Record::create(path, &dir)).transpose()?;
    let mut model = Loaded::open(dir, text, &args.engine)?;
    let mut session = Session::new(&model.engine);
    let max_tokens = args.answer.max_tokens as usize;
    let count = args.json || !(Screen::is_live() || args.answer.think);
    let mut recorder = recording
        .map(|file| route_trace::begin(file, &model, args, ids.len()))
        .transpose()
        .map_err(|error| route_trace::failed(args, &error))?;
    let ask = Ask { prompt: &ids, max_tokens, sampling, form, count };

    let mut out = Output::new();
    let trace = recorder.as_mut().map(|recorder| recorder as &mut dyn Trace);
    let answer = if args.json {
        let silent = &mut |_: &ReasoningDelta| Ok(());
        interrupt.during(|cancel| {
            answer::generate(&mut model, &mut session, &ask, cancel, trace, record.as_mut(), silent)
        })?
    } else {
        let mut screen = Screen::new(&mut out);
        let show = &mut |delta: &ReasoningDelta| screen.show(delta);
        let answer = interrupt.during(|cancel| {
            answer::generate(&mut model, &mut session, &ask, cancel, trace, record.as_mut(), show)
        });
        // What was written before an error ends with a newline too.
        screen.end().and(answer)?
    };
    model.remember();
    let hindsight = Hindsight::of(&mut model.engine, &answer.stats, answer.disk_time);
    if let Some(recorder) = recorder {
        recorder.finish().map_err(|error| route_trace::failed(args, &error))?;
    }
    if args.json {
        out.json(&result(&model, &ask, &answer, &hindsight, args))?;
    } else {
        if let Some(note) = answer.ending_note(max_tokens, model.engine.plan().context) {
            console::note(&note);
        }
        console::diagnose(&format!("{}\n", report::summary(&answer.stats, model.engine.options())));
        if let Some(line) = hindsight.line() {
            console::diagnose(&format!("{line}\n"));
        }
    }
    if let Some(record) = record {
        let mut run = result(&model, &ask, &answer, &hindsight, args);
        run["phases_s"] = report::phases_json(session.profile());
        record.finish(&run)?;
    }
    if answer.finish == Finish::Cancelled { Err(Failure::Interrupted) } else { Ok(()) }
}

/// The prompt's ids and the form that the answer will have.
fn encode(args: &RunArgs, text: &TextSide, typed: &str, source: Source) -> Result<(Vec<u32>, Form), Failure> {
    if args.no_template {
        return Ok((text.tokenizer.encode_raw(typed), Form::Raw));
    }
    let question = if source == Source::Stream { prompt::without_last_newline(typed) } else { typed };
    let system = args.answer.system.iter().map(|text| ChatMessage::text(Role::System, text.as_str()));
    let messages: Vec<ChatMessage> = system.chain([ChatMessage::text(Role::User, question)]).collect();
    let options = RenderOptions {
        enable_thinking: Some(args.answer.think),
        add_generation_prompt: true,
        ..RenderOptions::default()
    };
    let rendered = text.template.render(&messages, &options)?;
    Ok((text.tokenizer.encode_rendered(&rendered)?, Form::of(&rendered)))
}

fn result(model: &Loaded, ask: &Ask<'_>, answer: &Answer, hindsight: &Hindsight, args: &RunArgs) -> Value {
    let mut settings = report::settings_json(&model.engine, &ask.sampling, ask.max_tokens);
    settings.insert("think".to_owned(), json!(args.answer.think));
    let template = (!args.no_template).then(|| model.text.template.origin());
    settings.insert("template".to_owned(), json!(template));
    json!({
        "answer": answer.content,
        "reasoning": answer.reasoning,
        "finish": report::finish_name(answer.finish),
        "token_ids": answer.ids,
        "prompt_tokens": answer.stats.prompt_tokens,
        "new_tokens": answer.stats.new_tokens,
        "seed": ask.sampling.seed,
        "timings": report::stats_json(&answer.stats, model.load_time),
        "experts": report::experts_json(&answer.stats.experts),
        "hindsight": hindsight.json(),
        "model": report::model_json(&model.dir, &model.engine),
        "settings": settings,
    })
}
