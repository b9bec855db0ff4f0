"""The balance of alignment and uniformity against temperature, batch and noise (version B, "visualised equilibrium").

With similarities S of a batch of B pairs and a multiplier s, Eq. 1 is a mean over pairs of U_i - A_i:

    A_i = s S_ii                                                     alignment: the positive
    U_i = ln( sum_{j != i} exp(s S_ij) + sum_{j != i} exp(s S_ji) )  uniformity: the negatives of both directions

The paper's "ratio of alignment loss to uniformity loss" has three readings, and all are computed: the mean of
exp(A_i - U_i), its median, and the mean of A_i / U_i. The equilibrium is the smallest s at which a ratio is 1. It
belongs to fixed similarities. A learned temperature does not go there: it minimises the cross-entropy, and falls with
more noise, where the equilibrium rises.

Gradients cannot show whether a loss "pushes rather than pulls": at every s those on the negatives sum to that on the
positive (`similarity_gradient`). The size of A relative to U differs, and the number of negatives that share the push.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from scipy.optimize import brentq, minimize_scalar

from common.base.random_keys import derive_key
from common.data.order import seed_of
from common.data.partners import shuffled_texts
from common.distributed import is_main_process
from common.info_nce import symmetric_info_nce
from common.report.figures import Curves, plot_curves
from common.report.table import Table
from common.reproduce.command import Command
from common.reproduce.findings import Findings, findings_table
from common.reproduce.rows import PaperCode
from common.reproduce.tables import train_rows
from oblique_topology.loaded_rows import embed_batch, trained_model, training_batch

DECIDES = "evaluation"

ROW = "table2_clip.yaml"  # the paper uses its CLIP
HIGHEST = 2000.0  # largest multiplier in the search for an equilibrium
MULTIPLIERS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)  # of the curves


@dataclass(frozen=True)
class Grid:
    """Sizes of one scale; the paper states none.

    small, middle, large: B, the first pairs of the largest. shares: of the pairs with shuffled texts. batches: random
    ones whose mean is taken, of the largest size every fourth. pool: training pairs that they are drawn from.
    """

    small: int = 256
    middle: int = 1024
    large: int = 4096
    shares: tuple[float, ...] = (0.0, 0.05, 0.1, 0.2)
    batches: int = 40
    pool: int = 4096


GRIDS = {
    "smoke": Grid(16, 40, 64, batches=3, pool=256),
    **dict.fromkeys(("demo", "photos", "photos_scratch"), Grid(64, 256, 1024)),
    "paper": Grid(),
}
SIZES = ("small", "middle", "large")
SOURCES = {"drawn": "Random similarities", "trained": "Trained model"}
READINGS = {"mean": "average ratio is 1", "median": "median ratio is 1", "logs": "average of A / U is 1"}
COLUMNS = {
    **{f"balance_{name}": (f"balance: {label}", "multiplier", None) for name, label in READINGS.items()},
    "lowest_loss": ("lowest cross-entropy", "multiplier", None),
    **{
        f"{key}_{multiplier}": (f"{label}, multiplier {multiplier}", unit, None)
        for multiplier in (1, 100)
        for key, label, unit in (
            ("ratio", "ln of the average ratio", "nats"),
            ("share", "alignment's share of |A| + |U|", "fraction"),
            ("slope", "gradients on positives, in sum, as on negatives", "sum"),
            ("felt", "negatives that share the push", "pairs"),
        )
    },
}


def alignment_and_uniformity(similarity: torch.Tensor, multiplier: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A and U of every pair, in nats; Eq. 1 is the mean of U - A.

    Args:
        similarity: (batch, batch), positives on the diagonal.
        multiplier: s.
    Returns:
        (batch,) twice, float64.
    Raises:
        ValueError: no square matrix of at least two pairs.
    """
    if similarity.ndim != 2 or similarity.shape[0] != similarity.shape[1] or len(similarity) < 2:
        raise ValueError(
            f"similarities of at least two pairs are needed, (batch, batch), got {tuple(similarity.shape)}"
        )
    logits = multiplier * similarity.double()
    positives = logits.diagonal()
    negatives = logits.masked_fill(torch.eye(len(logits), dtype=torch.bool, device=logits.device), -math.inf)
    return positives, torch.logaddexp(negatives.logsumexp(dim=1), negatives.logsumexp(dim=0))


