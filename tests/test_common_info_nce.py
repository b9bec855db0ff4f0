"""InfoNCE against loops, closed forms and open_clip; two processes against one."""

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
from comparison import Comparison
from processes import in_processes
from refusals import refused

from common.distributed import mean_over_processes, rank, world_size
from common.geometry import Sphere, inner_product_similarity, unit
from common.info_nce import (
    Distillation,
    QueuedPairs,
    check_row_stochastic,
    contrastive_loss,
    distilled_targets,
    info_nce,
    mask_absent,
    nt_xent,
    positives_from_ids,
    symmetric_info_nce,
)
from common.logit_scale import LogitScale
from common.run.guards import NonFiniteLoss, check_finite
from common.sigmoid_loss import sigmoid_loss
from common.tiled import geometry_loss, tiled_contrastive_loss
from euclip.geometry import Euclidean, Hyperbolic


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_order_of_pairs_and_of_sides_is_nothing_to_the_loss():
    logits, shuffle = 5 * double(9, 9), torch.randperm(9)
    expected = float(symmetric_info_nce(logits))
    assert float(symmetric_info_nce(logits.T)) == pytest.approx(expected, rel=1e-13)
    assert float(symmetric_info_nce(logits[shuffle][:, shuffle])) == pytest.approx(expected, rel=1e-13)


def test_loss_and_gradients_equal_open_clip():
    open_clip = pytest.importorskip("open_clip")
    images, texts = double(12, 16), double(12, 16)
    actual = []
    for loss_of in (lambda *pair: contrastive_loss(*pair[:2], Sphere(), pair[2]), open_clip.ClipLoss()):
        leaves = [array.clone().requires_grad_() for array in (images, texts, torch.tensor(2.0, dtype=torch.float64))]
        loss = loss_of(unit(leaves[0]), unit(leaves[1]), leaves[2].exp())
        loss.backward()
        actual.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*actual):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


def test_gradient_passes_gradcheck():
    images = unit(torch.randn(4, 3, dtype=torch.float64)).requires_grad_()
    texts = unit(torch.randn(4, 3, dtype=torch.float64)).requires_grad_()
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, y, s: contrastive_loss(x, y, Sphere(), s), (images, texts, scale))


def test_large_logits_stay_finite():
    embeddings = unit(torch.randn(16, 8)).requires_grad_()
    loss = contrastive_loss(embeddings, -embeddings, Sphere(), torch.tensor(1e4))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(embeddings.grad).all()


# soft and several targets


def test_row_stochastic_targets_equal_cross_entropy_and_one_hot_rows_an_index():
    logits, targets, index = 3 * double(6, 9), double(6, 9).softmax(dim=1), torch.randint(9, (6,))
    expected = torch.nn.functional.cross_entropy(logits, targets)
    torch.testing.assert_close(info_nce(logits, targets), expected, rtol=1e-13, atol=0)
    one_hot = torch.nn.functional.one_hot(index, 9).double()
    torch.testing.assert_close(info_nce(logits, one_hot), info_nce(logits, index), rtol=1e-13, atol=0)
    by_hand = [math.log(sum(math.exp(v) for v in row)) - row[k] for row, k in zip(logits.tolist(), index.tolist())]
    assert float(info_nce(logits, index)) == pytest.approx(sum(by_hand) / 6, rel=1e-13)


def test_soft_targets_pass_gradcheck_with_masked_candidates():
    logits, targets = double(3, 5).requires_grad_(), torch.zeros(3, 5, dtype=torch.float64)
    targets[:, :3] = double(3, 3).softmax(dim=1)
    present = torch.tensor([True, True, True, False, True])
    assert torch.autograd.gradcheck(lambda given: info_nce(mask_absent(given, present), targets), (logits,))
    info_nce(mask_absent(logits, present), targets).backward()
    assert (logits.grad[:, 3] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("soft", [False, True])
def test_half_precision_logits_are_cast_up_under_autocast_too(dtype, soft):
    logits = (10 * torch.randn(8, 300)).to(dtype)
    targets = torch.arange(8)
    if soft:
        targets = torch.nn.functional.one_hot(targets, 300).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        loss = info_nce(logits, targets)
    assert loss.dtype == torch.float32
    expected = torch.nn.functional.cross_entropy(logits.double(), torch.arange(8))
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)


def test_positives_share_the_mass_of_all_candidates_of_the_same_id():
    targets = positives_from_ids(torch.tensor([7, 8, 5]), torch.tensor([7, 8, 5, 7, -1, 7]))
    third = 1 / 3
    expected = torch.tensor([[third, 0, 0, third, 0, third], [0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0]])
    torch.testing.assert_close(targets, expected)
    assert targets.dtype == torch.float32
    check_row_stochastic(positives_from_ids(torch.arange(3), torch.arange(3).repeat(7), dtype=torch.float64), 1e-15)


