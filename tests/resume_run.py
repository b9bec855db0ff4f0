"""A small training run that tests/test_resume.py kills and resumes, with everything that a checkpoint must carry.

Two towers with dropout, their momentum copy, two feature queues, a logit scale and AdamW learn scenes through the
repository's own order, loader, micro-batches, log and checkpoints. The loop has the form of a train.py. It can be told
to kill itself, or to ask itself to stop, at a named point of a step or of the writing of a checkpoint.

    accelerate launch tests/resume_run.py FOLDER [--resume] section.key=value ...
"""

import argparse
import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from processes import take_terminal_signals
from torch import nn

import common.run.checkpoint as checkpoints
from common.accumulation import MicroBatches
from common.base.config import load_config, to_dict
from common.base.settings import DataConfig, OptimConfig, RunConfig, setting
from common.base.signals import stop_signals
from common.data.batches import TrainingView, training_batches
from common.data.loader import NoBatch
from common.data.order import BatchPositions, SampleOrder
from common.data.pairs import image_transform, open_training_pairs
from common.data.text import build_tokenizer
from common.data.transforms import normalize
from common.distributed import gather_objects, mean_over_processes
from common.encoders.text import BidirectionalTextTransformer
from common.encoders.two_towers import TwoTowers
from common.encoders.vision import VisionTransformer
from common.feature_queue import FeatureQueue
from common.geometry import Scalar, Sphere
from common.info_nce import contrastive_loss
from common.logit_scale import LogitScale
from common.momentum import MomentumEncoder, ema_momentum_at
from common.run.ending import agreed, ending
from common.run.folder import RunFiles, checkpoint_to_resume, only_run_in
from common.run.guards import check_finite
from common.run.launch import interrupted_with_saved_step, launched_accelerator, prepare, run_or_explain, seed_step
from common.run.log import RunLog
from common.run.schedule import build_optimizer, set_rate

DIM = 8
IN_A_STEP = ("embedded", "second pass", "gradients", "updated", "enqueued")
IN_A_SAVE = ("model half", "model", "optimizer half", "optimizer", "state", "sums", "flushed", "renamed", "removing")


SIZES = [  # eight steps make an epoch
    "data.num_train=70", "data.image_size=16", "data.context_length=12", "run.save_every=3",
    "optim.steps=18", "optim.global_batch_size=8", "optim.warmup_steps=3", "optim.learning_rate=3.0e-3",
]  # fmt: skip


@dataclass(frozen=True)
class Config:
    """As a paper's, without a model section: sizes are fixed."""

    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)
    dropout: float = setting(0.1, at_least=0.0, below=1.0)
    fault: Literal["none", "killed", "stuck"] = "none"  # of the loader
    fault_step: int = setting(0, at_least=0)  # the first without samples; 8 steps are loaded ahead


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


