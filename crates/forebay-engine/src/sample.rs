//! From logits to a token.
//!
//! One fixed order of operations (docs/sampling.md): logits that are not finite are dropped, log-probabilities are
//! taken, a grammar's mask, logit bias, repetition penalty, frequency and presence penalty, temperature, min-p, top-k,
//! softmax, top-p, draw. Ties go to the lower token id everywhere.

mod logprobs;
mod penalties;
mod sampler;

pub use logprobs::{Logprobs, log_probability};
pub use sampler::{Sampler, argmax};

/// Most alternatives that are listed beside a chosen token.
pub const MAX_LOGPROBS: usize = 20;
/// The largest logit bias, either way; its negative bans a token.
pub const MAX_BIAS: f32 = 100.0;

/// How the next token is chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy; up to 2.
    pub temperature: f32,
    /// Most tokens kept; 0 keeps everything.
    pub top_k: usize,
    /// Smallest probability mass kept, in (0, 1]; 1 keeps everything.
    pub top_p: f32,
    /// Tokens less likely than this share of the likeliest one are dropped, in [0, 1]; 0 keeps everything.
    pub min_p: f32,
    /// Logits of tokens in prompt or answer are divided by this if positive, else multiplied; in (0, 2], 1 does nothing.
    pub repetition_penalty: f32,
    /// Taken off the logit of tokens in the answer; in [-2, 2].
    pub presence_penalty: f32,
    /// Taken off the logit of a token for every time it is in the answer; in [-2, 2].
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens, in [-100, 100]; -100 bans a token.
    pub logit_bias: Vec<(u32, f32)>,
    /// How many alternatives to list with log-probabilities, up to [`MAX_LOGPROBS`]; `None` computes none at all.
    pub logprobs: Option<usize>,
    /// Seed of the request's generator.
    pub seed: u64,
}

impl Default for Sampling {
    /// The usual values: temperature 0.7, top-p 0.9, seed 0, everything else off.
    fn default() -> Self {
        Self { temperature: 0.7, top_p: 0.9, ..Self::greedy() }
    }
}

impl Sampling {
    /// Always the most likely token.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            logprobs: None,
            seed: 0,
        }
    }

    /// An error unless every value is in its range.
    pub fn check(&self) -> Result<(), SampleError> {
        use Setting::{
            FrequencyPenalty, LogitBias, MinP, PresencePenalty, RepetitionPenalty, Temperature, TopP,
        };
        let in_range = |found: f32, good: bool, setting| match good {
            true => Ok(()),
            false => Err(SampleError::Range { setting, found }),
        };
        let penalty = |found: f32, setting| in_range(found, (-2.0..=2.0).contains(&found), setting);
        in_range(self.temperature, (0.0..=2.0).contains(&self.temperature), Temperature)?;
        in_range(self.top_p, self.top_p > 0.0 && self.top_p <= 1.0, TopP)?;
        in_range(self.min_p, (0.0..=1.0).contains(&self.min_p), MinP)?;
        let repetition = self.repetition_penalty;
        in_range(repetition, repetition > 0.0 && repetition <= 2.0, RepetitionPenalty)?;
        penalty(self.presence_penalty, PresencePenalty)?;
        penalty(self.frequency_penalty, FrequencyPenalty)?;
        for &(_, bias) in &self.logit_bias {
            in_range(bias, (-MAX_BIAS..=MAX_BIAS).contains(&bias), LogitBias)?;
        }
        match self.logprobs {
            Some(found) if found > MAX_LOGPROBS => Err(SampleError::Logprobs { found }),
            _ => Ok(()),
        }
    }

    /// An error unless every token that is named exists in a vocabulary of `vocab` tokens.
    pub fn check_tokens(&self, vocab: usize) -> Result<(), SampleError> {
        match self.logit_bias.iter().find(|(token, _)| *token as usize >= vocab) {
            Some(&(token, _)) => Err(SampleError::BiasToken { token, vocab }),
            None => Ok(()),
        }
    }
}

/// A setting of [`Sampling`] that has a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// [`Sampling::temperature`]
    Temperature,
    /// [`Sampling::top_p`]
    TopP,
    /// [`Sampling::min_p`]
    MinP,
    /// [`Sampling::repetition_penalty`]
    RepetitionPenalty,
    /// [`Sampling::presence_penalty`]
    PresencePenalty,
    /// [`Sampling::frequency_penalty`]
    FrequencyPenalty,
    /// [`Sampling::logit_bias`]
    LogitBias,
}