def test_unknown_ids_equal_nothing_but_the_partner_is_always_a_positive():
    ids = torch.tensor([-1, 4, -1])
    targets = positives_from_ids(ids, torch.tensor([-1, 4, -1, 4]), partner_columns=torch.tensor([0, 1, 2]))
    assert targets.tolist() == [[1, 0, 0, 0], [0, 0.5, 0, 0.5], [0, 0, 1, 0]]


def test_pseudo_targets_mix_softmax_and_one_hot():
    pseudo, alpha = double(3, 5), 0.4
    by_index = distilled_targets(pseudo, torch.tensor([4, 0, 2]), alpha)
    expected = alpha * pseudo.exp() / pseudo.exp().sum(dim=1, keepdim=True)
    for row, partner in enumerate((4, 0, 2)):
        expected[row, partner] += 1 - alpha
    torch.testing.assert_close(by_index, expected, rtol=1e-13, atol=0)
    one_hot = torch.nn.functional.one_hot(torch.tensor([4, 0, 2]), 5).double()
    torch.testing.assert_close(distilled_targets(pseudo, one_hot, alpha), by_index, rtol=1e-15, atol=0)
    assert not distilled_targets(pseudo.requires_grad_(), torch.tensor([4, 0, 2]), 0.4).requires_grad
    assert distilled_targets(pseudo.detach().half(), torch.tensor([4, 0, 2]), 0.4).dtype == torch.float32


# candidates that are not there


def test_a_masked_candidate_counts_as_if_it_were_not_in_the_matrix():
    logits, targets = double(4, 9), torch.tensor([0, 1, 2, 5])
    present = torch.tensor([True] * 6 + [False] * 3)
    masked = info_nce(mask_absent(logits, present), targets)
    torch.testing.assert_close(masked, info_nce(logits[:, :6], targets), rtol=1e-14, atol=0)
    soft = torch.nn.functional.one_hot(targets, 9).double()
    torch.testing.assert_close(info_nce(mask_absent(logits, present), soft), masked, rtol=1e-14, atol=0)


def test_rows_without_any_candidate_or_with_a_masked_positive_are_refused_by_number():
    present = torch.tensor([[True, False], [False, False], [False, False]])
    logits = mask_absent(torch.zeros(3, 3), torch.tensor([True, False, True]))
    refused(
        ("every candidate is masked: 2 of 3 rows: 1, 2", lambda: mask_absent(torch.zeros(3, 2), present)),
        ("every candidate is masked", lambda: mask_absent(torch.zeros(3, 2), torch.tensor([False, False]))),
        (
            r"must be bool, \(2,\) or \(3, 2\), got \(3,\)",
            lambda: mask_absent(torch.zeros(3, 2), torch.ones(3, dtype=torch.bool)),
        ),
        (r"the positive is masked .*: 1 of 3 rows: 1", lambda: info_nce(logits, torch.arange(3))),
        (r"the positive is masked .*: 3 of 3 rows: 0, 1, 2", lambda: info_nce(logits, torch.full((3, 3), 1 / 3))),
        (
            r"the positive is masked .*: 1 of 2 rows: 1",
            lambda: info_nce(torch.tensor([[0.0, 1.0], [-torch.inf, -torch.inf]]), torch.tensor([0, 0])),
        ),
    )


@pytest.mark.parametrize(
    ("logits", "targets", "message"),
    [
        (
            torch.zeros(3, 4),
            torch.zeros(3),
            r"targets \(3,\) torch\.float32 do not fit logits \(3, 4\); expected: \(3,\)",
        ),
        (torch.zeros(3, 4), torch.zeros(4, 3), r"targets \(4, 3\)"),
        (torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.int64), r"targets \(3, 4\) torch\.int64"),
        (torch.zeros(3, 4), torch.zeros(3, dtype=torch.int32), r"torch\.int32"),
        (torch.zeros(4), torch.zeros(4), r"got \(4,\)"),
        (torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), r"at least one row, got \(0, 4\)"),
        (torch.zeros(3, 4), torch.tensor([0, 4, 1]), r"outside \[0, 4\): 1 of 3 rows: 1"),
        (torch.zeros(3, 4), torch.tensor([0, 1, -100]), r"outside \[0, 4\): 1 of 3 rows: 2"),
    ],
)
def test_targets_that_do_not_fit_are_refused(logits, targets, message):
    refused((message, lambda: info_nce(logits, targets)))


