"""Grad-CAM: where in an image a score comes from, and grounding by boxes or by pointing.

`attention_heat` is on cross-attention (ALBEF, GeoMM's visual grounding), `signed_heat` on tokens (Grad-CAM, Eq. 1 and
2; the oblique paper's Figures 5 and 7). Boxes are (x, y, width, height) in pixels, unless stated otherwise.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common.evaluation.arrays import array_of, tensor_of

MIN_IOU = 0.5
AREA_EXPONENT = 0.5  # alpha of the box score


@contextmanager
def recorded_input(block: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Records the tokens that go into a block; gradients stop there, so the graph is that of what follows."""
    recorded: list[torch.Tensor] = []

    def record(_: nn.Module, arguments: tuple) -> tuple:
        tokens = arguments[0].detach().requires_grad_()
        recorded.append(tokens)
        return (tokens, *arguments[1:])

    handle = block.register_forward_pre_hook(record)
    try:
        yield recorded
    finally:
        handle.remove()


def gradients_of(score: torch.Tensor, recorded: Sequence[torch.Tensor], keep_graph: bool = False) -> list[torch.Tensor]:
    """Gradients of a score with respect to recorded tensors; leaves the parameters' .grad alone.

    Args:
        score: a scalar, or (batch,) where each entry depends on its own item only (no batch statistics).
        recorded: attention weights or activations of the same forward pass.
        keep_graph: further scores of the same pass follow.
    Raises:
        ValueError: a recorded tensor is not in the score's graph (a pass under no_grad, or a detached copy).
    """
    if not all(getattr(tensor, "requires_grad", False) for tensor in (score, *recorded)):
        raise ValueError("score or recorded tensors carry no gradient; run the forward pass without no_grad")
    gradients = torch.autograd.grad(score.sum(), list(recorded), retain_graph=keep_graph, allow_unused=True)
    unused = [index for index, gradient in enumerate(gradients) if gradient is None]
    if unused:
        raise ValueError(f"recorded tensors {unused} do not lead to the score; expected: those of the same pass")
    return list(gradients)