def train(config: Config, files: RunFiles, resume: bool, trigger: Trigger | None) -> None:
    """Trains to the end; the log holds each step's loss in full precision, its samples and what the state weighs."""
    data, optim, run = config.data, config.optim, config.run
    accelerator = launched_accelerator()
    reached = (lambda point, step: None) if trigger is None else trigger.reached
    lock = only_run_in(files) if accelerator.is_main_process else nullcontext()
    with lock, interrupted_with_saved_step(files):
        pairs = open_training_pairs(data, run.seed)
        whole = replace(config, fault="none", fault_step=0)  # a run goes on from one with a fault, and the reverse
        checkpoint = checkpoint_to_resume(files, resume, whole, pairs.fingerprint)
        order = SampleOrder(len(pairs), optim.global_batch_size, run.seed)
        tokenizer, transform = build_tokenizer(data, pairs), image_transform(data)
        view = TrainingView(pairs, order, transform, tokenizer, data.context_length)
        view = view if config.fault == "none" else FaultyView(view, config.fault, config.fault_step)

        torch.manual_seed(run.seed)
        model = Learner(tokenizer.vocabulary_size, data.context_length, config.dropout)
        optimizer = build_optimizer(model, optim)
        if checkpoint is not None:
            checkpoint.load_model(model)
        first_step = 0 if checkpoint is None else checkpoint.state["step"]
        model, optimizer = prepare(accelerator, model, optimizer)
        if checkpoint is not None:
            checkpoint.load_optimizer(model, optimizer.optimizer)
        learner = accelerator.unwrap_model(model)
        log = RunLog(files.log, first_step if checkpoint is not None else None, accelerator.is_main_process)

        positions = BatchPositions(order, first_step, optim.steps, accelerator.process_index, accelerator.num_processes)
        batches = training_batches(view, positions, run.num_workers, False, pairs.name, run.data_timeout)
        state = {"config": to_dict(whole), "data_fingerprint": pairs.fingerprint}

        def save(step: int) -> None:
            checkpoints.save_checkpoint(
                files.checkpoints, step, model, optimizer.optimizer, state, run.keep_checkpoints
            )

        micro_batches = MicroBatches(accelerator, model, optim.micro_batch_size)
        model.train()
        model.register_forward_hook(lambda *_: reached("second pass", done) if torch.is_grad_enabled() else None)
        with stop_signals() as stop:
            batches = agreed(batches, stop, accelerator.device)
            batches = saved_without_batch(batches, first_step, optim.steps, files, save)
            for done, batch in enumerate(batches, start=first_step):
                seed_step(run.seed, done)
                set_rate(optimizer, done, optim)
                images = normalize(batch.images, transform.mean, transform.std)
                image_embeddings, text_embeddings, scale = micro_batches.embed(images, batch.token_ids)
                loss = contrastive_loss(image_embeddings, text_embeddings, learner.towers.geometry, scale)
                loss = loss + learner.queue_loss(image_embeddings, text_embeddings, scale)
                global_loss = float(mean_over_processes(loss))
                check_finite(global_loss, done, learner, scale=scale.item())
                reached("embedded", done)
                micro_batches.backward(loss)
                gradient_norm = float(accelerator.clip_grad_norm_(model.parameters(), optim.max_gradient_norm))
                reached("gradients", done)
                optimizer.step()
                optimizer.zero_grad()
                learner.towers.logit_scale.clamp_()
                reached("updated", done)
                ema_momentum = ema_momentum_at(done, optim.steps, 0.9, "half_cosine")
                learner.after_step(images, batch.token_ids, ema_momentum)
                reached("enqueued", done)

                image_ids = [name for share in gather_objects(batch.image_ids) for name in share]
                values = {"loss": global_loss, "gradient_norm": gradient_norm, "scale": scale.item()}
                log.write("train", step=done + 1, **values, image_ids=image_ids, epoch=done // steps_per_epoch(order))
                torch.rand(done + 3)  # what an evaluation or a loader may draw between two steps
                if done + 1 == optim.steps or (run.save_every and (done + 1) % run.save_every == 0):
                    trigger_in_save(reached, done + 1)
                    save(done + 1)


def saved_without_batch(batches, done, steps, files, save):
    """The batches; the steps made are saved if no further one comes."""
    try:
        for batch in batches:
            yield batch
            done += 1
    except NoBatch as error:
        raise ending(error, done, steps, files, save) from error


def steps_per_epoch(order: SampleOrder) -> int:
    return order.samples_per_epoch // order.global_batch_size


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
    os.dup2(output, 1)
    os.dup2(output, 2)
    if script == "resume_run":
        config = load_config(Config, [], [*SIZES, *overrides])
        run_or_explain(lambda: train(config, RunFiles(Path(folder)), True, trigger))
    else:
        write = RunLog.write

        def written(log, event, **values):
            write(log, event, **values)
            if trigger is not None and event == "train":
                trigger.reached("logged", values["step"])

        RunLog.write = written
        sys.argv = ["train.py", "--scale", "smoke", "--output-dir", folder, "--resume", "auto", *overrides]
        run_or_explain(importlib.import_module(script).main)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    train(load_config(Config, [], [*SIZES, *arguments.overrides]), RunFiles(arguments.folder), arguments.resume, None)


if __name__ == "__main__":
    run_or_explain(main)
