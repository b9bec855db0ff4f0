"""The command line of every paper's reproduce.py, and what it writes: table, figure, page."""

import itertools
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from common.base.arguments import Parser, accepted, expanded, words_in
from common.base.config import SCALES, ConfigError, load_config
from common.base.files import shown
from common.base.places import ROOT, outputs
from common.base.provenance import CHANGED, UNKNOWN, git_revision, hash_of
from common.distributed import is_main_process, world_size
from common.report.claims.decide import EMPTY_SCALES
from common.report.claims.show import judge
from common.report.claims.show import to_text as claims_to_text
from common.report.figures import plot_table
from common.report.formats import FORMATS, seeds_name, to_text, write_table
from common.report.page import collect, collect_page, deciding
from common.report.table import Table, plan_of, read_table
from common.reproduce.near import best_settings, near_settings
from common.reproduce.rows import paper_tables, words_of_plot
from common.run.launch import join_processes

SEARCH_SEEDS = (1000, 1001, 1002)  # of `make search`; tables count theirs from 0 and stop below
COMMITTED = ROOT / "results"
WHERE_DATA_LIE = {  # settings of where the data lie; others of `data` make other data of it
    f"data.{name}"
    for name in (
        "source", "root", "train", "val", "test", "second_test", "images", "image_column", "caption_column", "labelled",
        "vocabulary", "winogavil", "max_broken_share",
    )
} | {"model.weights"}  # fmt: skip
BESIDE_SCENES = {"data.labelled", "data.vocabulary", "data.winogavil", "data.max_broken_share", "model.weights"}
ON_SCENES = ("smoke", "demo")
LEAVE_ROWS_OUT = ("temperature_rate.faster", "regime.longer")  # of a grid; the others' numbers stay


