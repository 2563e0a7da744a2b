"""Golden sets with their inputs, expected tensors, and our own traces of them."""

import functools
import shutil
from dataclasses import replace

import pytest
import torch

from openv41.io.checkpoint import load_model
from openv41.io.tensor_files import read_tensors
from openv41.io.trace import TRACE_DTYPES, TRACE_NUMERICS, read_feed, run_case, trace_decode
from openv41.io.trace_inputs import Inputs

FEW_STEPS = 3


class GoldenSet:
    """One golden folder; its checkpoint is copied because loading may keep a token map there."""

    def __init__(self, folder, checkpoint):
        self.folder, self.checkpoint = folder, checkpoint
        self.inputs = Inputs.read(folder / "inputs.safetensors")
        self.model = functools.cache(self._model)
        self.trace = functools.cache(self._trace)
        self.want = functools.cache(self._want)
        self.fed = functools.cache(self._fed)

    def __repr__(self):
        return self.folder.name

    @property
    def config(self):
        return self.model("f32").config

    def _model(self, mode):
        return load_model(self.checkpoint, numerics=TRACE_NUMERICS[mode], dtype=TRACE_DTYPES[mode])

    def _trace(self, case, mode):
        """Our tensors; of what has no bound in a decode only the first steps, which are slow."""
        model, inputs = self.model(mode), self.inputs
        if case != "decode" or mode == "f32":
            return run_case(model, inputs, case, mode)
        if mode == "released":
            inputs = replace(inputs, text_ids=inputs.text_ids[: inputs.prefill_len + FEW_STEPS])
        with torch.no_grad():
            return trace_decode(model, inputs, greedy=FEW_STEPS)

    def _want(self, case, mode):
        return read_tensors(self.folder / f"{case}_{mode}.safetensors")

    def _fed(self):
        model = self.model("released")
        feed = read_feed(self.folder / "prefill_released.safetensors", model, self.inputs)
        return run_case(model, self.inputs, "prefill", "released", feed)


SETS = [pytest.param(name, marks=pytest.mark.xdist_group(f"golden {name}")) for name in "AB"]


@pytest.fixture(scope="session", params=SETS)
def golden(request, golden_dir, tmp_path_factory):
    folder = golden_dir / request.param
    copy = tmp_path_factory.mktemp(request.param) / "checkpoint"
    shutil.copytree(folder / "checkpoint", copy)
    return GoldenSet(folder, copy)
