"""The golden cases: a geometry, how each tensor is stored, what is left out, and the lengths of the prompts."""

import re
from dataclasses import dataclass, field
from typing import Callable

import glm

FULL_SHARED = ["full", "shared", "full", "shared"]


@dataclass
class Case:
    name: str
    about: str
    config: dict
    # Storage of a tensor: "F32", "BF16", "F16", "fp8", "int8", "int4", "int4/<group>" or "int2".
    store: Callable = lambda name, kind: "BF16"
    # Cases with the same `weights` have the same weights, and those with the same `prompts` the same prompts.
    weights: str = ""
    prompts: str = ""
    lengths: tuple = (5, 12, 13, 40)
    greedy: int = 24
    candidates: int = 32
    # What a prompt's narrowest decision should be at least, so that rounding cannot turn it.
    wanted: dict = field(default_factory=lambda: {"argmax": 0.01, "router": 2e-4, "dsa": 5e-4})
    # Whether a prompt's decisions have to be clear without DSA too, since a sibling case runs it dense.
    also_dense: bool = False
    mtp: bool = False
    drop: Callable = lambda name: False
    fused: bool = False
    # A factor on the random weights of a tensor.
    gain: Callable = lambda name: 1.0
    # Names that transformers may lack, and config values it is given instead of the case's own.
    may_lack: tuple = ()
    overrides: dict = field(default_factory=dict)
    # Which of two shards a tensor goes to; None for a single `model.safetensors`.
    shard: Callable | None = None
    # Value of the unused bits of a packed row, and how often the lowest code is forced in (0: never).
    padding: int = 0
    low_every: int = 0
    dsa: str = "active"
    mtp_state: str = "absent"


def experts(name):
    return ".mlp.experts." in name


def layer(name):
    m = re.match(r"model\.layers\.(\d+)\.", name)
    return int(m.group(1)) if m else -1


def expert(name):
    return int(re.search(r"\.experts\.(\d+)\.", name).group(1))


def plain_kind(kind):
    return kind in ("norm", "norm_bias", "router", "router_bias")


BASE = dict(
    hidden_size=40, num_hidden_layers=4, num_attention_heads=4, n_routed_experts=16, num_experts_per_tok=4,
    moe_intermediate_size=12, intermediate_size=64, first_k_dense_replace=1, q_lora_rank=24, kv_lora_rank=24,
    qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=12, vocab_size=128, index_topk=12, index_n_heads=6,
    index_head_dim=16, indexer_types=FULL_SHARED,
)  # fmt: skip

TINY = dict(
    hidden_size=32, num_hidden_layers=4, num_attention_heads=2, n_routed_experts=8, num_experts_per_tok=2,
    moe_intermediate_size=12, intermediate_size=40, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16,
    qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, vocab_size=97, index_topk=12, index_n_heads=6,
    index_head_dim=12,
)  # fmt: skip

# Sixteen index heads: with few, two positions at which every head is clipped tie at a score of exactly 0.
LONG = dict(
    num_hidden_layers=3, indexer_types=["full", "shared", "full"], max_position_embeddings=1048576, index_n_heads=16
)
# A thousand positions hold a thousand decisions, some of them close.
LONG_WANTED = {"argmax": 5e-4, "router": 3e-5, "dsa": 1e-5}


def bf16_store(name, kind):
    """As the real checkpoint: all BF16 but the correction bias."""
    return "F32" if kind == "router_bias" else "BF16"


def row_store(main, edge="int8"):
    """F32 for norms and router, `edge` for embedding, head and indexer, `main` for the rest."""

    def store(name, kind):
        if plain_kind(kind):
            return "F32"
        return edge if kind in ("embed", "head") or ".indexer." in name else main

    return store


def f16_store(name, kind):
    if plain_kind(kind):
        return "BF16" if kind == "router" else "F32"
    return "BF16" if kind == "embed" else "F16"


