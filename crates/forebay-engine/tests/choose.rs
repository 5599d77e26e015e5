//! What a request may say about its tokens, with and without drafts: constraints, penalties, biases,
//! log-probabilities, and an end that the caller chooses.

mod common;

use std::ops::ControlFlow;

use common::{demo, eval, greedy_on, ids};
use forebay_core::{CancelToken, Constraint, ConstraintError, Ending, TokenSet};
use forebay_engine::{
    Drafting, Engine, EngineOptions, Event, Finish, GenerateError, Outcome, Request, SampleError, Sampler,
    Sampling, Session, Token,
};

fn open(drafting: Drafting) -> Engine {
    let options = EngineOptions { context: Some(300), drafting, ..Default::default() };
    Engine::open(&demo(), options, &mut |_, _| {}).unwrap()
}

const DEPTHS: [Drafting; 4] = [Drafting::Off, Drafting::Depth(2), Drafting::Depth(8), Drafting::Auto];

fn prompt() -> Vec<u32> {
    ids(&eval("greedy.json")["prompts"][0]["prompt_ids"])
}

/// What an answer brought, up to the token at which the caller ends it.
fn answer(
    engine: &mut Engine,
    session: &mut Session,
    request: &Request<'_>,
    constraint: Option<&mut dyn Constraint>,
    end_after: usize,
) -> (Vec<Token>, Result<Outcome, GenerateError>) {
    let mut tokens = Vec::new();
    let mut keep = |event| {
        if let Event::Token(token) = event {
            tokens.push(token);
            if tokens.len() == end_after {
                return ControlFlow::Break(());
            }
        }
        ControlFlow::Continue(())
    };
    let done = session.generate_within(engine, request, constraint, &CancelToken::new(), None, &mut keep);
    (tokens, done)
}

fn numbers(tokens: &[Token]) -> Vec<u32> {
    tokens.iter().map(|token| token.id).collect()
}

/// A limit without a grammar: the token at place n is one whose number leaves n % 3 when divided by 3; every fifth place
/// is `FORCED` and the three behind it as well; the answer may end from place 20 on and must at 40.
#[derive(Default)]
struct Thirds {
    place: usize,
    /// Fails here.
    broken_at: Option<usize>,
}

const FORCED: u32 = 77;

impl Thirds {
    fn fits(place: usize, token: u32) -> bool {
        if place % 8 < 4 { token == FORCED } else { token as usize % 3 == place % 3 }
    }
}

impl Constraint for Thirds {
    fn ending(&mut self) -> Result<Ending, ConstraintError> {
        Ok(match self.place {
            0..20 => Ending::No,
            20..40 => Ending::May,
            _ => Ending::Must,
        })
    }

    fn allowed(&mut self, set: &mut TokenSet) -> Result<bool, ConstraintError> {
        if self.broken_at == Some(self.place) {
            return Err(ConstraintError::TooComplex { reason: "a test".to_owned() });
        }
        *set = (0..8192).filter(|&token| Self::fits(self.place, token)).collect();
        Ok(true)
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        assert!(Self::fits(self.place, token), "place {}: {token}", self.place);
        self.place += 1;
        Ok(())
    }

    fn forced(&mut self, tokens: &mut Vec<u32>) -> Result<(), ConstraintError> {
        tokens.clear();
        tokens.extend((self.place..40).take_while(|place| place % 8 < 4).map(|_| FORCED));
        Ok(())
    }

    fn agrees(&mut self, tokens: &[u32]) -> Result<usize, ConstraintError> {
        let fits = |(at, token): &(usize, &u32)| self.place + at < 40 && Self::fits(self.place + at, **token);
        Ok(tokens.iter().enumerate().take_while(fits).count())
    }
}

