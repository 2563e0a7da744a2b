"""A training run: from its starting point, or its newest checkpoint, to an exported model."""

import hashlib
import json
import logging
import math
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from openv41.config import ModelConfig, as_dict
from openv41.errors import ConfigError, DataError, InputError
from openv41.io.atomic import write_atomic
from openv41.io.checkpoint import save_model
from openv41.io.checkpoint_hash import checkpoint_hash
from openv41.io.checkpoint_writer import read_companions
from openv41.io.tokenizer import load_tokenizer
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.train.balance import measure_balance
from openv41.train.checkpoint import (
    Checkpoints,
    Description,
    put,
    put_encoder,
    restore,
    state_tensors,
)
from openv41.train.config import TrainConfig
from openv41.train.contrastive import ContrastiveModel
from openv41.train.contrastive_step import contrastive_step
from openv41.train.data import TrainingBatches
from openv41.train.distill import TeacherSpec, open_teachers
from openv41.train.draft_evaluation import HeldOutDrafts
from openv41.train.draft_step import draft_step
from openv41.train.evaluate import HeldOut, HeldOutImages
from openv41.train.freezing import freeze_all_but_drafter, is_frozen
from openv41.train.lora import merged_state, save_adapter
from openv41.train.metrics import LOG_FILE, RunLog, Sink, StepRecord
from openv41.train.mixes import check_mixes
from openv41.train.optimizer import Optimizers
from openv41.train.packed_batch import PackedBatch
from openv41.train.placement import ExpertPlacement, distribute
from openv41.train.processes import ALONE, Processes
from openv41.train.run_folder import RUN_FILE, RunFolder
from openv41.train.sample_batches import PairBatches, SampleBatches
from openv41.train.sample_shards import SampleShards
from openv41.train.spikes import SpikeWatch, read_losses
from openv41.train.stages import SFT_STAGES, Place, Stage, num_steps, place_of
from openv41.train.starting_point import make_model
from openv41.train.step import DivergedError, StepResult, train_step
from openv41.train.stop_signals import stop_signals
from openv41.train.token_shards import INDEX_FILE, TokenShards
from openv41.train.utilisation import FlopCounter
from openv41.train.wandb_log import WandbLog

MODEL_FOLDER = "checkpoint"  # the trained model, in the format's plain float32 variant
ADAPTER_FILE = "adapter.safetensors"  # of a run with LoRA, beside the merged model


logger = logging.getLogger(__name__)
Report = Callable[[StepRecord], None]


