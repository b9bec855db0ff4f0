"""The chapter's three figures, drawn from trained models instead of by hand.

figure1     two views of a picture and views of two pictures: cosines of projections (section 0.1.1)
figure2     cosines of a batch, its pictures beside its captions, with and without a temperature (0.1.2, Eq. 5)
figure3     the first pictures for a caption, and the first captions for a picture (0.1.3)

What the chapter's figures show was not in the text that was read; one for each section is inferred.
"""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from common.base.drawing import COLORS, FONT, GREY, SMALL, figure_with_panels, literal, write_figure
from common.base.random_keys import derive_key
from common.data.broken import readable_items
from common.data.order import permuted, seed_of
from common.data.pairs import open_retrieval_sets
from common.data.transforms import normalize
from common.data.views import stacked_views
from common.distributed import is_main_process
from common.evaluation.embed import CaptionRule, EmbeddedPairs, embed_pairs
from common.evaluation.retrieval import retrieval_ranks
from common.geometry import unit
from common.report.figures import Distributions, plot_distributions
from common.report.table import Table
from common.reproduce.command import Command
from common.reproduce.findings import Findings, findings_table
from common.reproduce.rows import PaperCode, RowRun
from common.reproduce.tables import train_rows
from common.run.checkpoint import last_checkpoint
from common.run.evaluation import this_device
from common.run.pictures import open_test_set, view_recipes
from contrastive_basics.evaluate import MODELS
from contrastive_basics.pretrain import MODELS as PICTURE_MODELS
from contrastive_basics.vision import tables as vision_tables

DECIDES = "evaluation"

NUM_VIEWED = 500  # test pictures, two views of each
BATCH = 256  # pairs whose cosines are taken
DRAWN = 16  # of them in the picture
QUERIES, RANKED = 3, 5  # captions and pictures that are looked for, and results of each
TEMPERATURES = {  # row -> config
    "learned": ("temperature learned", "table1_ours.yaml"),
    "fixed": ("temperature 0.07", "table1_fixed_temperature.yaml"),
    "none": ("no temperature", "table1_without_temperature.yaml"),
}
PAIRED = {  # columns of cosines: (label, unit, which is better)
    "pair_cosine": ("of a pair, mean", "cosine", None),
    "other_cosine": ("of two pairs, mean", "cosine", None),
}


# ------------------------------------------------------------------------------------------------ two views


def viewed_pictures(test: Any) -> list[Any]:
    """`NUM_VIEWED` test pictures in a fixed random order: folders of classes list one class after another."""
    order = permuted(np.arange(len(test)), len(test), seed_of(len(test))).tolist()
    return [item["image"] for item in readable_items(test, NUM_VIEWED, order)]


@torch.no_grad()
def cosines_of_views(run: RowRun) -> torch.Tensor:
    """(pictures, pictures) cosines of projections (else of features): first view of each row, second of each column."""
    config = run.config
    _, model = PICTURE_MODELS.load(last_checkpoint(run.files.checkpoints))
    encoder = model.encoder.to(this_device()).eval()
    pictures = viewed_pictures(open_test_set(config.data))
    recipes = view_recipes(config)[:2]
    seeds = [derive_key("views of a figure", number) for number in range(len(pictures))]
    embedded = []
    for recipe, views in zip(recipes, stacked_views(pictures, recipes, config.data.image_size, seeds)):
        parts = views.split(config.run.evaluation_batch_size)
        pixels = (normalize(part.to(this_device()), recipe.mean, recipe.std) for part in parts)
        embedded.append(torch.cat([unit(encoder(part)) for part in pixels]).cpu())
    return embedded[0] @ embedded[1].T


def figure1(command: Command) -> list[Table]:
    """Histograms for each method of learning from pictures alone, between random weights and supervision."""
    if not command.runs_at(vision_tables.SCALES, "there pictures are trained on row by row, by pretrain.py"):
        return []
    code, configs = vision_tables.CODE, vision_tables.configs_of(command)
    rows = {Path(file).stem.removeprefix("vision_"): method for method, file in configs.items()}
    runs = train_rows(command, code, {name: configs[method] for name, method in rows.items()})
    if not is_main_process():
        return []
    cosines = {name: [cosines_of_views(run) for run in seeds] for name, seeds in runs.items()}
    panels = [
        Distributions(rows[name], "cosine", {"two views of a picture": of_pairs, "views of two pictures": others})
        for name, matrices in cosines.items()
        for of_pairs, others in [parts_of(matrices[0])]
    ]
    plot_distributions(panels, command.folder(code.name) / "figure1_views.png", across=3)
    test_set = open_test_set(next(iter(runs.values()))[0].config.data)
    findings = Findings(
        name="figure1",
        caption="Two views of a picture beside views of two pictures, by method.",
        measured_on=test_set.name,
        protocol=f"{len(next(iter(cosines.values()))[0])} test pictures",
        settings={"pictures": NUM_VIEWED, "fingerprint": test_set.fingerprint},
        rows=rows,
        columns=PAIRED | {"nearest": ("second view nearest to the first of its picture", "percent", "higher")},
        values={
            (name, column): [measured(matrix)[column] for matrix in matrices]
            for name, matrices in cosines.items()
            for column in (*PAIRED, "nearest")
        },
        notes=["The histograms are of the first seed. Random weights and supervision have no head: their features."],
    )
    return [findings_table(command, code.name, findings, runs)]


