"""The evaluation files of a run: written, and read back if they are whole and belong to the run and its weights."""

from typing import Any

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
    weights than those of the newest checkpoint.
    """
    content, hits = read_json(files.evaluation), read_json(files.hits)
    if not isinstance(content, dict) or content.pop("hash", None) != hash_of([content, hits]):
        return None
    weights = saved_weights(files.checkpoints)
    expected = files.identity if weights is None else {"weights": weights, **files.identity}
    return (content, hits) if all(content.get(name) == value for name, value in expected.items()) else None
