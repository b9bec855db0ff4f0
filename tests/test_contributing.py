"""The worked example of CONTRIBUTING.md does what it says."""

import re
from pathlib import Path

import pytest
import torch

from common.data.scenes import SceneDataset, scene_words
from common.data.tokenizer import WordTokenizer
from common.data.transforms import ImageTransform
from common.encoders.text import BidirectionalTextTransformer
from common.encoders.two_towers import TwoTowers
from common.encoders.vision import VisionTransformer
from common.evaluation.embed import Encoder, evaluate_retrieval
from common.geometry import Geometry
from common.info_nce import contrastive_loss
from common.logit_scale import LogitScale

TEXT = (Path(__file__).resolve().parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def example():
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names = {}
    exec(compile(block, "CONTRIBUTING.md", "exec"), names)
    return names


def test_the_example_is_a_geometry_that_keeps_its_laws(example):
    ball = example["Ball"]()
    assert isinstance(ball, Geometry)
    images, texts = ball.embed_image(torch.randn(5, 8)), ball.embed_text(50 * torch.randn(6, 8))
    scores = ball.similarity(images, texts)
    assert scores.shape == (5, 6)
    assert (scores <= 0).all()
    assert (scores > -4).all()
    torch.testing.assert_close(scores, ball.similarity(texts, images).T)
    for i in range(5):
        for j in range(6):
            expected = -sum((images[i, k].item() - texts[j, k].item()) ** 2 for k in range(8))
            assert float(scores[i, j]) == pytest.approx(expected, abs=1e-5)
    features = torch.zeros(2, 8, requires_grad=True)
    ball.similarity(ball.embed_image(features), ball.embed_text(features)).sum().backward()
    assert torch.isfinite(features.grad).all()


def test_the_example_trains_its_scalar_and_is_evaluated(example):
    tokenizer = WordTokenizer.from_words(scene_words())
    model = TwoTowers(
        VisionTransformer(32, 16, 32, 1, 2, 16),
        BidirectionalTextTransformer(tokenizer.vocabulary_size, 16, 32, 1, 2, 16),
        example["Ball"](),
        LogitScale(5.0),
    )
    images, token_ids = torch.randn(8, 3, 32, 32), torch.randint(2, 40, (8, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(25):
        x, y, scale = model(images, token_ids)
        loss = contrastive_loss(x, y, model.geometry.similarity, scale)
        loss.backward()
        assert model.geometry.log_radius.grad.abs() > 0
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert "geometry.log_radius" in model.state_dict()
    encoder = Encoder(model.eval(), ImageTransform(32), tokenizer, 16, 8, torch.device("cpu"))
    metrics = evaluate_retrieval(encoder, SceneDataset("test", 12, 32)).metrics
    assert 0 <= metrics["mean_recall"] <= 1
