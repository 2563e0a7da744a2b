"""ftllm's deepseek_v41 on a CPU, through its package: float32 weights, fake quantization off.

It still rounds on its way, and has no switch for that: its logits of `bench30m` are as far from
ours as our own in bfloat16, so its speed is not like for like. It gives the logits of the last
token, draws tokens itself, and runs on in threads of its own.
"""

import ctypes
import importlib.metadata
import json
import os
import tempfile
import time
from pathlib import Path

import torch
from ftllm import llm
from safetensors.torch import load_file, save_file

NAME = "ftllm"
VERSION = importlib.metadata.version(NAME)
CASES = ("prefill", "decode_batch")
INDEX = "model.safetensors.index.json"
SWITCHES = {
    "FASTLLM_EXECUTION_MODE": "cpu",
    "FASTLLM_DSV41_DISABLE_FAKE_QUANT": "1",
    "FASTLLM_DSV41_DISABLE_PREFIX_CACHE": "1",
}
MAX_TOKENS = 1024  # more than are ever fetched
TIMED = 4  # tokens of every request in one sample


class FtllmPeer:
    """The text model with the weights of a checkpoint folder."""

    def __init__(self, folder):
        os.environ |= SWITCHES
        threads = torch.get_num_threads()
        llm.set_cpu_threads(threads)
        assert llm.get_cpu_threads() == threads, f"{llm.get_cpu_threads()} threads, not {threads}"
        llm.set_device_map("cpu")
        with tempfile.TemporaryDirectory() as linked:
            _link(Path(folder), Path(linked))
            self.model = llm.model(linked, dtype="float32", moe_dtype="float32")
        self.model.set_atype("float32")
        self.model.set_moe_atype("float32")
        self.vocab_size = self.model.get_vocab_size()
        self.handles = []

    def serve_prompt(self, ids):
        """Prefill one prompt; return the last token's logits [V]."""
        handle = self._launch(ids, 1, logits=True)
        # The binding's own helper hands over four times the vocabulary.
        buffer = (ctypes.c_float * (4 * self.vocab_size))()
        fetch = llm.fastllm_lib.fetch_response_logits_llm_model
        assert fetch(self.model.model, handle, buffer) >= 0, "no token"
        logits = torch.frombuffer(buffer, dtype=torch.float32)[: self.vocab_size].clone()
        statistics = self.model.get_response_statistics(handle)
        assert not (statistics or {}).get("cached_input_tokens"), "a prefix came from a cache"
        while fetch(self.model.model, handle, buffer) >= 0:
            pass
        return logits

    def start_batch(self, ids, batch):
        """Bring `batch` requests to where all of them decode; return the prompts' logits [B, V]."""
        prompts = [[*ids[row:], *ids[:row]] for row in range(batch)]
        logits = torch.stack([self.serve_prompt(prompt) for prompt in prompts])
        self.handles = [self._launch(prompt, MAX_TOKENS) for prompt in prompts]
        self._next_tokens()
        return logits

    def batch_step(self, tokens):
        """Decode a few tokens of every request; return milliseconds per token of each.

        What it has decoded unasked is taken first, and one more token, to begin where a step does.
        """
        can_fetch = llm.fastllm_lib.can_fetch_response_llm_model
        while any(can_fetch(self.model.model, handle) for handle in self.handles):
            self._next_tokens()
        self._next_tokens()
        begin = time.perf_counter()
        for _ in range(TIMED):
            self._next_tokens()
        return (time.perf_counter() - begin) * 1e3 / TIMED

    def _next_tokens(self):
        for handle in self.handles:
            token = llm.fastllm_lib.fetch_response_llm_model(self.model.model, handle)
            assert token >= 0, f"a request ended with {token}"

    def _launch(self, ids, count, *, logits=False):
        """Ask for `count` tokens, drawn greedily; return the request's handle."""
        array = (ctypes.c_int * len(ids))(*ids)
        at_least = 0 if logits else count  # it bars the end token from those that must follow
        sampling = (False, 1.0, 1, 1.0, 1.0)  # do_sample, top_p, top_k, temperature, penalty
        return llm.fastllm_lib.launch_response_llm_model(
            self.model.model, len(ids), array, count, at_least, *sampling, logits, 0, None
        )


def _link(folder, target):
    """Make `target` the checkpoint as ftllm wants it: tokenizer settings, engram tables in FP8.

    Every other file is linked. The tables hold FP8 values already, so nothing is lost.
    """
    for path in (folder / "config.json", folder / "tokenizer.json", *folder.glob("*.safetensors")):
        (target / path.name).symlink_to(path)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    index = json.loads((folder / INDEX).read_text())
    tables = {}
    for name in index["weight_map"]:
        if name.endswith("engram.embed.weight"):
            table = load_file(folder / index["weight_map"][name])[name]
            codes = table.to(torch.float8_e4m3fn)
            assert torch.equal(codes.float(), table), f"{name} holds other values than FP8's"
            ones = torch.ones(table.shape[0], table.shape[1] // 32)
            tables[name] = codes
            tables[name.removesuffix("weight") + "scale"] = ones.to(torch.float8_e8m0fnu)
    save_file(tables, target / "engram.safetensors", metadata={"format": "pt"})
    index["weight_map"] |= dict.fromkeys(tables, "engram.safetensors")
    (target / INDEX).write_text(json.dumps(index))
