"""The chapter's vision-language models: sizes, what an embedding depends on, queue of past pairs, late interaction."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.base.config import ConfigError, load_row
from common.data.scenes import SceneDataset, scene_words
from common.data.tokenizer import WordTokenizer
from common.data.transforms import ImageTransform
from common.evaluation.embed import Encoder, evaluate_retrieval
from common.evaluation.linear_probe import TowerFeatures
from common.late_interaction import late_interaction
from contrastive_basics.config import Config
from contrastive_basics.model import build_model

FOLDER = Path(__file__).resolve().parents[1] / "contrastive_basics"
LATE = FOLDER / "configs" / "table1_late_interaction.yaml"
MAIN = FOLDER / "configs" / "table1_ours.yaml"
TOKENIZER = WordTokenizer.from_words(scene_words())
CLIP_IDS = SimpleNamespace(vocabulary_size=49_408, end_id=49_407)  # CLIP's byte pairs
CAPTIONS = ["a red circle", "a large blue square above a circle"]


def smoke(row=MAIN, *overrides):
    return load_row(Config, FOLDER, row, "smoke", list(overrides))


def built(row=MAIN, *overrides):
    config = smoke(row, *overrides)
    torch.manual_seed(0)
    return build_model(config, TOKENIZER).eval()


def ids(captions, length=32):
    return TOKENIZER.encode(captions, length)


def test_features_of_a_row_of_patch_tokens_are_those_of_its_tower_before_the_projection():
    model, images = built(LATE), torch.randn(2, 3, 32, 32)
    features = TowerFeatures(model.image_tower)
    assert torch.equal(features.encode_image(images), model.image_tower.tower.class_tokens(images).flatten(1))
    assert features.tower.stem is None  # a probe asks for it


def test_the_main_row_at_paper_scale_has_the_size_of_clip_vit_b_32():
    with torch.device("meta"):
        model = build_model(load_row(Config, FOLDER, MAIN, "paper"), CLIP_IDS)
    assert sum(parameter.numel() for parameter in model.parameters()) == 151_277_313  # the published model's


def test_class_tokens_are_compared_as_they_leave_the_last_layer():
    """Eq. 2 to 5. A bidirectional caption: its first token sees the last word."""
    model, inputs = built(FOLDER / "configs" / "table1_class_tokens.yaml"), (torch.rand(2, 3, 32, 32), ids(CAPTIONS))
    for side, tower, of_side in zip(model(*inputs), (model.image_tower, model.text_tower), inputs):
        tokens = tower.forward_tokens(of_side)[:, 0]
        torch.testing.assert_close(side, tokens / tokens.square().sum(dim=1, keepdim=True).sqrt())
    assert not [name for name, _ in model.named_parameters() if name.endswith("tower.projection")]
    first, other = model.text_tower(ids(["a red circle", "a red square"]))
    assert not torch.allclose(first, other)


def test_a_caption_is_read_up_to_its_end_token():
    for row in (MAIN, LATE):
        model, tokens = built(row), ids(CAPTIONS)
        behind = (tokens == TOKENIZER.end_id).cumsum(dim=1) - (tokens == TOKENIZER.end_id).int() > 0
        other = tokens.where(~behind, 7)
        assert (other != tokens).any(dim=1).all()
        torch.testing.assert_close(model.encode_text(other), model.encode_text(tokens))
        assert not torch.allclose(*model.encode_text(ids(["a red circle", "a blue circle"])).split(1), atol=1e-3)


def test_late_interaction_has_a_unit_vector_for_every_patch_and_every_word_and_zeros_behind():
    model = built(LATE)
    images = model.encode_image(torch.randn(2, 3, 32, 32))
    assert images.shape == (2, 4, 32)  # 32 px in patches of 16
    texts = model.encode_text(ids(CAPTIONS))
    assert texts.shape == (2, 31, 32)
    words = torch.tensor([[len(caption.split()) + 1] for caption in CAPTIONS])  # and the end token; not the start token
    torch.testing.assert_close(texts.norm(dim=2), (torch.arange(31) < words).float())
    assert (texts[torch.arange(31) >= words] == 0).all()
    torch.testing.assert_close(images.norm(dim=2), torch.ones(2, 4))


def test_the_start_token_says_nothing_under_a_causal_mask_and_is_left_out():
    tower = built(LATE).text_tower
    first = (tower.tower.forward_tokens(ids(CAPTIONS)) @ tower.tower.projection)[:, 0]
    torch.testing.assert_close(first[0], first[1])
    assert not torch.allclose(tower(ids(CAPTIONS))[0, 1], tower(ids(CAPTIONS))[1, 1], atol=1e-3)


def test_pictures_rank_captions_by_one_matrix_and_captions_rank_pictures_by_the_other():
    model, pairs = built(LATE), SceneDataset(split="test", size=30, image_size=32)
    encoder = Encoder(model, ImageTransform(size=32), TOKENIZER, 32, 16, torch.device("cpu"))
    metrics = evaluate_retrieval(encoder, pairs).metrics
    texts = encoder.texts([caption for index in range(30) for caption in pairs.captions(index)])
    i2t, t2i = late_interaction(encoder.images(pairs)[0], texts)
    owners = torch.arange(30).repeat_interleave(5)
    is_right = owners == torch.arange(30)[:, None]
    by_picture, by_caption, of_the_other = (
        is_right.gather(dim, matrix.argsort(dim=dim, descending=True, stable=True)).narrow(dim, 0, 5).any(dim)
        for matrix, dim in ((i2t, 1), (t2i, 0), (i2t, 0))
    )
    assert metrics["i2t_recall_at_5"] == pytest.approx(by_picture.double().mean())
    assert metrics["t2i_recall_at_5"] == pytest.approx(by_caption.double().mean())
    assert of_the_other.sum() != by_caption.sum()  # it does make a difference


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["method.queue_size=8"], r"method\.queue_size = 8 with method\.loss = late_interaction; expected: 0"),
        (["method.targets=ids"], r"method\.targets = 'ids' with method\.loss = late_interaction; expected: diagonal"),
        (["method.prompt_average=embeddings"], r"method\.prompt_average = 'embeddings' .* expected: scores"),
        (["method.logit_scale_min=200"], "logit_scale_min = 200.0, logit_scale_max = 100.0; expected: 0 < min"),
        (["method.embedding=class_token"], r"method\.embedding = 'class_token' with .*; expected: projection"),
        (
            [
                "method.loss=in_batch",
                "method.prompt_average=embeddings",
                "method.embedding=class_token",
                "model.embedding_dim=16",
            ],
            r"model\.image\.width = 32 with method\.embedding = class_token, .*; expected: 16",
        ),
        (["method.loss=siglip"], r"method\.loss = 'siglip'; expected one of: .*in_batch.*late_interaction"),
        (["method.ema_momentum=0.5"], r"ema_momentum = 0\.5 with method\.queue_size = 0, .* expected: 0\.99"),
        (
            ["method.logit_scale_trainable=false", "method.logit_scale_init=0.5"],
            r"logit_scale_init = 0\.5 with .*false is outside its bounds; expected: 1\.0 to 100\.0, or other",
        ),
        (
            ["method.logit_scale_trainable=false", "method.logit_scale_init=200", "method.logit_scale_min=null"],
            r"logit_scale_init = 200\.0 .*expected: None to 100\.0",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        smoke(LATE, *settings)
