"""A small training run that tests/test_resume.py kills and resumes, with everything that a checkpoint must carry.

Two towers with dropout, their momentum copy, two feature queues, a logit scale and AdamW learn scenes as the rows of a
paper do (common/run/training.py). It can be told to kill itself, or to ask itself to stop, at a named point of a step
or of the writing of a checkpoint.

    accelerate launch tests/resume_run.py FOLDER section.key=value ...
"""

import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from processes import take_terminal_signals
from torch import nn

import common.run.checkpoint as checkpoints
from common.base.config import load_config
from common.base.settings import DataConfig, OptimConfig, RunConfig, setting
from common.data.batches import TrainingView
from common.data.pairs import open_training_pairs
from common.distributed import gather_objects
from common.encoders.text import BidirectionalTextTransformer
from common.encoders.two_towers import TwoTowers
from common.encoders.vision import VisionTransformer
from common.feature_queue import FeatureQueue
from common.geometry import Scalar, Sphere
from common.info_nce import contrastive_loss
from common.logit_scale import LogitScale
from common.momentum import MomentumEncoder, ema_momentum_at
from common.run.checkpoint import Checkpoint
from common.run.folder import RunFiles, only_run_in
from common.run.inputs import TrainingData, open_training_data
from common.run.launch import interrupted_with_saved_step, launched_accelerator, run_or_explain
from common.run.log import RunLog
from common.run.training import Run, Setup, opened

DIM = 8
IN_A_STEP = ("embedded", "second pass", "gradients", "updated", "enqueued")
IN_A_SAVE = ("model half", "model", "optimizer half", "optimizer", "state", "sums", "flushed", "renamed", "removing")


SIZES = [  # eight steps make an epoch
    "data.num_train=70", "data.image_size=16", "data.context_length=12", "run.save_every=3", "run.log_every=1",
    "run.test=false", "run.diagnose_every=0",
    "optim.steps=18", "optim.global_batch_size=8", "optim.warmup_steps=3", "optim.learning_rate=3.0e-3",
]  # fmt: skip


@dataclass(frozen=True)
class Config:
    """As a paper's; a run goes on from one with a fault, and the reverse."""

    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)
    dropout: float = setting(0.1, at_least=0.0, below=1.0)
    fault: Literal["none", "killed", "stuck"] = setting("none", decides="nothing")  # of the loader
    # the first without samples; 8 steps are loaded ahead
    fault_step: int = setting(0, at_least=0, decides="nothing")
    model = None  # not a section: sizes are fixed


@dataclass
class Trigger:
    """What happens when the run reaches a point.

    signal: SIGKILL or one of those that ask a run to stop.
    point: one of IN_A_STEP or IN_A_SAVE; of a paper's script "logged".
    step: updates made when the point is reached (of a save: those that it saves).
    times: how often, so long one after the other that a second Ctrl-C is one.
    """

    signal: signal.Signals
    point: str
    step: int
    times: int = 1

    def reached(self, point: str, step: int) -> None:
        for number in range(self.times if (point, step) == (self.point, self.step) else 0):
            time.sleep(0.55 * min(number, 1))
            os.kill(os.getpid(), self.signal)


class FaultyView(TrainingView):
    """A view whose samples do not come on the last process from a step on.

    Args:
        view: gives those before it.
        fault: "killed" is the loader process, or it waits for a disk that does not answer ("stuck").
        step: the first without samples.
    """

    def __init__(self, view: TrainingView, fault: str, step: int) -> None:
        self.__dict__.update(view.__dict__)
        self.fault, self.step = fault, step

    def __getitems__(self, positions: list[int]):
        is_last = int(os.environ.get("RANK", "0")) + 1 == int(os.environ.get("WORLD_SIZE", "1"))
        if is_last and positions[0] >= self.step * self.order.global_batch_size:
            if self.fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)
        return super().__getitems__(positions)


