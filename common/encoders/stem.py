"""A pre-trained network whose grid of features stands in for the patches of a Vision Transformer.

The hybrid architecture of Dosovitskiy et al. 2021 (Sec. 3.1): the patch embedding is a 1 x 1 convolution on the
features of a network of timm's, convolutional or a ViT. Images come in normalised as CLIP's; the stem renormalises
them.
"""

import copy
import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from common.base.arguments import did_you_mean, some
from common.data.transforms import CLIP_MEAN, CLIP_STD
from common.encoders.stem_configuration import (
    HUB_FILES,
    Colours,
    StemError,
    check_colours,
    check_one_colour,
    configuration_file,
    read_configuration,
)
from common.geometry import full_precision


class Stem(nn.Module):
    """Features of a network of timm's, before pooling and head, with random weights until `load_`.

    Args:
        name: timm's, e.g. "tf_efficientnet_lite0".
        image_size: side of the square input in pixels.
        trainable: False freezes it: no gradient, and running statistics never change.
        dropout: share of the channels that `drop_channels` sets to 0 in training.
        colours: mean and standard deviation that it was trained with; None = those of its weights, or timm's.
    Attributes:
        channels: numbers per place. grid: places along each side.
    """

    def __init__(
        self,
        name: str,
        image_size: int,
        trainable: bool = False,
        dropout: float = 0.0,
        colours: Colours | None = None,
    ) -> None:
        super().__init__()
        self.name, self.image_size, self.trainable, self.dropout = name, image_size, trainable, dropout
        self.network = _create(name, image_size)
        self.num_prefix_tokens = getattr(self.network, "num_prefix_tokens", 0)
        self.network.requires_grad_(trainable)
        try:
            with torch.set_grad_enabled(trainable):
                features = self._features(torch.zeros(2, 3, image_size, image_size))
        except (RuntimeError, AssertionError) as error:
            raise StemError(f"{name} does not take pictures of {image_size} pixels: {error}") from None
        _, self.channels, self.grid, columns = features.shape
        if columns != self.grid:
            raise StemError(f"{name} makes {self.grid} x {columns} places of a square picture; expected: a square")
        self.stated = colours
        self._set_colours(colours_of(self.network) if colours is None else colours)
        if trainable:  # behind the features lie weights of a head, for whose gradients DDP would wait
            weights = list(self.network.parameters())
            gradients = torch.autograd.grad(features, weights, torch.ones_like(features), allow_unused=True)
            for weight, gradient in zip(weights, gradients):
                weight.requires_grad_(gradient is not None)
        self.train()

    def _set_colours(self, colours: Colours) -> None:
        check_colours(*colours, self.name)
        self.colours = tuple(map(tuple, colours))
        mean, std, clip_mean, clip_std = (
            torch.tensor(values).view(3, 1, 1) for values in (*self.colours, CLIP_MEAN, CLIP_STD)
        )
        self.register_buffer("gain", clip_std / std, persistent=False)
        self.register_buffer("offset", (clip_mean - mean) / std, persistent=False)

    def train(self, mode: bool = True) -> "Stem":
        """A frozen stem stays in evaluation mode: BatchNorm and dropout would change cached features."""
        return super().train(mode and self.trainable)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, 3, image_size, image_size), normalised as CLIP's -> (batch, channels, grid, grid)."""
        images = images * self.gain + self.offset
        images = images.contiguous(memory_format=torch.channels_last)  # convolutions take half the time
        if self.trainable:
            return self._features(images)
        with torch.no_grad(), full_precision(images):  # float32 under autocast too, as the cache holds
            return self._features(images.float())

    def places(self, images: torch.Tensor) -> torch.Tensor:
        """`forward` of images; features that come in their place are returned as they are."""
        return self(images) if images.shape[1] == 3 else images

    def drop_channels(self, places: torch.Tensor, training: bool) -> torch.Tensor:
        """(batch, channels, rows, columns); in training a share `dropout` of each image's channels is 0."""
        return F.dropout2d(places, self.dropout, training)

    def _features(self, images: torch.Tensor) -> torch.Tensor:
        features = self.network.forward_features(images)
        if not isinstance(features, torch.Tensor) or features.ndim not in (3, 4):
            raise StemError(f"{self.name} returns no single grid of features; expected: another network of timm's")
        if features.ndim == 3:  # tokens of a ViT: class and register tokens first
            patches = features[:, self.num_prefix_tokens :]
            side = round(patches.shape[1] ** 0.5)
            if side < 2 or side**2 != patches.shape[1]:  # a class token alone, or one that timm does not state
                raise StemError(f"{self.name} returns {patches.shape[1]} tokens, no square grid; expected: another one")
            features = patches.transpose(1, 2).unflatten(2, (side, -1))
        elif features.shape[-1] == self.network.num_features != features.shape[1]:  # Swin and its like: channels last
            features = features.permute(0, 3, 1, 2)
        return features

    def fingerprint(self) -> str:
        """12 hex digits that change with any weight, running statistic or colour."""
        digest = hashlib.sha256()
        if self.colours != colours_of(self.network):  # features cached with timm's colours stay valid
            digest.update(repr(self.colours).encode())
        for name, tensor in self.network.state_dict().items():
            digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:12]

    def state_at(self, image_size: int) -> dict[str, torch.Tensor]:
        """The state dict for images of another size: a ViT's positions are interpolated."""
        other = copy.deepcopy(self)
        _resize_(other.network, image_size)
        return other.state_dict()

    def load_(self, weights: str) -> None:
        """Fills the network, and takes the weights' colours unless colours are stated.

        Args:
            weights: a file in timm's layout, a folder with model.safetensors and perhaps timm's config.json, or "" =
                timm's weights of this name, from the hub or its cache.
        """
        source, file = _create(self.name, self.image_size, weights), configuration_file(weights)
        device = self.gain.device
        if self.stated is None:
            if weights and file is None:
                check_one_colour(self.name, weights)
            self._set_colours(colours_of(source))
            self.to(device)
        elif file is not None and self.colours != colours_of(source):
            raise StemError(
                f"model.image.stem.mean, std = {self.colours}; {file} has {colours_of(source)}; expected: the same, or "
                "null for both"
            )
        self.network.load_state_dict(source.state_dict())