/// The tokens that a loop of single passes chooses under [`Thirds`], with nothing but a sampler.
fn by_hand(engine: &mut Engine, prompt: &[u32], sampling: &Sampling, stops: &[u32]) -> Vec<u32> {
    let mut sampler = Sampler::new(sampling.clone()).unwrap();
    sampler.prompt(prompt.iter().copied());
    let mut session = Session::new(engine);
    let (mut new, mut text) = (prompt.to_vec(), Vec::new());
    for place in 0..40 {
        let mut last = Vec::new();
        let mut keep = |_: usize, row: &[f32]| last = row.to_vec();
        session.run_tokens(engine, &new, &CancelToken::new(), &mut keep).unwrap();
        let fits = |token: &u32| match (stops.contains(token), place) {
            (true, place) => place >= 20,
            (false, place) => Thirds::fits(place, *token),
        };
        let allowed: TokenSet = (0..8192).filter(fits).collect();
        let token = sampler.pick(&last, Some(&allowed)).unwrap();
        if stops.contains(&token) {
            break;
        }
        text.push(token);
        new = vec![token];
    }
    text
}

#[test]
fn a_constraint_holds_and_drafts_change_nothing() {
    let prompt = prompt();
    let penalised = Sampling {
        temperature: 0.9,
        top_p: 0.95,
        repetition_penalty: 1.2,
        presence_penalty: 0.4,
        frequency_penalty: 0.3,
        logit_bias: vec![(5, 3.0), (9, -100.0)],
        seed: 4,
        ..Sampling::greedy()
    };
    let mut plain = open(Drafting::Off);
    for (sampling, stops) in
        [(Sampling::greedy(), &[][..]), (penalised.clone(), &[]), (penalised, &[78, 81, 84])]
    {
        let want = by_hand(&mut plain, &prompt, &sampling, stops);
        for drafting in DEPTHS {
            let mut engine = open(drafting);
            let mut session = Session::new(&engine);
            let request = Request { prompt: &prompt, max_tokens: 100, sampling: sampling.clone(), stops };
            let mut limit = Thirds::default();
            let (tokens, done) = answer(&mut engine, &mut session, &request, Some(&mut limit), 0);
            let done = done.unwrap();
            assert_eq!(numbers(&tokens), want, "{drafting}");
            assert_eq!(done.finish, Finish::Stop);
            let drafts = done.stats.drafts;
            if stops.is_empty() {
                assert!(drafts.forced >= 12 && drafts.forced_accepted == drafts.forced, "{drafts:?}");
                assert!(done.stats.decode_passes < tokens.len() - 10, "forced tokens share passes");
            }
        }
    }
}

/// Forced tokens and what is drafted behind them may begin in one block of the cache and end in the next one.
#[test]
fn forced_tokens_lie_at_every_place_of_a_block() {
    const BLOCK: usize = forebay_model::kv::BLOCK;
    let text = ids(&eval("heldout.json")["segments"][0]["windows"][0]);
    let mut plain = open(Drafting::Off);
    for drafting in [Drafting::Depth(5), Drafting::Depth(8)] {
        let mut engine = open(drafting);
        // Four of eight tokens are forced and there are forty: with these prompts, one begins at every distance from a
        // block's end, and half of an answer lies on either side of it.
        for len in BLOCK - 24..BLOCK - 16 {
            let request =
                Request { prompt: &text[..len], max_tokens: 100, sampling: Sampling::greedy(), stops: &[] };
            let mut found = [&mut plain, &mut engine].map(|engine| {
                let mut session = Session::new(engine);
                let mut limit = Thirds::default();
                let (tokens, done) = answer(engine, &mut session, &request, Some(&mut limit), 0);
                assert_eq!(done.unwrap().finish, Finish::Stop);
                tokens
            });
            assert_eq!(found[0].len(), 40);
            assert_eq!(std::mem::take(&mut found[0]), found[1], "{drafting}, behind {len} tokens");
        }
    }
}

