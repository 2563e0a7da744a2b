"""Held-out score: that of the model, over every byte of each document."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from demo.evaluate import score_documents
from openv41.io.tokenizer import train_tokenizer
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.train.token_shards import prepare_shards

pytestmark = pytest.mark.shapes

SENTENCE = "Now is the winter of our discontent made glorious summer by this sun of York.\n"


@pytest.fixture
def shards(tmp_path):
    long, short = tmp_path / "long.txt", tmp_path / "short.txt"
    long.write_text("".join(SENTENCE[i % 7 :] for i in range(20)))
    short.write_text("x")
    tokenizer = train_tokenizer([long], vocab_size=259)
    return prepare_shards([long, short], tokenizer, tmp_path / "shards")


class UnevenModel(CausalEncoderDecoder):
    """Gives token 100 + (i % 7) half of the probability when it has read token i."""

    vocabulary = 259
    config = SimpleNamespace(vocab_size=vocabulary)
    norm = SimpleNamespace(weight=torch.zeros(1))

    def __init__(self):
        torch.nn.Module.__init__(self)

    def forward(self, batch):
        p = torch.full((len(batch.token_ids), self.vocabulary), 0.5 / (self.vocabulary - 1))
        p[torch.arange(len(p)), 100 + batch.token_ids % 7] = 0.5
        return SimpleNamespace(hidden=p.log())

    @property
    def head(self):
        def loss(log_p, targets):
            return SimpleNamespace(each=-log_p.gather(1, targets[:, None])[:, 0])

        return SimpleNamespace(loss=loss)


def by_hand(shards, document):
    begin, end = shards.bounds[document], shards.bounds[document + 1]
    ids = shards.read(begin, end - 1).tolist()  # BOS first, EOS is no byte
    hits = [100 + a % 7 == b for a, b in itertools.pairwise(ids)]
    bits = sum(1.0 if hit else math.log2(258 / 0.5) for hit in hits)
    return bits / shards.documents[document].bytes


@pytest.mark.parametrize(("context", "stride"), [(3, 1), (64, 48), (100_000, 7)])
def test_score_is_the_sum_over_all_tokens_whatever_the_window(shards, context, stride):
    seen = []
    scores = score_documents(
        UnevenModel(), shards, context=context, stride=stride, progress=seen.append
    )
    assert scores == {
        "long.txt": pytest.approx(by_hand(shards, 0), rel=1e-5),
        "short.txt": pytest.approx(by_hand(shards, 1), rel=1e-5),
    }
    assert sum(seen) == shards.num_tokens - 4  # BOS and EOS of two documents
