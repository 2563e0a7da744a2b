"""One run at a time writes in a folder."""

import os
import signal
import subprocess
import sys
import time

import pytest

from openv41.errors import InputError, OpenV41Error
from openv41.train.loop import StoppedError, Trainer
from openv41.train.metrics import LOG_FILE
from openv41.train.processes import Processes
from openv41.train.run_folder import LOCK_FILE
from openv41.train.token_shards import prepare_shards
from tests.conftest import REPOSITORY
from tests.train.runs import mini_run, read_log

pytestmark = pytest.mark.unchecked


@pytest.fixture(scope="module")
def shards(text_files, text_tokenizer, tmp_path_factory):
    return prepare_shards(text_files, text_tokenizer, tmp_path_factory.mktemp("run") / "data")


HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "ab")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def content(folder):
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def stopped_run(shards, out):
    """A run of 6 steps that was stopped after the second."""
    run = mini_run(shards, out)

    def report(record):
        if record.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StoppedError):
        Trainer(run, resume=False).fit(report)
    return run


def test_a_run_that_another_process_is_at_work_on_is_refused_until_that_dies(shards, tmp_path):
    run = stopped_run(shards, tmp_path / "out")
    command = [sys.executable, "-c", HOLDER, str(run.out / LOCK_FILE)]
    trainer = Trainer(run, resume=True)
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"held\n"
        before = content(run.out)
        for resume in (True, False):
            with pytest.raises(InputError, match="another process is at work on this run; wait"):
                Trainer(run, resume=resume)
        with pytest.raises(InputError, match="another process is at work on this run; wait"):
            trainer.fit()
        assert content(run.out) == before
    finally:
        other.kill()
        other.communicate()
    trainer.fit()
    assert [record["step"] for record in read_log(run.out)] == [1, 2, 3, 4, 5, 6]


def test_a_run_holds_its_folder_while_it_works_and_no_longer(shards, tmp_path):
    run, refused = mini_run(shards, tmp_path / "out", tokens=64), []

    def report(record):
        with pytest.raises(InputError, match="another process is at work"):
            Trainer(run, resume=True)
        refused.append(record.step)

    Trainer(run, resume=False).fit(report)
    assert refused == [1, 2]
    assert Trainer(run, resume=True).step == 2


def test_what_another_run_wrote_in_the_meantime_is_not_overwritten(shards, tmp_path):
    run = mini_run(shards, tmp_path / "out", tokens=64)
    late = Trainer(run, resume=False)
    Trainer(run, resume=False).fit()
    before = content(run.out)
    with pytest.raises(InputError, match="another run has written there in the meantime"):
        late.fit()
    assert content(run.out) == before


class Second(Processes):
    """A process that hears from the first that it could not."""

    @property
    def is_first(self):
        return False

    def gather(self, value):
        assert value is None
        return ["the first one's words", None]


def test_all_processes_of_a_run_are_refused_together():
    with pytest.raises(OpenV41Error, match="the first one's words"):
        Second(rank=1, size=2).ask_first(lambda: pytest.fail("asked the second"))


@pytest.mark.slow
def test_of_two_commands_at_the_same_time_one_trains(shards, tmp_path):
    """Both are started on a run that was stopped; its log is as if there had been one."""
    words = "model.hidden_size=16 model.moe.num_experts=4 model.moe.expert_dim=16 tokens=4000"
    words += " sequence_length=16 batch_tokens=32 warmup_tokens=0 model.engram.table_size=30"
    words += " checkpoint_steps=2"
    settings = [part for word in words.split() for part in ("--set", word)]
    command = [sys.executable, "-m", "openv41", "train", "tiny", *settings]
    command += ["--data", str(shards.folder), "--out", str(tmp_path / "out")]
    path = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def start(*more):
        return subprocess.Popen([*command, *more], env=env, stderr=subprocess.PIPE, text=True)

    first = start()
    while not (tmp_path / "out" / "resume").exists():
        assert first.poll() is None, first.stderr.read()
        time.sleep(0.05)
    second = start("--resume")
    said = second.communicate(timeout=120)[1]
    assert second.returncode == 2, said
    assert "another process is at work on this run" in said
    assert "Traceback" not in said
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=60) == 128 + signal.SIGTERM
    first.stderr.close()
    steps = [record["step"] for record in read_log(tmp_path / "out")]
    assert steps == list(range(1, len(steps) + 1))
    assert (tmp_path / "out" / LOG_FILE).read_text().endswith("}\n")
