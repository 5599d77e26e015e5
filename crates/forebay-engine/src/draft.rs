//! Tokens that are guessed at and then verified: where drafts come from and what became of them (decode spec
//! sections 4 and 5).

mod control;
mod foretold;
mod known;
mod look_up;

pub use control::{Choice, Controller, Forecast, Observed, Offers};
pub use foretold::Foretold;
pub use known::{Known, KnownError};
pub use look_up::{Match, Repeated, look_up};

/// The deepest draft: a verifying pass has one row more.
pub const MAX_DEPTH: usize = 8;

/// Whether tokens are drafted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Drafting {
    /// No: one token a pass.
    #[default]
    Off,
    /// As many as measurements say is fastest, none included.
    Auto,
    /// Always so many, at most [`MAX_DEPTH`]: by the MTP layer if it is loaded, else looked up in what was said
    /// before.
    Depth(usize),
}

impl std::fmt::Display for Drafting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Drafting::Off => f.write_str("off"),
            Drafting::Auto => f.write_str("auto"),
            Drafting::Depth(depth) => write!(f, "{depth}"),
        }
    }
}

/// Where drafts come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// The MTP layer, or whatever stands in for it.
    #[default]
    Model,
    /// What followed the same tokens earlier, by how many they were.
    Text(Repeated),
}

/// What became of drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftStats {
    /// Tokens drafted, before a constraint cut any off.
    pub proposed: u64,
    /// Tokens verified.
    pub verified: u64,
    /// Tokens that turned out to be what the model says.
    pub accepted: u64,
    /// By how many drafts were accepted: passes that verified any.
    pub passes: [u64; MAX_DEPTH + 1],
    /// Of the verified ones, those that were looked up in the text so far.
    pub looked_up: u64,
    /// Of the looked-up ones, those that were right.
    pub looked_up_accepted: u64,
    /// Tokens that a grammar forced and that were verified as drafts; not among those above.
    pub forced: u64,
    /// Those of them that were right.
    pub forced_accepted: u64,
}

impl DraftStats {
    /// Adds those of another run.
    pub fn join(&mut self, other: &Self) {
        self.proposed += other.proposed;
        self.verified += other.verified;
        self.accepted += other.accepted;
        self.looked_up += other.looked_up;
        self.looked_up_accepted += other.looked_up_accepted;
        self.forced += other.forced;
        self.forced_accepted += other.forced_accepted;
        self.passes.iter_mut().zip(other.passes).for_each(|(all, more)| *all += more);
    }

    /// Adds a pass.
    pub fn add(&mut self, seen: &Observed) {
        self.proposed += seen.drafted as u64;
        if seen.verified > 0 {
            self.verified += seen.verified as u64;
            self.accepted += seen.accepted as u64;
            self.passes[seen.accepted.min(MAX_DEPTH)] += 1;
            if let Source::Text(_) = seen.source {
                self.looked_up += seen.verified as u64;
                self.looked_up_accepted += seen.accepted as u64;
            }
        }
    }
}
