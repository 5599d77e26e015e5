"""Makes the goldens of conversion: small checkpoints in every source format, and what they must become.

    python tools/oracle/convert_goldens.py

Written from the description of the conversion alone, in numpy, on top of container.py. For every case a folder with
config.json and weight files, and expected.json: for every set of targets, by tensor of the result, its format and the
first 16 digits of the SHA-256 of its codes and scales.
"""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
from container import (
    F32,
    Stored,
    _spread_blocks,
    e4m3_encode,
    e4m3_table,
    load_plain,
    pack,
    quantise_codes,
    store_fp8,
    store_plain,
    write_safetensors,
)

OUT = Path(__file__).resolve().parents[2] / "crates/forebay-hub/tests/goldens"

# What every part becomes; parts that are not named are int8.
TARGETS = {
    "int4-g64": {"experts": "int4-g64", "dense": "int4-g64"},
    "int4-row": {"experts": "int4-row", "dense": "int4-row"},
    "int8": {"experts": "int8", "dense": "int8"},
    "mix": {
        "experts": "int4-g16", "dense": "int2-row", "attention": "int4-g32", "embed": "bf16", "head": "f16",
        "indexer": "f32", "mtp": "int4-g32",
    },
}  # fmt: skip


def config(**sizes):
    base = {
        "model_type": "glm_moe_dsa", "num_hidden_layers": 2, "first_k_dense_replace": 1, "num_attention_heads": 2,
        "n_routed_experts": 3, "num_experts_per_tok": 2, "n_shared_experts": 1, "vocab_size": 70, "n_group": 1,
        "topk_group": 1, "norm_topk_prob": True, "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "eos_token_id": [68], "index_topk": 4,
        "index_n_heads": 2, "index_head_dim": 12, "indexer_types": ["full", "full"],
        "num_nextn_predict_layers": 1, "max_position_embeddings": 512,
    }  # fmt: skip
    return base | sizes


CASES = {
    # Odd widths: unused bits, and tensors that end between words.
    "bf16": config(hidden_size=104, intermediate_size=112, moe_intermediate_size=33, q_lora_rank=40, kv_lora_rank=24,
                   qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=17),
    # Blocks of 128 x 128 that are cut off on both sides.
    "fp8": config(hidden_size=200, intermediate_size=160, moe_intermediate_size=40, q_lora_rank=130, kv_lora_rank=24,
                  qk_nope_head_dim=60, qk_rope_head_dim=12, v_head_dim=16, n_routed_experts=2, vocab_size=140),
    # All experts of a layer in two tensors.
    "fused": config(hidden_size=64, intermediate_size=48, moe_intermediate_size=34, q_lora_rank=16, kv_lora_rank=16,
                    qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8),
    "nvfp4": config(hidden_size=128, intermediate_size=100, moe_intermediate_size=36, q_lora_rank=36, kv_lora_rank=24,
                    qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16),
}  # fmt: skip


