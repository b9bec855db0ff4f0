"""Trains one row of the oblique-topology paper's tables.

    python oblique_topology/train.py                                              main row, scenes, a CPU is enough
    ACCELERATE_USE_CPU=true accelerate launch --config_file scripts/accelerate/cpu_two_processes.yaml \
        oblique_topology/train.py                                                 two gloo processes, same loss
    accelerate launch --config_file scripts/accelerate/multi_gpu.yaml oblique_topology/train.py \
        --config oblique_topology/configs/table2_clip.yaml --scale paper data.root=/data/pairs
"""

import math
import sys
from contextlib import nullcontext
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from accelerate import Accelerator
from tqdm import tqdm

from common.accumulation import MicroBatches
from common.data.pairs import (
    Pairs,
    TrainingView,
    build_tokenizer,
    image_transform,
    lost_at_open,
    open_evaluation_sets,
    open_training_pairs,
    open_validation_pairs,
    training_batches,
)
from common.data.text import tokenizer_from_json
from common.data.transforms import normalize
from common.distributed import mean_over_processes
from common.evaluation.embed import Encoder, evaluate_retrieval
from common.info_nce import contrastive_loss
from common.run.checkpoint import has_checkpoints, save_checkpoint
from common.run.config import entry_arguments, to_dict
from common.run.log import RunLog
from common.run.order import BatchPositions, SampleOrder
from common.run.schedule import build_optimizer, learning_rate_at, set_learning_rate
from common.run.session import (
    BrokenLog,
    RunFiles,
    StepClock,
    check_finite,
    check_finite_gradient,
    checkpoint_to_resume,
    end_run,
    only_run_in,
    prepare,
    provenance_of,
    run_files,
    run_or_explain,
    save_config,
    seed_step,
    start_accelerator,
)
from common.run.stop import Stopped, stop_signals
from common.run.utilisation import Utilisation
from oblique_topology.config import Config
from oblique_topology.evaluate import evaluate_and_save
from oblique_topology.model import build_model

PAPER = "oblique_topology"
DEFAULT_ROW = "table2_clip.yaml"


