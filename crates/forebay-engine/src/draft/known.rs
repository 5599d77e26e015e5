//! What a run found out about drafting, as text that a later run begins with.

use std::fmt;

use super::MAX_DEPTH;
use super::control::MAX_ROWS;
use super::look_up::Repeated;

/// First line of the text.
const TITLE: &str = "forebay drafting 1";
/// Longest time, in seconds, and largest weight that mean anything.
const LONGEST: f64 = 1e6;

/// Times of passes and shares of right drafts, each with the weight of what was observed.
#[derive(Clone, Debug, PartialEq)]
pub struct Known {
    /// Seconds of a pass, by rows less one.
    pub(super) passes: [(f64, f64); MAX_ROWS],
    /// Share of a pass of one row that waits for experts.
    pub(super) waiting: f64,
    /// Seconds of drafting a token.
    pub(super) drafting: f64,
    /// Share of the model's drafts that are right, by position.
    pub(super) shares: [(f64, f64); MAX_DEPTH],
    /// Share of looked-up drafts that are right, by how much of the text is the same.
    pub(super) repeated: [(f64, f64); Repeated::ALL.len()],
}

impl Known {
    /// Share of a pass of one row that waits for experts.
    pub fn waiting(&self) -> f64 {
        self.waiting
    }
}

/// Why a text says nothing about drafting.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line} is not what was written there: {what}")]
pub struct KnownError {
    /// Line, from 1.
    line: usize,
    /// What is wrong.
    what: &'static str,
}

impl fmt::Display for Known {
    /// One value a line with its name, so that a person can read it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{TITLE}")?;
        writeln!(f, "waiting {}", self.waiting)?;
        writeln!(f, "drafting {}", self.drafting)?;
        let lists: [(&str, &[(f64, f64)]); 3] =
            [("pass", &self.passes), ("right", &self.shares), ("repeated", &self.repeated)];
        for (name, list) in lists {
            list.iter().try_for_each(|(value, weight)| writeln!(f, "{name} {value} {weight}"))?;
        }
        Ok(())
    }
}

impl std::str::FromStr for Known {
    type Err = KnownError;

    fn from_str(text: &str) -> Result<Self, KnownError> {
        let mut lines = Lines { lines: text.lines(), line: 0 };
        if lines.next()? != TITLE {
            return Err(lines.wrong("another title"));
        }
        let waiting = lines.values::<1>("waiting")?[0];
        let drafting = lines.values::<1>("drafting")?[0];
        let mut known = Self {
            waiting: lines.share(waiting)?,
            drafting,
            passes: Default::default(),
            shares: Default::default(),
            repeated: Default::default(),
        };
        for pass in &mut known.passes {
            *pass = lines.values::<2>("pass")?.into();
        }
        if known.passes[0].0 <= 0.0 {
            return Err(lines.wrong("a pass of one row takes no time"));
        }
        let shares = known.shares.iter_mut().map(|share| ("right", share));
        for (name, share) in shares.chain(known.repeated.iter_mut().map(|share| ("repeated", share))) {
            let [value, weight] = lines.values::<2>(name)?;
            *share = (lines.share(value)?, weight);
        }
        if lines.lines.next().is_some() {
            return Err(lines.wrong("more behind the end"));
        }
        Ok(known)
    }
}

struct Lines<'a> {
    lines: std::str::Lines<'a>,
    line: usize,
}

impl<'a> Lines<'a> {
    fn next(&mut self) -> Result<&'a str, KnownError> {
        self.line += 1;
        self.lines.next().ok_or_else(|| self.wrong("the text is cut off"))
    }

    /// The values of a line that begins with `name`.
    fn values<const N: usize>(&mut self, name: &str) -> Result<[f64; N], KnownError> {
        let mut words = self.next()?.split(' ');
        if words.next() != Some(name) {
            return Err(self.wrong("another name"));
        }
        let mut values = [0.0; N];
        for value in &mut values {
            let found = words.next().and_then(|word| word.parse::<f64>().ok());
            let found = found.filter(|found| (0.0..=LONGEST).contains(found));
            *value = found.ok_or_else(|| self.wrong("no number between 0 and a million"))?;
        }
        if words.next().is_some() { Err(self.wrong("too many values")) } else { Ok(values) }
    }

    fn share(&self, value: f64) -> Result<f64, KnownError> {
        if value <= 1.0 { Ok(value) } else { Err(self.wrong("a share above 1")) }
    }

    fn wrong(&self, what: &'static str) -> KnownError {
        KnownError { line: self.line, what }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known() -> Known {
        Known {
            passes: std::array::from_fn(|more| (0.125 + more as f64, 3.5)),
            waiting: 0.25,
            drafting: 0.1,
            shares: [(0.75, 8.0); MAX_DEPTH],
            repeated: [(1.0, 1e-30); 4],
        }
    }

    #[test]
    fn a_text_says_what_was_known() {
        assert_eq!(known().to_string().parse(), Ok(known()));
    }

    /// Whatever is damaged is an error, or a value that a run could have found.
    #[test]
    fn damaged_texts_are_refused() {
        let text = known().to_string();
        for len in 0..text.len() - 1 {
            // Cut inside the last number it is another number.
            let whole_lines = text[..len].lines().count() == text.lines().count();
            assert!(whole_lines || text[..len].parse::<Known>().is_err(), "cut at {len}");
        }
        for (old, new) in [
            ("drafting 1", "drafting 2"),
            ("pass 0.125 3.5", "pass 0 3.5"),
            ("right 0.75", "right 1.75"),
            ("waiting 0.25", "waiting NaN"),
            ("waiting 0.25", "waiting -1"),
            ("waiting 0.25", "waiting 0.25 1"),
            ("right 0.75 8", "right 0.75 inf"),
            ("repeated 1", "other 1"),
        ] {
            let damaged = text.replacen(old, new, 1);
            assert_ne!(damaged, text);
            assert!(damaged.parse::<Known>().is_err(), "{old} -> {new}");
        }
        assert!(format!("{text}more\n").parse::<Known>().is_err());
    }
}
