"""Features of frozen networks, and of the embedded scenes without a network, for `examples/compare_geometries.py`."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import CountVectorizer
from torch import nn

from common.base.config import load_config
from common.data.pairs import image_transform, open_retrieval_sets, open_training_pairs
from common.data.scenes import SceneDataset
from common.data.text import build_tokenizer
from common.evaluation.embed import CaptionRule, EmbeddedPairs, Encoder, embed_pairs
from common.geometry import unit
from common.run.evaluation import this_device
from common.run.initial import InitialWeights
from common.run.inputs import feature_cache, keep_captions
from contrastive_basics.config import Config
from contrastive_basics.model import build_model
from oblique_topology.geometry import L2

SIZE, DIM = 224, 256
# chosen by: test data (before the search existed); to be searched again
NORM = 5.0  # of all features; distances depend on it: with 1 squared ones learn slowly, with sqrt(1280) l2 is too steep


def photo_config(data: str, weights: str, image_stem: str, text_stem: str) -> Config:
    """Settings of two frozen networks and a folder of tar shards; the networks lie in `weights` by name."""
    stems = [f"model.image.stem.name={image_stem}", f"model.text.stem.weights={text_stem}"]
    words = ["data.tokenizer=bert_wordpiece", f"data.vocabulary={text_stem}", "data.context_length=32"]
    photographs = [f"data.root={data}", "data.source=shards", f"data.image_size={SIZE}", "data.resize=squeeze"]
    pooled = ["model.image.layers=0", "model.text.layers=0", f"model.weights={weights}"]
    return load_config(Config, [], [*photographs, *words, *stems, *pooled])


def features(config: Config) -> tuple[EmbeddedPairs, EmbeddedPairs]:
    """Backbone features of training and test set, (num_images, channels) and (num_texts, width)."""
    device, initial = this_device(), InitialWeights.opened(config)
    config = initial.resolved(config)
    tokenizer = build_tokenizer(config.data, None)
    model = build_model(config, tokenizer)
    initial.load_stems_(model, config, tokenizer)
    # no projection and no normalisation: the features themselves
    model.image_tower.projection, model.text_tower.projection = None, nn.Parameter(torch.eye(model.text_tower.width))
    model.geometry = L2()
    model.to(device)
    sets = open_training_pairs(config.data, 0), open_retrieval_sets(config.data)["test"]
    keep_captions(model, config, tokenizer, sets, device)
    grids = feature_cache(model, config, device)
    cache = replace(  # only the mean over positions is cached, 15 MB for Flickr8k
        grids,
        network=f"mean of {grids.network}",
        compute=lambda pixels: grids.compute(pixels).mean(dim=(2, 3), keepdim=True),
        shape=(grids.shape[0], 1, 1),
    )
    length = config.data.context_length
    encoder = Encoder(model, image_transform(config.data), tokenizer, length, 256, device, cache=cache)
    embedded = (embed_pairs(encoder, pairs, CaptionRule()) for pairs in sets)
    return tuple(replace(pairs, images=NORM * unit(pairs.images), texts=NORM * unit(pairs.texts)) for pairs in embedded)


def scene_features(num_train: int, num_test: int) -> tuple[EmbeddedPairs, EmbeddedPairs]:
    """Features of the embedded scenes without a network, of training and test set, (num_images or num_texts, DIM).

    An image: responses to whitened patches, averaged over a grid of 3 x 3 (after Coates and Ng 2011). A caption: which
    words and pairs of neighbouring words it has. Both are reduced to their principal components.
    """
    sets = SceneDataset("train", num_train, 32), SceneDataset("test", num_test, 32)
    pixels = [torch.stack([torch.from_numpy(pairs.picture(row)) for row in range(len(pairs))]) for pairs in sets]
    pixels = [part.movedim(-1, 1) / 255 - 0.5 for part in pixels]
    # filters: training patches, decorrelated
    patches = F.unfold(pixels[0][:500], 6, stride=3).movedim(1, 2).flatten(0, 1)
    patches = patches - patches.mean(dim=0)
    variances, axes = torch.linalg.eigh(patches.T @ patches / len(patches))
    whiten = axes / (variances + 0.1 * variances.max()).sqrt() @ axes.T
    order = torch.randperm(len(patches), generator=torch.Generator().manual_seed(0))
    filters = (unit(patches[order[:192]] @ whiten) @ whiten).reshape(-1, 3, 6, 6)
    images = [torch.cat([_responses(chunk, filters) for chunk in part.split(200)]) for part in pixels]
    center, spread = images[0].mean(dim=0), images[0].std(dim=0) + 1e-6
    images = [((part - center) / spread).numpy() for part in images]
    captions = [[pairs.captions(row) for row in range(len(pairs))] for pairs in sets]
    flat = [[caption for group in part for caption in group] for part in captions]
    count = CountVectorizer(ngram_range=(1, 2), binary=True).fit(flat[0])
    embedded = []
    both = _reduced(images), _reduced([count.transform(part) for part in flat])
    for pairs, of_set, image_rows, text_rows in zip(sets, captions, *both):
        owners = torch.tensor([row for row, group in enumerate(of_set) for _ in group])
        rows = NORM * unit(image_rows), NORM * unit(text_rows)
        embedded.append(EmbeddedPairs(pairs, CaptionRule(), *rows, list(range(len(pairs))), of_set, owners))
    return tuple(embedded)


def _responses(images: torch.Tensor, filters: torch.Tensor) -> torch.Tensor:
    responses = F.conv2d(images, filters, stride=2)
    return F.adaptive_avg_pool2d(torch.cat([responses, -responses], dim=1).relu(), 3).flatten(1)


def _reduced(parts: Sequence) -> list[torch.Tensor]:
    """Principal components of the training part, for both."""
    axes = TruncatedSVD(min(DIM, parts[0].shape[0] - 1, parts[0].shape[1] - 1), random_state=0).fit(parts[0])
    return [torch.from_numpy(np.asarray(axes.transform(part), np.float32)) for part in parts]
