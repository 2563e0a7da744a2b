"""The line that shows how a run goes."""

import pytest

from openv41.cli.train_progress import note_events, progress_line
from openv41.train.balance import Balance
from openv41.train.metrics import StepRecord

WORST = {"text": 1.234, "image": 9.87}
BALANCE = {kind: Balance([1.1, worst], [1.0, 0.9]) for kind, worst in WORST.items()}
RECORD = StepRecord(
    step=447_033,
    stage="posttrain",
    tokens=45_000_000_000_000,
    loss=2.4,
    losses={"text": 2.3456, "image": 10.2345},
    lr=2.6e-4,
    grad_norm=0.5321,
    balance=BALANCE,
    tokens_per_second=1_234_567.0,
    model_flops_per_second=4.46e14,
    mfu=0.4512,
)
FAR = 23 * 3600 + 59 * 60 + 59


def line(seconds=FAR, **changes):
    return progress_line(StepRecord(**{**fields(), **changes}), 447_034, seconds)


def fields():
    return {name: getattr(RECORD, name) for name in RECORD.__dataclass_fields__}


def test_one_line_holds_everything():
    text = line()
    assert text == (
        "posttrain 447033/447034  text 2.346 image 10.23  1.23M tok/s  mfu 45.1%  lr 2.6e-4  "
        "grad 0.53  load 1.2 9.9  23h59m left"
    )
    assert len(text) <= 120


def test_a_device_without_a_known_peak_shows_operations():
    text = line(mfu=None)
    assert " 446 TFLOP/s " in text
    assert len(text) <= 120
    assert "FLOP" not in line(mfu=None, model_flops_per_second=None)


def test_figures_never_take_an_exponent():
    assert "  1.00M tok/s  " in line(tokens_per_second=999_600.0)
    assert "  999k tok/s  " in line(tokens_per_second=999_400.0)
    assert "  0.3 tok/s  " in line(tokens_per_second=0.3)


def test_text_alone_has_one_loss_and_one_load():
    text = line(losses={"text": 2.4}, balance={"text": BALANCE["text"]}, tokens_per_second=987.6)
    assert "  loss 2.400  988 tok/s  " in text
    assert "  load 1.2  " in text


def test_beside_teachers_the_distance_to_them_is_shown():
    text = line(losses={"text": 2.4}, distill_loss=0.5, tokens_per_second=987.6)
    assert " loss 2.400 distill 0.5000 988 tok/s " in text
    assert "distill" not in line()


def test_drafts_are_said_to_be_measured_one_by_one(capsys):
    held = {"acceptance": [0.64, 0.7], "tau": 2.09}
    note_events(StepRecord(**{**fields(), "heldout_draft": held}))
    assert capsys.readouterr().err == (
        "posttrain 447033  held-out drafts: mean accepted length 2.09, "
        "accepted if those before are 64% 70%\n"
    )


def test_a_contrastive_step_shows_what_was_found():
    text = line(losses={}, balance={}, retrieval=0.456, stage="vision", tokens_per_second=12_345.0)
    assert text == (
        "vision 447033/447034  loss 2.400  12.3k tok/s  mfu 45.1%  lr 2.6e-4  grad 0.53  "
        "retrieval 46%  23h59m left"
    )


@pytest.mark.parametrize(
    ("seconds", "want"),
    [(0.4, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1h00m"), (86_400 * 3 + 7200, "3d02h")],
)
def test_time_left(seconds, want):
    assert line(seconds).endswith(f"  {want} left")


def test_scores_and_spikes_have_lines_of_their_own(capsys):
    note_events(RECORD)
    assert capsys.readouterr().err == ""
    note_events(StepRecord(**{**fields(), "heldout_bits_per_byte": 2.125, "spike": True}))
    said = capsys.readouterr().err
    assert "posttrain 447033  held-out text 2.125 bits/byte\n" in said
    assert "posttrain 447033  loss spike: 2.400, far above the steps before it\n" in said
