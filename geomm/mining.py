"""MAFA's mined positives compared with the truth of scenes, in shuffled and in grouped batches.

A caption matches an image if it is true of it, also if it belongs to another image. Both directions count: the hardest
other of each sample by the trained model's cosine, and whether the discriminator calls it a positive.
"""

from collections.abc import Sequence
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
from common.reproduce.findings import Findings, write_findings
from common.reproduce.rows import PaperCode, RowRun, measured_once
from common.reproduce.tables import train_rows
from common.run.checkpoint import last_checkpoint
from geomm.evaluate import load_encoder
from geomm.mafa import mined
from geomm.model import build_model
from geomm.train import open_data

DECIDES = "evaluation"

MODELS = {"mafa": "MAFA", "mafa_geo": "Geo-MAFA"}  # rows -> label
BATCHES = 20  # of each kind, or as many as an epoch has
COLUMNS = {
    "alike": ("captions true of another picture of the batch", "percent", "higher"),
    "hardest_true": ("hardest others that match", "percent", None),
    "mined": ("hardest others mined", "percent", None),
    "precision": ("precision", "percent", "higher"),
    "recall": ("recall", "percent", "higher"),
}


def shares(
    truth: Sequence[np.ndarray], hardest: Sequence[np.ndarray], called: Sequence[np.ndarray]
) -> dict[str, float]:
    """COLUMNS in percent, without precision if nothing is mined and without recall if nothing is true.

    Args:
        truth: of each batch, (batch, batch) bool, whether a caption (column) is true of an image (row).
        hardest, called: of each batch and direction, images first, (batch,) the hardest other and whether it is called
            a positive.
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
    return {name: 100 * float(value) for name, value in result.items()}


@torch.no_grad()
def measure(run: RowRun) -> dict[str, dict[str, float]]:
    """`shares` of shuffled and, if the run has reached its second epoch, of grouped batches of its training set."""
    checkpoint = last_checkpoint(run.files.checkpoints)
    config, encoder = load_encoder(checkpoint, torch.device("cpu"))
    training = open_data(config, open_training_pairs(config.data, config.run.seed), checkpoint)
    order, pairs = training.order, training.pairs
    model = build_model(config, encoder.tokenizer, order)
    checkpoint.load_model(model)
    order.follow(model.eval().grouping)
    results: dict[str, dict[str, float]] = {}
    # the order of the first epoch is shuffled, that of the last one grouped
    epochs = {"shuffled": 0} | ({"grouped": order.epoch} if order.epoch else {})
    for kind, epoch in epochs.items():
        truth, hardest, called = [], [], []
        first, size = epoch * order.samples_per_epoch, order.global_batch_size
        for start in range(first, first + min(order.samples_per_epoch, BATCHES * size), size):
            positions = np.arange(start, start + size)
            batch, indices = training.view.__getitems__(positions.tolist()), order.epochs_and_indices(positions)[1]
            truth.append(truth_of(pairs, order.seed, positions, indices))
            images = training.transform.inputs(batch.images)
            similarity = model.encode_image(images) @ model.encode_text(batch.token_ids).T
            match, rows = model.discriminator(images, batch.token_ids), torch.arange(size)
            for scores, judge in (
                (similarity, lambda others, match=match, rows=rows: match(rows, others)),
                (
                    similarity.T,
                    lambda others, match=match, rows=rows: match(others, rows),
                ),
            ):
                verdict = mined(scores, judge)
                hardest.append(verdict.hardest.numpy())
                called.append(verdict.is_positive.numpy())
        results[kind] = shares(truth, hardest, called)
    return results


def truth_of(pairs: Any, seed: int, positions: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """(batch, batch) bool: whether the training caption of a position (column) is true of an image (row)."""
    statements = []
    for position, index in zip(positions.tolist(), indices.tolist()):
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
    # a column needs a value of every seed: a run that mines nothing has no precision
    values = {}
    for name, of_seeds in measured.items():
        for kind in ("shuffled", "grouped"):
            for column in COLUMNS:
                by_seed = [of_seed[kind][column] for of_seed in of_seeds if column in of_seed.get(kind, {})]
                if len(by_seed) == len(of_seeds):
                    values[f"{name}_{kind}", column] = by_seed
    findings = Findings(
        name="mining",
        caption="MAFA's positives beside the truth of scenes, in shuffled and in grouped batches of the trained model.",
        data=next(iter(runs.values()))[0].training_data,
        protocol=f"{BATCHES} batches, both directions",
        settings={"rows": {name: f"{name}.yaml" for name in MODELS}, **settings},
        rows={
            f"{name}_{kind}": f"{label}, {kind}" for name, label in MODELS.items() for kind in ("shuffled", "grouped")
        },
        columns=COLUMNS,
        values=values,
    )
    return [write_findings(command, code.name, findings)]