@dataclass(frozen=True)
class Command:
    """A parsed command line.

    part: "table2", "figure4", ...
    overrides: "section.key=value" for every row.
    typed: the overrides as they were given, of the part itself, too (`split`); empty = overrides.
    output: folder of runs, results and the page.
    results: folder of the tables.
    rows: stems of the configs to train; none = all.
    custom_files: config files of rows that the paper does not print.
    formats: of tables, beside Markdown and JSON.
    settings: near the best of a search (NEAR), which `rows` take instead of their own.
    planned_seeds: how many are to decide in the end; 0 = these.
    searched: row -> the settings of its searches that it takes instead of its own, the best or with NEAR `settings`.
    """

    part: str
    scale: str
    seeds: tuple[int, ...]
    overrides: tuple[str, ...]
    output: Path
    results: Path
    rows: tuple[str, ...] = ()
    custom_files: tuple[Path, ...] = ()
    formats: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    planned_seeds: int = 0
    searched: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    typed: tuple[str, ...] = ()

    @property
    def roots(self) -> list[Path]:
        """Folders of results, the committed ones first."""
        return [COMMITTED, self.output / "results", self.results]

    @property
    def runs(self) -> Path:
        return self.output / "runs"

    @property
    def changes(self) -> list[str]:
        """Overrides and rows that make another table than the paper's."""
        near = [f"near {text}" for text in self.settings] + (self._best_beside_near if self.settings else [])
        return [*self.changed_settings, *near, *([f"rows={' '.join(sorted(self.rows))}"] if self.rows else [])]

    @property
    def changed_settings(self) -> list[str]:
        """Overrides that make another table than the paper's.

        Where the data lie, how a run is made (its precision, workers, log) and rows that a grid leaves out are none.
        """
        elsewhere = ("run.", "public.", "coco.", "hierarchies.", "refcoco.", "sugarcrepe.", "traversal.")
        elsewhere += LEAVE_ROWS_OUT
        # scenes lie nowhere: there another source or split is other data
        lie = BESIDE_SCENES if self.scale in ON_SCENES else WHERE_DATA_LIE
        keys = {text: text.partition("=")[0] for text in self.typed or self.overrides}
        return sorted(text for text, key in keys.items() if key not in lie and not key.startswith(elsewhere))

    def settings_of(self, config: str) -> tuple[str, ...]:
        """What the row with this file in configs/ takes, but not the rows that it starts from."""
        return self.searched.get(Path(config).stem, ())

    @property
    def _best_beside_near(self) -> list[str]:
        # settings of searches that SEARCHED takes
        return sorted({text for of_row in self.searched.values() for text in of_row} - {*self.settings})

    @property
    def takes_best(self) -> bool:
        # SEARCHED: every row has to have a search
        return bool(self.searched) and not self.settings

    def refuse_search(self) -> None:
        """For a part that sets what a search would choose.

        Raises:
            ConfigError: the command takes settings of a search.
        """
        if self.searched:
            raise self.search_error("has no meaning for", "which sets the settings of its rows")

    def refuse_processes(self) -> None:
        """For a part that measures on the main process what gathers from all; call on every process.

        Raises:
            ConfigError: there are several.
        """
        if world_size() > 1:
            raise ConfigError(f"{self.part} measures on one process; start it without accelerate launch")

    def refuse_set(self, chosen: Iterable[str]) -> None:
        """For settings that the part chooses itself, as keys or "key=value".

        Raises:
            ConfigError: the command sets one of them, or takes it from a search.
        """
        keys = list(dict.fromkeys(text.partition("=")[0] for text in chosen))
        for text in (*self.overrides, *itertools.chain(*self.searched.values())):
            if text.partition("=")[0] in keys:
                raise ConfigError(f"{text} cannot be set: {self.part} chooses {', '.join(keys)}")

    def search_error(self, what: str, why: str) -> ConfigError:
        return ConfigError(f"{'SEARCHED' if self.takes_best else 'NEAR'}=1 {what} {self.part}, {why}; leave it out")

    def trains(self, config: str) -> bool:
        return not self.rows or Path(config).stem in self.rows

    def folder(self, paper: str) -> Path:
        """Folder of the part's tables; a changed row or scale does not overwrite the unchanged one."""
        name = f"{self.scale}-{hash_of(self.changes)}" if self.changes else self.scale
        return self.results / paper / self.part / name

    def text(self, paper: str) -> str:
        """The command as a user types it, without paths of this machine."""
        folders = {"data.root": "DATA", "model.weights": "WEIGHTS"}
        settings = self.typed or self.overrides
        keys = [text.partition("=")[0] for text in settings]
        # folders have options of their own
        more = set_text(text for text, key in zip(settings, keys) if key not in folders)
        data = "".join(f" {name}=<folder>" for key, name in folders.items() if key in keys)
        files = {file.stem: file for file in self.custom_files if file.parent != ROOT / paper / "configs"}
        names = " ".join(f"<folder>/{files[row].name}" if row in files else row for row in self.rows)
        rows = " NEAR=1" if self.settings else f' ROWS="{names}"' if self.rows else ""
        plan = f" PLAN={self.planned_seeds}" if self.planned_seeds else ""
        searched = " SEARCHED=1" if self._best_beside_near else ""
        seeds = f"SEEDS={len(self.seeds)}{plan}{searched}"
        return f"make reproduce-{self.part} PAPER={paper} SCALE={self.scale} {seeds}{data}{rows}{more}"

    def split(self, config_class: type) -> "tuple[Any, Command]":
        """The settings of this part by their sections, and the command for its rows, which still names them.

        Args:
            config_class: dataclass of these sections; all fields have defaults.
        Raises:
            ConfigError: as `load_config`.
        """
        sections = tuple(f"{section.name}." for section in fields(config_class))
        settings = [text for text in self.overrides if text.startswith(sections)]
        rest = tuple(text for text in self.overrides if not text.startswith(sections))
        return load_config(config_class, [], settings), replace(
            self, overrides=rest, typed=self.typed or self.overrides
        )

    def runs_at(self, scales: Iterable[str], otherwise: str) -> bool:
        """Whether the part exists at the command's scale, one of `scales`; else prints `otherwise`, the reason."""
        if self.scale in scales:
            return True
        if is_main_process():
            print(f"{self.part} runs only at scale {', '.join(scales)}, not at {self.scale}: {otherwise}", flush=True)
        return False


