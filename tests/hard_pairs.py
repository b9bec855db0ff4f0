"""Pairs of vectors at which distances and their gradients break, and what every geometry must do with them."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def hard_pairs(num_pairs: int, dim: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors on eight directions: row k is close to row k of the other side, and to an eighth of all rows.

    Among them are equal and opposite vectors, vectors that differ by 1e-7 to 1e-3 of their length or by their length
    alone, zeros, lengths from 1e-6 to 1e4 and of 1e15, and vectors rounded to bfloat16.
    """
    direction = torch.randn(8, dim)[torch.randint(8, (num_pairs,))] / dim**0.5
    length = 10 ** torch.empty(num_pairs, 1).uniform_(-6, 4)
    length = torch.where(torch.rand(num_pairs, 1) < 0.5, torch.ones(()), length)
    length = torch.where(torch.rand(num_pairs, 1) < 0.02, torch.tensor(1.0e15), length)

    def side():
        vectors = direction * length
        factors = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, 0.0, 1 + 1e-6, 2.0])
        vectors = vectors * factors[torch.randint(len(factors), (num_pairs, 1))]
        amount = 10 ** torch.empty(num_pairs, 1).uniform_(-7, -3) * (torch.rand(num_pairs, 1) < 0.6)
        vectors = vectors + amount * vectors.norm(dim=1, keepdim=True) * torch.randn(num_pairs, dim) / dim**0.5
        return torch.where(torch.rand(num_pairs, 1) < 0.2, vectors.bfloat16().float(), vectors).to(dtype)

    return side(), side()


def assert_finite_at_hard_pairs(geometry, num_pairs: int, dtype: torch.dtype, dim: int = 64, rows: int = 250) -> int:
    """Values and gradients, with respect to features and trainable scalars, of both forms of the similarity.

    Args:
        geometry: what is tested.
        num_pairs: compared in each form.
        rows: of one block of all pairs.
    Returns:
        Pairs compared, in both forms together.
    """
    compared = 0
    for batch, similarity in ((rows, geometry.similarity), (rows**2, geometry.paired_similarity)):
        for _ in range(-(-num_pairs // rows**2)):
            images, texts = (side.requires_grad_() for side in hard_pairs(batch, dim, dtype))
            scores = similarity(geometry.embed_image(images), geometry.embed_text(texts))
            assert scores.dtype == torch.float32
            assert torch.isfinite(scores).all()
            geometry.zero_grad()
            (scores * torch.randn_like(scores)).sum().backward()
            for tensor in (images, texts, *geometry.parameters()):
                assert torch.isfinite(tensor.grad).all()
            compared += scores.numel()
    return compared


class Dtypes(TorchDispatchMode):
    """Collects the dtypes that operations return while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.seen.add(tensor.dtype)
        return out


def assert_nothing_but_float32(geometry, images: torch.Tensor, texts: torch.Tensor) -> None:
    """Forward and backward of both forms make no float64 and no half precision of float32 features."""
    images, texts = images.clone().requires_grad_(), texts.clone().requires_grad_()
    with Dtypes() as dtypes:
        for similarity in (geometry.similarity, geometry.paired_similarity):
            similarity(geometry.embed_image(images), geometry.embed_text(texts)).sum().backward()
    assert {dtype for dtype in dtypes.seen if dtype.is_floating_point} == {torch.float32}


def assert_autocast_changes_nothing(geometry, images: torch.Tensor, texts: torch.Tensor) -> None:
    """Both forms give the same bits under bfloat16 autocast."""
    for similarity in (geometry.similarity, geometry.paired_similarity):
        expected = similarity(geometry.embed_image(images), geometry.embed_text(texts))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            under_autocast = similarity(geometry.embed_image(images), geometry.embed_text(texts))
        assert torch.equal(under_autocast, expected)


def assert_gradient_is_right(geometry, images: torch.Tensor, texts: torch.Tensor) -> None:
    """Both forms against finite differences in float64, trainable scalars included."""
    geometry = geometry.double()
    inputs = (images.double().requires_grad_(), texts.double().requires_grad_(), *geometry.parameters())

    def both_forms(x, y, *_):  # the scalars are perturbed in place, where the geometry sees it
        x, y = geometry.embed_image(x), geometry.embed_text(y)
        return geometry.similarity(x, y), geometry.paired_similarity(x, y)

    assert torch.autograd.gradcheck(both_forms, inputs)
