"""Evaluates a checkpoint of the oblique-topology paper: zero-shot classification and retrieval, as JSON.

python oblique_topology/evaluate.py --checkpoint outputs/runs/oblique_topology/<run>/seed0/checkpoints/step-00000250
python oblique_topology/evaluate.py --checkpoint <folder> data.source=shards data.root=/data/flickr8k
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from accelerate import Accelerator

from common.data.pairs import EvaluationSets, open_evaluation_sets
from common.data.tokenizer import WordTokenizer
from common.data.transforms import ImageTransform
from common.evaluation.embed import Encoder, Evaluation, evaluate_retrieval, evaluate_zero_shot
from common.run.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from common.run.config import from_dict, override
from common.run.provenance import git_revision, hardware
from common.run.session import RunFiles, evaluation_key, run_or_explain, write_json
from oblique_topology.config import Config
from oblique_topology.model import build_model

PAPER = "oblique_topology"


def evaluate_all(config: Config, encoder: Encoder, sets: EvaluationSets) -> dict[str, Evaluation]:
    """Every evaluation of the paper's Table 2 for which there is data, by role."""
    results = {
        name: evaluate_zero_shot(encoder, task, config.method.prompt_average) for name, task in sets.zero_shot.items()
    }
    return results | {role: evaluate_retrieval(encoder, pairs) for role, pairs in sets.retrieval.items()}


def as_json(results: dict[str, Evaluation], step: int) -> dict[str, Any]:
    """Metrics with their protocols, and what produced them."""
    return {
        "paper": PAPER,
        "step": step,
        "evaluation_key": evaluation_key(PAPER),
        "git_revision": git_revision(),
        "hardware": hardware(),
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
    training_data: str,
    is_main_process: bool,
) -> None:
    """Evaluates on all processes; the main one writes metrics, and the hits that intervals are computed from."""
    results = evaluate_all(config, encoder, sets)
    if is_main_process:
        write_json(files.hits, {name: result.hits for name, result in results.items()})
        write_json(files.evaluation, {"training_data": training_data, **as_json(results, step)})


def load_encoder(checkpoint: Checkpoint, device: torch.device) -> tuple[Config, Encoder]:
    """Rebuilds model and preprocessing from a checkpoint alone.

    Raises:
        CheckpointError: if it belongs to another paper or another model.
    """
    if checkpoint.state["paper"] != PAPER:
        raise CheckpointError(f"{checkpoint.path} belongs to {checkpoint.state['paper']}; accepted: {PAPER}")
    config = from_dict(Config, checkpoint.state["config"], str(checkpoint.path / "state.json"))
    tokenizer = WordTokenizer.from_json(checkpoint.state["tokenizer"])
    model = build_model(config, tokenizer.vocabulary_size)
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
        context_length=config.data.context_length,
        batch_size=config.run.evaluation_batch_size,
        device=device,
        num_workers=config.run.num_workers,
    )
    return config, encoder


def reevaluate(checkpoint: Checkpoint, files: RunFiles, accelerator: Accelerator) -> None:
    """Evaluates a trained run again, after a change of the evaluation code."""
    config, encoder = load_encoder(checkpoint, accelerator.device)
    step, training_data = checkpoint.state["step"], checkpoint.state["training_data"]
    sets = open_evaluation_sets(config.data)
    evaluate_and_save(config, encoder, sets, files, step, training_data, accelerator.is_main_process)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, type=Path, help="folder step-XXXXXXXX of a run")
    parser.add_argument("--output", type=Path, default=None, help="JSON file; default: print")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. data.num_test=5000")
    arguments = parser.parse_intermixed_args()

    checkpoint = open_checkpoint(arguments.checkpoint)
    config, encoder = load_encoder(checkpoint, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    config = override(config, arguments.overrides)
    content = as_json(evaluate_all(config, encoder, open_evaluation_sets(config.data)), checkpoint.state["step"])
    if arguments.output is None:
        print(json.dumps(content, indent=1))
    else:
        write_json(arguments.output, content)


if __name__ == "__main__":
    run_or_explain(main)
