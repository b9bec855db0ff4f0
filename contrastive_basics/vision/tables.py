"""The part `self_supervised`: all methods of learning from images only, between random weights and supervision.

The chapter prints no numbers for this. Methods share backbone, data, number of samples and evaluation. They differ in
the cost of a step, which the log records: MoCo trains one of its two encoders, supervision uses one view.
"""

from collections.abc import Callable, Mapping, Sequence

from common.distributed import is_main_process
from common.evaluation.protocol import data_text
from common.report.figures import Curves, plot_curves
from common.report.table import MEASURED, Column, Measured, Row, Table, measured_over_seeds
from common.reproduce.command import Command
from common.reproduce.image_rows import image_rows
from common.reproduce.rows import RowRun
from common.reproduce.tables import measured_cell, table_of, train_rows
from common.run.log import read_log
from contrastive_basics.pretrain import PAPER, pretrain, reevaluate
from contrastive_basics.vision.config import VisionConfig

DECIDES = "nothing"

CODE = image_rows(PAPER, VisionConfig, pretrain, reevaluate)
ROWS = {  # from the lower to the upper control; a row's config is configs/vision_<name>.yaml
    "random_weights": "random weights",
    "simclr": "SimCLR",
    "moco_v1": "MoCo v1",
    "moco_v2": "MoCo v2",
    "moco_v3": "MoCo v3",
    "simsiam": "SimSiam",
    "supervised": "supervised",
}
SCALES = ("smoke", "demo", "photos")
COLUMNS = (
    Column("knn_acc1", "kNN acc", better="higher"),
    Column("linear_probe_acc1", "linear probe acc", better="higher"),
    Column("channel_std", "feature std", "fraction", better="higher"),
    Column("mean_cosine", "mean cosine", "fraction", better="lower"),
    Column("effective_rank", "effective rank", "directions", better="higher"),
)
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
    runs = train_rows(command, CODE, {name: row_file(name) for name in ROWS})
    if is_main_process():
        plot_curves(_panels(runs), command.folder(PAPER) / "self_supervised_curves.png", across=2)
    rows = [Row(ROWS[name], {}, _cells(seeds, command), MEASURED, _note(name, command)) for name, seeds in runs.items()]
    caption = "Learning from pictures alone: what the backbone's features are worth, and whether they collapsed."
    return [table_of(command, PAPER, "self_supervised", COLUMNS, rows, runs, caption=caption, notes=NOTES)]


def row_file(name: str) -> str:
    """File of a row of `ROWS` in configs/."""
    return f"vision_{name}.yaml"


def _cells(runs: list[RowRun], command: Command) -> dict[str, Measured]:
    accuracies = {f"{role}_acc1": measured_cell(runs, role, "acc1", command.scale) for role in ("knn", "linear_probe")}
    protocol = runs[0].evaluations["collapse"]["protocol"]
    signs = {
        name: measured_over_seeds(
            [run.evaluations["collapse"]["metrics"][name] for run in runs],
            command.seeds,
            scale=command.scale,
            data=data_text(protocol),
            protocol=f"num_images {protocol['num_images']}, feature_dim {protocol['feature_dim']}",
            full_protocol=protocol,
        )
        for name in ("channel_std", "mean_cosine", "effective_rank")
    }
    return accuracies | signs


def _note(name: str, command: Command) -> str:
    """The trained experiment of a row in one line."""
    file = row_file(name)
    config = CODE.config(file, command.scale, [*command.overrides, *command.settings_of(file)])
    model, optim = config.model, config.optim
    size = f"{config.data.image_size} px, " + (
        "ResNet-50" if model.backbone == "resnet50" else f"ResNet of width {model.width}, blocks {list(model.blocks)}"
    )
    return size if name == "random_weights" else f"{size}; {optim.steps} steps of {optim.global_batch_size} pictures"


def _panels(runs: Mapping[str, Sequence[RowRun]]) -> list[Curves]:
    """Course of the training: kNN accuracy of the backbone, and signs of collapse in the projections."""
    logs = {ROWS[name]: [read_log(run.files.log) for run in seeds] for name, seeds in runs.items()}
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
