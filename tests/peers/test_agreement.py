"""The comparison with other implementations, with a stand-in for each."""

from types import SimpleNamespace

import torch
from safetensors.torch import save_file

from tests.peers import agreement

LOGITS = torch.tensor([[0.5, 2.0], [1.0, -1.0]])


class StandIn:
    """Gives the same logits to any tokens, and writes beside the weights as loading may."""

    config = SimpleNamespace(indexer=None)

    def __init__(self, folder):
        assert (folder / "config.json").read_text() == "{}"
        (folder / "openv41_token_map.json").write_text("[0, 1]")

    def choices(self, ids, forced=None):
        return LOGITS[: len(ids)], {}


def test_a_golden_folder_stays_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "SEEDS", ())
    golden = tmp_path / "Z"
    (golden / "checkpoint").mkdir(parents=True)
    (golden / "checkpoint" / "config.json").write_text("{}")
    save_file({"text_ids": torch.tensor([0, 1])}, golden / "inputs.safetensors")
    save_file({"logits": LOGITS + 0.25}, golden / "prefill_f32.safetensors")
    peers = {"other": (StandIn, "1.0")}
    (line,) = agreement.agreement_lines(StandIn, peers, [golden])
    assert (line["checkpoint"], line["peer"], line["tokens"]) == ("golden Z", "other", 2)
    assert (line["agrees"], line["logits_max_abs"]) == (True, 0.0)
    assert line["ours_to_golden_max_abs"] == 0.25
    assert [path.name for path in (golden / "checkpoint").iterdir()] == ["config.json"]