def attention_heat(
    attention: torch.Tensor,
    gradient: torch.Tensor,
    text_mask: torch.Tensor,
    num_prefix_tokens: int = 1,
    grid: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Heat map on the patch grid: mean over heads and text tokens of attention x relu(gradient).

    Masked tokens contribute zero but count in the mean, as in the reference: one factor per text, so no choice between
    boxes changes.

    Args:
        attention, gradient: (batch, heads, text_tokens, image_tokens).
        text_mask: (batch, text_tokens), True at words.
        num_prefix_tokens: image tokens to leave out before the patches (class tokens).
        grid: rows and columns of patches; None = square.
    Returns:
        (batch, rows, columns), not negative.
    Raises:
        ValueError: unlike shapes, or patches that do not fill the grid.
    """
    attention, gradient = tensor_of(attention, "attention"), tensor_of(gradient, "gradient")
    text_mask = tensor_of(text_mask, "text_mask")
    if attention.ndim != 4 or attention.shape != gradient.shape:
        raise ValueError(
            f"attention {tuple(attention.shape)} and gradient {tuple(gradient.shape)}; expected: one shape "
            "(batch, heads, text_tokens, image_tokens)"
        )
    batch, _, text_tokens, image_tokens = attention.shape
    if text_mask.shape != (batch, text_tokens):
        raise ValueError(f"text_mask {tuple(text_mask.shape)}; expected: {(batch, text_tokens)}")
    grid = _grid(image_tokens - num_prefix_tokens, grid)
    heat = attention.float() * gradient.float().clamp(min=0) * text_mask[:, None, :, None]
    return heat.mean(dim=(1, 2))[:, num_prefix_tokens:].reshape(batch, *grid).detach()


def signed_heat(activations: torch.Tensor, gradient: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Activations times the mean gradient of the kept tokens; it is linear in the gradient, so heat of parts adds up.

    Args:
        activations, gradient: (batch, tokens, channels), tokens or places of a feature map.
        kept: (batch, tokens) bool; False at class tokens and padding.
    Returns:
        (batch, tokens), 0 where not kept; Grad-CAM shows the positive part.
    """
    activations, gradient = tensor_of(activations, "activations"), tensor_of(gradient, "gradient")
    kept = tensor_of(kept, "kept")[..., None]
    weights = (gradient * kept).sum(dim=1, keepdim=True) / kept.sum(dim=1, keepdim=True).clamp(min=1)
    return ((activations * weights).sum(dim=-1) * kept[..., 0]).detach()


def resize_heat(heat: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """(rows, columns) -> (height, width), bicubic; overshoot can make values negative."""
    heat = tensor_of(heat, "heat")
    if heat.ndim != 2 or height < 1 or width < 1:
        raise ValueError(f"heat of shape {tuple(heat.shape)} to {height} x {width}; expected: (rows, columns) to >= 1")
    return F.interpolate(heat[None, None].float(), size=(height, width), mode="bicubic", align_corners=False)[0, 0]


def box_scores(heat: Any, boxes: Any, area_exponent: float = AREA_EXPONENT) -> np.ndarray:
    """Sum of the heat inside each box over (width * height) ** area_exponent.

    A box covers rows int(y) to int(y + height) and columns int(x) to int(x + width), without the last, as in the
    reference, cut off at the image. A box without area scores -inf.

    Args:
        heat: (height, width) in pixels.
        boxes: (num_boxes, 4).
        area_exponent: 0 sums, 1 averages.
    Returns:
        (num_boxes,) float64.
    Raises:
        ValueError: non-finite heat or boxes.
    """
    heat, boxes = array_of(heat).astype(np.float64), _pixels(boxes)
    if heat.ndim != 2 or not np.isfinite(heat).all():
        raise ValueError(f"heat of shape {heat.shape}; expected: (height, width), finite")
    scores = np.full(len(boxes), -np.inf)
    for index, (x, y, width, height) in enumerate(boxes):
        if width > 0 and height > 0:
            rows = slice(max(0, int(y)), max(0, int(y + height)))
            columns = slice(max(0, int(x)), max(0, int(x + width)))
            scores[index] = heat[rows, columns].sum() / (width * height) ** area_exponent
    return scores


def inclusive_iou(one: Sequence[float], other: Sequence[float]) -> float:
    """Intersection over union of two boxes in the pixel-inclusive form of the reference.

    It differs from the ordinary form only where the overlap is at most one pixel wide or high: that counts as none.
    """
    (x1, y1, w1, h1), (x2, y2, w2, h2) = _pixels(np.stack([array_of(one), array_of(other)]))
    left, right = max(x1, x2), min(x1 + w1, x2 + w2) - 1
    top, bottom = max(y1, y2), min(y1 + h1, y2 + h2) - 1
    if left >= right or top >= bottom:
        return 0.0
    overlap = (right - left + 1) * (bottom - top + 1)
    return float(overlap / (w1 * h1 + w2 * h2 - overlap))


def points_inside(heat: Any, box: Sequence[float]) -> bool:
    """Pointing game: whether the centre of the hottest pixel (the first of equals, row by row) lies in the box."""
    heat = array_of(heat)
    if heat.max() <= 0:  # without heat it points nowhere
        return False
    row, column = np.unravel_index(int(heat.argmax()), heat.shape)
    ((x, y, width, height),) = _pixels(array_of(box)[None])
    return bool(x <= column + 0.5 < x + width and y <= row + 0.5 < y + height)


def box_coverage(box: Sequence[float], rows: int, columns: int) -> np.ndarray:
    """(rows, columns) share of each grid cell that lies in a box, whose corners are fractions of the image."""
    ((left, top, right, bottom),) = _fractions(array_of(box)[None])
    return np.outer(_covered(top * rows, bottom * rows, rows), _covered(left * columns, right * columns, columns))


def share_in_box(heat: Any, box: Sequence[float]) -> float | None:
    """Share of the heat inside a box, in [0, 1]; None without any heat.

    Args:
        heat: (rows, columns), not negative; a cell that the box cuts counts in proportion.
        box: (left, top, right, bottom), fractions of the image.
    """
    heat = array_of(heat).astype(np.float64)
    total = heat.sum()
    return float((heat * box_coverage(box, *heat.shape)).sum() / total) if total > 0 else None


def pixel_boxes(corners: Any, height: int, width: int) -> np.ndarray:
    """Boxes (left, top, right, bottom), fractions of the image as in scenes, as float64 boxes in pixels."""
    corners = _fractions(corners) * np.array([width, height, width, height], dtype=np.float64)
    return np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1)


@dataclass(frozen=True)
class Grounding:
    """Result of one expression.

    choice: index of the best proposal; None = no proposal has an area, or all score 0.
    iou: of the choice with the true box. pointed: the hottest pixel lies in it.
    positive: some proposal scores above 0.
    """

    choice: int | None
    iou: float
    pointed: bool
    positive: bool


def ground(heat: Any, proposals: Any, true_box: Sequence[float], area_exponent: float = AREA_EXPONENT) -> Grounding:
    """Chooses the proposal with the best score, which may be negative: the first of equals, none where all score 0."""
    scores = box_scores(heat, proposals, area_exponent)
    allowed = scores[scores > -math.inf]  # a box without area scores -inf and is never chosen
    choice = int(scores.argmax()) if allowed.any() else None
    iou = 0.0 if choice is None else inclusive_iou(_boxes(proposals)[choice], true_box)
    return Grounding(choice, iou, points_inside(heat, true_box), bool((scores > 0).any()))


def grounding_metrics(results: Sequence[Grounding], min_iou: float = MIN_IOU) -> dict[str, float]:
    """Metrics over expressions (sentences, not objects).

    Returns:
        "accuracy": share whose chosen box overlaps the true one by at least min_iou; "pointing_accuracy";
        "no_proposal_share": without a choice, counted as wrong; "no_positive_score_share": where the published code
        would re-use the box of the expression before.
    Raises:
        ValueError: no results.
    """
    if not results:
        raise ValueError("no expressions to average over")
    shares = {
        "accuracy": [result.choice is not None and result.iou >= min_iou for result in results],
        "pointing_accuracy": [result.pointed for result in results],
        "no_proposal_share": [result.choice is None for result in results],
        "no_positive_score_share": [not result.positive for result in results],
    }
    return {name: float(np.mean(values)) for name, values in shares.items()}


def _covered(low: float, high: float, count: int) -> np.ndarray:
    # Part of each unit interval [k, k + 1) that lies in [low, high].
    starts = np.arange(count)
    return np.clip(np.minimum(high, starts + 1) - np.maximum(low, starts), 0, 1)


def _grid(num_patches: int, grid: tuple[int, int] | None) -> tuple[int, int]:
    if grid is None:
        side = math.isqrt(max(0, num_patches))
        grid = (side, side)
    if num_patches < 1 or grid[0] * grid[1] != num_patches:
        raise ValueError(f"{num_patches} patches do not fill {grid[0]} x {grid[1]}; give grid = (rows, columns)")
    return grid


def _boxes(boxes: Any) -> np.ndarray:
    boxes = array_of(boxes).astype(np.float64)
    if boxes.size == 0:
        return boxes.reshape(0, 4)
    if boxes.ndim != 2 or boxes.shape[1] != 4 or not np.isfinite(boxes).all():
        raise ValueError(f"boxes of shape {boxes.shape}; expected: (num_boxes, 4), finite")
    return boxes


def _pixels(boxes: Any) -> np.ndarray:
    # Boxes (x, y, width, height) in pixels.
    boxes = _boxes(boxes)
    with_area = boxes[(boxes[:, 2:] > 0).all(axis=1)]
    if len(with_area) and np.abs(with_area).max() <= 1 and (with_area % 1).any():
        raise ValueError(
            f"box {with_area[0].tolist()} looks like fractions of the picture; expected (x, y, width, height) in "
            "pixels: multiply x and width by the picture's width, y and height by its height"
        )
    return boxes


def _fractions(boxes: Any) -> np.ndarray:
    # Boxes (left, top, right, bottom) as fractions of the image.
    boxes = _boxes(boxes)
    beyond = boxes[(np.abs(boxes) > 2).any(axis=1)]
    if len(beyond):
        raise ValueError(
            f"box {beyond[0].tolist()} looks like pixels; expected (left, top, right, bottom) as fractions of the "
            "picture, 0 to 1"
        )
    return boxes
