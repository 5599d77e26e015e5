//! Log-probabilities: how likely the model itself found a token.

/// How likely the chosen token was, and which ones were likelier.
///
/// From the model's logits after those that are not finite were dropped: before a grammar, biases, penalties and
/// temperature, as OpenAI and vLLM report them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Logprobs {
    /// Natural logarithm of the probability of the chosen token.
    pub chosen: f64,
    /// The likeliest tokens with theirs, likeliest first, the lower id first on a tie.
    pub top: Vec<(u32, f64)>,
}

impl Logprobs {
    /// That of `token`, and of the `count` likeliest ones (fewer where fewer logits are finite).
    pub(super) fn of(logits: &[f32], token: u32, count: usize) -> Self {
        let (highest, log_sum) = normaliser(logits);
        let log_probability = |id: u32| f64::from(logits[id as usize]) - highest - log_sum;
        let mut ids: Vec<u32> =
            (0..logits.len() as u32).filter(|&id| logits[id as usize].is_finite()).collect();
        let by_rank = |a: &u32, b: &u32| {
            let order = logits[*b as usize].partial_cmp(&logits[*a as usize]);
            order.unwrap_or(std::cmp::Ordering::Equal).then(a.cmp(b))
        };
        if count < ids.len() {
            ids.select_nth_unstable_by(count, by_rank);
            ids.truncate(count);
        }
        ids.sort_unstable_by(by_rank);
        let top = ids.into_iter().map(|id| (id, log_probability(id))).collect();
        Self { chosen: log_probability(token), top }
    }
}

/// `log softmax(logits)[token]`, summed in f64 over the finite logits.
///
/// # Panics
/// If there is no such logit.
pub fn log_probability(logits: &[f32], token: u32) -> f64 {
    let (highest, log_sum) = normaliser(logits);
    f64::from(logits[token as usize]) - highest - log_sum
}

/// The largest finite logit, and the logarithm of the sum of `exp(logit - largest)` over the finite ones.
fn normaliser(logits: &[f32]) -> (f64, f64) {
    let finite = || logits.iter().copied().filter(|l| l.is_finite());
    let highest = f64::from(finite().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = finite().map(|l| libm::exp(f64::from(l) - highest)).sum();
    (highest, libm::log(sum))
}
