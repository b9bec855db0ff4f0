"""Distances of trained embeddings from the origin and from their mean: Figures 2, 4, 6, 7 and 8, and the printed norms
of the mean.

Every part loads or trains its rows, draws the histograms of the first seed, and returns a table of their statistics
over all seeds. Claims refer to these as experiment["<part>"]["<model>_<point>_<number>"].
"""

from collections.abc import Mapping

from common.distributed import is_main_process
from common.report.figures import Distributions, plot_distributions
from common.report.table import MEASURED, Column, Row, Table, measured_over_seeds
from common.reproduce.command import Command
from common.reproduce.findings import Findings, findings_table
from common.reproduce.rows import PaperCode
from common.reproduce.tables import printed_cells, table_of, train_rows
from euclip.distributions import (
    NUM_PICTURES,
    distances_from,
    mean_norm,
    panels_of,
    reference_points,
    summarise,
    training_sample,
)
from euclip.loaded_rows import B16, load_run

DECIDES = "nothing"

ROOT_NORMS = {  # row of the printed norms -> its config
    "EuCLIP ViT-B/32, lambda=0": "table4_euclidean_squared.yaml",
    "EuCLIP ViT-B/32": "table4_euclip.yaml",
    "EuCLIP ViT-B/16": B16["EuCLIP"],
    "EuCLIP ViT-B/16, ln": "b16_euclip_ln.yaml",
}
LABELS = {
    "euclip": "EuCLIP",
    "clip": "CLIP",
    "meru": "MERU",
    "euclip_lambda0": "EuCLIP, lambda=0",
    "meru_lambda0": "MERU, lambda=0",
    "euclip_ln": "EuCLIP, ln",
}
COLUMNS = {  # of `summarise`; none of them is a quality
    "image_mean": ("mean distance, images", "distance", None),
    "text_mean": ("mean distance, texts", "distance", None),
    "overlap": ("overlap of the histograms", "fraction", None),
    "image_farther": ("images farther out than their text", "fraction", None),
    "generic_nearer": ("more generic caption nearer", "fraction", "higher"),
    "within_half": ("embeddings within 0.5", "fraction", None),
    "mean_norm": ("norm of the mean embedding", "norm", None),
}
NOTES = (
    "Distances: Euclidean, not squared; geodesic for MERU; (1 - cos) / 2 in [0, 1] for CLIP. Rows of different "
    "geometries have different units.",
    "More generic caption nearer: share of the pairs of captions of one scene. Norm of the mean: of all embeddings, "
    "both modalities weighing alike, before any normalisation.",
)


def figure2(command: Command, code: PaperCode) -> list[Table]:
    """Figure 2: from the root, models of Table 1; CLIP's root is the mean."""
    return _distances(command, code, {key: B16[LABELS[key]] for key in ("euclip", "clip", "meru")}, 3, only_root=True)


def figure4(command: Command, code: PaperCode) -> list[Table]:
    """Figure 4: from the origin, without (left) and with (right) the entailment loss; a row for each geometry."""
    configs = {
        "euclip_lambda0": "table4_euclidean_squared.yaml",
        "euclip": "table4_euclip.yaml",
        "meru_lambda0": "table4_hyperbolic.yaml",
        "meru": "table4_meru.yaml",
    }
    return _distances(command, code, configs, 2, only_root=True)


def figure6(command: Command, code: PaperCode) -> list[Table]:
    """Figure 6: MERU, from the origin (top) and from the mean (bottom), without and with the entailment loss."""
    return _distances(command, code, {"meru_lambda0": "table4_hyperbolic.yaml", "meru": "table4_meru.yaml"}, 2)


def figure7(command: Command, code: PaperCode) -> list[Table]:
    """Figure 7: EuCLIP, from the origin (top) and from the mean (bottom), without and with the entailment loss."""
    configs = {"euclip_lambda0": "table4_euclidean_squared.yaml", "euclip": "table4_euclip.yaml"}
    return _distances(command, code, configs, 2)


def figure8(command: Command, code: PaperCode) -> list[Table]:
    """Figure 8: EuCLIP with ViT-B/16, without and with the final LayerNorm."""
    return _distances(command, code, {"euclip": B16["EuCLIP"], "euclip_ln": "b16_euclip_ln.yaml"}, 2)


def _distances(
    command: Command, code: PaperCode, configs: Mapping[str, str], across: int, only_root: bool = False
) -> list[Table]:
    """Histograms and their statistics.

    Args:
        configs: key of `LABELS` -> config.
        across: panels side by side.
        only_root: measures from the root; else from the origin and from the mean.
    """
    runs = train_rows(command, code, configs)
    values: dict[tuple[str, str], list[float]] = {}
    labels: dict[str, str] = {}
    panels: list[tuple[int, Distributions]] = []
    by_level: list[Distributions] = []
    # statistics of every seed; panels only of the first, as a figure shows one model
    for key, seeds in runs.items():
        for run in seeds:
            config, encoder = load_run(run)
            geometry, sample = encoder.model.geometry, training_sample(encoder, config)
            points = list(reference_points(geometry, sample).items())
            root, points = dict(points[:1]), dict(points[: 1 if only_root else None])
            for name, point in points.items():
                labels[f"{key}_{name}"] = f"{LABELS[key]}, from the {name}"
                for number, value in summarise(distances_from(geometry, sample, point), sample).items():
                    values.setdefault((f"{key}_{name}", number), []).append(value)
            if run is seeds[0]:
                panels += enumerate(panels_of(LABELS[key], geometry, sample, points))
                by_level += panels_of(LABELS[key], geometry, sample, root, levels=True)
    if not is_main_process():
        return []
    folder = command.folder(code.name)
    # the panels lie model by model, the paper's figures point by point
    panels.sort(key=lambda placed: placed[0])  # a row of panels for each point
    plot_distributions([panel for _, panel in panels], folder / f"{command.part}_distances.png", across)
    if by_level:
        plot_distributions(by_level, folder / f"{command.part}_levels.png", across)
    known = {number for _, number in values}
    findings = Findings(
        name=command.part,
        caption=f"Statistics of the histograms of {command.part}, which the paper prints only as a picture.",
        measured_on=sample.name,
        protocol="all captions",
        settings={"num_pictures": NUM_PICTURES},
        rows=labels,
        columns={number: label for number, label in COLUMNS.items() if number in known},
        values={place: per_seed for place, per_seed in values.items() if place[1] in COLUMNS},
        chance={"generic_nearer": 0.5, "image_farther": 0.5} if "generic_nearer" in known else {"image_farther": 0.5},
        notes=NOTES,
    )
    return [findings_table(command, code.name, findings, runs)]


def root_norms(command: Command, code: PaperCode) -> list[Table]:
    """Norms of the mean embedding, printed with Figures 7 and 8."""
    source = code.printed("root_norms")
    runs = train_rows(command, code, ROOT_NORMS)
    (column,) = source["columns"]
    rows = []
    for row in source["rows"]:
        norms = []
        for run in runs[row["method"]]:
            config, encoder = load_run(run)
            sample = training_sample(encoder, config)
            norms.append(mean_norm(sample))
        cell = measured_over_seeds(
            norms, command.seeds, scale=command.scale, data=sample.name, protocol="all captions, both modalities alike"
        )
        rows.append(Row(row["method"], printed_cells(source, row), {column["key"]: cell}, MEASURED))
    columns = [Column(column["key"], column["label"], "norm", sample.name, None)]  # at no scale all training pairs
    return [table_of(command, code.name, "root_norms", columns, rows, runs)]
