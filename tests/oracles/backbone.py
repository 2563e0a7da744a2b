"""The text backbone over one document, token by token, from released tensor names."""

import math
from dataclasses import dataclass, field

import numpy as np

from tests.oracles import attention, compressor, engram, experts, formats, indexer, mhc, rope
from tests.oracles.norm import rms_norm


@dataclass(kw_only=True)
class Document:
    """One document: its config and what its layers hand to each other."""

    config: dict
    numerics: str
    is_image: np.ndarray
    cids: list
    pad: int
    window_floor: tuple = (10**9, 0)  # from this layer on, rows at or behind it see none before it
    main_kv: dict = field(default_factory=dict)
    index_k: dict = field(default_factory=dict)
    topk: dict = field(default_factory=dict)
    candidates: np.ndarray | None = None
    out: dict = field(default_factory=dict)


def forward(
    weights,
    config,
    token_ids,
    token_map,
    *,
    numerics="f32",
    embed=None,
    is_image=None,
    window_floor=(10**9, 0),
):
    """Return tensors under their golden names, all rows, float64."""
    ids = [int(i) for i in token_ids]
    is_image = np.zeros(len(ids), dtype=bool) if is_image is None else is_image
    doc = Document(
        config=config,
        numerics=numerics,
        is_image=is_image,
        cids=[-1 if dead else token_map[i] for i, dead in zip(ids, is_image, strict=True)],
        pad=token_map[config["engram_pad_token_id"]],
        window_floor=window_floor,
    )
    n = config["hc_mult"]
    h = weights["embed.weight"][ids] if embed is None else embed
    streams = np.repeat(h[:, None, :], n, axis=1)
    pre = np.tile(np.eye(n)[0], (len(ids), 1))
    for layer in range(config["num_hidden_layers"]):
        streams, pre = _layer(_layer_weights(weights, layer), doc, layer, streams, pre)
    norm, eps = weights["norm.weight"], config["rms_norm_eps"]
    final = [rms_norm(mhc.mix_streams(x, a), norm, eps) for x, a in zip(streams, pre, strict=True)]
    doc.out["final_hidden"] = np.array(final)
    doc.out["logits"] = doc.out["final_hidden"] @ weights["head.weight"].T
    return doc.out


def _layer(w, doc, layer, streams, pre):
    if layer in doc.config["engram_layer_ids"]:
        streams = _engram(w, doc, layer, streams)
    if layer in doc.config.get("dspark_target_layer_ids", []):
        _append(doc.out, "main_hidden", streams.mean(axis=1))
    streams, pre = _sublayer(w, doc, f"layers.{layer}.attn", streams, pre)
    streams, pre = _sublayer(w, doc, f"layers.{layer}.ffn", streams, pre)
    doc.out[f"layers.{layer}.out"] = streams
    doc.out[f"layers.{layer}.pre_mix_out"] = pre
    return streams, pre


def _append(out, name, columns):
    out[name] = np.concatenate([out[name], columns], axis=1) if name in out else columns


def _layer_weights(weights, layer):
    start = f"layers.{layer}."
    return {name[len(start) :]: w for name, w in weights.items() if name.startswith(start)}


def _sublayer(w, doc, name, streams, pre):
    """One attention or FFN: A comes from the site before, its own A goes to the next."""
    config, layer, site = doc.config, int(name.split(".")[1]), name.split(".")[2]
    x = np.array([mhc.mix_streams(s, a) for s, a in zip(streams, pre, strict=True)])
    x = [rms_norm(row, w[f"{site}_norm.weight"], config["rms_norm_eps"]) for row in x]
    y = (_attention if site == "attn" else _moe)(w, doc, layer, np.array(x))
    doc.out[f"{name}_out"] = y
    new_streams, new_pre = [], []
    for s, out in zip(streams, y, strict=True):
        a, c, comb = mhc.coefficients(
            mhc.project(s, w[f"hc_{site}_fn"]),
            w[f"hc_{site}_base"],
            w[f"hc_{site}_scale"],
            num_streams=config["hc_mult"],
            iterations=config["hc_sinkhorn_iters"],
            eps=config["hc_eps"],
        )
        new_streams.append(mhc.update_streams(s, out, c, comb))
        new_pre.append(a)
    return np.array(new_streams), np.array(new_pre)


