"""From runs to tables: cells, rows and columns, the table with its provenance, and its training curves."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open

from common.base.arguments import accepted
from common.base.config import ConfigError, notes_of_row
from common.base.files import read_json
from common.base.provenance import ROOT, git_revision, hash_of, now
from common.diagnosis import PLATEAU
from common.distributed import is_main_process
from common.evaluation.protocol import check_alike, data_text, protocol_text
from common.report.formats import heading
from common.report.hits import Hits
from common.report.statistics import interval_of_hits
from common.report.table import (
    MEASURED,
    QUERIES_INTERVAL,
    WILSON_INTERVAL,
    Column,
    Measured,
    Row,
    Table,
    Training,
    measured_over_seeds,
)
from common.reproduce.command import Command, refuse_unsearched, rows_at
from common.reproduce.near import searched_on
from common.reproduce.rows import Job, PaperCode, RowRun, paper_tables
from common.reproduce.side_by_side import run_rows
from common.run.curves import plot_training
from common.run.folder import RunName, precision_of
from common.run.log import read_log

Runs = dict[str, list[RowRun]]  # method -> one run per seed
NOT_CHOSEN = "not run: left out by the command"  # status; by ROWS or NEAR


def train_rows(
    command: Command, code: PaperCode, configs: Mapping[str, str], settings: Mapping[str, Sequence[str]] = {}
) -> Runs:
    """Runs of all rows of the command, for all seeds, cached or trained.

    Args:
        configs: method -> file in the paper's configs/, or the path of a custom row.
        settings: method -> overrides of this row, not of the one that it starts from.
    Raises:
        ConfigError: a custom row that is none of these, or with SEARCHED a row that was never searched.
    """
    # a part with fixed rows would leave a custom row out without a word
    left_out = {file.stem for file in command.custom_files} - {Path(config).stem for config in configs.values()}
    if left_out:
        raise ConfigError(f"ROWS={min(left_out)}: {command.part} takes no custom row; leave it out")
    for file in command.custom_files:
        of_row = code.of(str(file))
        for note in notes_of_row(of_row.config_class, of_row.folder, file, command.scale, of_row.scale_files):
            print(note)
    stems = [Path(config).stem for config in configs.values() if command.trains(config)]
    if command.takes_best:
        refuse_unsearched(command, code.name, stems)
    return run_rows(
        {
            method: [
                Job(
                    of_row,
                    config,
                    command.scale,
                    seed,
                    command.overrides,
                    command.runs,
                    (*command.settings_of(config), *settings.get(method, ())),
                )
                for seed in command.seeds
            ]
            for method, config in configs.items()
            if command.trains(config)
            for of_row in [code.of(config)]
        }
    )


def with_custom_rows(command: Command, source: dict[str, Any]) -> dict[str, Any]:
    """A printed table with its rows `beyond` the paper and the command's custom rows, without printed values."""
    beyond = [{**row, "values": []} for row in rows_at(command.scale, source.get("beyond", ()))]
    custom = [{"method": file.stem, "config": str(file), "values": []} for file in command.custom_files]
    return {**source, "rows": [*source["rows"], *beyond, *custom]}


def collapse_note(runs: list[RowRun]) -> str:
    """Seeds that ended at the chance level of the loss, as text; empty if there are none."""
    at_chance = []
    for run in runs:
        ratios = [line["loss_over_chance"] for line in read_log(run.files.log) if "loss_over_chance" in line]
        if ratios and abs(ratios[-1] - 1) <= PLATEAU:
            at_chance.append(str(run.seed))
    seeds = f"seed{'s' * (len(at_chance) > 1)} {', '.join(at_chance)}"
    return f"; {seeds} ended at the chance level of the loss" if at_chance else ""


def measured_cells(
    source: dict[str, Any], runs: list[RowRun], scale: str, others: Mapping[str, list[RowRun]] = {}, suffix: str = ""
) -> dict[str, Measured | None]:
    """One row's cells.

    Args:
        source: the printed table; a column's `measure` is [role, metric], or [role, metric, field] for the run of the
            config in that `field` of the row.
        runs: of the row's config, one per seed.
        others: field -> the runs of that config.
        suffix: of the roles: "_contrastive" for a second ranking.
    """
    cells = {}
    for column in source["columns"]:
        role, metric, *field = column["measure"]
        of_column = others.get(field[0]) if field else runs
        cells[column["key"]] = measured_cell(of_column, role + suffix, metric, scale) if of_column else None
    return cells