def reproduce_main(
    description: str, paper: str, parts: dict[str, Callable[[Command], list[Table]]], arguments: list[str] | None = None
) -> None:
    """The command line of a paper; `parts`: name -> function that trains the part and returns its tables.

    Raises:
        ConfigError: an option with an unknown or impossible value, or RESULTS=results without a committed revision.
    """
    parser = Parser(description)
    parser.add_argument("part", help="one of: " + ", ".join(parts))
    parser.add_argument("--scale", default="demo", help=", ".join(SCALES))
    parser.add_argument("--seeds", default="1", help="how many seeds, counted from 0")
    parser.add_argument("--plan", default="0", help="with the first seeds: how many are to decide in the end")
    parser.add_argument(
        "--near", action="store_true", help="train rows at the settings within one standard error of a search's best"
    )
    parser.add_argument("--searched", action="store_true", help="train each row at the best setting of its search")
    parser.add_argument("--data", default="", help="folder of tar shards with captioned photographs")
    parser.add_argument("--weights", default="", help="folder of pre-trained weights by name; others from the hub")
    parser.add_argument(
        "--rows", default="", help="rows of a table to train, 'a b'; a custom row by name or file; default all"
    )
    parser.add_argument("--output", type=Path, default=outputs(), help="runs, results and page")
    parser.add_argument("--results", type=Path, default=None, help="where the tables go; default <output>/results")
    parser.add_argument(
        "--formats", default="", help="of the tables beside Markdown and JSON: csv, latex, or csv,latex"
    )
    parser.add_argument("--set", default="", help="section.key=value ... in one text, quotes as in a shell")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_intermixed_args(arguments)

    if options.part not in parts:
        raise ConfigError(f"{paper} has no {options.part}; {accepted(options.part, [*parts])}")
    if options.scale not in SCALES:
        raise ConfigError(f"SCALE={options.scale} is unknown; {accepted(options.scale, SCALES)}")
    if not options.seeds.isdigit() or not 1 <= int(options.seeds) <= min(SEARCH_SEEDS):
        most = min(SEARCH_SEEDS)  # settings were chosen with the next ones
        raise ConfigError(f"SEEDS={options.seeds} must be a whole number of seeds, at least 1 and at most {most}")
    planned = int(options.plan) if options.plan.isdigit() else -1
    if planned and not 2 <= int(options.seeds) < planned <= min(SEARCH_SEEDS):  # one seed is no first look
        above = f"expected a whole number of seeds above SEEDS={options.seeds}, at most {min(SEARCH_SEEDS)}"
        raise ConfigError(f"PLAN={options.plan}: {above}, and SEEDS of at least 2 beside PLAN")
    # names are checked before anything is trained
    formats = tuple(name for name in re.split(r"[\s,]+", options.formats) if name)
    for name in formats:
        if name not in FORMATS:
            raise ConfigError(f"FORMATS={options.formats}: {name} is unknown; {accepted(name, [*FORMATS])}")
    overrides = [*words_in("SET", options.set), *options.overrides]
    overrides = with_folders(overrides, options.scale, options.data, options.weights)
    # rows by name; the whole table is the same as all of its rows
    printed = paper_tables(paper)
    known = trained_rows(printed, options.part, options.scale)
    names = dict.fromkeys(words_in("ROWS", options.rows))
    rows, custom_files = _rows_of_names(names, known, options.part, paper, printed)
    if set(rows) == set(known):
        rows = ()  # the whole table
    results = options.results if options.results is not None else options.output / "results"
    revision = git_revision() if results.resolve() == COMMITTED else ""
    if revision.endswith(CHANGED):
        raise ConfigError(
            "RESULTS=results takes what a committed revision makes, and tracked files differ from it; commit the "
            "changes first (git status lists them), or leave RESULTS out"
        )
    if revision == UNKNOWN:
        raise ConfigError(
            f"RESULTS=results takes what a committed revision makes, and git names none of {ROOT}; expected a checkout "
            "that git reads (git status gives the reason, such as another owner of the folder), or leave RESULTS out"
        )
    seeds = tuple(range(int(options.seeds)))
    command = Command(
        options.part, options.scale, seeds, overrides, options.output, results, rows, custom_files, formats,
        planned_seeds=planned,
    )  # fmt: skip
    if options.searched:
        command = replace(command, searched=_best(command, paper, known))
    commands = _near(command, paper, known) if options.near else [command]
    join_processes(overrides)
    if is_main_process():
        source = printed["paper"]
        print(f"{command.part} of {source['title']} ({paper}, version {source['version']})")
        print(f"scale {command.scale}, {seeds_name(seeds)} {', '.join(map(str, seeds))}", flush=True)
    for command in commands:
        if command.settings and is_main_process():
            print(f"at {', '.join(command.settings)}: {', '.join(command.rows)}", flush=True)
        # every process trains, the first one writes
        tables = parts[options.part](command)
        if tables and is_main_process():  # without tables the part has said why
            _write(command, paper, tables)


