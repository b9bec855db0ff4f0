"""Grad-CAM against loops and finite differences; boxes against the reference's rules and torchvision."""

import math

import numpy as np
import pytest
import torch
from refusals import refused
from torch import nn

from common.encoders.fusion import FusionTransformer
from common.evaluation.grad_cam import (
    Grounding,
    attention_heat,
    box_scores,
    gradients_of,
    ground,
    grounding_metrics,
    inclusive_iou,
    pixel_boxes,
    points_inside,
    resize_heat,
    share_in_box,
    signed_heat,
)


def make_attention(batch=2, heads=3, text=4, image=7):
    attention = torch.rand(batch, heads, text, image, dtype=torch.float64).softmax(dim=-1)
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    return attention, torch.randn(attention.shape, dtype=torch.float64), mask


def test_attention_heat_equals_loops_and_masked_tokens_count_in_the_mean():
    attention, gradient, mask = make_attention()
    heat = attention_heat(attention, gradient, mask, grid=(2, 3))
    torch.testing.assert_close(resize_heat(torch.full((3, 3), 2.0), 10, 17), torch.full((10, 17), 2.0))
    for b in range(2):
        for patch in range(6):
            total = 0.0
            for h in range(3):
                for t in range(4):
                    if mask[b, t]:
                        total += float(attention[b, h, t, patch + 1]) * max(0.0, float(gradient[b, h, t, patch + 1]))
            assert float(heat[b, patch // 3, patch % 3]) == pytest.approx(total / (3 * 4), rel=1e-6)


def test_class_tokens_are_left_out_and_a_wrong_grid_is_refused():
    attention, gradient, mask = make_attention(image=6)
    two = attention_heat(attention, gradient, mask, num_prefix_tokens=2)
    assert two.shape == (2, 2, 2)
    changed = attention.clone()
    changed[..., :2] = 100
    assert torch.equal(attention_heat(changed, gradient, mask, num_prefix_tokens=2), two)
    refused(
        (
            r"5 patches do not fill 2 x 2; give grid = \(rows, columns\)",
            lambda: attention_heat(attention, gradient, mask),
        ),
        (r"text_mask \(2, 3\); expected: \(2, 4\)", lambda: attention_heat(attention, gradient, mask[:, :3])),
        ("one shape", lambda: attention_heat(attention, gradient[:1], mask)),
    )


class Matching(nn.Module):
    """A match logit on a fusion transformer, in which the attention of one layer can be nudged from outside."""

    def __init__(self):
        super().__init__()
        self.fusion = FusionTransformer(width=12, image_width=8, layers=3, heads=2).double()
        self.head = nn.Linear(12, 2).double()

    def forward(self, text, mask, image, recorded=None):
        return self.head(self.fusion(text, mask, image, recorded)[:, 0])[:, 1]


def test_gradient_through_the_fusion_transformer_equals_finite_differences():
    layer = 1
    model = Matching().eval()
    text, image = torch.randn(2, 4, 12, dtype=torch.float64), torch.randn(2, 5, 8, dtype=torch.float64)
    mask = torch.tensor([[True, True, True, True], [True, True, True, False]])
    recorded = []
    (gradient,) = gradients_of(model(text, mask, image, recorded), [recorded[layer]])
    assert all(parameter.grad is None for parameter in model.parameters())

    cross = model.fusion.transformer.blocks[layer].cross_attention
    nudge = torch.zeros(2, 2, 4, 5, dtype=torch.float64)

    def with_nudge(module, inputs, output):
        """Adds what a changed attention weight would add: nudge @ value, through the output projection."""
        tokens, memory = inputs[0], inputs[1]
        batch, length, width = tokens.shape
        value = module.memory_projection(memory).view(batch, -1, 2, 2, width // 2).permute(2, 0, 3, 1, 4)[1]
        added = (nudge @ value).transpose(1, 2).reshape(batch, length, width)
        return output + added @ module.out_projection.weight.T

    handle = cross.register_forward_hook(with_nudge)
    step = 1e-6
    with torch.no_grad():
        for place in [(0, 0, 0, 0), (0, 1, 2, 3), (1, 0, 1, 4), (1, 1, 0, 2)]:
            nudge.zero_()[place] = step
            above = float(model(text, mask, image).sum())
            nudge.neg_()
            below = float(model(text, mask, image).sum())
            assert float(gradient[place]) == pytest.approx((above - below) / (2 * step), rel=1e-4, abs=1e-9)
    handle.remove()


def test_a_pass_without_gradient_is_refused():
    model = Matching().eval()
    text, image = torch.randn(1, 4, 12).double(), torch.randn(1, 5, 8).double()
    mask, recorded = torch.ones(1, 4, dtype=torch.bool), []
    with torch.no_grad():
        score = model(text, mask, image, recorded)
    stranger = torch.rand(3, requires_grad=True)
    refused(
        ("without no_grad", lambda: gradients_of(score, recorded)),
        (
            r"recorded tensors \[0\] do not lead to the score",
            lambda: gradients_of(model(text, mask, image), [stranger]),
        ),
    )


def test_signed_heat_equals_loops():
    activations, gradient = torch.randn(2, 2, 5, 3, dtype=torch.float64)
    kept = torch.tensor([[False, True, True, True, True], [False, True, True, False, False]])
    actual = signed_heat(activations, gradient, kept)
    for row in range(2):
        inside = [place for place in range(5) if kept[row, place]]
        weights = sum(gradient[row, place] for place in inside) / len(inside)
        for place in range(5):
            expected = float(activations[row, place] @ weights) if place in inside else 0.0
            assert float(actual[row, place]) == pytest.approx(expected)


# --- boxes ---------------------------------------------------------------------------------------------------------


def test_box_scores_equal_loops_over_pixels():
    heat = np.random.default_rng(0).standard_normal((12, 9))
    boxes = [[1.7, 2.2, 3.6, 4.9], [0, 0, 9, 12], [5, 5, 0.4, 0.5], [-2.5, 3, 6, 2], [3, -4, 2, 6.5], [7, 10, 20, 20]]
    for alpha in (0.0, 0.5, 1.0):
        for score, (x, y, w, h) in zip(box_scores(heat, boxes, alpha), boxes):
            rows = [r for r in range(12) if int(y) <= r < int(y + h)]
            columns = [c for c in range(9) if int(x) <= c < int(x + w)]
            total = sum(heat[r, c] for r in rows for c in columns)
            assert score == pytest.approx(total / (w * h) ** alpha, abs=1e-12)


def test_boxes_without_area_never_win():
    scores = box_scores(-np.ones((4, 4)), [[1, 1, 0, 2], [1, 1, 2, -1], [0, 0, 2, 2]])
    assert scores.tolist() == [-math.inf, -math.inf, -2.0]
    assert ground(-np.ones((4, 4)), [[1, 1, 0, 2], [0, 0, 2, 2]], [0, 0, 2, 2]).choice == 1
    assert [ground(np.ones((4, 4)), boxes, [0, 0, 2, 2]).choice for boxes in ([[1, 1, 0, 2]], [])] == [None, None]
    # without heat nothing tells them apart
    assert ground(np.zeros((4, 4)), [[0, 0, 2, 2], [2, 2, 2, 2]], [0, 0, 2, 2]).choice is None


def test_the_best_of_negative_scores_wins_and_is_reported():
    heat = np.full((6, 6), -1.0)
    result = ground(heat, [[0, 0, 4, 4], [2, 2, 3, 3]], [2, 2, 3, 3])
    assert (result.choice, result.iou, result.positive) == (1, 1, False)


def test_inclusive_iou_equals_torchvision_where_boxes_overlap_by_more_than_a_pixel():
    box_iou = pytest.importorskip("torchvision.ops").box_iou
    random, compared = np.random.default_rng(0), 0
    for corners in random.uniform(0, 40, (300, 2, 2)):
        (one, other), (size_one, size_other) = corners, random.uniform(0, 30, (2, 2))
        boxes = [[*one, *(one + size_one)], [*other, *(other + size_other)]]
        theirs = float(box_iou(torch.tensor(boxes[:1]), torch.tensor(boxes[1:])))
        ours = inclusive_iou([*one, *size_one], [*other, *size_other])
        overlap = np.minimum(one + size_one, other + size_other) - np.maximum(one, other)
        if (overlap > 1).all():
            compared += 1
            assert ours == pytest.approx(theirs, abs=1e-6)
        else:
            assert ours == 0
    assert compared > 50


def test_pointing_asks_for_the_hottest_pixel():
    heat = np.zeros((5, 8))
    heat[3, 6] = 1
    assert points_inside(heat, [6, 3, 1, 1])
    assert not points_inside(heat, [0, 0, 6, 5])
    assert not points_inside(np.zeros((4, 4)), [0, 0, 2, 2])  # without heat nowhere
    assert not points_inside(heat, [3, 6, 1, 1])  # row and column exchanged
    assert points_inside(np.ones((5, 8)), [0, 0, 1, 1])  # the first of equal pixels


def test_metrics_count_expressions():
    results = [
        Grounding(0, 0.5, True, True),
        Grounding(2, 0.49, True, True),
        Grounding(None, 0.0, False, False),
        Grounding(1, 0.9, False, False),
    ]
    assert grounding_metrics(results) == {
        "accuracy": 0.5,
        "pointing_accuracy": 0.5,
        "no_proposal_share": 0.25,
        "no_positive_score_share": 0.5,
    }
    assert grounding_metrics(results, min_iou=0.4)["accuracy"] == 0.75


def test_boxes_in_fractions_are_not_taken_for_pixels_nor_the_other_way_round():
    heat, fractions, pixels = np.ones((40, 60)), [0.1, 0.2, 0.5, 0.6], [6.0, 8.0, 30.0, 24.0]
    not_pixels = r"box \[0.1, 0.2, 0.5, 0.6\] looks like fractions .* expected .* in pixels"
    not_fractions = r"box \[6.0, 8.0, 30.0, 24.0\] looks like pixels; expected .* fractions"
    refused(
        (not_pixels, lambda: box_scores(heat, [fractions])),
        (not_pixels, lambda: points_inside(heat, fractions)),
        (not_pixels, lambda: inclusive_iou(fractions, fractions)),
        (not_pixels, lambda: ground(heat, [pixels], fractions)),
        (not_pixels, lambda: ground(heat, [fractions], pixels)),
        (not_fractions, lambda: share_in_box(heat, pixels)),
        (not_fractions, lambda: pixel_boxes([pixels], 40, 60)),
    )
    assert ground(heat, [[0.25, 0.25, 0.5, 0.5], pixels], pixels).choice == 1  # one below a pixel among others


def test_bad_boxes_and_heat_are_refused():
    refused(
        ("no expressions", lambda: grounding_metrics([])),
        ("finite", lambda: box_scores(np.full((3, 3), np.nan), [[0, 0, 1, 1]])),
        (r"boxes of shape \(1, 5\)", lambda: box_scores(np.ones((3, 3)), [[0, 0, 1, 1, 0.9]])),
        ("0 x 3", lambda: resize_heat(torch.ones(2, 2), 0, 3)),
    )