def test_other_mistakes_are_named():
    sums = torch.tensor([[0.5, 0.5], [0.5, 0.4], [1.5, -0.5], [math.nan, 1.0]])
    refused(
        (r"\(3, 4\)", lambda: symmetric_info_nce(torch.zeros(3, 4))),
        (
            r"no candidate has the id of the query: 2 of 3 rows: 0 \(9\), 2 \(-1\)",
            lambda: positives_from_ids(torch.tensor([9, 4, -1]), torch.tensor([4, -1])),
        ),
        (r"3 of 4 rows: 1 \(0\.9.*\), 2 \(1\.0\), 3 \(nan\)", lambda: check_row_stochastic(sums)),
        (r"alpha must lie in \[0, 1\], got 1\.5", lambda: distilled_targets(torch.zeros(2, 2), torch.arange(2), 1.5)),
        (
            r"targets \(3,\) do not fit pseudo-logits \(2, 2\)",
            lambda: distilled_targets(torch.zeros(2, 2), torch.arange(3), 0.5),
        ),
        (
            r"query_ids must be a vector of int64, got \(2, 1\)",
            lambda: positives_from_ids(torch.zeros(2, 1, dtype=torch.int64), torch.arange(2)),
        ),
        (
            r"equal shapes, got \(2, 3\) and \(3, 3\)",
            lambda: nt_xent(torch.zeros(2, 3), torch.zeros(3, 3), Sphere(), torch.tensor(1.0)),
        ),
        (
            r"logit_scale is a LogitScale; expected its value, logit_scale\(\)",
            lambda: nt_xent(torch.zeros(2, 3), torch.zeros(2, 3), Sphere(), LogitScale()),
        ),
    )


# numbers that every implementation must reproduce


@pytest.mark.parametrize("scale", [1.0, 1 / 0.07])
def test_a_constant_representation_is_at_chance_at_any_temperature(scale):
    constant, scale = unit(torch.ones(256, 8, dtype=torch.float64)), torch.tensor(scale, dtype=torch.float64)
    loss = contrastive_loss(constant, constant, Sphere(), scale)
    assert float(loss) == pytest.approx(math.log(256), abs=1e-12)
    assert float(nt_xent(constant, constant, Sphere(), scale)) == pytest.approx(math.log(511), abs=1e-12)
    queue = QueuedPairs(constant[:100], constant[:100], torch.arange(100))
    loss = contrastive_loss(constant, constant, Sphere(), scale, queue=queue)
    assert float(loss) == pytest.approx(math.log(356), abs=1e-12)


@pytest.mark.parametrize(("batch", "temperature"), [(2, 1.0), (16, 0.07), (64, 1.0)])
def test_the_simplex_reaches_the_optimum(batch, temperature):
    simplex = unit(torch.eye(batch, dtype=torch.float64) - 1 / batch)
    scale = torch.tensor(1 / temperature, dtype=torch.float64)
    loss = contrastive_loss(simplex, simplex, Sphere(), scale)
    expected = math.log(1 + (batch - 1) * math.exp(-(1 + 1 / (batch - 1)) / temperature))
    assert float(loss) == pytest.approx(expected, abs=1e-12)


# SimCLR


def loops_nt_xent(first, second, scale):
    views, count, total = [*first, *second], len(first), 0.0
    for i, view in enumerate(views):
        others = [j for j in range(2 * count) if j != i]
        denominator = sum(math.exp(scale * float(view @ views[j])) for j in others)
        total += math.log(denominator) - scale * float(view @ views[(i + count) % (2 * count)])
    return total / (2 * count)


def test_nt_xent_equals_loops_written_from_the_formula():
    first, second = unit(double(6, 4)), unit(double(6, 4))
    loss = nt_xent(first, second, Sphere(), torch.tensor(5.0, dtype=torch.float64))
    assert float(loss) == pytest.approx(loops_nt_xent(first, second, 5.0), rel=1e-13)


@pytest.mark.parametrize("geometry", [Euclidean(squared=False), Hyperbolic(16, squared=False)], ids=lambda g: g.name)
def test_views_that_are_close_have_exact_gradients_in_float32(geometry):
    features, noise = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(2))
    first, second = (geometry.embed_image(3 * features + shift) for shift in (0, 1e-3 * noise))
    gradients = []
    for dtype in (torch.float32, torch.float64):
        views = first.detach().to(dtype).requires_grad_()
        loss = nt_xent(views, second.detach().to(dtype), copy.deepcopy(geometry).to(dtype), torch.tensor(1.0))
        gradients.append(torch.autograd.grad(loss, views)[0].double())
    assert (gradients[0] - gradients[1]).norm() <= 1e-5 * gradients[1].norm()