def _near(command: Command, paper: str, known: list[str]) -> list[Command]:
    # the command at each setting near the best of a search
    if command.changes:
        raise ConfigError(f"NEAR takes rows and settings of a search; leave out {', '.join(command.changes)}")
    if not known:
        raise ConfigError(
            f"NEAR=1 takes rows of a table, and {command.part} names its rows only as it trains; leave it out"
        )
    near = near_settings(paper, command.scale, known, command.roots)
    if not near:
        raise not_searched("NEAR", command, paper, known)
    return [
        replace(command, rows=rows, settings=settings, searched={row: _with(command, row, settings) for row in rows})
        for settings, rows in near.items()
    ]


def _with(command: Command, row: str, settings: tuple[str, ...]) -> tuple[str, ...]:
    # beside the best of other searches, where SEARCHED takes it
    keys = {text.partition("=")[0] for text in settings}
    return (*(text for text in command.searched.get(row, ()) if text.partition("=")[0] not in keys), *settings)


def _best(command: Command, paper: str, known: list[str]) -> dict[str, tuple[str, ...]]:
    # The best settings of the command's rows; of an experiment, which names its rows only as it trains, of all rows
    # that can be chosen for.
    rows = command.rows or known
    best = best_settings(paper, command.scale, rows or None, command.roots)
    if not best:
        raise not_searched("SEARCHED", command, paper, rows)
    refuse_unsearched(replace(command, searched=best), paper, rows)
    return best


def refuse_unsearched(command: Command, paper: str, rows: Sequence[str]) -> None:
    """For rows that a command with SEARCHED trains.

    Raises:
        ConfigError: no search or several, or the command sets what one chose.
    """
    if missing := [row for row in rows if row not in command.searched]:
        # such a row would stand beside rows whose settings were chosen
        best_settings(paper, command.scale, missing, command.roots)  # names the files of several searches
        raise not_searched("SEARCHED", command, paper, missing)
    chosen = {text.partition("=")[0] for row in rows for text in command.searched[row]}
    for text in command.overrides:
        if (key := text.partition("=")[0]) in chosen:
            raise ConfigError(f"SET: {text}, but SEARCHED=1 takes {key} from the search; leave one of them out")


