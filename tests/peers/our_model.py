"""openv41 itself, behind the same face as the peers."""

import tomllib
from pathlib import Path

import torch

from openv41.config import NUMERICS
from openv41.io.checkpoint import load_model
from openv41.io.engram_map import compress_vocabulary
from openv41.io.hf_config import read_config
from openv41.io.tokenizer import load_tokenizer
from openv41.layers.batch import Batch
from openv41.layers.probe import Probe
from openv41.model.cache import DenseStore
from tests.peers.torch_training import TorchTraining

NAME = "openv41"
PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
VERSION = tomllib.loads(PYPROJECT.read_text())["project"]["version"]
CASES = ("forward", "decode", "train")


class OurModel(TorchTraining):
    """The text model with the weights of a checkpoint folder."""

    def __init__(self, folder):
        self.config = read_config(folder)
        self.model = load_model(Path(folder), numerics=NUMERICS["f32"], dtype=torch.float32)
        tokenizer = load_tokenizer(Path(folder)).backend
        if self.config.engram:
            self.model.set_token_map(compress_vocabulary(tokenizer))
        self.model.eval()

    @torch.inference_mode()
    def logits(self, ids):
        """Return logits [S, V] of one document."""
        return self.model.logits(self.model(Batch.from_documents([ids])).hidden)

    @torch.inference_mode()
    def choices(self, ids, forced=None):
        """Return logits and named intermediates of one document, with `forced` choices if given."""
        probe = Probe(feed=forced)
        hidden = self.model(Batch.from_documents([ids]), probe=probe).hidden
        return self.model.logits(hidden), probe.values

    def prefill(self, ids):
        """Fill a new store with one document; return the last token's logits [V]."""
        self.store = DenseStore(self.config.compress_ratios)
        self.position = 0
        return self._feed(ids)

    def step(self, token):
        """Decode one token with the store; return its logits [V]."""
        return self._feed([token])

    @torch.inference_mode()
    def _feed(self, ids):
        batch = Batch(torch.tensor(ids), (0,), (self.position,), (len(ids),))
        self.position += len(ids)
        return self.model.logits(self.model(batch, self.store).hidden[-1:])[0]

    def batch_logits(self, rows):
        """Return logits [B, S, V] of rows of equal length, with gradients."""
        logits = self.model.logits(self.model(Batch.from_documents(rows)).hidden)
        return logits.view(len(rows), len(rows[0]), -1)
