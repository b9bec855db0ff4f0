"""The part `self_supervised`: all methods of learning from images only, between random weights and supervision.

The chapter prints no numbers for this. Methods share backbone, data, number of samples and evaluation. They differ in
the cost of a step, which the log records: MoCo trains one of its two encoders, supervision uses one view.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.distributed import is_main_process
from common.evaluation.protocol import data_text
from common.report.figures import Curves, plot_curves
from common.report.table import MEASURED, Measured, Row, Table, measured_over_seeds
from common.reproduce.command import Command
from common.reproduce.image_rows import image_rows
from common.reproduce.rows import RowRun
from common.reproduce.tables import columns_of, measured_cell, table_of, train_rows, with_custom_rows
from common.run.log import read_log
from contrastive_basics.pretrain import PAPER, pretrain, reevaluate
from contrastive_basics.vision.config import VisionConfig

DECIDES = "nothing"

CODE = image_rows(PAPER, VisionConfig, pretrain, reevaluate)
SCALES = ("smoke", "demo", "photos")
NOTES = [
    "The chapter prints no numbers for this; small networks and few epochs rank no method in general.",
    "Optimised by SGD throughout; SimCLR and MoCo v3 are published with LARS. Learning rates were not searched.",
    "feature std: standard deviation of the channels of unit features over test pictures, averaged; 0 where all "
    "pictures look alike. Features come after a ReLU and have one sign, so that mean cosines are far from 0 without "
    "any collapse, which shows in the curves of the projections.",
    "effective rank: where residual branches start at zero, random weights have a low one by construction, and a rise "
    "from it is no sign of learning.",
]


def self_supervised(command: Command) -> list[Table]:
    """kNN accuracy, linear probe and signs of collapse of every method, over the seeds of a command."""
    if not command.runs_at(SCALES, "there each row wants the settings in its header, by pretrain.py"):
        return []
    source, configs = CODE.printed("self_supervised"), configs_of(command)
    runs = train_rows(command, CODE, configs)
    if is_main_process():
        plot_curves(_panels(runs), command.folder(PAPER) / "self_supervised_curves.png", across=2)
    rows = [
        Row(method, {}, _cells(source, seeds, command), MEASURED, _note(configs[method], command))
        for method, seeds in runs.items()
    ]
    return [table_of(command, PAPER, "self_supervised", columns_of(command, source, runs), rows, runs, notes=NOTES)]


def configs_of(command: Command) -> dict[str, str]:
    """Method -> file in configs/, from the lower to the upper control; then the command's custom rows."""
    rows = with_custom_rows(command, CODE.printed("self_supervised"))["rows"]
    return {row["method"]: row["config"] for row in rows}


def _cells(source: Mapping[str, Any], runs: list[RowRun], command: Command) -> dict[str, Measured | None]:
    protocol = runs[0].evaluations["collapse"]["protocol"]
    cells = {}
    for column in source["columns"]:
        role, metric = column["measure"]
        if role == "collapse":  # no shares of pictures
            cells[column["key"]] = measured_over_seeds(
                [run.evaluations[role]["metrics"][metric] for run in runs],
                command.seeds,
                scale=command.scale,
                data=data_text(protocol),
                protocol=f"num_images {protocol['num_images']}, feature_dim {protocol['feature_dim']}",
                full_protocol=protocol,
            )
        else:
            cells[column["key"]] = measured_cell(runs, role, metric, command.scale)
    return cells


def _note(file: str, command: Command) -> str:
    """The trained experiment of a row in one line."""
    config = CODE.config(file, command.scale, [*command.overrides, *command.settings_of(file)])
    model, optim = config.model, config.optim
    size = f"{config.data.image_size} px, " + (
        "ResNet-50" if model.backbone == "resnet50" else f"ResNet of width {model.width}, blocks {list(model.blocks)}"
    )
    is_trained = config.method.name != "random_weights"
    return f"{size}; {optim.steps} steps of {optim.global_batch_size} pictures" if is_trained else size


def _panels(runs: Mapping[str, Sequence[RowRun]]) -> list[Curves]:
    """Course of the training: kNN accuracy of the backbone, and signs of collapse in the projections."""
    logs = {method: [read_log(run.files.log) for run in seeds] for method, seeds in runs.items()}
    # the log names the pictures: how many, and whether they are held out, depends on the size of the training set
    records = (record for of_seeds in logs.values() for log in of_seeds for record in log)
    part = next((record["data"] for record in records if record["event"] == "evaluate"), "")
    panels = [
        (f"kNN accuracy on {part}", "percent", "evaluate", lambda record: 100 * record["metrics"]["knn_acc1"]),
        ("std of the projections", "fraction", "train", lambda record: record["projection_channel_std"]),
        ("mean cosine of the projections", "cosine", "train", lambda record: record["projection_mean_cosine"]),
        ("effective rank of the projections", "directions", "train", lambda r: r["projection_effective_rank"]),
    ]
    drawn = [
        Curves(title, "step", unit, {label: _course(of_seeds, event, value) for label, of_seeds in logs.items()})
        for title, unit, event, value in panels
    ]
    # random weights have no course, and without run.evaluate_every the first panel is empty
    kept = [Curves(p.title, p.x_label, p.y_label, {k: v for k, v in p.curves.items() if v}) for p in drawn]
    return [panel for panel in kept if panel.curves]


def _course(
    logs: Sequence[Sequence[dict]], event: str, value: Callable[[dict], float]
) -> list[tuple[float, Sequence[float]]]:
    """(step, a value per seed) at the steps that all seeds have."""
    by_seed = [{record["step"]: value(record) for record in log if record["event"] == event} for log in logs]
    steps = sorted(set.intersection(*map(set, by_seed)))
    return [(step, [course[step] for course in by_seed]) for step in steps]
