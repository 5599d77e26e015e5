#!/usr/bin/env python3
"""Writes the golden cases: tiny random models of the GLM-5.2 architecture, and what transformers computes with them.

    python make_goldens.py [--out DIR] [CASE ...]
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch

import container
import glm
import oracle
from cases import CASES
from container import Stored

DRAFTS = 3


# ---- weights ---------------------------------------------------------------------------------------------------------


def case_tensors(case):
    names = list(glm.main_tensors(case.config))
    if case.mtp:
        names += list(glm.mtp_tensors(case.config))
    return names


def stored(case, name, shape, kind):
    w = glm.random_weight(case.weights or case.name, name, shape, kind) * np.float32(case.gain(name))
    form = case.store(name, kind)
    if form == "F16":
        w.reshape(-1)[::17] *= 2.0**-18  # into the subnormals of F16
    if form in ("F32", "BF16", "F16"):
        return {name: container.store_plain(w, form)}
    if form == "fp8":
        return container.store_fp8(name, w)
    bits, _, group = form.removeprefix("int").partition("/")
    return container.store_quantised(name, w, int(bits), int(group) if group else None, case.padding, case.low_every)


def fuse(tensors, c):
    """Replaces the per-expert matrices of each layer by the two stacked tensors."""
    out, e = dict(tensors), c["n_routed_experts"]
    d, m = c["hidden_size"], c["moe_intermediate_size"]
    for i in range(c["first_k_dense_replace"], c["num_hidden_layers"]):
        p = f"model.layers.{i}.mlp.experts."
        take = lambda x, role: out.pop(f"{p}{x}.{role}_proj.weight").data
        gate_up = b"".join(take(x, "gate") + take(x, "up") for x in range(e))
        down = b"".join(take(x, "down") for x in range(e))
        out[p + "gate_up_proj"] = Stored("BF16", (e, 2 * m, d), gate_up)
        out[p + "down_proj"] = Stored("BF16", (e, d, m), down)
    return out


def write_weights(case, directory):
    tensors = {}
    for name, shape, kind in case_tensors(case):
        if not case.drop(name):
            tensors.update(stored(case, name, shape, kind))
    if case.fused:
        tensors = fuse(tensors, case.config)
    (directory / "config.json").write_text(json.dumps(case.config, indent=1) + "\n")
    plain = not any(n.endswith((".qs", "_scale_inv")) for n in tensors)
    if case.shard is None:
        container.write_safetensors(directory / "model.safetensors", tensors, {"format": "pt"} if plain else None)
        return plain
    for s in (0, 1):
        part = {n: t for n, t in tensors.items() if case.shard(n) == s}
        container.write_safetensors(directory / f"out-{s:05d}.safetensors", part)
    return plain


# ---- prompts ---------------------------------------------------------------------------------------------------------


def candidate_prompt(case, n, length, k):
    u = glm.uniform(f"{case.name}/prompt {n}/candidate {k}", length)
    return np.floor((u + 1) / 2 * (case.config["vocab_size"] - 2)).astype(int).tolist()


def run(model, prompt, case):
    """Everything about one prompt: the greedy tokens, and one forward over prompt and greedy tokens."""
    new, cached = oracle.greedy(model, prompt, case.greedy)
    ids = prompt + new
    logits, record = oracle.forward(model, ids)
    noise = {"cached_vs_full": oracle.difference(cached, logits[len(prompt) - 1 : -1])}
    return {
        "ids": ids,
        "prompt": prompt,
        "new": new,
        "logits": logits,
        "record": record,
        "margins": oracle.margins(logits, record, oracle.index_topk(model)),
        "noise": noise,
    }


def fitness(margins, wanted):
    return min(margins[k] / wanted[k] for k in wanted if margins[k] is not None)


def prompt_fitness(model, prompt, wanted):
    """Fitness of the prompt alone, an upper bound of that with its greedy tokens, at the cost of one forward."""
    logits, record = oracle.forward(model, prompt)
    return fitness(oracle.margins(logits, record, oracle.index_topk(model)), wanted)


def dense_fitness(model, prompt, case):
    topk = oracle.index_topk(model)
    oracle.set_index_topk(model, 1 << 20)
    r = run(model, prompt, case)
    oracle.set_index_topk(model, topk)
    return fitness({**r["margins"], "dsa": None}, case.wanted)


def search_prompt(model, case, n, length):
    """The first candidate all of whose decisions are clear, else the clearest of all."""
    best, best_fitness = None, -1.0
    for k in range(case.candidates):
        prompt = candidate_prompt(case, n, length, k)
        if prompt_fitness(model, prompt, case.wanted) <= best_fitness:
            continue
        r = run(model, prompt, case)
        fit = fitness(r["margins"], case.wanted)
        if case.also_dense and fit > best_fitness:
            fit = min(fit, dense_fitness(model, prompt, case))
        if fit > best_fitness:
            best, best_fitness = r, fit
        if best_fitness >= 1:
            break
    return best


# ---- golden.json -----------------------------------------------------------------------------------------------------


def prompt_entry(r, topk):
    ids, logits, last = r["ids"], r["logits"], len(r["prompt"]) - 1
    # The arg-max over the cached run and the uncached one must agree, or the case is worthless.
    assert [int(x) for x in logits.argmax(-1)[last:-1]] == r["new"], "cached and uncached greedy tokens differ"
    top = logits.topk(2)
    shown = sorted({0, last // 2, last, len(ids) - 1})
    return {
        "prompt_ids": r["prompt"],
        "greedy_ids": r["new"],
        "argmax": logits.argmax(-1).tolist(),
        "top2_ids": top.indices.tolist(),
        "top2_logits": [oracle.numbers(v) for v in top.values],
        "mean_nll": oracle.nll(logits, ids),
        "margins": {k: None if v is None else oracle.number(v) for k, v in r["margins"].items()},
        "logits": [{"position": p, "values": oracle.numbers(logits[p])} for p in shown],
        "trace": oracle.trace(r["record"], last, topk),
    }


def narrowest(entries):
    out = {}
    for k in ("argmax", "router", "dsa"):
        found = [e["margins"][k] for e in entries if e["margins"][k] is not None]
        out[k] = min(found) if found else None
    return out


def golden(case, directory, plain, reuse):
    c = case.config
    load = oracle.load if plain else lambda d, *a: oracle.load_dequantised(d, c, *a)
    model = load(directory, case.overrides, case.may_lack)
    assert model.config.indexer_types == glm.indexer_types(c)
    topk = model.config.index_topk
    key = case.prompts or case.name
    if key in reuse:
        runs = [run(model, p, case) for p in reuse[key]]
    else:
        runs = [search_prompt(model, case, n, length) for n, length in enumerate(case.lengths)]
        reuse[key] = [r["prompt"] for r in runs]
    entries = [prompt_entry(r, topk) for r in runs]
    if case.mtp_state == "complete":
        mtp = oracle.Mtp(model, container.read_directory(directory), c)
        for r, e in zip(runs, entries):
            drafts, gaps = mtp.chains(r["ids"], DRAFTS)
            e["mtp"] = {"drafts": drafts, "margins": gaps}
    low = min(float(r["logits"].min()) for r in runs)
    high = max(float(r["logits"].max()) for r in runs)
    dense = None
    if case.dsa == "active" and max(case.lengths) + case.greedy > topk:
        oracle.set_index_topk(model, 1 << 20)
        dense = max(oracle.difference(oracle.forward(model, r["ids"])[0], r["logits"]) for r in runs)
        oracle.set_index_topk(model, topk)
    kernels = max(oracle.difference(oracle.other_kernels(model, r["ids"]), r["logits"]) for r in runs)
    double = max(oracle.difference(oracle.float64_logits(model, r["ids"]), r["logits"].double()) for r in runs)
    dropped = sorted(n for n, _, _ in case_tensors(case) if case.drop(n) and case.mtp_state == "incomplete")
    return {
        "case": case.name,
        "about": case.about,
        "engine": oracle.engine(),
        "lora_norm_eps": oracle.LORA_NORM_EPS,
        "dsa": case.dsa,
        "indexer_types": glm.indexer_types(c),
        "mtp": {"state": case.mtp_state, "missing": dropped, "depth": DRAFTS if case.mtp_state == "complete" else 0},
        "logit_min": oracle.number(low),
        "logit_max": oracle.number(high),
        "logit_range": oracle.number(high - low),
        "margins": narrowest(entries),
        "noise": {
            "cached_vs_full": oracle.number(max(r["noise"]["cached_vs_full"] for r in runs)),
            "other_kernels": oracle.number(kernels),
            "float64": oracle.number(double),
        },
        "dense_difference": None if dense is None else oracle.number(dense),
        "prompts": entries,
    }


def write_json(path, value):
    path.write_text(oracle.lines(value) + "\n")


def write_rope(directory):
    """cos and sin as transformers computes them, near and far."""
    from transformers import GlmMoeDsaConfig
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
        GlmMoeDsaRotaryEmbedding,
        apply_rotary_pos_emb_interleave,
    )

    positions = [0, 1, 2, 3, 63, 64, 1000, 1123, 8191, 32767, 131071, 202751, 1048575]
    tables = []
    for theta in (1e4, 1e6):
        for dim in (6, 8, 64):
            c = GlmMoeDsaConfig(qk_rope_head_dim=dim, rope_parameters={"rope_theta": theta, "rope_type": "default"})
            rope = GlmMoeDsaRotaryEmbedding(c)
            cos, sin = rope(torch.zeros(1), torch.tensor([positions]))
            x = torch.tensor(glm.uniform(f"rope {theta} {dim}", dim).astype(np.float32))
            q = x.expand(1, 1, len(positions), dim)
            rotated, _ = apply_rotary_pos_emb_interleave(q, q, cos, sin)
            tables.append(
                {
                    "theta": theta,
                    "dim": dim,
                    "inv_freq": oracle.numbers(rope.inv_freq),
                    "cos": [oracle.numbers(v[: dim // 2]) for v in cos[0]],
                    "sin": [oracle.numbers(v[: dim // 2]) for v in sin[0]],
                    "input": oracle.numbers(x),
                    "rotated": [oracle.numbers(v) for v in rotated[0, 0]],
                }
            )
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "vectors.json", {"engine": oracle.engine(), "positions": positions, "tables": tables})


def check_fp8():
    """Our E4M3 against torch's."""
    codes = torch.arange(256, dtype=torch.uint8)
    mine = torch.tensor(container.e4m3_table())
    assert torch.equal(codes.view(torch.float8_e4m3fn).float().nan_to_num(nan=-1), mine.nan_to_num(nan=-1))
    w = (glm.uniform("fp8", 20000) * 448).astype(np.float32)
    w[::3] *= 1e-4
    theirs = torch.tensor(w).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(theirs & 0x7F, container.e4m3_encode(w) & 0x7F)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[2] / "tests" / "goldens")
    p.add_argument("cases", nargs="*")
    args = p.parse_args()
    torch.set_num_threads(1)  # these matrices are too small for more
    container.self_check()
    check_fp8()
    known = {c.name for c in CASES}
    if unknown := set(args.cases) - known:
        p.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    reuse = {}
    for case in CASES:
        directory = args.out / case.name
        if args.cases and case.name not in args.cases:
            if case.prompts and case.prompts not in reuse and (directory / "golden.json").exists():
                kept = json.loads((directory / "golden.json").read_text())
                reuse[case.prompts] = [e["prompt_ids"] for e in kept["prompts"]]
            continue
        directory.mkdir(parents=True, exist_ok=True)
        for old in directory.iterdir():
            old.unlink()
        plain = write_weights(case, directory)
        g = golden(case, directory, plain, reuse)
        write_json(directory / "golden.json", g)
        size = sum(f.stat().st_size for f in directory.iterdir())
        print(f"{case.name:19} {size / 1024:6.0f} KiB  range {g['logit_range']:6.2f}  margins {g['margins']}  "
              f"noise {g['noise']}  dense {g['dense_difference']}", flush=True)  # fmt: skip
    if not args.cases:
        write_rope(args.out / "rope")


if __name__ == "__main__":
    main()