def train(
    config: Config, pairs: Pairs, files: RunFiles, resume: bool, accelerator: Accelerator, label: str = PAPER
) -> None:
    """Trains until config.optim.steps, then evaluates; the run's files hold everything that comes out.

    Args:
        config: one row at one scale.
        pairs: the training set that config.data names.
        files: where to write.
        resume: go on from the last whole checkpoint, if there is one.
        accelerator: places the model; one process or many.
        label: name on the progress bar.
    """
    data, optim, run = config.data, config.optim, config.run
    device = accelerator.device

    provenance = provenance_of(PAPER)  # of the code as it is now, whatever is edited during the run
    checkpoint = checkpoint_to_resume(files, resume, config, pairs.fingerprint)

    # data: the order of samples is a function of (seed, position) alone
    if checkpoint is None:
        tokenizer = build_tokenizer(data, pairs)
    else:
        tokenizer = tokenizer_from_json(checkpoint.state["tokenizer"])
    transform = image_transform(data)
    order = SampleOrder(len(pairs), optim.global_batch_size, run.seed)
    view = TrainingView(pairs, order, transform, tokenizer, data.context_length)
    validation_pairs = open_validation_pairs(data) if run.evaluate_every else None
    evaluation_sets = open_evaluation_sets(data)

    # model and optimiser
    torch.manual_seed(run.seed)
    model = build_model(config, tokenizer.vocabulary_size)
    optimizer = build_optimizer(model, optim)
    one_pair = (
        torch.empty(1, 3, data.image_size, data.image_size, device="meta"),
        torch.zeros(1, data.context_length, dtype=torch.long, device="meta"),
    )
    utilisation = Utilisation(model, one_pair, device, accelerator.mixed_precision, accelerator.num_processes)

    # prepare, resume
    if checkpoint is not None:
        checkpoint.load_model(model)
    first_step = 0 if checkpoint is None else checkpoint.state["step"]
    model, optimizer = prepare(accelerator, model, optimizer)
    if checkpoint is not None:
        checkpoint.load_optimizer(model, optimizer.optimizer)
    bare_model = accelerator.unwrap_model(model)

    # what a checkpoint needs to rebuild the model and its preprocessing
    state = {
        "paper": PAPER,
        "geometry": bare_model.geometry.name,
        "config": to_dict(config),
        "tokenizer": tokenizer.to_json(),
        "transform": transform.to_json(),
        "training_revision": provenance["git_revision"]
        if checkpoint is None
        else checkpoint.state["training_revision"],
        "data_fingerprint": pairs.fingerprint,
        "training_data": f"{pairs.name}, {len(pairs)} pictures ({pairs.fingerprint[:8]})",
    }
    if accelerator.is_main_process:
        save_config(files, config, training_data=state["training_data"], processes=accelerator.num_processes)
    log = RunLog(files.log, first_step if checkpoint is not None else None, accelerator.is_main_process)
    log.write("utilisation", step=first_step, **utilisation.describe())
    encoder = Encoder(
        bare_model, transform, tokenizer, data.context_length, run.evaluation_batch_size, device, run.num_workers
    )
    broken = BrokenLog(
        log,
        data.max_broken_share,
        lost_at_open(pairs, *evaluation_sets.retrieval.values()),
        None if checkpoint is None else checkpoint.state["broken"],
    )

    # loop
    positions = BatchPositions(order, first_step, optim.steps, accelerator.process_index, accelerator.num_processes)
    batches = training_batches(view, positions, run.num_workers, pin_memory=device.type == "cuda")
    progress = tqdm(
        total=optim.steps, initial=first_step, desc=label, unit="step", disable=not accelerator.is_main_process
    )
    model.train()
    micro_batches = MicroBatches(accelerator, model, optim.micro_batch_size)
    clock = StepClock(optim.global_batch_size)
    with stop_signals() as stop:
        for step, batch in enumerate(clock.timed(batches), start=first_step):
            seed_step(run.seed, step)
            set_learning_rate(optimizer, learning_rate_at(step, optim))
            images = normalize(batch.images.to(device, non_blocking=True), transform.mean, transform.std)
            token_ids = batch.token_ids.to(device, non_blocking=True)

            image_embeddings, text_embeddings, logit_scale = micro_batches.embed(images, token_ids)
            loss = contrastive_loss(image_embeddings, text_embeddings, bare_model.geometry.similarity, logit_scale)
            global_loss = float(mean_over_processes(loss))
            check_finite(global_loss, step, bare_model, logit_scale=logit_scale.item())

            micro_batches.backward(loss)
            # an infinite bound measures the norm and changes nothing
            max_norm = math.inf if optim.max_gradient_norm is None else optim.max_gradient_norm
            gradient_norm = float(accelerator.clip_grad_norm_(model.parameters(), max_norm))
            check_finite_gradient(gradient_norm, step)
            optimizer.step()
            optimizer.zero_grad()
            bare_model.logit_scale.clamp_()  # in place, after the step: a clamp in the forward pass would freeze it

            done = step + 1
            broken.collect(batch.broken, seen=len(batch.image_ids))
            progress.update()
            if done % run.log_every == 0 or done == optim.steps:
                speed = clock.read()
                record = {
                    "step": done,
                    "samples_seen": done * optim.global_batch_size,
                    "loss": global_loss,
                    "logit_scale": logit_scale.item(),
                    "learning_rate": learning_rate_at(step, optim),
                    "gradient_norm": gradient_norm,
                    **speed,
                    "model_flops_utilisation": utilisation.share(speed["samples_per_second"]),
                }
                log.write("train", **record)
                broken.write_new(done)
                accelerator.log(record, step=done)
                progress.set_postfix(loss=f"{global_loss:.3f}", scale=f"{record['logit_scale']:.1f}")
            if run.evaluate_every and done % run.evaluate_every == 0:
                clock.pause()
                model.eval()
                metrics = evaluate_retrieval(encoder, validation_pairs).metrics
                model.train()
                log.write("evaluate", step=done, data=validation_pairs.name, metrics=metrics)
                if accelerator.is_main_process:
                    i2t, t2i = 100 * metrics["i2t_recall_at_1"], 100 * metrics["t2i_recall_at_1"]
                    progress.write(
                        f"step {done}: {validation_pairs.name} R@1 {i2t:.1f} % i2t, {t2i:.1f} % t2i", file=sys.stderr
                    )
            asked_to_stop = stop.agreed(device)
            if done == optim.steps or asked_to_stop or (run.save_every and done % run.save_every == 0):
                clock.pause()
                broken.write_new(done)
                state["broken"] = broken.counts()
                save_checkpoint(files.checkpoints, done, model, optimizer.optimizer, state, run.keep_checkpoints)
            if asked_to_stop:
                progress.close()
                raise Stopped(done, optim.steps, files.folder)
    progress.close()

    # final evaluation
    model.eval()
    evaluate_and_save(config, encoder, evaluation_sets, files, optim.steps, state, provenance)
    end_run(accelerator)


def main() -> None:
    config, arguments = entry_arguments(__doc__, Path(__file__).parent, Config, DEFAULT_ROW)
    pairs = open_training_pairs(config.data, config.run.seed)
    files = run_files(PAPER, arguments.row, arguments.scale, config, pairs.fingerprint)
    if arguments.output_dir is not None:
        files = RunFiles(Path(arguments.output_dir))
    accelerator = start_accelerator(config.run, files.folder)
    if arguments.resume and not has_checkpoints(files.checkpoints):
        accelerator.print(f"nothing to resume in {files.folder} (another config, data or code has another folder)")
    accelerator.print(f"{PAPER}, {arguments.row}, scale {arguments.scale}, seed {config.run.seed} -> {files.folder}")
    with only_run_in(files) if accelerator.is_main_process else nullcontext():
        train(config, pairs, files, arguments.resume, accelerator, label=arguments.row)


if __name__ == "__main__":
    run_or_explain(main)
