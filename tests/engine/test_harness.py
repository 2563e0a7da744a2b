"""lm-eval on the engine: three kinds of task on local data, against the plain model's logits."""

import json
import math
import re
import sys

import pytest
import torch
from typer.testing import CliRunner

from openv41.cli.main import app
from openv41.engine.engine import Engine
from openv41.engine.harness import language_model, run_tasks, scores
from openv41.engine.scoring import Scorer, rolling_windows
from openv41.errors import InputError
from openv41.io.checkpoint import load_model
from openv41.io.tokenizer import load_tokenizer
from openv41.layers.batch import Batch
from tests.io.tiny_checkpoint import make_checkpoint

QUESTIONS = [
    {"question": "To be, or not", "choices": ["to be", "the question", "that"]},
    {"question": "that is", "choices": ["the question", "not"]},
    {"question": "To", "choices": ["be", "or not to be"]},
]
TEXTS = [{"text": "To be, or not to be"}, {"text": "that is the question. " * 3}]
CLOZES = [{"question": q, "answer": a} for q, a in (("To be", "x"), ("that", "y"), ("or", "z"))]

TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: bits_per_byte
""",
    "clozes": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 4
  do_sample: false
metric_list:
  - metric: exact_match
""",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), std=0.5)


def documents_of(checkpoint):
    """Samples of each task; where there are answers, the first alone is the model's."""
    best = [most_likely(checkpoint, one) for one in QUESTIONS]
    answers = [best[0], *(int(not place) for place in best[1:])]
    choices = [{**q, "answer": answer} for q, answer in zip(QUESTIONS, answers, strict=True)]
    right = {**CLOZES[0], "answer": continued(checkpoint, "To be")}
    return {"choices": choices, "texts": TEXTS, "clozes": [right, *CLOZES[1:]]}


@pytest.fixture
def files(tmp_path, checkpoint):
    """Paths of the task files."""
    made = {}
    for name, documents in documents_of(checkpoint).items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, documents)))
        data = {"data_files": {"test": str(tmp_path / f"{name}.jsonl")}}
        data["cache_dir"] = str(tmp_path / "cache")
        head = f"task: {name}\ndataset_path: json\ntest_split: test\n"
        made[name] = tmp_path / f"{name}.yaml"
        made[name].write_text(f"{head}dataset_kwargs: {json.dumps(data)}{TASKS[name]}")
    return made


def harness():
    """lm-eval and what it brings is three times as large as all else that the tests need."""
    pytest.importorskip("lm_eval", reason="lm-eval is not here: pip install 'openv41[eval]'")


@torch.no_grad()
def logits(checkpoint, ids):
    model = load_model(checkpoint, dtype=torch.float32)
    return model.logits(model(Batch.from_documents([ids])).hidden)


def scored(checkpoint, before, after):
    """Summed log-probability of some tokens behind others."""
    ids = [*before, *after]
    rows = logits(checkpoint, ids).double().log_softmax(-1)
    return sum(rows[i - 1, ids[i]].item() for i in range(len(before), len(ids)))


def continued(checkpoint, text, count=4):
    tokenizer = load_tokenizer(checkpoint)
    ids = [0, *tokenizer.encode(text)]
    for _ in range(count):
        ids.append(int(logits(checkpoint, ids)[-1, : tokenizer.vocab_size].argmax()))
    return tokenizer.decode(ids[-count:]).partition("\n")[0]


def most_likely(checkpoint, question):
    """Place of the choice that the plain model finds most likely."""
    encode = load_tokenizer(checkpoint).encode
    before = [0, *encode(question["question"])]
    found = [scored(checkpoint, before, encode(f" {choice}")) for choice in question["choices"]]
    return found.index(max(found))


def expected(checkpoint):
    """Accuracy, bits per byte and exact matches by the plain model."""
    encode = load_tokenizer(checkpoint).encode
    nats = -sum(scored(checkpoint, [0], encode(one["text"])) for one in TEXTS)
    size = sum(len(one["text"].encode()) for one in TEXTS)
    return {"acc": 1 / 3, "bits_per_byte": nats / size / math.log(2), "exact_match": 1 / 3}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of other libraries
