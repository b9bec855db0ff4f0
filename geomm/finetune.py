"""Fine-tunes a pre-trained ALBEF for a task: VQA, visual entailment, text assignment and then NLVR2.

    python geomm/finetune.py                                       VQA on scenes, after ALBEF by the geodesic distance
    python geomm/finetune.py --config geomm/configs/nlvr2_albef.yaml
    accelerate launch --config_file scripts/accelerate/multi_gpu.yaml geomm/finetune.py \\
        --config geomm/configs/visual_entailment_albef_geo.yaml --scale paper data.root=/data/snli_ve

data.task names the task. The row that it starts from is trained first if it is missing. train.py fine-tunes for
retrieval.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from accelerate import Accelerator

from common.base.files import read_repository_yaml
from common.data.transforms import ImageTransform
from common.methods.albef import distillation_weight
from common.reproduce.rows import PaperCode, started
from common.run.folder import RunFiles
from common.run.launch import run_or_explain, train_main
from common.run.training import Run, Setup, opened
from geomm import train
from geomm.downstream.build import build_task_model, start_
from geomm.downstream.config import TaskConfig
from geomm.downstream.data import open_task_training, open_test_sets, open_training_set, open_validation_sets
from geomm.evaluate_tasks import MODELS, PAPER, evaluate_task, reevaluate

DEFAULT_ROW = "vqa_albef_geo.yaml"


def validate(run: Run) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """The task's metrics on its validation set, with their chance levels; none of text assignment, which has none."""
    if not run.training.validation_sets:
        return {}, {}
    (items,) = run.training.validation_sets
    result = evaluate_task(run.config, run.encoder, items)
    metrics = result.metrics | {f"chance_{metric}": level for metric, level in result.chance.items()}
    return {f"{run.config.data.task}_val": metrics}, {"accuracy": "accuracy"}


def start_from_run_(model: Any, config: TaskConfig) -> list[tuple[str, str, dict[str, Any]]]:
    """Fills a new model from the run that its row names, then copies it into its momentum encoders."""
    events = []
    if config.start.run:
        events.append(("start", f"started from {config.start.run}", start_(model, config)))
    model.start_momentum_()
    return events


SETUP = Setup(
    PAPER,
    build_model=lambda config, training: build_task_model(config, training.tokenizer),
    start=start_from_run_,
    open_training=open_task_training,
    validate=validate,
)


def finetune(
    config: TaskConfig, items: Any, files: RunFiles, resume: bool, accelerator: Accelerator, label: str = PAPER
) -> None:
    """Trains until config.optim.steps, then evaluates; arguments as in `common/run/training.py: opened`."""
    method = config.method
    # data, model, optimiser, as the last checkpoint left them if the run resumes
    with opened(SETUP, config, items, files, resume, accelerator, label) as run:
        model = run.bare_model
        steps_per_epoch = max(1, len(items) // config.optim.global_batch_size)
        for step in run.steps():
            model.update_momentum_encoders(method.ema_momentum)
            alpha = distillation_weight(step.number, steps_per_epoch, method.distillation)
            if config.data.task == "visual_entailment":
                alpha = method.distillation  # from the first step on, as in ALBEF's code
            outputs = run.model(*task_inputs(step.batch, run.training.transform, step.device), alpha)
            right = {} if outputs.right is None else {"accuracy": outputs.right.float().mean()}
            step.backward(outputs.loss, **right)
            step.update()
        run.evaluate(MODELS)


def task_inputs(batch: Any, transform: ImageTransform, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Images (batch, images of an item, 3, size, size), token ids and targets of a batch, on the device."""
    pixels = batch.images.to(device, non_blocking=True)
    images = transform.inputs(pixels.flatten(0, 1)).unflatten(0, pixels.shape[:2])
    return images, *(tensor.to(device, non_blocking=True) for tensor in (batch.token_ids, *batch.targets))


def _open_validation(config: TaskConfig) -> list[Any]:
    return open_validation_sets(config.data)


def code_of(file: Path) -> PaperCode:
    """The code that trains a row of this folder: finetune.py if its file names a task, else train.py."""
    names_task = file.is_file() and "task" in (read_repository_yaml(file).get("data") or {})
    return CODE if names_task else train.CODE


CODE = PaperCode(
    PAPER,
    TaskConfig,
    finetune,
    reevaluate,
    open_training=open_training_set,
    open_tests=open_test_sets,
    other=code_of,
    open_validation=_open_validation,
)


def main() -> None:
    script = Path(__file__)
    train_main(__doc__, script, TaskConfig, DEFAULT_ROW, finetune, open_training_set, start=partial(started, CODE))


if __name__ == "__main__":
    run_or_explain(main)
