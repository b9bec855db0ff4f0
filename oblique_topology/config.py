"""Configuration of the oblique-topology experiments."""

from dataclasses import dataclass, field
from typing import Literal

from common.base.settings import DataConfig, ModelConfig, OptimConfig, PromptAverage, RunConfig, check_patches, setting
from common.logit_scale import check_bounds


@dataclass(frozen=True)
class MethodConfig:
    """How embeddings are compared, and the softmax temperature.

    The paper writes n for the numbers on a sphere and m for the spheres: n = model.embedding_dim / num_spheres.
    """

    # see geometry.py; the paper mentions max_average but has no experiment with it
    geometry: Literal["sphere", "euclidean", "oblique", "oblique_geodesic", "max_average"] = "sphere"
    num_spheres: int = setting(1, at_least=1)  # m in Ob(n, m) and Multi(n, m)
    multi_token: bool = False  # True: Multi, a class token for each sphere; False: Ob, one token cut into spheres
    logit_scale_init: float = setting(1 / 0.07, above=0.0)  # multiplier; the paper's "e^2.64" is ln(1/0.07)
    logit_scale_trainable: bool = True  # False: the paper's "gradient = False"
    logit_scale_min: float | None = setting(None, above=0.0)  # bounds of the multiplier, null = none
    logit_scale_max: float | None = setting(100.0, above=0.0)
    # the paper averages distances over templates
    prompt_average: PromptAverage = setting("scores", decides="evaluation")

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.geometry in ("sphere", "euclidean") and (self.num_spheres != 1 or self.multi_token):
            raise ValueError(
                f"method.num_spheres = {self.num_spheres}, method.multi_token = {str(self.multi_token).lower()} with "
                f"method.geometry = {self.geometry}, which has no spheres to count; expected: 1 and false"
            )
        if self.geometry == "max_average" and self.prompt_average != "scores":
            raise ValueError(
                f"method.prompt_average = {self.prompt_average} with method.geometry = max_average, whose tokens have "
                "no mean; expected: scores"
            )


@dataclass(frozen=True)
class Config:
    """An experiment: a row of a table at a scale."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        check_patches(self.data, self.model)
        if self.method.geometry == "max_average" and self.optim.loss_tile:
            raise ValueError(
                f"optim.loss_tile = {self.optim.loss_tile} with method.geometry = max_average, which has two matrices "
                "and no tiled form; expected: 0"
            )
        if self.num_class_tokens > 1 and not (self.model.image.layers and self.model.text.layers):
            raise ValueError(
                f"method.multi_token = true, model.image.layers = {self.model.image.layers}, model.text.layers = "
                f"{self.model.text.layers}: a tower without layers has no class tokens; expected: false, or layers"
            )
        spheres, numbers = self.method.num_spheres, self.model.embedding_dim
        if spheres > 1 and (numbers % spheres or numbers < 2 * spheres):
            raise ValueError(
                f"model.embedding_dim = {numbers} cannot be cut into method.num_spheres = {spheres} spheres of two "
                f"numbers or more; expected: a multiple of {spheres} from {2 * spheres} on"
            )

    @property
    def sphere_dim(self) -> int:
        """Numbers on each sphere, n in Ob(n, m) and Multi(n, m)."""
        return self.model.embedding_dim // self.method.num_spheres

    @property
    def num_class_tokens(self) -> int:
        """Class tokens of either tower."""
        return self.method.num_spheres if self.method.multi_token else 1

    @property
    def largest_similarity(self) -> int | None:
        """Of a pair, before the multiplier; None for distances, whose logits have no positive bound."""
        return {"sphere": 1, "oblique": self.method.num_spheres, "max_average": 1}.get(self.method.geometry)

    @property
    def structure(self) -> str:
        """As the paper writes it: "Sphere(512)", "Ob(64, 8)", "Multi(32, 16)", ..."""
        if self.method.geometry in ("sphere", "euclidean"):
            return f"{self.method.geometry.capitalize()}({self.model.embedding_dim})"
        return f"{'Multi' if self.method.multi_token else 'Ob'}({self.sphere_dim}, {self.method.num_spheres})"
