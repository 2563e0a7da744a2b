"""openv41 itself, behind the same face as the peers."""

import tomllib
from pathlib import Path

import torch

from openv41.config import NUMERICS
from openv41.engine.engine import Engine, EngineConfig
from openv41.engine.paged_store import CacheConfig
from openv41.engine.request import Request
from openv41.engine.sampler import SamplingConfig
from openv41.engine.scheduler import ScheduleConfig
from openv41.io.checkpoint import load_model
from openv41.io.hf_config import read_config
from openv41.io.token_classes import compress_vocabulary
from openv41.io.tokenizer import load_tokenizer
from openv41.layers.batch import Batch
from openv41.layers.probe import Probe
from openv41.model.cache import DenseStore
from tests.peers.torch_training import TorchTraining

NAME = "openv41"
PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
VERSION = tomllib.loads(PYPROJECT.read_text())["project"]["version"]
CASES = ("forward", "decode", "train", "prefill", "decode_batch")


class WatchedEngine(Engine):
    """Keeps the logits that tokens were drawn from."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []

    def _logits(self, hidden):
        logits = super()._logits(hidden)
        self.seen += list(logits.unbind(0))
        return logits


class OurModel(TorchTraining):
    """The text model with the weights of a checkpoint folder."""

    def __init__(self, folder):
        self.config = read_config(folder)
        self.model = load_model(Path(folder), numerics=NUMERICS["f32"], dtype=torch.float32)
        self.tokenizer = load_tokenizer(Path(folder))
        if self.config.engram:
            self.model.set_token_map(compress_vocabulary(self.tokenizer.backend))
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

    def serve_prompt(self, ids):
        """Prefill one prompt in a new engine, in exact mode; return the last token's logits [V]."""
        engine = self._engine(1, len(ids))
        engine.generate([self._request(ids, 1)])
        return engine.seen[0]

    def start_batch(self, ids, batch):
        """Bring `batch` requests of an engine to where all of them decode."""
        self.engine = self._engine(batch, len(ids) + 64)
        for row in range(batch):
            prompt = [*ids[row:], *ids[:row]]
            self.engine.submit(self._request(prompt, 64), lambda event: None)
        while len(self.engine.seen) < batch:
            self.engine.step()
        return torch.stack(self.engine.seen[:batch])

    def batch_step(self, tokens):
        """Decode one token of every request; the engine draws them itself, greedily."""
        self.engine.step()

    def _engine(self, batch, length):
        pages = batch * (-(-length // 64) + 1)
        cache = CacheConfig(num_pages=pages, max_requests=batch)
        schedule = ScheduleConfig(tokens_per_step=4096)
        config = EngineConfig(cache=cache, schedule=schedule, prefix_cache=False)
        return WatchedEngine(self.model, self.tokenizer, config)

    def _request(self, ids, max_tokens):
        greedy = SamplingConfig(temperature=0.0)
        return Request(prompt=tuple(ids), max_tokens=max_tokens, sampling=greedy, ignore_eos=True)

    def batch_logits(self, rows):
        """Return logits [B, S, V] of rows of equal length, with gradients."""
        logits = self.model.logits(self.model(Batch.from_documents(rows)).hidden)
        return logits.view(len(rows), len(rows[0]), -1)
