"""The drafter for one anchor of one request, from released tensor names, in float64 loops."""

import numpy as np

from tests.oracles import attention, experts, formats, mhc, rope
from tests.oracles.norm import rms_norm


def draft(weights, config, main_hidden, anchor, position, *, numerics="f32", choose=None):
    """Draft behind ``anchor`` at ``position``; ``main_hidden`` [P, 3 D] of all positions before.

    ``choose(logits, k)`` picks the k-th token, the first largest by default. Returns hidden (before
    the last norm), base_logits, logits, confidence and tokens.
    """
    stages, size = config["num_nextn_predict_layers"], config["dspark_block_size"]
    ids = [anchor] + [config["dspark_noise_token_id"]] * (size - 1)
    n, eps = config["hc_mult"], config["rms_norm_eps"]
    streams = np.repeat(weights["embed.weight"][ids][:, None, :], n, axis=1)
    pre = np.tile(np.eye(n)[0], (size, 1))
    first = max(0, position - config["sliding_window"])
    main = [project_main(weights, config, row) for row in main_hidden[first:position]]
    for stage in range(stages):
        prefix = f"mtp.{stage}."
        w = {k[len(prefix) :]: v for k, v in weights.items() if k.startswith(prefix)}
        context = [_kv(w, config, x, first + i, numerics) for i, x in enumerate(main)]
        block = _Block(w, config, context, position, numerics)
        streams, pre = _sublayer(block, "attn", streams, pre)
        streams, pre = _sublayer(block, "ffn", streams, pre)
    hidden = np.array([mhc.mix_streams(x, a) for x, a in zip(streams, pre, strict=True)])
    last = f"mtp.{stages - 1}"
    normed = [rms_norm(row, weights[f"{last}.norm.weight"], eps) for row in hidden]
    base = np.array(normed) @ weights["head.weight"].T
    return {"hidden": hidden, "base_logits": base} | markov(
        weights, last, hidden, base, anchor, choose or (lambda logits, _: int(np.argmax(logits)))
    )


def project_main(weights, config, main_hidden):
    """Shared projection and norm of one position's features."""
    projected = weights["mtp.0.main_proj.weight"] @ main_hidden
    return rms_norm(projected, weights["mtp.0.main_norm.weight"], config["rms_norm_eps"])


def markov(weights, last, hidden, base, anchor, choose):  # noqa: PLR0917
    """The sequential part: bias of the previous token, confidence before the choice."""
    w1 = weights[f"{last}.markov_head.embed.weight"]
    w2 = weights[f"{last}.markov_head.head.weight"]
    w = weights[f"{last}.confidence_head.proj.weight"][0]
    previous, tokens, logits, confidence = anchor, [], [], []
    for k, (h, u) in enumerate(zip(hidden, base, strict=True)):
        feature = w1[previous]
        logits.append(u + w2 @ feature)
        confidence.append(float(w @ np.concatenate([h, feature])))
        previous = choose(logits[-1], k)
        tokens.append(previous)
    return {
        "logits": np.array(logits),
        "confidence": np.array(confidence),
        "tokens": np.array(tokens),
    }


class _Block:
    """Weights of a stage, the keys of its context, and where the block stands."""

    def __init__(self, w, config, context, position, numerics):
        self.w, self.config, self.context = w, config, context
        self.position, self.numerics = position, numerics


def _sublayer(block, site, streams, pre):
    config, w = block.config, block.w
    x = [mhc.mix_streams(s, a) for s, a in zip(streams, pre, strict=True)]
    x = [rms_norm(row, w[f"{site}_norm.weight"], config["rms_norm_eps"]) for row in x]
    y = (_attention if site == "attn" else _moe)(block, x)
    new_streams, new_pre = [], []
    for s, out in zip(streams, y, strict=True):
        m = mhc.project(s, w[f"hc_{site}_fn"])
        a, c, comb = mhc.coefficients(
            m,
            w[f"hc_{site}_base"],
            w[f"hc_{site}_scale"],
            num_streams=config["hc_mult"],
            iterations=config["hc_sinkhorn_iters"],
            eps=config["hc_eps"],
        )
        new_streams.append(mhc.update_streams(s, out, c, comb))
        new_pre.append(a)
    return np.array(new_streams), np.array(new_pre)


def _frequencies(config):
    return rope.frequencies(config["qk_rope_head_dim"], config["rope_theta"])


def _kv(w, config, x, position, numerics):
    latent = rms_norm(w["attn.wkv.weight"] @ x, w["attn.kv_norm.weight"], config["rms_norm_eps"])
    latent = rope.rotate(latent, position, _frequencies(config))
    return formats.fake_fp8(latent) if numerics == "f32qat" else latent


def _attention(block, x):
    """Every row sees the same keys: the context and all rows of the block, later ones too."""
    w, config, freqs = block.w, block.config, _frequencies(block.config)
    own = [_kv(w, config, row, block.position + i, block.numerics) for i, row in enumerate(x)]
    keys, head_dim = np.array([*block.context, *own]), config["head_dim"]
    out = []
    for i, row in enumerate(x):
        position = block.position + i
        latent = w["attn.wq_a.weight"] @ row
        latent = rms_norm(latent, w["attn.q_norm.weight"], config["rms_norm_eps"])
        q = (w["attn.wq_b.weight"] @ latent).reshape(-1, head_dim)
        q = np.array([rope.rotate(head, position, freqs) for head in q])
        o = attention.attend(q, keys, w["attn.attn_sink"], head_dim**-0.5)
        o = np.array([rope.rotate(head, position, freqs, inverse=True) for head in o])
        wo_a, wo_b = w["attn.wo_a.weight"], w["attn.wo_b.weight"]
        out.append(attention.project_output(o, wo_a, wo_b, config["o_groups"]))
    return out


def _moe(block, x):
    """Experts of the drafter's own number; always the text bias."""
    w, config, names = block.w, block.config, ("w1", "w3", "w2")
    routed = [
        [w[f"ffn.experts.{e}.{name}.weight"] for name in names]
        for e in range(config["dspark_n_routed_experts"])
    ]
    shared = [w[f"ffn.shared_experts.{name}.weight"] for name in names]
    out = []
    for row in x:
        ids, weights = experts.route(
            row,
            w["ffn.gate.weight"],
            w["ffn.gate.bias"],
            top_k=config["dspark_num_experts_per_tok"],
            scale=config["routed_scaling_factor"],
            normalize=config["norm_topk_prob"],
        )
        limit = config["swiglu_limit"]
        out.append(experts.mixture(row, ids, weights, experts=routed, shared=shared, limit=limit))
    return out