GROUPS = {
    "q_a_proj": 48, "q_b_proj": 16, "kv_a_proj_with_mqa": 32, "kv_b_proj": 32, "o_proj": 16, "embed_tokens": 16,
    "lm_head": 32, "wk": 16,
}  # fmt: skip


def group_store(name, kind):
    if plain_kind(kind):
        return "F32"
    role = name.split(".")[-2]
    if role in ("wq_b", "weights_proj"):
        return "int8"
    if role == "down_proj":
        # Written in groups of 96, but two scales a row of 100 are read as groups of 64: the smallest that fits.
        return "int4/96" if "layers.1.mlp.shared" in name else "int4/64"
    if role in ("gate_proj", "up_proj"):
        return "int4/48" if experts(name) else "int4/16"
    return f"int4/{GROUPS[role]}"


def mixed_store(name, kind):
    if plain_kind(kind):
        return {"norm": "F32", "norm_bias": "BF16", "router": "F16", "router_bias": "F32"}[kind]
    if experts(name):
        return {1: "int4", 2: "int8", 3: "BF16"}[layer(name)]
    by_layer = {
        "q_a_proj": ("int8", "int4", "F32", "int2"),
        "q_b_proj": ("int4/16", "F16", "int8", "int4"),
        "kv_a_proj_with_mqa": ("int4", "int8", "int4/16", "BF16"),
        "kv_b_proj": ("BF16", "int4/16", "int4", "int8"),
        "o_proj": ("int4/32", "int8", "F16", "int4"),
        "gate_proj": ("int2", "int4", "int8", "F32"),
        "up_proj": ("int4", "int8", "BF16", "int2"),
        "down_proj": ("int8", "int4", "int2", "int4"),
        "wq_b": ("int8", "", "int4", ""),
        "wk": ("BF16", "", "int8", ""),
        "weights_proj": ("F32", "", "int8", ""),
    }
    role = name.split(".")[-2]
    if role == "embed_tokens":
        return "int4"
    return "F16" if role == "lm_head" else by_layer[role][layer(name)]


def mixed_experts_store(name, kind):
    if plain_kind(kind):
        return "F32"
    if not experts(name):
        return "int8"
    cycle = ("int4", "int8", "int4/16", "int2", "BF16")
    return cycle[(expert(name) + ("gate" in name) + 2 * ("down" in name)) % len(cycle)]


def split_an_expert(name):
    """Shard 1 takes layer 3 and two of the three matrices of expert 1 of layer 2, scales included."""
    return int(layer(name) == 3 or name.startswith(("model.layers.2.mlp.experts.1.gate", "model.layers.2.mlp.experts.1.up")))


def real_like_store(name, kind):
    if plain_kind(kind):
        return "F32"
    return "int8" if kind in ("embed", "head") or layer(name) == 4 else "int4"


def fp8_store(name, kind):
    """As the public FP8 checkpoints: matrices of attention, MLP and experts in FP8, the rest BF16."""
    if kind == "linear" and not name.endswith("weights_proj.weight"):
        return "fp8"
    return bf16_store(name, kind)


def has_indexer(name):
    return ".indexer." in name


# The MTP layer's copies of embedding and head, which a converter leaves out.
MTP_COPIES = ("4.embed_tokens.weight", "4.shared_head.head.weight")


