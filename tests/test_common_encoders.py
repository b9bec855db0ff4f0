"""Towers: parameter counts of the papers' sizes, PyTorch's own layers as reference, and laws of class tokens."""

from types import SimpleNamespace

import pytest
import torch
from refusals import refused
from torch import nn

from common.caption_lengths import encode_by_length
from common.encoders.fusion import FusionTransformer
from common.encoders.resnet import NarrowResNet, resnet50
from common.encoders.stem import Stem
from common.encoders.text import BidirectionalTextTransformer, CausalTextTransformer
from common.encoders.transformer import Block, Transformer, fused_attention
from common.encoders.vision import VisionTransformer, interpolate_positions


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("pre_norm", [True, False])
def test_block_equals_pytorchs_encoder_layer(pre_norm):
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
    keep[1, 4:] = False
    expected = theirs.train()(tokens, src_key_padding_mask=~keep)  # train mode: no fused inference path
    torch.testing.assert_close(ours(tokens, keep[:, None, None, :]), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("autocast", [False, True])
def test_attention_in_bfloat16_on_a_cpu_is_the_float32_one_rounded(autocast):
    inputs = [torch.randn(3, 2, 5, 8).bfloat16().requires_grad_() for _ in range(3)]
    mask = torch.rand(3, 1, 1, 5) < 0.7
    mask[..., 0] = True
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        attended = fused_attention(*inputs, mask, 0.0)
    expected = nn.functional.scaled_dot_product_attention(*(array.float() for array in inputs), attn_mask=mask)
    assert attended.dtype == torch.bfloat16
    torch.testing.assert_close(attended, expected.bfloat16(), rtol=0, atol=0)
    ours, reference = (torch.autograd.grad(array.float().square().sum(), inputs) for array in (attended, expected))
    torch.testing.assert_close(ours, reference, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_last_block_works_on_class_tokens_only_and_gives_what_it_gives_among_all(checkpointing):
    images, token_ids = torch.randn(3, 3, 32, 32).double(), torch.tensor([[2, 5, 3, 0, 0], [2, 6, 7, 8, 3]])
    sizes = (16, 2, 2, 6)
    more = {"num_class_tokens": 2, "gradient_checkpointing": checkpointing}
    lengths = []
    for tower, batch in (
        (VisionTransformer(32, 8, *sizes, **more), images),
        (BidirectionalTextTransformer(10, 5, *sizes, **more), token_ids),
    ):
        tower.double()
        for block in tower.transformer.blocks:
            block.mlp.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
        features = tower(batch)
        assert lengths[-2] > lengths[-1] == 2
        expected = (tower.forward_tokens(batch)[:, :2] @ tower.projection).flatten(1)
        torch.testing.assert_close(features, expected, rtol=1e-12, atol=1e-12)
        assert not torch.allclose(features[:, :6], features[:, 6:], atol=1e-5)  # class tokens differ
        ours, theirs = (
            torch.autograd.grad(actual.square().sum(), list(tower.parameters())) for actual in (features, expected)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_swapping_position_rows_of_two_text_class_tokens_swaps_their_blocks():
    tower = BidirectionalTextTransformer(10, 4, 16, 2, 2, 6, num_class_tokens=2).double()
    nn.init.normal_(tower.position_embedding)
    token_ids = torch.tensor([[2, 5, 6, 3]])
    before = tower(token_ids).view(2, 6)
    with torch.no_grad():
        tower.position_embedding[:2] = tower.position_embedding[:2].flip(0)
    torch.testing.assert_close(tower(token_ids).view(2, 6), before.flip(0), rtol=1e-10, atol=1e-12)


def test_patches_that_leave_a_rim_and_positions_that_are_no_square_are_refused_with_their_numbers():
    refused(
        (
            "size = 50 is not a multiple of patch_size = 8; expected: 48 or 56",
            lambda: VisionTransformer(50, 8, 16, 1, 2, 8),
        ),
        (
            "50 position rows less 2 class rows are no square",
            lambda: interpolate_positions(torch.randn(50, 12), 2, 9),
        ),
    )


def test_pictures_of_another_size_are_refused_and_no_picture_has_no_features():
    tower = VisionTransformer(32, 8, 16, 2, 2, 8)
    for shape in ((3, 8, 8), (3, 39, 39), (3, 16, 64), (1, 32, 32)):
        refused((r"expected: \(batch, 3, 32, 32\)", lambda shape=shape: tower(torch.zeros(2, *shape))))
    assert tower(torch.zeros(0, 3, 32, 32)).shape == (0, 8)


def test_parameter_count_of_euclips_text_tower_and_of_alberts_fusion_layers():
    with torch.device("meta"):
        assert count(CausalTextTransformer(49_408, 77, 512, 12, 8, 512, end_id=49_407)) == 63_428_096
        # six BERT-base layers of 7,087,872 and in each a cross-attention of 4 matrices 768 x 768 with bias and a norm
        assert count(FusionTransformer(768, 768, 6, 12)) == 6 * (7_087_872 + 4 * (768 * 768 + 768) + 2 * 768)
        # timm's vit_base_patch16_224 without its classifier
        assert count(VisionTransformer(224, 16, 768, 12, 12, None, patch_bias=True, input_norm=False)) == 85_798_656


def test_a_causal_tower_does_not_see_what_comes_after_the_end_token():
    tower = CausalTextTransformer(50, 8, 16, 2, 2, 6, end_id=3).double()
    ids = torch.tensor([[2, 7, 9, 3, 0, 0, 0, 0], [2, 7, 3, 9, 9, 9, 9, 9]])
    changed = torch.tensor([[2, 7, 9, 3, 8, 8, 3, 8], [2, 7, 3, 0, 0, 0, 0, 0]])
    torch.testing.assert_close(tower(ids), tower(changed), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(tower(ids[1:]), tower(ids[1:, :3]), rtol=1e-12, atol=1e-12)  # shorter input, same text
    assert (tower(ids)[0] - tower(torch.tensor([[2, 9, 7, 3, 0, 0, 0, 0]]))[0]).abs().max() > 1e-4


def padded_ids(batch, length=8):
    """Captions of 3 to `length` ids with their ends (id 3), and anything behind them."""
    ids = torch.randint(4, 50, (batch, length))
    ids[torch.arange(batch), torch.randint(2, length, (batch,))] = 3
    return ids


@pytest.mark.parametrize("batch", [15, 70])
@pytest.mark.parametrize(
    "tower",
    [
        BidirectionalTextTransformer(50, 8, 16, 2, 2, 6, num_class_tokens=3, end_id=3).double(),
        CausalTextTransformer(50, 8, 16, 2, 2, 6, end_id=3).double(),
    ],
    ids=["bidirectional", "causal"],
)
def test_captions_of_like_length_together_give_the_same_features_and_gradients(tower, batch):
    ids, weights = padded_ids(batch), torch.randn(batch, 6 * getattr(tower, "num_class_tokens", 1)).double()
    seen = []
    watch = tower.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel()))
    actual = []
    for features in (tower(ids), encode_by_length(tower, ids)):
        actual.append((features, *torch.autograd.grad((features * weights).sum(), list(tower.parameters()))))
    watch.remove()
    torch.testing.assert_close(actual[1], actual[0], rtol=1e-9, atol=1e-11)
    assert len(seen) - 1 == min(4, max(1, batch // 16))
    assert batch < 32 or sum(seen[1:]) < 0.85 * seen[0]


def test_ids_without_an_end_token_go_through_the_tower_as_they_are():
    ids = padded_ids(40)
    ids[17] = 5
    causal = CausalTextTransformer(50, 8, 16, 2, 2, 6, end_id=3)
    refused(("row 17 of token_ids has no end token", lambda: encode_by_length(causal, ids)))
    tower = BidirectionalTextTransformer(50, 8, 16, 2, 2, 6, end_id=3)
    torch.testing.assert_close(encode_by_length(tower, ids), tower(ids), rtol=0, atol=0)


def test_a_fusion_layer_equals_pytorchs_decoder_layer():
    ours = FusionTransformer(32, 32, 1, 4, norm_eps=1e-5).double()
    block = ours.transformer.blocks[0]
    theirs = nn.TransformerDecoderLayer(32, 4, 128, 0.0, "gelu", batch_first=True, dtype=torch.float64)
    cross = block.cross_attention
    pairs = [
        (theirs.self_attn.in_proj_weight, block.attention.in_projection.weight),
        (theirs.self_attn.out_proj.weight, block.attention.out_projection.weight),
        (
            theirs.multihead_attn.in_proj_weight,
            torch.cat([cross.query_projection.weight, cross.memory_projection.weight]),
        ),
        (theirs.multihead_attn.out_proj.weight, cross.out_projection.weight),
        (theirs.linear1.weight, block.mlp[0].weight),
        (theirs.linear2.weight, block.mlp[2].weight),
    ]
    with torch.no_grad():
        for parameter, weight in pairs:
            parameter.copy_(weight)
        for bias in (theirs.linear1.bias, theirs.linear2.bias):  # biases start at 0 on our side
            bias.zero_()
    text, image = torch.randn(3, 6, 32, dtype=torch.float64), torch.randn(3, 10, 32, dtype=torch.float64)
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[2, 4:] = False
    expected = theirs(text, image, tgt_key_padding_mask=~mask)
    torch.testing.assert_close(ours(text, mask, image), expected, rtol=1e-10, atol=1e-12)


def test_recorded_cross_attention_is_a_distribution_and_changes_nothing():
    fusion = FusionTransformer(16, 24, 3, 2).double().eval()
    text, image = torch.randn(2, 4, 16, dtype=torch.float64), torch.randn(2, 5, 24, dtype=torch.float64)
    mask, recorded = torch.ones(2, 4, dtype=torch.bool), []
    output = fusion(text, mask, image, recorded)
    torch.testing.assert_close(output, fusion(text, mask, image), rtol=1e-10, atol=1e-12)
    assert [weights.shape for weights in recorded] == [(2, 2, 4, 5)] * 3
    for weights in recorded:
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones_like(weights[..., 0]))
    gradients = torch.autograd.grad(output[:, 0, 0].sum(), recorded)
    assert all(gradient.abs().max() > 0 for gradient in gradients)


def test_gradient_checkpointing_runs_every_block_twice_and_changes_no_gradient():
    plain = Transformer(16, 3, 2, pre_norm=False, dropout=0.3).double()
    sparing = Transformer(16, 3, 2, pre_norm=False, dropout=0.3, gradient_checkpointing=True).double()
    sparing.load_state_dict(plain.state_dict())
    tokens = torch.randn(2, 5, 16, dtype=torch.float64)
    gradients, calls = [], []
    for block in sparing.blocks:
        block.attention.register_forward_pre_hook(lambda *_: calls.append(1))
    for model in (plain, sparing):
        torch.manual_seed(0)  # dropout draws the same in both
        model(tokens).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    assert len(calls) == 6
    sparing.eval()(tokens).sum().backward()
    assert len(calls) == 9


def dropping(rate):
    """A causal text tower, and a fusion, that drop this share; tests/test_common_weights.py has BERT's."""
    torch.manual_seed(3)
    return {
        "clip": CausalTextTransformer(50, 8, 16, 2, 2, 6, end_id=3, dropout=rate),
        "fusion": FusionTransformer(16, 12, 2, 2, dropout=rate),
    }


IDS = torch.tensor([[2, 9, 7, 3, 0, 0, 0, 0], [2, 5, 6, 7, 8, 9, 10, 3]])


def run_dropping(name, module):
    if name != "fusion":
        return module.forward_tokens(IDS)
    generator = torch.Generator().manual_seed(1)
    tokens, images = (torch.randn(2, length, width, generator=generator) for length, width in ((8, 16), (5, 12)))
    return module(tokens, IDS != 0, images)


@pytest.mark.parametrize("name", ["clip", "fusion"])
def test_dropout_acts_in_training_only_and_a_rate_of_zero_draws_nothing(name):
    plain, module = dropping(0.0)[name], dropping(0.3)[name]
    assert all(torch.equal(value, module.state_dict()[key]) for key, value in plain.state_dict().items())
    before = torch.get_rng_state()
    expected = run_dropping(name, plain.train())
    module.eval()
    assert torch.equal(run_dropping(name, module), expected)
    assert torch.equal(torch.get_rng_state(), before)  # no draw, by rate 0 or in evaluation
    module.train()
    assert not torch.equal(run_dropping(name, module), run_dropping(name, module))


@pytest.mark.parametrize("stem", [None, "test_efficientnet"])
def test_kept_patches_are_the_tokens_that_they_are_without_dropout(stem):
    stem = None if stem is None else Stem(stem, 128)
    tower = VisionTransformer(128, 32, 16, 1, 2, 6, num_class_tokens=2, patch_dropout=0.5, stem=stem)
    tokens = []
    tower.transformer.register_forward_hook(lambda module, inputs, output: tokens.append(inputs[0]))
    images = torch.randn(3, 3, 128, 128)
    tower(images)
    tower.eval()(images)
    some, all_tokens = tokens
    assert some.shape == (3, 2 + 8, 16)
    near = torch.isclose(some[:, :, None], all_tokens[:, None], rtol=1e-4, atol=1e-5).all(dim=-1)
    assert (near.sum(dim=2) == 1).all()
    places = near.int().argmax(dim=2)
    assert (places[:, :2] == torch.arange(2)).all()
    assert (places.diff(dim=1) > 0).all()
    assert not torch.equal(places[0], places[1])


def test_interpolated_positions_equal_open_clips_and_keep_the_class_rows():
    positions = torch.randn(1 + 49, 12)
    state = {"visual.positional_embedding": positions.clone()}
    model = SimpleNamespace(visual=SimpleNamespace(grid_size=(9, 9)))
    pytest.importorskip("open_clip.model").resize_pos_embed(state, model)
    ours = interpolate_positions(positions, 1, 9)
    torch.testing.assert_close(ours, state["visual.positional_embedding"], rtol=1e-5, atol=1e-6)
    assert interpolate_positions(positions, 1, 7) is positions


def test_resnets_have_the_known_parameter_counts_and_outputs():
    with torch.device("meta"):
        assert count(resnet50()) == 25_557_032 - 2_049_000  # torchvision's less its classifier
        wide = NarrowResNet(64)  # torchvision's resnet18 without classifier, with a 3x3 stem instead of 7x7
        assert count(wide) == 11_689_512 - 513_000 - 64 * 3 * (49 - 9)
        assert wide(torch.randn(2, 3, 32, 32)).shape == (2, wide.output_dim) == (2, 512)
        assert resnet50()(torch.randn(2, 3, 64, 64)).shape == (2, 2048)


def test_a_caption_ends_at_its_end_token_whatever_id_pads_it():
    by_end = BidirectionalTextTransformer(50, 8, 16, 2, 2, 6, end_id=3).double()
    ids = torch.tensor([[2, 7, 0, 9, 3, 0, 0, 0]])  # 0 is a word here, and padding
    other = torch.tensor([[2, 7, 8, 9, 3, 0, 0, 0]])
    assert (by_end(ids) - by_end(other)).abs().max() > 1e-4  # the word is seen
    torch.testing.assert_close(by_end(ids), by_end(ids[:, :5]), rtol=1e-12, atol=1e-12)  # the padding is not
    torch.testing.assert_close(by_end(ids), by_end(torch.tensor([[2, 7, 0, 9, 3, 5, 3, 5]])), rtol=1e-12, atol=1e-12)