#[test]
fn what_cannot_be_chosen_is_an_error_behind_the_same_tokens() {
    let prompt = prompt();
    for drafting in DEPTHS {
        let mut engine = open(drafting);
        let mut session = Session::new(&engine);
        let request = Request { prompt: &prompt, max_tokens: 50, sampling: Sampling::greedy(), stops: &[] };
        let mut limit = Thirds { broken_at: Some(10), ..Default::default() };
        let (tokens, done) = answer(&mut engine, &mut session, &request, Some(&mut limit), 0);
        assert!(
            matches!(done, Err(GenerateError::Constraint(ConstraintError::TooComplex { .. }))),
            "{done:?}"
        );
        assert_eq!(tokens.len(), 10, "{drafting}");
        // The sequence is as good as before.
        session.truncate(0);
        assert_eq!(greedy_on(&mut engine, &mut session, &prompt, 3, &[]).len(), 3);

        let banned = Sampling { logit_bias: vec![(FORCED, -100.0)], ..Sampling::greedy() };
        let request = Request { sampling: banned, ..request };
        let mut session = Session::new(&engine);
        let (_, done) = answer(&mut engine, &mut session, &request, Some(&mut Thirds::default()), 0);
        assert!(matches!(done, Err(GenerateError::Sample(SampleError::NothingLeft))), "{done:?}");
    }
    let mut engine = open(Drafting::Off);
    let unknown = Sampling { logit_bias: vec![(8192, 1.0)], ..Sampling::greedy() };
    let request = Request { prompt: &prompt, max_tokens: 5, sampling: unknown, stops: &[] };
    let mut session = Session::new(&engine);
    let (_, done) = answer(&mut engine, &mut session, &request, None, 0);
    assert!(matches!(done, Err(GenerateError::Sample(SampleError::BiasToken { token: 8192, vocab: 8192 }))));
    assert!(session.tokens().is_empty(), "nothing was run");
}

/// Penalties and biases see accepted drafts in their order.
#[test]
fn penalised_answers_are_the_same_with_drafts() {
    let prompt = prompt();
    let mut answers = Vec::new();
    for drafting in DEPTHS {
        let mut engine = open(drafting);
        let mut all = Vec::new();
        for seed in 0..3 {
            let sampling = Sampling {
                temperature: if seed == 0 { 0.0 } else { 0.8 },
                top_k: 40,
                min_p: 0.02,
                repetition_penalty: 1.5,
                presence_penalty: 1.5,
                frequency_penalty: 1.0,
                seed,
                ..Sampling::default()
            };
            let request = Request { prompt: &prompt, max_tokens: 50, sampling, stops: &[] };
            let mut session = Session::new(&engine);
            all.push(numbers(&answer(&mut engine, &mut session, &request, None, 0).0));
        }
        answers.push(all);
    }
    assert!(answers.iter().all(|all| *all == answers[0]));
    let mut engine = open(Drafting::Off);
    let mut session = Session::new(&engine);
    let free = greedy_on(&mut engine, &mut session, &prompt, 50, &[]);
    assert_ne!(answers[0][0], free, "the penalties change something");
}

#[test]
fn log_probabilities_come_with_every_token_and_are_those_of_scoring() {
    let prompt = prompt();
    let mut seen = Vec::new();
    for drafting in [Drafting::Off, Drafting::Depth(4)] {
        let mut engine = open(drafting);
        let mut session = Session::new(&engine);
        let sampling = Sampling { temperature: 0.7, logprobs: Some(3), seed: 2, ..Sampling::greedy() };
        let request = Request { prompt: &prompt, max_tokens: 24, sampling, stops: &[] };
        let (tokens, _) = answer(&mut engine, &mut session, &request, None, 0);
        let text = [&prompt[..], &numbers(&tokens)].concat();
        let scores = session.score(&mut engine, &text, &CancelToken::new(), None, &mut |_| {}).unwrap();
        for (token, score) in tokens.iter().zip(&scores[prompt.len() - 1..]) {
            let logprobs = token.logprobs.as_ref().unwrap();
            assert_eq!((token.id, logprobs.chosen), (score.token, score.log_probability));
            assert_eq!((logprobs.top.len(), logprobs.top[0].0), (3, score.best));
            assert!(logprobs.top.is_sorted_by(|a, b| a.1 >= b.1));
        }
        seen.push(tokens);
    }
    assert_eq!(seen[0], seen[1]);
}

