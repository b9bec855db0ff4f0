"""InfoNCE against loops, closed forms and open_clip."""

import math

import pytest
import torch

from common.geometry import Sphere, inner_product_similarity, unit
from common.info_nce import contrastive_loss, info_nce, symmetric_info_nce


def loops_info_nce(logits):
    """Both directions written out from the definition."""
    size, total = len(logits), 0.0
    for i in range(size):
        row = sum(math.exp(float(logits[i, j]) - float(logits[i, i])) for j in range(size))
        column = sum(math.exp(float(logits[j, i]) - float(logits[i, i])) for j in range(size))
        total += math.log(row) + math.log(column)
    return total / (2 * size)


def test_info_nce_equals_loops_written_from_the_formula():
    logits = 5 * torch.randn(7, 7, dtype=torch.float64)
    assert float(symmetric_info_nce(logits)) == pytest.approx(loops_info_nce(logits), rel=1e-13)


@pytest.mark.parametrize("size", [1, 2, 17, 256])
def test_info_nce_of_equal_similarities_is_log_n(size):
    loss = symmetric_info_nce(torch.full((size, size), 3.0, dtype=torch.float64))
    assert float(loss) == pytest.approx(math.log(size), abs=1e-12)


def test_separated_pairs_reach_the_closed_form_floor():
    # matched pairs at 1, all others orthogonal: log(1 + (B - 1) exp(-scale))
    batch, scale = 8, torch.tensor(4.0, dtype=torch.float64)
    embeddings = torch.eye(batch, dtype=torch.float64)
    loss = contrastive_loss(embeddings, embeddings, inner_product_similarity, scale)
    assert float(loss) == pytest.approx(math.log(1 + (batch - 1) * math.exp(-4)), rel=1e-12)


def test_loss_and_gradients_equal_open_clip():
    open_clip = pytest.importorskip("open_clip")
    images, texts = torch.randn(12, 16, dtype=torch.float64), torch.randn(12, 16, dtype=torch.float64)
    gradients, losses = [], []
    for loss_of in (
        lambda x, y, scale: contrastive_loss(x, y, Sphere().similarity, scale),
        lambda x, y, scale: open_clip.ClipLoss()(x, y, scale),
    ):
        x, y = images.clone().requires_grad_(), texts.clone().requires_grad_()
        log_scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        loss = loss_of(unit(x), unit(y), log_scale.exp())
        loss.backward()
        losses.append(loss.detach())
        gradients.append((x.grad, y.grad, log_scale.grad))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)
    for ours, theirs in zip(*gradients):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


def test_loss_does_not_depend_on_the_order_of_pairs():
    images, texts = unit(torch.randn(9, 6, dtype=torch.float64)), unit(torch.randn(9, 6, dtype=torch.float64))
    scale, shuffle = torch.tensor(10.0), torch.randperm(9)
    before = contrastive_loss(images, texts, inner_product_similarity, scale)
    after = contrastive_loss(images[shuffle], texts[shuffle], inner_product_similarity, scale)
    assert float(after) == pytest.approx(float(before), rel=1e-13)


def test_swapping_the_sides_leaves_the_symmetric_loss():
    logits = torch.randn(5, 5, dtype=torch.float64)
    assert float(symmetric_info_nce(logits)) == pytest.approx(float(symmetric_info_nce(logits.T)), rel=1e-14)


def test_soft_targets_with_one_hot_rows_equal_index_targets():
    logits, targets = torch.randn(4, 6, dtype=torch.float64), torch.tensor([5, 0, 2, 2])
    one_hot = torch.nn.functional.one_hot(targets, 6).double()
    assert float(info_nce(logits, one_hot)) == pytest.approx(float(info_nce(logits, targets)), rel=1e-13)


def test_gradient_passes_gradcheck():
    images = unit(torch.randn(4, 3, dtype=torch.float64)).requires_grad_()
    texts = unit(torch.randn(4, 3, dtype=torch.float64)).requires_grad_()
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, y, s: contrastive_loss(x, y, inner_product_similarity, s), (images, texts, scale)
    )


def test_large_logits_stay_finite():
    embeddings = unit(torch.randn(16, 8)).requires_grad_()
    loss = contrastive_loss(embeddings, -embeddings, inner_product_similarity, torch.tensor(1e4))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(embeddings.grad).all()


def test_a_matrix_that_is_not_square_is_refused():
    with pytest.raises(ValueError, match=r"\(3, 4\)"):
        symmetric_info_nce(torch.zeros(3, 4))