class StoppedError(Exception):
    """The run was asked to stop and has saved its state."""

    def __init__(self, signal_number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name} after step {step}")
        self.signal_number = signal_number


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a run is made of."""

    model: ModelConfig
    stages: tuple[Stage, ...]
    token_map: Int[Tensor, " V"] | None
    data: Path
    heldout: Path | None
    images: Path | None = None
    heldout_images: Path | None = None
    base: Path | None = None  # checkpoint whose weights the run starts from; None: random ones
    teachers: tuple[TeacherSpec, ...] = ()
    sft: Path | None = None  # samples that the SFT_STAGES take instead of text
    out: Path
    device: torch.device
    processes: Processes = ALONE
    experts: ExpertPlacement = "sharded"  # among several processes
    wandb: str | None = None  # project that gets the figures too

    def describe(self) -> Description:
        """Everything that the result depends on, as plain values."""
        return {
            "model": as_dict(self.model),
            "order of stages": ", ".join(stage.name for stage in self.stages),
            "stages": {stage.name: as_dict(stage.train) for stage in self.stages},
            "data": _data_hash(self.data),
            "heldout": _data_hash(self.heldout),
            "images": _data_hash(self.images),
            "heldout images": _data_hash(self.heldout_images),
            "sft": _data_hash(self.sft),
            "from": None if self.base is None else checkpoint_hash(self.base),
            "teachers": {checkpoint_hash(spec.checkpoint): spec.weight for spec in self.teachers},
        }


class Trainer:
    """Holds the moving parts of a run; ``fit`` runs it to the end."""

    def __init__(self, run: Run, *, resume: bool) -> None:
        self.run = run
        self.processes, self.description = run.processes, run.describe()
        check_mixes(
            run.stages,
            run.processes,
            has_base=run.base is not None,
            has_teachers=bool(run.teachers),
        )
        self.checkpoints = Checkpoints(run.out, run.processes)
        self.folder = RunFolder(run.out, run.processes, self.description)
        state = self.folder.find_state(self.checkpoints, resume=resume)
        self.shards = TokenShards(run.data)
        self.tokenizer = load_tokenizer(run.data)
        self.shards.check_tokenizer(self.tokenizer)
        self.step = 0 if state is None else state.step
        self.num_steps, self.skipped = num_steps(run.stages), 0
        first = place_of(run.stages, max(0, self.step - 1))  # the stage that wrote the state
        torch.manual_seed(run.stages[0].train.seed)
        self.teachers = open_teachers(
            run.teachers,
            run.model,
            run.stages,
            self.tokenizer,
            samples=[SampleShards(path) for path in (run.images, run.sft) if path is not None],
            device=run.device,
        )
        self._enter(first, run.base if state is None else None)
        if state is not None:
            restore(state, self.optimizer)
            for loss in read_losses(run.out / LOG_FILE, self.stage.name, self.step):
                self.spikes.add(loss)

    def fit(self, report: Report = lambda _: None) -> Path:
        """Train to the last step and write the model; returns its folder.

        SIGINT and SIGTERM end the run after the step at hand, or the next that is not skipped, with
        StoppedError.
        """
        with self.folder.hold():
            self._fit(report)
            self.checkpoints.finish()
            return self._export(self.run.out / MODEL_FOLDER)

    def _fit(self, report: Report) -> None:
        steps = self.num_steps
        with self._open_log() as writer, stop_signals() as received:
            while self.step < steps:
                record = self._advance()
                if record is None:  # no place to stop or save: the parameters may be to blame
                    continue
                if writer is not None:
                    writer.add(record)
                    report(record)
                last, stops = self.step == steps, self.processes.any(bool(received))
                if stops or last or self.step % self.train.checkpoint_steps == 0:
                    self.save()
                self.checkpoints.poll()
                if stops and not last:
                    self.checkpoints.finish()
                    raise StoppedError(received[0] if received else signal.SIGTERM, self.step)
            if self.skipped:  # the last steps
                self._check_finite()
                self.save()

    def _open_log(self) -> AbstractContextManager[RunLog | None]:
        """The log of the run, which the first process writes."""
        if not self.processes.is_first:
            return nullcontext()
        out, described = self.run.out, json.dumps(self.description, indent=2)
        write_atomic(out / RUN_FILE, described.encode() + b"\n")
        sinks: list[Sink] = []
        if self.run.wandb is not None:
            sinks.append(WandbLog(self.run.wandb, out, self.description))
        return RunLog(out, self.step, sinks)

    def _export(self, folder: Path) -> Path:
        """Write the model that the run is about; the last stage may have had another pool."""
        placement = self.optimizer.placement
        values = {}
        for placed in placement.parameters:
            whole = placement.whole(placed)
            if self.processes.is_first:
                values[placed.name] = whole.cpu()
        if self.train.lora.rank:  # in one process
            assert isinstance(self.model, CausalEncoderDecoder), "an adapter on another model"
            path, base = self.run.out / ADAPTER_FILE, self.description["from"]
            save_adapter(self.model, path, self.train.lora, base)
            values = merged_state(self.model)
        if self.processes.is_first:
            model = CausalEncoderDecoder(self.run.model, device="meta", dtype=torch.float32)
            model.load_state_dict(values, assign=True)
            save_model(model, folder, variant="float32", companions=read_companions(self.run.data))
        self.processes.gather(None)  # nobody ends before the model is there
        return folder

    def save(self) -> None:
        """Write a checkpoint of the run."""
        self.checkpoints.save(self.optimizer, self.step, self.description)

    @property
    def train(self) -> TrainConfig:
        """Settings of the stage at hand."""
        return self.stage.train

    def _advance(self) -> StepRecord | None:
        """Run one step, and the held-out text where it is due; None where it was skipped."""
        place = place_of(self.run.stages, self.step)
        if place.stage is not self.stage:
            self._change(place)
        train, start, most = self.train, time.perf_counter(), self.spikes.most
        packed = self._batch(place)
        try:
            result = self._train(packed, place)
        except DivergedError as error:
            self._skip(error)
            return None
        seconds = time.perf_counter() - start
        skipped, self.skipped = self.skipped, 0
        self.spikes.add(result.loss)
        self.step += 1
        speed = self._flops(packed, result, place) / seconds
        return StepRecord(
            step=self.step,
            stage=place.stage.name,
            tokens=place.tokens + train.batch_tokens,
            loss=result.loss,
            losses=dict(result.losses),
            indexer_loss=result.indexer_loss,
            balance_loss=result.balance_loss,
            distill_loss=result.distill_loss,
            lr=result.lr,
            grad_norm=result.grad_norm,
            update_rms=result.update_rms,
            skipped=skipped,
            balance=measure_balance(result.loads),
            image_tokens=int((packed.ids == self.run.model.image_token_id).sum()),
            spike=result.loss > most,
            tokens_per_second=len(packed.ids) / seconds,
            model_flops_per_second=speed or None,
            mfu=self.flops.share(speed, self.processes.size) if speed else None,
            retrieval=result.retrieval,
            draft=None if result.draft is None else asdict(result.draft),
            heldout_draft=self._score_drafts(place),
            heldout_bits_per_byte=self._score(place, self.heldout),
            heldout_image_nats=self._score(place, self.heldout_images),
        )

    def _flops(self, packed: PackedBatch, result: StepResult, place: Place) -> int:
        """Model FLOPs of a step; 0 where they are not counted, as those of the drafter."""
        if place.stage.trains_drafter:
            return 0
        learns = not is_frozen(self.train, place.step)
        return self.flops.step(packed, num_targets=result.num_targets, encoder_learns=learns)

    def _train(self, packed: PackedBatch, place: Place) -> StepResult:
        most = self.spikes.most if self.train.skip_spikes else math.inf
        rest = self.optimizer, packed, self.train, place.step
        if isinstance(self.model, ContrastiveModel):
            return contrastive_step(self.model, *rest, most=most)
        if self.stage.trains_drafter:
            return draft_step(self.model, *rest, most=most)
        return train_step(self.model, *rest, teachers=self.teachers, most=most)

    def _score(self, place: Place, held: HeldOut | HeldOutImages | None) -> float | None:
        """Score what is held out where that is due, but not by a model that will be dropped."""
        due = self.step % self.train.heldout_steps == 0 or place.is_last
        rests = place.stage.trains_drafter
        if held is None or not due or rests or isinstance(self.model, ContrastiveModel):
            return None
        return held.score(self.model, self.processes)

    def _score_drafts(self, place: Place) -> dict[str, Any] | None:
        """Measure the drafter on the held-out text where that is due and it learns."""
        due = self.step % self.train.heldout_steps == 0 or place.is_last
        if not due or self.heldout is None or not self.train.draft.weight:
            return None
        assert isinstance(self.model, CausalEncoderDecoder), "drafts of another model"
        drafts = HeldOutDrafts(self.heldout.windows, self.train)
        return asdict(drafts.score(self.model))

    def _batch(self, place: Place) -> PackedBatch:
        if self.images is not None and place.stage.is_contrastive:
            return self.images.batch(place.step)
        packed = self.batches.batch(place.step)
        if self.images is None:
            return packed
        return packed.beside(self.images.batch(place.step))

    def _skip(self, error: DivergedError) -> None:
        """Go on behind a batch that changed nothing, unless too many did so in a row."""
        self.skipped += 1
        place, self.last_error = place_of(self.run.stages, self.step), error
        learned_nothing = place.is_last and self.skipped > place.step
        if self.skipped > self.train.max_skipped_steps or learned_nothing:
            raise error
        logger.warning("%s; this batch is skipped", error.what)
        self.step += 1

    def _check_finite(self) -> None:
        """Raise what kept the last step from being taken if the parameters are to blame."""
        parameters = self.optimizer.placement.parameters
        is_finite = all(bool(torch.isfinite(p.local).all()) for p in parameters)
        if self.processes.any(not is_finite):
            raise self.last_error

    def _enter(self, place: Place, base: Path | None = None) -> None:
        """Open the data of a stage, and make a model and optimizers for it, with new values.

        Those of the checkpoint ``base``, or random ones, which depend on the seed of the run.
        """
        self.stage, run, seed = place.stage, self.run, place.stage.train.seed + place.number
        self.images = self._open_images(seed)
        self.batches = self._open_batches(seed)
        self.heldout = self._open_heldout()
        self.heldout_images = self._open_heldout_images()
        self.model = make_model(
            self.stage,
            run.model,
            run.token_map,
            base=base,
            seed=run.stages[0].train.seed,
            device=run.device,
        )
        placement = distribute(self.model, run.processes, run.experts)
        self.optimizer = Optimizers(placement, self.train.optimizer)
        if self.stage.trains_drafter:
            freeze_all_but_drafter(placement)
        self.flops = FlopCounter(self.model, run.device)
        self.spikes = SpikeWatch(steps=self.train.spike_steps, factor=self.train.spike_factor)

    def _change(self, place: Place) -> None:
        """Go on with the next stage: the same parameters and momenta, other settings.

        After a stage that makes an encoder, another model with its encoder begins.
        """
        tensors, before = state_tensors(self.optimizer), self.stage
        self._enter(place)
        if before.makes_encoder:
            put_encoder(tensors, self.optimizer)
        else:
            put(tensors, self.optimizer)

    def _open_images(self, seed: int) -> SampleBatches | PairBatches | None:
        if self.run.images is None:
            return None
        shards, room = self._open_image_shards(self.run.images), self.stage.image_tokens
        if self.stage.is_contrastive:
            return PairBatches(shards, batch_tokens=room, seed=seed)
        return SampleBatches(shards, bin_tokens=room, seed=seed)

    def _open_batches(self, seed: int) -> TrainingBatches | SampleBatches:
        """What stands beside the images."""
        train = self.train
        shares = self.images is not None and not self.stage.is_contrastive
        room = train.batch_tokens - (train.image_tokens if shares else 0)
        if self.run.sft is not None and self.stage.name in SFT_STAGES:
            return SampleBatches(self._open_samples(self.run.sft), bin_tokens=room, seed=seed)
        return TrainingBatches(
            self.shards, sequence_length=train.sequence_length, batch_tokens=room, seed=seed
        )

    def _open_samples(self, folder: Path) -> SampleShards:
        shards = SampleShards(folder)
        shards.check(self.tokenizer, self.run.model.vision)
        longest, most = max(shards.lengths), self.run.model.max_position
        if longest > most:
            raise InputError(
                f"{folder} holds a sample of {longest} tokens, the model allows {most} "
                "(model.max_position); prepare the samples with a smaller --max-tokens"
            )
        return shards

    def _open_heldout_images(self) -> HeldOutImages | None:
        if self.run.heldout_images is None or self.stage.makes_encoder:
            return None
        return HeldOutImages(
            self._open_image_shards(self.run.heldout_images),
            num_tokens=self.train.heldout_tokens,
            forward_tokens=self.train.batch_tokens,
        )

    def _open_image_shards(self, folder: Path) -> SampleShards:
        if self.run.model.vision is None:
            problem = f"the model has no vision encoder for {folder}; train on --images too"
            raise ConfigError("train", [problem])
        shards = self._open_samples(folder)
        if not shards.index.image_tokens:
            raise InputError(f"{folder} holds no image; train on text alone with --data or --sft")
        return shards

    def _open_heldout(self) -> HeldOut | None:
        if self.run.heldout is None or self.stage.makes_encoder:
            return None
        shards, train = TokenShards(self.run.heldout), self.train
        shards.check_tokenizer(self.tokenizer)
        return HeldOut(
            shards,
            self.tokenizer,
            sequence_length=train.sequence_length,
            num_tokens=train.heldout_tokens,
            forward_tokens=train.batch_tokens,
        )


def _data_hash(folder: Path | None) -> str | None:
    """Hash of the index of shards, which holds the hashes of all their content."""
    if folder is None:
        return None
    try:
        return hashlib.sha256((folder / INDEX_FILE).read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(
            f"{folder / INDEX_FILE}: cannot read the index of the shards: {error.strerror}; make "
            "them with 'openv41 data prepare', or samples with 'openv41 data samples' or 'images'"
        ) from None
