"""Configuration of GeoMM's models: CLIP against a pool and ALBEF, by the cosine or by a geodesic distance."""

import math
import warnings
from dataclasses import dataclass, field
from typing import Literal

from common.base.fields import TakenBy, refuse_not_taken
from common.base.settings import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    PromptAverage,
    RunConfig,
    SgdConfig,
    StartConfig,
    check_patches,
    setting,
)
from common.logit_scale import check_bounds
from geomm.geodesic import ATTACH, GRAPHS, LOCAL


@dataclass(frozen=True)
class DistanceConfig:
    """The distance between a query and a pool, and its settings."""

    distance: Literal["cosine", "geodesic"] = "geodesic"
    # how a query joins the graph: Eq. 3, its neighbours, these with a local block; _st: gradient of the cosine
    attach: Literal[*ATTACH] = "knn_local_st"
    local: Literal[*LOCAL] = "nearest"  # clusters within which knn_local compares by the angle
    num_attached: int = setting(8, at_least=1)  # centres that knn attaches a query to
    # clusters within one of the layer above, by layer; the paper: 256 in the first of two (the second is inferred)
    branching: tuple[int, ...] = (256, 2)
    num_neighbors: int = setting(8, at_least=1)  # of a centre in the graph
    graph: Literal[*GRAPHS] = "neighbors"  # threshold: the closest pairs of centres, as many edges as with neighbours
    allow_complete: bool = False  # a top layer in which all centres are joined: a control without shortest paths
    graph_update_interval: int = setting(100, at_least=1)  # steps between two graphs
    geodesic_from_step: int = setting(0, at_least=0)  # before it the cosine
    queue_size: int = setting(65_536, at_least=1)  # keys of a pool; one for each modality

    def __post_init__(self) -> None:
        if not self.branching or min(self.branching) < 2 or math.prod(self.branching) > self.queue_size:
            raise ValueError(
                f"method.branching = {list(self.branching)} with method.queue_size = {self.queue_size}; expected: at "
                "least two clusters in each layer, and no more in all than the queue has rows"
            )
        if self.needs_graph and self.attach != "angle_st" and not self.allow_complete:
            self._check_paths()

    @property
    def needs_graph(self) -> bool:
        """Whether a graph is built, at the latest before the last step."""
        return self.distance == "geodesic"

    @property
    def top_nodes(self) -> tuple[str, int]:
        """What the nodes of the top layer's graph are, and their number."""
        return f"method.branching = {list(self.branching)}", self.branching[0]

    def _check_paths(self) -> None:
        (nodes, count), neighbors = self.top_nodes, self.num_neighbors
        has = f"method.num_neighbors = {neighbors} with {nodes}"
        if count <= neighbors + 1:
            raise ValueError(
                f"{has}: a graph of {count} nodes is complete, and its paths are the angles; expected: more than "
                f"{neighbors + 1} nodes in the top layer, or method.allow_complete = true for a control without paths"
            )
        if count < 3 * neighbors:
            warnings.warn(
                f"{has}: a graph of {count} nodes is nearly complete, and most of its paths are the angles; better: "
                f"at least {3 * neighbors} nodes in the top layer",
                stacklevel=4,
            )


def check_graph(method: DistanceConfig, optim: OptimConfig | SgdConfig, full_at: int) -> None:
    """Checks that the first graph comes before the last step; ValueError if not.

    Args:
        full_at: step at whose start the pool is full.
    """
    first = max(full_at, method.geodesic_from_step)
    without = "method.match_entropy = false and method.scale_factor = 1"
    if method.distance != "cosine":
        without = "method.distance = cosine"
    if (method.needs_graph or getattr(method, "scale_factor", 1.0) != 1) and first >= optim.steps:
        raise ValueError(
            f"method.distance = {method.distance} with optim.steps = {optim.steps}: the first graph would be that of "
            f"step {first} (method.geodesic_from_step = {method.geodesic_from_step}, method.queue_size = "
            f"{method.queue_size} full at step {full_at}), and all steps use the cosine; expected: more steps than "
            f"{first}, a smaller method.queue_size or method.geodesic_from_step, or {without}"
        )


