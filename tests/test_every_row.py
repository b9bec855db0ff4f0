"""Every row of three papers builds at every scale, and its geometry compares what its towers give."""

import importlib
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from runs import row_config, rows_of_paper

from common.base.config import SCALES
from common.base.provenance import ROOT
from common.encoders import stem

BERT, CLIP = (SimpleNamespace(vocabulary_size=size, end_id=end) for size, end in ((30_522, 102), (49_408, 49_407)))
TOKENIZERS = {"oblique_topology": BERT, "euclip": CLIP, "contrastive_basics": CLIP}
ROWS = [(paper, row) for paper in TOKENIZERS for row in rows_of_paper(ROOT / paper) if not row.startswith("vision_")]


@pytest.fixture(autouse=True, scope="module")
def networks():
    """The network of a frozen stem, which is timm's, is made and asked once a size: it would take most of the time."""
    places, ask, create = {}, stem.Stem._features, cache(stem._create)

    def features(self, images):
        key = self.name, images.shape
        if self.trainable or key not in places:
            places[key] = ask(self, images)
        return places[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stem.Stem, "_features", features)
        patch.setattr(stem, "_create", create)
        yield


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("paper", "row"), ROWS)
def test_every_row_builds_at_every_scale(paper, row, scale):
    config, tokenizer = row_config(paper, row, scale=scale), TOKENIZERS[paper]
    if config.model.text.stem.weights:  # which tell these in a run
        sizes = [f"model.text.stem.{key}" for key in ("layers=2", "width=32", "heads=2", "mlp_ratio=4.0")]
        config = row_config(paper, row, *sizes, scale=scale)
    towers = {side: getattr(config.model, side) for side in ("image", "text")}
    # one layer each: others are alike
    towers = {side: replace(tower, layers=min(tower.layers, 1)) for side, tower in towers.items()}
    config, data = replace(config, model=replace(config.model, **towers)), config.data
    with torch.device("meta"):
        model = importlib.import_module(f"{paper}.model").build_model(config, tokenizer)
        images = torch.empty(2, 3, data.image_size, data.image_size)
        token_ids = torch.full((2, data.context_length), tokenizer.end_id)
    image_embeddings, text_embeddings, *scalars = model(images, token_ids)
    assert model.geometry.name == getattr(config.method, "geometry", model.geometry.name)
    assert model.geometry.similarity(image_embeddings, text_embeddings).shape == (2, 2)
    assert {scalar.shape for scalar in scalars} == {()}
