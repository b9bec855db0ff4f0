"""The folder of a run: its name and files, the code that trained it, whether it may be resumed."""

import argparse
import contextlib
import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock
import yaml

from common.base.arguments import some
from common.base.config import SCALES, ConfigError, to_dict
from common.base.dependencies import changed_files, loaded_files
from common.base.fields import Decides, deciding, flattened, stated_by_weights
from common.base.files import NoLocks, locked, naming, read_json, utf8, write_json
from common.base.places import outputs
from common.base.provenance import computes_bfloat16, git_revision, hardware, hash_of, versions
from common.base.settings import DataConfig, RunConfig
from common.data.text import build_tokenizer
from common.distributed import gather_objects, is_main_process
from common.run.checkpoint import Checkpoint, CheckpointError, last_checkpoint, saved_step, set_aside_later
from common.run.sources import initial_fingerprints

LOCK = ".lock"  # file in a run's folder
PRECISIONS = ("no", "bf16")  # float16 would want its loss scaled


def _file(name: str) -> Any:
    return property(lambda files: files.folder / name)


@dataclass(frozen=True)
class RunFiles:
    """Files of one run (a row, a scale, a seed).

    identity: what evaluation.json must hold to belong to this run: row, scale, seed, key and evaluation settings.
    command: shell line that resumes the run; "" = the one that started it.
    is_dry: of a dry run, in a temporary folder.
    """

    folder: Path
    identity: Mapping[str, Any] = field(default_factory=dict, compare=False)
    command: str = field(default="", compare=False)
    is_dry: bool = field(default=False, compare=False)

    @property
    def title(self) -> str:
        if "row" not in self.identity:
            return self.folder.name
        return "{row}, scale {scale}, seed {seed}".format_map(self.identity)

    config = _file("config.yaml")
    log = _file("log.jsonl")
    curves = _file("curves.png")
    readme = _file("README.md")
    checkpoints = _file("checkpoints")
    dependencies = _file("dependencies.json")
    evaluation = _file("evaluation.json")
    hits = _file("hits.json")
    validation = _file("validation.json")


def run_key(paper: str, config: Any, data_fingerprint: str) -> str:
    """Hash of what decides a training run: resolved config, data, initial weights. For the code see `stale_files`."""
    data, content = config.data, _settings_deciding("weights", config)
    if not content.get("data.partner_noise"):  # without noise no partner is drawn
        content.pop("data.partners_drawn", None)
    # in the key though a run may go on with another one: a launch may say it, and the results are two
    content["precision"] = precision_of(config.run)
    content["initial_weights"] = initial_fingerprints(config)
    if isinstance(data, DataConfig) and data.tokenizer != "words":  # those are counted in the training set
        content["tokenizer"] = build_tokenizer(data, training_pairs=None).fingerprint
    return hash_of({"paper": paper, "config": content, "data": data_fingerprint})


def precision_of(run: RunConfig) -> str:
    """Precision of the towers as Accelerate names it: "no" is float32, of convolutions on CUDA torch's default TF32."""
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    check_precision(f"ACCELERATE_MIXED_PRECISION = {launched!r}", launched)
    if run.mixed_precision == "auto":
        return "bf16" if computes_bfloat16() else "no"
    return run.mixed_precision or launched


def check_precision(where: str, name: str) -> None:
    """Raises ConfigError for an unsupported precision; `where` is key and value for the message."""
    if name not in PRECISIONS:
        raise ConfigError(
            f"{where} (from the environment, the option --mixed_precision of accelerate launch, or its config file); "
            f"expected one of: {', '.join(PRECISIONS)}"
        )


def provenance_of() -> dict[str, str]:
    """Revision, machine and versions; taken once at the start of a run."""
    return {"git_revision": git_revision(), "hardware": hardware(), "versions": versions()}


def run_files(
    paper: str, row: str, scale: str, config: Any, data_fingerprint: str, runs: Path | None = None
) -> RunFiles:
    """Files of a run in a folder that its key names, below `runs` (None = that of `outputs`)."""
    key = run_key(paper, config, data_fingerprint)
    folder = (outputs() / "runs" if runs is None else runs) / paper / f"{row}-{scale}-{key}" / f"seed{config.run.seed}"
    return RunFiles(folder, _identity(row, scale, config) | {"key": key})


