"""Quality of a backbone's frozen features: nearest neighbours, a linear probe, signs of collapse.

The probe is MoCo's (SGD, rate 30, batch 256, no decay, a tenth at 60 % and 80 % of the epochs), but features are
computed once, without augmentation, and scaled to norm 1, as one rate cannot suit different norms. Images are resized
to 224, not to 256 and cut.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate import Accelerator

from common.base.config import from_dict
from common.data.transforms import ImageTransform
from common.diagnosis import collapse_statistics
from common.evaluation.embed import Encoder
from common.evaluation.knn import evaluate_knn, knn_scores, labelled_features
from common.evaluation.linear_probe import PROBES, TowerFeatures, evaluate_linear_probe
from common.evaluation.protocol import Evaluation
from common.methods.self_supervised import Method, share_buffers
from common.run.checkpoint import Checkpoint, CheckpointError
from common.run.evaluation_files import save_evaluations
from common.run.folder import RunFiles, provenance_of
from common.run.pictures import SomePictures, open_test_set, open_training_set

DECIDES = "evaluation"

PROBE_SEED = 0  # of the probe's weights and order; the same for all runs, which differ in their own seeds


@dataclass(frozen=True)
class FrozenFeatures:
    """An Encoder that computes the features of a labelled set once."""

    encoder: Encoder
    computed: dict[int, tuple[Any, tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)

    def images(self, data_set: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if id(data_set) not in self.computed:  # the set is kept, so that its id stays its own
            self.computed[id(data_set)] = (data_set, self.encoder.images(data_set))
        return self.computed[id(data_set)][1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.encoder, name)


def backbone_features(model: Method, config: Any, transform: ImageTransform, device: torch.device) -> Encoder:
    """The encoder whose embeddings are the backbone's features."""
    return Encoder(
        model=TowerFeatures(model.encoder.backbone),
        transform=transform,
        tokenizer=None,
        context_length=0,
        batch_size=config.run.evaluation_batch_size,
        device=device,
        num_workers=config.run.num_workers,
        max_broken_share=config.data.max_broken_share,
    )


@torch.no_grad()
def projection_statistics(model: Method, views: torch.Tensor) -> dict[str, float]:
    """Signs of collapse in the projections that the loss compares, of one batch in evaluation mode.

    Args:
        model: in train mode, to which it returns.
        views: (batch, 3, size, size) normalised.
    """
    model.eval()
    statistics = collapse_statistics(model.encoder(views))
    model.train()
    return statistics


@torch.no_grad()
def monitor(model: Method, encoder: Encoder, bank: SomePictures, queries: SomePictures, config: Any) -> dict:
    """kNN accuracy, "knn_acc1" in [0, 1], and `collapse_statistics` of the queries' features. Call on every process."""
    share_buffers(model)
    bank_features, bank_labels = labelled_features(encoder, bank)
    features, labels = labelled_features(encoder, queries)
    settings = config.evaluation
    scores = knn_scores(
        features, bank_features, bank_labels, len(bank.class_names), settings.neighbours, settings.knn_temperature
    )
    return {"knn_acc1": float((scores.argmax(dim=1) == labels).double().mean()), **collapse_statistics(features)}


def evaluate_all(
    config: Any, model: Method, encoder: Encoder, training_set: Any, test_set: Any
) -> dict[str, Evaluation]:
    """All evaluations of a run, by role: "knn", "linear_probe", "collapse". Call on every process."""
    share_buffers(model)
    features, settings = FrozenFeatures(encoder), config.evaluation
    # no crops and no flips: features are computed once
    probe = replace(
        PROBES["moco_v1"],
        epochs=settings.probe_epochs,
        milestones=(settings.probe_epochs * 6 // 10, settings.probe_epochs * 8 // 10),
        crop_scale=None,
        flip_probability=0.0,
        normalize_features=True,
    )
    knn = evaluate_knn(features, training_set, test_set, settings.neighbours, settings.knn_temperature)
    protocol = {key: knn.protocol[key] for key in ("data", "fingerprint", "num_images", "feature_dim", "preprocessing")}
    return {
        "knn": knn,
        "linear_probe": evaluate_linear_probe(features, training_set, test_set, probe, PROBE_SEED),
        "collapse": Evaluation(
            metrics=collapse_statistics(labelled_features(features, test_set)[0]),
            protocol={"task": "collapse", **protocol},
            chance={},
            hits={},
        ),
    }


def evaluate_and_save(
    paper: str,
    config: Any,
    model: Method,
    encoder: Encoder,
    sets: tuple[Any, Any],
    files: RunFiles,
    step: int,
    training: dict[str, Any],
    provenance: dict[str, str],
) -> None:
    """Evaluates on all processes, on a training and a test set, and saves, see `save_evaluations`."""
    save_evaluations(paper, evaluate_all(config, model, encoder, *sets), files, step, training, provenance)


def load_method(
    config_class: type, build_method: Callable[[Any, int, int], Method], checkpoint: Checkpoint, num_classes: int
) -> Method:
    """The method of a checkpoint with its weights."""
    trained = from_dict(config_class, checkpoint.state["config"], str(checkpoint.path / "state.json"))
    model = build_method(trained, num_classes, trained.run.seed)
    checkpoint.load_model(model)
    return model


def reevaluate(
    paper: str,
    config_class: type,
    build_method: Callable[[Any, int, int], Method],
    checkpoint: Checkpoint,
    config: Any,
    files: RunFiles,
    accelerator: Accelerator,
) -> None:
    """Evaluates a trained run again, see `TrainedModels.reevaluate`."""
    if checkpoint.state.get("kind") != "vision":
        raise CheckpointError(f"{checkpoint.path} is not from {paper}/pretrain.py")
    # the model of the trained config, the data of the current one
    sets = open_training_set(config.data), open_test_set(config.data)
    model = load_method(config_class, build_method, checkpoint, len(sets[0].class_names)).to(accelerator.device)
    transform = ImageTransform.from_json(checkpoint.state["transform"])
    encoder = backbone_features(model, config, transform, accelerator.device)
    step, provenance = checkpoint.state["step"], provenance_of()
    evaluate_and_save(paper, config, model, encoder, sets, files, step, checkpoint.state, provenance)
