//! `forebay run`: one prompt, one answer.

use forebay_engine::{Finish, Inspection, Session};
use forebay_text::template::Role;
use forebay_text::{ChatMessage, ReasoningDelta, RenderOptions};
use serde_json::{Value, json};

use crate::answer::{self, Answer, Ask, Form, Screen};
use crate::args::RunArgs;
use crate::closing;
use crate::console::{self, Output};
use crate::failure::Failure;
use crate::hindsight::{Hindsight, Stretch};
use crate::interrupt::Interrupt;
use crate::load::{self, Loaded, TextSide};
use crate::prefixes::Keeper;
use crate::prompt::{self, Limit, Source};
use crate::recordings::Recordings;
use crate::report;
use crate::settings::{self, ModelDefaults};
use crate::structure::Structure;

/// Runs the verb.
pub fn run(args: &RunArgs) -> Result<(), Failure> {
    let dir = settings::model_dir(args.engine.model.as_deref())?;
    let text = TextSide::read(&dir)?;
    let mut sampling = ModelDefaults::read(&dir)?.sampling(&args.answer);
    sampling.logprobs = args.logprobs.map(usize::from);
    let structure = Structure::read(&args.structure, &text.tokenizer)?;
    let mut found = None;
    // Headers are read before a prompt that may be too long is, and not again.
    let limit = || {
        let Inspection { snapshot, plan, memory } = load::inspect_folder(&dir, &args.options())?;
        let plan = plan?;
        let limit = Limit::of_context(plan.context, &text.tokenizer);
        found = Some(Inspection { snapshot, plan: Ok(plan), memory });
        Ok(limit)
    };
    let (typed, source) = prompt::read(args.prompt.as_deref(), args.file.as_deref(), "prompt", limit)?;
    let (ids, form) = encode(args, &text, &typed, source)?;
    let interrupt = Interrupt::install()?;
    let roots = load::roots(&dir, &args.engine.disk.mirror);
    let mut recordings = Recordings::create(&args.files, &roots, &[args.file.as_deref()])?;
    let mut model = Loaded::open(dir, found, text, args.options(), &args.engine.disk)?;
    let mut session = Session::new(&model.engine);
    if args.prefixes.prefix_store.is_none() && args.prefixes.prefix_store_size.is_some() {
        return Err(Failure::usage("--prefix-store-size needs --prefix-store: else nothing is kept"));
    }
    let mut keeper = Keeper::begin(
        &model.dir,
        &mut model.engine,
        args.prefixes.prefix_store.as_deref(),
        args.prefixes.limit(),
    );
    let reused = session.start_from(&mut model.engine, &ids)?.tokens;
    let max_tokens = args.answer.max_tokens as usize;
    let count = args.json || !(Screen::is_live() || args.answer.think);
    let seed = args.answer.seed.map(|seed| ("seed", seed.to_string()));
    let settings: Vec<_> = [("prompt_tokens", ids.len().to_string())].into_iter().chain(seed).collect();
    recordings.begin(&model.dir, &model.engine, &settings)?;
    let (stop, structure) = (&args.answer.stop[..], structure.as_ref());
    let ask = Ask { prompt: &ids[reused..], max_tokens, sampling, form, stop, structure, count };

    let mut out = Output::new();
    let answer = if args.json {
        let silent = &mut |_: &ReasoningDelta| Ok(());
        interrupt.during(|cancel| {
            answer::generate(&mut model, &mut session, &ask, cancel, &mut recordings, silent)
        })?
    } else {
        let mut screen = Screen::new(&mut out);
        let show = &mut |delta: &ReasoningDelta| screen.show(delta);
        let answer = interrupt
            .during(|cancel| answer::generate(&mut model, &mut session, &ask, cancel, &mut recordings, show));
        // What was written before an error ends with a newline too.
        screen.end().and(answer)?
    };
    model.remember();
    let hindsight = Hindsight::of(&mut model.engine, &Stretch::of(&answer.stats));
    let mut result = result(&mut model, &ask, &answer, &hindsight, args);
    result["reused_tokens"] = json!(reused);
    if args.json {
        out.json(&result)?;
    } else {
        if let Some(note) = answer.ending_note(max_tokens, model.engine.plan().context) {
            console::note(&note);
        }
        let (what, read) = (report::summary(&answer.stats), answer.stats.experts.step_bytes());
        closing::show(&mut model.engine, &model.roots, &hindsight, &what, read);
    }
    recordings.finish(&result)?;
    keeper.keep(&mut model.engine);
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

fn result(
    model: &mut Loaded,
    ask: &Ask<'_>,
    answer: &Answer,
    hindsight: &Hindsight,
    args: &RunArgs,
) -> Value {
    let mut settings = report::settings_json(&model.engine, &ask.sampling, ask.max_tokens);
    settings.insert("think".to_owned(), json!(args.answer.think));
    let template = (!args.no_template).then(|| model.text.template.origin());
    settings.insert("template".to_owned(), json!(template));
    settings.insert("stop".to_owned(), json!(args.answer.stop));
    settings.insert("structure".to_owned(), json!(args.structure.kind()));
    let stats = &answer.stats;
    let mut all = json!({
        "answer": answer.content,
        "reasoning": answer.reasoning,
        "finish": report::finish_name(answer.finish),
        "token_ids": answer.tokens.iter().map(|token| token.id).collect::<Vec<_>>(),
        "prompt_tokens": stats.prompt_tokens,
        "new_tokens": stats.new_tokens,
        "seed": ask.sampling.seed,
        "timings": report::stats_json(stats, model.load_time),
        "hindsight": hindsight.json(),
        "model": report::model_json(&model.dir, &model.engine),
        "settings": settings,
    });
    let (load, work) = (model.load_time, stats.prefill + stats.decode);
    closing::add_cost(&mut all, &mut model.engine, &model.roots, load, work);
    if args.logprobs.is_some() {
        all["logprobs"] = report::logprobs_json(&answer.tokens, &model.text.tokenizer);
    }
    all
}
