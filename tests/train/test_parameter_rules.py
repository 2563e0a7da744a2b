"""Every parameter has exactly one rule, and the heads of the table are those of the model."""

import pytest

from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.presets import PRESETS
from openv41.train.muon import block_shape
from openv41.train.parameter_rules import DRAFTER_RULES, RULES, num_blocks, pattern_of, rule_of


@pytest.mark.parametrize("name", ["tiny", "thin", "small", "released"])
def test_the_table_is_exactly_the_model(name):
    model = CausalEncoderDecoder(PRESETS[name](), device="meta")
    found = {pattern_of(n) for n, _ in model.named_parameters()}
    absent = {n for n in RULES if n.startswith("vision.") and model.vision is None}
    drafter = set() if model.drafter is None else set(DRAFTER_RULES)
    assert found == set(RULES) - absent | drafter


def test_an_unknown_parameter_is_a_bug():
    with pytest.raises(AssertionError, match=r"layers\.0\.attention\.wq\.weight is in no row"):
        rule_of("layers.0.attention.wq.weight")


@pytest.mark.parametrize("preset", ["tiny", "released"])
def test_heads_are_those_of_the_modules(preset):
    config = PRESETS[preset]()
    heads = {
        "attention.wq_b": (config.attention.head_dim, config.attention.q_rank),
        "indexer.wq_b": (config.indexer.head_dim, config.attention.q_rank),
    }  # the drafter's queries too
    seen = set()
    for name, parameter in CausalEncoderDecoder(config, device="meta").named_parameters():
        rule = rule_of(name)
        if rule.update != "muon":
            continue
        block = block_shape(parameter.shape, num_blocks(rule, config))
        for ending, shape in heads.items():
            if name.endswith(f"{ending}.weight"):
                assert block == shape, name
                seen.add(ending)
        if rule.blocks == "one" and parameter.ndim == 2:
            assert block == parameter.shape, name
    assert seen == set(heads)


def test_matrices_go_to_muon_vectors_to_adamw_tokens_to_sinkhorn():
    tokens = {"embed.weight", "head.weight", "layers.*.engram.table.weight"}
    tokens |= {f"drafter.markov.{table}.weight" for table in ("embed", "head")}
    model = CausalEncoderDecoder(PRESETS["released"](), device="meta")
    for name, parameter in model.named_parameters():
        update, pattern = rule_of(name).update, pattern_of(name)
        is_matrix = parameter.ndim > 1 and not name.endswith(("q_weight", "k_weight"))
        is_matrix &= name != "drafter.confidence.weight"  # a single row
        if "gate.bias" in name:
            assert update == "load balance", name
        else:
            want = "sinkhorn" if pattern in tokens else "muon" if is_matrix else "adamw"
            assert update == want, name


def test_norms_decay_and_biases_scales_and_sinks_do_not():
    for pattern, rule in {**RULES, **DRAFTER_RULES}.items():
        is_norm = "norm" in pattern or pattern.endswith(("q_weight", "k_weight"))
        assert rule.decays == (rule.update == "muon" or is_norm), pattern
