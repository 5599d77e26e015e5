"""Runs `GlmMoeDsaForCausalLM` of transformers in float32 and records what an engine has to reproduce."""

import copy
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import DynamicCache, GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaDecoderLayer,
    GlmMoeDsaRMSNorm,
    GlmMoeDsaTopkRouter,
    apply_rotary_pos_emb_interleave,
)

import container
import glm

torch.set_grad_enabled(False)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

# The class default of transformers' RMSNorm, which q_a_layernorm and kv_a_layernorm are built with.
LORA_NORM_EPS = 1e-6


def engine():
    return {
        "library": "transformers",
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
        "dtype": "float32",
        "attention": "eager",
        "experts": "eager",
    }


def load(directory, overrides=None, may_lack=()):
    """The model in `directory`, in float32, plain loops everywhere. Fails when a tensor is missing, unless its name
    contains one of `may_lack`; tensors that transformers has no use for must belong to the MTP layer."""
    c = json.loads((Path(directory) / "config.json").read_text())
    m, info = GlmMoeDsaForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
        **(overrides or {}),
    )
    lost = [k for k in info["missing_keys"] if not any(x in k for x in may_lack)]
    mtp = f"model.layers.{c['num_hidden_layers']}."
    odd = [k for k in info["unexpected_keys"] if not k.startswith(mtp) and not any(x in k for x in may_lack)]
    if lost or odd or info["mismatched_keys"]:
        raise ValueError(f"{directory}: missing {lost}, unexpected {odd}, mismatched {info['mismatched_keys']}")
    assert all(p.dtype == torch.float32 for p in m.parameters())
    for layer in m.model.layers:
        assert layer.self_attn.q_a_layernorm.variance_epsilon == LORA_NORM_EPS
        assert layer.self_attn.kv_a_layernorm.variance_epsilon == LORA_NORM_EPS
    return m.eval()


def load_dequantised(directory, c, overrides=None, may_lack=()):
    """As `load`, for a directory whose weights transformers cannot read: they are expanded to F32 first."""
    tensors = container.read_directory(directory)
    plain = {}
    for name, shape, _ in glm.main_tensors(c):
        if name not in tensors and any(x in name for x in may_lack):
            continue
        plain[name] = container.store_plain(container.load_weight(tensors, name, shape), "F32")
    with tempfile.TemporaryDirectory() as tmp:
        bare = {k: v for k, v in c.items() if k != "quantization_config"}
        (Path(tmp) / "config.json").write_text(json.dumps(bare))
        container.write_safetensors(Path(tmp) / "model.safetensors", plain, {"format": "pt"})
        return load(tmp, overrides, may_lack)


# ---- recording -------------------------------------------------------------------------------------------------------


class Recorder:
    """Keeps, for one uncached forward, the router's and the indexer's scores and choices, and the residual stream."""

    def __init__(self, model):
        self.router, self.indexer, self.hidden, self.handles = {}, {}, {}, []
        for i, layer in enumerate(model.model.layers):
            if hasattr(layer.mlp, "gate") and hasattr(layer.mlp, "experts"):
                self._add(layer.mlp.gate, self._router(i))
            if layer.self_attn.indexer is not None:
                self._add(layer.self_attn.indexer, self._indexer(i))
            self._add(layer, self._hidden(i))

    def _add(self, module, hook):
        self.handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def _router(self, i):
        def hook(module, args, kwargs, out):
            logits, weights, chosen = out
            self.router[i] = (logits.sigmoid() + module.e_score_correction_bias, weights, chosen)

        return hook

    def _indexer(self, i):
        def hook(module, args, kwargs, out):
            # The module returns indices only; its scores are computed again here, and must lead to the same indices.
            x, q_resid, (cos, sin), mask = args[:4]
            p, shape = module.qk_rope_head_dim, (*x.shape[:2], module.n_heads, module.head_dim)
            q, k = module.wq_b(q_resid).view(shape), module.k_norm(module.wk(x)).unsqueeze(2)
            q_rot, k_rot = apply_rotary_pos_emb_interleave(q[..., :p], k[..., :p], cos, sin, unsqueeze_dim=2)
            q, k = torch.cat([q_rot, q[..., p:]], -1), torch.cat([k_rot, k[..., p:]], -1).squeeze(2)
            per_head = (torch.matmul(q, k.transpose(-1, -2).unsqueeze(1)) * module.head_dim**-0.5).relu()
            weights = module.weights_proj(x) * module.n_heads**-0.5
            scores = torch.matmul(weights.unsqueeze(-2), per_head).squeeze(-2) + mask
            self.indexer[i] = (scores[0], out[0].long())

        return hook

    def _hidden(self, i):
        def hook(module, args, kwargs, out):
            if i == 0:
                self.hidden[0] = args[0][0]
            self.hidden[i + 1] = out[0][0]

        return hook

    def close(self):
        for h in self.handles:
            h.remove()


