"""Report: the same figures in table, JSON, picture and page."""

import base64
import io
import json
import math
import re

import pytest
from rich.console import Console

from demo import report
from openv41.errors import DataError

PNG = b"\x89PNG\r\n\x1a\n"


def make(**changes):
    values = {
        "heldout_bits_per_byte": 2.104,
        "xz_bits_per_byte": 2.839,
        "trigram_bits_per_byte": 2.261,
        "beats_trigram": True,
        "heldout_bits_per_byte_by_document": {"macbeth.txt": 2.2, "john.txt": 2.0},
        "trigram_bits_per_byte_by_vocabulary": {512: 2.308, 1024: 2.261, 2048: 2.273},
        "heldout_documents": ["john", "macbeth"],
        "heldout_bytes": 320_766,
        "heldout_tokens": 127_727,
        "heldout_shingles_in_training": {"john": 0.0001, "macbeth": 0.0002},
        "training_documents": 39,
        "training_bytes": 4_736_473,
        "training_tokens": 1_874_474,
        "tokens_seen": 4_000_000,
        "text_tokens_seen": 3_000_000,
        "epochs_seen": 2.13,
        "vocabulary": 1024,
        "parameters": 1_234_567,
        "cache_bytes_per_token": 96,
        "prefill_rows_skipped": 0.4,
        "prefix_cold_seconds": 2.0,
        "prefix_hit_seconds": 0.5,
        "prefix_hit_tokens": 1560,
        "bounded_prefill_agreement": 0.9,
        "pictures_trained": 2437,
        "pictures_heldout": 560,
        "digits_right": 0.856,
        "digits_chance": 0.1,
        "words_right": 0.25,
        "words_chance": 0.05,
        "mean_accepted_length": 2.25,
        "mean_accepted_length_greedy": 2.75,
        "draft_acceptance": [0.625, 0.375],
        "draft_acceptance_greedy": [0.75, 0.5],
        "mean_accepted_length_before_loops": 2.25,
        "repeated_4_grams": 0.02,
        "repeated_4_grams_greedy": 0.3,
        "draft_speed_up": 1.25,
        "first_pictures": [],
        "export_bytes": 2_500_000,
        "seed": 1,
        "train_seconds": 200.0,
        "train_tokens_per_second": 20_000.0,
        "steps_seconds": {"pretrain": 150.0, "dspark": 40.0},
        "total_seconds": 290.0,
        "seconds_by_stage": {"corpus": 3.0, "train": 200.0},
        "prompt": "MACBETH.\n",
        "sample": "Is this a <dagger> & more",
    }
    return report.Summary(**{**values, **changes})


def printed(summary):
    console = Console(width=120, file=io.StringIO())
    console.print(report.as_table(summary))
    return console.file.getvalue()


@pytest.fixture
def log(tmp_path):
    file = tmp_path / "log.jsonl"
    lines = [{"step": i, "tokens": 1000 * (i + 1), "loss": 6.9 - 0.01 * i} for i in range(300)]
    lines.insert(200, {"tokens": 200_000, "heldout_bits_per_byte": 2.5})
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return file


def test_table_says_who_is_ahead():
    assert "0.157 below the trigram" in printed(make())
    assert "0.139 above the trigram" in printed(make(heldout_bits_per_byte=2.4))
    assert "1,024 tokens" in printed(make())


def test_each_training_stage_has_its_seconds():
    records = [
        {"stage": "pretrain", "tokens": 2000, "tokens_per_second": 100.0},
        {"stage": "pretrain", "tokens": 4000, "tokens_per_second": 200.0},
        {"stage": "pretrain", "tokens": 4000, "heldout_bits_per_byte": 2.5},
        {"stage": "dspark", "tokens": 5000, "tokens_per_second": 50.0},
    ]
    assert report.seconds_of_steps(records) == {"pretrain": 30.0, "dspark": 20.0}
    assert "pretrain 150, dspark 40; 20,000 tokens/s" in printed(make())


def test_summary_holds_every_figure(tmp_path):
    report.write_summary(make(), tmp_path / "summary.json")
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["heldout_bits_per_byte"] == 2.104
    assert found["seconds_by_stage"] == {"corpus": 3.0, "train": 200.0}
    assert found["trigram_bits_per_byte_by_vocabulary"]["2048"] == 2.273
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_log_becomes_bits_per_byte(log):
    curve = report.read_log(log, 2.5)
    assert len(curve.tokens) == 300
    assert curve.training[0] == pytest.approx(6.9 / math.log(2) / 2.5)
    assert curve.heldout == [2.5]
    assert curve.heldout_tokens == [200_000]


def test_log_without_a_step_is_an_error(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"tokens": 1}\n')
    with pytest.raises(DataError, match="holds no line with a loss"):
        report.read_log(tmp_path / "log.jsonl", 2.5)
    with pytest.raises(DataError, match="cannot read the training log"):
        report.read_log(tmp_path / "absent.jsonl", 2.5)


def test_smoothing_looks_both_ways():
    assert report.smooth([3.0] * 5, 4) == pytest.approx([3.0] * 5)
    falling = [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    assert report.smooth(falling, 4)[:4] == pytest.approx(falling[:4])  # no lag
    assert report.smooth([0.0, 0.0, 5.0, 0.0, 0.0], 4) == pytest.approx([0, 5 / 3, 1, 5 / 4, 5 / 3])


def test_page_holds_picture_figures_and_escaped_sample(tmp_path, log):
    picture, page = tmp_path / "curve.png", tmp_path / "report.html"
    report.draw_curve(report.read_log(log, 2.5), make(), picture)
    report.write_report(make(), picture, page)
    text = page.read_text()
    assert picture.read_bytes().startswith(PNG)
    found = re.search(r"data:image/png;base64,([^\"]+)", text)
    assert base64.b64decode(found.group(1)) == picture.read_bytes()
    assert "<b>2.104</b>" in text
    assert "Is this a &lt;dagger&gt; &amp; more" in text
    assert not re.search(r"(src|href)=\"(?!data:)", text)
