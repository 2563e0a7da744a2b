"""``openv41 convert``: between the released codes and plain numbers."""

import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

from openv41.cli.main import app
from tests.io import checkpoint_tools as tools
from tests.oracles import formats

pytestmark = pytest.mark.shapes


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small") / "checkpoint"
    tools.write_random(tools.small_config(), folder)
    return folder


def run(*args):
    return CliRunner().invoke(app, ["convert", *map(str, args)])


def test_a_chain_through_every_variant_keeps_every_value(small, tmp_path):
    folder = small
    for step, to in enumerate(("float32", "bf16", "released", "released")):
        target = tmp_path / f"{step}"
        result = run(folder, target, "--to", to)
        assert result.exit_code == 0, result.stderr
        assert result.stdout.startswith(f"{target}: {to}, 13 files, ")
        folder = target
    got, config = formats.read_checkpoint(folder)
    want, same_config = formats.read_checkpoint(small)
    assert config == same_config
    assert got.keys() == want.keys()
    assert [name for name in want if not np.array_equal(got[name], want[name])] == []


def test_released_to_released_copies_bytes(small, tmp_path):
    run(small, tmp_path / "out", "--to", "released")
    tools.assert_same_tensors(small, tmp_path / "out")


def test_progress_and_errors_go_to_stderr(small, tmp_path):
    result = run(small, small, "--to", "bf16")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "source and destination are the same" in result.stderr
    result = run(tmp_path / "nowhere", tmp_path / "out", "--to", "bf16")
    assert result.exit_code == 2
    assert "there is no such folder" in result.stderr.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_unknown_variant_lists_the_known_ones(small, tmp_path):
    result = run(small, tmp_path / "out", "--to", "fp16")
    assert result.exit_code == 2
    for name in ("released", "bf16", "float32"):
        assert name in result.stderr


def test_a_damaged_source_leaves_nothing(small, tmp_path):
    file = sorted(small.glob("*.safetensors"))[2]
    damaged = tmp_path / "damaged"
    shutil.copytree(small, damaged)
    (damaged / file.name).write_bytes(file.read_bytes()[:-8])
    result = run(damaged, tmp_path / "out", "--to", "float32")
    assert result.exit_code == 2
    assert f"{file.name}: truncated" in result.stderr
    assert list(tmp_path.iterdir()) == [damaged]


def test_one_folder_inside_the_other_is_refused(small, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(small, source)
    (tmp_path / "link").symlink_to(source)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    for target, how in [
        (source / "a" / "out", "inside the source"),
        (tmp_path / "link" / "out", "inside the source"),
        (tmp_path, "around the source"),
    ]:
        result = run(source, target, "--to", "float32")
        assert result.exit_code == 2
        assert f"{target}: the destination is {how} ({source}); name a" in result.stderr
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
