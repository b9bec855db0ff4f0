"""Evaluates a checkpoint of GeoMM's models: retrieval, by embeddings and by the matching head, as JSON.

python geomm/evaluate.py --checkpoint outputs/runs/geomm/<run>/seed0
python geomm/evaluate.py --checkpoint <folder> data.source=shards data.root=/data/flickr8k
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from common.base.settings import DataConfig
from common.data.pairs import EvaluationSets, Pairs, open_evaluation_sets
from common.evaluation.embed import EmbeddedPairs, Encoder, Evaluation, evaluate_retrieval, evaluation_mode
from common.evaluation.rerank import Match, evaluate_two_stage
from common.methods.albef import Albef
from common.run.evaluation import TrainedModels, evaluate_main
from common.run.launch import run_or_explain
from geomm.config import Config
from geomm.model import TRAINING_ONLY, Tokens, build_model

DECIDES = "evaluation"

PAPER = "geomm"


def evaluated_sets(data: DataConfig) -> dict[str, Pairs]:
    """Test sets by role; each has two rankings."""
    sets = open_evaluation_sets(data).retrieval
    return {name: pairs for role, pairs in sets.items() for name in (role, f"{role}_contrastive")}


def evaluate_all(config: Config, encoder: Encoder, sets: EvaluationSets) -> dict[str, Evaluation]:
    """Retrieval on every set: `test` with the matching head, `test_contrastive` only by embeddings.

    Without a matching head both are equal.
    """
    results = {}
    for role, pairs in sets.retrieval.items():
        if isinstance(encoder.model, Albef):
            rankings = evaluate_two_stage(encoder, pairs, partial(matching, encoder), config.method.k_test)
            results |= {role: rankings["matched"], f"{role}_contrastive": rankings["contrastive"]}
        else:
            ranked = evaluate_retrieval(encoder, pairs, gallery=config.data.gallery)
            results[role] = results[f"{role}_contrastive"] = ranked
    return results


def matching(encoder: Encoder, embedded: EmbeddedPairs) -> Match:
    """Function: (images, texts) indices into a test set -> logits of the matching head."""
    model, device = encoder.model, encoder.device
    tokens = replace(encoder, model=Tokens(model))
    pictures = tokens.images(embedded.pairs)[0][embedded.indices]
    words = tokens.texts(embedded.captions)
    masks = model.encoders.text_mask(encoder.tokenizer.encode(embedded.captions, encoder.context_length))

    @torch.no_grad()
    def match(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        with evaluation_mode(model):
            logits = model.match(words[texts].to(device), masks[texts].to(device), pictures[images].to(device))
        return logits[:, 1].float()

    return match


MODELS = TrainedModels(PAPER, Config, build_model, evaluate_all, training_only=TRAINING_ONLY)
load_encoder = MODELS.load_encoder  # (checkpoint, device, overrides) -> (config, encoder)
reevaluate = MODELS.reevaluate  # (checkpoint, config, files, accelerator)


def main() -> None:
    evaluate_main(__doc__, MODELS)


if __name__ == "__main__":
    run_or_explain(main)