CASES = [
    Case("base", "1 dense + 3 MoE layers, top 4 of 16, DSA on with shared layers, prompts below, at and above index_topk",
         glm.config(**BASE), bf16_store, weights="base", prompts="base", also_dense=True),
    Case("keep_all", "the weights and prompts of `base`, index_topk above every length: the selection keeps everything",
         glm.config(**{**BASE, "index_topk": 128}), bf16_store, weights="base", prompts="base"),
    Case("no_indexer", "`base` without its indexer tensors though config.json declares DSA: dense, same numbers as `keep_all`",
         glm.config(**BASE), bf16_store, weights="base", prompts="base", drop=has_indexer, may_lack=(".indexer.",),
         overrides={"index_topk": 4096}, dsa="absent"),
    Case("fused_experts", "`base` with the experts fused: mlp.experts.gate_up_proj [E,2M,D] and mlp.experts.down_proj [E,D,M]",
         glm.config(**BASE), bf16_store, weights="base", prompts="base", fused=True),
    Case("k1_odd", "top 1, uneven sizes (hidden 72, expert 20, 3 heads, nope 10, rope 6, v 14), all F32",
         glm.config(**{**BASE, **dict(
             hidden_size=72, num_hidden_layers=2, num_attention_heads=3, n_routed_experts=5, num_experts_per_tok=1,
             moe_intermediate_size=20, intermediate_size=52, q_lora_rank=22, kv_lora_rank=18, qk_nope_head_dim=10,
             qk_rope_head_dim=6, v_head_dim=14, vocab_size=101, index_n_heads=5, index_head_dim=10,
             indexer_types=["full", "shared"])}), lambda n, k: "F32"),
    Case("odd_everything", "every input width odd (37, 45, 21, 23, 19, 15), norm_topk_prob false, all F32",
         glm.config(**{**BASE, **dict(
             hidden_size=37, num_hidden_layers=3, num_attention_heads=3, n_routed_experts=5, num_experts_per_tok=3,
             moe_intermediate_size=21, intermediate_size=45, q_lora_rank=23, kv_lora_rank=19, qk_nope_head_dim=9,
             qk_rope_head_dim=6, v_head_dim=15, vocab_size=103, index_n_heads=5, index_head_dim=9,
             indexer_types=["full", "full", "shared"], norm_topk_prob=False, routed_scaling_factor=1.3)}),
         lambda n, k: "F32"),
    Case("k8_three_dense", "3 dense + 2 MoE layers, top 8 of 24, two shared experts",
         glm.config(**{**BASE, **dict(
             hidden_size=40, num_hidden_layers=5, n_routed_experts=24, num_experts_per_tok=8, moe_intermediate_size=10,
             first_k_dense_replace=3, n_shared_experts=2, indexer_types=["full", "full", "full", "shared", "shared"])}),
         bf16_store),
    Case("all_full", "an indexer in every layer",
         glm.config(**{**TINY, "indexer_types": ["full"] * 4}), bf16_store),
    Case("freq_offset", "indexer_types absent: index_topk_freq 2, index_skip_topk_offset 3 over 6 layers (FFFSFS)",
         glm.config(**{**TINY, "num_hidden_layers": 6, "index_topk_freq": 2, "index_skip_topk_offset": 3}), bf16_store),
    Case("pattern", "indexer_types absent: index_topk_pattern \"FFSS\", against a contrary index_topk_freq of 1",
         glm.config(**{**TINY, "index_topk_pattern": "FFSS", "index_topk_freq": 1}), bf16_store),
    Case("indexer_incomplete", "one tensor of one indexer is missing (layer 2 k_norm.bias): dense, as without an indexer",
         glm.config(**{**TINY, "indexer_types": FULL_SHARED}), bf16_store, may_lack=(".indexer.",),
         drop=lambda n: n == "model.layers.2.self_attn.indexer.k_norm.bias", overrides={"index_topk": 4096},
         dsa="incomplete"),
    Case("lora_eps", "q_a and kv_a projections so small that the eps of their norms shapes the output: 1e-6, not rms_norm_eps",
         glm.config(**{**TINY, **dict(num_hidden_layers=2, n_routed_experts=4, indexer_types=["full", "shared"])}),
         bf16_store, gain=lambda n: 2.0**-9 if "q_a_proj" in n or "kv_a_proj" in n else 1.0),
    Case("long_rope", "a prompt of 1,100 tokens, rope_theta 1e6, max_position_embeddings 1,048,576, index_topk 16",
         glm.config(theta=1e6, **{**TINY, **LONG, "index_topk": 16}), bf16_store, weights="long", lengths=(1100,),
         wanted=LONG_WANTED),
    Case("long_dense", "the weights of `long_rope` and another prompt of 1,100 tokens, index_topk 2048: dense",
         glm.config(theta=1e6, **{**TINY, **LONG, "index_topk": 2048}), bf16_store, weights="long", lengths=(1100,),
         wanted=LONG_WANTED),
    Case("f16", "matrices in F16 (with subnormals), embedding and router in BF16, norms in F32",
         glm.config(**{**TINY, "indexer_types": FULL_SHARED, "dtype": "float16"}), f16_store),
    Case("q_int8_row", "quantised: int8, one scale a row",
         glm.config(**{**BASE, **dict(
             hidden_size=44, moe_intermediate_size=14, n_routed_experts=8, num_experts_per_tok=3, num_hidden_layers=3,
             indexer_types=["full", "shared", "full"])}),
         row_store("int8"), low_every=31),
    Case("q_int4_row", "quantised: int4, one scale a row, odd widths with junk in the unused nibbles; embedding, head, indexer int8",
         glm.config(**{**BASE, **dict(
             hidden_size=51, moe_intermediate_size=19, q_lora_rank=25, kv_lora_rank=23, n_routed_experts=12,
             v_head_dim=13, num_attention_heads=3)}), row_store("int4"), padding=0xF, low_every=29),
    Case("q_int4_group", "quantised: int4 in groups of 16, 32, 48 and 64 with partial last groups, embedding and head included",
         glm.config(**{**BASE, **dict(
             hidden_size=72, moe_intermediate_size=100, intermediate_size=100, q_lora_rank=40, kv_lora_rank=40,
             n_routed_experts=6, num_experts_per_tok=2, num_hidden_layers=3, indexer_types=["full", "shared", "full"])}),
         group_store, low_every=37),
    Case("q_int2_row", "quantised: int2, one scale a row, widths not multiples of 4; embedding, head, indexer int8",
         glm.config(**{**BASE, **dict(
             hidden_size=50, moe_intermediate_size=18, intermediate_size=70, q_lora_rank=27, kv_lora_rank=26)}),
         row_store("int2"), padding=0xFF, low_every=11),
    Case("q_mixed", "every format in one model, differing by role and layer",
         glm.config(**BASE), mixed_store, low_every=41),
    Case("q_mixed_experts", "formats differ between the experts of a layer and between the matrices of an expert; two shards, one expert on both",
         glm.config(**BASE), mixed_experts_store, shard=split_an_expert, low_every=43),
    Case("q_real_like", "the formats of the public container: int4 rows, int8 embedding, head and MTP layer, no indexer tensors (dense), MTP complete",
         glm.config(**{**BASE, "num_nextn_predict_layers": 1}), real_like_store, mtp=True,
         drop=lambda n: has_indexer(n) or n.endswith(MTP_COPIES), may_lack=(".indexer.",),
         overrides={"index_topk": 4096}, dsa="absent", mtp_state="complete"),
    Case("fp8_block", "FP8 E4M3 with 128 x 128 blocks of `_scale_inv`, sizes not multiples of 128",
         glm.config(**{**BASE, **dict(
             hidden_size=140, num_hidden_layers=3, n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=24,
             intermediate_size=136, indexer_types=["full", "shared", "full"], vocab_size=97,
             quantization_config={
                 "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]})}),
         fp8_store),
    Case("mtp_complete", "a complete MTP layer, with the indexer and the embedding and head copies that an engine ignores",
         glm.config(**{**TINY, **dict(
             num_hidden_layers=3, indexer_types=["full", "shared", "full"], num_nextn_predict_layers=1)}),
         bf16_store, weights="mtp", prompts="mtp", mtp=True, mtp_state="complete"),
    Case("mtp_incomplete", "`mtp_complete` without one matrix of one MTP expert",
         glm.config(**{**TINY, **dict(
             num_hidden_layers=3, indexer_types=["full", "shared", "full"], num_nextn_predict_layers=1)}),
         bf16_store, weights="mtp", prompts="mtp", mtp=True,
         drop=lambda n: n == "model.layers.3.mlp.experts.5.up_proj.weight", mtp_state="incomplete"),
]  # fmt: skip