def shapes(c):
    """name -> (part, shape) of every tensor of the model."""
    d, layers, heads = c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"]
    rq, rkv = c["q_lora_rank"], c["kv_lora_rank"]
    n, p, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    m, f, e, vocab = c["moe_intermediate_size"], c["intermediate_size"], c["n_routed_experts"], c["vocab_size"]
    ih, idim = c["index_n_heads"], c["index_head_dim"]
    out = {
        "model.embed_tokens.weight": ("embed", (vocab, d)),
        "lm_head.weight": ("head", (vocab, d)),
        "model.norm.weight": ("float", (d,)),
    }

    def mlp(prefix, part, width):
        out[f"{prefix}gate_proj.weight"] = (part, (width, d))
        out[f"{prefix}up_proj.weight"] = (part, (width, d))
        out[f"{prefix}down_proj.weight"] = (part, (d, width))

    for layer in range(layers + 1):
        mtp = layer == layers
        part = (lambda _: "mtp") if mtp else (lambda x: x)
        x = f"model.layers.{layer}."
        for norm, size in (("input_layernorm", d), ("post_attention_layernorm", d), ("self_attn.q_a_layernorm", rq),
                           ("self_attn.kv_a_layernorm", rkv)):  # fmt: skip
            out[f"{x}{norm}.weight"] = ("float", (size,))
        for proj, shape in (("q_a_proj", (rq, d)), ("q_b_proj", (heads * (n + p), rq)),
                            ("kv_a_proj_with_mqa", (rkv + p, d)), ("kv_b_proj", (heads * (n + v), rkv)),
                            ("o_proj", (d, heads * v))):  # fmt: skip
            out[f"{x}self_attn.{proj}.weight"] = (part("attention"), shape)
        if layer < c["first_k_dense_replace"]:
            mlp(f"{x}mlp.", "dense", f)
        else:
            out[f"{x}mlp.gate.weight"] = ("float", (e, d))
            out[f"{x}mlp.gate.e_score_correction_bias"] = ("float", (e,))
            mlp(f"{x}mlp.shared_experts.", part("dense"), m)
            for i in range(e):
                mlp(f"{x}mlp.experts.{i}.", part("experts"), m)
        if mtp:
            out[f"{x}eh_proj.weight"] = ("mtp", (d, 2 * d))
            for norm in ("enorm", "hnorm", "shared_head.norm"):
                out[f"{x}{norm}.weight"] = ("float", (d,))
        elif c["indexer_types"][layer] == "full":
            x += "self_attn.indexer."
            out[f"{x}wq_b.weight"] = ("indexer", (ih * idim, rq))
            out[f"{x}wk.weight"] = ("indexer", (idim, d))
            out[f"{x}weights_proj.weight"] = ("indexer", (ih, d))
            out[f"{x}k_norm.weight"] = out[f"{x}k_norm.bias"] = ("float", (idim,))
    return out


# ---- NVFP4 -----------------------------------------------------------------------------------------------------------

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F32)


