"""From the evaluations of finished runs to the cells of a table."""

import re
from collections.abc import Iterable
from typing import Any

from common.evaluation.protocol import check_alike
from common.report.statistics import bootstrap_interval
from common.report.table import Measured, PerImage, measured_over_seeds
from common.reproduce.rows import RowRun

# of a protocol, what a reader needs to know; the rest stays in the run's evaluation.json
_PROTOCOL_KEYS = ("num_images", "num_texts", "num_classes", "prompt_average", "tie_rule", "captions_hash")


def measured_cell(runs: list[RowRun], role: str, metric: str, scale: str) -> Measured | None:
    """Our number for one cell, in percent.

    Two seeds or more carry Student's t interval over seeds; a single one a bootstrap interval over its test images.

    Args:
        runs: one per seed.
        role: of the data set, as in the run's evaluations.
        metric: its key there.
        scale: at which the runs were trained.
    Returns:
        None if the runs were not evaluated on such a data set.
    Raises:
        ProtocolError: if the seeds were evaluated under different protocols; it names the key.
    """
    if role not in runs[0].evaluations:
        return None
    evaluations = [run.evaluations[role] for run in runs]
    check_alike({f"seed {run.seed}": evaluation["protocol"] for run, evaluation in zip(runs, evaluations)})
    protocol = evaluations[0]["protocol"]
    values = tuple(100 * evaluation["metrics"][metric] for evaluation in evaluations)
    query_interval = per_image = None
    if len(runs) == 1:
        per_image = PerImage.of([hits for hits in runs[0].hits[role][metric] if hits], unit=100)
        low, high = bootstrap_interval(runs[0].hits[role][metric])
        query_interval = (100 * low, 100 * high)
    chance = evaluations[0]["chance"].get(metric)
    return measured_over_seeds(
        values,
        [run.seed for run in runs],
        scale=scale,
        data=data_text(protocol),
        protocol=protocol_text(protocol),
        chance=None if chance is None else 100 * chance,
        query_interval=query_interval,
        full_protocol=protocol,
        per_image=per_image,
    )


def data_text(protocol: dict[str, Any]) -> str:
    """Name of a data set with a short fingerprint."""
    return f"{protocol['data']} ({protocol['fingerprint'][:8]})"


def trained_on(runs: Iterable[RowRun]) -> str:
    """What runs were trained on: each name once, before the short fingerprints of what seeds drew under it."""
    fingerprints: dict[str, list[str]] = {}
    for text in sorted({run.training_data for run in runs}):
        name, short = re.fullmatch(r"(.*?)(?: \((\w{8})\))?", text).groups()
        fingerprints.setdefault(name, []).extend([short] if short else [])
    return ", ".join(f"{name} ({', '.join(of)})" if of else name for name, of in fingerprints.items())


def protocol_text(protocol: dict[str, Any]) -> str:
    """The part of a protocol that two numbers must share to stand in one column."""
    return ", ".join(f"{key} {protocol[key]}" for key in _PROTOCOL_KEYS if key in protocol)