def test_nt_xent_is_symmetric_and_passes_gradcheck():
    first, second = unit(double(3, 4)).requires_grad_(), unit(double(3, 4)).requires_grad_()
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    one = nt_xent(first, second, Sphere(), scale)
    other = nt_xent(second, first, Sphere(), scale)
    torch.testing.assert_close(one, other, rtol=1e-13, atol=0)
    assert torch.autograd.gradcheck(lambda x, y, s: nt_xent(x, y, Sphere(), s), (first, second, scale))


# in-batch loss with ids and a queue


def loops_contrastive(images, texts, scale, ids, queue):
    """Both directions over batch and queue, each with equal mass on the candidates of the same id and the partner."""
    total, batch = 0.0, len(images)
    candidate_ids = [*ids.tolist(), *queue.ids.tolist()]
    for queries, candidates in (
        (images, [*texts, *queue.text_embeddings]),
        (texts, [*images, *queue.image_embeddings]),
    ):
        for i in range(batch):
            logits = [scale * float(queries[i] @ candidate) for candidate in candidates]
            log_sum = math.log(sum(math.exp(value) for value in logits))
            positives = [
                j for j, actual in enumerate(candidate_ids) if j == i or (actual >= 0 and actual == int(ids[i]))
            ]
            total += sum(log_sum - logits[j] for j in positives) / len(positives)
    return total / (2 * batch)


def pairs_and_queue(batch=6, rows=5):
    images, texts = unit(double(batch, 4)), unit(double(batch, 4))
    ids = torch.tensor([3, 1, 3, -1, 8, -1])
    queue = QueuedPairs(unit(double(rows, 4)), unit(double(rows, 4)), torch.tensor([1, 3, -1, 3, 9]))
    return images, texts, ids, queue


def test_ids_and_queue_equal_loops_written_from_the_formula():
    images, texts, ids, queue = pairs_and_queue()
    scale, nothing = torch.tensor(4.0, dtype=torch.float64), QueuedPairs(images[:0], texts[:0], ids[:0])
    unknown = torch.full((6,), -1)
    for given_ids, given_queue in ((None, None), (ids, None), (None, queue), (ids, queue)):
        loss = contrastive_loss(images, texts, Sphere(), scale, given_ids, given_queue)
        expected = loops_contrastive(
            images, texts, 4.0, unknown if given_ids is None else ids, nothing if given_queue is None else queue
        )
        assert float(loss) == pytest.approx(expected, rel=1e-13)


def test_pseudo_targets_of_keys_equal_loops_written_from_the_formula():
    images, texts, ids, queue = pairs_and_queue()
    image_keys, text_keys = unit(double(6, 4)), unit(double(6, 4))
    scale, alpha, total = 4.0, 0.3, 0.0
    candidate_ids = [*ids.tolist(), *queue.ids.tolist()]
    for queries, candidates, query_keys, candidate_keys in (
        (images, [*texts, *queue.text_embeddings], image_keys, [*text_keys, *queue.text_embeddings]),
        (texts, [*images, *queue.image_embeddings], text_keys, [*image_keys, *queue.image_embeddings]),
    ):
        for i in range(6):
            powers = [math.exp(scale * float(queries[i] @ candidate)) for candidate in candidates]
            pseudo = [math.exp(scale * float(query_keys[i] @ key)) for key in candidate_keys]
            positive = [j == i or (actual >= 0 and actual == int(ids[i])) for j, actual in enumerate(candidate_ids)]
            for j in range(len(candidates)):
                target = alpha * pseudo[j] / sum(pseudo) + (1 - alpha) * positive[j] / sum(positive)
                total -= target * math.log(powers[j] / sum(powers))
    keys = Distillation(image_keys, text_keys, alpha)
    loss = contrastive_loss(images, texts, Sphere(), torch.tensor(scale), ids, queue, keys)
    assert float(loss) == pytest.approx(total / 12, rel=1e-13)
    constants = (image_keys, text_keys, queue.image_embeddings, queue.text_embeddings)
    for tensor in (images, texts, *constants):
        tensor.requires_grad_()
    contrastive_loss(images, texts, Sphere(), torch.tensor(scale), ids, queue, keys).backward()
    assert [tensor.grad for tensor in constants] == [None] * 4
    assert images.grad.abs().sum() > 0 < texts.grad.abs().sum()