def store_nvfp4(name, w):
    """What ModelOpt stores, and the weights that it stands for."""
    o, i = w.shape
    groups = -(-i // 16)
    padded = np.zeros((o, groups * 16), F32)
    padded[:, :i] = w
    blocks = padded.reshape(o, groups, 16)
    absmax = np.abs(blocks).max(2)
    scale_2 = F32(absmax.max() / F32(6 * 448))
    scales = e4m3_encode(np.clip(absmax / 6 / scale_2, 0, 448).astype(F32))
    step = e4m3_table()[scales]
    safe = np.where(step == 0, F32(1), step) * scale_2
    codes = np.abs(np.abs(blocks / safe[:, :, None])[..., None] - E2M1).argmin(3).astype(np.uint8)
    codes |= np.where(np.signbit(blocks), np.uint8(8), np.uint8(0))
    # Code times scale is exact in f32; times the matrix's scale there is one rounding.
    signed = np.where(codes & 8, -E2M1[codes & 7], E2M1[codes & 7]).astype(F32)
    values = ((signed * step[:, :, None]).astype(F32) * scale_2).astype(F32).reshape(o, -1)[:, :i]
    flat = codes.reshape(o, -1)[:, : i + i % 2]
    packed = flat[:, 0::2] | flat[:, 1::2] << 4
    return {
        name: Stored("U8", packed.shape, packed.astype(np.uint8).tobytes()),
        name + "_scale": Stored("F8_E4M3", scales.shape, scales.tobytes()),
        name + "_scale_2": Stored("F32", (), scale_2.tobytes()),
    }, values


# ---- cases -----------------------------------------------------------------------------------------------------------


def build(case, c, rng):
    """The files' tensors, and the weights by name that they stand for."""
    stored, weights = {}, {}
    for name, (part, shape) in shapes(c).items():
        if part == "float":
            w = rng.normal(1 if "norm" in name else 0, 0.2, shape).astype(F32)
            dtype = ("F32", "BF16", "F16")[len(weights) % 3]
        else:
            w = (rng.normal(0, 0.05, shape) * np.exp(rng.normal(0, 0.5, (shape[0], 1)))).astype(F32)
            # A row of zeros takes the smallest scale; exact halves are where ways of rounding differ.
            w[0] = 0
            w[-1] = np.arange(shape[1]) % 15 * 0.5 - 3.5
            dtype = {"bf16": "BF16", "fused": "F32", "fp8": "BF16", "nvfp4": "F16"}[case]
        quantised = part != "float" and name not in ("model.embed_tokens.weight", "lm_head.weight")
        if case == "fp8" and quantised:
            pair = store_fp8(name, w)
            scale = load_plain(pair[name + "_scale_inv"])
            scale = np.where(scale == 0, F32(1), scale)
            pair = {name: pair[name], name + "_scale_inv": Stored("F32", scale.shape, scale.tobytes())}
            codes = np.frombuffer(pair[name].data, np.uint8).reshape(shape)
            stored |= pair
            weights[name] = (e4m3_table()[codes] * _spread_blocks(scale, *shape)).astype(F32)
        elif case == "nvfp4" and quantised and "self_attn" not in name:
            pair, weights[name] = store_nvfp4(name, w)
            stored |= pair
        else:
            stored[name] = store_plain(w, dtype)
            weights[name] = load_plain(stored[name])
    if case == "fused":
        for layer in range(c["first_k_dense_replace"], c["num_hidden_layers"] + 1):
            x, experts = f"model.layers.{layer}.mlp.experts.", range(c["n_routed_experts"])
            take = lambda part: [stored.pop(f"{x}{e}.{part}_proj.weight") and weights[f"{x}{e}.{part}_proj.weight"]
                                 for e in experts]  # fmt: skip
            gate, up, down = take("gate"), take("up"), take("down")
            stored[f"{x}gate_up_proj"] = store_plain(np.stack([np.concatenate(gu) for gu in zip(gate, up)]), "F32")
            stored[f"{x}down_proj"] = store_plain(np.stack(down), "F32")
    return stored, weights


def encode(w, fmt):
    """The format that is written, codes, scales."""
    w2 = w.reshape(-1, w.shape[-1])
    if fmt in ("f32", "bf16", "f16"):
        return fmt, store_plain(w, fmt.upper()).data, b""
    bits = int(fmt[3])
    group = int(fmt.split("-g")[1]) if "-g" in fmt else None
    if group and group >= w2.shape[1]:
        group, fmt = None, "int4-row"
    codes, scales = quantise_codes(w2, bits, group)
    return fmt, pack(codes, bits), scales.astype(F32).tobytes()


def expected(c, weights, parts):
    out = {}
    for name, (part, _) in shapes(c).items():
        fmt = "f32" if part == "float" else parts.get(part, "int8")
        fmt, codes, scales = encode(weights[name], fmt)
        out[name] = f"{fmt} {hashlib.sha256(codes + scales).hexdigest()[:16]}"
    return out


def write(case, c):
    rng = np.random.default_rng(list(case.encode()))
    stored, weights = build(case, c, rng)
    folder = OUT / case
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if case == "nvfp4":
        c = c | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    if case == "fp8":
        c = c | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}}
    (folder / "config.json").write_text(json.dumps(c, indent=1) + "\n")
    # Cut where nothing ends: experts, and matrices and their scales, lie in different files.
    names = list(stored)
    cuts = [0, len(names) // 3, 2 * len(names) // 3 + 1, len(names)]
    for i in range(3):
        part = {name: stored[name] for name in names[cuts[i] : cuts[i + 1]]}
        write_safetensors(folder / f"model-0000{i + 1}-of-00003.safetensors", part, {"format": "pt"})
    results = {target: expected(c, weights, parts) for target, parts in TARGETS.items()}
    (folder / "expected.json").write_text(json.dumps({"targets": TARGETS, "results": results}, indent=0) + "\n")
    print(case, len(stored), "tensors,", sum(f.stat().st_size for f in folder.iterdir()), "bytes")


if __name__ == "__main__":
    for case, c in CASES.items():
        write(case, c)