# fields of MethodConfig that not every distance or base takes -> those that do. Sizes of a fusion, of its candidates
# and of a graph are those of a scale, for all rows.
_TAKEN_BY: dict[str, TakenBy] = {
    "distance": {"num_spheres": ("oblique",)},
    "base": {
        "projection_bias": ("clip",),
        **dict.fromkeys(("group_queue", "group_span", "smoothing", "hardest_negatives"), ("mafa",)),
    },
}


@dataclass(frozen=True)
class MethodConfig(DistanceConfig):
    """The base method, and the distance between a query and the pool of the other modality."""

    # clip: only the contrast; albef: also matching and masked words; tcl: also the contrast within each modality;
    # mafa: albef with positives that a discriminator selects in batches of similar samples
    base: Literal["clip", "albef", "tcl", "mafa"] = "clip"
    distance: Literal["cosine", "geodesic", "oblique"] = "geodesic"
    num_spheres: int = setting(2, at_least=1)  # of oblique with its inner product (the TMLR paper's)
    ema_momentum: float = setting(0.995, at_least=0.0, at_most=1.0)  # of the encoder of keys
    distillation: float = setting(0.4, at_least=0.0, at_most=1.0)  # alpha: share of the momentum model's targets
    targets: Literal["own", "ids"] = "own"  # ids: all captions of a picture are positives (fine-tuning)
    projection_bias: bool = True  # of clip; FLIP: none
    causal_text: bool = False  # of clip: CLIP's text tower, as published weights have it, not BERT's
    two_views: bool = False  # of albef: the momentum encoders see another view, as GeoMM prints it; tcl always has two
    fusion_layers: int = setting(2, at_least=1)  # of albef
    mask_probability: float = setting(0.15, at_least=0.0, below=1.0)  # of albef's words; 0 = none are masked
    # mafa: samples that are collected before they are ordered, and samples of a chain; multiples of the batch
    group_queue: int = setting(48_000, at_least=3)
    group_span: int = setting(1_920, at_least=3)
    smoothing: float = setting(0.5, at_least=0.0, below=1.0)  # mafa: share of targets of all keys, from epoch 2 on
    hardest_negatives: bool = True  # mafa: for matching; otherwise drawn as in albef
    k_test: int = setting(128, at_least=10)  # candidates that albef's matching head reranks
    # at the step of the first graph the logit scale is multiplied once: by a number, or so that the softmax of the
    # geodesic distance is as soft as the cosine's; with the cosine as soft as that of the geodesic distance
    scale_factor: float = setting(1.0, above=0.0)
    match_entropy: bool = False
    logit_scale_init: float = setting(1 / 0.07, above=0.0)
    logit_scale_trainable: bool = True
    logit_scale_min: float | None = setting(2.0, above=0.0)  # ALBEF: temperatures from 0.001 to 0.5
    logit_scale_max: float | None = setting(1000.0, above=0.0)
    prompt_average: PromptAverage = setting("embeddings", decides="evaluation")  # zero-shot classes

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self)
        refuse_not_taken(self, "method", _TAKEN_BY)
        if self.causal_text and self.base != "clip":
            raise ValueError(
                f"method.causal_text = true with method.base = {self.base}, whose fusion starts from the tokens of "
                "BERT's tower; expected: false, or method.base = clip"
            )
        if self.two_views and self.base not in ("albef", "tcl"):
            raise ValueError(
                f"method.two_views = true with method.base = {self.base}, whose encoders see one view; expected: "
                "false, or method.base = albef"
            )
        if self.match_entropy and self.scale_factor != 1:
            raise ValueError(
                f"method.match_entropy = true with method.scale_factor = {self.scale_factor}; expected: one of them, "
                "as match_entropy solves for the factor"
            )
        if self.distance == "oblique" and self.changes_scale:
            raise ValueError(
                "method.match_entropy or method.scale_factor with method.distance = oblique, whose pool has no factor; "
                "expected: match_entropy = false and scale_factor = 1"
            )

    @property
    def needs_graph(self) -> bool:
        """Also with the cosine, if its factor is solved for."""
        return self.distance == "geodesic" or self.match_entropy

    @property
    def changes_scale(self) -> bool:
        """Whether the logit scale is multiplied at the step of the first graph."""
        return self.match_entropy or self.scale_factor != 1


