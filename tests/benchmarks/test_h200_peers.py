"""Peers in processes of their own: answers, reasons, time limits; archives and where they go."""

import importlib
import tarfile
import zipfile
from functools import partial

import pytest

from benchmarks.h200 import harness
from benchmarks.h200.candidates import NotRunError
from benchmarks.h200.peers import pack, process

FAKE = "tests.benchmarks.fake_child"


@pytest.fixture
def peers(tmp_path, monkeypatch):
    """Fakes; a case may take 3 seconds to begin."""
    monkeypatch.setattr(process, "PeerProcess", partial(process.PeerProcess, module=FAKE))
    found = process.Peers(tmp_path, 3)
    yield found
    found.close()


def test_a_peer_answers_like_a_candidate(peers):
    peer = peers.begin("fine", {"T": 8})
    assert (peer.name, peer.mode, peer.error) == ("peer fine", "graph", 0.0)
    assert peer.what.startswith("T=8")
    assert peer.count(None, 0.4) == 3
    assert peer.sample(None, 2) == [7.5, 7.5]
    peers.close()
    assert peer._process.returncode == 0


def test_a_process_stays_for_the_rows_of_a_module(peers):
    said = []
    for tokens in (8, 64):
        peer = peers.begin("fine", {"T": tokens})
        assert peer.sample(None, 1) == [7.5]
        peer.rest()
        said.append(peer.what.split(", "))
    assert [shape for shape, _ in said] == ["T=8", "T=64"]
    assert len({number for _, number in said}) == 1


@pytest.mark.parametrize(
    ("name", "reason"), [("none", "no wheel"), ("dead", "code 3"), ("slow", "within 3 s")]
)
def test_a_peer_that_does_not_load_says_why(peers, name, reason):
    with pytest.raises(NotRunError, match=reason):
        peers.begin(name, {"T": 8})


def test_a_peer_that_failed_starts_anew(peers):
    with pytest.raises(NotRunError, match="within 3 s"):
        peers.begin("slow once", {"T": 8})
    assert peers.begin("slow once", {"T": 64}).what.startswith("T=64")


def test_a_peer_without_a_gpu_is_not_run(tmp_path):
    peers = process.Peers(tmp_path, 60)
    with pytest.raises(NotRunError, match=r"flashmla_ops|CUDA|NVIDIA"):
        peers.begin("flashmla:decode", {"T": 8})
    peers.close()
    with pytest.raises(NotRunError, match="no folder"):
        process.Peers(None, 60).begin("flashmla:decode", {"T": 8})


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
