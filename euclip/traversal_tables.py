"""Walks of trained rows to their root: Tables 2, 3, 6 and 7 and Figure 5.

Every part loads or trains its rows and returns its tables. On scenes it is known which captions are true and how
specific they are. Table 6 therefore has a second table: how often a walk runs from specific to generic, and how many of
the captions on it are true. Other images and captions, as of traverse.py, for example the paper's:

    make reproduce-table6 PAPER=euclip SET="traversal.pictures=<folder> traversal.captions=pexels_text.json"
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from common.base.fields import path_setting
from common.distributed import is_main_process
from common.report.figures import Distributions, plot_distributions
from common.report.statistics import bootstrap_interval
from common.report.table import MEASURED, Column, Measured, Row, Table, measured_over_seeds
from common.reproduce.command import Command
from common.reproduce.findings import Findings, findings_table
from common.reproduce.rows import PaperCode
from common.reproduce.tables import Runs, printed_cells, table_of, train_rows
from euclip.loaded_rows import B16, load_run
from euclip.traversal import NUM_POINTS, mean_score, met
from euclip.traversal_data import (
    NUM_WALKS,
    Embedded,
    Task,
    Walks,
    embed_task,
    model_root,
    open_task,
    read_pool,
    walk_all,
    walk_task,
)

DECIDES = "nothing"


@dataclass(frozen=True)
class WalkFiles:
    """Images where walks start, and captions; "" = those of the test set."""

    pictures: str = path_setting()  # folder of image files, or tar shards
    captions: str = path_setting()  # file, see `read_pool`

    def task(self, config: Any) -> Task:
        """Images and captions for a config's data; ValueError for files that cannot be used."""
        pool = read_pool(self.captions) if self.captions else None
        if self.pictures:
            return open_task(self.pictures, config.data.image_size, NUM_WALKS, pool)
        task = walk_task(config)
        return task if pool is None else replace(task, pool=pool)


@dataclass(frozen=True)
class WalkConfig:
    """`make reproduce-table6 ... SET="traversal.pictures=<folder> traversal.captions=<file>"`."""

    traversal: WalkFiles = field(default_factory=WalkFiles)


@dataclass(frozen=True)
class Walk:
    """One row: key in claims, model, and K of the filter."""

    key: str
    model: str
    min_radius: float | None


ROWS = {
    "CLIP, no filter": Walk("clip", "CLIP", None),
    "EuCLIP, no filter": Walk("euclip", "EuCLIP", None),
    "EuCLIP, filter K=0.8": Walk("euclip_08", "EuCLIP", 0.8),
    "MERU, no filter": Walk("meru", "MERU", None),
    "MERU, filter K=0.1": Walk("meru_01", "MERU", 0.1),
    "EuCLIP, filter K=0.3": Walk("euclip_03", "EuCLIP", 0.3),
    "EuCLIP, filter K=0.7": Walk("euclip_07", "EuCLIP", 0.7),
    "MERU, filter K=0.8": Walk("meru_08", "MERU", 0.8),
}
MERU_ROWS = {
    "MERU trained here, no filter": ROWS["MERU, no filter"],
    "MERU trained here, filter K=0.1": ROWS["MERU, filter K=0.1"],
}
EXAMPLES = 4  # pictures of Tables 2 and 3
SCORES = {  # of `walk_scores` -> label, unit, which is better
    "captions": ("mean number of captions", "captions", "higher"),
    "monotone": ("never back to more specific", "fraction", "higher"),
    "monotone_by_chance": ("never back, by chance", "fraction", None),
    "kendall_tau": ("Kendall's tau, point and level", "tau", "higher"),
    "true_share": ("captions known to be true of the picture", "fraction", "higher"),
    "first_level": ("level of the first caption", "level", None),
    "last_level": ("level of the last caption", "level", None),
}
NOTES = (
    "Levels count from 0, the most specific caption of a picture. 'Never back': share of the walks past two captions "
    "or more that come to no caption more specific than the one before; 'by chance': if they came in random order.",
)


