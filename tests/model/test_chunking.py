"""However a sequence is cut into steps, every value and every choice is the same."""

import pytest
import torch

from openv41.layers.batch import Batch
from tests.layers.mini import random_ids
from tests.model.mini import Session, all_arms, alone, arm_model, arms, assert_same

pytestmark = pytest.mark.unchecked

LENGTH = 15  # crosses the window of 4 three times; ends in a half-full group and partial block
IDS = random_ids(LENGTH, seed=1)


@arms
def test_chunks_of_one_size(dtype, bitwise):
    """Five copies of a sequence side by side, each in chunks of its own size."""
    model = arm_model(dtype, bitwise)
    sizes = {size: [size] * LENGTH for size in (1, 2, 3, 5, 7)}
    session = Session(model).feed(dict.fromkeys(sizes, IDS), sizes)
    want = alone(model, IDS)
    for size in sizes:
        assert_same(session.everything(size), want, dtype, bitwise=bitwise)


@arms
def test_every_prompt_length_then_decode(dtype, bitwise):
    model, ids = arm_model(dtype, bitwise), IDS[:9]
    prompts = {prompt: [prompt] + [1] * len(ids) for prompt in range(1, len(ids))}
    session = Session(model).feed(dict.fromkeys(prompts, ids), prompts)
    want = alone(model, ids)
    for prompt in prompts:
        assert_same(session.everything(prompt), want, dtype, bitwise=bitwise)


@all_arms
def test_a_request_by_itself_in_chunks(dtype, bitwise):
    model, ids = arm_model(dtype, bitwise), IDS[:11]
    chunked = Session(model).feed({0: ids}, {0: [5, 1, 2]}).everything(0)
    assert_same(chunked, alone(model, ids), dtype, bitwise=bitwise)


@all_arms
def test_a_forward_without_a_store(dtype, bitwise):
    model = arm_model(dtype, bitwise)
    with torch.no_grad():
        logits = model.logits(model(Batch.from_documents([IDS])).hidden)
    stored = Session(model).step({0: IDS})[0]
    assert_same({"logits": logits}, {"logits": stored}, dtype, bitwise=bitwise)


@pytest.mark.parametrize("numerics", ["f32qat", "released"])
def test_rounded_numerics_to_the_bit(numerics):
    model = arm_model(torch.float32, True, numerics)
    chunks = {0: [1] * 4, 1: [3, 1, 7, 2], 2: [8, 8]}
    session = Session(model).feed(dict.fromkeys(chunks, IDS), chunks)
    want = alone(model, IDS)
    for request in chunks:
        assert_same(session.everything(request), want, torch.float32, bitwise=True)


def test_the_mini_model_is_no_easy_case():
    """Selections reject entries, pools reject blocks, and the ends are partial."""
    model = arm_model(torch.float64, False)
    shown, indexer = alone(model, IDS), model.config.indexer
    for layer, ratio in ((2, 2), (4, 2), (5, 1), (7, 1)):
        chosen = shown[f"layers.{layer}.topk_indices"][-1]
        assert (chosen >= 0).sum() == indexer.top_k < LENGTH // ratio, layer
    assert shown["layers.5.candidate_mask"][-1].sum() <= indexer.pool_size < LENGTH
    assert LENGTH % indexer.block_size, "the newest block must be partial"
    assert len(shown["layers.3.expert_ids"].unique(dim=0)) > 3
    assert not torch.equal(shown["layers.2.topk_indices"], shown["layers.4.topk_indices"])
