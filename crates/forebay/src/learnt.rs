//! What earlier runs found out about drafting with a model, for this one: a small file in the cache folder, one for every
//! way of running the model.

use std::path::{Path, PathBuf};

use forebay_engine::draft::{Controller, Known, KnownError};
use forebay_engine::{Drafting, Engine};
use forebay_io::file::read_regular;
use sha2::{Digest, Sha256};

use crate::{bundled, console, dirs, identity};

/// Longest file that is read: a whole one has less than 2 KB.
const LONGEST: u64 = 1 << 16;

/// Where it lies what a run like this one found out.
pub struct Learnt {
    path: PathBuf,
}

impl Learnt {
    /// Lets the engine begin with what is known about running the model in `dir` like this. `None` where nothing is chosen
    /// by measurements. What is wrong with the file is said and no reason not to run.
    pub fn begin(dir: &Path, engine: &mut Engine) -> Option<Self> {
        if engine.options().drafting != Drafting::Auto {
            return None;
        }
        let name = name(&identity::of(dir, engine).ok()?, engine);
        let folder = dirs::cache().unwrap_or_else(dirs::temporary_cache).join("drafting");
        let learnt = Self { path: folder.join(format!("{name}.txt")) };
        if learnt.path.exists() {
            match learnt.read() {
                Ok(known) => engine.set_controller(Controller::knowing(known)),
                Err(what) => learnt.say("cannot be used and is written anew", &what),
            }
        }
        Some(learnt)
    }

    /// Keeps what the engine knows now.
    pub fn end(&self, engine: &Engine) {
        if let Some(known) = engine.drafting().known()
            && let Err(error) = bundled::replace(&self.path, known.to_string().as_bytes())
        {
            self.say("cannot be written", &error.to_string());
        }
    }

    fn read(&self) -> Result<Known, String> {
        let bytes = read_regular(&self.path, LONGEST).map_err(|error| error.to_string())?;
        let text = String::from_utf8(bytes).map_err(|error| error.to_string())?;
        text.parse().map_err(|error: KnownError| error.to_string())
    }

    fn say(&self, what: &str, why: &str) {
        console::note(&format!("what is known about drafting {what} ({}): {why}", self.path.display()));
    }
}

/// One name for runs that take the same time: of the same model, on the same threads, with about as many experts in
/// memory, read in the same way.
fn name(identity: &str, engine: &Engine) -> String {
    let (options, plan) = (engine.options(), engine.plan());
    let experts: usize = plan.demand.layers.iter().map(|layer| layer.experts).sum();
    // A budget that is a share of what is free is never the same twice.
    let sixteenths = (16 * plan.resident_slots()).checked_div(experts);
    let way = format!(
        "{identity} {} {} {sixteenths:?} {:?} {:?} {:?} {:?} {}",
        engine.threads(),
        engine.isa(),
        plan.expert_slots(),
        options.io.throttle,
        options.arith,
        options.quantise,
        engine.way().backend,
    );
    bundled::hex(&Sha256::digest(way)[..16])
}