@dataclass(frozen=True)
class Walked:
    """The walks of all rows.

    by_row: label of a row -> its walks, one entry per seed. roots: of the models, as text.
    embedded: the task as the last model embeds it.
    """

    by_row: Mapping[str, Sequence[Walks]]
    roots: Mapping[str, str]
    embedded: Embedded

    @property
    def data(self) -> str:
        task = self.embedded.task
        return f"{len(self.embedded.rows)} pictures of {task.name}, {task.pool.name}"

    @property
    def note(self) -> str:
        return f"Roots: {'; '.join(f'{model} {what}' for model, what in self.roots.items())}."

    @property
    def protocol(self) -> str:
        return f"{len(self.embedded.task.pool.tags)} captions, walks of {NUM_POINTS} points"


def train_and_walk(
    command: Command, code: PaperCode, models: Mapping[str, str], rows: Mapping[str, Walk]
) -> tuple[Runs, Walked]:
    """Trains the models, loads every run once, and walks with all filters of its rows.

    Args:
        models: name -> config.
        rows: label -> model and filter.
    """
    options, command = command.split(WalkConfig)
    files = options.traversal
    files.task(code.config(next(iter(models.values())), command.scale, command.overrides))  # wrong files fail first
    runs = train_rows(command, code, models)
    by_row: dict[str, list[Walks]] = {label: [] for label in rows}
    roots: dict[str, str] = {}
    for model, seeds in runs.items():
        for run in seeds:
            config, encoder = load_run(run)
            embedded = embed_task(encoder, files.task(config))
            root, roots[model] = model_root(encoder, config, embedded.captions)
            for label, row in rows.items():
                if row.model == model:
                    by_row[label].append(walk_all(encoder, embedded, root, row.min_radius))
    return runs, Walked(by_row, roots, embedded)


def table6(command: Command, code: PaperCode) -> list[Table]:
    """Table 6: how many captions the models of Table 1 meet; where a hierarchy is known, how good the walks are."""
    runs, walked = train_and_walk(command, code, B16, ROWS)
    table = _mean_captions(command, code, "table6", runs, walked)
    return [table] + ([_traversal(command, code, walked, runs)] if is_main_process() else [])


def table7(command: Command, code: PaperCode) -> list[Table]:
    """Table 7: as Table 6, for the MERU authors' checkpoint, which is not included; beside it the MERU trained here."""
    runs, walked = train_and_walk(command, code, {"MERU": B16["MERU"]}, MERU_ROWS)
    return [_mean_captions(command, code, "table7", runs, walked)]


def _mean_captions(command: Command, code: PaperCode, table_id: str, runs: Runs, walked: Walked) -> Table:
    """The number of captions met, mean over pictures, beside the printed one."""
    source = code.printed(table_id)
    papers = {row["method"]: printed_cells(source, row) for row in source["rows"]}
    rows = [
        Row(row["method"], papers[row["method"]], {}, f"not run: needs {row['needs']}")
        for row in source["rows"]
        if row["method"] not in walked.by_row
    ]
    key = source["columns"][0]["key"]
    for label, seeds in walked.by_row.items():
        cell = _cell(command, walked, [walks.scores["captions"] for walks in seeds])
        rows.append(Row(label, papers.get(label, {}), {key: cell}, MEASURED))
    columns = _columns(source, walked, "captions")
    return table_of(command, code.name, table_id, columns, rows, runs, notes=(walked.note,))


def _traversal(command: Command, code: PaperCode, walked: Walked, runs: Runs) -> Table:
    """experiment["traversal"]["<key>_<score>"], and its table, without scores for which a seed has no value."""
    values = {}
    for label, seeds in walked.by_row.items():
        for score in seeds[0].scores:
            means = [mean_score(walks.scores[score]) for walks in seeds]
            if None not in means:
                values[ROWS[label].key, score] = means
    known = {score for _, score in values}
    findings = Findings(
        name="traversal",
        caption="Walks from pictures to the root: the order and the truth of the captions met.",
        measured_on=walked.data,
        protocol=walked.protocol,
        settings={"num_points": NUM_POINTS, "pool": walked.embedded.task.pool.name},
        rows={row.key: label for label, row in ROWS.items()},
        columns={score: label for score, label in SCORES.items() if score in known},
        values=values,
        notes=(*NOTES, walked.note),
    )
    return findings_table(command, code.name, findings, runs)


