"""Towers: parameter counts of the papers' sizes, PyTorch's own layers as reference, and laws of class tokens."""

import pytest
import torch
from torch import nn

from common.encoders.text import BidirectionalTextTransformer
from common.encoders.transformer import Block, Transformer
from common.encoders.vision import VisionTransformer


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def vision(width, heads, tokens, dim, **more):
    with torch.device("meta"):
        return VisionTransformer(224, more.pop("patch", 16), width, 12, heads, dim, num_class_tokens=tokens, **more)


def text(tokens, dim):
    with torch.device("meta"):
        return BidirectionalTextTransformer(30_522, 77, 512, 12, 8, dim, num_class_tokens=tokens)


@pytest.mark.parametrize(
    ("width", "heads", "tokens", "dim", "image_count", "text_count"),
    [
        (768, 12, 1, 512, 86_192_640, 53_759_488),
        (768, 12, 16, 32, 85_847_040, 53_521_408),
        (384, 6, 1, 512, 21_862_656, 53_759_488),
        (384, 6, 2, 256, 21_765_120, 53_628_928),
        (384, 6, 8, 64, 21_696_000, 53_533_696),
        (384, 6, 32, 16, 21_696_000, 53_521_408),
    ],
)
def test_parameter_counts_of_the_oblique_papers_models(width, heads, tokens, dim, image_count, text_count):
    assert count(vision(width, heads, tokens, dim)) == image_count
    assert count(text(tokens, dim)) == text_count


def test_parameter_count_of_euclips_vision_tower_with_and_without_the_final_norm():
    assert count(vision(768, 12, 1, 512, patch=32)) == 87_849_216
    assert count(vision(768, 12, 1, 512, patch=32, final_layer_norm=False)) == 87_849_216 - 1_536


@pytest.mark.parametrize("pre_norm", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_block_equals_pytorchs_encoder_layer(pre_norm, masked):
    ours = Block(32, 4, pre_norm=pre_norm).double()
    theirs = nn.TransformerEncoderLayer(
        32, 4, 128, dropout=0.0, activation="gelu", batch_first=True, norm_first=pre_norm, dtype=torch.float64
    )
    state = ours.state_dict()
    theirs.load_state_dict(
        {
            "self_attn.in_proj_weight": state["attention.in_projection.weight"],
            "self_attn.in_proj_bias": state["attention.in_projection.bias"],
            "self_attn.out_proj.weight": state["attention.out_projection.weight"],
            "self_attn.out_proj.bias": state["attention.out_projection.bias"],
            "linear1.weight": state["mlp.0.weight"],
            "linear1.bias": state["mlp.0.bias"],
            "linear2.weight": state["mlp.2.weight"],
            "linear2.bias": state["mlp.2.bias"],
            "norm1.weight": state["attention_norm.weight"],
            "norm1.bias": state["attention_norm.bias"],
            "norm2.weight": state["mlp_norm.weight"],
            "norm2.bias": state["mlp_norm.bias"],
        }
    )
    tokens = torch.randn(3, 7, 32, dtype=torch.float64)
    keep = torch.ones(3, 7, dtype=torch.bool)
    if masked:
        keep[1, 4:] = False
    expected = theirs.train()(tokens, src_key_padding_mask=~keep)  # train mode: no fused inference path
    torch.testing.assert_close(ours(tokens, keep[:, None, None, :]), expected, rtol=1e-10, atol=1e-12)


def test_padding_does_not_reach_the_text_features():
    tower = BidirectionalTextTransformer(50, 8, 16, 2, 2, 6, num_class_tokens=3).double()
    token_ids = torch.tensor([[2, 7, 9, 3, 0, 0, 0, 0]])
    features = tower(token_ids)
    with torch.no_grad():
        tower.token_embedding.weight[0] += 5.0  # the pad id's embedding
        tower.position_embedding[-4:] += 5.0  # the padded positions
    torch.testing.assert_close(tower(token_ids), features, rtol=1e-12, atol=1e-12)


def test_a_word_does_reach_the_text_features():
    tower = BidirectionalTextTransformer(50, 8, 16, 2, 2, 6)
    one, other = tower(torch.tensor([[2, 7, 9, 3, 0, 0, 0, 0]])), tower(torch.tensor([[2, 9, 7, 3, 0, 0, 0, 0]]))
    assert (one - other).abs().max() > 1e-4


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_each_class_token_fills_its_own_block_of_features(tokens):
    images, token_ids = torch.randn(2, 3, 32, 32), torch.tensor([[2, 5, 3, 0], [2, 6, 7, 3]])
    image_tower = VisionTransformer(32, 8, 16, 2, 2, 6, num_class_tokens=tokens)
    text_tower = BidirectionalTextTransformer(10, 4, 16, 2, 2, 6, num_class_tokens=tokens)
    for tower, batch in ((image_tower, images), (text_tower, token_ids)):
        features = tower(batch)
        assert features.shape == (2, tokens * 6)
        blocks = features.view(2, tokens, 6)
        for first in range(tokens):
            for second in range(first):
                assert not torch.allclose(blocks[:, first], blocks[:, second], atol=1e-5)


def test_swapping_position_rows_of_two_text_class_tokens_swaps_their_blocks():
    tower = BidirectionalTextTransformer(10, 4, 16, 2, 2, 6, num_class_tokens=2).double()
    nn.init.normal_(tower.position_embedding)
    token_ids = torch.tensor([[2, 5, 6, 3]])
    before = tower(token_ids).view(2, 6)
    with torch.no_grad():
        tower.position_embedding[:2] = tower.position_embedding[:2].flip(0)
    torch.testing.assert_close(tower(token_ids).view(2, 6), before.flip(0), rtol=1e-10, atol=1e-12)


def test_switched_off_final_norm_lets_the_norm_of_the_features_move():
    images = torch.randn(16, 3, 16, 16) * torch.linspace(0.1, 3, 16)[:, None, None, None]
    with_norm = VisionTransformer(16, 8, 16, 1, 2, 8)
    without = VisionTransformer(16, 8, 16, 1, 2, 8, final_layer_norm=False)
    without.load_state_dict({k: v for k, v in with_norm.state_dict().items() if not k.startswith("final_norm")})
    seen = {}
    with_norm.final_norm.register_forward_hook(
        lambda module, inputs, output: seen.update(output=output, input=inputs[0])
    )
    with_norm(images)
    assert seen["output"].norm(dim=-1).std() < 1e-3  # LayerNorm at its start: norm sqrt(width) for everybody
    torch.testing.assert_close(without(images), (seen["input"] @ without.projection).flatten(1))


def test_depth_does_not_blow_up_activations_at_the_start():
    tokens = torch.randn(4, 10, 64)
    assert Transformer(64, 12, 4)(tokens).std() < 3 * tokens.std()


def test_sizes_that_do_not_fit_are_refused_with_their_values():
    with pytest.raises(ValueError, match="50 is not a multiple of patch_size 8"):
        VisionTransformer(50, 8, 16, 1, 2, 8)
    with pytest.raises(ValueError, match="width 10 is not a multiple of heads 4"):
        Transformer(10, 1, 4)
    with pytest.raises(ValueError, match="length 5, this tower takes 4"):
        BidirectionalTextTransformer(10, 4, 16, 1, 2, 6)(torch.zeros(1, 5, dtype=torch.long))
