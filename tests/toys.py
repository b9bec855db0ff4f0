"""Sets of listed pictures, and encoders of towers that nobody has trained."""

from dataclasses import replace

import torch
from torch import nn

from common.data.broken import BrokenSample
from common.data.tokenizer import WordTokenizer
from common.data.transforms import ImageTransform
from common.encoders.two_towers import TwoTowers
from common.evaluation.embed import Encoder
from common.geometry import Sphere
from common.logit_scale import LogitScale


class ListedPictures:
    """Pictures with captions; those of `broken` cannot be read.

    captions: row -> list. more: further attributes, such as the functions `label` and `image_id` of a row.
    """

    def __init__(self, pictures, captions=lambda row: [], broken=(), name="pictures", **more):
        self.pictures, self.captions, self.broken = list(pictures), captions, broken
        self.name, self.fingerprint = name, f"{name} v1"
        vars(self).update(more)

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, row):
        if row in self.broken:
            raise BrokenSample(self.name, str(row), "torn")
        return {"image": self.pictures[row], "captions": self.captions(row), "image_id": str(row)}


def plain_picture(colour, size):
    """All pixels of one colour, (red, green, blue) from 0 to 255."""
    return torch.tensor(colour, dtype=torch.uint8).expand(size, size, 3).numpy()


def encoder_of(image_tower, text_tower, tokenizer=None, geometry=None, size=8, context_length=5, batch_size=4):
    """Of pictures of size x size."""
    model = TwoTowers(image_tower, text_tower, Sphere() if geometry is None else geometry, LogitScale(1.0))
    return Encoder(model, ImageTransform(size=size), tokenizer, context_length, batch_size, torch.device("cpu"))


class ColourTower(nn.Module):
    """The mean colour of a picture; of a text the sum of `colours`, a row for each token."""

    def __init__(self, colours):
        super().__init__()
        self.register_buffer("colours", torch.tensor(colours) / 255)

    def forward(self, batch):
        return batch.mean(dim=(2, 3)) if batch.ndim == 4 else self.colours[batch].sum(dim=1)


def colour_encoder(colour_of_word, size):
    """On the sphere, of pictures and texts by their colours (red, green, blue), 0 to 255; other words have none."""
    tokenizer = WordTokenizer.from_words(list(colour_of_word))
    words = tokenizer.decode(range(tokenizer.vocabulary_size))
    tower = ColourTower([colour_of_word.get(word, (0, 0, 0)) for word in words])
    plain = ImageTransform(size=size, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    return replace(encoder_of(tower, tower, tokenizer, context_length=8, batch_size=256), transform=plain)
