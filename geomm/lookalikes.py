"""Similar captions with different meanings: does a geodesic separate them where the cosine does not (Fig. 1)?

    make reproduce-lookalikes PAPER=geomm SEEDS=3
    make reproduce-lookalikes PAPER=geomm SCALE=photos DATA=/data/flickr8k WEIGHTS=/data/weights \\
        SET="sugarcrepe.pairs=/data/sugarcrepe.json sugarcrepe.images=/data/coco/val2017"

Each image has a true caption and a false one, with swapped words or one word replaced. Both join the graph of the
trained text pool like new keys, and the image should be nearer to the true one. Photographs use SugarCrepe's pairs.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from common.base.config import ConfigError
from common.base.fields import path_setting
from common.base.settings import DataConfig
from common.data.annotated import AnnotatedPictures, read_sugarcrepe
from common.data.pairs import open_retrieval_sets
from common.distributed import is_main_process
from common.report.table import Table
from common.reproduce.command import Command
from common.reproduce.findings import Findings, findings_table
from common.reproduce.rows import PaperCode, RowRun
from common.reproduce.tables import train_rows
from common.run.checkpoint import last_checkpoint
from common.run.evaluation import reading_features, this_device
from geomm.evaluate import load_encoder
from geomm.geodesic import geodesic_distance, nearest_centers
from geomm.hierarchy import build_graph
from geomm.hierarchy_error import check_filled, keys_of

DECIDES = "evaluation"

MODELS = {  # key -> config, label
    "cosine": ("clip.yaml", "trained by the cosine"),
    "geodesic": ("clip_geo.yaml", "trained by the geodesic distance"),
}
READINGS = {"nearest": "Eq. 3", "knn": "nearest centres", "knn_local": "nearest centres, local"}
COLUMNS = {
    "cosine": ("cosine", "percent", "higher"),
    **{key: (f"geodesic: {label}", "percent", "higher") for key, label in READINGS.items()},
    "one_cluster": ("pairs in one cluster", "percent", None),
}


@dataclass(frozen=True)
class SugarCrepeFiles:
    """Paths of the pairs for photographs."""

    pairs: str = path_setting()  # SugarCrepe's file of a group, or one with all groups
    # folder of COCO's val2017, "" = beside the file; pairs whose image is missing are left out
    images: str = path_setting()


@dataclass(frozen=True)
class LookalikesConfig:
    """Settings of `make reproduce-lookalikes` beside those of a row: `sugarcrepe.pairs=...`."""

    sugarcrepe: SugarCrepeFiles = field(default_factory=SugarCrepeFiles)


@dataclass(frozen=True)
class Lookalikes:
    """Images, and triples (position of an image, its caption, the false one). data: their name in the table."""

    pictures: Any
    triples: list[tuple[int, str, str]]
    data: str


def open_lookalikes(data: DataConfig, files: SugarCrepeFiles) -> Lookalikes:
    """The hard negatives of the scenes' test set, or SugarCrepe's.

    Raises:
        ConfigError: photographs without pairs, or scenes with a file of pairs.
    """
    if data.source == "scenes":
        if files != SugarCrepeFiles():
            raise ConfigError(f"sugarcrepe.pairs = {files.pairs!r} on scenes; expected: at a scale of photographs")
        pairs = open_retrieval_sets(data)["test"]
        triples = [(index, *texts) for index in range(len(pairs)) for texts in pairs.hard_negatives(index)]
        return Lookalikes(pairs, triples, f"{pairs.name} ({pairs.fingerprint[:8]})")
    if not files.pairs:
        raise ConfigError("sugarcrepe.pairs is empty; expected: SugarCrepe's file of pairs, with sugarcrepe.images")
    rows, images = read_sugarcrepe(files.pairs), Path(files.images).expanduser() if files.images else None
    pictures = AnnotatedPictures(rows, files.pairs, images, max_broken_share=1.0)
    rows_read = [pictures.row(index) for index in range(len(pictures))]
    triples = [(index, row["caption"], row["negative_caption"]) for index, row in enumerate(rows_read)]
    description = (
        f"SugarCrepe ({pictures.fingerprint[:8]}), {len(triples):,} of {len(rows.rows):,} pairs have their picture"
    )
    return Lookalikes(pictures, triples, description)


def share_distinguished(true: torch.Tensor, false: torch.Tensor) -> float:
    """Percent of pairs whose true caption is nearer; a tie, or two unreachable captions, counts one half."""
    return 100 * float(((true < false).float() + 0.5 * (true == false).float()).mean())


def measure(run: RowRun, pairs: Lookalikes) -> dict[str, float]:
    """Shares of pairs that each distance separates on one run's embeddings.

    `one_cluster`: of pairs with one centre. `measured`: number of pairs whose picture can be read.
    """
    checkpoint = last_checkpoint(run.files.checkpoints)
    config, encoder = load_encoder(checkpoint, this_device(), config=run.config)
    keys = keys_of(checkpoint)
    images, readable = reading_features(encoder, config).images(pairs.pictures)
    triples = [triple for triple in pairs.triples if readable[triple[0]]]
    images = images.float()[[index for index, _, _ in triples]]
    true, false = (encoder.texts([triple[side] for triple in triples]).float() for side in (1, 2))
    method = config.method
    graph = build_graph(keys, method.branching, method.num_neighbors, kind=method.graph)
    shares = {"cosine": share_distinguished(-(images * true).sum(dim=1), -(images * false).sum(dim=1))}
    clusters = [nearest_centers(texts, graph.cluster_centers) for texts in (true, false)]
    for name in READINGS:
        distances = []
        for texts, (nearest, offset) in zip((true, false), clusters):
            parts = []
            for some in torch.arange(len(texts)).split(256):
                joined = replace(graph, nearest_center=nearest[some], offset=offset[some])
                attached = name, method.num_attached, method.local
                parts.append(geodesic_distance(images[some], texts[some], joined, *attached).diagonal())
            distances.append(torch.cat(parts))
        shares[name] = share_distinguished(*distances)
    one_cluster = 100 * float((clusters[0][0] == clusters[1][0]).float().mean())
    return shares | {"one_cluster": one_cluster, "measured": len(triples)}


def lookalikes(command: Command, code: PaperCode) -> list[Table]:
    """True against false captions, by the cosine and by geodesic distances, for models trained with either."""
    options, command = command.split(LookalikesConfig)
    config = code.config(MODELS["cosine"][0], command.scale, command.overrides)
    check_filled(config)  # a row with a graph refuses too few steps itself
    pairs = open_lookalikes(config.data, options.sugarcrepe)
    runs = train_rows(command, code, {name: config for name, (config, _) in MODELS.items()})
    # on every process, as embedding gathers
    measured = {name: [measure(run, pairs) for run in seeds] for name, seeds in runs.items()}
    if not is_main_process():
        return []
    first, measured_pairs = next(iter(runs.values()))[0], next(iter(measured.values()))[0]["measured"]
    unread = len(pairs.triples) - measured_pairs
    findings = Findings(
        name="lookalikes",
        caption="Pictures that are nearer to their caption than to the same with words swapped or one replaced.",
        data=f"{first.training_data}; hard negatives of {pairs.data}",
        measured_on=f"hard negatives of {pairs.data}",
        protocol="all pairs of the test set" + (f", {unread} of unreadable pictures left out" if unread else ""),
        settings={"rows": {name: config for name, (config, _) in MODELS.items()}},
        rows={name: label for name, (_, label) in MODELS.items()},
        columns=COLUMNS,
        values={
            (name, column): [shares[column] for shares in seeds]
            for name, seeds in measured.items()
            for column in COLUMNS
        },
        chance=dict.fromkeys(("cosine", *READINGS), 50.0),
    )
    return [findings_table(command, code.name, findings, runs)]
