//! How large every part is, so that activations stay in range and routing looks like that of real text.
//!
//! What the numbers do together (docs/synth.md tells the story):
//! - Every embedding shares an *anchor*, the direction in which all components are equal. Query and rotary key
//!   answer to it, which makes attention weights fall with distance as `distance^-RECENCY`: a slowly moving
//!   average of the past, of the same size at every position.
//! - The first layer's attention adds that average to the stream, larger than the token itself. From then
//!   on the stream is part topic, part token, and random routers choose accordingly.
//! - Later layers add a fixed share each, so that the stream of a deep model grows no further than planned.

use forebay_core::Format;
use forebay_model::ModelSpec;
use forebay_model::families::roles::{Role, TensorNeed};
use forebay_model::spec::FfnKind;

use super::matrix::{Matrix, Segment};
use super::pool::PoolKey;
use super::spec::ROPE_THETA;

/// Part of an embedding's size that all tokens share.
const ANCHOR: f64 = 0.5;
/// Size of what the first layer's attention adds, where an embedding is 1.
const LEAD: f64 = 2.57;
/// Square of what a later layer adds, and most that all layers add together.
const ADDED: f64 = 0.28;
const ADDED_IN_ALL: f64 = 8.0;
/// Share of that square which is attention's; the rest is the feed-forward part's.
const ATTENTION_SHARE: f64 = 0.71;
/// Exponent with which attention falls with distance.
const RECENCY: f64 = 1.2;
/// Size of an attention average over values of size 1, once there are some tens of them; a single value is 1.
const AVERAGE: f64 = 0.5;
/// Anchor in a compressed query of the last layer, where its random part is 1.
const QUERY_ANCHOR: f64 = 1.5;
/// Mean of a query's rotary components.
const QUERY_MEAN: f64 = 1.5;
/// Random part of a query's components.
const QUERY_SPREAD: f64 = 0.3;
/// Random part of a rotary key's components.
const KEY_SPREAD: f64 = 0.1;
/// Size of `silu(x) * y` for normal x and y.
const SWIGLU: f64 = 0.597;
/// Standard deviation of router logits: sigmoid scores spread between about 0.1 and 0.9.
const ROUTER: f64 = 1.5;
/// Standard deviation of the correction bias.
const ROUTER_BIAS: f64 = 0.03;
/// Standard deviation of norm weights around 1, and of the indexer's bias around 0.
const NORM_SPREAD: f64 = 0.05;
/// Standard deviation of logits.
const LOGITS: f64 = 3.0;
/// Logit of ids that stand for nothing.
const UNUSED_LOGIT: f64 = -20.0;

/// What a tensor is filled with.
pub enum Filling {
    /// A linear layer.
    Matrix(Matrix),
    /// Normal numbers in F32.
    Normal {
        /// Their mean.
        mean: f64,
        /// Their standard deviation.
        std: f64,
    },
}

/// The planned residual stream at one layer.
#[derive(Clone, Copy, Debug)]
struct Stream {
    /// Square of its size before the layer.
    before: f64,
    /// Size of what attention adds.
    attention: f64,
    /// Size of what the feed-forward part adds.
    ffn: f64,
}

impl Stream {
    /// Layer `layer`; one behind the last is the MTP layer.
    fn at(spec: &ModelSpec, layer: usize) -> Self {
        let layers = spec.layers.len();
        let added = ADDED.min(ADDED_IN_ALL / layers as f64);
        let (attention, ffn) = ((added * ATTENTION_SHARE).sqrt(), (added * (1.0 - ATTENTION_SHARE)).sqrt());
        match layer {
            0 => Self { before: 1.0, attention: LEAD, ffn },
            _ if layer == layers => Self { before: 1.0, attention, ffn },
            _ => {
                let first = LEAD * LEAD + ffn * ffn;
                Self { before: 1.0 + first + added * (layer - 1) as f64, attention, ffn }
            }
        }
    }

    /// The anchor in the normed stream.
    fn anchor(&self) -> f64 {
        ANCHOR / self.before.sqrt()
    }
}

/// Square of the stream's planned size behind the last layer.
pub fn planned_growth(spec: &ModelSpec) -> f64 {
    let last = Stream::at(spec, spec.layers.len() - 1);
    last.before + last.attention * last.attention + last.ffn * last.ffn
}

/// Chooses the filling of the tensors of one model.
pub struct Tuner<'a> {
    /// The model.
    pub spec: &'a ModelSpec,
    /// Format of the layers' matrices.
    pub format: Format,
    /// Ids that stand for something.
    pub tokens: usize,
}