def _frequencies(config, layer):
    if config["compress_ratios"][layer] == 0:
        return rope.frequencies(config["qk_rope_head_dim"], config["rope_theta"])
    theta = config["compress_rope_theta"]
    return rope.frequencies(config["qk_rope_head_dim"], theta, config["rope_scaling"])


def _round(numerics, quantise, rows):
    return np.array([quantise(row) for row in rows]) if numerics == "f32qat" else rows


def _attention(w, doc, layer, x):
    config = doc.config
    ratio, eps = config["compress_ratios"][layer], config["rms_norm_eps"]
    freqs, head_dim = _frequencies(config, layer), config["head_dim"]
    qr = x @ w["attn.wq_a.weight"].T
    qr = np.array([rms_norm(row, w["attn.q_norm.weight"], eps) for row in qr])
    q = (qr @ w["attn.wq_b.weight"].T).reshape(len(x), -1, head_dim)
    kv = [rms_norm(row, w["attn.kv_norm.weight"], eps) for row in x @ w["attn.wkv.weight"].T]
    kv = np.array([rope.rotate(row, p, freqs) for p, row in enumerate(kv)])
    kv = doc.out[f"layers.{layer}.window_kv"] = _round(doc, formats.fake_fp8, kv)
    if ratio and layer in config["kv_source_layer_ids"]:
        _publish(w, doc, layer, x)
    if ratio and layer in config["index_source_layer_ids"]:
        _select(w, doc, layer, x, qr)
    y = []
    for p in range(len(x)):
        first_bounded, floor = doc.window_floor
        lowest = floor if layer >= first_bounded and p >= floor else 0
        keys = kv[[s for s in attention.window(p, config["sliding_window"]) if s >= lowest]]
        if ratio:
            entries = doc.main_kv[_source(config["kv_source_layer_ids"], layer)]
            chosen = doc.topk[_source(config["index_source_layer_ids"], layer)][p]
            keys = np.concatenate([keys, entries[chosen]])
        rotated = np.array([rope.rotate(head, p, freqs) for head in q[p]])
        o = attention.attend(rotated, keys, w["attn.attn_sink"], head_dim**-0.5)
        o = np.array([rope.rotate(head, p, freqs, inverse=True) for head in o])
        wo_a, wo_b = w["attn.wo_a.weight"], w["attn.wo_b.weight"]
        y.append(attention.project_output(o, wo_a, wo_b, config["o_groups"]))
    return np.array(y)


def _source(ids, layer):
    return max(s for s in ids if s <= layer)


def _publish(w, doc, layer, x):
    """Main KV and index keys of a Full layer, both from the latent before RoPE."""
    ratio, eps = doc.config["compress_ratios"][layer], doc.config["rms_norm_eps"]
    freqs = _frequencies(doc.config, layer)
    latents = compressor.compress(
        x,
        ratio,
        w["attn.compressor.wkv.weight"],
        w["attn.compressor.norm.weight"],
        w.get("attn.compressor.wgate.weight"),
    )
    main_kv = np.zeros_like(latents)
    keys = latents @ w["attn.indexer.wk.weight"].T
    for j, latent in enumerate(latents):
        main_kv[j] = rope.rotate(latent, j * ratio, freqs)
        key = rms_norm(keys[j], w["attn.indexer.k_norm.weight"], eps)
        keys[j] = rope.rotate(key, j * ratio, freqs)
    doc.main_kv[layer] = _round(doc, formats.fake_fp4_e4m3, main_kv)
    doc.index_k[layer] = _round(doc, formats.fake_mxfp4, keys)
    doc.out[f"layers.{layer}.main_kv"] = doc.main_kv[layer]
    doc.out[f"layers.{layer}.index_k"] = doc.index_k[layer]


