//! What the typed options mean: which model, which instruction set, which sampling.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::ops::Bound;
use std::path::{Path, PathBuf};

use forebay_engine::Sampling;
use forebay_kernels::{Isa, Kernels};
use forebay_store::config::ConfigFile;

use crate::args::AnswerArgs;
use crate::bundled;
use crate::console;
use crate::dirs;
use crate::failure::Failure;

/// Temperature where neither the user nor the model says.
const TEMPERATURE: f32 = 0.7;
/// top-p where neither the user nor the model says.
const TOP_P: f32 = 0.9;

/// The folder to use: the one asked for, `FOREBAY_MODEL`, or the bundled model, unpacked.
pub fn model_dir(asked: Option<&Path>) -> Result<PathBuf, Failure> {
    if let Some(dir) = named_model(asked) {
        return Ok(dir);
    }
    let cache = dirs::cache().unwrap_or_else(|| {
        let cache = dirs::temporary_cache();
        let shown = cache.display();
        console::note(&format!(
            "no home folder is known; the bundled model goes to {shown}, or where FOREBAY_CACHE says"
        ));
        cache
    });
    let unpacked = bundled::unpack(&cache).map_err(|error| Failure::runtime(error.to_string()))?;
    for name in &unpacked.repaired {
        console::note(&format!("{name} of the bundled model was damaged on disk and has been written again"));
    }
    console::note("using the bundled demonstration model; --model DIR takes another");
    Ok(unpacked.dir)
}

/// The folder asked for, or that of `FOREBAY_MODEL`.
pub fn named_model(asked: Option<&Path>) -> Option<PathBuf> {
    let set = || std::env::var_os("FOREBAY_MODEL").filter(|value| !value.is_empty()).map(PathBuf::from);
    asked.map(Path::to_owned).or_else(set)
}

/// The kernels to use: those of the instruction set asked for, or the fastest.
pub fn kernels(asked: Option<Isa>) -> Result<Kernels, Failure> {
    let chosen = asked.map_or(Ok(Kernels::detect()), Kernels::with_isa);
    chosen.map_err(|error| Failure::usage(error.to_string()))
}

/// What `generation_config.json` says about sampling; absent fields are `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ModelDefaults {
    greedy: bool,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<usize>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
}

impl ModelDefaults {
    /// Reads the file of a model folder, if there is one.
    pub fn read(dir: &Path) -> Result<Self, Failure> {
        let Some(file) = ConfigFile::read_optional(dir, "generation_config.json")? else {
            return Ok(Self::default());
        };
        let root = file.root();
        let above_zero = (Bound::Excluded(0.0), Bound::Included(1.0));
        let up_to_two = (Bound::Excluded(0.0), Bound::Included(2.0));
        Ok(Self {
            greedy: root.opt_bool("do_sample")? == Some(false),
            temperature: root.opt_f64("temperature", 0.0..=2.0)?.map(|value| value as f32),
            top_p: root.opt_f64("top_p", above_zero)?.map(|value| value as f32),
            top_k: root.opt_usize("top_k", 0..=usize::MAX)?,
            min_p: root.opt_f64("min_p", 0.0..=1.0)?.map(|value| value as f32),
            repetition_penalty: root.opt_f64("repetition_penalty", up_to_two)?.map(|value| value as f32),
        })
    }

    /// The user's wishes, completed by the model's defaults and then by ours.
    pub fn sampling(&self, args: &AnswerArgs) -> Sampling {
        let model = if self.greedy { 0.0 } else { self.temperature.unwrap_or(TEMPERATURE) };
        let temperature = args.temperature.unwrap_or(model);
        if temperature == 0.0 {
            let idle = [
                ("--top-p", args.top_p.is_some()),
                ("--top-k", args.top_k.is_some()),
                ("--min-p", args.min_p.is_some()),
            ];
            for (name, _) in idle.into_iter().filter(|(_, given)| *given) {
                console::note(&format!("{name} changes nothing at temperature 0; add --temperature"));
            }
        }
        Sampling {
            temperature,
            top_p: args.top_p.or(self.top_p).unwrap_or(TOP_P),
            top_k: args.top_k.map(|k| k as usize).or(self.top_k).unwrap_or(0),
            min_p: args.min_p.or(self.min_p).unwrap_or(0.0),
            repetition_penalty: args.repetition_penalty.or(self.repetition_penalty).unwrap_or(1.0),
            presence_penalty: args.presence_penalty,
            frequency_penalty: args.frequency_penalty,
            logit_bias: args.logit_bias.clone(),
            logprobs: None,
            seed: args.seed.unwrap_or_else(random_seed),
        }
    }
}

/// A seed that differs from run to run; 32 bits, so that every JSON reader keeps it exactly.
fn random_seed() -> u64 {
    // The standard library seeds its hash maps from the system's random numbers.
    RandomState::new().build_hasher().finish() >> 32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn defaults(text: &str) -> Result<ModelDefaults, Failure> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("generation_config.json"), text).unwrap();
        ModelDefaults::read(dir.path())
    }

    fn asked(temperature: Option<f32>, top_p: Option<f32>) -> AnswerArgs {
        AnswerArgs { temperature, top_p, seed: Some(1), ..AnswerArgs::default() }
    }

    fn values(defaults: ModelDefaults, args: &AnswerArgs) -> (f32, f32) {
        let sampling = defaults.sampling(args);
        (sampling.temperature, sampling.top_p)
    }

    #[test]
    fn the_user_wins_over_the_model_and_the_model_over_us() {
        let none = ModelDefaults::read(tempfile::tempdir().unwrap().path()).unwrap();
        assert_eq!(values(none, &asked(None, None)), (0.7, 0.9));
        let model = defaults(r#"{"do_sample": true, "temperature": 1.0, "top_p": 0.95}"#).unwrap();
        assert_eq!(values(model, &asked(None, None)), (1.0, 0.95));
        assert_eq!(values(model, &asked(Some(0.3), None)), (0.3, 0.95));
        let greedy = defaults(r#"{"do_sample": false, "temperature": 1.0}"#).unwrap();
        assert_eq!(values(greedy, &asked(None, None)), (0.0, 0.9));
        assert_eq!(values(greedy, &asked(Some(0.5), Some(0.8))), (0.5, 0.8));
    }

    #[test]
    fn what_else_the_model_says_counts_too() {
        let model = defaults(r#"{"top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1}"#).unwrap();
        let values = |args: &AnswerArgs| {
            let sampling = model.sampling(args);
            (sampling.top_k, sampling.min_p, sampling.repetition_penalty)
        };
        assert_eq!(values(&asked(None, None)), (40, 0.1, 1.1));
        let own = AnswerArgs {
            top_k: Some(0),
            min_p: Some(0.0),
            repetition_penalty: Some(1.0),
            ..asked(None, None)
        };
        assert_eq!(values(&own), (0, 0.0, 1.0));
    }

    #[test]
    fn a_bad_default_names_its_field() {
        for text in [
            r#"{"top_k": -1}"#,
            r#"{"min_p": 2}"#,
            r#"{"repetition_penalty": 0}"#,
            r#"{"temperature": 3}"#,
            r#"{"top_p": 0}"#,
            r#"{"do_sample": "no"}"#,
        ] {
            let Err(Failure::Error { message, .. }) = defaults(text) else { panic!("{text}") };
            assert!(message.contains("generation_config.json"), "{message}");
        }
    }
}
