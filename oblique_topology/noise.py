"""What a learned temperature shows of the noise in the training data (claim C37, the abstracts of both versions).

A share of the training images gets the caption of another one. Partners that are drawn in every batch cannot be
learned by heart; a fixed shuffle can, and its rows are called memorisation. Two questions are kept apart: whether the
final multiplier changes strictly with the share, and in which direction. Beside it stand recall, the multiplier that
minimises the cross-entropy of the trained model on clean and on noisy training batches, and that at which the ratio of
Eq. 1 is 1 (`equilibrium.py`); these need not move the same way.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy import stats

from common.base.random_keys import derive_key
from common.data.partners import shuffled_texts
from common.distributed import is_main_process
from common.report.figures import Curves, plot_curves
from common.report.table import Table
from common.reproduce.command import Command
from common.reproduce.findings import Findings, findings_table
from common.reproduce.rows import PaperCode, RowRun, measured_once
from common.reproduce.tables import stand_in_for, train_rows
from oblique_topology.equilibrium import balance, loss_minimising
from oblique_topology.loaded_rows import random_batches, trained_model
from oblique_topology.temperature import TOPOLOGIES, log_temperatures, row_of

DECIDES = "evaluation"

SHARES = (0.0, 0.05, 0.1, 0.2, 0.5)
SHARES_OF_SCENES = (0.0, 0.2, 0.5)  # a run on scenes takes ten times as long
KINDS = {  # key -> settings, title of the panel; without wrong pairs the first is the run of Tables 3 and 6
    "drawn": ((), "partners drawn in every batch"),
    "fixed": (("data.partners_drawn=once",), "memorisation: a fixed shuffle"),
    "ambiguous": (("data.ambiguity=1",), "all captions ambiguous, partners drawn"),
}
BATCHES = 20  # random training batches of the trained model
COLUMNS = {
    "final_multiplier": ("final multiplier e^t", "multiplier", None),
    "i2t_recall_at_1": ("i2t R@1", "percent", "higher"),
    "t2i_recall_at_1": ("t2i R@1", "percent", "higher"),
    "optimal_clean": ("lowest cross-entropy, clean batches", "multiplier", None),
    "optimal_noisy": ("lowest cross-entropy, noisy batches", "multiplier", None),
    "balance_clean": ("balance: average ratio is 1, clean batches", "multiplier", None),
    "balance_noisy": ("balance: average ratio is 1, noisy batches", "multiplier", None),
}


class Noise(NamedTuple):
    """A row: topology, kind of noise, share of wrong pairs."""

    topology: str
    kind: str
    share: float

    @property
    def key(self) -> str:
        """Without wrong pairs `drawn` and `fixed` are the same run, under the name of the first."""
        kind = "drawn" if self.kind == "fixed" and not self.share else self.kind
        return f"{self.topology}_{kind}_{round(100 * self.share)}"

    @property
    def label(self) -> str:
        return f"{TOPOLOGIES[self.topology]}, {KINDS[self.kind][1]}, {self.share:.0%}"

    @property
    def settings(self) -> tuple[str, ...]:
        noise = f"data.partner_noise={self.share:g}"
        return (*KINDS[self.kind][0], noise) if self.share else KINDS[self.kind][0]


def rows_of(scale: str) -> dict[str, Noise]:
    """All rows by key: photographs have every topology and memorisation, scenes ambiguity and two topologies."""
    if scale == "smoke":
        shares, topologies, kinds = (0.0, 0.5), ["sphere"], ["drawn", "fixed", "ambiguous"]
    elif scale in ("demo", "photos_scratch"):
        shares, topologies = SHARES_OF_SCENES, ["sphere", "oblique"]
        kinds = ["drawn", "ambiguous"] if scale == "demo" else ["drawn", "fixed"]
    else:
        shares, topologies, kinds = SHARES, list(TOPOLOGIES), ["drawn", "fixed"]
    rows: dict[str, Noise] = {}
    for row in itertools.starmap(Noise, itertools.product(topologies, kinds, shares)):
        rows.setdefault(row.key, row)  # `fixed` shares the run without noise with `drawn`
    return rows


def noise(command: Command, code: PaperCode) -> list[Table]:
    """The final multiplier by the share of wrong pairs, its four steps judged by Holm's rule, and the figure."""
    rows = rows_of(command.scale)
    configs = {key: row_of(row.topology) for key, row in rows.items()}
    settings = {key: row.settings for key, row in rows.items()}
    command.refuse_set(itertools.chain(*settings.values()))
    runs = train_rows(command, code, configs, settings)
    if not is_main_process():
        return []
    rows = {key: rows[key] for key in runs}
    values: dict[tuple[str, str], list[float]] = {}
    for key, of_seeds in runs.items():
        numbers = [numbers_of(run, rows[key].share) for run in of_seeds]
        for column in COLUMNS:
            if all(of_seed[column] is not None for of_seed in numbers):
                values[key, column] = [of_seed[column] for of_seed in numbers]
    series = series_of(rows, values)
    first = next(iter(runs.values()))
    findings = Findings(
        name="noise",
        caption="The learned temperature by the share of wrong pairs in the training data (claim C37).",
        measured_on=f"training log and batches; recall: {stand_in_for(command, runs, 'test')}",
        protocol="log of the last update; "
        f"{BATCHES} random training batches of the trained model, or as many as the set has",
        settings={"rows": {key: list(row.settings) for key, row in rows.items()}, "batches": BATCHES},
        rows={key: row.label for key, row in rows.items()},
        columns=COLUMNS,
        values=values,
        notes=[
            *holm_notes(series),
            f"The temperature learns {first[0].config.optim.logit_scale_rate:g} times as fast as the weights.",
            "Version B says that noisier data need a larger temperature. That is the balance of a fixed model; the "
            "learned multiplier follows the cross-entropy. The balance columns compare models that were trained with "
            "different noise.",
        ],
    )
    path = command.folder(code.name) / "noise_multiplier_by_share.png"
    plot_curves(_panels(series), path, across=min(2, len({kind for kind, _ in series})))
    return [findings_table(command, code.name, findings, runs)]


