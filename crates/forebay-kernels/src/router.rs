//! The expert router: sigmoid scores, a bias that only chooses, the best `k`.

use crate::Kernels;

/// How expert weights are made from scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterRule {
    /// Divide the chosen weights by their sum + 1e-20.
    pub normalise: bool,
    /// Multiply every weight by this in the end.
    pub scaling: f32,
}

/// A router that cannot choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RouterError {
    /// NaN or infinity took the place of too many scores.
    #[error(
        "the router wants {wanted} experts but only {finite} of {experts} have a finite score; \
         the weights or the activations before it are damaged: verify the model files"
    )]
    TooFewExperts {
        /// Experts per token.
        wanted: usize,
        /// Experts with a finite score.
        finite: usize,
        /// All experts.
        experts: usize,
    },
}

/// Chooses `ids.len()` experts for one token, in rank order (best first).
///
/// `score = sigmoid(logit)`; the largest `score + bias` are taken, ties to the lowest id;
/// experts whose sum is not finite are never taken. `weights` are the scores without bias,
/// normalised and scaled as `rule` says. On return `logits` holds the scores.
///
/// # Errors
/// [`RouterError::TooFewExperts`] if fewer than `ids.len()` experts have a finite score.
///
/// # Panics
/// If `bias` and `logits`, or `ids` and `weights`, differ in length.
pub fn route(
    kernels: Kernels,
    logits: &mut [f32],
    bias: &[f32],
    rule: RouterRule,
    ids: &mut [u32],
    weights: &mut [f32],
) -> Result<(), RouterError> {
    assert_eq!(logits.len(), bias.len(), "one bias per expert");
    assert_eq!(ids.len(), weights.len(), "one weight per chosen expert");
    kernels.sigmoid(logits);
    let scores = &*logits;
    let choice = |e: usize| Some(scores[e] + bias[e]).filter(|c| c.is_finite());
    let finite = (0..scores.len()).filter(|e| choice(*e).is_some()).count();
    if finite < ids.len() {
        return Err(RouterError::TooFewExperts { wanted: ids.len(), finite, experts: scores.len() });
    }
    // One insertion pass: `ids` stays sorted by choice (kept in `weights` meanwhile), and an
    // expert only passes those it strictly beats, so that ties keep ascending ids.
    let mut taken = 0;
    for e in 0..scores.len() {
        let Some(mine) = choice(e) else { continue };
        let place = weights[..taken].partition_point(|c| *c >= mine);
        if place == ids.len() {
            continue;
        }
        taken = (taken + 1).min(ids.len());
        ids.copy_within(place..taken - 1, place + 1);
        weights.copy_within(place..taken - 1, place + 1);
        (ids[place], weights[place]) = (e as u32, mine);
    }
    for (weight, id) in weights.iter_mut().zip(&*ids) {
        *weight = scores[*id as usize];
    }
    let divisor = if rule.normalise { weights.iter().fold(0.0, |sum, w| sum + w) + 1e-20 } else { 1.0 };
    for weight in weights.iter_mut() {
        *weight = *weight / divisor * rule.scaling;
    }
    Ok(())
}
