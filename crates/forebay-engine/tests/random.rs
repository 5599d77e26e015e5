//! Small models of random sizes: where drafts come from, how deep they are, how much memory there is and how a
//! conversation is cut into turns changes no bit.

mod common;

use std::ops::ControlFlow;
use std::path::Path;

use common::{all_logits, demo};
use forebay_core::{ByteSize, CancelToken};
use forebay_engine::draft::Foretold;
use forebay_engine::rng::Rng;
use forebay_engine::{
    DraftStats, Drafting, Engine, EngineOptions, Event, Request, Sampling, Session, inspect,
};
use forebay_testkit::toy::Geometry;

const TOKENS: usize = 40;

/// Where drafts come from.
#[derive(Clone, Copy, Debug, PartialEq)]
enum From {
    /// The MTP layer, or the text too under the controller.
    Model,
    /// The text only: there is no MTP layer.
    Text,
    /// What is known to be right, and wrong half of the time.
    Foretold,
}

struct Below(Rng);

impl Below {
    fn below(&mut self, n: usize) -> usize {
        ((self.0.next_unit() * n as f64) as usize).min(n - 1)
    }
}

fn bits(row: &[f32]) -> Vec<u32> {
    row.iter().map(|value| value.to_bits()).collect()
}

/// Adds up to `tokens` tokens behind `prompt`.
fn add(engine: &mut Engine, session: &mut Session, prompt: &[u32], tokens: usize) -> (Vec<u32>, DraftStats) {
    let request = Request { prompt, max_tokens: tokens, sampling: Sampling::greedy(), stops: &[] };
    let mut answer = Vec::new();
    let outcome = session.generate(engine, &request, &CancelToken::new(), None, &mut |event| {
        if let Event::Token(token) = event {
            answer.push(token.id);
        }
        ControlFlow::Continue(())
    });
    (answer, outcome.unwrap().stats.drafts)
}

fn options() -> EngineOptions {
    EngineOptions { context: Some(160), threads: Some(1), ..Default::default() }
}

fn open(dir: &Path, options: EngineOptions) -> Engine {
    Engine::open(dir, options, &mut |_, _| {}).unwrap()
}

/// A model of random sizes, with its MTP layer and without.
fn random_model(seed: u64, drafts: &mut [DraftStats; 3]) {
    let geometry = Geometry::random(seed);
    let [with, without] = [true, false].map(|mtp| {
        let dir = tempfile::tempdir().unwrap();
        Geometry { mtp, ..geometry.clone() }.write(dir.path()).unwrap();
        dir
    });
    any_way(&format!("{geometry:?}"), with.path(), Some(without.path()), seed, drafts);
}

/// An answer of the model in `with`, and `without` its MTP layer, in many ways; counts what became of the drafts.
fn any_way(name: &str, with: &Path, without: Option<&Path>, seed: u64, drafts: &mut [DraftStats; 3]) {
    let mut random = Below(Rng::new(seed + 1));
    let vocab = inspect(with, &options()).unwrap().snapshot.spec.vocab;
    // Text that repeats itself now and then.
    let mut prompt: Vec<u32> = (0..20).map(|_| random.below(vocab) as u32).collect();
    prompt.extend_from_within(3..3 + random.below(15));
    let mut plain = open(with, EngineOptions { drafting: Drafting::Off, ..options() });
    let mut session = Session::new(&plain);
    let (answer, _) = add(&mut plain, &mut session, &prompt, TOKENS);
    assert_eq!(answer.len(), TOKENS);
    let whole = [&prompt[..], &answer].concat();
    let rows = all_logits(&mut plain, &whole);

    for from in [From::Model, From::Text, From::Foretold] {
        let Some(dir) = (if from == From::Text { without } else { Some(with) }) else { continue };
        for drafting in
            [Drafting::Depth(1 + random.below(3)), Drafting::Depth(4 + random.below(5)), Drafting::Auto]
        {
            let options = EngineOptions {
                drafting,
                chunk: [None, Some(1 + random.below(30))][random.below(2)],
                threads: Some(1 + random.below(2)),
                ..options()
            };
            let plan = inspect(dir, &options).unwrap().plan.unwrap();
            let memory = ByteSize(plan.minimum + random.below(4) as u64 * plan.slot_row());
            let mut engine = open(dir, EngineOptions { memory: Some(memory), ..options });
            let mut session = Session::new(&engine);
            if from == From::Foretold {
                session.foretell(Some(Foretold::new(prompt.len(), answer.clone(), 0.5, seed)));
            }
            let (mut asked, mut have) = (prompt.clone(), 0);
            while have < TOKENS {
                if random.below(3) == 0 {
                    // A new sequence that begins where any earlier one was.
                    let foretold = from == From::Foretold;
                    session = Session::new(&engine);
                    session.foretell(
                        foretold.then(|| Foretold::new(prompt.len(), answer.clone(), 0.5, seed + 1)),
                    );
                    asked = whole[..prompt.len() + have].to_vec();
                    let reused = session.start_from(&mut engine, &asked).unwrap().tokens;
                    asked.drain(..reused);
                }
                let (more, became) = add(&mut engine, &mut session, &asked, 1 + random.below(TOKENS - have));
                asked.clear();
                let what = format!("{from:?}, {drafting}, at {have}, seed {seed}: {name}");
                assert_eq!(more, answer[have..have + more.len()], "{what}");
                have += more.len();
                let last = session.tokens().len() - 1;
                assert_eq!(session.tokens(), &whole[..=last], "{what}");
                assert_eq!(bits(session.last_logits()), bits(&rows[last]), "{what}");
                drafts[from as usize].join(&became);
            }
        }
    }
}

#[test]
fn nothing_that_saves_time_changes_a_bit_of_any_model() {
    let mut drafts = [DraftStats::default(); 3];
    (0..16).for_each(|seed| random_model(seed, &mut drafts));
    let random = drafts[From::Model as usize];
    assert!(random.verified > 1000, "hardly any of them is right");
    (0..3).for_each(|seed| any_way("bundled", &demo(), None, seed, &mut drafts));
    // Had none been right, or none wrong, little would have been tried.
    for (from, drafts) in ["model", "text", "foretold"].into_iter().zip(drafts) {
        let (all, right) = (drafts.verified, drafts.accepted);
        println!("{from}: {right} of {all} drafts right, {} looked up", drafts.looked_up);
        assert!(right >= 40 && all - right >= 40, "{from}: {right} of {all}");
        assert_eq!(drafts.looked_up > 0, from != "foretold", "{from}");
    }
}