def settings_of_all_seeds(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a config.yaml that other seeds share: without `run`; runs it starts from count by their settings."""
    settings = {key: value for key, value in config.items() if key != "run"}
    start = dict(settings.get("start") or {})
    for key in ("run", "discriminator_run"):
        file = Path(start.get(key) or "nowhere") / "config.yaml"
        if file.is_file():
            start[key] = settings_of_all_seeds(yaml.safe_load(file.read_text(encoding="utf-8")))
    return settings | ({"start": start} if start else {})


@dataclass(frozen=True)
class RunName:
    """What a run's folder is named after: table4_clip-demo-0a1b2c3d4e5f/seed0.

    scale: None in a folder with another name, which `row` then holds. seed: None without a folder seed<number>.
    """

    row: str
    scale: str | None
    seed: int | None

    @classmethod
    def of(cls, folder: Path) -> "RunName":
        """The name of a run's folder, or of a checkpoint in it."""
        parts = [part for part in folder.resolve().parts if not re.fullmatch(r"checkpoints|step-\d+", part)]
        seed = re.fullmatch(r"seed(\d+)", parts[-1])
        name = parts[-2] if seed else parts[-1]
        made = re.fullmatch(rf"(.+)-({'|'.join(SCALES)})-[0-9a-f]+", name)
        return cls(*(made.groups() if made else (name, None)), int(seed[1]) if seed else None)


def _identity(row: str, scale: str, config: Any) -> dict[str, Any]:
    evaluated = _settings_deciding("evaluation", config)
    return {"row": row, "scale": scale, "seed": config.run.seed, "evaluated_with": evaluated}


def chosen_files(script: Path, arguments: argparse.Namespace, config: Any, data_fingerprint: str) -> RunFiles:
    """Files of a train.py's command line; --resume needs a checkpoint, --resume auto starts a fresh run without one."""
    if arguments.output_dir is not None:
        files = RunFiles(Path(arguments.output_dir), _identity(arguments.row, arguments.scale, config))
    else:
        files = run_files(script.resolve().parent.name, arguments.row, arguments.scale, config, data_fingerprint)
    if arguments.resume == "last" and saved_step(files.checkpoints) is None:
        raise ConfigError(
            f"--resume: {files.folder} holds no checkpoint. Another config or other data have another folder; "
            "expected --output-dir with the folder of the run, or --resume auto, which starts afresh without one"
        )
    return files


def save_dependencies(files: RunFiles, is_fresh: bool) -> None:
    """Records the files that decide the weights; those of earlier processes of the run keep their first hashes."""
    if is_main_process():
        before = {} if is_fresh else read_json(files.dependencies) or {}
        write_json(files.dependencies, loaded_files("weights") | before)


def stale_files(files: RunFiles) -> list[str]:
    """Files that have changed since they trained the run of a folder; empty where there is no run."""
    dependencies = read_json(files.dependencies)
    if dependencies is not None:
        return changed_files(dependencies)
    return ["dependencies.json (missing)"] if saved_step(files.checkpoints) is not None else []


def set_aside_if_stale(files: RunFiles) -> None:
    """Renames a run that other code has trained; call while the folder is locked."""
    stale = stale_files(files)
    if not stale:
        return
    # the first free number: earlier stale runs stay too
    names = (f"stale-{files.folder.name}-{number}" for number in itertools.count(1))
    aside = next(folder for folder in (files.folder.with_name(name) for name in names) if not folder.exists())
    aside.mkdir()
    # by their list the rest is stale as well, should this process end between two of them
    for path in sorted(files.folder.iterdir(), key=lambda path: path == files.dependencies):
        if path.name != LOCK:
            path.rename(aside / path.name)
    print(f"{files.folder}: {some(stale)} changed since this run was trained; it is now {aside.name}", file=sys.stderr)


def save_config(files: RunFiles, config: Any, **provenance: Any) -> None:
    """Writes the resolved config, with its provenance as comments above it."""
    files.folder.mkdir(parents=True, exist_ok=True)
    header = {"git_revision": git_revision(), "hardware": hardware(), **provenance}
    # comments, so that the file can be used as a config again
    lines = "".join(f"# {key}: {' '.join(str(value).splitlines())}\n" for key, value in header.items())
    with naming(files.config):
        files.config.write_bytes(utf8(lines + yaml.safe_dump(to_dict(config), sort_keys=False)))


def checkpoint_to_resume(files: RunFiles, resume: bool, config: Any, data_fingerprint: str) -> Checkpoint | None:
    """The last whole checkpoint if the run resumes, None for a fresh run. Call on every process.

    Damaged checkpoints of later steps are set aside. The number of processes, loader workers and micro-batches may
    change.
    """
    checkpoint = problem = None
    try:
        checkpoint = last_checkpoint(files.checkpoints)
    except CheckpointError as error:  # raised when all know of it
        problem = error
    # processes compare what they see before one of them raises: the others would wait for it
    steps = gather_objects("damaged" if problem else None if checkpoint is None else checkpoint.state["step"])
    if len(set(steps)) > 1:
        raise ConfigError(f"{files.checkpoints} is not the same for all processes (steps {steps}): use a shared disk")
    if problem is not None:
        raise problem
    if checkpoint is None:
        return None
    # a fresh run never writes over a trained one
    if not resume:
        raise ConfigError(
            f"{files.folder} holds a run up to step {checkpoint.state['step']}: choose another --output-dir, or add "
            f"--resume to continue from there{files.command and f': {files.command}'}"
        )
    check_same_run(checkpoint, files, config, data_fingerprint)
    if is_main_process():
        set_aside_later(files.checkpoints, checkpoint.state["step"])
    return checkpoint


def check_same_run(checkpoint: Checkpoint, files: RunFiles, config: Any, data_fingerprint: str) -> None:
    """Refuses a checkpoint of another run."""
    now = _settings_deciding("weights", config)
    # what the code has learnt since is taken to have had its default
    before = _settings_deciding("weights", type(config)(), checkpoint.state["config"])
    changed = [
        f"{key} {before.get(key)} -> {now.get(key)}"
        for key in {**before, **now}
        if before.get(key) != now.get(key) and not (key in stated_by_weights(type(config)) and now.get(key) is None)
    ]
    if changed:
        problem = f"{files.folder} holds a run of another config: {'; '.join(changed[:5])}"
        raise ConfigError(f"{problem}; expected the settings of that run, or another --output-dir")
    # settings agree; what they name may have changed on the disk
    before, now = checkpoint.state.get("initial_weights", {}), initial_fingerprints(config)
    if changed := [key for key in {**before, **now} if before.get(key) != now.get(key)]:
        raise ConfigError(
            f"{files.folder} holds a run that started from other weights than {' and '.join(changed)} names now"
        )
    data, saved = config.data, checkpoint.state["config"].get("data", {})
    if getattr(data, "vocabulary", "") != saved.get("vocabulary", ""):  # a place: the same words may lie in another
        from common.data.text import build_tokenizer, tokenizer_from_json  # a run on pictures alone has none

        words = tokenizer_from_json(checkpoint.state["tokenizer"]).fingerprint
        if data.tokenizer != "words" and build_tokenizer(data, None).fingerprint != words:
            raise ConfigError(
                f"{files.folder} holds a run with the words of data.vocabulary = {saved.get('vocabulary')}, "
                f"{data.vocabulary} holds others; expected the words of that run, or another --output-dir"
            )
    if checkpoint.state["data_fingerprint"] != data_fingerprint:
        before, now = flattened(checkpoint.state["config"]), flattened(to_dict(config))
        keys = [f"data.{key}" for key in ("train", "root", "images", "val_share", "mixture") if f"data.{key}" in before]
        changed = [f"{key} {before[key]} -> {now.get(key)}" for key in keys if before[key] != now.get(key)]
        raise ConfigError(
            f"{files.folder} holds a run on other training data than data.train and data.root name now"
            + (f": {'; '.join(changed)}; expected the settings of that run" if changed else "")
        )


def _settings_deciding(kind: Decides, config: Any, saved: dict[str, Any] | None = None) -> dict[str, Any]:
    # Dotted key -> value of the settings that decide this; `saved` values win and may hold removed settings.
    kinds = deciding(type(config))

    def kind_of(key: str) -> Decides:
        return kinds.get(key) or getattr(getattr(config, key.partition(".")[0], None), "decides", "weights")

    flat = flattened(to_dict(config)) | flattened(saved or {})
    return {key: value for key, value in flat.items() if kind_of(key) == kind}


@contextlib.contextmanager
def only_run_in(files: RunFiles, lock: bool = True) -> Iterator[None]:
    """Locks the run's folder for this process, if `lock`; enter on the main process.

    A new folder that is still empty at the end is removed: its run has not started.
    """
    created = [folder for folder in (files.folder, files.folder.parent) if not folder.exists()]
    files.folder.mkdir(parents=True, exist_ok=True)
    way = "run.lock=false, where no second process trains in this folder, or another --output-dir"
    with contextlib.ExitStack() as stack:
        try:
            if lock:
                stack.enter_context(locked(files.folder / LOCK, way, wait=0.0))
        except filelock.Timeout:
            raise ConfigError(
                f"another process trains in {files.folder}; wait for it or choose another folder"
            ) from None
        except NoLocks as error:
            raise ConfigError(str(error)) from error
        stack.callback(_remove_unused, created)
        yield


def _remove_unused(created: list[Path]) -> None:
    with contextlib.suppress(OSError):
        if created and {file.name for file in created[0].iterdir()} <= {LOCK}:
            (created[0] / LOCK).unlink(missing_ok=True)
            for folder in created:
                folder.rmdir()