def log_ratios(similarity: torch.Tensor, multiplier: float) -> dict[str, float]:
    """The three readings of the ratio as numbers that are 0 at the equilibrium and rise with alignment.

    Returns:
        "mean": ln mean exp(A - U). "median": median of A - U. "logs": mean of A / U, less 1; NaN if a U is not
        positive, as A / U then has no meaning (all negatives far below 0).
    """
    alignment, uniformity = alignment_and_uniformity(similarity, multiplier)
    apart = alignment - uniformity
    return {
        "mean": float(apart.logsumexp(dim=0)) - math.log(len(apart)),
        "median": float(apart.quantile(0.5)),
        "logs": float((alignment / uniformity).mean()) - 1 if (uniformity > 0).all() else math.nan,
    }


def alignment_share(similarity: torch.Tensor, multiplier: float) -> float:
    """Mean |A| over mean |A| + |U|: the share of alignment in the terms of the loss, in [0, 1]."""
    alignment, uniformity = (values.abs().mean() for values in alignment_and_uniformity(similarity, multiplier))
    return float(alignment / (alignment + uniformity))


def balance(similarity: torch.Tensor, reading: str) -> float | None:
    """Smallest multiplier at which the ratio is 1; None up to HIGHEST if negatives are as close as positives.

    Args:
        similarity: (batch, batch), positives on the diagonal.
        reading: key of READINGS.
    """

    def excess(multiplier: float) -> float:
        return log_ratios(similarity, multiplier)[reading]

    low = 0.0  # A = 0 and U = ln(2 (B - 1)) > 0: below the balance, whatever the similarities
    high = 1.0
    while not (above := excess(high)) >= 0:
        if math.isnan(above) or high >= HIGHEST:
            return None
        low, high = high, min(1.25 * high, HIGHEST)  # small steps: "logs" can cross twice
    return float(brentq(excess, low, high, xtol=1e-6))


def loss_minimising(similarity: torch.Tensor) -> float | None:
    """The multiplier in [0.01, HIGHEST] with the lowest symmetric InfoNCE, which a learned temperature approaches.

    None if every positive is the largest of its row and its column: the loss then falls with the multiplier for ever.
    """
    similarity = similarity.double()
    if (similarity.diagonal() >= torch.maximum(similarity.amax(dim=0), similarity.amax(dim=1))).all():
        return None
    optimum = minimize_scalar(
        lambda log: float(symmetric_info_nce(math.exp(log) * similarity)),
        bounds=(math.log(0.01), math.log(HIGHEST)),
        method="bounded",
        options={"xatol": 1e-4},
    )
    return math.exp(optimum.x)


def similarity_gradient(similarity: torch.Tensor, multiplier: float) -> torch.Tensor:
    """Gradient of the symmetric InfoNCE with respect to the similarities, in closed form.

    s / B * ( (row softmax + column softmax) / 2 - I ). Its entries sum to 0: all pulls on positives together are as
    strong as all pushes on negatives.

    Args:
        similarity: (batch, batch), positives on the diagonal.
        multiplier: s.
    Returns:
        (batch, batch) float64.
    """
    logits = multiplier * similarity.double()
    softmax = (logits.softmax(dim=1) + logits.softmax(dim=0)) / 2
    return multiplier / len(logits) * (softmax - torch.eye(len(logits), dtype=logits.dtype, device=logits.device))


def pull_and_push(similarity: torch.Tensor, multiplier: float) -> dict[str, float]:
    """Strength of the pull on positives and of the push on negatives, and the effective number of negatives.

    Returns:
        "pull", "push": sum of the gradient's absolute values on and off the diagonal; they are equal. "felt": effective
        number of negatives per pair, exp of the entropy of the shares of its push, in [1, 2 (batch - 1)]; mean.
    """
    gradient = similarity_gradient(similarity, multiplier)
    diagonal = torch.eye(len(gradient), dtype=torch.bool, device=gradient.device)
    pushes = gradient.masked_fill(diagonal, 0.0)
    logits = multiplier * similarity.double()
    log_pushes = torch.logaddexp(logits.log_softmax(dim=1), logits.log_softmax(dim=0)).masked_fill(diagonal, -torch.inf)
    shares = torch.cat([log_pushes, log_pushes.T], dim=1).softmax(dim=1)  # row i: all negatives of pair i
    felt = torch.special.entr(shares).sum(dim=1).exp().mean()
    return {"pull": float(gradient.diagonal().abs().sum()), "push": float(pushes.abs().sum()), "felt": float(felt)}


