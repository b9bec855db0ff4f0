"""Figure 6: distances of pairs, cross-modal and within a modality, in and out of the training domain.

Distances d = -similarity, without the temperature: smaller is closer, and those of an inner product may be negative.
Four kinds of pairs: an image and its caption, an image and another image's caption, two images, two captions of
different images. The paper prints no sample sizes and no numbers; those beside the histograms are ours.
"""

from collections.abc import Mapping

import numpy as np
import torch

from common.base.random_keys import derive_key
from common.base.settings import DataConfig
from common.data.pairs import Pairs, open_retrieval_sets
from common.data.scenes import SceneDataset
from common.distributed import is_main_process
from common.evaluation.embed import CaptionRule, EmbeddedPairs, embed_pairs
from common.geometry import Geometry
from common.report.figures import Distributions, plot_distributions
from common.report.table import Table
from common.reproduce.command import Command
from common.reproduce.findings import Findings, findings_table
from common.reproduce.rows import PaperCode
from common.reproduce.tables import train_rows
from oblique_topology.loaded_rows import trained_model

DECIDES = "evaluation"

NUM_PAIRS = 10_000  # of each kind; the paper does not state its number
KINDS = {
    "positive": "picture and own caption",
    "negative": "picture and other caption",
    "image_image": "two pictures",
    "text_text": "two captions",
}
TOPOLOGIES = {  # key -> row of Table 3
    "sphere": "Sphere, e^2.64",
    "euclidean": "Euclidean, e^2.64",
    "geodesic": "Ob(64, 8), geodesic, e^2.64",
    "inner_product": "Ob(64, 8), inner product, e^2.64",
}
DOMAINS = {"in_domain": "in domain", "out_domain": "out of domain"}
COLUMNS = {
    **{
        f"{kind}_{what}": (f"{label}, {name}", "distance", None)
        for kind, label in KINDS.items()
        for what, name in (("mean", "average"), ("std", "std"))
    },
    "auc": ("AUC, positives against negatives", "fraction", "higher"),
    "image_image_closer": ("two pictures closer than a positive", "fraction", "higher"),
    "text_text_closer": ("two captions closer than a positive", "fraction", "higher"),
}


