//! What a run writes to files beside its result: `--route-trace`, the experts that every token used, and
//! `--record`, what every pass cost.

use std::fs::File;
use std::path::{Path, PathBuf};

use forebay_engine::{Engine, PassStats, RouteRecorder};
use forebay_model::Trace;
use forebay_tiers::routes::file::{Header, RouteFileError};
use serde_json::Value;

use crate::args::RecordArgs;
use crate::failure::Failure;
use crate::identity;
use crate::outputs::Protected;
use crate::record::Record;

/// The files of one run; none, if none was asked for.
#[derive(Default)]
pub struct Recordings {
    routes: Option<Routes>,
    record: Option<Record>,
}

struct Routes {
    path: PathBuf,
    state: State,
}

/// The header names the model, which is opened after the file.
enum State {
    New(File),
    Recording(RouteRecorder<File>),
}

impl Recordings {
    /// Makes the files, before the model is loaded: a path that cannot be written should not take minutes to show.
    /// None of them replaces a file of the `roots` that the model is read from, or one of the texts at `inputs`.
    pub fn create(args: &RecordArgs, roots: &[PathBuf], inputs: &[Option<&Path>]) -> Result<Self, Failure> {
        if args.record.is_none() && args.route_trace.is_none() {
            return Ok(Self::default());
        }
        let mut protected = Protected::of_run(roots, inputs);
        let mut claim = |path: &Option<PathBuf>, what| {
            path.as_deref()
                .map(|path| Ok::<_, Failure>((path.to_owned(), protected.claim(path, what)?)))
                .transpose()
        };
        // Nothing is made unless all can be.
        let routes = claim(&args.route_trace, "the route trace")?;
        let record = claim(&args.record, "the record")?;
        let routes =
            routes.map(|(path, claim)| Ok::<_, Failure>(Routes { path, state: State::New(claim.create()?) }));
        let record = record.map(|(path, claim)| Ok::<_, Failure>(Record::new(claim.create()?, &path)));
        Ok(Self { routes: routes.transpose()?, record: record.transpose()? })
    }

    /// Says whose routes follow, and how the model is run.
    pub fn begin(&mut self, dir: &Path, engine: &Engine, settings: &[(&str, String)]) -> Result<(), Failure> {
        let Some(Routes { path, state }) = self.routes.take() else { return Ok(()) };
        let State::New(file) = state else { return Ok(()) };
        let begin = || {
            let moe = &engine.spec().moe;
            let mut header = Header::new(&identity::of(dir, engine)?, moe.experts, moe.top_k);
            let usual = [
                ("family", engine.spec().family.to_string()),
                ("chunk", engine.plan().chunk.to_string()),
                ("arith", engine.options().arith.to_string()),
            ];
            for (name, value) in usual.iter().chain(settings) {
                header.settings.insert((*name).to_owned(), value.clone());
            }
            RouteRecorder::new(file, header, usize::MAX)
        };
        let recorder = begin().map_err(|error: RouteFileError| incomplete(&path, &error))?;
        self.routes = Some(Routes { path, state: State::Recording(recorder) });
        Ok(())
    }

    /// Tokens at positions below `end` are a prompt, the others an answer. Until this is said, all are a prompt.
    pub fn prompt_ends(&mut self, end: usize) {
        if let Some(Routes { state: State::Recording(recorder), .. }) = &mut self.routes {
            recorder.prompt_ends(end);
        }
    }

    /// Whoever is to see what passes choose, and what they cost.
    pub fn watch(&mut self) -> (Option<&mut dyn Trace>, impl FnMut(&PassStats)) {
        let trace = self.routes.as_mut().and_then(|routes| match &mut routes.state {
            State::New(_) => None,
            State::Recording(recorder) => Some(recorder as &mut dyn Trace),
        });
        let record = &mut self.record;
        (trace, move |stats: &PassStats| record.iter_mut().for_each(|record| record.pass(stats)))
    }

    /// Ends the files, the record with the whole run.
    pub fn finish(self, run: &Value) -> Result<(), Failure> {
        if let Some(Routes { path, state: State::Recording(recorder) }) = self.routes {
            recorder.finish().map_err(|error| incomplete(&path, &error))?;
        }
        self.record.map_or(Ok(()), |record| record.finish(run))
    }
}

/// The recording is not complete.
fn incomplete(path: &Path, error: &RouteFileError) -> Failure {
    Failure::runtime(format!("{} is incomplete: {error}", path.display()))
}
