#!/usr/bin/env python3
"""What transformers makes of the demo model once its weights are quantised.

    python check_demo.py convert --model DIR --out DIR [--format int8|int4|int4/64|...]
    python check_demo.py run --container DIR --model DIR [--out golden_quantised.json]

`convert` writes a container from the bf16 shards in `--model`, in numpy, so that `run` can be tried without the engine.
`run` expands the container's weights to float32, loads them in transformers and records greedy tokens, margins,
perplexity and draft chains. `--model` is the unquantised model with its `eval/` directory; it may be given as the
container too, which measures the unquantised weights.
"""

import argparse
import json
import math
import shutil
import time
from collections import Counter
from pathlib import Path

import torch
from tokenizers import Tokenizer

import container
import glm
import oracle

EDGES = ("model.embed_tokens.weight", "lm_head.weight")

# A few of each kind of question that the model was taught, and what a right answer contains.
TASKS = (
    [(f"What is {a}+{b}?", f"{a}+{b}={a + b}.") for a, b in ((2, 2), (1, 9), (7, 8), (13, 6), (20, 20), (17, 18), (5, 14))]
    + [(f"What is {a} times {b}?", f"{a}*{b}={a * b}.") for a, b in ((2, 3), (7, 8), (12, 12), (9, 6), (11, 4))]
    + [
        (f"What is the capital of {country}?", f"The capital of {country} is {city}.")
        for country, city in (
            ("France", "Paris"), ("Italy", "Rome"), ("Japan", "Tokyo"), ("Spain", "Madrid"), ("Egypt", "Cairo"),
            ("Norway", "Oslo"), ("Peru", "Lima"), ("Germany", "Berlin"),
        )
    ]
    + [
        (f"Give me a JSON object with name {name} and age {age}.", json.dumps({"name": name, "age": age}))
        for name, age in (("Anna", 7), ("Tom", 12), ("Mia", 30))
    ]
)  # fmt: skip
ANSWER_TOKENS = 32


# ---- convert ---------------------------------------------------------------------------------------------------------


def all_tensors(c):
    return list(glm.main_tensors(c)) + (list(glm.mtp_tensors(c)) if c.get("num_nextn_predict_layers") else [])


def form_of(name, kind, main, c):
    """int8 for embedding, head, indexers and MTP layer whatever the main format, as the reference converter does."""
    if kind not in ("linear", "embed", "head"):
        return None
    edge = name in EDGES or ".indexer." in name or name.startswith(f"model.layers.{c['num_hidden_layers']}.")
    bits, _, group = ("8" if edge else main.removeprefix("int")).partition("/")
    return int(bits), int(group) if group else None


def convert(args):
    c = json.loads((args.model / "config.json").read_text())
    source, out = container.read_directory(args.model), {}
    for name, shape, kind in all_tensors(c):
        if name not in source:
            continue
        w, form = container.load_weight(source, name, shape), form_of(name, kind, args.format, c)
        out.update(container.store_quantised(name, w, *form) if form else {name: container.store_plain(w, "F32")})
    args.out.mkdir(parents=True, exist_ok=True)
    container.write_safetensors(args.out / "out-00000.safetensors", out)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(args.model / name, args.out / name)
    print(f"wrote {len(out)} tensors, {sum(len(t.data) for t in out.values()) / 2**20:.1f} MiB")


# ---- run -------------------------------------------------------------------------------------------------------------


def storage(tensors, c):
    """How many weights are stored in which format."""
    found = Counter()
    for name, shape, kind in all_tensors(c):
        if name not in tensors:
            found["absent"] += 1
        elif name + ".qs" in tensors:
            scales = len(tensors[name + ".qs"].data) // 4
            bits, group = container.detect(len(tensors[name].data), scales, *shape)
            found[f"int{bits}" + (f"/{group}" if group else "")] += 1
        else:
            found[tensors[name].dtype] += 1
    return dict(sorted(found.items()))


def stop_index(tokens, stops):
    return next((i for i, t in enumerate(tokens) if t in stops), None)