def sample_distances(
    geometry: Geometry,
    images: torch.Tensor,
    texts: torch.Tensor,
    text_to_image: torch.Tensor,
    count: int,
    generator: torch.Generator,
) -> dict[str, torch.Tensor]:
    """Distances of pairs of all four kinds; no image or caption is paired with itself.

    Args:
        geometry: its paired similarity is negated.
        images, texts: embeddings, (num_images, ...) and (num_texts, ...).
        text_to_image: (num_texts,) row of each caption's image.
        count: pairs of each kind, drawn with replacement; positives without, so at most all of them.
    Returns:
        Kind -> (count,) distances.
    Raises:
        ValueError: fewer than two images with captions.
    """
    if len(text_to_image.unique()) < 2:
        raise ValueError("distances of negatives need at least two pictures with captions")

    def draw(size: int) -> torch.Tensor:
        return torch.randint(size, (count,), generator=generator)

    def another_picture(than: torch.Tensor) -> torch.Tensor:
        return (than + 1 + draw(len(images) - 1)) % len(images)

    def distance(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return -geometry.paired_similarity(first, second)

    matched = torch.randperm(len(texts), generator=generator)[:count]
    stranger, one, first, second = draw(len(texts)), draw(len(images)), draw(len(texts)), draw(len(texts))
    while (same := text_to_image[first] == text_to_image[second]).any():
        second = torch.where(same, draw(len(texts)), second)
    return {
        "positive": distance(images[text_to_image[matched]], texts[matched]),
        "negative": distance(images[another_picture(text_to_image[stranger])], texts[stranger]),
        "image_image": distance(images[one], images[another_picture(one)]),
        "text_text": distance(texts[first], texts[second]),
    }


def chance_to_be_closer(closer: torch.Tensor, farther: torch.Tensor) -> float:
    """P(a < b) + P(a = b) / 2 for independent draws, a of the first and b of the second: the area under the ROC."""
    from sklearn.metrics import roc_auc_score  # slow to import, and only this figure needs it

    labels = np.concatenate([np.ones(len(closer)), np.zeros(len(farther))])
    return float(roc_auc_score(labels, -torch.cat([closer, farther]).double().numpy()))


def statistics_of(distances: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The numbers of one row by key of COLUMNS."""
    numbers = {f"{kind}_mean": float(values.double().mean()) for kind, values in distances.items()}
    numbers |= {f"{kind}_std": float(values.double().std()) for kind, values in distances.items()}
    numbers["auc"] = chance_to_be_closer(distances["positive"], distances["negative"])
    for kind in ("image_image", "text_text"):
        numbers[f"{kind}_closer"] = chance_to_be_closer(distances[kind], distances["positive"])
    return numbers


def open_domains(data: DataConfig) -> dict[str, Pairs]:
    """Test sets in and out of the domain; the latter are scenes of another domain, or data.second_test."""
    sets = open_retrieval_sets(data)
    domains = {"in_domain": sets["test"]}
    if data.source == "scenes":
        numbers = data.num_test, data.image_size
        domains["out_domain"] = SceneDataset("test_other_domain", *numbers, num_captions=data.num_captions)
    elif "second_test" in sets:
        domains["out_domain"] = sets["second_test"]
    return domains


def figure6(command: Command, code: PaperCode) -> list[Table]:
    """Histograms and their statistics for the rows of Table 3 that start at e^2.64."""
    configs = {row["method"]: row["config"] for row in code.printed("table3")["rows"] if "config" in row}
    runs = train_rows(command, code, {topology: configs[method] for topology, method in TOPOLOGIES.items()})
    drawn: dict[tuple[str, str], dict[str, torch.Tensor]] = {}  # of the first seed
    values: dict[tuple[str, str], list[float]] = {}
    tests: dict[str, dict[str, str]] = {}
    for topology, seeds in runs.items():
        for run in seeds:
            config, encoder = trained_model(run)
            for domain, pairs in open_domains(config.data).items():
                embedded = embed_pairs(encoder, pairs, CaptionRule())  # on all processes
                distances = _distances(encoder.model.geometry, embedded, run.seed)
                drawn.setdefault((topology, domain), distances)
                tests[domain] = {"name": pairs.name, "fingerprint": pairs.fingerprint}
                for column, value in statistics_of(distances).items():
                    values.setdefault((f"{topology}_{domain}", column), []).append(value)
    # embedding gathers over processes; from here only the main process writes
    if not is_main_process():
        return []
    panels = [
        Distributions(
            f"{TOPOLOGIES[topology].removesuffix(', e^2.64')}, {DOMAINS[domain]}",
            "distance d = -similarity",
            {label: distances[kind] for kind, label in KINDS.items()},
        )
        for (topology, domain), distances in drawn.items()  # a row of panels for each topology, which has its own unit
    ]
    plot_distributions(panels, command.folder(code.name) / "distance_distributions_by_topology.png", len(tests))
    findings = Findings(
        name="distance_distributions",
        caption="Distances of positive and negative pairs, cross-modal and within a modality (Figure 6).",
        measured_on=", ".join(test["name"] for test in tests.values()),
        protocol=f"up to {NUM_PAIRS} pairs of each kind",
        settings={"num_pairs": NUM_PAIRS, "sets": tests},
        rows={
            f"{topology}_{domain}": f"{TOPOLOGIES[topology]}, {DOMAINS[domain]}"
            for domain in tests
            for topology in runs
        },
        columns=COLUMNS,
        values=values,
        chance={"auc": 0.5, "image_image_closer": 0.5, "text_text_closer": 0.5},
        notes=["Distances of different topologies have different units; compare within a row, or the fractions."],
    )
    return [findings_table(command, code.name, findings, runs)]


def _distances(geometry: Geometry, embedded: EmbeddedPairs, seed: int) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(derive_key("distances", seed))
    return sample_distances(geometry, embedded.images, embedded.texts, embedded.text_to_image, NUM_PAIRS, draws)