class PooledStem(nn.Module):
    """An image tower without a transformer: the mean over a stem's places, then a projection.

    With a frozen stem and no projection only the text tower trains: locked-image tuning (LiT, Zhai et al. 2022).

    Args:
        projection_dim: output numbers; None = no projection.
    """

    num_class_tokens = 0  # in front of the places in `forward_tokens`

    def __init__(self, stem: Stem, projection_dim: int | None) -> None:
        super().__init__()
        self.stem, self.image_size, self.patch_size = stem, stem.image_size, stem.image_size // stem.grid
        self.width, self.projection_dim = stem.channels, projection_dim
        scale = self.width**-0.5
        self.projection = (
            None if projection_dim is None else nn.Parameter(scale * torch.randn(self.width, projection_dim))
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, 3, image_size, image_size), normalised, or their stem features -> (batch, projection_dim)."""
        mean = self.class_tokens(images)[:, 0]
        return mean if self.projection is None else mean @ self.projection

    def class_tokens(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, 1, channels): the mean in place of a class token."""
        # the mean first: a channel that is lost then is lost at all places
        mean = self.stem.places(images).float().mean(dim=(2, 3), keepdim=True)
        return self.stem.drop_channels(mean, self.training).flatten(2).transpose(1, 2)

    def forward_tokens(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, grid * grid, channels): the stem's places row by row."""
        return self.stem.drop_channels(self.stem.places(images).float(), self.training).flatten(2).transpose(1, 2)


def weights_file(weights: str) -> Path | None:
    """The file that `weights` names; None = timm's own."""
    if not weights:
        return None
    path = Path(weights).expanduser()
    files = [path / name for name in HUB_FILES] if path.is_dir() else [path]
    for file in files:
        if file.is_file():
            return file
    raise StemError(f"{weights} holds no weights; expected: a file in timm's layout, a folder with model.safetensors")


def colours_of(network: nn.Module) -> Colours:
    """Mean and standard deviation that a network of timm's was trained with."""
    return tuple(tuple(network.pretrained_cfg[key]) for key in ("mean", "std"))