def forward(model, ids):
    """Logits [T, vocab] of one uncached forward, and what was recorded on the way."""
    r = Recorder(model)
    logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    r.close()
    return logits, r


def greedy(model, prompt, count):
    """`count` greedy tokens after `prompt`, with the KV cache; also the logits [count, vocab] that led to them.
    Stop tokens do not stop it."""
    cache = DynamicCache(config=model.config)
    out, logits, step = [], [], list(prompt)
    for _ in range(count):
        row = model(torch.tensor([step]), past_key_values=cache, use_cache=True).logits[0, -1]
        logits.append(row)
        out.append(int(row.argmax()))
        step = out[-1:]
    return out, torch.stack(logits)


def margins(logits, r, topk):
    """The narrowest decision of a forward: arg-max (first over second logit), router (last expert in over first one
    out, in units of choice = sigmoid + bias), DSA (last score in over first one out). None where nothing is decided."""
    top = logits.topk(2).values
    out = {"argmax": float((top[:, 0] - top[:, 1]).min()), "router": None, "dsa": None}
    gaps = []
    for choice, _, chosen in r.router.values():
        k = chosen.shape[1]
        if k < choice.shape[1]:
            s = choice.sort(descending=True).values
            gaps.append(float((s[:, k - 1] - s[:, k]).min()))
    out["router"] = min(gaps, default=None)
    gaps = []
    for scores, chosen in r.indexer.values():
        if scores.shape[0] > topk:
            s, order = scores[topk:].sort(descending=True)
            gap = s[:, topk - 1] - s[:, topk]
            same = (order[:, :topk].sort().values == chosen[topk:].sort().values).all(1)
            assert bool((same | (gap < 1e-6)).all()), "the scores computed here select something else"
            gaps.append(float(gap.min()))
    out["dsa"] = min(gaps, default=None)
    return out


def number(x):
    """A float that survives JSON: nine digits give an f32 back exactly."""
    return float(f"{float(x):.9g}")


def numbers(x):
    return [number(v) for v in np.asarray(x).reshape(-1)]


def lines(v, pad=""):
    """JSON with one line for each field, so that a diff shows which one changed."""
    inner = pad + " "
    if isinstance(v, dict) and v:
        body = ",\n".join(f"{inner}{json.dumps(k)}: {lines(x, inner)}" for k, x in v.items())
        return "{\n" + body + f"\n{pad}}}"
    if isinstance(v, list) and v and isinstance(v[0], dict):
        return "[\n" + ",\n".join(inner + lines(x, inner) for x in v) + f"\n{pad}]"
    return json.dumps(v, separators=(",", ":"))


def trace(r, position, topk):
    """What happened at one position: the residual stream after each layer, the experts, the selected positions."""
    hidden = []
    for i in sorted(r.hidden):
        x = r.hidden[i][position]
        hidden.append({"l2": number(x.double().norm()), "first": numbers(x[:8])})
    routers = []
    for i, (choice, weights, chosen) in sorted(r.router.items()):
        order = choice[position][chosen[position]].argsort(descending=True)
        routers.append(
            {
                "layer": i,
                "experts": chosen[position][order].tolist(),
                "weights": numbers(weights[position][order]),
            }
        )
    selections = []
    if position + 1 > topk:
        for i, (_, chosen) in sorted(r.indexer.items()):
            selections.append({"layer": i, "positions": sorted(chosen[position].tolist())})
    return {"position": position, "hidden": hidden, "router": routers, "dsa": selections}


def difference(a, b):
    return float((a - b).abs().max())


def indexers(model):
    return [x.self_attn.indexer for x in model.model.layers if x.self_attn.indexer is not None]


def index_topk(model):
    return indexers(model)[0].index_topk


def set_index_topk(model, topk):
    for x in indexers(model):
        x.index_topk = topk


def other_kernels(model, ids):
    """Logits of the same forward with transformers' other kernels (SDPA attention, batched expert matmul)."""
    model.set_attn_implementation("sdpa")
    model.set_experts_implementation("batched_mm")
    try:
        return model(torch.tensor([ids]), use_cache=False).logits[0]
    finally:
        model.set_attn_implementation("eager")
        model.set_experts_implementation("eager")


