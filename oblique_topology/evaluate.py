"""Evaluates a checkpoint of the oblique-topology paper: zero-shot classification, retrieval, linear probe, as JSON.

python oblique_topology/evaluate.py --checkpoint outputs/runs/oblique_topology/<run>/seed0
python oblique_topology/evaluate.py --checkpoint <folder> data.source=shards data.root=/data/flickr8k
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.base.provenance import hash_of
from common.base.settings import DataConfig
from common.data.pairs import EvaluationSets, open_evaluation_sets
from common.data.scenes import classification_task
from common.encoders.two_towers import bare_tower
from common.evaluation.embed import Encoder
from common.evaluation.knn import check_classes
from common.evaluation.linear_probe import PROBES, ProbeConfig, backbone_encoder, evaluate_linear_probe
from common.evaluation.protocol import Evaluation
from common.run.evaluation import TrainedModels, evaluate_main, zero_shot_and_retrieval
from common.run.launch import run_or_explain
from oblique_topology.config import Config
from oblique_topology.model import build_model

DECIDES = "evaluation"

PAPER = "oblique_topology"
PROBE_TRAIN, PROBE_TEST = "imagenet_train", "imagenet"  # labelled sets of the linear probe
PROBE_PICTURES = 4_000  # scenes to train the probe on, at most
PROBE_SEED = 0  # of the probe's weights and order; the same for all runs, which differ in their own seeds
# the paper's recipe on scenes and on a frozen backbone: features are computed once from images without augmentation, so
# that a CPU is enough
CACHED_PROBE = replace(PROBES["oblique"], batch_size=256, crop_scale=None, flip_probability=0.0, use_rand_augment=False)


@dataclass(frozen=True)
class ProbedSets:
    """Identity of the probe's training and test set, for the cache of evaluations."""

    fingerprint: str


def evaluated_sets(data: DataConfig) -> dict[str, Any]:
    """Role -> its test set, or an object with only its fingerprint."""
    sets = open_evaluation_sets(data)
    probe = probe_sets(data, sets)
    classified = without_probe_train(sets)
    probed = {} if probe is None else {"linear_probe": ProbedSets(_fingerprint_of_probe(*probe[:2]))}
    return {**classified.zero_shot, **classified.retrieval, **probed}


def evaluate_all(config: Config, encoder: Encoder, sets: EvaluationSets) -> dict[str, Evaluation]:
    """Evaluations of every set by role, and "linear_probe" if labelled sets for it exist.

    The probe reads all class tokens after the last LayerNorm, before the projection, so Multi has more features.
    """
    results = zero_shot_and_retrieval(config, encoder, without_probe_train(sets))
    probe = probe_sets(config.data, sets)
    return results if probe is None else results | {"linear_probe": linear_probe(encoder, *probe)}


def linear_probe(encoder: Encoder, train: Any, test: Any, recipe: ProbeConfig) -> Evaluation:
    """Accuracy of a linear probe on the image tower, see `probe_sets`; a frozen backbone has cached features."""
    stem = bare_tower(encoder.model.image_tower).stem
    if stem is not None and not stem.trainable:
        recipe = CACHED_PROBE
    backbone = backbone_encoder(encoder, encoder.model.image_tower)
    result = evaluate_linear_probe(backbone, train, test, recipe, PROBE_SEED)
    both = {"fingerprint": _fingerprint_of_probe(train, test), "test_fingerprint": test.fingerprint}
    return replace(result, protocol=result.protocol | both)


def _fingerprint_of_probe(train: Any, test: Any) -> str:
    """Changes with either set: an accuracy depends on both."""
    return hash_of([train.fingerprint, test.fingerprint])


def probe_sets(data: DataConfig, sets: EvaluationSets) -> tuple[Any, Any, ProbeConfig] | None:
    """Training set, test set and recipe of the linear probe; None if labelled sets are missing.

    Raises:
        ValueError: the sets differ in their classes.
    """
    if data.source == "scenes":
        size = min(4 * data.num_labelled, PROBE_PICTURES)
        train = classification_task(PROBE_TEST, size=size, image_size=data.image_size, part="train")
        return train, sets.zero_shot[PROBE_TEST], CACHED_PROBE
    if {PROBE_TRAIN, PROBE_TEST} <= sets.zero_shot.keys():
        check_classes(sets.zero_shot[PROBE_TRAIN], sets.zero_shot[PROBE_TEST])
        return sets.zero_shot[PROBE_TRAIN], sets.zero_shot[PROBE_TEST], PROBES["oblique"]
    return None


def without_probe_train(sets: EvaluationSets) -> EvaluationSets:
    """The sets without the probe's training set, which is not classified zero-shot."""
    return replace(sets, zero_shot={name: task for name, task in sets.zero_shot.items() if name != PROBE_TRAIN})


MODELS = TrainedModels(PAPER, Config, build_model, evaluate_all)
load_encoder = MODELS.load_encoder  # (checkpoint, device, overrides) -> (config, encoder)
reevaluate = MODELS.reevaluate  # (checkpoint, config, files, accelerator)


def main() -> None:
    evaluate_main(__doc__, MODELS)


if __name__ == "__main__":
    run_or_explain(main)
