"""Runs that torchrun starts in several processes: for some steps, or to the end."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch

from openv41.train.checkpoint import has_run
from openv41.train.loop import Trainer
from openv41.train.processes import join
from openv41.train.token_shards import TokenShards
from tests.train.runs import mini_run


def go_on(run, until):
    """Train from the newest checkpoint up to a step, and save; returns the losses."""
    trainer = Trainer(run, resume=has_run(run.out))
    records = []
    while trainer.step < until:
        records.append(trainer._advance())
    trainer.save()
    trainer.checkpoints.finish()
    return [[r.loss, r.grad_norm, r.heldout_bits_per_byte] for r in records]


class Mortal(Trainer):
    """One of its processes dies once in the middle of a step, if there is a file to say so."""

    def _batch(self, place):
        fate = self.run.out.parent / "dies"
        if self.step == 3 and self.processes.rank == 1 and fate.exists():
            fate.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._batch(place)


def main(shards, out, until):
    with join(torch.device("cpu")) as processes:
        run = mini_run(TokenShards(shards), out, heldout=shards, heldout_steps=2)
        run = replace(run, processes=processes)
        if not until:
            Mortal(run, resume=False).fit()
            return
        losses = go_on(run, until)
        if processes.is_first:
            (out / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
