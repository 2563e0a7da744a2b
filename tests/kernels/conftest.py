"""Tests of the Triton kernels: on a GPU where there is one, else in Triton's interpreter.

The interpreter is slow: use small sizes. It must be switched on before a kernel file is imported,
and nothing else imports one on a machine without a GPU.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device(monkeypatch):
    """Where the kernels of this machine run."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if not torch.cuda.is_available():
        let_scalars_be_indices(monkeypatch)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def let_scalars_be_indices(monkeypatch):
    """Let a kernel's scalar bound a loop: in the interpreter it is an array of one element.

    numpy 2.4 takes no such array for an index.
    """
    from triton.runtime import interpreter  # noqa: PLC0415

    patch = interpreter._patch_lang_tensor

    def patch_again(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: int(scalar.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_again)
