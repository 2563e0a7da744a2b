"""The engine on a CUDA device: pages and rings there, tokens as the plain model draws them."""

import pytest
import torch

from openv41.engine.request import FinishReason
from openv41.model.prefill import PrefillMode
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
    answers = engine.generate([greedy(p, 4) for p in [*prompts, *prompts]])
    assert all(a.finish_reason is FinishReason.LENGTH for a in answers), answers
    assert engine.store.pages[next(iter(engine.store.pages))].is_cuda
    if mode is not PrefillMode.BOUNDED:
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=False)):
            want = plain_logits(model, prompt, answer.tokens).cpu()
            got = torch.stack(engine.drawn_from[number]).cpu()
            assert (got - want).abs().max() <= 1e-9, f"prompt of {len(prompt)}"
            assert answer.tokens == answers[number + len(prompts)].tokens, "from the prefix cache"
    engine.prefixes.clear()
    assert engine.store.allocator.free == engine.store.cache.num_pages
