"""A product in bfloat16 at large multipliers (claim C39): error of the gradient, and the end of training.

The gradient of the loss by the embeddings of a trained model is computed in float64 by autograd, and with products in
bfloat16 or float32 as `optim.loss_bf16_product` makes them. Its relative error is the norm of the difference over the
norm of the exact gradient, of both sides together. The error grows with the multiplier in float32 too; what is
harmful is its size. The second question is whether training at a fixed multiplier ends at a higher loss.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from common.distributed import is_main_process
from common.geometry import Geometry
from common.info_nce import symmetric_info_nce
from common.report.figures import Curves, plot_curves
from common.report.table import Table
from common.reproduce.command import Command
from common.reproduce.findings import Findings, findings_table
from common.reproduce.rows import PaperCode, RowRun, measured_once
from common.reproduce.tables import train_rows
from common.run.log import read_log
from common.tiled import tiled_contrastive_loss
from oblique_topology.loaded_rows import random_batches, trained_model
from oblique_topology.temperature import row_of

DECIDES = "evaluation"

TRAINED = row_of("sphere")
FIXED = "ablation_sphere_fixed.yaml"
MULTIPLIERS = (1, 10, 100, 1000)  # of the gradient's error
TRAINED_AT = (1, 10, 100)  # of the runs
BATCHES = 10
END = 0.1  # share of a run whose mean loss is its end loss
PRODUCTS = {"float32": "false", "bf16": "true"}
COLUMNS = {
    "gradient_error_bf16": ("error of the gradient, bfloat16 product", "percent", "lower"),
    "gradient_error_float32": ("error of the gradient, float32 product", "percent", "lower"),
    "end_loss_bf16": ("end loss, bfloat16 product", "nats", "lower"),
    "end_loss_float32": ("end loss, float32 product", "nats", "lower"),
    "excess_loss": ("end loss, bfloat16 less float32", "nats", "lower"),
}


def gradient_error(
    image_embeddings: torch.Tensor,
    text_embeddings: torch.Tensor,
    geometry: Geometry,
    multiplier: float,
    bf16_product: bool,
) -> float:
    """Relative error of the gradient by the embeddings, against autograd in float64 on the same embeddings.

    Args:
        image_embeddings, text_embeddings: (batch, ...), float32, of an inner product.
        multiplier: s.
    Returns:
        |g - g64| / |g64|, a fraction.
    """
    sides = [embeddings.detach().double().requires_grad_() for embeddings in (image_embeddings, text_embeddings)]
    exact = torch.autograd.grad(symmetric_info_nce(multiplier * geometry.similarity(*sides)), sides)
    sides = [embeddings.detach().float().requires_grad_() for embeddings in (image_embeddings, text_embeddings)]
    scale = torch.tensor(float(multiplier))
    loss = tiled_contrastive_loss(*sides, geometry, scale.to(sides[0].device), bf16_product=bf16_product)
    rounded = torch.autograd.grad(loss, sides)
    difference = torch.cat([(one.double() - other).flatten() for one, other in zip(rounded, exact)])
    return float(difference.norm() / torch.cat([one.flatten() for one in exact]).norm())


def low_precision(command: Command, code: PaperCode) -> list[Table]:
    """Errors of the gradient by multiplier, and end losses of runs with both products at fixed multipliers."""
    command.refuse_processes()
    configs, settings = {"trained": TRAINED}, {}
    for multiplier in TRAINED_AT:
        for product, value in PRODUCTS.items():
            name = f"at_{multiplier}_{product}"
            configs[name] = FIXED
            settings[name] = (
                f"method.logit_scale_init={multiplier:g}",
                "optim.loss_tile=4096",
                f"optim.loss_bf16_product={value}",
            )
    command.refuse_set(itertools.chain(*settings.values()))
    runs = train_rows(command, code, configs, settings)
    if not is_main_process():
        return []
    values: dict[tuple[str, str], list[float]] = {}
    errors = [measured_once(run, Path(__file__), BATCHES, lambda run=run: errors_of(run)) for run in runs["trained"]]
    for multiplier in MULTIPLIERS:
        for product in PRODUCTS:
            column = f"gradient_error_{product}"
            values[f"at_{multiplier}", column] = [of_run[f"{product}_{multiplier}"] for of_run in errors]
    for multiplier in TRAINED_AT:
        ends = {product: [end_loss(run) for run in runs[f"at_{multiplier}_{product}"]] for product in PRODUCTS}
        for product, losses in ends.items():
            values[f"at_{multiplier}", f"end_loss_{product}"] = losses
        values[f"at_{multiplier}", "excess_loss"] = np.subtract(ends["bf16"], ends["float32"]).tolist()
    findings = Findings(
        name="low_precision",
        caption="A product in bfloat16 at several multipliers: error of the gradient, and loss at the end of training.",
        measured_on="training batches and log",
        protocol=f"{errors[0]['batches']} random training batches; mean loss of the last {END:.0%} of the steps",
        settings={"trained": TRAINED, "fixed": FIXED, "batches": errors[0]["batches"], "end": END},
        rows={f"at_{multiplier}": f"multiplier {multiplier}" for multiplier in MULTIPLIERS},
        columns=COLUMNS,
        values=values,
        notes=[
            "Errors are those of one trained sphere at several multipliers; end losses those of runs whose multiplier "
            "is fixed from the start.",
        ],
    )
    errors_by_product = {
        f"{product} product": _points(values, f"gradient_error_{product}", MULTIPLIERS) for product in PRODUCTS
    }
    panels = [
        Curves("Gradient by the embeddings", "multiplier", "relative error, percent", errors_by_product, True),
        Curves(
            "End of training",
            "multiplier",
            "loss, bfloat16 less float32, nats",
            {"bf16 less float32": _points(values, "excess_loss", TRAINED_AT)},
            True,
        ),
    ]
    plot_curves(panels, command.folder(code.name) / "low_precision_by_multiplier.png", across=2)
    return [findings_table(command, code.name, findings, runs)]


def errors_of(run: RowRun) -> dict[str, float]:
    """<product>_<multiplier> -> mean error over random training batches, in percent; their number as "batches"."""
    config, encoder = trained_model(run)
    batches, geometry = random_batches(config, encoder, BATCHES), encoder.model.geometry
    return {"batches": len(batches)} | {
        f"{product}_{multiplier}": 100
        * float(np.mean([gradient_error(*batch, geometry, multiplier, value == "true") for batch in batches]))
        for product, value in PRODUCTS.items()
        for multiplier in MULTIPLIERS
    }


def end_loss(run: RowRun) -> float:
    """Mean loss over the last steps of the log, in nats."""
    losses = [record["loss"] for record in read_log(run.files.log) if record["event"] == "train"]
    return float(np.mean(losses[-max(1, round(END * len(losses))) :]))


def _points(
    values: dict[tuple[str, str], list[float]], column: str, multipliers: Sequence[int]
) -> list[tuple[float, list[float]]]:
    return [(multiplier, values[f"at_{multiplier}", column]) for multiplier in multipliers]