@dataclass(frozen=True)
class Config:
    """An experiment: a row of a table at a scale."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(steps=500))  # the pool is full after 256
    run: RunConfig = field(default_factory=RunConfig)
    start: StartConfig = field(default_factory=StartConfig)
    has_pools = True  # not a field: whether there is a contrast against pools

    @property
    def mafa(self) -> str:
        """What a row of MAFA is on this data. On scenes it mines hardly any true positive (`geomm/mining.py`)."""
        return "ALBEF on grouped batches" if self.data.source == "scenes" else "MAFA"

    def __post_init__(self) -> None:
        check_patches(self.data, self.model)
        if self.data.gallery and self.method.base != "clip":
            raise ValueError(
                f"data.gallery = {self.data.gallery} with method.base = {self.method.base}, whose matching head ranks "
                "the whole test set; expected: null"
            )
        is_varied = self.data.crop_scale or self.data.augmentation != "none" or self.model.image.stem.views == "mirror"
        if self.method.two_views and not is_varied:
            raise ValueError(
                "method.two_views = true with data.crop_scale = null and data.augmentation = none: both views of an "
                "image would be equal; expected: random crops or an augmentation, or method.two_views = false"
            )
        batch, queue = self.optim.global_batch_size, self.method.queue_size
        if queue < batch:
            raise ValueError(
                f"method.queue_size = {queue} with optim.global_batch_size = {batch}; expected: at least a batch"
            )
        if self.has_pools:
            check_graph(self.method, self.optim, full_at(self))
        for key, only in (("micro_batch_size", None), ("loss_tile", 0), ("loss_bf16_product", False)):
            if getattr(self.optim, key) != only:
                raise ValueError(
                    f"optim.{key} = {getattr(self.optim, key)}, a pool compares whole batches; expected: {only}"
                )
        # only MAFA has a discriminator, and MAFA needs one
        if self.method.base == "mafa":
            if not self.start.discriminator and not self.start.discriminator_run:
                raise ValueError(
                    "method.base = mafa with start.discriminator empty; expected: the row of a fine-tuned ALBEF"
                )
            if self.method.targets != "own" or not self.method.mask_probability or self.method.distillation:
                raise ValueError(
                    "method.base = mafa with other targets, without masked words or with distillation; expected: "
                    "method.targets = own, method.mask_probability above 0, method.distillation = 0"
                )
            for key in ("group_queue", "group_span"):
                if (size := getattr(self.method, key)) % batch:
                    raise ValueError(
                        f"method.{key} = {size} with optim.global_batch_size = {batch} and method.base = mafa: a batch "
                        "would mix two chains of similar samples; expected: a multiple of the batch, such as "
                        f"{max(1, round(size / batch)) * batch}"
                    )
        elif self.start.discriminator or self.start.discriminator_run:
            raise ValueError(
                f"start.discriminator = {self.start.discriminator or self.start.discriminator_run} with method.base = "
                f"{self.method.base}, which mines no positives; expected: nothing, or method.base = mafa"
            )
        # sizes that the geometry and the fusion need
        spheres, numbers = self.method.num_spheres, self.model.embedding_dim
        if self.method.distance == "oblique" and numbers % spheres:
            raise ValueError(
                f"method.num_spheres = {spheres} with model.embedding_dim = {numbers}; expected: a divisor of it"
            )
        if self.method.base != "clip" and not (self.model.text.layers and self.model.image.layers):
            raise ValueError(
                f"model.image.layers or model.text.layers is 0 with method.base = {self.method.base}, whose fusion "
                "attends to tokens; expected: at least 1"
            )


def full_at(config: Config) -> int:
    """The step at whose start the pools of a run are full."""
    return math.ceil(config.method.queue_size / config.optim.global_batch_size)
