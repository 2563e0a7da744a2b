"""The engine on a CUDA device: pages, rings and prefix hits there, as the plain model answers."""

from dataclasses import replace

import pytest
import torch

from openv41 import CausalEncoderDecoder, init_weights, preset
from openv41.config import NUMERICS
from openv41.engine.request import FinishReason, Request
from openv41.engine.sampler import SamplingConfig
from openv41.engine.speculation import DraftChoice, SpeculationConfig
from openv41.model.prefill import PrefillMode
from openv41.presets import with_drafter
from tests.engine.drafts import plain_answers, target
from tests.engine.mini_engine import LENGTHS, arm, engine_of, greedy, plain_logits
from tests.layers.mini import random_ids

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", list(PrefillMode))
@pytest.mark.parametrize("numerics", ["f32", "f32qat"])
def test_it_answers_as_the_plain_model_does(mode, numerics):
    model = arm(torch.float64, bitwise=False, numerics=numerics)
    model.to("cuda")
    engine = engine_of(model, tokens_per_step=23, mode=mode, max_snapshots=4)
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    cold = engine.generate([greedy(p, 4) for p in prompts])
    warm = engine.generate([greedy(p, 4) for p in prompts])
    assert all(a.finish_reason is FinishReason.LENGTH for a in [*cold, *warm]), [*cold, *warm]
    assert engine.store.pages[next(iter(engine.store.pages))].is_cuda
    assert [answer.cached_tokens for answer in warm] == [len(p) - 1 for p in prompts]
    if mode is not PrefillMode.BOUNDED:
        for number, (prompt, answer) in enumerate(zip(prompts * 2, [*cold, *warm], strict=True)):
            want = plain_logits(model, prompt, answer.tokens).cpu()
            got = torch.stack(engine.drawn_from[number]).cpu()
            assert (got - want).abs().max() <= 1e-9, f"{number}, prompt of {len(prompt)}"
    engine.prefixes.clear()
    assert engine.store.allocator.free == engine.store.cache.num_pages


def tiny_model(numerics):
    """With a row and a key as wide as kernels read them packed, and a drafter; far from ties."""
    config = with_drafter(preset("tiny"))
    config = replace(
        config,
        attention=replace(config.attention, head_dim=64),
        indexer=replace(config.indexer, num_heads=8, head_dim=128),
    )
    model = CausalEncoderDecoder(config, NUMERICS[numerics], dtype=torch.float32)
    init_weights(model, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    model.set_token_map(torch.arange(config.vocab_size) % config.engram.compressed_vocab_size)
    return model.to("cuda")


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("numerics", ["f32", "f32qat"])
def test_graphs_answer_as_calls_do(numerics, prefix_cache):
    """Requests that join and leave, pages that are added, page tables that grow."""
    model = tiny_model(numerics)
    lengths = {1: 64, 3: 9, 9: 80, 29: 30, 60: 64, 1000: 64}
    prompts = {n: [4 + token % 60 for token in random_ids(n, seed=n)] for n in lengths}
    requests = [greedy(prompts[n], answer) for n, answer in lengths.items()]
    sizes = {"max_requests": 4, "page_size": 16}
    options = {"tokens_per_step": 23, "prefix_cache": prefix_cache, "cache": sizes}
    options["speculation"] = None
    graphs = engine_of(model, cuda_graphs=True, **options)
    calls = engine_of(model, cuda_graphs=True, **options)
    calls.decode.captured.captures = False
    before = engine_of(model, **options)
    for _ in range(2):  # the second time prompts are known
        got, want, known = (
            [answer.tokens for answer in engine.generate(requests)]
            for engine in (graphs, calls, before)
        )
        assert [len(tokens) for tokens in got] == list(lengths.values())
        assert got == want
        if numerics == "f32":  # else a rounding may flip
            assert got == known
        assert [a[:4] for a in got] == [b[:4] for b in known]
    assert graphs.decode.captured.captures, "the capture failed"
    assert graphs.decode.captured.graphs >= 3
    assert graphs.decode.captured.replays > 64
    graphs.prefixes.clear()
    assert graphs.store.allocator.free == graphs.store.cache.num_pages


@pytest.mark.parametrize("numerics", ["f32", "f32qat"])
def test_drafts_in_graphs_answer_as_calls_do(numerics):
    """Greedy and sampled requests whose drafts are verified, from one to all of a block."""
    model = tiny_model(numerics)
    hot = SamplingConfig(temperature=1.3, seed=5)
    requests = [
        Request(
            prompt=tuple(4 + token % 60 for token in random_ids(n, seed=n)),
            max_tokens=48,
            sampling=sampling,
            ignore_eos=True,
        )
        for n in (3, 40, 90)
        for sampling in (SamplingConfig(temperature=0), hot)
    ]
    options = {"cache": {"max_requests": 6, "page_size": 16}, "cuda_graphs": True}
    graphs, calls = (engine_of(model, **options) for _ in range(2))
    plain = engine_of(model, speculation=None, **options)
    for part in (calls.decode.captured, calls.drafting.graphs.drafted):
        part.captures = False
    got, want, known = (
        [answer.tokens for answer in engine.generate(requests)] for engine in (graphs, calls, plain)
    )
    assert got == want
    if numerics == "f32":
        assert got[::2] == known[::2]  # greedy
    assert graphs.drafting.is_on
    assert sum(graphs.stats().drafts_accepted) > 0
    for part in (graphs.decode.captured, graphs.drafting.graphs.drafted):
        assert part.captures, "the capture failed"
        assert part.replays > 16


@pytest.mark.parametrize("drafts", DraftChoice)
def test_drafts_change_nothing(drafts):
    """The model's own drafter; sampled drafts change what is drawn at a temperature."""
    model = target(torch.float64)
    model.to("cuda")
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    requests = [greedy(p, 8) for p in prompts]
    hot = SamplingConfig(temperature=1.3, seed=5)
    requests += [
        Request(prompt=tuple(p), max_tokens=8, sampling=hot, ignore_eos=True) for p in prompts
    ]
    want = plain_answers(model, requests)
    engine = engine_of(model, speculation=SpeculationConfig(drafts=drafts))
    found = engine.generate(requests)
    assert engine.drafting.is_on
    assert engine.stats().draft_rounds > len(requests)
    same = len(requests) if drafts is DraftChoice.GREEDY else len(prompts)
    for mine, other in zip(found[:same], want, strict=False):
        assert mine.tokens == other.tokens
    assert all(len(answer.tokens) == 8 for answer in found)