impl Tuner<'_> {
    /// The filling of a tensor of `layer`; for global tensors `layer` does not matter.
    pub fn filling(&self, need: &TensorNeed, rows: usize, cols: usize, layer: usize) -> Filling {
        let format = match (self.format, need.role) {
            (format, role) if format.is_integer() => role.quantised(Format::F32, format),
            // As FP8 checkpoints have them.
            (Format::Fp8Block, Role::Embedding | Role::Head) => Format::Bf16,
            (format, _) => format,
        };
        match self.filled(need, rows, cols, layer, format) {
            // Its parts do not end where blocks do.
            Filling::Matrix(matrix) if format == Format::Fp8Block && !matrix.is_blocked() => {
                self.filled(need, rows, cols, layer, Format::Bf16)
            }
            filling => filling,
        }
    }

    fn filled(&self, need: &TensorNeed, rows: usize, cols: usize, layer: usize, format: Format) -> Filling {
        let (name, stream) = (need.name.clone(), Stream::at(self.spec, layer));
        let pool = |std, mean| PoolKey::new(cols, format, std, mean);
        // Keeps the size of a random input.
        let keep = 1.0 / (cols as f64).sqrt();
        let plain = |std| Filling::Matrix(Matrix::plain(name.clone(), rows, pool(std, 0.0)));
        let pieces = |segments| Filling::Matrix(Matrix { name: name.clone(), cols, format, segments });
        let a = &self.spec.attention;
        let part = |suffix: &str| need.name.ends_with(suffix);
        if part("embed_tokens.weight") {
            let own = (1.0 - ANCHOR * ANCHOR).sqrt();
            Filling::Matrix(Matrix::plain(name, rows, pool(own, ANCHOR)))
        } else if part("lm_head.weight") {
            let used = Segment { rows: self.tokens, pool: pool(LOGITS * keep, 0.0) };
            let mean = UNUSED_LOGIT / (cols as f64 * self.last_anchor());
            let unused = Segment { rows: rows - self.tokens, pool: pool(0.1 * LOGITS * keep, mean) };
            pieces(vec![used, unused])
        } else if part("q_a_proj.weight") {
            Filling::Matrix(Matrix::plain(name, rows, pool(keep, self.query_anchor())))
        } else if part("q_b_proj.weight") {
            let nope = Segment { rows: a.nope, pool: pool(QUERY_SPREAD * keep, 0.0) };
            let rope = Segment { rows: a.rope, pool: pool(QUERY_SPREAD * keep, QUERY_MEAN / cols as f64) };
            pieces([nope, rope].repeat(a.heads))
        } else if part("kv_a_proj_with_mqa.weight") {
            let latent = Segment { rows: a.kv_rank, pool: pool(keep, 0.0) };
            let mean = self.rope_key(&stream) / (cols as f64 * stream.anchor());
            pieces(vec![latent, Segment { rows: a.rope, pool: pool(KEY_SPREAD * keep, mean) }])
        } else if part("o_proj.weight") {
            plain(keep * stream.attention / AVERAGE)
        } else if part("down_proj.weight") {
            plain(keep * stream.ffn / SWIGLU / self.expert_sum(layer))
        } else if part("eh_proj.weight") {
            // Half as much anchor as its two inputs have together.
            Filling::Matrix(Matrix::plain(name, rows, pool(keep, 1.0 / cols as f64)))
        } else if part("mlp.gate.weight") {
            Filling::Normal { mean: 0.0, std: ROUTER * keep }
        } else if part("e_score_correction_bias") {
            Filling::Normal { mean: 0.0, std: ROUTER_BIAS }
        } else if part("k_norm.bias") {
            Filling::Normal { mean: 0.0, std: NORM_SPREAD }
        } else if part("norm.weight") {
            Filling::Normal { mean: 1.0, std: NORM_SPREAD }
        } else {
            plain(keep)
        }
    }

    /// Size of the sum of a layer's experts, each of size 1.
    fn expert_sum(&self, layer: usize) -> f64 {
        let moe = &self.spec.moe;
        if self.spec.layers.get(layer).is_some_and(|layer| layer.ffn == FfnKind::Dense) {
            return 1.0;
        }
        let routed = f64::from(moe.scaling).powi(2) / moe.top_k as f64;
        (routed + if moe.shared_width > 0 { 1.0 } else { 0.0 }).sqrt()
    }

    fn last_anchor(&self) -> f64 {
        ANCHOR / planned_growth(self.spec).sqrt()
    }

    /// Mean of the query compression's weights.
    fn query_anchor(&self) -> f64 {
        QUERY_ANCHOR / (self.spec.hidden as f64 * self.last_anchor())
    }

    /// Mean of a rotary key's components, so that attention falls with [`RECENCY`].
    ///
    /// With equal components the rotary score at a distance is `2 q k scale` times the sum of cosines over all
    /// frequencies, which falls by one for every factor `theta^(2/rope)` of distance.
    fn rope_key(&self, stream: &Stream) -> f64 {
        let a = &self.spec.attention;
        let wanted = RECENCY * 2.0 * ROPE_THETA.ln() / a.rope as f64;
        let anchor = self.query_anchor() * self.spec.hidden as f64 * stream.anchor();
        let query = QUERY_MEAN * anchor / (1.0 + anchor * anchor).sqrt();
        wanted / (2.0 * f64::from(a.scale()) * query)
    }
}
