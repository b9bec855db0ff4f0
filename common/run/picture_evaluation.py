"""Quality of a backbone's frozen features: nearest neighbours, a linear probe, signs of collapse.

The probe is MoCo's (SGD, rate 30, batch 256, no decay, a tenth at 60 % and 80 % of the epochs), but features are
computed once, without augmentation, and scaled to norm 1, as one rate cannot suit different norms. Images are resized
to 224, not to 256 and cut.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from common.base.config import ConfigError, from_dict, override
from common.base.dependencies import loaded_files
from common.data.transforms import ImageTransform
from common.diagnosis import collapse_statistics
from common.evaluation.embed import Encoder
from common.evaluation.knn import evaluate_knn, knn_scores, labelled_features
from common.evaluation.linear_probe import PROBES, TowerFeatures, evaluate_linear_probe
from common.evaluation.protocol import Evaluation, as_json
from common.methods.self_supervised import Method, share_buffers
from common.run.checkpoint import Checkpoint, named_checkpoint
from common.run.evaluation import check_writer, command_line, save_answer, this_device
from common.run.evaluation_files import save_evaluations
from common.run.folder import RunFiles, provenance_of
from common.run.launch import join_processes
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


# ------------------------------------------------------------------------------------------------ of a checkpoint

_UNREAD = ("data.image_size", "data.views", "data.smallest_crop")  # a checkpoint keeps what prepares its pictures


@dataclass(frozen=True)
class PictureModels:
    """What a paper folder brings so that the checkpoints of its pretrain.py can be evaluated.

    build_method: (config, num_classes, seed) -> the method with random weights.
    """

    paper: str
    config_class: type
    build_method: Callable[[Any, int, int], Method]

    def load(self, checkpoint: Checkpoint) -> tuple[Any, Method]:
        """Config and method of a checkpoint, with its weights."""
        check_writer(checkpoint, self.paper, "vision", "evaluate_pictures.py")
        state = checkpoint.state
        trained = from_dict(self.config_class, state["config"], str(checkpoint.path / "state.json"))
        model = self.build_method(trained, state["num_classes"], trained.run.seed)
        checkpoint.load_model(model)
        return trained, model

    def evaluate(
        self, checkpoint: Checkpoint, config: Any, model: Method, device: torch.device
    ) -> dict[str, Evaluation]:
        """All evaluations of a loaded method, on the pictures of `config`."""
        transform = ImageTransform.from_json(checkpoint.state["transform"])
        encoder = backbone_features(model.to(device), config, transform, device)
        return evaluate_all(config, model, encoder, open_training_set(config.data), open_test_set(config.data))

    def reevaluate(self, checkpoint: Checkpoint, config: Any, files: RunFiles, accelerator: Accelerator) -> None:
        """Evaluates a trained run again, see `TrainedModels.reevaluate`."""
        results = self.evaluate(checkpoint, config, self.load(checkpoint)[1], accelerator.device)
        save_evaluations(self.paper, results, files, checkpoint.state["step"], checkpoint.state, provenance_of())

    def main(self, description: str) -> None:
        """The command line of an evaluate_pictures.py."""
        options = command_line(description, "a run of pretrain.py, or step-XXXXXXXX in it").parse_intermixed_args()
        join_processes(options.overrides)
        loaded_files("weights", "evaluation")  # their hashes are those of now, whatever is edited meanwhile
        checkpoint = named_checkpoint(Path(options.checkpoint))
        config, model = self.load(checkpoint)
        for text in options.overrides:
            if text.partition("=")[0] in _UNREAD or not text.startswith(("data.", "run.", "evaluation.")):
                raise ConfigError(
                    f"command line: {text} would change a trained model; expected data.*, run.* or evaluation.*, "
                    f"without {', '.join(_UNREAD)}"
                )
        results = self.evaluate(checkpoint, override(config, options.overrides), model, this_device())
        content = as_json(self.paper, results, checkpoint.state["step"], checkpoint.state, provenance_of())
        save_answer(content, results, options.checkpoint, options.output)
