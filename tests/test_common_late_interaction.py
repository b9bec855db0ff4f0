"""Late interaction against loops and the single-token case; two processes against one."""

import pytest
import torch
from processes import in_processes
from refusals import refused

from common.distributed import rank, world_size
from common.geometry import unit
from common.info_nce import contrastive_loss, symmetric_info_nce
from common.late_interaction import LateInteraction, late_interaction
from common.tiled import geometry_loss


def tokens(seed, *shape):
    return unit(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def padded_texts():
    texts = tokens(1, 4, 5, 6)
    texts[1, 3:], texts[2, 1:] = 0.0, 0.0
    return texts


def test_both_matrices_equal_loops_from_the_formula():
    images, texts = tokens(0, 3, 7, 6), torch.cat([padded_texts()] * 5)  # so many that a part has several lengths
    i2t, t2i = late_interaction(images, texts)
    for i in range(3):
        for t in range(20):
            words = [word for word in texts[t] if word.abs().sum() > 0]
            first = sum(max(float(u @ w) for w in words) for u in images[i]) / 7
            second = sum(max(float(u @ w) for u in images[i]) for w in words) / len(words)
            assert float(i2t[i, t]) == pytest.approx(first, rel=1e-12)
            assert float(t2i[i, t]) == pytest.approx(second, rel=1e-12)
    assert not torch.allclose(i2t, t2i)


def test_without_padding_a_zero_vector_is_a_token_like_others():
    images, texts = tokens(0, 3, 7, 6), padded_texts()
    cosines = torch.einsum("iad,tbd->itab", images, texts)
    expected = cosines.amax(dim=3).mean(dim=2), cosines.amax(dim=2).mean(dim=2)
    torch.testing.assert_close(tuple(late_interaction(images, texts, padded=False)), expected)


def test_one_token_on_either_side_is_the_inner_product():
    images, texts = tokens(0, 5, 1, 6), tokens(1, 4, 1, 6)
    for matrix in late_interaction(images, texts):
        torch.testing.assert_close(matrix, images[:, 0] @ texts[:, 0].T)
    scale = torch.tensor(7.0, dtype=torch.float64)
    loss = contrastive_loss(images[:4], texts, LateInteraction(), scale)
    torch.testing.assert_close(loss, symmetric_info_nce(scale * images[:4, 0] @ texts[:, 0].T))


def test_chunks_do_not_change_the_result(monkeypatch):
    images, texts = tokens(0, 3, 7, 6), padded_texts()
    whole = late_interaction(images, texts)
    monkeypatch.setattr("common.late_interaction.MAX_PRODUCTS", 1)
    torch.testing.assert_close(late_interaction(images, texts), whole, rtol=1e-13, atol=1e-13)


def test_more_padding_changes_nothing_and_padding_gets_no_gradient():
    images, texts = tokens(0, 4, 7, 6), padded_texts().requires_grad_()
    scale = torch.tensor(5.0, dtype=torch.float64)
    loss = contrastive_loss(images, texts, LateInteraction(), scale)
    longer = torch.cat([texts, torch.zeros(4, 3, 6, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(contrastive_loss(images, longer, LateInteraction(), scale), loss)
    loss.backward()
    assert torch.isfinite(texts.grad).all()
    assert (texts.grad[2, 1:] == 0).all()
    assert (texts.grad[0].abs().sum(dim=1) > 0).all()


def test_half_precision_tokens_are_compared_in_float32():
    images, texts = tokens(0, 3, 7, 6).bfloat16(), tokens(1, 4, 5, 6).bfloat16()
    i2t, _ = late_interaction(images, texts)
    assert i2t.dtype == torch.float32
    torch.testing.assert_close(i2t, late_interaction(images.float(), texts.float())[0])


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize(("images", "texts"), [(2, 0), (0, 2)])
def test_no_images_or_no_texts_give_empty_matrices(images, texts, padded):
    matrices = late_interaction(torch.randn(images, 3, 4), torch.zeros(texts, 5, 4), padded)
    assert [matrix.shape for matrix in matrices] == [(images, texts)] * 2


def test_dims_that_differ_are_refused_with_both_shapes():
    refused((r"\(2, 3, 6\) and \(2, 3, 5\)", lambda: late_interaction(torch.ones(2, 3, 6), torch.ones(2, 3, 5))))


def test_the_loss_takes_one_matrix_for_its_rows_and_the_other_for_its_columns():
    images, texts, scale = tokens(0, 4, 7, 6), padded_texts(), torch.tensor(3.0, dtype=torch.float64)
    i2t, t2i = (3.0 * matrix for matrix in late_interaction(images, texts))
    pair = [*zip(i2t, range(4)), *zip(t2i.T, range(4))]
    expected = sum(float(torch.logsumexp(row, 0) - row[partner]) for row, partner in pair) / 8
    geometry = LateInteraction()
    assert float(contrastive_loss(images, texts, geometry, scale)) == pytest.approx(expected)
    assert float(geometry_loss(images, texts, geometry, scale)) == pytest.approx(expected)
    torch.testing.assert_close(geometry.paired_similarity(images, texts), i2t.diagonal() / 3.0)
    refused((r"tile = 2 .*geometry late_interaction, which has two matrices; expected: 0",
             lambda: geometry_loss(images, texts, geometry, scale, tile=2)))  # fmt: skip


def share_of_the_loss():
    """This process's loss and the gradients of its rows and of the scale."""
    rows = slice(2 * rank(), 2 * rank() + 2) if world_size() > 1 else slice(None)
    images, texts = tokens(0, 4, 7, 6)[rows].requires_grad_(), padded_texts()[rows].requires_grad_()
    scale = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    loss = geometry_loss(images, texts, LateInteraction(), scale)
    loss.backward()
    return loss.detach(), images.grad, texts.grad, scale.grad


def test_two_processes_equal_one_in_loss_and_every_gradient():
    for whole, *parts in zip(share_of_the_loss(), *in_processes(2, share_of_the_loss)):
        # a process's loss is the mean over its own rows, so the mean over processes is the whole
        both = torch.cat(parts) if whole.ndim else sum(parts)
        torch.testing.assert_close(both / 2, whole, rtol=1e-12, atol=1e-14)