def printed_cells(source: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """The paper's values of one row by column."""
    return {column["key"]: value for column, value in zip(source["columns"], row["values"])}


def printed_rows(
    source: dict[str, Any],
    ours: Mapping[str, tuple[Mapping[str, Measured | None], str]],
    status: Callable[[dict[str, Any]], str] | None = None,
) -> list[Row]:
    """The rows of a printed table in its order: ours if measured, else the reason why not.

    Args:
        ours: method -> our cells, and the row's note.
        status: printed row -> the reason; None = `NOT_CHOSEN` if it has a config, else its requirements.
    """

    def why(row: dict[str, Any]) -> str:
        return NOT_CHOSEN if "config" in row else f"not run: needs {row['needs']}"

    rows = []
    for row in source["rows"]:
        cells, note = ours.get(row["method"], ({}, ""))
        text = MEASURED if row["method"] in ours else (status or why)(row)
        rows.append(Row(row["method"], printed_cells(source, row), cells, text, note))
    return rows


def columns_of(command: Command, source: dict[str, Any], runs: Runs) -> list[Column]:
    """The printed columns, with our test sets."""
    return [
        Column(
            column["key"],
            column["label"],
            column.get("unit", "percent"),
            stand_in_for(command, runs, column["measure"][0]),
            column.get("better", "higher"),
        )
        for column in source["columns"]
    ]


def measured_cell(runs: list[RowRun], role: str, metric: str, scale: str) -> Measured | None:
    """Our number for one cell, in percent; None if the runs were not evaluated on such a data set.

    Of one seed the interval is over its test images; of more see `measured_over_seeds`.

    Args:
        runs: one per seed.
        role, metric: keys of the run's evaluations.
    Raises:
        ProtocolError: the seeds were evaluated under different protocols; names the key.
        ValueError: a metric that is no share.
    """
    if role not in runs[0].evaluations:
        return None
    evaluations = [run.evaluations[role] for run in runs]
    # seeds under different protocols have no mean
    check_alike({f"seed {run.seed}": evaluation["protocol"] for run, evaluation in zip(runs, evaluations)})
    protocol = evaluations[0]["protocol"]
    if metric not in evaluations[0]["metrics"]:
        known = accepted(metric, sorted(evaluations[0]["metrics"]))
        raise ValueError(f"measure: [{role}, {metric}] of a column: {role} has no such metric; {known}")
    for run, evaluation in zip(runs, evaluations):
        if not 0 <= evaluation["metrics"][metric] <= 1:
            value = f"seed {run.seed}, {role}: {metric} = {evaluation['metrics'][metric]}"
            raise ValueError(f"{value}; expected a share in [0, 1]")
    values = tuple(100 * evaluation["metrics"][metric] for evaluation in evaluations)
    query_interval, kind = None, QUERIES_INTERVAL
    # with one seed only the test images give an interval
    if len(runs) == 1 and sum(map(bool, runs[0].hits[role][metric])) > 1:
        (low, high), name = interval_of_hits(runs[0].hits[role][metric])
        query_interval = (100 * low, 100 * high)
        kind = WILSON_INTERVAL if name == "Wilson" else QUERIES_INTERVAL
    chance = evaluations[0]["chance"].get(metric)
    return measured_over_seeds(
        values,
        [run.seed for run in runs],
        scale=scale,
        data=data_text(protocol),
        protocol=protocol_text(protocol),
        chance=None if chance is None else 100 * chance,
        query_interval=query_interval,
        query_interval_kind=kind,
        full_protocol=protocol,
        validation=_validation_level(runs, metric),
        hits=Hits.of([run.hits.get(role, {}).get(metric, ()) for run in runs]),
    )


def trained_on(runs: Iterable[RowRun]) -> str:
    """Training sets of runs: every name once, before the short fingerprints that seeds drew under it."""
    fingerprints: dict[str, list[str]] = {}
    for text in sorted({run.training_data for run in runs}):
        name, short = re.fullmatch(r"(.*?)(?: \((\w{8})\))?", text).groups()
        fingerprints.setdefault(name, []).extend([short] if short else [])
    return ", ".join(f"{name} ({', '.join(of)})" if of else name for name, of in fingerprints.items())


def note_of(command: Command, row: str, code: PaperCode, is_trained: bool = True) -> str:
    """Model and training of a row, in one line; of random weights whose steps are timed no number of steps."""
    code = code.of(row)
    config = code.config(row, command.scale, [*command.overrides, *command.settings_of(row)])
    data, model, optim = config.data, config.model, config.optim
    pixels = f", {data.image_size} px in patches of {model.patch_size}"
    image = _tower("ViT", model.image, model.image.stem.name) + pixels
    text = _tower("text", model.text, Path(model.text.stem.weights).name)
    return (
        f"ours: {image}; {text}; embedding {model.embedding_dim}; {optim.steps if is_trained else 'timed'} steps of "
        f"{optim.global_batch_size} pairs; towers in {'bfloat16' if precision_of(config.run) == 'bf16' else 'float32'}"
    )


def models_of(runs: Mapping[str, list[RowRun]]) -> str:
    """Sizes, parameters and steps of some runs in one line."""
    # rows may differ in one size; the line shows every value once
    sizes = []
    for run in (seeds[0] for seeds in runs.values()):
        if hasattr(run.config, "model") and hasattr(run.config.model, "text"):  # of pictures alone the rows' notes tell
            model, optim = run.config.model, run.config.optim
            parameters = trained_parameters(run)
            size = f"{parameters / 1e6:.2f}M" if parameters else "unknown number of"
            steps, pairs = f"{optim.steps:,}", f"{optim.global_batch_size:,}"
            sizes.append(
                (vit_of(run.config), model.patch_size, text_of(model.text), model.embedding_dim, size, steps, pairs)
            )
    line = ("{}", "patches of {} px", "{}", "embedding {}", "{} parameters trained", "{} steps", "batches of {} pairs")
    several = [" or ".join(dict.fromkeys(map(str, values))) for values in zip(*sizes)]
    return ", ".join(text.format(values) for text, values in zip(line, several))


def vit_of(config: Any) -> str:
    """ "ViT 128 x 4, 48 px": width and layers of the image tower, and its image size."""
    tower, pixels = config.model.image, f"{config.data.image_size} px"
    on = f" on {tower.stem.name}" if tower.stem.name else ""
    return f"ViT {tower.width} x {tower.layers}{on}, {pixels}" if tower.layers else f"mean{on}, {pixels}"


def text_of(tower: Any) -> str:
    """ "text 128 x 2": width and layers of the text tower."""
    on = f" on {Path(tower.stem.weights).name}" if tower.stem.weights else ""
    return f"text {tower.width} x {tower.layers}{on}" if tower.layers else f"mean of words{on}"


def trained_parameters(run: RowRun) -> int:
    """Numbers that the optimiser of a run moved; 0 if it keeps no state."""
    # the optimiser's state has the trained parameters, without locked and momentum ones
    states = sorted(run.files.checkpoints.glob("step-*/optimizer.safetensors"))
    if not states:
        return 0
    with safe_open(states[-1], "numpy") as state:
        names = state.keys()  # the file cannot be iterated over
        moved = (name for name in names if name.endswith(("/exp_avg", "/momentum_buffer")))
        return sum(math.prod(state.get_slice(name).get_shape()) for name in moved)


def ran_as(template: str, config: Any) -> str:
    """Our name of a row that has another name in print: "Multi(32, 4), ViT 128 x 4, 48 px".

    Args:
        template: `ours` of the printed row, with {config} and its fields, and {vit} for `vit_of`.
    """
    return template.format(vit=vit_of(config), config=config)


def _ran(source: dict[str, Any], runs: Runs) -> dict[str, str]:
    # Method -> our name, of printed rows with an `ours`, also of their further runs "<method>, <field>"
    return {
        method: ran_as(row["ours"], seeds[0].config) + method.removeprefix(row["method"])
        for row in source.get("rows", ())
        if "ours" in row
        for method, seeds in runs.items()
        if f"{method}, ".startswith(f"{row['method']}, ")
    }


def _tower(kind: str, tower: Any, stem: str) -> str:
    layers = f"{kind} width {tower.width}, {tower.layers} layers" if tower.layers else f"{kind}: a mean"
    trained = "trained on" if tower.stem.trainable else "frozen"
    return f"{layers} on {stem} ({trained}; its pre-training data are not new to it)" if stem else layers


def stand_in_for(command: Command, runs: Runs, role: str) -> str | None:
    """Our test set of a role; None at paper scale, where the data are the paper's."""
    if command.scale == "paper":
        return None
    evaluations = (seeds[0].evaluations for seeds in runs.values())
    return next((data_text(roles[role]["protocol"]) for roles in evaluations if role in roles), None)


def table_of(
    command: Command,
    paper: str,
    table_id: str,
    columns: list[Column],
    rows: list[Row],
    runs: Runs,
    suffix: str = "",
    measured_on: Runs | None = None,
    **differs: Any,
) -> Table:
    """A table with the provenance that all tables carry.

    Args:
        table_id: key in paper_tables.yaml; a table that the paper does not print needs a `caption`.
        suffix: of the table's name, if a printed table has a second one of ours.
        measured_on: whose settings notes name; None = `runs`.
        differs: fields of `Table` other than those of the runs and of the printed table.
    """
    printed = paper_tables(paper)
    source = printed["tables"].get(table_id, printed["paper"])  # a table of ours alone has nothing printed
    every_run = [run for seeds in runs.values() for run in seeds]
    # a row that ran with other sizes than in print has a second name
    ran = _ran(source, runs)
    made = {method: training_of(seeds) for method, seeds in runs.items()}
    rows = [
        replace(row, ran=ran.get(row.method, row.ran), training=made.get(row.method, (row.training,))[0])
        for row in rows
    ]
    code = {key: files for _, key, files in made.values()}
    noted = every_run if measured_on is None else [run for seeds in measured_on.values() for run in seeds]
    trained = [*dict.fromkeys(RunName.of(run.files.folder).row for run in noted if run.files is not None)]
    fields = {
        "paper_title": printed["paper"]["title"],
        "paper_version": str(source["version"]),
        "caption": source.get("caption", ""),
        "data": trained_on(every_run),
        "git_revision": ", ".join(sorted({run.git_revision for run in every_run})) or git_revision(),
        "created": now(),
        "hardware": ", ".join(sorted({run.hardware for run in every_run})),
        "errata": () if suffix else source.get("errata", ()),
        "models": models_of(runs),
        "chosen_by": _chosen_by(paper, command, trained),
        "settings": command.settings,
        "code": {
            row.training.code: code[row.training.code] for row in rows if row.training and row.training.code in code
        },
        **differs,
    }
    fields["notes"] = [*fields.get("notes", ()), *_versions_note(runs)]
    if command.searched:  # perhaps on other data
        searched = [row for row in command.searched if row in (trained or command.searched)]
        searches = searched_on(paper, command.scale, searched, command.roots)
        fields["notes"] += [f"Settings were searched on {search}." for search in searches]
    return Table(
        paper=paper, table_id=table_id + suffix, columns=columns, rows=rows, scale=command.scale, seeds=command.seeds,
        command=command.text(paper), **fields,
    )  # fmt: skip


def training_of(runs: Sequence[RowRun]) -> tuple[Training, str, dict[str, str]]:
    """How a row's runs were made, from their logs; key of the files that trained them; these with their hashes."""
    losses, validations = [], []
    for run in runs:
        records = read_log(run.files.log) if run.files is not None and run.files.log.is_file() else []
        losses += [record["loss_over_chance"] for record in records if "loss_over_chance" in record][-1:]
        validations.append(_last_validation(run))
    metric = next((name for name in _VALIDATION if all(name in of_run for of_run in validations)), "")
    files: dict[str, str] = {}
    for run in runs:
        files |= (read_json(run.files.dependencies) if run.files is not None else None) or {}
    key = hash_of(files) if files else ""
    training = Training(
        ", ".join(sorted({run.git_revision for run in runs})),
        ", ".join(sorted({run.evaluated_at for run in runs})),
        key,
        tuple(losses) if len(losses) == len(runs) else (),
        metric,
        tuple(of_run[metric] for of_run in validations) if metric else (),
        validations[0].get(f"chance_{metric}"),
    )
    return training, key, files


_VALIDATION = ("mean_recall", "acc1", "knn_acc1", "accuracy")  # figures of a validation that tell whether a row trained


def _last_validation(run: RowRun) -> dict[str, float]:
    # Metric -> value of the last validation, over all its data; empty without one
    if run.files is None or not run.files.log.is_file():
        return {}
    records = [record for record in read_log(run.files.log) if record["event"] == "evaluate"]
    last = [record["metrics"] for record in records if record["step"] == records[-1]["step"]]
    return {name: value for metrics in last for name, value in metrics.items()}


def _validation_level(runs: Sequence[RowRun], metric: str) -> float | None:
    # in percent
    levels = [_last_validation(run).get(metric) for run in runs]
    return None if None in levels else 100 * math.fsum(levels) / len(levels)


def _chosen_by(paper: str, command: Command, rows: Sequence[str] = ()) -> str:
    # as the file of the scale states it, also of settings of these rows; a search chose some, the command others
    path = ROOT / paper / "configs" / f"scale_{command.scale}.yaml"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    stated = re.search(r"^# chosen by: (.+)$", text, re.MULTILINE)
    by_scale = stated[1] if stated else ""
    # a line of a row stands right above the beginnings of names that it is about
    of_rows = re.findall(r"^  # chosen by: (.+)\n(?:  # .*\n)*  (\w[\w ]*):", text, re.MULTILINE)
    for how, names in [] if command.takes_best else of_rows:
        about = " ".join(start for start in names.split() if any(f"{row}_".startswith(f"{start}_") for row in rows))
        by_scale += f"; of rows that begin with {about} also by {how}" if about else ""
    by_search = f"val, what its search varied, for each row; else {by_scale}" if command.takes_best else by_scale
    set_by_command = ", ".join(command.changed_settings)
    return f"the command ({set_by_command}); else {by_search or 'test data'}" if set_by_command else by_search


def _versions_note(runs: Runs) -> list[str]:
    made: dict[str, list[str]] = {}
    for method, seeds in runs.items():
        for run in seeds:
            made.setdefault(run.versions, []).append(f"{method}, seed {run.seed}")
    list_of_runs = "; ".join(f"{versions}: {', '.join(which)}" for versions, which in made.items())
    return [f"Runs were made with different versions. {list_of_runs}."] if len(made) > 1 else []


def plot_runs(command: Command, paper: str, runs: dict[str, list[RowRun]]) -> None:
    """Training curves of a part's runs, beside its tables."""
    printed = paper_tables(paper)["tables"].get(command.part, {})
    ran = _ran(printed, runs)
    # two rows of one run, such as a ranking by each of its scores, have one curve
    files: dict[Path, str] = {}
    for method, seeds in runs.items():
        for run in seeds:
            files.setdefault(run.files.log, f"{ran.get(method, method)}, seed {run.seed}")
    logs = {label: read_log(path) for path, label in files.items()}
    if logs and is_main_process():
        title = heading(paper, command.part, command.scale, command.text(paper) if command.changes else "")
        words = f"Training: {printed['title']}\n{title}" if "title" in printed else f"{title}: training"
        plot_training(logs, command.folder(paper) / f"{command.part}_training.png", words)


def trained_table(
    command: Command,
    code: PaperCode,
    table_id: str,
    note: Callable[[Command, str], str] | None = None,
    settings: Mapping[str, Sequence[str]] = {},
    fields: Sequence[str] = (),
    more: Mapping[str, Mapping[str, Measured]] = {},
) -> tuple[Table, Runs]:
    """A table of the paper: rows with a `config` are trained, others state their requirements; plots training curves.

    Args:
        table_id: key in paper_tables.yaml.
        note: command, file in configs/ -> the row's note; None = `note_of`.
        settings: as in `train_rows`.
        fields: of a row that name further configs, whose runs columns measure; see `measured_cells`.
        more: method -> cells that no evaluation of its runs gives.
    Returns:
        The table, and all runs, those of `fields` as "<method>, <field>".
    """
    # the chosen rows and the further runs that their columns measure
    source = with_custom_rows(command, code.printed(table_id))
    chosen = [row for row in source["rows"] if "config" in row and command.trains(row["config"])]
    configs = {row["method"]: row["config"] for row in chosen}
    suffixes = {row["method"]: row.get("suffix", "") for row in chosen}
    further = {f"{row['method']}, {field}": row[field] for row in chosen for field in fields if field in row}
    if further and command.searched:  # such a row would start from another run than the one beside it
        started = ", ".join(fields)
        raise command.search_error(
            "cannot reach all of", f"which also measures rows that start from its own ({started})"
        )
    # all at once, so that they can train side by side
    all_runs = train_rows(replace(command, rows=()), code, configs | further, settings)
    runs = {method: all_runs[method] for method in configs}
    ours = {}
    for method, seeds in runs.items():
        of_row = (*command.settings_of(configs[method]), *settings.get(method, ()))
        of_row = replace(command, overrides=(*command.overrides, *of_row), searched={})
        text = note_of(of_row, configs[method], code) if note is None else note(of_row, configs[method])
        others = {field: all_runs[f"{method}, {field}"] for field in fields if f"{method}, {field}" in all_runs}
        cells = measured_cells(source, seeds, command.scale, others, suffixes[method]) | more.get(method, {})
        ours[method] = (cells, text + collapse_note(seeds))
    rows = printed_rows(source, ours)
    plot_runs(command, code.name, all_runs)
    return table_of(command, code.name, table_id, columns_of(command, source, all_runs), rows, all_runs), all_runs
