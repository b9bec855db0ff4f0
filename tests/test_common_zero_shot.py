"""Zero-shot classification: the four ways of averaging prompts, against loops, identities and open_clip."""

import math

import pytest
import torch
from refusals import refused

from common.evaluation.zero_shot import class_scores, classification_hits, fill, plain_mean, prompt_scores
from common.geometry import Sphere, inner_product_similarity, unit

SPHERE = Sphere()


def negative_squared_distance(images, texts):
    return -(images[:, None] - texts[None]).square().sum(-1)


def negative_angle(images, texts):
    return -torch.arccos((images @ texts.T).clamp(-1, 1))


def make(num_images=6, num_templates=3, num_classes=4, dim=5):
    images = unit(torch.randn(num_images, dim, dtype=torch.float64))
    return images, unit(torch.randn(num_templates, num_classes, dim, dtype=torch.float64))


def scores_by(images, prompts, average, similarity=inner_product_similarity, mean=SPHERE.mean, **options):
    return class_scores(images, prompts, similarity, mean, average, **options)


def test_average_of_squared_distances_is_the_distance_to_the_mean_plus_the_spread_of_the_class():
    images, prompts = make()
    by_scores = scores_by(images, prompts, "scores", negative_squared_distance)
    by_mean = scores_by(images, prompts, "plain_mean", negative_squared_distance)
    spread = (prompts - prompts.mean(0)).square().sum(-1).mean(0)
    torch.testing.assert_close(by_scores, by_mean - spread, rtol=1e-12, atol=1e-14)
    assert spread.std() > 0.01  # a constant of the class, not of the picture: it can change the arg-max


def test_average_of_angles_is_that_of_loops():
    images, prompts = make()
    by_scores = scores_by(images, prompts, "scores", negative_angle)
    for c in range(4):
        expected = -sum(math.acos(float(images[0] @ prompts[t, c])) for t in range(3)) / 3
        assert float(by_scores[0, c]) == pytest.approx(expected, abs=1e-13)


def test_embeddings_follows_the_mean_of_the_geometry():
    images, prompts = make()
    by_geometry, by_name = scores_by(images, prompts, "embeddings"), scores_by(images, prompts, "normalized_mean")
    torch.testing.assert_close(by_geometry, by_name, rtol=0, atol=1e-15)  # the unit norm of a unit vector may round
    by_geometry = scores_by(images, prompts, "embeddings", negative_squared_distance, plain_mean)
    for plain in ("plain_mean", "tangent_mean"):  # tangent vectors are lifted inside the similarity
        assert torch.equal(by_geometry, scores_by(images, prompts, plain, negative_squared_distance))


def test_a_mean_of_prompts_in_half_precision_is_taken_in_float32():
    prompts = make()[1].bfloat16()
    assert torch.equal(plain_mean(prompts), prompts.float().mean(dim=0))


@pytest.mark.parametrize("average", ["scores", "embeddings"])
@pytest.mark.parametrize("chunk_size", [1, 4, 100])
def test_chunks_do_not_change_the_scores(average, chunk_size):
    images, prompts = make()
    seen = []

    def similarity(chunk, texts):
        seen.append(len(chunk))
        return negative_angle(chunk, texts)

    scores = scores_by(images, prompts, average, similarity, chunk_size=chunk_size)
    torch.testing.assert_close(scores, scores_by(images, prompts, average, negative_angle), rtol=1e-12, atol=1e-13)
    assert max(seen) == min(chunk_size, 6)


# --- from names and templates --------------------------------------------------------------------------------------


def table_encoder(dim=5):
    """A text tower without a model: each text has a random vector of its own; counts what it is asked."""
    table, asked = {}, []

    def encode(texts):
        asked.append(len(texts))
        return torch.stack([table.setdefault(text, unit(torch.randn(dim, dtype=torch.float64))) for text in texts])

    return encode, asked


NAMES, TEMPLATES = [f"thing {n}" for n in range(7)], ["a {}", "the {c}.", "{}"]