def numbers_of(run: RowRun, share: float) -> dict[str, float | None]:
    """The numbers of one run by key of COLUMNS; None where a batch has no such multiplier."""
    metrics = run.evaluations["test"]["metrics"]
    return {
        "final_multiplier": float(np.exp(log_temperatures(run)[1][-1])),
        **{column: 100 * metrics[column] for column in ("i2t_recall_at_1", "t2i_recall_at_1")},
        **measured_once(run, Path(__file__), {"share": share, "batches": BATCHES}, lambda: of_batches(run, share)),
    }


def of_batches(run: RowRun, share: float) -> dict[str, float | None]:
    """Mean over random training batches of the multipliers of lowest cross-entropy and of balance, clean and noisy."""
    config, encoder = trained_model(run)
    draws = torch.Generator().manual_seed(derive_key("noisy batches", run.seed))
    numbers: dict[str, list[float | None]] = {}
    for images, texts in random_batches(config, encoder, BATCHES):
        similarity = encoder.model.geometry.similarity(images, texts).cpu().double()
        wrong = shuffled_texts(len(images), share, draws)
        for name, matrix in (("clean", similarity), ("noisy", similarity[:, wrong])):
            numbers.setdefault(f"optimal_{name}", []).append(loss_minimising(matrix))
            numbers.setdefault(f"balance_{name}", []).append(balance(matrix, "mean"))
    return {column: None if None in of else float(np.mean(of)) for column, of in numbers.items()}


Series = dict[tuple[str, str], list[tuple[float, Sequence[float]]]]  # kind, topology -> (share, final multipliers)


def series_of(rows: Mapping[str, Noise], values: Mapping[tuple[str, str], Sequence[float]]) -> Series:
    """The final multipliers of each kind and topology by share; `fixed` begins with the row without noise."""
    series: Series = {}
    kinds = dict.fromkeys(row.kind for row in rows.values())
    for kind in kinds:
        for topology in dict.fromkeys(row.topology for row in rows.values()):
            shares = sorted({row.share for row in rows.values()})
            points = [(share, Noise(topology, kind, share).key) for share in shares]
            points = [(share, values[key, "final_multiplier"]) for share, key in points if key in rows]
            if len(points) > 1:
                series[kind, topology] = points
    return series


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p values of a family of tests, in their order: at most a level where Holm's procedure rejects at it.

    Args:
        p_values: in [0, 1].
    Returns:
        In [0, 1]; the i-th smallest of n is the largest of (n - j + 1) p_(j) over j <= i, at most 1 (Holm, 1979).
    """
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(p_values), 0, -1)
    adjusted = np.minimum(1.0, np.maximum.accumulate(factors * np.asarray(p_values, dtype=np.float64)[order]))
    result = np.empty(len(p_values))
    result[order] = adjusted
    return result.tolist()


def steps_of(points: Sequence[tuple[float, Sequence[float]]]) -> list[tuple[float, float]]:
    """(mean change, Holm-adjusted two-sided p of the paired t test) from each share to the next one.

    Args:
        points: (share, one value per seed, at least two), ascending; seeds in one order.
    """
    changes = [np.subtract(later, earlier) for (_, earlier), (_, later) in itertools.pairwise(points)]
    p_values = [float(stats.ttest_1samp(change, 0).pvalue) if np.ptp(change) else float(not change.any())
                for change in changes]  # fmt: skip
    return list(zip((float(change.mean()) for change in changes), holm(p_values)))


def holm_notes(series: Series) -> list[str]:
    """A sentence for each curve; empty with one seed."""
    notes = []
    for (kind, topology), points in series.items():
        if len(points[0][1]) < 2:
            continue
        steps = steps_of(points)
        shown = "; ".join(
            f"{low:.0%} to {high:.0%}: {change:+.3g}, p {p:.2g}"
            for (low, _), (high, _), (change, p) in zip(points, points[1:], steps)
        )
        signs = {np.sign(change) for change, _ in steps}
        is_strict = len(signs) == 1 and 0 not in signs and all(p < 0.05 for _, p in steps)
        verdict = ("falls" if -1 in signs else "rises") if is_strict else "is not shown to be monotone"
        title = f"{TOPOLOGIES[topology]}, {KINDS[kind][1]}"
        notes.append(f"{title}: the final multiplier {verdict} (steps with Holm-adjusted p: {shown}).")
    return notes


def _panels(series: Series) -> list[Curves]:
    def curves(kind: str) -> dict[str, list[tuple[float, Sequence[float]]]]:
        return {
            TOPOLOGIES[topology]: [(100 * share, values) for share, values in points]
            for (of_kind, topology), points in series.items()
            if of_kind == kind
        }

    kinds = dict.fromkeys(kind for kind, _ in series)
    return [Curves(KINDS[kind][1], "wrong pairs, percent", "final multiplier", curves(kind)) for kind in kinds]
