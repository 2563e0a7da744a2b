"""Drafters whose drafts a test chooses, and engines that run them."""

from dataclasses import dataclass, replace

import torch

from openv41.config import DsparkConfig, MhcConfig
from openv41.layers.store import Slot
from openv41.ngram_hash_constants import num_embeddings
from tests.engine.mini_engine import arm, engine_of
from tests.layers.mini import VOCAB, mini_config

DSPARK = DsparkConfig(
    num_stages=1,
    block_size=5,
    noise_token_id=7,
    target_layer_ids=(2, 3, 4),
    markov_rank=4,
    num_experts=4,
    top_k=2,
)


def target_config():
    """Few layers, but every kind of state: windows, both ratios, a pool, an Engram; with taps."""
    config = mini_config()
    engram, indexer = config.engram, config.indexer
    return replace(
        config,
        num_layers=5,
        compress_ratios=(0, 2, 1, 1, 1),
        kv_sources=(1, 2),
        index_sources=(1, 2, 4),
        indexer=replace(indexer, candidate_source=2),
        mhc=MhcConfig(num_streams=2, sinkhorn_steps=2),
        engram=replace(engram, layer_ids=(1,), num_embeddings=num_embeddings(1, 3, 2, 20)),
        dspark=DSPARK,
    )


def target(dtype=torch.float64, *, bitwise=False):
    """A small model with taps."""
    return arm(dtype, bitwise=bitwise, config=target_config())


@dataclass
class Block:
    """What a drafter answers."""

    tokens: torch.Tensor
    confidence: torch.Tensor


class FakeDrafter:
    """Drafts what ``following`` says comes behind the tokens of a request.

    ``following(request, position, token)`` gives scores [X, V] of the block behind an anchor. Its
    window KV of one stage holds the mean tap of each position, so that its rollback can be seen.
    """

    num_stages = 1

    def __init__(self, model, following, block_size=5):
        self.block_size, self.following = block_size, following
        self.slot = Slot("window", model.config.num_layers)
        self.width = model.config.attention.head_dim
        self.seen = []  # (request, position, rows of context that are there) of each anchor
        self.written = []  # (request, first, stop)

    def write_context(self, taps, tap_batch, store, stops=None):
        stops = tap_batch.stops if stops is None else stops
        kept, rows = tap_batch.part(tap_batch.starts, stops)
        spans = kept.spans
        self.written += zip(spans.requests, spans.firsts, spans.stops, strict=True)
        values = taps[rows].mean(-1, keepdim=True).expand(-1, self.width)
        store.write(self.slot, spans, values, values)

    def propose(self, target, anchors, store):
        past = store.rows_before(self.slot, anchors.requests, anchors.starts)
        self.seen += zip(anchors.requests, anchors.starts, past, strict=True)
        asked = zip(anchors.requests, anchors.starts, anchors.token_ids.tolist(), strict=True)
        return torch.stack([self.following(*one) for one in asked])  # [R, X, V]

    def draft(self, proposal, choose):
        tokens = [choose(proposal[:, step], step) for step in range(self.block_size)]
        confidence = torch.zeros(proposal.shape[:2])
        return Block(torch.stack(tokens, dim=1), confidence)


def sure(tokens, vocab):
    """Scores that leave no other choice than these tokens."""
    return torch.full((len(tokens), vocab), -torch.inf, dtype=torch.float64).scatter(
        1, torch.tensor(tokens)[:, None], 0.0
    )


class Script:
    """Drafts of which a chosen number holds; ``answers`` are by request, prompts included."""

    def __init__(self, answers, holding, block_size=5, vocab=VOCAB):
        self.answers, self.holding = answers, holding
        self.block_size, self.vocab = block_size, vocab

    def __call__(self, request, position, token):
        known = self.answers[request]
        assert known[position] == token, f"request {request} has {token} at {position}"
        right = known[position + 1 :][: self.block_size]
        right += [1] * (self.block_size - len(right))
        hold = self.holding(request, position)
        wrong = self.vocab - 2  # never the image token
        return sure([t if k < hold else (t + 1) % wrong for k, t in enumerate(right)], self.vocab)


def plain_answers(model, requests, **options):
    """What the engine answers without speculation."""
    return engine_of(model, speculation=None, **options).generate(requests)


def speculating(model, following, *, block_size=5, speculator=None, **options):
    """An engine with a fake drafter."""
    drafter = FakeDrafter(model, following, block_size)
    return engine_of(model, drafter=drafter, speculator=speculator, **options)


def lose_rows(store):
    """Plant a fault: a rollback clears the last row of every window and pair that holds, too."""
    truncate = store.truncate

    def faulty(request, position):
        truncate(request, position)
        held = store._held[request]
        for slot, ring in store.rings.items():
            if position and slot.kind != "tokens" and held.place in ring.bounds:
                ring.rows[held.place * ring.size + (position - 1) % ring.size] = 0

    store.truncate = faulty
