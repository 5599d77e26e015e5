//! The models of a server: their names and folders, what is known of each, and how it comes into memory.

use std::path::{Path, PathBuf};
use std::time::Instant;

use forebay_core::ByteSize;
use forebay_engine::{Engine, EngineOptions, Inspection, Limits};
use forebay_server::fleet::LoadProgress;
use forebay_server::{Model, Models, Opened, Served};
use forebay_text::StopSet;

use crate::args::{AnswerArgs, ServeArgs};
use crate::console;
use crate::failure::Failure;
use crate::load::{self, TextSide};
use crate::prefixes::Keeper;
use crate::settings::{self, ModelDefaults};

/// The name of the bundled model.
const BUNDLED: &str = "forebay-demo";
/// Longest name of a model.
const MAX_NAME: usize = 200;

/// A model that is to be served.
pub struct Wanted {
    /// The name that clients use.
    pub name: String,
    /// Its folder.
    pub dir: PathBuf,
}

/// The models that are asked for: one at least, with names that differ.
pub fn wanted(args: &ServeArgs) -> Result<Vec<Wanted>, Failure> {
    let served_name = args.served_name.as_ref().filter(|name| !name.is_empty());
    if served_name.is_some() && (args.model.len() > 1 || args.model.iter().any(|model| model.name.is_some()))
    {
        return Err(Failure::usage("--served-name names one model; write --model NAME=DIR instead"));
    }
    if args.model.len() > 1 && !args.disk.mirror.is_empty() {
        return Err(Failure::usage(
            "--mirror is for one model: files of several may have the same names; leave it out, or start a server for each",
        ));
    }
    let mut all: Vec<Wanted> = Vec::new();
    if args.model.is_empty() {
        let dir = settings::model_dir(None)?;
        let usual = || settings::named_model(None).map_or(BUNDLED.to_owned(), |_| folder_name(&dir));
        let name = served_name.cloned().unwrap_or_else(usual);
        all.push(Wanted { name, dir });
    }
    for model in &args.model {
        let (dir, given) = (model.dir.clone(), model.name.as_ref().or(served_name));
        let name = given.cloned().unwrap_or_else(|| folder_name(&dir));
        let shown = console::one_line(&name);
        if model.name.is_some() && (name.is_empty() || name.len() > MAX_NAME || shown != name) {
            return Err(Failure::usage(format!(
                "a model cannot be called {shown:?}: use 1 to {MAX_NAME} bytes of text on one line"
            )));
        }
        if let Some(same) = all.iter().find(|other| other.name == name) {
            return Err(Failure::usage(format!(
                "{} and {} would both be called {name}; write --model NAME=DIR",
                same.dir.display(),
                dir.display()
            )));
        }
        all.push(Wanted { name, dir });
    }
    Ok(all)
}

fn folder_name(dir: &Path) -> String {
    // The folder may be given as a dot, or by a link.
    let full = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    let name = full.file_name().map(|name| console::one_line(&name.to_string_lossy()));
    name.unwrap_or_else(|| "model".to_owned())
}

/// Loads the first model and looks at the others, so that what is wrong with one is said at the start.
pub fn models(args: &ServeArgs, wanted: Vec<Wanted>, limits: Limits) -> Result<Models, Failure> {
    let source = |dir: &Path| Source {
        dir: dir.to_owned(),
        options: args.options(),
        mirrors: args.disk.mirror.clone(),
        prefixes: args.prefixes.prefix_store.clone(),
        limit: args.prefixes.limit(),
    };
    let mut wanted = wanted.into_iter();
    let Some(first) = wanted.next() else { return Err(Failure::usage("there is no model to serve")) };
    let text = TextSide::read(&first.dir)?;
    let sampling = ModelDefaults::read(&first.dir)?.sampling(&AnswerArgs::default());
    // Planned while memory is as free as it will be for each of them.
    let others =
        wanted.map(|wanted| looked_at(wanted.name, source(&wanted.dir))).collect::<Result<Vec<_>, _>>()?;
    let (started, source) = (Instant::now(), source(&first.dir));
    let opened = source.open(load::inspect_folder(&first.dir, &source.options)?, &|_, _| ())?;
    let engine = &opened.engine;
    let model = Model {
        id: first.name,
        stops: StopSet::new(engine.stop_ids().iter().copied(), &text.tokenizer),
        tokenizer: text.tokenizer,
        template: text.template,
        sampling,
        context: engine.plan().context,
        family: engine.spec().family.clone(),
        bytes: sizes(engine.weight_files().iter()),
        created: forebay_server::ids::now(),
    };
    let first = source.served(model);
    Ok(Models {
        served: std::iter::once(first).chain(others).collect(),
        first: opened,
        took: started.elapsed(),
        limits,
        idle_unload: args.idle_unload.0,
    })
}

/// A model of which the headers are read, and nothing is loaded.
fn looked_at(name: String, source: Source) -> Result<Served, Failure> {
    let text = TextSide::read(&source.dir)?;
    let sampling = ModelDefaults::read(&source.dir)?.sampling(&AnswerArgs::default());
    let Inspection { snapshot, plan, .. } = load::inspect_folder(&source.dir, &source.options)?;
    let model = Model {
        id: name,
        stops: StopSet::new(snapshot.stop_ids.iter().copied(), &text.tokenizer),
        tokenizer: text.tokenizer,
        template: text.template,
        sampling,
        context: plan?.context,
        family: snapshot.spec.family.clone(),
        bytes: sizes(snapshot.catalog.shards().iter().map(|shard| &shard.path)),
        created: forebay_server::ids::now(),
    };
    Ok(source.served(model))
}

fn sizes<'p>(files: impl Iterator<Item = &'p PathBuf>) -> u64 {
    files.map(|path| std::fs::metadata(path).map_or(0, |meta| meta.len())).sum()
}

/// Where a model comes from.
struct Source {
    dir: PathBuf,
    options: EngineOptions,
    mirrors: Vec<PathBuf>,
    prefixes: Option<PathBuf>,
    limit: ByteSize,
}

impl Source {
    fn open(&self, found: Inspection, tell: &dyn Fn(u64, u64)) -> Result<Opened, Failure> {
        let (mut engine, afterwards) = load::weights(&self.dir, found, self.options, &self.mirrors, tell)?;
        // What is new is written by the scheduler, when nobody waits.
        Keeper::begin(&self.dir, &mut engine, self.prefixes.as_deref(), self.limit);
        let afterwards = move |mut engine: Engine| {
            afterwards.remember(&mut engine);
            drop(engine);
            forebay_io::give_back_freed();
        };
        Ok(Opened { engine, afterwards: Box::new(afterwards) })
    }

    /// The model, which comes into memory with the context that clients were told, whatever memory is free by then.
    fn served(self, model: Model) -> Served {
        let source = Self { options: EngineOptions { context: Some(model.context), ..self.options }, ..self };
        let open = move |progress: &LoadProgress| {
            let opened = load::inspect_folder(&source.dir, &source.options)
                .and_then(|found| source.open(found, &|done, total| progress.set(done, total)));
            opened.map_err(|failure| match failure {
                Failure::Error { message, .. } => message,
                other => format!("it ended early ({:?})", other.exit()),
            })
        };
        Served { model, open: Box::new(open) }
    }
}
