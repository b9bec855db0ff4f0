"""MAFA's mined positives compared with the truth of scenes: before its first step, in shuffled and grouped batches.

A caption matches an image if it is true of it, also if it belongs to another image. Both directions count: the hardest
other of each sample by the model's cosine, its match probability, and whether the discriminator calls it a positive.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.data.order import seed_of
from common.data.pairs import open_training_pairs
from common.data.scenes.positives import matches
from common.distributed import is_main_process
from common.report.table import Table
from common.reproduce.command import Command
from common.reproduce.findings import Findings, findings_table
from common.reproduce.rows import PaperCode, RowRun, measured_once
from common.reproduce.tables import train_rows
from common.run.checkpoint import last_checkpoint
from common.run.inputs import TrainingData
from geomm.evaluate import load_encoder
from geomm.mafa import Mafa, mined
from geomm.model import build_model, start_, start_discriminator_
from geomm.train import open_data

DECIDES = "evaluation"

MODELS = {"mafa": "MAFA", "mafa_geo": "Geo-MAFA"}  # rows -> label
BATCHES = 200  # of each kind, or as many as an epoch has
RECALL = 0.2  # at which the discriminator's ranking is judged, whatever its threshold
COLUMNS = {
    "alike": ("captions true of another picture of the batch", "percent", "higher"),
    "hardest_true": ("hardest others that match", "percent", None),
    "mined": ("hardest others mined", "percent", None),
    "precision": ("precision", "percent", "higher"),
    "recall": ("recall", "percent", "higher"),
    "precision_at_recall": (f"precision at {RECALL:.0%} recall", "percent", "higher"),
}
KINDS = {"before": "before its first step", "shuffled": "shuffled", "grouped": "grouped"}


def shares(
    truth: Sequence[np.ndarray],
    hardest: Sequence[np.ndarray],
    called: Sequence[np.ndarray],
    probability: Sequence[np.ndarray],
) -> dict[str, float]:
    """COLUMNS in percent, without precision if nothing is mined and without recalls if nothing is true.

    Args:
        truth: of each batch, (batch, batch) bool, whether a caption (column) is true of an image (row).
        hardest, called, probability: of each batch and direction, images first, (batch,) the hardest other, whether it
            is called a positive, and its match probability.
    """
    others = np.concatenate([(matrix & ~np.eye(len(matrix), dtype=bool)).any(axis=0) for matrix in truth])
    judged = []
    for matrix, pair in zip(truth, zip(hardest[::2], hardest[1::2])):
        rows = np.arange(len(matrix))
        judged += [matrix[rows, pair[0]], matrix[pair[1], rows]]
    true, called = np.concatenate(judged), np.concatenate(called)
    result = {"alike": others.mean(), "hardest_true": true.mean(), "mined": called.mean()}
    if called.any():
        result["precision"] = true[called].mean()
    if true.any():
        result["recall"] = called[true].mean()
        result["precision_at_recall"] = precision_at_recall(true, np.concatenate(probability), RECALL)
    return {name: 100 * float(value) for name, value in result.items()}


def precision_at_recall(is_true: np.ndarray, scores: np.ndarray, recall: float) -> float:
    """Precision of the highest threshold at which at least this share of the true samples is called, in [0, 1].

    Args:
        is_true: (num_samples,) bool, at least one of them. scores: (num_samples,), those at the threshold are called.
    """
    threshold = np.sort(scores[is_true])[::-1][int(np.ceil(recall * is_true.sum())) - 1]
    return float(is_true[scores >= threshold].mean())


@torch.no_grad()
def measure(run: RowRun) -> dict[str, dict[str, float]]:
    """`shares` by kind, of batches of the training set: those of KINDS; grouped from the second epoch on."""
    checkpoint = last_checkpoint(run.files.checkpoints)
    encoder, config = load_encoder(checkpoint, torch.device("cpu"))[1], run.config
    training = open_data(config, open_training_pairs(config.data, config.run.seed), checkpoint)
    model = build_model(config, encoder.tokenizer, training.order).eval()
    start_(model, config)
    start_discriminator_(model, config)
    results = {"before": of_epoch(model, training, 0)}
    checkpoint.load_model(model)
    training.order.follow(model.grouping)
    # the order of the first epoch is shuffled, that of the last one grouped
    epochs = {"shuffled": 0} | ({"grouped": training.order.epoch} if training.order.epoch else {})
    return results | {kind: of_epoch(model, training, epoch) for kind, epoch in epochs.items()}


@torch.no_grad()
def of_epoch(model: Mafa, training: TrainingData, epoch: int) -> dict[str, float]:
    """`shares` of the first batches of an epoch, and their number.

    Args:
        model: in evaluation mode.
        training: its order knows the epoch.
    """
    order, truth, hardest, called, probability = training.order, [], [], [], []
    first, size = epoch * order.samples_per_epoch, order.global_batch_size
    for start in range(first, first + min(order.samples_per_epoch, BATCHES * size), size):
        positions = np.arange(start, start + size)
        batch, indices = training.view.__getitems__(positions.tolist()), order.epochs_and_indices(positions)[1]
        partners = training.view.partners
        sources, drawn_at = (indices, positions) if partners is None else partners.of(positions)
        truth.append(truth_of(training.pairs, order.seed, drawn_at, sources, indices))
        images = training.transform.inputs(batch.images)
        similarity = model.encode_image(images) @ model.encode_text(batch.token_ids).T
        match, rows = model.discriminator(images, batch.token_ids), torch.arange(size)
        of_images = mined(similarity, partial(match, rows))
        of_texts = mined(similarity.T, partial(match, texts=rows))
        hardest += [of_images.hardest.numpy(), of_texts.hardest.numpy()]
        called += [of_images.is_positive.numpy(), of_texts.is_positive.numpy()]
        probability += [match(rows, of_images.hardest).numpy(), match(of_texts.hardest, rows).numpy()]
    return shares(truth, hardest, called, probability) | {"batches": len(truth)}


def truth_of(pairs: Any, seed: int, drawn_at: np.ndarray, sources: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """(batch, batch) bool: whether the caption of a training position (column) is true of its image (row).

    Args:
        drawn_at, sources: position that chooses each caption, and the sample that it is of. indices: of the images.
    """
    statements = []
    for position, index in zip(drawn_at.tolist(), sources.tolist()):
        statements_of = pairs.statements(index)
        statements.append(statements_of[seed_of(seed_of(seed, position), 1) % len(statements_of)])
    truth = np.zeros((len(indices), len(indices)), dtype=bool)
    for column, rows in enumerate(matches(statements, [pairs.scene(index) for index in indices.tolist()])):
        truth[rows, column] = True
    return truth


def mining(command: Command, code: PaperCode) -> list[Table]:
    """Mined positives against the truth, and the similarity of captions in a batch, shuffled and grouped."""
    if not command.runs_at(("smoke", "demo"), "only scenes tell which captions are true of a picture"):
        return []
    runs = train_rows(command, code, {name: f"{name}.yaml" for name in MODELS})
    if not is_main_process():
        return []
    settings = {"batches": BATCHES}
    measured = {
        name: [measured_once(run, Path(__file__), settings, lambda run=run: measure(run)) for run in of_seeds]
        for name, of_seeds in runs.items()
    }
    settings["batches"] = next(iter(measured.values()))[0]["before"]["batches"]  # that there were
    # a column needs a value of every seed: a run that mines nothing has no precision
    values = {}
    for name, of_seeds in measured.items():
        for kind in KINDS:
            for column in COLUMNS:
                by_seed = [of_seed[kind][column] for of_seed in of_seeds if column in of_seed.get(kind, {})]
                if len(by_seed) == len(of_seeds):
                    values[f"{name}_{kind}", column] = by_seed
    findings = Findings(
        name="mining",
        caption="MAFA's positives beside the truth of scenes: before its first step, and by the trained model in "
        "shuffled and in grouped batches.",
        data=next(iter(runs.values()))[0].training_data,
        protocol=f"{settings['batches']} batches, both directions",
        settings={"rows": {name: f"{name}.yaml" for name in MODELS}, **settings},
        rows={f"{name}_{kind}": f"{label}, {text}" for name, label in MODELS.items() for kind, text in KINDS.items()},
        columns=COLUMNS,
        values=values,
    )
    return [findings_table(command, code.name, findings)]
