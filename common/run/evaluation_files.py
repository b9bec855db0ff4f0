"""The evaluation files of a run, read back only if they are whole and belong to it and its weights."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.base.dependencies import changed_files
from common.base.files import read_json, write_json
from common.base.provenance import hash_of
from common.distributed import is_main_process
from common.evaluation.protocol import Evaluation, as_json
from common.run.checkpoint import saved_weights
from common.run.folder import RunFiles

DECIDES = "evaluation"


def save_evaluations(
    paper: str,
    results: dict[str, Evaluation],
    files: RunFiles,
    step: int,
    training: dict[str, Any],
    provenance: dict[str, str],
) -> None:
    """Writes evaluation.json and hits.json on the main process; arguments as in `as_json`."""
    if not is_main_process():
        return
    hits = {name: result.hits for name, result in results.items()}
    content = as_json(paper, results, step, training, provenance)
    content |= {"weights": saved_weights(files.checkpoints), **files.identity}
    write_json(files.hits, hits)
    write_json(files.evaluation, content | {"hash": hash_of([content, hits])})


def read_evaluations(files: RunFiles) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Content of evaluation.json and hits.json.

    None if a file is missing or changed, or belongs to another run, other evaluation settings (files.identity) or other
    weights than the newest checkpoint's.
    """
    hits = read_json(files.hits)
    content = _read(files.evaluation, files, lambda content: [content, hits])
    return None if content is None else (content, hits)


def save_validation(
    paper: str,
    metrics: Mapping[str, Mapping[str, float]],
    sets: Sequence[Any],
    files: RunFiles,
    step: int,
    training: dict[str, Any],
    provenance: dict[str, str],
) -> None:
    """Writes validation.json on the main process: metrics of the last step by name of the data."""
    if is_main_process():
        content = as_json(paper, {}, step, training, provenance) | {"validation": metrics, "sets": _fingerprints(sets)}
        content |= {"weights": saved_weights(files.checkpoints), **files.identity}
        write_json(files.validation, content | {"hash": hash_of(content)})


def read_validation(files: RunFiles) -> dict[str, Any] | None:
    """What `save_validation` wrote; None as for `read_evaluations`."""
    return _read(files.validation, files, lambda content: content)


def is_validated(files: RunFiles, sets: Sequence[Any]) -> bool:
    """Whether validation.json is of this run, by the current code, on the current validation sets."""
    content = read_validation(files)
    return (
        content is not None and content["sets"] == _fingerprints(sets) and not changed_files(content["evaluation_code"])
    )


def _fingerprints(sets: Sequence[Any]) -> dict[str, str]:
    return {data_set.name: data_set.fingerprint for data_set in sets}


def _read(path: Path, files: RunFiles, hashed: Callable[[dict[str, Any]], Any]) -> dict[str, Any] | None:
    content = read_json(path)
    if not isinstance(content, dict) or content.pop("hash", None) != hash_of(hashed(content)):
        return None
    weights = saved_weights(files.checkpoints)
    expected = files.identity if weights is None else {"weights": weights, **files.identity}
    return content if all(content.get(name) == value for name, value in expected.items()) else None
