"""Independent PyTorch implementation of the DeepSeek-V4.1-Flash system.

Names load on first use, so that parts which need no torch import without it.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openv41.config import NUMERICS as NUMERICS
    from openv41.config import ModelConfig as ModelConfig
    from openv41.config import NumericsConfig as NumericsConfig
    from openv41.errors import OpenV41Error as OpenV41Error
    from openv41.io.checkpoint import load_model as load_model
    from openv41.io.checkpoint import save_model as save_model
    from openv41.layers.batch import Batch as Batch
    from openv41.model.causal_encoder_decoder import CausalEncoderDecoder as CausalEncoderDecoder
    from openv41.model.init import init_weights as init_weights
    from openv41.ops import kernels as kernels
    from openv41.plan import plan_layers as plan_layers
    from openv41.presets import preset as preset

_HOMES = {
    "NUMERICS": "config",
    "ModelConfig": "config",
    "NumericsConfig": "config",
    "OpenV41Error": "errors",
    "load_model": "io.checkpoint",
    "save_model": "io.checkpoint",
    "Batch": "layers.batch",
    "CausalEncoderDecoder": "model.causal_encoder_decoder",
    "init_weights": "model.init",
    "kernels": "ops",
    "plan_layers": "plan",
    "preset": "presets",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
