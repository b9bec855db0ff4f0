"""From a row of a paper's table to a trained run: read from the cache, resumed, or trained now.

Resolved config, data and initial weights name a run's folder. The run is current while the files that trained it are
unchanged (dependencies.json). A stale run is set aside, never shown or overwritten. If only code that evaluates has
changed, the checkpoint is evaluated again.
"""

import argparse
import dataclasses
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from common.base.arguments import rows_of
from common.base.config import ConfigError, load_row, row_file
from common.base.dependencies import changed_files, loaded_files
from common.base.fields import deciding
from common.base.files import read_json, read_repository_yaml, write_json
from common.base.places import ROOT, outputs
from common.base.provenance import hash_of
from common.data.pairs import open_evaluation_sets, open_training_pairs, open_validation_sets
from common.distributed import gather_objects, wait_for_everyone
from common.run.checkpoint import last_checkpoint, saved_weights
from common.run.evaluation_files import is_validated, read_evaluations, read_validation
from common.run.folder import RunFiles, check_same_run, only_run_in, run_files, set_aside_if_stale, stale_files
from common.run.guards import NonFiniteLoss
from common.run.inputs import validates
from common.run.launch import ending_together, interrupted_with_saved_step, start_accelerator
from common.run.log import read_log


def _open_tests(data: Any) -> dict[str, Any]:
    sets = open_evaluation_sets(data)
    return {**sets.zero_shot, **sets.retrieval}


def _open_validation(config: Any) -> list[Any]:
    return open_validation_sets(config.data)


@dataclass(frozen=True)
class PaperCode:
    """What a paper folder brings to reproduce its rows.

    train: (config, pairs, files, resume, accelerator, label) -> None; trains and evaluates.
    evaluate: (checkpoint, config, files, accelerator) -> None; evaluates again and writes the run's files.
    open_training: (config.data, seed) -> training set with a fingerprint.
    open_tests: config.data -> evaluated sets with a fingerprint, by role.
    scale_files: stem of the scale files, see `load_row`.
    other: file of a row -> the code that trains it, in a folder with several; None = this one trains all.
    open_validation: config -> validation sets, each with name and fingerprint.
    """

    name: str
    config_class: type
    train: Callable[..., None]
    evaluate: Callable[..., None]
    open_training: Callable[[Any, int], Any] = open_training_pairs
    open_tests: Callable[[Any], dict[str, Any]] = _open_tests
    scale_files: str = "scale"
    other: Callable[[Path], "PaperCode"] | None = None
    open_validation: Callable[[Any], list[Any]] = _open_validation

    def of(self, row: str) -> "PaperCode":
        """The code that trains a row.

        Args:
            row: file name in the folder's configs/, a path, or "../../<paper>/configs/<file>" of another paper.
        Raises:
            ConfigError: the other paper's folder is missing.
        """
        if row.startswith("../../"):
            other = Path(row).parts[2]
            if not (ROOT / other / "reproduce.py").is_file():
                raise ConfigError(
                    f"{row}: trained by {other}/, which is missing; expected a copy of the repository with it"
                )
            return import_module(f"{other}.reproduce").CODE.of(Path(row).name)
        return self if self.other is None else self.other(self.folder / "configs" / row)

    @property
    def folder(self) -> Path:
        return ROOT / self.name

    def config(self, row: str, scale: str, overrides: Iterable[str] = ()) -> Any:
        """A row's config; `row` is a file name in the folder's configs/, or a path.

        Raises:
            ConfigError: as `load_row`.
        """
        file = self.folder / "configs" / row
        return load_row(self.config_class, self.folder, file, scale, list(overrides), self.scale_files)

    def printed(self, table_id: str) -> dict[str, Any]:
        table = paper_tables(self.name)["tables"][table_id]
        for row in table["rows"]:
            values, columns = len(row["values"]), len(table["columns"])
            if values != columns:  # said before anything is trained
                raise ConfigError(
                    f"{self.name}/paper_tables.yaml, {table_id}, row {row['method']}: {values} values for {columns} "
                    "columns; expected: one each, null where the paper prints none"
                )
        return table