class Learner(nn.Module):
    """Two towers, their momentum copy, and a queue of the copy's embeddings for each side."""

    def __init__(self, vocabulary_size: int, context_length: int, dropout: float) -> None:
        super().__init__()
        self.towers = TwoTowers(
            VisionTransformer(16, 8, 8, 1, 2, DIM),
            BidirectionalTextTransformer(vocabulary_size, context_length, 8, 1, 2, DIM, dropout=dropout),
            Sphere(),
            LogitScale(1 / 0.07, maximum=20.0),
        )
        self.geometry = self.towers.geometry
        self.dropout = nn.Dropout(dropout)
        self.momentum_towers = MomentumEncoder(self.towers)
        self.image_queue = FeatureQueue(20, DIM, seed=1)
        self.text_queue = FeatureQueue(20, DIM, "fill_level")

    def scalars(self) -> list[Scalar]:
        return self.towers.scalars()

    def forward(self, images: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.towers(self.dropout(images), token_ids)

    def queue_loss(self, images: torch.Tensor, texts: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Pushes embeddings away from what the queues hold; 0 while a queue is empty."""
        queues = (self.text_queue.rows(), self.image_queue.rows())
        logits = [scale * ours @ queue.T for ours, queue in zip((images, texts), queues) if len(queue)]
        return sum(away.logsumexp(dim=1).mean() for away in logits) / 10

    def after_step(self, images: torch.Tensor, token_ids: torch.Tensor, ema_momentum: float) -> None:
        """Moves the copy and enqueues what it makes of the batch; in train mode, so its dropout draws too."""
        self.momentum_towers.update_(self.towers, ema_momentum)
        image_keys, text_keys, _ = self.momentum_towers(images, token_ids)
        self.image_queue.enqueue_from_all_processes(image_keys)
        self.text_queue.enqueue_from_all_processes(text_keys)


def open_training(config: Config, pairs: Any, checkpoint: Checkpoint | None) -> TrainingData:
    training = open_training_data(config, pairs, checkpoint)
    faulty = FaultyView(training.view, config.fault, config.fault_step)
    return training if config.fault == "none" else replace(training, view=faulty)


SETUP = Setup(
    "resume_run",
    build_model=lambda config, training: Learner(
        training.tokenizer.vocabulary_size, config.data.context_length, config.dropout
    ),
    open_training=open_training,
    validate=lambda run: ({}, {}),
)


def train(config: Config, files: RunFiles, reached: Callable[[str, int], None]) -> None:
    """Trains to the end, from the last checkpoint if there is one; the log holds what the state weighs, and samples."""
    accelerator, pairs = launched_accelerator(), open_training_pairs(config.data, config.run.seed)
    lock = only_run_in(files) if accelerator.is_main_process else nullcontext()
    with (
        lock,
        interrupted_with_saved_step(files),
        opened(SETUP, config, pairs, files, True, accelerator, "test") as run,
    ):
        learner, done = run.bare_model, run.journal.first_step
        run.model.register_forward_hook(lambda *_: reached("second pass", done) if torch.is_grad_enabled() else None)
        for step in run.steps():
            done = step.number
            image_embeddings, text_embeddings, scale = step.embed(step.images, step.token_ids)
            loss = contrastive_loss(image_embeddings, text_embeddings, learner.geometry, scale)
            loss = loss + learner.queue_loss(image_embeddings, text_embeddings, scale)
            reached("embedded", done)
            step.backward(loss)
            reached("gradients", done)
            step.update()
            reached("updated", done)
            ema_momentum = ema_momentum_at(done, run.num_steps, 0.9, "half_cosine")
            learner.after_step(step.images, step.token_ids, ema_momentum)
            reached("enqueued", done)
            image_ids = [name for share in gather_objects(step.batch.image_ids) for name in share]
            step.log(image_ids=image_ids, epoch=done * len(image_ids) // run.training.order.samples_per_epoch)
            torch.rand(done + 3)  # what an evaluation or a loader may draw between two steps


def trigger_in_save(reached, step: int) -> None:
    """Replaces what writes a checkpoint by the same with a look at the trigger before and after."""

    def save_file(tensors, path):
        SAVE_FILE(tensors, path)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        reached(f"{path.stem} half", step)
        path.write_bytes(whole)
        reached(path.stem, step)

    def sum_lines(path, *files):
        reached("state", step)
        return SUM_LINES(path, *files)

    def flush(path):
        FLUSH(path)
        points = {"model.safetensors": "sums", "SHA256SUMS": "flushed", "checkpoints": "renamed"}
        reached(points.get(path.name, ""), step)

    def rmtree(path, **options):
        if path.name.startswith("step-") and path.is_dir():
            (path / "model.safetensors").unlink(missing_ok=True)
            reached("removing", step)
        RMTREE(path, **options)

    checkpoints.save_file, checkpoints._sum_lines, checkpoints._flush = save_file, sum_lines, flush
    shutil.rmtree = rmtree


SAVE_FILE, SUM_LINES, FLUSH = checkpoints.save_file, checkpoints._sum_lines, checkpoints._flush
RMTREE = shutil.rmtree


def in_child(
    folder: str, overrides: list[str], trigger: Trigger | None, variables: dict[str, str], script: str
) -> None:
    """What a process started by the tests does: a training run as `python script` would do it, output into a file.

    Args:
        folder: of the run; with --resume once it holds a checkpoint.
        overrides: "section.key=value".
        trigger: when to be killed.
        variables: of the environment (rank and world size).
        script: "resume_run", or the module of a train.py.
    """
    os.setsid()  # a process group of its own, as a job has
    take_terminal_signals()
    multiprocessing.set_start_method("fork", force=True)  # for loader workers, as in a run that nobody forked
    os.environ.update(variables)
    os.fsync = lambda descriptor: None  # a kill loses nothing that the system has
    torch.set_num_threads(1)
    Path(folder).mkdir(parents=True, exist_ok=True)
    output = os.open(f"{folder}/output-{os.environ.get('RANK', '0')}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(output, b"\n")  # a killed run may have left half a line
    os.dup2(output, 1)
    os.dup2(output, 2)
    reached = (lambda point, step: None) if trigger is None else trigger.reached
    if script == "resume_run":
        save = Run._save

        def saved(run, done):
            trigger_in_save(reached, done)
            save(run, done)

        Run._save = saved
        config = load_config(Config, [], [*SIZES, *overrides])
        run_or_explain(lambda: train(config, RunFiles(Path(folder)), reached))
    else:
        write = RunLog.write

        def written(log, event, **values):
            write(log, event, **values)
            if event == "train":
                reached("logged", values["step"])

        RunLog.write = written
        sys.argv = ["train.py", "--scale", "smoke", "--output-dir", folder, "--resume", "auto", *overrides]
        run_or_explain(importlib.import_module(script).main)


def main() -> None:
    folder, *overrides = sys.argv[1:]
    train(load_config(Config, [], [*SIZES, *overrides]), RunFiles(Path(folder)), lambda point, step: None)


if __name__ == "__main__":
    run_or_explain(main)