def float64_logits(model, ids):
    """Logits of the same forward in float64, to see how far off float32 is. transformers casts to float32 in the norms,
    the router and the eager softmax; those casts are undone here. Angles and indexer scores stay float32."""

    def norm(m):
        return lambda x: m.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + m.variance_epsilon))

    def router(m):
        def forward(x):
            p = (x.view(-1, m.hidden_dim) @ m.weight.T).sigmoid()
            chosen = (p + m.e_score_correction_bias).topk(m.top_k).indices
            w = p.gather(1, chosen)
            if m.norm_topk_prob:
                w = w / (w.sum(-1, keepdim=True) + 1e-20)
            return p, w * m.routed_scaling_factor, chosen

        return forward

    wide = copy.deepcopy(model).double()
    for m in wide.modules():
        if isinstance(m, GlmMoeDsaRMSNorm):
            m.forward = norm(m)
        elif isinstance(m, GlmMoeDsaTopkRouter):
            m.forward = router(m)
    wide.set_attn_implementation("sdpa")
    return wide(torch.tensor([ids]), use_cache=False).logits[0]


def nll(logits, ids):
    """Mean negative log-likelihood (nats) of ids[1:], each given the tokens before it."""
    return number(torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(ids[1:])))


# ---- the MTP layer ---------------------------------------------------------------------------------------------------


class Mtp:
    """The MTP layer. transformers has none, so it is put together here from transformers' own blocks: a sparse decoder
    layer with dense attention, four norms and `eh_proj`. Its input at position i is
    eh_proj([enorm(embedding(token i+1)) ; hnorm(h_i)]), with h_i after the final norm for a first draft and the layer's
    own raw output for later ones."""

    def __init__(self, model, tensors, c):
        n = c["num_hidden_layers"]
        self.model, p = model, f"model.layers.{n}."
        w = {
            name[len(p) :]: torch.tensor(container.load_weight(tensors, name, shape))
            for name, shape, _ in glm.mtp_tensors(c)
            if name in tensors
        }
        wide = GlmMoeDsaConfig(
            **{
                **c,
                "num_hidden_layers": n + 1,
                "indexer_types": glm.indexer_types(c) + ["shared"],
                "mlp_layer_types": c["mlp_layer_types"] + ["sparse"],
            },
            attn_implementation="eager",
            experts_implementation="eager",
        )
        self.layer = GlmMoeDsaDecoderLayer(wide, n).float().eval()
        state = {}
        for k in self.layer.state_dict():
            if k.endswith("experts.gate_up_proj"):
                pairs = [
                    torch.cat([w[f"mlp.experts.{e}.{s}_proj.weight"] for s in ("gate", "up")])
                    for e in range(c["n_routed_experts"])
                ]
                state[k] = torch.stack(pairs)
            elif k.endswith("experts.down_proj"):
                state[k] = torch.stack([w[f"mlp.experts.{e}.down_proj.weight"] for e in range(c["n_routed_experts"])])
            else:
                state[k] = w[k]
        self.layer.load_state_dict(state, strict=True)
        self.eh_proj = w["eh_proj.weight"]
        self.norms = {}
        for key in ("enorm", "hnorm", "shared_head.norm"):
            self.norms[key] = GlmMoeDsaRMSNorm(c["hidden_size"], c["rms_norm_eps"])
            self.norms[key].weight.copy_(w[key + ".weight"])

    def input_rows(self, tokens, hidden):
        e = self.norms["enorm"](self.model.model.embed_tokens(torch.tensor(tokens)))
        return torch.cat([e, self.norms["hnorm"](hidden)], -1) @ self.eh_proj.T

    def run(self, rows):
        n = rows.shape[0]
        x, positions = rows[None], torch.arange(n)[None]
        mask = torch.full((n, n), torch.finfo(torch.float32).min).triu(1)[None, None]
        everything = torch.arange(n, dtype=torch.int32).expand(1, n, n)
        rope = self.model.model.rotary_emb(x, position_ids=positions)
        out, _ = self.layer(
            x,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=rope,
            prev_topk_indices=everything,
        )
        return out[0]

    def logits(self, row):
        return self.model.lm_head(self.norms["shared_head.norm"](row))

    def chains(self, ids, depth, positions=None):
        """For each position i (all but the last by default): the chain of `depth` drafts made once token i+1 is known.
        Returns (drafts, margins): the first draft proposes token i+2. Rows 0..i of the MTP cache are first-pass rows,
        the g-th later draft adds row i+g."""
        hidden = self.model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        first = self.input_rows(ids[1:], hidden[:-1])
        drafts, gaps = [], []
        for i in range(len(ids) - 1) if positions is None else positions:
            rows, chain, gap = first[: i + 1], [], []
            for g in range(depth):
                out = self.run(rows)[-1]
                logits = self.logits(out)
                top = logits.topk(2)
                chain.append(int(logits.argmax()))
                gap.append(number(top.values[0] - top.values[1]))
                rows = torch.cat([rows, self.input_rows(chain[-1:], out[None])])
            drafts.append(chain)
            gaps.append(gap)
        return drafts, gaps