/// The caller ends the answer at every place once, also among drafts that were right, and goes on.
#[test]
fn an_answer_ends_at_the_token_where_the_caller_ends_it() {
    const LENGTH: usize = 16;
    let prompt = prompt();
    let mut among_drafts = 0;
    for drafting in [Drafting::Off, Drafting::Depth(3), Drafting::Depth(8)] {
        let mut engine = open(drafting);
        let mtp = engine.spec().layers.len();
        let mut session = Session::new(&engine);
        let whole = greedy_on(&mut engine, &mut session, &prompt, LENGTH, &[]);
        for end in 1..LENGTH - 1 {
            let mut session = Session::new(&engine);
            let sampling = Sampling::greedy();
            let request = Request { prompt: &prompt, max_tokens: LENGTH, sampling, stops: &[] };
            let (tokens, done) = answer(&mut engine, &mut session, &request, None, end);
            let done = done.unwrap();
            assert_eq!((numbers(&tokens), done.finish), (whole[..end].to_vec(), Finish::Ended));
            assert_eq!(done.stats.new_tokens, end);
            among_drafts += usize::from(session.pending().is_none());
            let held: Vec<u32> = session.tokens().iter().copied().chain(session.pending()).collect();
            assert_eq!(held, [&prompt[..], &whole[..end]].concat(), "{drafting}, {end}");
            // The same state as that of a run in one piece, the drafting layer's rows included.
            let mut fresh = Session::new(&engine);
            let cached = session.tokens().to_vec();
            greedy_on(&mut engine, &mut fresh, &cached, 0, &[]);
            assert_eq!(session.last_logits(), fresh.last_logits());
            assert_eq!(session.kv().drafting(), fresh.kv().drafting());
            for position in 0..session.kv().drafting() {
                assert_eq!(session.kv().latent(mtp, position), fresh.kv().latent(mtp, position));
            }
            let more = greedy_on(&mut engine, &mut session, &[], LENGTH - end, &[]);
            assert_eq!(more, whole[end..], "{drafting}, {end}: going on");
        }
    }
    assert!(among_drafts > 5, "{among_drafts} answers ended among drafts: too few to show anything");
}

/// A constraint that says yes to every draft and then refuses the token that was chosen, once.
struct Refuses {
    left: usize,
    forced: bool,
}

impl Constraint for Refuses {
    fn ending(&mut self) -> Result<Ending, ConstraintError> {
        Ok(Ending::May)
    }

    fn allowed(&mut self, _: &mut TokenSet) -> Result<bool, ConstraintError> {
        Ok(false)
    }

    fn accept(&mut self, _: u32) -> Result<(), ConstraintError> {
        self.left = self.left.wrapping_sub(1);
        if self.left == 0 { Err(ConstraintError::DeadEnd) } else { Ok(()) }
    }

    fn forced(&mut self, _: &mut Vec<u32>) -> Result<(), ConstraintError> {
        if self.forced { Ok(()) } else { Err(ConstraintError::TooComplex { reason: "a test".to_owned() }) }
    }

    fn agrees(&mut self, tokens: &[u32]) -> Result<usize, ConstraintError> {
        Ok(tokens.len())
    }
}

/// An error behind a draft is that of the answer, behind the tokens before it: nothing is chosen anew. One that concerns
/// drafts alone is none.
#[test]
fn an_error_behind_a_draft_is_not_lost() {
    let prompt = prompt();
    let sampling = Sampling { temperature: 0.8, seed: 5, ..Sampling::greedy() };
    for left in [5, 6, 7, 8] {
        for drafting in DEPTHS {
            let mut engine = open(drafting);
            let mut session = Session::new(&engine);
            let request = Request { prompt: &prompt, max_tokens: 20, sampling: sampling.clone(), stops: &[] };
            let mut limit = Refuses { left, forced: left % 2 == 0 };
            let (tokens, done) = answer(&mut engine, &mut session, &request, Some(&mut limit), 0);
            assert!(
                matches!(done, Err(GenerateError::Constraint(ConstraintError::DeadEnd))),
                "{drafting}, {left}: {done:?}"
            );
            assert_eq!(tokens.len(), left - 1, "{drafting}");
        }
    }
}
