"""Zero-shot classification: the two ways of averaging prompts, against loops and identities."""

import pytest
import torch

from common.evaluation.zero_shot import class_scores, classification_hits
from common.geometry import Sphere, inner_product_similarity, unit

SPHERE = Sphere()


def make(num_images=6, num_templates=3, num_classes=4, dim=5):
    images = unit(torch.randn(num_images, dim, dtype=torch.float64))
    return images, unit(torch.randn(num_templates, num_classes, dim, dtype=torch.float64))


def test_average_of_scores_equals_loops():
    images, prompts = make()
    scores = class_scores(images, prompts, SPHERE.similarity, SPHERE.mean, "scores")
    for i in range(6):
        for c in range(4):
            expected = sum(float(images[i] @ prompts[t, c]) for t in range(3)) / 3
            assert float(scores[i, c]) == pytest.approx(expected, abs=1e-14)


def test_average_of_inner_products_is_the_inner_product_with_the_plain_mean():
    images, prompts = make()
    scores = class_scores(images, prompts, SPHERE.similarity, SPHERE.mean, "scores")
    torch.testing.assert_close(scores, inner_product_similarity(images, prompts.mean(0)), rtol=1e-12, atol=1e-14)


def test_average_of_embeddings_differs_from_it_by_the_norm_of_the_mean_per_class():
    images, prompts = make()
    by_scores = class_scores(images, prompts, SPHERE.similarity, SPHERE.mean, "scores")
    by_embeddings = class_scores(images, prompts, SPHERE.similarity, SPHERE.mean, "embeddings")
    torch.testing.assert_close(by_embeddings * prompts.mean(0).norm(dim=-1), by_scores, rtol=1e-12, atol=1e-14)


def test_the_two_averages_can_disagree_on_the_class():
    # class 0: two prompts at 60 degrees to either side of the picture; class 1: two equal ones at 55 degrees
    angles = torch.tensor([[60.0, 55.0], [-60.0, 55.0]], dtype=torch.float64).deg2rad()
    prompts = torch.stack([angles.cos(), angles.sin()], dim=-1)
    image = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    assert class_scores(image, prompts, SPHERE.similarity, SPHERE.mean, "scores").argmax() == 1
    assert class_scores(image, prompts, SPHERE.similarity, SPHERE.mean, "embeddings").argmax() == 0


def test_classifier_equals_open_clip():
    open_clip = pytest.importorskip("open_clip")
    templates = [lambda name, t=t: f"{t} {name}" for t in range(3)]
    table = {f"{t} {c}": torch.randn(8) for t in range(3) for c in "abcd"}

    class Model:
        def encode_text(self, texts, normalize=False):
            return unit(torch.stack([table[text] for text in texts]))

    class Tokens(list):
        def to(self, device):
            return self

    theirs = open_clip.build_zero_shot_classifier(Model(), Tokens, list("abcd"), templates, num_classes_per_batch=2)
    prompts = unit(torch.stack([torch.stack([table[f"{t} {c}"] for c in "abcd"]) for t in range(3)]))
    torch.testing.assert_close(SPHERE.mean(prompts), theirs.T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_hits_equal_topk_without_ties(k):
    scores, labels = torch.randn(50, 7, dtype=torch.float64), torch.randint(0, 7, (50,))
    expected = (scores.topk(k, dim=1).indices == labels[:, None]).any(dim=1)
    assert torch.equal(classification_hits(scores, labels, k), expected)


def test_equal_scores_go_to_the_lower_class():
    assert classification_hits(torch.zeros(3, 3), torch.tensor([0, 1, 2])).tolist() == [True, False, False]


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        classification_hits(torch.tensor([[float("nan"), 0.0]]), torch.tensor([0]))
    with pytest.raises(ValueError, match="at least 5 classes, got 2"):
        classification_hits(torch.zeros(1, 2), torch.tensor([0]), k=5)
    images, prompts = make()
    with pytest.raises(ValueError, match="accepted: scores, embeddings"):
        class_scores(images, prompts, SPHERE.similarity, SPHERE.mean, "median")