def test_partners_may_be_compared_by_another_function_than_the_rest():
    images, texts, _, queue = pairs_and_queue()
    given = torch.linspace(-1, 1, 6, dtype=torch.float64)

    def loss(paired):
        geometry = Comparison(inner_product_similarity, paired)
        return contrastive_loss(images, texts, geometry, torch.tensor(4.0), queue=queue)

    torch.testing.assert_close(loss(lambda x, y: (x * y).sum(dim=1)), loss(None), rtol=1e-13, atol=0)
    expected = 0.0
    for queries, others, old in ((images, texts, queue.text_embeddings), (texts, images, queue.image_embeddings)):
        scores = 4 * queries @ torch.cat([others, old]).T
        scores.diagonal().copy_(4 * given)
        expected += info_nce(scores, torch.arange(6)) / 2
    torch.testing.assert_close(loss(lambda x, y: given), expected, rtol=1e-13, atol=0)


# two processes


def nt_xent_and_gradients():
    """Loss, gradients and Hessian times ones of this process's share as DDP leaves them: the mean over processes."""
    torch.manual_seed(11)
    images, texts, share = double(6, 5), double(6, 6), torch.arange(6).chunk(world_size())[rank()]
    scale = torch.tensor(1.3, dtype=torch.float64)
    weights = [array.requires_grad_() for array in (double(5, 4), double(6, 4), scale)]
    loss = nt_xent(unit(images[share] @ weights[0]), unit(texts[share] @ weights[1]), Sphere(), scale.exp())
    gradients = torch.autograd.grad(loss, weights, create_graph=True)
    sum(gradient.sum() for gradient in gradients).backward()
    derivatives = (*gradients, *(array.grad for array in weights))
    return mean_over_processes(loss), [mean_over_processes(derivative) for derivative in derivatives]


def test_nt_xent_its_gradients_and_second_derivatives_of_two_processes_equal_one():
    """The other losses are in tests/test_info_nce_matrix.py."""
    expected_loss, expected = nt_xent_and_gradients()
    for loss, gradients in in_processes(2, nt_xent_and_gradients):
        torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
        for actual, wanted in zip(gradients, expected):
            torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12 * float(wanted.abs().max()))


@pytest.mark.parametrize("tile", [0, 2])
def test_distances_that_overflow_are_a_divergence_and_no_mask(tile):
    embeddings = torch.randn(4, 3) * 1e25
    loss = geometry_loss(embeddings, -embeddings, Euclidean(), torch.tensor(1.0), tile=tile)
    refused(
        (r"loss is (inf|nan) at step 7", lambda: check_finite(float(loss), 7, torch.nn.Linear(2, 2))),
        error=NonFiniteLoss,
    )


@pytest.mark.parametrize(
    ("images", "texts", "geometry", "scale", "message"),
    [
        (torch.eye(3), torch.eye(3), Sphere, 2.0, "a loss takes a geometry, such as Sphere.. of .*, not <class"),
        (torch.eye(3), torch.eye(3), "sphere", 2.0, "a loss takes a geometry, such as Sphere.. of .*, not 'sphere'"),
        (torch.eye(3), torch.eye(3), Sphere(), LogitScale(), r"logit_scale is a LogitScale; .*, logit_scale\(\)"),
        (np.eye(3), torch.eye(3), Sphere(), 2.0, r"image_embeddings is a ndarray of shape \(3, 3\); expected a tensor"),
        (torch.eye(3), torch.ones(3), Sphere(), 2.0, r"text_embeddings is a Tensor of shape \(3,\); expected a tensor"),
        (torch.eye(0), torch.eye(0), Sphere(), 2.0, r"image_embeddings is a Tensor of shape \(0, 0\); .* at least one"),
    ],
)
def test_what_is_no_argument_of_a_loss_is_named(images, texts, geometry, scale, message):
    losses = (contrastive_loss, tiled_contrastive_loss, partial(sigmoid_loss, logit_bias=torch.tensor(-1.0)))
    refused(*((message, partial(loss, images, texts, geometry, scale)) for loss in losses))


def test_a_number_is_a_multiplier_too():
    sides = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    expected = contrastive_loss(*sides, Sphere(), torch.tensor(3.0))
    for loss in (contrastive_loss, partial(tiled_contrastive_loss, tile=4)):
        torch.testing.assert_close(loss(*sides, Sphere(), 3.0), expected)


def test_every_loss_takes_a_geometry_and_says_so_to_a_bare_similarity():
    """A function of all pairs cannot give partners the digits that differences keep."""
    message = "a loss takes a geometry, such as Sphere.*inner_product_similarity"
    arguments = torch.eye(3), torch.eye(3), inner_product_similarity, torch.tensor(2.0)
    losses = (contrastive_loss, nt_xent, geometry_loss, tiled_contrastive_loss)
    refused(*((message, partial(loss, *arguments)) for loss in losses))
