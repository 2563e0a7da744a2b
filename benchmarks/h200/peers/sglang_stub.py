"""Single kernel modules of SGLang without its runtime package.

The folder holds ``sglang/kernels`` and ``sglang/srt/environ.py``; every other module of ``sglang``
is a stub whose questions about the machine are answered for CUDA on SM90.
"""

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

REAL = ("sglang.kernels", "sglang.srt.environ")


class _Platform:
    is_sm90 = True
    is_cuda = True

    def __getattr__(self, name: str) -> bool:
        return False


def _decorator(function: Callable[..., Any] | None = None, **_: object) -> Callable[..., Any]:
    return function if callable(function) else (lambda decorated: decorated)


ANSWERS: dict[str, Any] = {
    "is_cuda": lambda *_, **__: True,
    "get_platform": lambda *_, **__: _Platform(),
    "get_cuda_version": lambda *_, **__: (13, 0),
    "get_device_capability": lambda *_, **__: (9, 0),
    "register_custom_op": _decorator,
    "register_fake_if_exists": _decorator,
    "use_symmetric_memory": lambda *_, **__: contextlib.nullcontext(),
    "strict_contiguous": lambda x: x.contiguous(),
    "ceil_align": lambda a, b: -(-a // b) * b,
    "async_h2d": lambda x, dtype=None, device=None: torch.tensor(x, dtype=dtype, device=device),
}


class _Stub(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 -- what makes it a package

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ANSWERS:
            return ANSWERS[name]
        return type(name, (), {}) if name[:1].isupper() else (lambda *_, **__: False)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root: Path) -> None:
        self._root = root

    def find_spec(
        self, name: str, path: object, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_real = any(name == real or name.startswith(f"{real}.") for real in REAL)
        if is_real or not name.startswith("sglang."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        made = _Stub(spec.name)
        if spec.name == "sglang.srt":
            made.__path__ = [str(self._root / "sglang" / "srt")]
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install(root: Path) -> None:
    """Put the stub before the import path."""
    if not (root / "sglang" / "kernels").is_dir():
        raise FileNotFoundError(f"no sglang/kernels in {root}")
    sys.path.insert(0, str(root))
    top = types.ModuleType("sglang")
    top.__path__ = [str(root / "sglang")]
    sys.modules["sglang"] = top
    sys.meta_path.insert(0, _Finder(root))