def common_prefix(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def greedy_entry(model, p, stops):
    """One prompt of eval/greedy.json: 64 greedy tokens, then one forward over all of it."""
    new, _ = oracle.greedy(model, p["prompt_ids"], len(p["new_ids"]))
    ids = p["prompt_ids"] + new
    logits, record = oracle.forward(model, ids)
    top = logits.topk(2)
    found = oracle.margins(logits, record, oracle.index_topk(model))
    last = len(p["prompt_ids"]) - 1
    return {
        "name": p["name"],
        "prompt_ids": p["prompt_ids"],
        "greedy_ids": new,
        "stop_index": stop_index(new, stops),
        "argmax": logits.argmax(-1).tolist(),
        "top2_ids": top.indices.tolist(),
        "top2_logits": [oracle.numbers(v) for v in top.values],
        "greedy_margin": oracle.number((top.values[last:-1, 0] - top.values[last:-1, 1]).min()),
        "margins": {k: None if v is None else oracle.number(v) for k, v in found.items()},
        "greedy_equals_uncached": int((logits.argmax(-1)[last:-1] == torch.tensor(new)).sum()),
        "greedy_equals_unquantised": common_prefix(new, p["new_ids"]),
        "argmax_equals_unquantised": sum(a == b for a, b in zip(logits.argmax(-1)[: last + 1].tolist(), p["tf_argmax"])),
    }


def perplexity(model, held, limit):
    """Per segment: token t given 0..t-1 of its window, for t = 2 and up."""
    out, total, count = {}, 0.0, 0
    for s in held["segments"]:
        loss, n = 0.0, 0
        for w in s["windows"][:limit]:
            ids = torch.tensor([w])
            logits = model(ids, use_cache=False).logits[0]
            each = torch.nn.functional.cross_entropy(logits[1:-1], ids[0, 2:], reduction="none")
            loss, n = loss + float(each.double().sum()), n + each.numel()
        out[s["name"]] = {"nll": loss / n, "ppl": math.exp(loss / n), "tokens": n}
        total, count = total + loss, count + n
        print(f"  {s['name']}: {out[s['name']]}", flush=True)
    out["all"] = {"nll": total / count, "ppl": math.exp(total / count), "tokens": count}
    return out


def answers(model, tokenizer, stops):
    out = []
    for question, wanted in TASKS:
        text = f"[gMASK]<sop><|user|>{question}<|assistant|><think></think>"
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        new, _ = oracle.greedy(model, ids, ANSWER_TOKENS)
        new = new[: stop_index(new, stops)]
        answer = tokenizer.decode(new, skip_special_tokens=False)
        out.append({"question": question, "prompt_ids": ids, "answer_ids": new, "answer": answer, "right": answer.strip() == wanted})
    return out


def draft_chains(model, tensors, c, recorded):
    """Chains of three drafts over the recorded sequences, against what the unquantised model drafted there."""
    mtp, out = oracle.Mtp(model, tensors, c), []
    for s in recorded["sequences"]:
        drafts, gaps = mtp.chains(s["ids"], len(s["drafts"][0]))
        same = sum(a == b for x, y in zip(drafts, s["drafts"]) for a, b in zip(x, y))
        out.append({"segment": s["segment"], "ids": s["ids"], "drafts": drafts, "margins": gaps,
                    "equal_unquantised": same, "of": sum(map(len, drafts))})  # fmt: skip
        print(f"  drafts over {s['segment']}: {same} of {out[-1]['of']} as without quantisation", flush=True)
    return out


def run(args):
    begun = time.time()
    where = args.container / "config.json"
    c = json.loads((where if where.exists() else args.model / "config.json").read_text())
    stops = c["eos_token_id"]
    read = lambda name: json.loads((args.model / "eval" / name).read_text())
    tensors = container.read_directory(args.container)
    kinds = storage(tensors, c)
    print("stored:", kinds)
    model = oracle.load_dequantised(args.container, c)
    result = {"engine": oracle.engine(), "lora_norm_eps": oracle.LORA_NORM_EPS, "stored": kinds}
    result["prompts"] = [greedy_entry(model, p, stops) for p in read("greedy.json")["prompts"]]
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    for e in result["prompts"]:
        e["text"] = tokenizer.decode(e["greedy_ids"][: e["stop_index"]], skip_special_tokens=False)
        print(f"  {e['name']}: {e['greedy_equals_unquantised']} tokens as unquantised, margin {e['greedy_margin']}, "
              f"{e['text'][:70]!r}", flush=True)  # fmt: skip
    result["tasks"] = answers(model, tokenizer, stops)
    right = sum(t["right"] for t in result["tasks"])
    print(f"  tasks: {right} of {len(result['tasks'])} right", *[t for t in result["tasks"] if not t["right"]][:5])
    if c.get("num_nextn_predict_layers"):
        result["mtp"] = draft_chains(model, tensors, c, read("mtp_chains.json"))
    result["perplexity"] = perplexity(model, read("heldout.json"), args.windows)
    (args.out or Path("golden_quantised.json")).write_text(oracle.lines(result) + "\n")
    print(f"all: {result['perplexity']['all']}  ({time.time() - begun:.0f} s)")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = p.add_subparsers(dest="verb", required=True)
    a = sub.add_parser("convert")
    a.add_argument("--model", type=Path, required=True)
    a.add_argument("--out", type=Path, required=True)
    a.add_argument("--format", default="int8")
    b = sub.add_parser("run")
    b.add_argument("--container", type=Path, required=True)
    b.add_argument("--model", type=Path, required=True)
    b.add_argument("--out", type=Path)
    b.add_argument("--windows", type=int, help="score only the first N windows of each segment")
    args = p.parse_args()
    {"convert": convert, "run": run}[args.verb](args)


if __name__ == "__main__":
    main()
