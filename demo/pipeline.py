"""The stages of the demo, each as the command or library call that a user would write."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from demo import settings
from demo.baselines import trigram_bits_per_byte, xz_bits_per_byte
from demo.corpus import Corpus, load_corpus
from demo.drafting import DraftingFigures, measure_drafting
from demo.evaluate import score_documents
from demo.pictures import Picture, make_pictures
from demo.report import (
    Summary,
    as_table,
    draw_curve,
    read_log,
    seconds_of_steps,
    write_report,
    write_summary,
)
from demo.runner import Runner, StageError
from demo.seeing import Seen, measure_seeing
from demo.serving import Served, measure_serving
from openv41.config import NUMERICS
from openv41.io.atomic import write_atomic
from openv41.io.checkpoint import load_model
from openv41.train.metrics import LOG_FILE, read_records
from openv41.train.stages import DRAFT_STAGE
from openv41.train.token_shards import TokenShards

STAGES = 13
FOLDERS = ("text", "pictures", "tokenizer", "data", "train", "export")
SUMMARY_FILE, CURVE_FILE, REPORT_FILE = "summary.json", "loss_curve.png", "report.html"
CHECKPOINT = "checkpoint"  # inside the folder of a training run


@dataclass(frozen=True, slots=True)
class Baselines:
    """Bits per byte of the baselines on the held-out text."""

    xz: float
    trigram: dict[int, float]


@dataclass(frozen=True, slots=True)
class Measured:
    """What the reloaded export showed."""

    by_document: dict[str, float]
    bits_per_byte: float
    num_parameters: int


def run_demo(run: Runner, out: Path, data: Path, tokens: int) -> Summary:
    """Run every stage; nothing of an earlier run but the downloaded texts is used."""
    start_fresh(out)
    with run.stage("corpus", "Shakespeare's works, three plays held out"):
        corpus = load_corpus(data)
        files = write_texts(corpus, out / "text")
        run.say(
            f"{len(corpus.train)} texts, {corpus.train_bytes:,} bytes to train on; "
            f"{', '.join(corpus.heldout)}: {corpus.heldout_bytes:,} bytes held out"
        )
    with run.stage("baselines", "xz -9 and a Witten-Bell trigram"):
        xz = xz_bits_per_byte(list(corpus.heldout.values()))
        baselines = Baselines(xz, trigram_bits_per_byte(files["train"], files["heldout"]))
        trigram = ", ".join(f"{v:,}: {score:.3f}" for v, score in baselines.trigram.items())
        run.say(f"bits per byte: xz {xz:.3f}; trigram by vocabulary {trigram}")
    shards = prepare(run, files, out)
    with run.stage("pictures", "handwritten digits and rendered words, with questions"):
        pictures = prepare_pictures(run, out)
    with run.stage("train", f"{settings.PRESET}, {tokens:,} tokens"):
        train(run, out, tokens)
    with run.stage("export", "the released checkpoint format"):
        checkpoint, export = out / "train" / CHECKPOINT, out / "export"
        run.command("convert", checkpoint, export, "--to", "released")
    with run.stage("evaluate", "the export, loaded again, on every held-out byte"):
        measured = evaluate(run, export, shards["heldout"], corpus.heldout_bytes)
    with run.stage("generate", "text from the export"):
        sample = generate(run, export)
    with run.stage(
        "see", f"{len(pictures['heldout'])} held-out pictures, asked through the engine"
    ):
        seen = measure_seeing(export, pictures["heldout"])
        run.say(
            f"right: digits {seen.digits_right:.1%} (chance {seen.digits_chance:.0%}), words "
            f"{seen.words_right:.1%} (chance {seen.words_chance:.0%})"
        )
    with run.stage("serve", f"a prompt of {settings.SERVED_TOKENS:,} tokens, cold and warm"):
        text = shards["heldout"].read(0, shards["heldout"].num_tokens).tolist()
        served = measure_serving(export, text)
        run.say(
            f"first token after {served.cold_seconds:.2f} s cold, {served.warm_seconds:.2f} s with "
            f"{served.hit_tokens:,} tokens known"
        )
    with run.stage("draft", f"{settings.DRAFT_PROMPTS} held-out prompts, with and without drafts"):
        drafted = measure_drafting(export, text)
        sampled, greedy = drafted.mean_lengths
        run.say(
            f"tokens per step: {sampled:.2f} at temperature 1, {greedy:.2f} at 0; one request is "
            f"{drafted.speed_up:.2f} times as fast"
        )
    with run.stage("report", "the loss curve, the table, summary.json, an HTML page"):
        summary = summarise(
            run,
            out,
            corpus=corpus,
            baselines=baselines,
            measured=measured,
            shards=shards,
            sample=sample,
            served=served,
            pictures=pictures,
            seen=seen,
            drafted=drafted,
        )
        bytes_per_token = shards["train"].num_bytes / shards["train"].num_tokens
        curve = read_log(out / "train" / LOG_FILE, bytes_per_token)
        draw_curve(curve, summary, out / CURVE_FILE)
    timed = replace(summary, total_seconds=run.total_seconds, seconds_by_stage=dict(run.seconds))
    return finish(run, timed, out)


def start_fresh(out: Path) -> None:
    """Remove what an earlier demo left in ``out``, and nothing else."""
    if out.exists() and any(out.iterdir()) and not (out / FOLDERS[0]).is_dir():
        raise StageError(f"{out} holds files of something else; name a new folder with --out")
    for name in FOLDERS:
        shutil.rmtree(out / name, ignore_errors=True)
    for name in (SUMMARY_FILE, CURVE_FILE, REPORT_FILE):
        (out / name).unlink(missing_ok=True)


def write_texts(corpus: Corpus, folder: Path) -> dict[str, list[Path]]:
    """Write each cleaned text to a file of its own."""
    files: dict[str, list[Path]] = {}
    for part, texts in (("train", corpus.train), ("heldout", corpus.heldout)):
        (folder / part).mkdir(parents=True)
        for name, text in texts.items():
            write_atomic(folder / part / f"{name}.txt", text.encode())
        files[part] = [folder / part / f"{name}.txt" for name in texts]
    return files


def prepare(run: Runner, files: Mapping[str, list[Path]], out: Path) -> dict[str, TokenShards]:
    """Train the tokenizer on the training part; turn both parts into token shards."""
    with run.stage("tokenizer", f"byte-level BPE, {settings.VOCABULARY:,} tokens"):
        size = ("--vocab-size", str(settings.VOCABULARY))
        words = ("tokenizer", "train", *files["train"], *size, "--prompt-format")
        run.command(*words, "--out", out / "tokenizer")
    with run.stage("data", "token shards"):
        for part, paths in files.items():
            tokenizer = ("--tokenizer", out / "tokenizer")
            run.command("data", "prepare", *paths, *tokenizer, "--out", out / "data" / part)
    return {part: TokenShards(out / "data" / part) for part in files}


def prepare_pictures(run: Runner, out: Path) -> dict[str, list[Picture]]:
    """Draw the pictures, and turn those to train on into shards."""
    pictures = make_pictures(out / "pictures")
    samples, tokenizer = out / "pictures" / "train" / "samples.jsonl", out / "tokenizer"
    preset = ("--preset", settings.PRESET)
    words = ("data", "images", samples, "--tokenizer", tokenizer, *preset)
    run.command(*words, "--out", out / "data" / "pictures")
    return pictures


def train(run: Runner, out: Path, tokens: int) -> None:
    """Train from random weights."""
    values = {"tokens": tokens, "seed": settings.SEED, **settings.TRAINING}
    sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    data = ("--data", out / "data" / "train", "--heldout", out / "data" / "heldout")
    images = ("--images", out / "data" / "pictures")
    stages = ("--stages", settings.STAGES)
    run.command("train", settings.PRESET, *data, *images, *stages, "--out", out / "train", *sets)


def evaluate(run: Runner, export: Path, shards: TokenShards, num_bytes: int) -> Measured:
    """Load the export and score it."""
    numerics = NUMERICS[settings.EVALUATION_NUMERICS]
    model = load_model(export, numerics=numerics, dtype=torch.float32)
    assert shards.num_bytes == num_bytes, f"{shards.num_bytes} of {num_bytes} bytes in the shards"
    columns = TextColumn("      tokens scored"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=run.console, transient=True) as bar:
        task = bar.add_task("", total=shards.num_tokens - 2 * len(shards.documents))
        scores = score_documents(
            model,
            shards,
            context=settings.EVALUATION_CONTEXT,
            stride=settings.EVALUATION_STRIDE,
            progress=lambda done: bar.update(task, advance=done),
        )
    bits = sum(scores[document.source] * document.bytes for document in shards.documents)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    run.say(", ".join(f"{Path(name).stem} {score:.3f}" for name, score in scores.items()))
    return Measured(scores, bits / num_bytes, num_parameters)


def generate(run: Runner, export: Path) -> str:
    """Continue the prompt; shows and returns what follows it."""
    options = {
        "--prompt": settings.PROMPT,
        "--max-tokens": settings.SAMPLE_TOKENS,
        "--temperature": settings.TEMPERATURE,
        "--seed": settings.SEED,
        "--numerics": settings.EVALUATION_NUMERICS,
    }
    words = [str(word) for pair in options.items() for word in pair]
    sample = run.command("generate", export, *words, capture=True).rstrip("\n")
    run.console.print(settings.PROMPT + sample, markup=False, highlight=False)
    return sample


def summarise(
    run: Runner,
    out: Path,
    *,
    corpus: Corpus,
    baselines: Baselines,
    measured: Measured,
    shards: Mapping[str, TokenShards],
    sample: str,
    served: Served,
    pictures: Mapping[str, list[Picture]],
    seen: Seen,
    drafted: DraftingFigures,
) -> Summary:
    """Collect every figure."""
    best = min(baselines.trigram.values())
    records = read_records(out / "train" / LOG_FILE)
    tokens = [r["tokens"] for r in records if r["stage"] != DRAFT_STAGE][-1]
    text_tokens = int(tokens * (1 - float(settings.TRAINING["image_share"])))
    export = out / "export"
    return Summary(
        heldout_bits_per_byte=measured.bits_per_byte,
        xz_bits_per_byte=baselines.xz,
        trigram_bits_per_byte=best,
        beats_trigram=measured.bits_per_byte < best,
        heldout_bits_per_byte_by_document=measured.by_document,
        trigram_bits_per_byte_by_vocabulary=baselines.trigram,
        heldout_documents=list(corpus.heldout),
        heldout_bytes=corpus.heldout_bytes,
        heldout_tokens=shards["heldout"].num_tokens - 2 * len(corpus.heldout),
        heldout_shingles_in_training=corpus.shared,
        training_documents=len(corpus.train),
        training_bytes=corpus.train_bytes,
        training_tokens=shards["train"].num_tokens,
        tokens_seen=tokens,
        text_tokens_seen=text_tokens,
        epochs_seen=text_tokens / shards["train"].num_tokens,
        vocabulary=settings.VOCABULARY,
        parameters=measured.num_parameters,
        cache_bytes_per_token=served.bytes_per_token,
        prefill_rows_skipped=served.rows_skipped,
        prefix_cold_seconds=served.cold_seconds,
        prefix_hit_seconds=served.warm_seconds,
        prefix_hit_tokens=served.hit_tokens,
        bounded_prefill_agreement=served.bounded_agreement,
        pictures_trained=len(pictures["train"]),
        pictures_heldout=len(pictures["heldout"]),
        digits_right=seen.digits_right,
        digits_chance=seen.digits_chance,
        words_right=seen.words_right,
        words_chance=seen.words_chance,
        mean_accepted_length=drafted.mean_lengths[0],
        mean_accepted_length_greedy=drafted.mean_lengths[1],
        draft_acceptance=drafted.acceptance[0],
        draft_acceptance_greedy=drafted.acceptance[1],
        mean_accepted_length_before_loops=drafted.before_loops[1],
        repeated_4_grams=drafted.repeated[0],
        repeated_4_grams_greedy=drafted.repeated[1],
        draft_speed_up=drafted.speed_up,
        first_pictures=[
            {"file": str(file.relative_to(out)), "answer": answer, "model": said}
            for file, answer, said in seen.shown
        ],
        export_bytes=sum(file.stat().st_size for file in export.glob("*.safetensors")),
        seed=settings.SEED,
        train_seconds=run.seconds["train"],
        train_tokens_per_second=records[-1]["tokens"] / run.seconds["train"],
        steps_seconds=seconds_of_steps(records),
        total_seconds=run.total_seconds,
        seconds_by_stage=dict(run.seconds),
        prompt=settings.PROMPT,
        sample=sample,
    )


def finish(run: Runner, summary: Summary, out: Path) -> Summary:
    """Write the page and print the table; summary.json comes last, when everything has worked."""
    write_report(summary, out / CURVE_FILE, out / REPORT_FILE)
    write_summary(summary, out / SUMMARY_FILE)
    run.console.print()
    run.console.print(as_table(summary))
    for name in (SUMMARY_FILE, CURVE_FILE, REPORT_FILE):
        run.say(str(out / name))
    return summary