def not_searched(option: str, command: Command, paper: str, rows: Sequence[str]) -> ConfigError:
    """What to run first, for an option that takes settings from searches."""
    return ConfigError(
        f"{option}: no search of {paper} at scale {command.scale} has {', '.join(rows) or command.part}; run "
        f'make search PAPER={paper} SCALE={command.scale} ROWS="{" ".join(rows)}" SET=... first'
    )


def with_folders(overrides: Iterable[str], scale: str, data: str, weights: str) -> tuple[str, ...]:
    """Overrides with the folders of data and weights, "" = none.

    Raises:
        ConfigError: an override that has an option, or a folder at a scale that trains on scenes, unless an override
            names other data.
    """
    overrides = tuple(overrides)
    # each has an option, which the printed command shows
    options = {
        "run.seed=": "SEEDS (make search has seeds of its own)",
        "data.root=": "DATA",
        "model.weights=": "WEIGHTS",
        "run.test=": "make search, which sets it",
    }
    for key, instead in options.items():
        if any(text.startswith(key) for text in overrides):
            raise ConfigError(f"{key.rstrip('=')} cannot be overridden here; use {instead}")
    other_data = any(text.startswith(("data.source=", "data.labelled=", "data.mixture=")) for text in overrides)
    for key, name, value in (("data.root", "DATA", data), ("model.weights", "WEIGHTS", weights)):
        if value and scale in ON_SCENES and not (name == "DATA" and other_data):
            source = "SET=data.source=<source>, or " if name == "DATA" else ""
            raise ConfigError(
                f"{name}={value} has no effect at scale {scale}, which trains on the embedded scenes; "
                f"use {source}SCALE=photos, photos_scratch or paper"
            )
        if value:
            overrides += (f"{key}={value}",)
    return overrides


def _write(command: Command, paper: str, tables: list[Table]) -> None:
    folder = command.folder(paper)
    _check_revisions(command, tables)
    tables = [_planned(command, paper, table) for table in tables]
    for table in tables:
        print("\n" + to_text(table))
        write_table(table, folder, command.formats)
        plot_table(table, folder / f"{table.table_id}.png", **words_of_plot(paper, table.table_id))
    roots = command.roots
    _print_claims(command, paper, tables, roots)
    page = command.output / "report.html"
    collect_page(roots, page)
    print(f"\ntables and figures: {shown(folder)}\npage:               {shown(page)}")


def _planned(command: Command, paper: str, table: Table) -> Table:
    # by the tables of the same runs that were written before; one torn from its hits is written anew
    files = f"{paper}/{command.part}/{command.scale}*/{table.table_id}.json"  # also of some rows
    before = (file for root in dict.fromkeys(command.roots) for file in sorted(root.glob(files)))
    earlier = [read_table(file, with_hits=False) for file in before]
    plan, asked = plan_of(table, earlier, command.planned_seeds), command.planned_seeds
    if asked and plan != (len(table.seeds), asked):
        print(
            f"\nPLAN={asked} does not count: {table.table_id} was looked at before, with the first seeds of these runs"
        )
        table = replace(table, command=table.command.replace(f" PLAN={asked}", ""))
    return replace(table, plan=plan)


def _check_revisions(command: Command, tables: list[Table]) -> None:
    # committed results are made by committed code
    for table in tables if command.results.resolve() == COMMITTED else ():
        for row in (row for row in table.rows if row.training is not None):
            revisions = f"{row.training.revision}, {row.training.evaluated_at}"
            if CHANGED in revisions or UNKNOWN in revisions:
                raise ConfigError(
                    f"RESULTS=results: {table.table_id}, row {row.method} was trained and evaluated at {revisions}; "
                    "expected committed revisions: remove its run below OUTPUT, commit, and run the command again"
                )


