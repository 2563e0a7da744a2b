"""``--set``: typed, complete error messages."""

import pytest

from openv41.errors import ConfigError
from openv41.presets import tiny
from openv41.train.config import TrainConfig
from openv41.train.overrides import apply_settings, field_paths, parse_settings


def changed(config, **settings):
    return apply_settings(config, {k.replace("__", "."): v for k, v in settings.items()})


def test_values_are_read_by_the_field_they_go_to():
    train = changed(
        TrainConfig(), tokens="3_000_000", optimizer__lr="3e-4", decay="cosine", seed="7"
    )
    assert (train.tokens, train.optimizer.lr, train.decay, train.seed) == (
        3_000_000, 3e-4, "cosine", 7,
    )  # fmt: skip
    assert train.optimizer.beta2 == TrainConfig().optimizer.beta2
    model = changed(tiny(), moe__norm_top_k_prob="false", engram__layer_ids="0, 5")
    assert model.moe.norm_top_k_prob is False
    assert model.engram.layer_ids == (0, 5)


def test_only_the_final_values_are_checked():
    """Each of these alone would be refused."""
    model = changed(
        tiny(),
        num_layers="2",
        compress_ratios="0,1",
        kv_sources="1",
        index_sources="1",
        indexer__candidate_source="1",
        engram__layer_ids="0",
        engram__num_embeddings="100",
    )
    assert model.num_layers == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer.lr": "fast"}, r"optimizer\.lr is 'fast', must be a number"),
        ({"tokens": "2e6"}, r"tokens is '2e6', must be a whole number such as 1_000"),
        ({"decay": "wsd"}, r"decay is 'wsd', must be one of linear, cosine"),
        ({"optimizer.matrix_update": "sgd"}, r"must be one of muon, adamw"),
        ({"optimizer.lr": "-1"}, r"optimizer: 1 problem.*\n.*lr is -1\.0, must be above 0"),
        ({"optimiser.lr": "1"}, r"no setting 'optimiser\.lr'; there are optimizer\.lr, "),
        ({"sequence_len": "1"}, r"no setting 'sequence_len'; there are sequence_length, "),
        ({"optimizer": "adam"}, r"no setting 'optimizer'"),
    ],
)
def test_errors_name_the_field(settings, message):
    with pytest.raises(ConfigError, match=message):
        apply_settings(TrainConfig(), settings)


def test_all_problems_come_at_once():
    with pytest.raises(ConfigError, match=r"2 problem") as caught:
        apply_settings(TrainConfig(), {"seed": "x", "optimizer.beta1": "y"})
    assert "seed is 'x'" in str(caught.value)
    assert "optimizer.beta1 is 'y'" in str(caught.value)


def test_words_without_a_value_are_refused():
    assert parse_settings(["a=1", "b = x=y ", "a=2"]) == {"a": "2", "b": "x=y"}
    with pytest.raises(ConfigError, match="'tokens' is not of the form key=value"):
        parse_settings(["tokens"])


def test_paths_reach_every_plain_field():
    paths = field_paths(tiny())
    assert {"moe.num_experts", "attention.yarn.factor", "engram.table_size"} <= set(paths)
    assert not {"vision", "dspark", "moe", "engram"} & set(paths)
