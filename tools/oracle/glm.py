"""What a GLM-5.2 checkpoint contains: the names and shapes of its tensors, its config, and random weights for it."""

import numpy as np

from container import F32

M64 = (1 << 64) - 1

COMMON = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "indexer_rope_interleave": True,
    "initializer_range": 0.02,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-05,
    "rope_interleave": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "max_position_embeddings": 4096,
}


def config(theta=10000.0, **sizes):
    """A complete config.json. `sizes` overrides or adds keys."""
    c = {**COMMON, **sizes}
    n, dense = c["num_hidden_layers"], c["first_k_dense_replace"]
    c["num_key_value_heads"] = c["num_attention_heads"]
    c["qk_head_dim"] = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    c["head_dim"] = c["qk_rope_head_dim"]
    c["rope_parameters"] = {"rope_theta": theta, "rope_type": "default"}
    c["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (n - dense)
    c["eos_token_id"] = [c["vocab_size"] - 2, c["vocab_size"] - 1]
    c["pad_token_id"] = c["vocab_size"] - 2
    return dict(sorted(c.items()))


def indexer_types(c):
    """`full` or `shared` for each layer: the explicit list, else the pattern, else the schedule."""
    if c.get("indexer_types"):
        return list(c["indexer_types"])
    if c.get("index_topk_pattern"):
        return [{"F": "full", "S": "shared"}[x] for x in c["index_topk_pattern"]]
    freq, offset = max(c.get("index_topk_freq", 1), 1), c.get("index_skip_topk_offset", 2)
    return ["shared" if max(i - offset + 1, 0) % freq else "full" for i in range(c["num_hidden_layers"])]


def _mlp(prefix, d, width):
    yield prefix + "gate_proj.weight", (width, d), "linear"
    yield prefix + "up_proj.weight", (width, d), "linear"
    yield prefix + "down_proj.weight", (d, width), "linear"


def _indexer(prefix, c):
    d, rq, n, w = c["hidden_size"], c["q_lora_rank"], c["index_n_heads"], c["index_head_dim"]
    yield prefix + "wq_b.weight", (n * w, rq), "linear"
    yield prefix + "wk.weight", (w, d), "linear"
    yield prefix + "weights_proj.weight", (n, d), "linear"
    yield prefix + "k_norm.weight", (w,), "norm"
    yield prefix + "k_norm.bias", (w,), "norm_bias"


def _layer(i, c, sparse, indexer):
    p, a = f"model.layers.{i}.", f"model.layers.{i}.self_attn."
    d, h, rq, r = c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"]
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    yield p + "input_layernorm.weight", (d,), "norm"
    yield p + "post_attention_layernorm.weight", (d,), "norm"
    yield a + "q_a_proj.weight", (rq, d), "linear"
    yield a + "q_a_layernorm.weight", (rq,), "norm"
    yield a + "q_b_proj.weight", (h * (nope + rope), rq), "linear"
    yield a + "kv_a_proj_with_mqa.weight", (r + rope, d), "linear"
    yield a + "kv_a_layernorm.weight", (r,), "norm"
    yield a + "kv_b_proj.weight", (h * (nope + v), r), "linear"
    yield a + "o_proj.weight", (d, h * v), "linear"
    if indexer:
        yield from _indexer(a + "indexer.", c)
    if not sparse:
        yield from _mlp(p + "mlp.", d, c["intermediate_size"])
        return
    m, e = c["moe_intermediate_size"], c["n_routed_experts"]
    yield p + "mlp.gate.weight", (e, d), "router"
    yield p + "mlp.gate.e_score_correction_bias", (e,), "router_bias"
    yield from _mlp(p + "mlp.shared_experts.", d, m * c["n_shared_experts"])
    for x in range(e):
        yield from _mlp(p + f"mlp.experts.{x}.", d, m)


def mtp_tensors(c):
    """The MTP layer, at index `num_hidden_layers`. Like layer 78 of the real checkpoint it brings an indexer and copies
    of embedding and head, which an engine ignores."""
    i, d, v = c["num_hidden_layers"], c["hidden_size"], c["vocab_size"]
    p = f"model.layers.{i}."
    yield from _layer(i, c, sparse=True, indexer=True)
    yield p + "eh_proj.weight", (d, 2 * d), "linear"
    yield p + "enorm.weight", (d,), "norm"
    yield p + "hnorm.weight", (d,), "norm"
    yield p + "shared_head.norm.weight", (d,), "norm"
    yield p + "embed_tokens.weight", (v, d), "embed"
    yield p + "shared_head.head.weight", (v, d), "head"


def main_tensors(c):
    """(name, shape, class) of every tensor of the main model."""
    d, v, types = c["hidden_size"], c["vocab_size"], indexer_types(c)
    yield "model.embed_tokens.weight", (v, d), "embed"
    for i in range(c["num_hidden_layers"]):
        yield from _layer(i, c, i >= c["first_k_dense_replace"], types[i] == "full")
    yield "model.norm.weight", (d,), "norm"
    yield "lm_head.weight", (v, d), "head"


def uniform(name, count):
    """`count` values in [-1, 1) that depend on `name` and the index only (FNV-1a of the name, then SplitMix64)."""
    h = 0xCBF29CE484222325
    for b in name.encode():
        h = ((h ^ b) * 0x100000001B3) & M64
    with np.errstate(over="ignore"):
        z = np.uint64(h) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(40)).astype(np.float64) / 2.0**24 * 2 - 1


def random_weight(seed, name, shape, kind):
    """Scaled so that every stage has unit-sized output: logits spread, router and indexer decide, norms differ from 1.
    (std 0.02, the usual initialisation, gives a model whose logits hardly depend on anything.)"""
    r = uniform(f"{seed}/{name}", int(np.prod(shape)))
    fan_in = shape[-1]
    gain = np.sqrt(3.0 / fan_in)
    if ".q_b_proj." in name or ".indexer.wq_b." in name:
        gain *= 2.0  # sharper attention, so that a wrong key or a wrong selection shows
    value = {
        "linear": lambda: r * gain,
        "embed": lambda: r * 1.5,
        "head": lambda: r * 6.0 / np.sqrt(fan_in),
        "norm": lambda: 1 + 0.2 * r,
        "norm_bias": lambda: 0.2 * r,
        "router": lambda: r * 2.5 / np.sqrt(fan_in),
        "router_bias": lambda: 0.15 * r,
    }[kind]()
    return value.astype(F32).reshape(shape)
