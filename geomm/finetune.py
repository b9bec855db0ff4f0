"""Fine-tunes a pre-trained ALBEF for a task: VQA, visual entailment, text assignment and then NLVR2.

    python geomm/finetune.py                                       VQA on scenes, after ALBEF by the geodesic distance
    python geomm/finetune.py --config geomm/configs/nlvr2_albef.yaml
    accelerate launch --config_file scripts/accelerate/multi_gpu.yaml geomm/finetune.py \\
        --config geomm/configs/visual_entailment_albef_geo.yaml --scale paper data.root=/data/snli_ve

data.task says which task; the row that it starts from is trained first, where it is missing. Fine-tuning for retrieval
is train.py's.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from accelerate import Accelerator

from common.base.files import read_own_yaml
from common.base.signals import stop_signals
from common.distributed import mean_over_processes
from common.methods.albef import distillation_weight
from common.reproduce.rows import PaperCode, started
from common.run.evaluation import evaluate_and_save
from common.run.folder import RunFiles
from common.run.guards import check_finite, clip_gradient
from common.run.launch import end_run, run_or_explain, seed_step, train_main
from common.run.schedule import learning_rate_at, set_learning_rate
from common.run.training import encoder_of, open_run, save_if_due
from geomm import train
from geomm.downstream.build import build_task_model, start_
from geomm.downstream.config import TaskConfig
from geomm.downstream.data import open_task_training, open_test_sets, open_training_set
from geomm.evaluate_tasks import MODELS, PAPER, SCRIPT, evaluate_task, reevaluate

DEFAULT_ROW = "vqa_albef_geo.yaml"


def finetune(
    config: TaskConfig, items: Any, files: RunFiles, resume: bool, accelerator: Accelerator, label: str = PAPER
) -> None:
    """Trains until config.optim.steps, then evaluates; the run's files hold everything that comes out.

    Args:
        config: one row at one scale.
        items: the training set that config.data names.
        files: where to write.
        resume: go on from the last whole checkpoint, if there is one.
        accelerator: places the model; one process or many.
        label: name on the progress bar.
    """
    method, optim, device = config.method, config.optim, accelerator.device
    run = open_run(
        PAPER,
        config,
        items,
        files,
        resume,
        accelerator,
        label,
        build_model=lambda config, training: build_task_model(config, training.tokenizer),
        open_training=open_task_training,
        evaluation_script=SCRIPT,
    )
    model, journal, transform, sets = run.bare_model, run.journal, run.training.transform, run.training.test_sets
    if not journal.first_step:
        if config.start.run:
            journal.told("start", f"started from {config.start.run}", **start_(model, config))
        model.start_momentum_()
    encoder = encoder_of(model, config, run.training, device)
    steps_per_epoch = max(1, len(items) // optim.global_batch_size)

    with stop_signals() as stop:
        for step, batch in journal.steps(run.batches):
            seed_step(config.run.seed, step)
            learning_rate = learning_rate_at(step, optim)
            set_learning_rate(run.optimizer, learning_rate)
            pixels = batch.images.to(device, non_blocking=True)
            images = transform.inputs(pixels.flatten(0, 1)).unflatten(0, pixels.shape[:2])
            token_ids, *targets = (each.to(device, non_blocking=True) for each in (batch.token_ids, *batch.targets))

            model.update_momentum_encoders(method.ema_momentum)
            alpha = distillation_weight(step, steps_per_epoch, method.distillation)
            if config.data.task == "visual_entailment":
                alpha = method.distillation  # from the first step on, as in ALBEF's code
            found = run.model(images, token_ids, *targets, alpha)
            values = {"loss": float(mean_over_processes(found.loss))}
            if found.right is not None:
                values["accuracy"] = float(mean_over_processes(found.right.float().mean()))
            check_finite(step=step, model=model, **values)

            accelerator.backward(found.loss)
            gradient_norm = clip_gradient(accelerator, run.model, optim, step)
            run.optimizer.step()
            run.optimizer.zero_grad()

            done = step + 1
            journal.step_done(done, batch, **values, learning_rate=learning_rate, gradient_norm=gradient_norm)
            if journal.evaluates_at(done):
                metrics = evaluate_task(config, encoder, sets[f"{config.data.task}_dev"]).metrics
                journal.evaluated(done, {f"{config.data.task}_dev": metrics}, {"accuracy": "accuracy"})
            save_if_due(run, done, stop)

    # final evaluation
    evaluate_and_save(MODELS, config, encoder, sets, files, optim.steps, run.state, run.provenance)
    end_run(accelerator)


def code_of(file: Path) -> PaperCode:
    """Which code trains a row of this folder: finetune.py where its file names a task, else train.py."""
    names_task = file.is_file() and "task" in (read_own_yaml(file).get("data") or {})
    return CODE if names_task else train.CODE


CODE = PaperCode(
    PAPER,
    TaskConfig,
    finetune,
    reevaluate,
    open_training=open_training_set,
    open_tests=open_test_sets,
    evaluation=SCRIPT,
    other=code_of,
)


def main() -> None:
    script = Path(__file__)
    train_main(__doc__, script, TaskConfig, DEFAULT_ROW, finetune, open_training_set, start=partial(started, CODE))


if __name__ == "__main__":
    run_or_explain(main)