@pytest.mark.parametrize("average", ["scores", "embeddings"])
@pytest.mark.parametrize("prompts_per_chunk", [1, 9, 10_000])
def test_blocks_of_prompts_do_not_change_the_scores(average, prompts_per_chunk):
    encode, asked = table_encoder()
    images = make()[0]
    prompts = torch.stack([encode([fill(template, name) for name in NAMES]) for template in TEMPLATES])
    expected = scores_by(images, prompts, average)
    asked.clear()
    scores = prompt_scores(
        images, encode, NAMES, TEMPLATES, SPHERE.similarity, SPHERE.mean, average, 4, prompts_per_chunk
    )
    torch.testing.assert_close(scores, expected, rtol=1e-12, atol=1e-13)
    assert max(asked) <= max(prompts_per_chunk, len(TEMPLATES))
    assert sum(asked) == 21


@pytest.mark.parametrize("average", ["scores", "embeddings"])
def test_a_name_that_occurs_twice_ties_exactly_and_the_first_class_wins(average):
    """The encoder is noisy, as towers are that see a text in another batch; ImageNet has two such pairs of names."""
    names, asked = ["missile", "crane", "missile"], []

    def encode(texts):
        asked.extend(texts)
        return unit(torch.randn(len(texts), 8))

    images = torch.randn(200, 8)
    scores = prompt_scores(images, encode, names, ["a {}", "{}"], SPHERE.similarity, SPHERE.mean, average)
    assert sorted(asked) == ["a crane", "a missile", "crane", "missile"]
    assert torch.equal(scores[:, 0], scores[:, 2])
    first = classification_hits(scores, torch.zeros(200, dtype=torch.long))
    third = classification_hits(scores, torch.full((200,), 2))
    assert first.any()
    assert not third.any()


def test_only_the_placeholder_of_a_template_is_replaced():
    assert fill("a {} in {brackets}", "cat") == "a cat in {brackets}"
    assert fill("a photo of a {c}.", "{}") == "a photo of a {}."
    refused(("'a photo' has no place for the class name", lambda: fill("a photo", "cat")))


def test_classifier_equals_open_clip_on_a_tiny_random_model():
    open_clip = pytest.importorskip("open_clip")
    text = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
    vision = {"image_size": 32, "patch_size": 16, "width": 32, "layers": 1, "head_width": 16}
    model = open_clip.CLIP(embed_dim=24, vision_cfg=vision, text_cfg=text).eval()
    tokenize = open_clip.SimpleTokenizer(context_length=16)
    names = [*open_clip.IMAGENET_CLASSNAMES[650:660], "missile"]  # one of them is a "missile" already
    templates = list(open_clip.OPENAI_IMAGENET_TEMPLATES[:5])
    with torch.no_grad():
        theirs = open_clip.build_zero_shot_classifier(model, tokenize, names, templates, num_classes_per_batch=4)
        images = unit(torch.randn(50, 24))
        ours = prompt_scores(
            images,
            lambda texts: model.encode_text(tokenize(texts)),  # not normalised: mode A does it
            names,
            [template("{}") for template in templates],
            inner_product_similarity,
            plain_mean,
            "normalized_mean",
        )
    assert names.count("missile") == 2
    torch.testing.assert_close(ours, images @ theirs, rtol=0, atol=1e-6)


# --- subsets and hits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 3])
def test_hits_equal_topk_without_ties(k):
    scores, labels = torch.randn(50, 7, dtype=torch.float64), torch.randint(0, 7, (50,))
    expected = (scores.topk(k, dim=1).indices == labels[:, None]).any(dim=1)
    assert torch.equal(classification_hits(scores, labels, k), expected)
    tied = classification_hits(torch.zeros(4, 4), torch.arange(4), k)  # equal scores go to the lower class
    assert tied.tolist() == [place < k for place in range(4)]


def test_bad_input_is_refused():
    images, prompts = make()
    refused(
        ("not finite", lambda: classification_hits(torch.tensor([[float("nan"), 0.0]]), torch.tensor([0]))),
        ("at least 5 classes, got 2", lambda: classification_hits(torch.zeros(1, 2), torch.tensor([0]), k=5)),
        (r"labels 0\.\.2; expected: 0\.\.1", lambda: classification_hits(torch.zeros(2, 2), torch.tensor([0, 2]))),
        ("'median'; expected: scores, embeddings, normalized_mean", lambda: scores_by(images, prompts, "median")),
        ("chunk_size = 0", lambda: scores_by(images, prompts, "scores", chunk_size=0)),
        ("no prompt templates", lambda: scores_by(images, prompts[:0], "scores")),
        (
            "0 class names and 1 templates",
            lambda: prompt_scores(images, None, [], ["{}"], SPHERE.similarity, SPHERE.mean, "scores"),
        ),
    )
