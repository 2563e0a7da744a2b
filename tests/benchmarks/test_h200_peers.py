"""Peers in processes of their own: answers, reasons, time limits; archives and where they go."""

import importlib
import tarfile
import zipfile

import pytest

from benchmarks.h200 import harness
from benchmarks.h200.candidates import NotRunError
from benchmarks.h200.peers import pack
from benchmarks.h200.peers.process import PeerProcess

FAKE = "tests.benchmarks.fake_child"


def test_a_peer_answers_like_a_candidate(tmp_path):
    peer = PeerProcess("fine", {"T": 8}, tmp_path, 30, FAKE)
    assert (peer.name, peer.what, peer.mode, peer.error) == ("peer fine", "T=8", "graph", 0.0)
    assert peer.count(None, 0.4) == 3
    assert peer.sample(None, 2) == [7.5, 7.5]
    peer.close()
    assert peer._process.returncode == 0


@pytest.mark.parametrize(
    ("name", "limit", "reason"),
    [("none", 30, "no wheel"), ("dead", 30, "code 3"), ("slow", 3, "within 3 s")],
)
def test_a_peer_that_does_not_load_says_why_and_is_gone(tmp_path, name, limit, reason):
    with pytest.raises(NotRunError, match=reason):
        PeerProcess(name, {"T": 8}, tmp_path, limit, FAKE)


def test_a_peer_without_a_gpu_is_not_run(tmp_path):
    with pytest.raises(NotRunError, match=r"flashmla_ops|CUDA|NVIDIA"):
        PeerProcess("flashmla:decode", {"T": 8}, tmp_path, 60)


@pytest.mark.parametrize("module", harness.modules())
def test_every_peer_of_a_row_has_a_case(module):
    for row in harness.declared(module).rows():
        for peer in row.peers:
            name, _, case = peer.partition(":")
            adapter = importlib.import_module(f"benchmarks.h200.peers.{name}")
            known = harness.modules() if hasattr(adapter, "case") else adapter.CASES
            assert case in known, f"{row.name}: {peer}"


def test_an_archive_holds_what_is_kept_and_is_unpacked_once(tmp_path, monkeypatch):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "some_peer-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("some/kernel.py", "x = 1")
        wheel.writestr("some/tests/big.py", "x = 2")
        wheel.writestr("other/runtime.py", "x = 3")
    spec = pack.Wheel("inside", "some-peer==1.0", keep=("some/*",), drop=("some/tests/*",))
    monkeypatch.setitem(pack.SETS, "mine", (spec,))
    monkeypatch.setattr(pack.tempfile, "gettempdir", lambda: str(tmp_path))
    made = pack.pack("mine", wheels, tmp_path / "out")
    with tarfile.open(made) as archive:
        files = [member.name for member in archive if member.isfile()]
    assert files == ["./inside/some/kernel.py"]
    target = pack.unpacked(tmp_path / "out")
    assert (target / "inside/some/kernel.py").read_text() == "x = 1"
    assert pack.unpacked(target) == target