def drawn_similarities(batch: int, generator: torch.Generator) -> torch.Tensor:
    """(batch, batch) similarities without a model, float64: positives 0.35 ± 0.06, negatives 0.12 ± 0.06."""
    similarity = 0.12 + 0.06 * torch.randn(batch, batch, generator=generator, dtype=torch.float64)
    similarity.diagonal().copy_(0.35 + 0.06 * torch.randn(batch, generator=generator, dtype=torch.float64))
    return similarity


def measures_of(similarity: torch.Tensor) -> dict[str, float | None]:
    """The numbers of one row by key of COLUMNS; None if there is none."""
    numbers: dict[str, float | None] = {f"balance_{name}": balance(similarity, name) for name in READINGS}
    numbers["lowest_loss"] = loss_minimising(similarity)
    for multiplier in (1, 100):
        numbers[f"ratio_{multiplier}"] = log_ratios(similarity, multiplier)["mean"]
        numbers[f"share_{multiplier}"] = alignment_share(similarity, multiplier)
        gradients = pull_and_push(similarity, multiplier)
        numbers |= {f"slope_{multiplier}": gradients["pull"], f"felt_{multiplier}": gradients["felt"]}
    return numbers


def mean_of(batches: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """The mean over batches by column; None where a batch has no number."""
    columns = {column: [numbers[column] for numbers in batches] for column in batches[0]}
    return {column: None if None in values else math.fsum(values) / len(values) for column, values in columns.items()}


Case = tuple[str, str, float]  # source of the similarities, one of SIZES, share of shuffled texts


def equilibrium(command: Command, code: PaperCode) -> list[Table]:
    """Balance and gradients of drawn similarities and of those of the trained baseline, and curves of the ratio."""
    runs = train_rows(command, code, {"clip": ROW})["clip"]
    if not is_main_process():
        return []
    grid = GRIDS[command.scale]
    firsts: list[dict[Case, torch.Tensor]] = []  # the first batch of each seed, whose curves are drawn
    measured = []
    for run in runs:
        config, encoder = trained_model(run)
        images, texts = embed_batch(encoder, *training_batch(config, encoder, grid.pool, drawn_by=run.seed))
        draws = torch.Generator().manual_seed(derive_key("drawn similarities", run.seed))
        of_batches: dict[str, list[dict[str, float | None]]] = {}
        for number in range(grid.batches):
            chosen = torch.randperm(len(images), generator=draws)[: grid.large].to(images.device)
            # the largest matrix once; smaller batches are its corners, so that they differ only in size
            sources = {
                "drawn": drawn_similarities(grid.large, draws),
                "trained": encoder.model.geometry.similarity(images[chosen], texts[chosen]).cpu(),
            }
            cases = cases_of(sources, grid, seed_of(run.seed, number))
            if not number:
                firsts.append(cases)
            for case, matrix in cases.items():
                if case[1] != "large" or number % 4 == 0:
                    of_batches.setdefault(_key(case), []).append(measures_of(matrix))
        measured.append({row: mean_of(batches) for row, batches in of_batches.items()})
    # a row per case; a column stays empty if it has no value for a seed
    rows = {_key(case): _label(case, matrix) for case, matrix in firsts[0].items()}
    values = {
        (row, column): numbers
        for row in rows
        for column in COLUMNS
        if None not in (numbers := [seed_numbers[row][column] for seed_numbers in measured])
    }
    findings = Findings(
        name="equilibrium",
        caption=(
            "Multipliers at which alignment and uniformity balance, for similarities that are drawn (positives "
            "0.35 ± 0.06, negatives 0.12 ± 0.06) and for those of the trained sphere baseline on training pairs."
        ),
        measured_on="random training batches",
        protocol=f"mean over {grid.batches} random training batches, of the largest size a fourth as many",
        settings=asdict(grid),
        rows=rows,
        columns=COLUMNS,
        values=values,
        notes=[
            f"An empty cell: a batch has no balance up to a multiplier of {HIGHEST:g}; or, of A / U, a U falls to "
            "0 before that, where the quotient says nothing; or its cross-entropy falls for ever, as every pair is "
            "nearest to itself.",
            "The curves show one batch of each seed.",
            "The balance belongs to fixed similarities. A learned temperature would go to the multiplier with the "
            "lowest cross-entropy, which noise moves the other way.",
            "Gradients on positives add up to as much as those on negatives at every multiplier, and carry it as a "
            "factor; whether the loss pulls or pushes is no question of their size.",
        ],
    )
    plot_curves(_panels(firsts, grid), command.folder(code.name) / "equilibrium_curves.png", across=3)
    return [findings_table(command, code.name, findings, {"clip": runs})]


def cases_of(sources: Mapping[str, torch.Tensor], grid: Grid, seed: int) -> dict[Case, torch.Tensor]:
    """Every source at every batch size without noise, and at the middle size with every share of it.

    Args:
        sources: name -> (pairs, pairs) similarities; batches are their first pairs, or all if there are fewer.
    """
    settings = [(size, 0.0) for size in SIZES] + [("middle", share) for share in grid.shares if share]
    cases = {}
    for source, whole in sources.items():
        for size, share in settings:
            batch = min(getattr(grid, size), len(whole))
            # the same key at every share: the pairs of a smaller one are among those of a larger
            draws = torch.Generator().manual_seed(derive_key("shuffled texts", seed, batch))
            cases[source, size, share] = whole[:batch, :batch][:, shuffled_texts(batch, share, draws)]
    return cases


def _key(case: Case) -> str:
    """The key of a row, the same at every scale."""
    source, size, share = case
    return f"{source}_{size}_noise{round(100 * share)}"


def _label(case: Case, similarity: torch.Tensor) -> str:
    """The label of a row, with the real batch size and the nominal share."""
    source, _, share = case
    return f"{source}, B = {len(similarity)}" + (f", {share:.0%} shuffled" if share else "")


def _panels(by_seed: Sequence[Mapping[Case, torch.Tensor]], grid: Grid) -> list[Curves]:
    """`panels_of` the similarities of all seeds."""

    def points(case: Case, value: Callable[[torch.Tensor, float], float]) -> list[tuple[float, list[float]]]:
        return [(s, [value(cases[case], s) for cases in by_seed]) for s in MULTIPLIERS]

    batches = {(source, size): len(by_seed[0][source, size, 0.0]) for source in SOURCES for size in SIZES}
    return panels_of(batches, max(grid.shares), points)


def panels_of(
    batches: Mapping[tuple[str, str], int], most: float, points: Callable[[Case, Callable], list]
) -> list[Curves]:
    """Three panels for each source, against the multiplier: ratio by batch size and by noise, share of alignment.

    Args:
        batches: source and size -> B.
        most: of the shares of shuffled texts; only it is drawn beside none, since all lie upon each other.
        points: case, function of similarities and multiplier -> (multiplier, value of each seed).
    """

    def ratio(similarity: torch.Tensor, multiplier: float) -> float:
        return log_ratios(similarity, multiplier)["mean"]

    balance = ("balance: the ratio is 1", 0.0)
    panels = []
    for source, of_what in SOURCES.items():
        by_batch = {f"B = {batches[source, size]}": (source, size, 0.0) for size in SIZES}
        middle = f"B = {batches[source, 'middle']}"
        by_noise = {middle: (source, "middle", 0.0)}
        by_noise[f"{middle}, {most:.0%} of texts shuffled"] = source, "middle", most
        for title, cases, value, y_label, level in (
            (f"{of_what}: by batch size", by_batch, ratio, "ln of the mean ratio exp(A - U)", balance),
            (f"{of_what}: by shuffled texts", by_noise, ratio, "ln of the mean ratio exp(A - U)", balance),
            (f"{of_what}: alignment's share", by_batch, alignment_share, "mean |A| over mean |A| + |U|", None),
        ):
            curves = {label: points(case, value) for label, case in cases.items()}
            panels.append(Curves(title, "multiplier", y_label, curves, True, level=level))
    return panels