def _print_claims(command: Command, paper: str, tables: list[Table], roots: list[Path]) -> None:
    if command.scale in EMPTY_SCALES:
        print(f"No claim is decided at scale {command.scale}, where runs are too short; use SCALE=demo")
    elif command.settings:
        print("Claims are judged by them beside the table: make report")
    elif command.changed_settings:
        print("Claims are not judged by changed settings.")
    elif command.rows:
        print("Claims about these rows are judged where there is no whole table: make report")
    if command.changes:
        return
    # tables of this command replace older ones of the same name
    just_now = {table.table_id for table in tables}
    named = {table.experiment for table in tables} | just_now
    earlier = [table for table in deciding(collect(roots)) if table.scale == command.scale]
    tables = [table for table in earlier if table.settings or table.table_id not in just_now] + tables
    touched = judge(ROOT / paper, tables, [*named, command.part])
    if touched is not None and touched.judged:
        print("\n" + claims_to_text(touched), end="")


def rows_at(scale: str, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a paper_tables.yaml that stand at a scale: `scales` of a row names some, otherwise it stands at all."""
    return [row for row in rows if scale in row.get("scales", [scale])]


def trained_rows(printed: dict[str, Any], part: str, scale: str = "") -> list[str]:
    """Config names of a table's rows (at one scale, "" = any); none if two share a config and a ranking."""
    table = printed["tables"].get(part, {})
    rows = [*table.get("rows", []), *table.get("beyond", [])]
    rows = rows_at(scale, rows) if scale else rows
    names = [Path(row["config"]).stem for row in rows if "config" in row and "suffix" not in row]
    return names if len(set(names)) == len(names) else []


def _rows_of_names(
    names: Iterable[str], known: list[str], part: str, paper: str, printed: dict[str, Any]
) -> tuple[tuple[str, ...], tuple[Path, ...]]:
    # The rows that a user names (configs, or paths of YAML files), and the files of custom rows. `known` are those that
    # the part trains; a row of another table of `printed` is no custom row, nor one that a column measures.
    rows, custom_files, others = [], [], {row for table in printed["tables"] for row in trained_rows(printed, table)}
    for table in printed["tables"].values():
        of_rows = itertools.chain(*(row.items() for row in [*table.get("rows", ()), *table.get("beyond", ())]))
        others |= {Path(text).stem for key, text in of_rows if key != "config" and str(text).endswith(".yaml")}
    for row in names:
        if not known:
            raise ConfigError(f"ROWS={row}: {part} chooses its rows itself; leave ROWS out")
        files = (ROOT / paper / "configs" / f"{row}.yaml", Path(expanded(row)))
        file = next((file for file in files if file.is_file()), None)
        if row in known:
            rows.append(row)
        elif row not in others and file is not None and file.suffix == ".yaml":
            rows.append(file.stem)
            custom_files.append(file.resolve())
        else:
            none = "and no file of a custom row has this name or path"
            raise ConfigError(f"ROWS={row}: {part} trains no such row, {none}; {accepted(row, known)}")
    # also the names that rows have in the table: printed ones, and those of configs without the table's
    taken = {row["method"] for row in printed["tables"].get(part, {}).get("rows", [])}
    taken |= {*known, *(row.removeprefix(f"{part}_") for row in known)}
    twice = [row for row in rows if rows.count(row) > 1] or [file.stem for file in custom_files if file.stem in taken]
    if twice:
        raise ConfigError(f"ROWS: two rows have the name {twice[0]}; rename the custom row")
    return tuple(rows), tuple(custom_files)


def set_text(settings: Iterable[str]) -> str:
    """The end of a printed command, " SET=...", without paths of this machine; "" without settings."""
    words = map(_without_path, settings)
    text = " ".join(shlex.quote(word) if re.search(r"[\s'\"]", word) else word for word in words)  # quotes are kept
    quoted = shlex.quote(text) if re.search(r'["$`]', text) else f'"{text}"'
    return f" SET={quoted}" if text else ""


def _without_path(override: str) -> str:
    # results are committed and shared
    key, _, value = override.partition("=")
    return f"{key}=<path>" if "/" in value or "\\" in value else override