def _select(w, doc, layer, x, qr):
    """Top-k of an index source; the candidate source also publishes its pool."""
    config, freqs = doc.config, _frequencies(doc.config, layer)
    ratio, source = config["compress_ratios"][layer], config["candidate_source_layer_id"]
    num_heads, dim = config["index_n_heads"], config["index_head_dim"]
    keys = doc.index_k[_source(config["kv_source_layer_ids"], layer)]
    head_weights = x @ w["attn.indexer.weights_proj.weight"].T * dim**-0.5 * num_heads**-0.5
    q = (qr @ w["attn.indexer.wq_b.weight"].T).reshape(-1, num_heads, dim)
    masks = np.zeros((len(x), len(keys)), dtype=bool)
    chosen = []
    for p in range(len(x)):
        rotated = np.array([rope.rotate(head, p, freqs) for head in q[p]])
        values = indexer.scores(_round(doc, formats.fake_mxfp4, rotated), head_weights[p], keys)
        doc.out[f"layers.{layer}.index_score_row_last"] = values.copy()
        visible = compressor.num_visible(p, ratio)
        values[visible:] = -math.inf
        if layer == source:
            masks[p] = indexer.candidate_mask(
                values, visible, config["candidate_block_size"], config["candidate_topk_blocks"]
            )
        elif layer > source:
            values[~doc.candidates[p]] = -math.inf
        chosen.append(indexer.select(values, config["index_topk"]))
    if layer == source:
        doc.candidates = doc.out[f"layers.{layer}.candidate_mask"] = masks
    doc.topk[layer] = doc.out[f"layers.{layer}.topk_indices"] = chosen


def _round(doc, quantise, rows):
    if doc.numerics == "f32":
        return rows
    return np.array([quantise(row) for row in rows]).reshape(rows.shape)


def _moe(w, doc, layer, x):
    config, names = doc.config, ("w1", "w3", "w2")
    routed = [
        [w[f"ffn.experts.{e}.{name}.weight"] for name in names]
        for e in range(config["n_routed_experts"])
    ]
    shared = [w[f"ffn.shared_experts.{name}.weight"] for name in names]
    y, all_ids, all_weights = [], [], []
    for row, image in zip(x, doc.is_image, strict=True):
        ids, weights = experts.route(
            row,
            w["ffn.gate.weight"],
            w["ffn.gate.bias_vl"] if image else w["ffn.gate.bias"],
            top_k=config["num_experts_per_tok"],
            scale=config["routed_scaling_factor"],
            normalize=config["norm_topk_prob"],
        )
        limit = config["swiglu_limit"]
        all_ids.append(ids)
        all_weights.append(weights)
        y.append(experts.mixture(row, ids, weights, experts=routed, shared=shared, limit=limit))
    doc.out[f"layers.{layer}.expert_ids"] = np.array(all_ids)
    doc.out[f"layers.{layer}.expert_weights"] = np.array(all_weights)
    return np.array(y)


def _engram(w, doc, layer, streams):
    config, layers = doc.config, doc.config["engram_layer_ids"]
    order, num_heads = config["engram_max_ngram_size"], config["engram_n_heads"]
    table = engram.primes(len(layers), order, num_heads, config["engram_vocab_size"])
    factors = engram.multipliers(layer, order, config["engram_compressed_vocab_size"])
    new_streams, gates, all_rows = [], [], []
    for p, x in enumerate(streams):
        rows = engram.hash_rows(doc.cids, p, factors, table[layers.index(layer)], doc.pad)
        memory = w["engram.embed.weight"][rows].reshape(-1)
        updated, g = engram.apply(
            x, memory, w["engram.wkv.weight"], w["engram.q_weight"], w["engram.k_weight"]
        )
        dead = doc.is_image[p]
        new_streams.append(x if dead else updated)
        gates.append(np.zeros(len(x)) if dead else g)
        all_rows.append(rows)
    _append(doc.out, "engram_hash_ids", np.array(all_rows)[:, None])
    doc.out[f"layers.{layer}.after_engram"] = np.array(new_streams)
    doc.out[f"layers.{layer}.engram_gate"] = np.array(gates)
    return np.array(new_streams)
