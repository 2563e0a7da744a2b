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
def device():
    """Where the kernels of this machine run."""
    pytest.importorskip("triton", reason="Triton is not installed")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
