"""NeMo Automodel's deepseek_v41 on a CPU in float32, its rounding of caches switched off."""

import importlib.metadata
from pathlib import Path

import torch
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.deepseek_v41 import attention
from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41Config
from nemo_automodel.components.models.deepseek_v41.model import DeepseekV41ForCausalLM
from transformers import PreTrainedTokenizerFast

from tests.peers.released_weights import read_config, read_weights
from tests.peers.torch_training import TorchTraining

NAME = "nemo-automodel"
VERSION = importlib.metadata.version(NAME)
CASES = ("forward", "train")  # it has no cache


def keep(values, *, format, block_size):
    """Stand in for the rounding of caches."""
    return values


class NemoPeer(TorchTraining):
    """The text model with the weights of a checkpoint folder, on its torch back ends."""

    def __init__(self, folder, *, attn="sdpa", experts="torch"):
        attention.quantize_cache = keep
        config = read_config(folder)
        text = {**config["text_config"], "dtype": "float32", "num_nextn_predict_layers": 0}
        config = {k: v for k, v in config.items() if k != "quantization_config"}
        config |= {
            "dtype": "float32",
            "text_config": text,
            "vision_config": {"num_hidden_layers": 0},
        }
        backend = BackendConfig(
            attn=attn, linear="torch", rms_norm="torch_fp32", experts=experts, dispatcher="torch"
        )
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(Path(folder) / "tokenizer.json"))
        self.model = DeepseekV41ForCausalLM(
            DeepseekV41Config(**config), backend=backend, tokenizer=tokenizer
        ).float()
        self.model.load_state_dict(self.model.state_dict_adapter.from_hf(read_weights(folder)))
        self.model.eval()

    @torch.inference_mode()
    def logits(self, ids):
        """Return logits [S, V] of one document."""
        return self.model(torch.tensor([ids])).logits[0]

    def choices(self, ids):
        """Return logits and "layers.{i}.expert_ids" and ".topk_indices", [S, k] each."""
        seen, hooks = {}, []
        for i, layer in self.model.model.layers.items():
            hooks.append(_watch(layer.ffn.gate, f"layers.{i}.expert_ids", seen, lambda out: out[1]))
            if getattr(layer.attn, "indexer", None) is not None:
                name = f"layers.{i}.topk_indices"
                hooks.append(_watch(layer.attn.indexer, name, seen, lambda s: s.topk_indices[0]))
        logits = self.logits(ids)
        for hook in hooks:
            hook.remove()
        return logits, seen

    def batch_logits(self, rows):
        """Return logits [B, S, V] of rows of equal length, with gradients."""
        return self.model(torch.tensor(rows)).logits


def _watch(module, name, seen, pick):
    return module.register_forward_hook(lambda _, __, out: seen.update({name: pick(out).long()}))