impl Setting {
    /// Its name, and what it may be.
    fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::Temperature => ("temperature", "a number from 0 (greedy) to 2"),
            Self::TopP => ("top_p", "a number above 0 and up to 1 (1 keeps every token)"),
            Self::MinP => ("min_p", "a number from 0 (keeps every token) to 1"),
            Self::RepetitionPenalty => {
                ("repetition_penalty", "a number above 0 and up to 2 (1 does nothing, 1.1 is usual)")
            }
            Self::PresencePenalty => ("presence_penalty", "a number from -2 to 2 (0 does nothing)"),
            Self::FrequencyPenalty => ("frequency_penalty", "a number from -2 to 2 (0 does nothing)"),
            Self::LogitBias => ("logit_bias", "a number from -100 (never this token) to 100"),
        }
    }
}

/// Why no token could be chosen.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// A setting is out of its range or not a number.
    #[error("{} is {found}; use {}", .setting.words().0, .setting.words().1)]
    Range {
        /// Which one.
        setting: Setting,
        /// The value given.
        found: f32,
    },
    /// More alternatives than are listed.
    #[error(
        "log-probabilities of {found} alternatives were asked for; use a number from 0 to {MAX_LOGPROBS}"
    )]
    Logprobs {
        /// The number given.
        found: usize,
    },
    /// A bias for a token that the model does not have.
    #[error("logit_bias names token {token}, and the model has the tokens 0 to {}", .vocab - 1)]
    BiasToken {
        /// The token.
        token: u32,
        /// Number of logits.
        vocab: usize,
    },
    /// Every logit is NaN or infinite.
    #[error(
        "none of the {vocab} logits is a finite number, so no token can be chosen; the weights may be damaged"
    )]
    NoFiniteLogit {
        /// Number of logits.
        vocab: usize,
    },
    /// What the grammar allows and the logit bias bans leaves nothing.
    #[error(
        "no token is left to choose: all that may come next have a logit bias of -100 or a logit that is not a finite number"
    )]
    NothingLeft,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_checked() {
        let (nan, infinite) = (f32::NAN, f32::INFINITY);
        let bad = |setting: Setting, values: &[f32], make: &dyn Fn(f32) -> Sampling| {
            for &found in values {
                match make(found).check() {
                    Err(SampleError::Range { setting: named, .. }) => assert_eq!(named, setting, "{found}"),
                    other => panic!("{setting:?} of {found}: {other:?}"),
                }
            }
        };
        let usual = Sampling::default;
        bad(Setting::Temperature, &[-0.1, 2.1, nan, infinite], &|temperature| Sampling {
            temperature,
            ..usual()
        });
        bad(Setting::TopP, &[0.0, -1.0, 1.1, nan], &|top_p| Sampling { top_p, ..usual() });
        bad(Setting::MinP, &[-0.1, 1.1, nan], &|min_p| Sampling { min_p, ..usual() });
        bad(Setting::RepetitionPenalty, &[0.0, -1.0, 2.1, nan], &|repetition_penalty| Sampling {
            repetition_penalty,
            ..usual()
        });
        bad(Setting::PresencePenalty, &[-2.1, 2.1, nan], &|presence_penalty| Sampling {
            presence_penalty,
            ..usual()
        });
        bad(Setting::FrequencyPenalty, &[-2.1, 2.1, nan], &|frequency_penalty| Sampling {
            frequency_penalty,
            ..usual()
        });
        bad(Setting::LogitBias, &[-100.5, 101.0, nan, infinite], &|bias| Sampling {
            logit_bias: vec![(3, 1.0), (4, bias)],
            ..usual()
        });
        let many = Sampling { logprobs: Some(21), ..usual() };
        assert_eq!(many.check(), Err(SampleError::Logprobs { found: 21 }));
        assert_eq!(usual().check(), Ok(()));
        let biased = Sampling { logit_bias: vec![(9, 1.0), (10, 1.0)], ..usual() };
        assert_eq!(biased.check_tokens(11), Ok(()));
        assert_eq!(biased.check_tokens(10), Err(SampleError::BiasToken { token: 10, vocab: 10 }));
    }

    #[test]
    fn errors_say_what_to_do() {
        let error = Sampling { min_p: 1.5, ..Sampling::default() }.check().unwrap_err();
        assert_eq!(error.to_string(), "min_p is 1.5; use a number from 0 (keeps every token) to 1");
    }
}