def paper_tables(paper: str) -> dict[str, Any]:
    """Content of a paper folder's paper_tables.yaml."""
    return read_repository_yaml(ROOT / paper / "paper_tables.yaml")


def words_of_plot(paper: str, table_id: str) -> dict[str, Any]:
    """The arguments `method` and `title` of `plot_table` from a paper_tables.yaml."""
    printed = paper_tables(paper)
    title = printed["tables"].get(table_id, {}).get("title") or printed["paper"].get("titles", {}).get(table_id, "")
    return {"method": printed["paper"].get("method"), "title": title}


@dataclass(frozen=True)
class RowRun:
    """One finished run.

    evaluations, hits: by role.
    validation: name of the data -> metrics of the last step; empty if the run has no validation set.
    """

    files: RunFiles
    seed: int
    evaluations: dict[str, Any]
    hits: dict[str, Any]
    training_data: str
    hardware: str
    git_revision: str
    versions: str
    config: Any
    validation: dict[str, dict[str, float]] = field(default_factory=dict)
    evaluated_at: str = ""


# of a config's `start`: the setting that names a row -> the one that takes the folder of its run
STARTS = {"row": "run", "discriminator": "discriminator_run"}


class Job(NamedTuple):
    """A run to read or train.

    row: file name in the configs/ of `paper`, or the path of a custom row.
    overrides: "section.key=value", of the row and of the one that it starts from.
    runs: folder of all runs.
    settings: "section.key=value" that only this row takes.
    """

    paper: PaperCode
    row: str
    scale: str
    seed: int
    overrides: tuple[str, ...]
    runs: Path
    settings: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        settings = "".join(f", {text.partition('.')[2]}" for text in self.settings)
        return f"{Path(self.row).stem}, seed {self.seed}{settings}"

    def config(self, *more: str) -> Any:
        return self.paper.config(self.row, self.scale, [*self.overrides, *self.settings, *more])

    def parents(self) -> "dict[str, Job]":
        """Runs of other rows that this one starts from, by the setting for their folder; none where that is set.

        Raises:
            ConfigError: a missing row, or one that starts from itself.
        """
        start, parents = getattr(self.config(), "start", None), {}
        # where a row starts says nothing of its parents, but for the BERT below them all
        of_row = ("start.", "data.blank=")
        inherited = (text for text in self.overrides if not text.startswith(of_row) or text.startswith("start.bert="))
        inherited = tuple(inherited)
        for name, folder in STARTS.items():
            row = getattr(start, name, "")
            if not row or getattr(start, folder):
                continue
            file = self.paper.folder / "configs" / f"{row}.yaml"
            if not file.is_file() or row == Path(self.row).stem:
                expected = f"expected another row of {self.paper.name}: {', '.join(rows_of(self.paper.folder))}"
                raise ConfigError(f"{self.row}: start.{name} = {row}; {expected}")
            paper = self.paper.of(file.name)
            known = deciding(paper.config_class)  # settings of a task are none of the pre-training's
            overrides = tuple(text for text in inherited if text.partition("=")[0] in known)
            parents[f"start.{folder}"] = self._replace(paper=paper, row=file.name, overrides=overrides, settings=())
        return parents

    def opened(self) -> tuple[Any, Any, RunFiles]:
        """Config, training set and files; the weights of its parents are in the key: no run outlives a parent."""
        # resolved here, since a key cannot hold a row that is trained later
        starts = [f"{setting}={parent.opened()[2].folder}" for setting, parent in self.parents().items()]
        config = self.config(*starts, f"run.seed={self.seed}")
        pairs = self.paper.open_training(config.data, self.seed)
        return (
            config,
            pairs,
            run_files(self.paper.name, Path(self.row).stem, self.scale, config, pairs.fingerprint, self.runs),
        )


