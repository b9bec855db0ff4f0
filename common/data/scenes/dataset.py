"""Pictures with five captions each, made on the fly; item i is a pure function of (split, seed, i)."""

import hashlib
import json
from collections.abc import Collection

import numpy as np

from common.base.random_keys import Draws, derive_key
from common.data.decoding import row_of
from common.data.scenes.captions import NUM_CAPTIONS, Captions, caption_statements, vague_statements
from common.data.scenes.draw import render
from common.data.scenes.negatives import hard_negative_pairs
from common.data.scenes.sampling import SPLITS, draw_scene
from common.data.scenes.statements import Statement
from common.data.scenes.world import WORLD_VERSION, Scene

MIN_IMAGE_SIZE = 16
PARTS = ("train", "val", "test")  # of tasks. train: for probes and fine-tuning; they share no image


def check_drawn(kind: str, name: str, known: Collection[str], size: int, image_size: int, part: str = "test") -> None:
    """Raises ValueError for an unknown name of that kind or an unknown part, and for sizes that no set can have."""
    for what, value, accepted in ((kind, name, known), ("part", part, PARTS)):
        if value not in accepted:
            raise ValueError(f"unknown {what} {value!r}; expected one of: {', '.join(accepted)}")
    if size < 1 or image_size < MIN_IMAGE_SIZE:
        raise ValueError(
            f"size = {size}, image_size = {image_size}; expected: at least 1 image of at least {MIN_IMAGE_SIZE} pixels"
        )


class DrawnSet:
    """Drawn items, known by their `parameters`."""

    size: int
    parameters: dict

    def __len__(self) -> int:
        return self.size

    @property
    def fingerprint(self) -> str:
        """sha256 in hex of the parameters, the world's version, and the images and words of the first four items."""
        digest = hashlib.sha256(json.dumps({**self.parameters, "world": WORLD_VERSION}, sort_keys=True).encode())
        for index in range(min(4, len(self))):
            item = self[index]
            rest = {key: value for key, value in item.items() if not isinstance(value, np.ndarray)}
            digest.update(json.dumps(rest, sort_keys=True).encode())
            for key in sorted(item.keys() - rest.keys()):
                digest.update(np.ascontiguousarray(item[key]).tobytes())
        return digest.hexdigest()


class SceneDataset(DrawnSet):
    """The embedded image-caption data set.

    Args:
        size: number of images; does not change the images themselves.
        caption_noise: probability that an image carries the captions of another one.
        ambiguity: probability of vague captions (`vague_statements`) in fixed words, which often repeat those of other
            images.
        num_captions: from 1 to 5, the most specific first. The fifth ("some things") fits very many images.
    """

    def __init__(
        self,
        split: str = "train",
        size: int = 1_000,
        image_size: int = 48,
        seed: int = 0,
        caption_noise: float = 0.0,
        ambiguity: float = 0.0,
        num_captions: int = NUM_CAPTIONS,
    ):
        check_drawn("split", split, SPLITS, size, image_size)
        for name, value in (("caption_noise", caption_noise), ("ambiguity", ambiguity)):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} = {value}; expected: a share in [0, 1]")
        if not 1 <= num_captions <= NUM_CAPTIONS:
            raise ValueError(f"num_captions = {num_captions}; expected: 1 to {NUM_CAPTIONS}")
        if caption_noise > 0 and size < 2:
            raise ValueError(f"caption_noise {caption_noise} needs at least 2 images, got size {size}")
        self.split, self.size, self.image_size, self.seed = split, size, image_size, seed
        self.caption_noise, self.ambiguity, self.num_captions = caption_noise, ambiguity, num_captions
        self.name = f"scenes/{split}"
        self._statistics = SPLITS[split]
        self._noise_threshold = round(caption_noise * 2**31)
        self._ambiguity_threshold = round(ambiguity * 2**31)
        self._split_key = derive_key("scenes", seed, split)

    def __getitem__(self, index: int) -> dict:
        """{"image": (H, W, 3) uint8, "captions": sentences from specific to generic, "image_id": str}."""
        item = self.lazily(index)
        return {**item, "captions": [*item["captions"]]}

    def lazily(self, index: int) -> dict:
        """See `Pairs`."""
        index = row_of(index, self)
        return {
            "image": self.picture(index),
            "captions": self._captions(index),
            "image_id": self.image_id(index),
        }

    def picture(self, index: int) -> np.ndarray:
        return render(self.scene(index), self.image_size)

    def image_id(self, index: int) -> str:
        return f"{self.split}-{self.seed}-{row_of(index, self)}"

    def scene(self, index: int) -> Scene:
        return draw_scene(derive_key(self._split_key, row_of(index, self)), self._statistics)

    def captions(self, index: int) -> list[str]:
        """With noise, possibly those of another image."""
        return [*self._captions(index)]

    def _captions(self, index: int) -> Captions:
        source = self.caption_source(index)
        return Captions(self.scene(source), self.statements(index), self.is_ambiguous(source))

    def statements(self, index: int) -> tuple[Statement, ...]:
        """The statements behind `captions(index)`; with noise they may be false of the image."""
        source = self.caption_source(index)
        scene = self.scene(source)
        if self.is_ambiguous(source):
            return vague_statements(scene)[: self.num_captions]
        return caption_statements(scene, self._statistics.detail)[: self.num_captions]

    def caption_source(self, index: int) -> int:
        """Index of the image that the captions describe: `index` itself unless the pair is noise."""
        index = row_of(index, self)
        if self._noise_threshold:
            draws = Draws(derive_key("caption_noise", self._split_key, index))
            if draws.below(2**31) < self._noise_threshold:
                return (index + 1 + draws.below(self.size - 1)) % self.size
        return index

    def is_ambiguous(self, index: int) -> bool:
        """Whether captions written for this image are vague."""
        if not self._ambiguity_threshold:
            return False
        draws = Draws(derive_key("ambiguity", self._split_key, row_of(index, self)))
        return draws.below(2**31) < self._ambiguity_threshold

    def hard_negatives(self, index: int) -> list[tuple[str, str]]:
        """See `hard_negative_pairs`."""
        return hard_negative_pairs(self.scene(index), self._statistics.detail)

    @property
    def parameters(self) -> dict:
        names = ("split", "size", "image_size", "seed", "caption_noise", "ambiguity")
        values = {name: getattr(self, name) for name in names}
        return values if self.num_captions == NUM_CAPTIONS else {**values, "num_captions": self.num_captions}