def test_the_command_runs_local_tasks(checkpoint, files, tmp_path):
    harness()
    words = [word for file in files.values() for word in ("--tasks", str(file))]
    out = tmp_path / "results.json"
    command = ["evaluate", str(checkpoint), *words, "--numerics", "f32", "--out", str(out)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    want = expected(checkpoint)
    found = json.loads(out.read_text())["results"]
    got = {metric: found[task][f"{metric},none"] for task, metric in zip(files, want, strict=True)}
    assert got == pytest.approx(want, abs=1e-5)
    line = next(line for line in result.stdout.splitlines() if line.startswith("texts"))
    assert re.search(rf"bits_per_byte +none +{want['bits_per_byte']:.4g} ", line)
    few = run_tasks(Scorer(Engine.load(checkpoint)), [str(files["choices"])], limit=2)
    assert [score.samples for score in scores(few)] == [2]


@pytest.mark.filterwarnings("ignore")
def test_tasks_that_cannot_be_loaded(checkpoint, tmp_path):
    harness()
    scorer = Scorer(Engine.load(checkpoint))
    with pytest.raises(InputError, match="there is no such task file"):
        run_tasks(scorer, [str(tmp_path / "lost.yaml")])
    (tmp_path / "bad.yaml").write_text("task: bad\ndataset_path: json\n")
    with pytest.raises(InputError, match=r"bad\.yaml: lm-eval cannot load the task"):
        run_tasks(scorer, [str(tmp_path / "bad.yaml")])


@pytest.mark.filterwarnings("ignore")
def test_windows_are_those_of_lm_eval():
    harness()
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # noqa: PLC0415

    ids = list(range(100, 137))
    for size in (2, 5, 9, 36, 37, 38, 60):
        theirs = [
            make_disjoint_window(window)
            for window in get_rolling_token_windows(ids, 0, size - 1, context_len=1)
        ]
        whole = [0, *ids]
        ours = [
            (whole[first:start], whole[start:stop])
            for first, start, stop in rolling_windows(len(whole), size)
        ]
        assert ours == [(list(context), list(scored)) for context, scored in theirs], size


@pytest.mark.filterwarnings("ignore")
def test_the_model_passes_requests_on(checkpoint):
    harness()
    from lm_eval.api.instance import Instance  # noqa: PLC0415

    scorer = Scorer(Engine.load(checkpoint))
    model = language_model(scorer)

    def ask(kind, *arguments):
        return [Instance(request_type=kind, doc={}, arguments=arguments, idx=0)]

    pair = ("To be", " or not")
    assert model.loglikelihood(ask("loglikelihood", *pair)) == scorer.loglikelihoods([pair])
    rolled = model.loglikelihood_rolling(ask("loglikelihood_rolling", "To be"))
    assert rolled == scorer.rolling(["To be"])
    one = ("To be", {"until": ["e"], "max_gen_toks": 3})
    assert model.generate_until(ask("generate_until", *one)) == scorer.generations([one])


def test_figures_of_results():
    """A standard error stands beside its value; what is no figure is left out."""
    found = {
        "results": {
            "a": {"alias": "a", "acc,none": 0.5, "acc_stderr,none": 0.1, "f1,strict": 1},
            "b": {"alias": "b", "ppl,none": 2.0, "ppl_stderr,none": "N/A"},
        },
        "n-samples": {"a": {"original": 9, "effective": 4}},
    }
    rows = [(s.task, s.metric, s.filter, s.value, s.error, s.samples) for s in scores(found)]
    assert rows == [
        ("a", "acc", "none", 0.5, 0.1, 4),
        ("a", "f1", "strict", 1.0, None, 4),
        ("b", "ppl", "none", 2.0, None, 0),
    ]


def test_without_lm_eval_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(
        InputError, match=r"evaluation needs lm-eval .*pip install 'openv41\[eval\]'"
    ):
        run_tasks(None, ["task.yaml"])