# ------------------------------------------------------------------------------------------------ a batch of pairs


def parts_of(cosines: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, n) -> its diagonal, and all else as (n (n - 1),)."""
    return cosines.diagonal(), cosines[~torch.eye(len(cosines), dtype=torch.bool)]


def measured(cosines: torch.Tensor) -> dict[str, float]:
    """Means of the diagonal and of all else, and in how many percent of the rows the diagonal is the largest."""
    of_pairs, others = parts_of(cosines)
    right = (cosines.argmax(dim=1) == torch.arange(len(cosines))).double().mean()
    return {"pair_cosine": float(of_pairs.mean()), "other_cosine": float(others.mean()), "nearest": 100 * float(right)}


def figure2(command: Command, code: PaperCode) -> list[Table]:
    """The matrix of Eq. 5 for test pairs; below it how far pairs and strangers are apart, by temperature."""
    runs = train_rows(command, code, {name: config for name, (_, config) in TEMPERATURES.items()})
    embedded = {name: [embed_test(run, CaptionRule(per_image=1)) for run in seeds] for name, seeds in runs.items()}
    if not is_main_process():
        return []
    batches = {name: [batch_cosines(one) for one in of_seeds] for name, of_seeds in embedded.items()}
    labels = {name: label for name, (label, _) in TEMPERATURES.items()}
    draw_batches(
        {labels[name]: matrices[0] for name, matrices in batches.items()},
        command.folder(code.name) / "figure2_batch.png",
    )
    pairs, size = next(iter(embedded.values()))[0].pairs, len(next(iter(batches.values()))[0])
    findings = Findings(
        name="figure2",
        caption="Cosines of a batch of pairs, by temperature.",
        measured_on=pairs.name,
        protocol=f"{size} test pairs",
        settings={"batch": BATCH, "fingerprint": pairs.fingerprint},
        rows=labels,
        columns=PAIRED
        | {
            "nearest_i2t": ("own caption nearest to the picture", "percent", "higher"),
            "nearest_t2i": ("own picture nearest to the caption", "percent", "higher"),
        },
        values={
            (name, column): values
            for name, matrices in batches.items()
            for column, values in (
                *((column, [measured(matrix)[column] for matrix in matrices]) for column in PAIRED),
                ("nearest_i2t", [measured(matrix)["nearest"] for matrix in matrices]),
                ("nearest_t2i", [measured(matrix.T)["nearest"] for matrix in matrices]),
            )
        },
        chance={"nearest_i2t": 100 / size, "nearest_t2i": 100 / size},
        notes=[f"The picture shows {min(DRAWN, size)} pairs of the first seed."],
    )
    return [findings_table(command, code.name, findings, runs)]


def embed_test(run: RowRun, rule: CaptionRule) -> EmbeddedPairs:
    """The run's test set; call on every process."""
    encoder, pairs = MODELS.encoder_of(run.files, run.config), open_retrieval_sets(run.config.data)["test"]
    return embed_pairs(encoder, pairs, rule)


def batch_cosines(embedded: EmbeddedPairs) -> torch.Tensor:
    """(B, B): pictures as rows, captions as columns, a pair on the diagonal."""
    return embedded.images[:BATCH] @ embedded.texts[:BATCH].T


def draw_batches(batches: Mapping[str, torch.Tensor], path: Any) -> None:
    """One panel for each row, all with the same colours; writes the picture and its numbers."""
    figure, axes = figure_with_panels(len(batches), len(batches), 3.1 * len(batches), 3.0, 0.2)
    records, drawn = [], {label: matrix[:DRAWN, :DRAWN].numpy() for label, matrix in batches.items()}
    for axis, (label, matrix) in zip(axes, drawn.items()):
        shown = axis.imshow(matrix, vmin=-1, vmax=1, cmap="RdBu_r")
        axis.set_title(literal(label), fontsize=FONT)
        axis.set_xlabel("caption", fontsize=SMALL)
        axis.set_ylabel("picture", fontsize=SMALL)
        axis.tick_params(labelsize=SMALL)
        records += [(label, *place, float(value)) for place, value in np.ndenumerate(matrix)]
    figure.colorbar(shown, ax=axes, label="cosine", shrink=0.8)
    write_figure(figure, path, ("temperature", "picture", "caption", "cosine"), records)


# ------------------------------------------------------------------------------------------------ retrieval


class Ranking(NamedTuple):
    """A query and its first results: rows of the embedded set, best first, and which of them are right."""

    query: int
    results: list[int]
    right: list[bool]


