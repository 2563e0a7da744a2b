"""mlx-vlm's deepseek_v41 on a CPU in float32, its rounding of inputs and caches switched off."""

import importlib.metadata
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx.utils import tree_flatten
from mlx_vlm.models.deepseek_v41 import engram, language
from mlx_vlm.models.deepseek_v41.config import ModelConfig
from mlx_vlm.models.deepseek_v41.deepseek_v41 import Model
from transformers import PreTrainedTokenizerFast

from tests.peers.released_weights import read_config, read_weights

NAME = "mlx-vlm"
VERSION = importlib.metadata.version(NAME)
CASES = ("forward", "decode", "prefill", "decode_batch")
ROUNDINGS = ("fake_quant_fp8_ue8m0", "fake_quant_fp4_ue8m0", "fake_quant_fp4_e4m3")


def keep(values, block=32):
    """Stand in for a rounding."""
    return values


class MlxPeer:
    """The text model with the weights of a checkpoint folder."""

    def __init__(self, folder):
        mx.set_default_device(mx.cpu)
        for module in (language, engram):
            for name in ROUNDINGS:
                if hasattr(module, name):
                    setattr(module, name, keep)
        config = read_config(folder) | {"vision_config": {"num_hidden_layers": 1}}
        model = Model(ModelConfig.from_dict(config))
        arrays = {n: mx.array(t.numpy()) for n, t in read_weights(folder).items()}
        arrays = model.sanitize(arrays)
        self.model = model.language_model
        expected = {n for n, _ in tree_flatten(self.model.parameters())}
        given = {n.removeprefix("language_model.") for n in arrays}
        assert expected == given, f"weights differ by {sorted(expected ^ given)[:8]}"
        model.load_weights(list(arrays.items()), strict=False)
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(Path(folder) / "tokenizer.json"))
        self.model.engram_hash = engram.NgramHashState(
            model.config, self.model.layout, tokenizer=tokenizer
        )
        mx.eval(self.model.parameters())

    def logits(self, ids):
        """Return logits [S, V] of one document."""
        out = self.model(mx.array([ids])).logits[0]
        return torch.from_numpy(np.array(out))

    def choices(self, ids):
        """Return logits and "layers.{i}.expert_ids" and ".topk_indices", [S, k] each."""
        names = {}
        for i, layer in enumerate(self.model.layers):
            names[id(layer.ffn.gate)] = f"layers.{i}.expert_ids"
            names[id(getattr(layer.attn, "indexer", None))] = f"layers.{i}.topk_indices"
        seen = {}
        watched = (language.Indexer, language.DeepseekV41MoEGate)
        calls = [kind.__call__ for kind in watched]
        for kind, call in zip(watched, calls, strict=True):
            kind.__call__ = _watch(call, names, seen)
        logits = self.logits(ids)
        for kind, call in zip(watched, calls, strict=True):
            kind.__call__ = call
        return logits, seen

    def prefill(self, ids):
        """Fill a new cache with one document; return the last token's logits [V]."""
        self.cache = self.model.make_cache()
        return self._feed(ids)

    def step(self, token):
        """Decode one token with the cache; return its logits [V]."""
        return self._feed([token])

    def serve_prompt(self, ids):
        """Prefill one prompt with a new cache; return the last token's logits [V]."""
        return self.prefill(ids)

    def start_batch(self, ids, batch):
        """Prefill rows of equal length together; return the last tokens' logits [B, V]."""
        rows = [[*ids[row:], *ids[:row]] for row in range(batch)]
        self.cache = self.model.make_cache()
        return self._feed_batch(rows)

    def batch_step(self, tokens):
        """Decode one token of every row."""
        self._feed_batch([[token] for token in tokens])

    def _feed_batch(self, rows):
        out = self.model(mx.array(rows), cache=self.cache).logits[:, -1]
        return torch.from_numpy(np.array(out))

    def _feed(self, ids):
        out = self.model(mx.array([ids]), cache=self.cache).logits[0, -1]
        return torch.from_numpy(np.array(out))


def _watch(call, names, seen):
    def watched(module, *args, **kwargs):
        out = call(module, *args, **kwargs)
        chosen = out[0] if isinstance(out, tuple) else out
        seen[names[id(module)]] = torch.from_numpy(np.array(chosen))[0].long()
        return out

    return watched
