"""Evaluates a checkpoint of the oblique-topology paper: zero-shot classification and retrieval, as JSON.

python oblique_topology/evaluate.py --checkpoint outputs/runs/oblique_topology/<run>/seed0/checkpoints/step-00000250
python oblique_topology/evaluate.py --checkpoint <folder> data.source=shards data.root=/data/flickr8k
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from accelerate import Accelerator

from common.data.pairs import EvaluationSets, open_evaluation_sets
from common.data.text import tokenizer_from_json
from common.data.transforms import ImageTransform
from common.distributed import is_main_process
from common.evaluation.embed import Encoder, Evaluation, evaluate_retrieval, evaluate_zero_shot
from common.run.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from common.run.config import ConfigError, from_dict, override
from common.run.session import RunFiles, provenance_of, run_or_explain, write_json
from oblique_topology.config import Config
from oblique_topology.model import build_model

PAPER = "oblique_topology"


def evaluate_all(config: Config, encoder: Encoder, sets: EvaluationSets) -> dict[str, Evaluation]:
    """Every evaluation of the paper's Table 2 for which there is data, by role."""
    results = {
        name: evaluate_zero_shot(encoder, task, config.method.prompt_average) for name, task in sets.zero_shot.items()
    }
    return results | {role: evaluate_retrieval(encoder, pairs) for role, pairs in sets.retrieval.items()}


def as_json(
    results: dict[str, Evaluation], step: int, training: dict[str, Any], provenance: dict[str, str]
) -> dict[str, Any]:
    """Metrics with their protocols, and what produced them.

    Args:
        results: by role.
        step: of the weights.
        training: the checkpoint's state: where the weights come from.
        provenance: of the evaluation.
    """
    return {
        "paper": PAPER,
        "step": step,
        "training_data": training["training_data"],
        "training_revision": training["training_revision"],
        **provenance,
        "evaluations": {
            name: {"metrics": result.metrics, "chance": result.chance, "protocol": result.protocol}
            for name, result in results.items()
        },
    }


def evaluate_and_save(
    config: Config,
    encoder: Encoder,
    sets: EvaluationSets,
    files: RunFiles,
    step: int,
    training: dict[str, Any],
    provenance: dict[str, str],
) -> None:
    """Evaluates on all processes; the main one writes metrics, and the hits that intervals are computed from."""
    results = evaluate_all(config, encoder, sets)
    if is_main_process():
        write_json(files.hits, {name: result.hits for name, result in results.items()})
        write_json(files.evaluation, as_json(results, step, training, provenance))


def load_encoder(checkpoint: Checkpoint, device: torch.device, overrides: Sequence[str] = ()) -> tuple[Config, Encoder]:
    """Rebuilds model and preprocessing from a checkpoint alone.

    Args:
        checkpoint: of this paper.
        device: where the model goes.
        overrides: "data.key=value" and "run.key=value": other test sets, other batch sizes.
    Raises:
        CheckpointError: if it belongs to another paper or another model.
        ConfigError: if an override would change the model.
    """
    if checkpoint.state["paper"] != PAPER:
        raise CheckpointError(f"{checkpoint.path} belongs to {checkpoint.state['paper']}; accepted: {PAPER}")
    fixed = [text for text in overrides if not text.startswith(("data.", "run."))]
    if fixed:
        raise ConfigError(f"command line: {fixed[0]} would change a trained model; accepted: data.* and run.*")
    trained = from_dict(Config, checkpoint.state["config"], str(checkpoint.path / "state.json"))
    config = override(trained, list(overrides))
    tokenizer = tokenizer_from_json(checkpoint.state["tokenizer"])
    model = build_model(trained, tokenizer.vocabulary_size)
    if checkpoint.state["geometry"] != model.geometry.name:
        raise CheckpointError(
            f"{checkpoint.path} was trained with geometry {checkpoint.state['geometry']!r}, "
            f"its config builds {model.geometry.name!r}"
        )
    checkpoint.load_model(model)
    encoder = Encoder(
        model=model.to(device).eval(),
        transform=ImageTransform.from_json(checkpoint.state["transform"]),
        tokenizer=tokenizer,
        context_length=trained.data.context_length,
        batch_size=config.run.evaluation_batch_size,
        device=device,
        num_workers=config.run.num_workers,
    )
    return config, encoder


def reevaluate(checkpoint: Checkpoint, config: Config, files: RunFiles, accelerator: Accelerator) -> None:
    """Evaluates a trained run again, after a change of the evaluation code or of the test data."""
    _, encoder = load_encoder(checkpoint, accelerator.device)
    sets = open_evaluation_sets(config.data)
    step, provenance = checkpoint.state["step"], provenance_of(PAPER)
    evaluate_and_save(config, encoder, sets, files, step, checkpoint.state, provenance)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, type=Path, help="folder step-XXXXXXXX of a run")
    parser.add_argument("--output", type=Path, default=None, help="JSON file; default: print")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. data.num_test=5000")
    arguments = parser.parse_intermixed_args()

    checkpoint = open_checkpoint(arguments.checkpoint)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    config, encoder = load_encoder(checkpoint, device, arguments.overrides)
    results = evaluate_all(config, encoder, open_evaluation_sets(config.data))
    content = as_json(results, checkpoint.state["step"], checkpoint.state, provenance_of(PAPER))
    if arguments.output is None:
        print(json.dumps(content, indent=1))
    else:
        write_json(arguments.output, content)


if __name__ == "__main__":
    run_or_explain(main)
