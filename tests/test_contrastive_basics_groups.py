"""InfoNCE within groups of a batch, against loops and against InfoNCE of the whole batch."""

import math

import pytest
import torch
from refusals import refused

from common.geometry import unit
from common.info_nce import symmetric_info_nce
from contrastive_basics.config import Config, MethodConfig, OptimConfig
from contrastive_basics.groups import loss_within_groups

SCALE = torch.tensor(5.0, dtype=torch.float64)


def pairs(batch=12, dim=6):
    torch.manual_seed(0)
    return tuple(unit(torch.randn(batch, dim, dtype=torch.float64)) for _ in range(2))


@pytest.mark.parametrize("group", [3, 12])  # of the whole batch it is InfoNCE
def test_a_query_meets_only_the_pairs_of_its_group(group):
    (images, texts), total = pairs(), 0.0
    for query in range(12):
        first = query // group * group
        for queries, others in ((images, texts), (texts, images)):
            scores = [5.0 * float(queries[query] @ others[other]) for other in range(first, first + group)]
            total += math.log(sum(math.exp(score) for score in scores)) - scores[query - first]
    assert float(loss_within_groups(images, texts, SCALE, group)) == pytest.approx(total / 24, abs=1e-12)


def test_no_gradient_reaches_another_group():
    images, texts = (side.requires_grad_() for side in pairs())
    symmetric_info_nce(SCALE * images[:3] @ texts[:3].T).backward()
    of_first_group = images.grad.clone() / 4
    images.grad = None
    loss_within_groups(images, texts, SCALE, 3).backward()
    torch.testing.assert_close(images.grad[:3], of_first_group[:3])


def test_what_does_not_go_with_groups_is_refused():
    def config(loss_tile=0, **method):
        return Config(method=MethodConfig(**method), optim=OptimConfig(global_batch_size=256, loss_tile=loss_tile))

    late = {"loss": "late_interaction", "prompt_average": "scores"}
    refused(
        (
            r"method\.group_size = 5 does not divide the 12 pairs of a process",
            lambda: loss_within_groups(*pairs(), SCALE, 5),
        ),
        ("group_size = 48 with optim.global_batch_size = 256", lambda: config(group_size=48)),
        ("group_size = 1 .* expected: divisors of the batch, at least 2", lambda: config(group_size=1)),
        ("loss_tile = 64; expected: .* no tiles", lambda: config(loss_tile=64, group_size=16)),
        ("queue_size = 4 with method.group_size = 16; expected: 0", lambda: config(group_size=16, queue_size=4)),
        ("expected: 0", lambda: config(group_size=16, **late)),
    )