def run_row(job: Job) -> RowRun:
    """Trains a row unless the same run is cached; before it the rows that it starts from.

    Raises:
        NonFiniteLoss: training diverged, now or earlier; diverged.json in the run's folder has the message.
        ConfigError: the folder holds another run, or the log of a finished one is torn; as `Job.parents`.
    """
    for parent in job.parents().values():
        run_row(parent)
    paper, label = job.paper, job.label
    config, pairs, files = job.opened()
    accelerator = start_accelerator(config.run, files.folder)

    def state_for_all() -> str:
        return gather_objects(_state_of(paper, config, pairs.fingerprint, files))[0]  # the main process decides

    state = state_for_all()
    # finished runs are only read, by several processes if need be
    needs_lock = accelerator.is_main_process and state != "current"
    with ExitStack() as stack:
        with ending_together():
            if needs_lock:
                stack.enter_context(only_run_in(files, config.run.lock))
        stack.enter_context(interrupted_with_saved_step(files))
        state = state if state == "current" else state_for_all()  # another process may have finished it meanwhile
        if state == "stale":
            with ending_together():  # the others must not see its checkpoints any more
                if accelerator.is_main_process:
                    set_aside_if_stale(files)
            state = "unfinished"
        # the same seed would diverge again
        if state == "diverged":
            raise NonFiniteLoss(f"{label}, earlier: {_divergence(files)} Remove {files.folder} to train it again.")
        if state == "current":
            accelerator.print(f"{label}: found in {files.folder}")
        elif state == "trained":
            accelerator.print(
                f"{label}: evaluation code, test data or files have changed, evaluating the checkpoint again"
            )
            paper.evaluate(last_checkpoint(files.checkpoints), config, files, accelerator)
        else:
            try:
                paper.train(config, pairs, files, True, accelerator, label)
            except NonFiniteLoss as error:
                if accelerator.is_main_process:
                    write_json(_diverged(files), {"error": str(error), **files.identity})
                raise NonFiniteLoss(f"{label}: {error}") from error
    wait_for_everyone()
    return read_run(files, config)


def is_missing(job: Job, states: Collection[str] = ("unfinished", "trained", "stale", "unvalidated")) -> bool:
    """Whether `run_row` would train or evaluate.

    Args:
        states: that count as missing; without "trained", a run that only needs evaluation does not.
    Raises:
        ConfigError: as `run_row`.
    """
    if any(is_missing(parent, states) for parent in job.parents().values()):
        return True
    config, pairs, files = job.opened()
    return _state_of(job.paper, config, pairs.fingerprint, files) in states


def started(paper: PaperCode, config: Any, arguments: argparse.Namespace) -> Any:
    """The config of a train.py's command line with the runs that its row starts from; missing ones are trained.

    Raises:
        ConfigError: a resumed run whose start is missing, unfinished or stale: it would resume from another one.
    """
    row, runs = str(row_file(paper.folder, arguments.config).resolve()), outputs() / "runs"
    parents = Job(paper, row, arguments.scale, config.run.seed, tuple(arguments.overrides), runs).parents()
    if arguments.dry_run:  # weights of a missing one are random: as many and as large
        missing = {name: job for name, job in parents.items() if is_missing(job)}
        arguments.missing_rows = [Path(job.row).stem for job in missing.values()]
        parents = {name: job for name, job in parents.items() if name not in missing}
    for job in parents.values() if arguments.resume == "last" else ():
        if is_missing(job, ("unfinished", "stale")):
            raise ConfigError(
                f"--resume: {job.label}, which this run starts from, is missing, unfinished or made from files that "
                "have changed since; expected: that run, or no --resume, which trains both"
            )
    folders = {name.removeprefix("start."): str(run_row(job).files.folder) for name, job in parents.items()}
    return dataclasses.replace(config, start=dataclasses.replace(config.start, **folders)) if folders else config


def read_run(files: RunFiles, config: Any) -> RowRun:
    """A finished run, from its files.

    Raises:
        ConfigError: they were changed since.
    """
    validation = read_validation(files)
    evaluation, hits = (read_evaluations(files) or (None, {})) if config.run.test else (validation, {})
    if evaluation is None:
        changed = files.evaluation if config.run.test else files.validation
        raise ConfigError(f"{changed} has been changed just now, by another process or by hand")
    trained, measured = evaluation["training_versions"], evaluation["versions"]
    return RowRun(
        files=files,
        seed=config.run.seed,
        evaluations=evaluation["evaluations"],
        hits=hits,
        training_data=evaluation["training_data"],
        hardware=evaluation["hardware"],
        git_revision=evaluation["training_revision"],
        evaluated_at=evaluation["git_revision"],
        versions=measured if measured == trained else f"{trained}, measured with {measured}",
        config=config,
        validation=(validation or {}).get("validation", {}),
    )