def _create(name: str, image_size: int, weights: str | None = None) -> nn.Module:
    # The network; weights None = random.
    import timm  # slow, and few runs have a stem

    known = timm.list_models()
    if name.partition(".")[0] not in known:
        raise StemError(f"timm has no network {name!r}{did_you_mean(name, known)}")
    # a config.json may hold further arguments of the network; those are allowed that change no feature, checked below
    file, configuration = (None, None) if weights is None else (weights_file(weights), configuration_file(weights))
    options = {} if configuration is None else read_configuration(configuration, name)
    arguments = {key: options.pop(key) for key in options.keys() - {"pretrained_cfg", "img_size"}}
    try:
        network = timm.create_model(name, num_classes=0, pretrained=weights is not None and file is None, **options)
        if file is not None:
            heads = timm.get_pretrained_cfg(name).classifier
            _fill_(network, timm.models.load_state_dict(str(file), weights_only=True), heads)
        if weights is not None:
            _check_finite(network)
            _check_arguments(name, network, options, arguments)
    except Exception as error:  # the hub, safetensors and shapes raise unrelated classes
        where, instead = weights, ""
        if not weights:
            where = f"{name} on the hub"
            instead = (
                f"; expected: model.weights=<folder> (make: WEIGHTS=<folder>) with {name}/model.safetensors in it, or "
                "model.image.stem.weights=<file or folder>"
            )
        reason = str(error).splitlines()[0].rstrip(".")
        raise StemError(f"weights of {name} cannot be loaded from {where}: {reason}{instead}") from None
    _resize_(network, image_size)
    return network


def _resize_(network: nn.Module, image_size: int) -> None:
    if hasattr(network, "set_input_size"):  # a ViT: positions are interpolated
        network.set_input_size(img_size=(image_size, image_size))


def _check_arguments(name: str, network: nn.Module, options: dict[str, Any], arguments: dict[str, Any]) -> None:
    # Refuses arguments of a config.json that change the features of the same weights: no checkpoint records them.
    import timm

    size = options.get("img_size", network.pretrained_cfg["input_size"][1:])
    size = (size, size) if isinstance(size, int) else size
    pictures = torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def has_these_features(**more: Any) -> bool:
        try:
            other = timm.create_model(name, num_classes=0, **options, **more).eval()
            other.load_state_dict(network.state_dict())
            return torch.equal(other.forward_features(pictures), features)
        except (RuntimeError, TypeError, ValueError, AssertionError):  # arguments or sizes that do not fit
            return False

    if arguments:
        is_training = network.training
        with torch.no_grad():
            features = network.eval().forward_features(pictures)
        network.train(is_training)
        if not has_these_features(**arguments):
            one = (f"{key} = {value!r}" for key, value in arguments.items() if not has_these_features(**{key: value}))
            raise ValueError(f"config.json: model_args.{next(one, arguments)}; expected: the network as timm names it")


def _check_finite(network: nn.Module) -> None:
    spoilt = [
        name
        for name, tensor in network.state_dict().items()
        if not tensor.isfinite().all() or (name.endswith("running_var") and (tensor < 0).any())
    ]
    if spoilt:
        raise ValueError(f"they hold numbers that are not finite, or variances below 0: {some(spoilt)}")


def _fill_(network: nn.Module, state: dict[str, torch.Tensor], heads: str | tuple[str, ...] | None) -> None:
    # Fills all of the network; only tensors of a head may be left over.
    heads = tuple(f"{head}." for head in ([heads] if isinstance(heads, str) else heads or ()))
    target = network.state_dict()
    missing = [name for name in target if name not in state and not name.endswith("num_batches_tracked")]
    left = [name for name in state if name not in target and not name.startswith(heads)]
    unlike = [name for name in target if name in state and target[name].shape != state[name].shape]
    if missing or left or unlike:
        differences = f"missing {missing[:2]}, not taken {left[:2]}, of another shape {unlike[:2]}"
        raise ValueError(f"they belong to another network ({differences})")
    network.load_state_dict({name: tensor for name, tensor in state.items() if name in target}, strict=False)