def rankings(scores: torch.Tensor, is_right: torch.Tensor, queries: Sequence[int]) -> list[Ranking]:
    """First results of some rows of (queries, candidates) scores; equal scores go to the lower index.

    Args:
        is_right: bool, as scores.
    """
    orders = scores[list(queries)].argsort(dim=1, descending=True, stable=True)[:, :RANKED]
    return [Ranking(query, order.tolist(), is_right[query, order].tolist()) for query, order in zip(queries, orders)]


def figure3(command: Command, code: PaperCode) -> list[Table]:
    """Queries in equal steps through the test set, so that none is chosen by its result.

    The median of an even number of ranks is the lower of the two middle ones, a rank that occurs.
    """
    runs = train_rows(command, code, {"learned": TEMPERATURES["learned"][1]})
    values: dict[tuple[str, str], list[float]] = {}
    for number, run in enumerate(runs["learned"]):
        embedded = embed_test(run, CaptionRule())
        scores = embedded.images @ embedded.texts.T
        ranks = retrieval_ranks(scores, embedded.text_to_image)
        for direction, of_queries in (("i2t", ranks.image_to_text), ("t2i", ranks.text_to_image)):
            numbers = {
                "first": 100 * float((of_queries < 1).double().mean()),
                "among": 100 * float((of_queries < RANKED).double().mean()),
                "median": 1 + float(of_queries.double().median()),
            }
            for key, value in numbers.items():
                values.setdefault(("learned", f"{direction}_{key}"), []).append(value)
        if number == 0 and is_main_process():
            is_right = embedded.text_to_image == torch.arange(len(scores))[:, None]
            draw_rankings(
                embedded,
                rankings(scores.T, is_right.T, spread(len(embedded.texts))),
                rankings(scores, is_right, spread(len(embedded.images))),
                command.folder(code.name) / "figure3_retrieval.png",
            )
    if not is_main_process():
        return []
    findings = Findings(
        name="figure3",
        caption="Retrieval by cosines: rank of the first right answer.",
        measured_on=embedded.pairs.name,
        protocol=f"{len(embedded.images)} test pictures, {len(embedded.texts)} captions",
        settings={"fingerprint": embedded.pairs.fingerprint},
        rows={"learned": "CLIP-like, trained here"},
        columns={
            f"{direction}_{key}": (f"{words}, {label}", unit_of, better)
            for direction, words in (("t2i", "picture for a caption"), ("i2t", "caption for a picture"))
            for key, label, unit_of, better in (
                ("first", "right one first", "percent", "higher"),
                ("among", f"among the first {RANKED}", "percent", "higher"),
                ("median", "median rank", "rank", "lower"),
            )
        },
        values=values,
        notes=[
            "Ranks are among the whole test set; Table 1 takes galleries of data.gallery pictures.",
            "The median of an even number of ranks is the lower of the two middle ones.",
            "The picture is of the first seed. Photographs in it are those of the data set, with its licence.",
        ],
    )
    return [findings_table(command, code.name, findings, runs)]


def spread(count: int) -> list[int]:
    """`QUERIES` numbers in equal steps through range(count)."""
    return sorted({number * count // QUERIES for number in range(QUERIES)})


def draw_rankings(
    embedded: EmbeddedPairs, of_captions: Sequence[Ranking], of_pictures: Sequence[Ranking], path: Any
) -> None:
    """A line for each query, its results from the left; a blue frame and bold words are right answers."""
    captions = embedded.captions
    lines = len(of_captions) + len(of_pictures)
    figure, axes = figure_with_panels(lines * (1 + RANKED), 1 + RANKED, 1.5 * (1 + RANKED), 1.5, 0.4)
    for axis in axes:
        axis.set_xticks([])
        axis.set_yticks([])
        axis.spines[:].set_visible(False)

    def picture(row: int) -> np.ndarray:
        return np.asarray(embedded.pairs[embedded.indices[row]]["image"])

    def write(axis, text: str, **look: Any) -> None:
        axis.text(0.5, 0.5, literal(textwrap.fill(text, 22)), ha="center", va="center", fontsize=SMALL - 2, **look)

    records = []
    for line, ranking in enumerate([*of_captions, *of_pictures]):
        query_axis, *result_axes = axes[line * (1 + RANKED) : (line + 1) * (1 + RANKED)]
        is_caption = line < len(of_captions)
        if is_caption:
            write(query_axis, captions[ranking.query])
        else:
            query_axis.imshow(picture(ranking.query))
        for place, (axis, row, right) in enumerate(zip(result_axes, ranking.results, ranking.right)):
            if is_caption:
                axis.imshow(picture(row))
                axis.spines[:].set(visible=True, color=COLORS[0] if right else GREY, linewidth=4 if right else 0.5)
            else:
                look = {"color": COLORS[0], "fontweight": "bold"} if right else {"color": GREY}
                write(axis, captions[row], **look)
            if line == 0:
                axis.set_title(f"{place + 1}", fontsize=SMALL)
            records.append(("caption" if is_caption else "picture", line, ranking.query, place + 1, row, int(right)))
    axes[0].set_title("query", fontsize=SMALL)
    figure.supxlabel("blue frame or bold words: a right answer", fontsize=SMALL)
    write_figure(figure, path, ("query_kind", "line", "query", "place", "result", "right"), records)
