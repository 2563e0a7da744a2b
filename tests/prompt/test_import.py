"""The prompt format imports without torch, and the package loads its names on first use."""

import subprocess
import sys

import pytest

import openv41


@pytest.mark.parametrize("module", ["openv41", "openv41.prompt"])
def test_torch_stays_out(module):
    code = (
        f"import {module}, sys; heavy = {{'torch', 'numpy', 'tokenizers', 'jaxtyping'}}\n"
        "assert not heavy & set(sys.modules), sorted(heavy & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_encoding_and_parsing_need_no_torch():
    code = (
        "import sys\n"
        "from openv41.prompt import Conversation, Message, StreamParser, encode, parse\n"
        "tool = {'function': {'name': 'f'}}\n"
        "encode(Conversation([Message('user', 'hi')], tools=[tool]))\n"
        "StreamParser().feed('a</think>b')\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_name_of_the_package_loads():
    names = [name for name in dir(openv41) if name in openv41._HOMES]
    assert len(names) == len(openv41._HOMES) == 12
    for name in names:
        value = getattr(openv41, name)
        assert getattr(value, "__name__", name) == name


def test_a_name_that_is_none():
    with pytest.raises(AttributeError, match="module 'openv41' has no attribute 'Model'"):
        _ = openv41.Model
