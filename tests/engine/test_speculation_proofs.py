"""Speculation on real prompts: a model and a drafter that have learned, to the last token."""

from dataclasses import replace

import pytest
import torch

from openv41.engine import joint_sampling
from openv41.engine.confidence_speculator import ConfidenceSpeculator
from openv41.engine.cost_table import CostTable
from openv41.engine.engine import Engine, EngineConfig
from openv41.engine.paged_store import CacheConfig
from openv41.engine.scheduler import ScheduleConfig
from openv41.io.tokenizer import train_tokenizer
from openv41.train.loop import Run, Trainer
from openv41.train.recipes import configure
from openv41.train.token_shards import prepare_shards
from tests.conftest import REPOSITORY
from tests.engine.drafts import lose_rows
from tests.engine.mini_engine import greedy

pytestmark = pytest.mark.prove

STAGES = ("pretrain", "dspark")
SETTINGS = {  # as the demo's, but shorter
    "cpu_threads": 1,
    "tokens": 81_920,
    "sequence_length": 64,
    "batch_tokens": 1024,
    "warmup_tokens": 8192,
    "decay": "linear",
    "optimizer.token_update": "adamw",
    "optimizer.lr": 1.4e-2,
    "optimizer.momentum": 0.8,
    "optimizer.weight_decay": 0.0,
    "optimizer.token_lr_factor": 2.0,
    "indexer_loss": 0.0,
    "balance_loss": 0.0,
    "model.dspark.num_stages": 1,
    "dspark.tokens": 40_960,
    "dspark.batch_tokens": 512,
    "dspark.warmup_tokens": 2048,
    "dspark.optimizer.lr": 3e-2,
}
COUNT, ANSWER, SHARED = 200, 32, 70  # prompts, tokens of an answer and of a common beginning
COSTS = CostTable(
    requests=(1, 16), plain=(1.0, 1.6), verify=((1.1,) * 6, (1.7, 2.0, 2.2, 3.0, 4.0, 6.0))
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny model of this repository's own texts, with a drafter."""
    folder = tmp_path_factory.mktemp("proofs")
    texts = [*sorted((REPOSITORY / "docs").glob("*.md")), REPOSITORY / "README.md"]
    data = prepare_shards(texts, train_tokenizer(texts, vocab_size=768), folder / "data").folder
    settings = [f"{key}={value}" for key, value in SETTINGS.items()]
    model, stages, token_map = configure("tiny", data, settings, stages=STAGES, images=False)
    run = Run(
        model=model,
        stages=stages,
        token_map=token_map,
        data=data,
        heldout=None,
        out=folder / "run",
        device=torch.device("cpu"),
    )
    return Trainer(run, resume=False).fit()


@pytest.fixture(scope="module")
def loaded(checkpoint):
    """The plain engine: no speculation, no prefix cache."""
    cache = CacheConfig(num_pages=120, page_size=16, max_requests=8)
    config = EngineConfig(cache=cache, prefix_cache=False, speculation=None, deterministic=True)
    return Engine.load(checkpoint, config=config)


@pytest.fixture(scope="module")
def requests(loaded):
    """Pieces of 1 to 120 tokens of real text, every second one behind the same beginning."""
    paths = sorted((REPOSITORY / "docs").glob("*.md"))
    ids = loaded.tokenizer.encode("".join(path.read_text() for path in paths))
    found = []
    for number in range(COUNT):
        start, length = number * (len(ids) - 200) // COUNT, 1 + 37 * number % 120
        piece = ids[start : start + length]
        found.append(greedy(([*ids[:SHARED], *piece] if number % 2 else piece), ANSWER))
    return found


@pytest.fixture(scope="module")
def plain(loaded, requests):
    return loaded.generate(requests)


def speculating(loaded, **options):
    """An engine with other batches: twice as many requests, smaller steps, a prefix cache."""
    cache = CacheConfig(num_pages=240, page_size=16, max_requests=16)
    config = EngineConfig(cache=cache, schedule=ScheduleConfig(tokens_per_step=96))
    return Engine(loaded.model, loaded.tokenizer, replace(config, deterministic=True), **options)


def differing(found, want):
    """Answers that are not the same."""
    return sum(a.tokens != b.tokens for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("is_scheduled", [False, True], ids=["all", "scheduled"])
def test_two_hundred_real_prompts(record_proof, loaded, requests, plain, is_scheduled):
    """T22: asked twice, so that the second time everything is in the prefix cache."""
    speculator = ConfidenceSpeculator(COSTS, num_drafts=5) if is_scheduled else None
    engine = speculating(loaded, speculator=speculator)
    wrong = [differing(engine.generate(requests), plain) for _ in range(2)]
    stats = engine.stats()
    assert engine.drafting.is_on
    record_proof(
        prompts=COUNT,
        tokens=2 * sum(len(answer.tokens) for answer in plain),
        different_answers=len({answer.tokens for answer in plain}),
        rounds=stats.draft_rounds,
        mean_accepted_length=round(stats.mean_accepted_length, 3),
        rejected_drafts=stats.wasted_rows,
        prefix_hit_tokens=stats.prefix_hit_tokens,
        answers_that_differ=wrong,
    )
    assert wrong == [0, 0]
    assert len({answer.tokens for answer in plain}) > COUNT // 2
    assert stats.mean_accepted_length > 1.2
    assert stats.wasted_rows > COUNT
    assert stats.prefix_hit_tokens > COUNT * SHARED // 2


def test_a_draft_that_is_not_compared_is_noticed(loaded, requests, plain, monkeypatch):
    """Control: every third block keeps its first draft whatever the model says."""
    rule, calls = joint_sampling.while_drafted, iter(range(10**9))

    def kind(tokens, drafts):
        if next(calls) % 3 or not drafts or tokens[0] == drafts[0].token:
            return rule(tokens, drafts)
        return [drafts[0].token, tokens[1]]

    monkeypatch.setattr(joint_sampling, "while_drafted", kind)
    assert differing(speculating(loaded).generate(requests[:24]), plain[:24]) > 6


def test_a_rollback_that_takes_too_much_is_noticed(loaded, requests, plain):
    """Control: the last row that holds is lost with those that do not."""
    engine = speculating(loaded)
    lose_rows(engine.store)
    assert differing(engine.generate(requests[:24]), plain[:24]) > 3
