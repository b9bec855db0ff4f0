"""The loss around a trained model's weights, and its gradient, at several temperatures (version B, landscape figure).

The model, one batch and its weights theta are fixed; the multiplier s of the similarities is set manually. Random
directions D1 and D2 have the norm of each weight tensor and are orthogonal to each other:

    plane   loss(theta + a D1 + b D2; s), a and b in [-1, 1]
    line    |grad loss(theta + a D1; s)| over all weights, for several s

The factor s makes slopes and curvatures s times as large, so they are also listed without it. The paper states neither
scaling nor grid nor s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.func import functional_call
from tqdm import tqdm

from common.base.random_keys import derive_key
from common.distributed import is_main_process
from common.encoders.two_towers import TwoTowers
from common.info_nce import symmetric_info_nce
from common.report.figures import Curves, plot_curves
from common.report.table import Table
from common.reproduce.command import Command
from common.reproduce.findings import Findings, findings_table
from common.reproduce.rows import PaperCode, RowRun, measured_once
from common.reproduce.tables import train_rows
from oblique_topology.figures import Contours, plot_contours
from oblique_topology.loaded_rows import trained_model, training_batch

DECIDES = "evaluation"

ROW = "table2_clip.yaml"  # the paper uses its CLIP
PLANES = (1.0, 100.0)  # multipliers
LINES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
COLUMNS = {
    "loss": ("loss of the model", "nats", None),
    "roughness": ("roughness of the plane", "nats", None),
    "roughness_over_multiplier": ("roughness over multiplier", "nats", None),
    "gradient_norm": ("gradient norm along the line", "norm", None),
    "gradient_norm_over_multiplier": ("gradient norm over multiplier", "norm", None),
}

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Grid:
    """Sizes of one scale.

    batch: pairs; the paper's is 1,024. plane: points along each side. line: points.
    """

    batch: int = 1024
    plane: int = 41
    line: int = 41

    @property
    def places(self) -> list[float]:
        """a and b of the plane."""
        return np.linspace(-1, 1, self.plane).tolist()

    @property
    def stations(self) -> list[float]:
        """a of the line."""
        return np.linspace(-1, 1, self.line).tolist()


GRIDS = {
    "smoke": Grid(32, 5, 3),
    **dict.fromkeys(("demo", "photos", "photos_scratch"), Grid(256, 21, 11)),
    "paper": Grid(),
}


def movable_weights(model: TwoTowers) -> Weights:
    """Weights of both towers by name, without a frozen backbone, logit scale and geometry."""
    towers = ("image_tower.", "text_tower.")
    stems = (model.image_tower.stem, model.text_tower.stem)
    still = {id(weight) for stem in stems if stem is not None and not stem.trainable for weight in stem.parameters()}
    return {
        name: weight.detach()
        for name, weight in model.named_parameters()
        if name.startswith(towers) and id(weight) not in still
    }


def random_directions(weights: Weights, generator: torch.Generator) -> tuple[Weights, Weights]:
    """Two Gaussian directions, orthogonal in every weight tensor and with its norm.

    A tensor of zeros does not move. A tensor of a single number moves only along the first direction.
    """

    def drawn(weight: torch.Tensor) -> torch.Tensor:
        return torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight)

    def scaled(direction: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        length = direction.norm()
        return direction * (weight.norm() / length) if length > 0 else direction

    first = {name: scaled(drawn(weight), weight) for name, weight in weights.items()}
    second = {}
    for name, weight in weights.items():
        other, along = drawn(weight), first[name]
        if weight.numel() == 1 or not along.any():
            second[name] = torch.zeros_like(weight)
            continue
        other = other - along * ((other * along).sum() / along.square().sum())
        second[name] = scaled(other, weight)
    return first, second


def _moved(weights: Weights, *steps: tuple[float, Weights]) -> Weights:
    return {
        name: weight + sum(length * direction[name] for length, direction in steps) for name, weight in weights.items()
    }


def _losses(
    model: TwoTowers, weights: Weights, inputs: tuple[torch.Tensor, torch.Tensor], multipliers: Sequence[float]
) -> list[torch.Tensor]:
    """The loss of one batch with other weights, for each multiplier; without gathering from other processes."""
    images, texts, _ = functional_call(model, weights, inputs)
    similarity = model.geometry.similarity(images, texts)
    return [symmetric_info_nce(multiplier * similarity) for multiplier in multipliers]


@torch.no_grad()
def losses_on_plane(
    model: TwoTowers,
    inputs: tuple[torch.Tensor, torch.Tensor],
    directions: tuple[Weights, Weights],
    places: Sequence[float],
    multipliers: Sequence[float],
) -> np.ndarray:
    """Losses at theta + a D1 + b D2 for a and b in `places`.

    Args:
        model: in evaluation mode; its weights are not changed.
        inputs: images and token ids of one batch.
        directions: D1 and D2.
        places: along both.
        multipliers: s.
    Returns:
        (num_multipliers, num_places of b, num_places of a), nats.
    """
    weights = movable_weights(model)
    first, second = directions

    def at(a: float, b: float) -> list[float]:
        return [float(loss) for loss in _losses(model, _moved(weights, (a, first), (b, second)), inputs, multipliers)]

    rows = tqdm(places, desc="plane", unit="row", leave=False)
    return np.array([[at(a, b) for a in places] for b in rows]).transpose(2, 0, 1)


def gradient_norms_on_line(
    model: TwoTowers,
    inputs: tuple[torch.Tensor, torch.Tensor],
    direction: Weights,
    places: Sequence[float],
    multipliers: Sequence[float],
) -> np.ndarray:
    """Norm of the gradient with respect to all weights of both towers at theta + a D.

    Holds the activations of the whole batch at once; untested at the paper's sizes, 1,024 pairs of ViT-B/16.

    Args:
        model, inputs, places, multipliers: as in losses_on_plane.
        direction: D.
    Returns:
        (num_multipliers, num_places).
    """
    weights = movable_weights(model)
    norms = []
    for a in tqdm(places, desc="line", unit="point", leave=False):
        here = {name: weight.requires_grad_() for name, weight in _moved(weights, (a, direction)).items()}
        gradients = [
            torch.autograd.grad(loss, list(here.values()), retain_graph=True)
            for loss in _losses(model, here, inputs, multipliers)
        ]
        norms.append([float(torch.cat([part.flatten() for part in parts]).norm()) for parts in gradients])
    return np.array(norms).T


def roughness(losses: np.ndarray) -> float:
    """Root mean square of the second differences in rows and columns, at least three of each: 0 on a tilted plane."""
    along = [np.diff(losses, n=2, axis=axis).ravel() for axis in (0, 1)]
    return float(np.sqrt(np.mean(np.concatenate(along) ** 2)))


def loss_landscape(command: Command, code: PaperCode) -> list[Table]:
    """Contours at multipliers 1 and 100, and gradient norms along a line, around the trained baseline."""
    runs = train_rows(command, code, {"clip": ROW})["clip"]
    if not is_main_process():
        return []
    grid = GRIDS[command.scale]
    landscapes = [
        measured_once(run, Path(__file__), [asdict(grid), PLANES, LINES], partial(_landscape, run, grid))
        for run in runs
    ]
    # (seed, multiplier, ...): contours are of the first seed, numbers of all
    pairs = landscapes[0]["pairs"]  # perhaps fewer than the grid's
    planes, lines = ([np.array(one[kind]) for one in landscapes] for kind in ("plane", "line"))
    folder = command.folder(code.name)
    # the two figures, then the table of their numbers
    plot_contours(
        [
            Contours(f"multiplier {s:g}, seed {runs[0].seed}", "loss (nats)", grid.places, grid.places, losses)
            for s, losses in zip(PLANES, planes[0])
        ],
        folder / "loss_landscape_contours.png",
        "a, along the first direction",
        "b, along the second direction",
    )
    plot_curves(_panels(lines, grid.stations), folder / "loss_landscape_gradient_norms.png", across=2)
    findings = Findings(
        name="loss_landscape",
        caption="Loss of one batch around the weights of the trained sphere baseline, at temperatures set manually.",
        measured_on="one batch of training pairs",
        protocol=f"{pairs} pairs",
        settings=asdict(grid) | {"batch": pairs},
        rows={f"at_{s:g}": f"multiplier {s:g}" for s in LINES},
        columns=COLUMNS,
        values=_values(planes, lines, grid),
        notes=[
            "Logits carry the multiplier as a factor, which makes slopes and bends larger by itself; the columns over "
            "multiplier are free of it.",
            "Roughness: root mean square of the second differences between neighbouring points of the plane. Gradient "
            "norm: average over the line.",
        ],
    )
    return [findings_table(command, code.name, findings, {"clip": runs})]


def _landscape(run: RowRun, grid: Grid) -> dict[str, Any]:
    """Losses on the plane and gradient norms on the line of one run, as lists for JSON, and the pairs of the batch."""
    config, encoder = trained_model(run)
    inputs = training_batch(config, encoder, grid.batch)
    draws = torch.Generator().manual_seed(derive_key("landscape", run.seed))
    directions = random_directions(movable_weights(encoder.model), draws)
    plane = losses_on_plane(encoder.model, inputs, directions, grid.places, PLANES)
    line = gradient_norms_on_line(encoder.model, inputs, directions[0], grid.stations, LINES)
    print(f"loss_landscape: seed {run.seed} measured", flush=True)
    return {"plane": plane.tolist(), "line": line.tolist(), "pairs": len(inputs[1])}


def _values(
    planes: Sequence[np.ndarray], lines: Sequence[np.ndarray], grid: Grid
) -> Mapping[tuple[str, str], list[float]]:
    middle = grid.plane // 2
    values: dict[tuple[str, str], list[float]] = {}
    for index, s in enumerate(LINES):
        norms = [float(line[index].mean()) for line in lines]
        values[f"at_{s:g}", "gradient_norm"] = norms
        values[f"at_{s:g}", "gradient_norm_over_multiplier"] = [norm / s for norm in norms]
    for index, s in enumerate(PLANES):
        values[f"at_{s:g}", "loss"] = [float(plane[index][middle, middle]) for plane in planes]
        rough = [roughness(plane[index]) for plane in planes]
        values[f"at_{s:g}", "roughness"] = rough
        values[f"at_{s:g}", "roughness_over_multiplier"] = [value / s for value in rough]
    return values


def _panels(lines: Sequence[np.ndarray], stations: Sequence[float]) -> list[Curves]:
    along = {
        f"multiplier {s:g}": [(a, [float(line[index, k]) for line in lines]) for k, a in enumerate(stations)]
        for index, s in enumerate(LINES)
    }
    at_model = [(s, [float(line[index, len(stations) // 2]) for line in lines]) for index, s in enumerate(LINES)]
    relative = [(s, [value / s for value in values]) for s, values in at_model]
    over = {"norm": at_model, "norm over multiplier": relative}
    return [
        Curves("along the first direction", "a", "gradient norm", along, log_y=True),
        Curves("at the model", "multiplier", "gradient norm", over, log_x=True, log_y=True),
    ]