def table2(command: Command, code: PaperCode) -> list[Table]:
    """Table 2: the captions of four pictures, no filter; the paper's four photographs are not ours to show."""
    return [_examples(command, code, "table2", {model: Walk("", model, None) for model in B16})]


def table3(command: Command, code: PaperCode) -> list[Table]:
    """Table 3: the captions of the same pictures, EuCLIP with the filter at K = 0.8."""
    return [_examples(command, code, "table3", {"EuCLIP": ROWS["EuCLIP, filter K=0.8"]})]


def _examples(command: Command, code: PaperCode, table_id: str, columns: Mapping[str, Walk]) -> Table:
    """How many captions the first images meet; the note of a row lists those of the first seed."""
    source = code.printed(table_id)
    models = {walk.model: B16[walk.model] for walk in columns.values()}
    runs, walked = train_and_walk(command, code, models, columns)
    task, tags = walked.embedded.task, walked.embedded.task.pool.tags
    rows = [
        Row(row["method"], printed_cells(source, row), {}, f"not run: needs {row['needs']}") for row in source["rows"]
    ]
    for number, place_in_task in enumerate(walked.embedded.rows[:EXAMPLES]):
        cells, notes = {}, []
        for column, seeds in walked.by_row.items():
            cells[column] = _cell(command, walked, [[walks.scores["captions"][number]] for walks in seeds])
            captions = [tags[place] for place in met(seeds[0].places[number], tags)]
            notes.append(f"{column}: {'; '.join(captions) or 'only the root'}")
        rows.append(Row(f"ours: {task.image_id(place_in_task)}", {}, cells, MEASURED, note=" | ".join(notes)))
    columns = _columns(source, walked, "captions")
    note = f"The captions of our pictures are those of seed {command.seeds[0]}, nearest to the picture first."
    return table_of(command, code.name, table_id, columns, rows, runs, notes=(note, walked.note))


def figure5(command: Command, code: PaperCode) -> list[Table]:
    """Figure 5: how many pictures meet how many captions."""
    source = code.printed("figure5")
    papers = {row["method"]: printed_cells(source, row) for row in source["rows"]}
    runs, walked = train_and_walk(command, code, B16, ROWS)
    keys = [column["key"] for column in source["columns"]]  # 0, 1, ... captions, the last one "or more"
    rows = []
    for label, seeds in walked.by_row.items():
        counts = [[min(int(count), len(keys) - 1) for count in walks.scores["captions"]] for walks in seeds]
        cells = {
            key: _cell(command, walked, [[100.0 * (count == number) for count in row] for row in counts])
            for number, key in enumerate(keys)
        }
        rows.append(Row(label, papers.get(label, {}), cells, MEASURED))
    # the figure: one panel per model, one histogram per filter, of the first seed
    if is_main_process():
        panels = [
            Distributions(
                model,
                f"captions met on a walk (seed {command.seeds[0]})",
                {
                    label.removeprefix(f"{model}, "): walked.by_row[label][0].scores["captions"]
                    for label, row in ROWS.items()
                    if row.model == model
                },
                whole_numbers=True,
            )
            for model in B16
        ]
        plot_distributions(panels, command.folder(code.name) / "figure5_distributions.png", across=len(panels))
    columns = _columns(source, walked, "percent")
    return [table_of(command, code.name, "figure5", columns, rows, runs, notes=(walked.note,))]


def _columns(source: Mapping[str, Any], walked: Walked, unit: str) -> list[Column]:
    """The printed columns; the test set is ours at every scale, as the paper's images and captions are not included."""
    return [Column(column["key"], column["label"], unit, walked.data) for column in source["columns"]]


def _cell(command: Command, walked: Walked, per_picture: Sequence[Sequence[float]]) -> Measured:
    """Mean over images, from one value per seed and image; a single seed has the interval over its images."""
    hits = [[value] for value in per_picture[0]] if len(per_picture) == 1 and len(per_picture[0]) > 1 else []
    return measured_over_seeds(
        [mean_score(values) for values in per_picture],
        command.seeds,
        scale=command.scale,
        data=walked.data,
        protocol=walked.protocol,
        query_interval=bootstrap_interval(hits) if hits else None,
        full_protocol={"data": walked.data, "walks": walked.protocol},
    )