def measured_once(run: RowRun, script: Path, settings: Any, measure: Callable[[], Any]) -> Any:
    """JSON values that an analysis measures on a finished run, cached beside it until its weights or the code change.

    Args:
        script: that measures; its name is in the key.
        settings: plain values that the measurement depends on beside the run and its test sets.
        measure: () -> JSON values.
    """
    # another test set is another measurement; other code is checked by its files
    tests = {role: result["protocol"]["fingerprint"] for role, result in run.evaluations.items()}
    weights = saved_weights(run.files.checkpoints)  # a run that was trained again may have others under its key
    key = hash_of({"settings": settings, "tests": tests, "weights": weights, "run": dict(run.files.identity)})
    path = run.files.folder / "measured" / f"{script.stem}-{key}.json"
    cached = read_json(path)
    if cached is None or changed_files(cached["files"]):
        loaded_files("weights", "evaluation")  # their hashes are those of now, whatever is edited meanwhile
        write_json(path, {"values": measure(), "files": loaded_files("weights", "evaluation")})
        cached = read_json(path)
    return cached["values"]


def _state_of(paper: PaperCode, config: Any, data_fingerprint: str, files: RunFiles) -> str:
    # "current" (evaluated by this code on these sets), "trained" or "unvalidated" (to be measured), "diverged",
    # "unfinished" or "stale" (trained by files that have changed since).
    # If run.test is false the validation sets count.
    if stale_files(files):
        return "stale"
    if not config.run.test:
        if is_validated(files, paper.open_validation(config)):
            return "current"
    elif is_current(files, paper.open_tests(config.data)):
        # read last, as its sums take time; with its last step a run only validates and evaluates again
        if _lacks_validation(paper, config, files) and last_checkpoint(files.checkpoints) is not None:
            return "unvalidated"
        _check_log(files)
        return "current"
    # no current evaluation: the weights may be final, or on their way
    checkpoint = last_checkpoint(files.checkpoints)
    if checkpoint is not None:
        check_same_run(checkpoint, files, config, data_fingerprint)
        if config.run.test and checkpoint.state["step"] == config.optim.steps:
            return "unvalidated" if _lacks_validation(paper, config, files) else "trained"
    return "unfinished" if _divergence(files) is None else "diverged"


def _lacks_validation(paper: PaperCode, config: Any, files: RunFiles) -> bool:
    if not files.validation.is_file() or not validates(config.run):
        return False
    return not is_validated(files, paper.open_validation(config))


def _check_log(files: RunFiles) -> None:
    # tables take curves and last values from the log, so it must reach the evaluated step
    step = read_json(files.evaluation)["step"]
    try:
        steps = [record["step"] for record in read_log(files.log) if record["event"] == "train"]
        problem = None if max(steps, default=0) == step else f"{files.log} does not go on to step {step}"
    except (FileNotFoundError, ValueError) as error:
        problem = str(error)
    if problem is not None:
        raise ConfigError(
            f"{problem}: the run was whole and its log is no longer; remove {files.folder} to train again"
        )


def is_current(files: RunFiles, tests: dict[str, Any]) -> bool:
    """Whether the evaluations are of this run, by this code, on these test sets (by role)."""
    kept = read_evaluations(files)
    if kept is None:
        return False
    evaluation, _ = kept
    today = {role: data_set.fingerprint for role, data_set in tests.items()}
    then = {role: result["protocol"]["fingerprint"] for role, result in evaluation["evaluations"].items()}
    return then == today and not changed_files(evaluation["evaluation_code"])


def _diverged(files: RunFiles) -> Path:
    return files.folder / "diverged.json"


def _divergence(files: RunFiles) -> str | None:
    record = read_json(_diverged(files))
    if not isinstance(record, dict) or any(record.get(name) != value for name, value in files.identity.items()):
        return None
    return record.get("error")
