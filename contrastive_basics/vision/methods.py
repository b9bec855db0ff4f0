"""Learning from images only: SimCLR, MoCo v1 to v3 and SimSiam, between two controls.

common/methods/self_supervised.py has the interface to the training loop, and what several processes need.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.feature_queue import FeatureQueue
from common.geometry import Sphere, inner_product_similarity, unit
from common.info_nce import nt_xent
from common.logit_scale import LogitScale
from common.methods.momentum_contrast import (
    MomentumContrast,
    MomentumContrastV3,
    batch_norm_mlp,
    linear_head,
    mlp_head,
    moco_v3_loss,
)
from common.methods.self_supervised import Method, MoCo, RandomWeights, StepLoss, build_backbone, with_head
from common.pool import QueuePool
from contrastive_basics.vision.config import VisionConfig
from contrastive_basics.vision.simsiam import SimSiam, simsiam_loss, simsiam_predictor, simsiam_projector


class SimCLR(Method):
    """Each of the 2N views of a batch against the other 2N - 1.

    Args:
        encoder: backbone and `simclr_head`; takes the views of both sides as one batch, as in the published code.
        logit_scale: 1/T. 10 on ImageNet, 2 on CIFAR-10.
    """

    def __init__(self, encoder: nn.Module, logit_scale: LogitScale) -> None:
        super().__init__()
        self.encoder, self.logit_scale = encoder, logit_scale

    def forward(
        self, first_views: Tensor, second_views: Tensor, labels: Tensor | None = None, shuffle_seed: int | None = None
    ) -> StepLoss:
        """(batch, 3, height, width) twice; the mean of NT-Xent, half of the published code's value."""
        first, second = unit(self.encoder(torch.cat([first_views, second_views]))).chunk(2)
        return StepLoss(nt_xent(first, second, Sphere(), self.logit_scale()))


class MoCoV3(Method):
    """Both directions against the keys of the whole batch, with a predictor on the query side."""

    def __init__(self, contrast: MomentumContrastV3) -> None:
        super().__init__()
        self.contrast = contrast

    @property
    def encoder(self) -> nn.Module:
        """Backbone and projector."""
        return self.contrast.encoder

    def forward(
        self, first_views: Tensor, second_views: Tensor, labels: Tensor | None = None, shuffle_seed: int | None = None
    ) -> StepLoss:
        """(batch, 3, height, width) twice; ctr(q1, k2) + ctr(q2, k1)."""
        logits = self.contrast(first_views, second_views)
        return StepLoss(moco_v3_loss(*logits, self.contrast.logit_scale()))

    def update_momentum_encoder(self, ema_momentum: float | None) -> None:
        """theta_k <- m theta_k + (1 - m) theta, parameters only."""
        self.contrast.update_momentum_encoder(ema_momentum)


class SimSiamMethod(Method):
    """A predictor and a stopped gradient instead of negatives.

    Args:
        stop_gradient: as in `simsiam_loss`.
    """

    def __init__(self, siamese: SimSiam, stop_gradient: bool = True) -> None:
        super().__init__()
        self.siamese, self.stop_gradient = siamese, stop_gradient

    @property
    def encoder(self) -> nn.Module:
        """Backbone and projector."""
        return self.siamese.encoder

    def predictor_parameters(self) -> list[nn.Parameter]:
        return list(self.siamese.predictor.parameters())

    def forward(
        self, first_views: Tensor, second_views: Tensor, labels: Tensor | None = None, shuffle_seed: int | None = None
    ) -> StepLoss:
        """(batch, 3, height, width) twice; minus the mean cosine of predictions and targets."""
        return StepLoss(simsiam_loss(*self.siamese(first_views, second_views), self.stop_gradient))


class Supervised(Method):
    """Upper control: the same backbone, trained with labels on one view of each image."""

    synchronised = False

    def __init__(self, encoder: nn.Module, classifier: nn.Linear) -> None:
        super().__init__()
        self.encoder, self.classifier = encoder, classifier

    def forward(
        self, first_views: Tensor, second_views: Tensor, labels: Tensor, shuffle_seed: int | None = None
    ) -> StepLoss:
        """(batch, 3, height, width), the second views unused, and (batch,) int64; cross-entropy."""
        return StepLoss(F.cross_entropy(self.classifier(self.encoder(first_views)), labels))


def build_method(config: VisionConfig, num_classes: int, seed: int) -> Method:
    """The method of a config, with random weights from the global random state.

    Heads have the published proportions to the backbone, which is 2048 wide in a ResNet-50: SimSiam's are 2048 and 512,
    MoCo v3's 4096, the hidden layers of the others 2048.

    Args:
        num_classes: of the supervised reference.
        seed: of the queue's random rows.
    """
    method = config.method
    backbone = build_backbone(config.model, method.batch_norm_parts)
    width, dim = backbone.output_dim, method.head_dim
    logit_scale = None if method.logit_scale is None else LogitScale(method.logit_scale, maximum=None, trainable=False)
    if method.name == "simclr":
        return SimCLR(with_head(backbone, simclr_head(width, dim)), logit_scale)
    if method.name in ("moco_v1", "moco_v2"):
        head = linear_head(width, dim) if method.name == "moco_v1" else mlp_head(width, dim)
        pool = QueuePool(
            FeatureQueue(method.queue_size, dim, seed=seed), inner_product_similarity, matched_key_only=True
        )
        contrast = MomentumContrast(with_head(backbone, head), Sphere(), logit_scale, pool, method.symmetric)
        return MoCo(contrast, method.shuffle_keys)
    if method.name == "moco_v3":
        projector = batch_norm_mlp(width, dim, hidden_dim=2 * width)
        predictor = batch_norm_mlp(dim, dim, hidden_dim=2 * width, final_batch_norm=False)
        return MoCoV3(MomentumContrastV3(with_head(backbone, projector), predictor, Sphere(), logit_scale))
    if method.name == "simsiam":
        projector = simsiam_projector(width, width)
        predictor = simsiam_predictor(width, max(1, width // 4)) if method.predictor else nn.Identity()
        return SimSiamMethod(SimSiam(with_head(backbone, projector), predictor), method.stop_gradient)
    if method.name == "supervised":
        return Supervised(with_head(backbone, nn.Identity()), nn.Linear(width, num_classes))
    return RandomWeights(with_head(backbone, nn.Identity()))


def simclr_head(width: int, dim: int = 128) -> nn.Sequential:
    """Three linear layers without bias, batch normalisation after each, ReLU after all but the last (SimCLR v2).

    Args:
        width: of the features and the hidden layers.
        dim: of the output, whose normalisation has a scale and no shift.
    """
    layers: list[nn.Module] = []
    for _ in range(2):
        layers += [nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(inplace=True)]
    last = nn.BatchNorm1d(dim)
    last.bias.requires_grad_(False)  # stays 0
    return nn.Sequential(*layers, nn.Linear(width, dim, bias=False), last)
