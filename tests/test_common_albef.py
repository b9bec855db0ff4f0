"""ALBEF and TCL against loops written from the papers (Li et al. 2021; Yang et al. 2022)."""

import math

import pytest
import torch
from processes import in_processes
from torch.nn.parallel import DistributedDataParallel

from common.distributed import mean_over_processes, rank, world_size
from common.encoders.fusion import FusionTransformer, MaskedLanguageHead
from common.encoders.text import BidirectionalTextTransformer
from common.encoders.vision import VisionTransformer
from common.geometry import Sphere, unit
from common.logit_scale import LogitScale
from common.methods.albef import (
    NOT_MASKED,
    Albef,
    FusedEncoders,
    distillation_weight,
    hard_negatives,
    mask_words,
    replaceable_words,
)
from common.methods.tcl import Tcl, pooled_patches
from common.oblique import Oblique
from common.pool import image_and_text_pools
from geomm.pool import GeodesicPool
from oblique_topology.geometry import L2

PAD, CLS, SEP, MASK, VOCABULARY = 0, 2, 3, 4, 40
NO_WORDS = (PAD, CLS, SEP, MASK)
BATCH, LENGTH, DIM, QUEUE = 4, 7, 6, 10


def tiny_albef(queue_start="random_rows", end_id=None, geometry=None, dropout=0.0):
    torch.manual_seed(0)
    image = VisionTransformer(16, 4, 16, 1, 2, None, patch_bias=True, input_norm=False)
    text = BidirectionalTextTransformer(
        VOCABULARY, LENGTH, 12, 1, 2, None, final_layer_norm=False, end_id=end_id, dropout=dropout
    )
    fusion, head = FusionTransformer(12, 16, 2, 2, dropout=dropout), MaskedLanguageHead(12, VOCABULARY)
    encoders = FusedEncoders(image, text, fusion, head, DIM)
    scale = LogitScale(init=1 / 0.07, minimum=2.0, maximum=1000.0)
    geometry = geometry or Sphere()
    pools = image_and_text_pools(geometry, QUEUE, DIM, queue_start)
    model = Albef(encoders, geometry, scale, *pools).double()
    with torch.no_grad():  # momentum copies that differ from what they copy
        for parameter in model.momentum_encoders.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def as_tcl(albef, pooled_grid=2):
    """TCL with the very modules of an ALBEF."""
    tcl = Tcl(albef.encoders, albef.geometry, albef.logit_scale, albef.image_pool, albef.text_pool, pooled_grid)
    tcl.momentum_encoders, tcl.matching_head = albef.momentum_encoders, albef.matching_head
    return tcl


def tiny_batch(seed=1):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(BATCH, 3, 16, 16, generator=generator, dtype=torch.float64)
    token_ids = torch.randint(5, VOCABULARY, (BATCH, LENGTH), generator=generator)
    token_ids[:, 0] = CLS
    for row, length in enumerate((7, 5, 4, 6)):
        token_ids[row, length - 1] = SEP
        token_ids[row, length:] = PAD
    return images, token_ids


def masked_batch(token_ids, seed=2, probability=0.6):
    generator = torch.Generator().manual_seed(seed)
    words = replaceable_words(VOCABULARY, NO_WORDS, token_ids.device)
    return mask_words(token_ids, words, MASK, (PAD, CLS), probability, generator)


def softmax(row):
    top = max(row)
    exponentials = [math.exp(value - top) for value in row]
    return [value / sum(exponentials) for value in exponentials]


def soft_cross_entropy(row, targets):
    return -sum(target * math.log(share) for share, target in zip(softmax(row), targets) if target)


def dot(one, other):
    return float(one.detach().flatten() @ other.detach().flatten())


def cross_modal_by_loops(model, step, alpha, positives):
    """positives[i] = list of columns with equal mass."""
    scale, total = model.logit_scale().item(), 0.0
    for online, momentum, keys in (
        (step.image_embeddings, step.image_keys, [*step.text_keys, *model.text_pool.queue.rows()]),
        (step.text_embeddings, step.text_keys, [*step.image_keys, *model.image_pool.queue.rows()]),
    ):
        for i in range(BATCH):
            logits = [scale * dot(online[i], key) for key in keys]
            pseudo = softmax([scale * dot(momentum[i], key) for key in keys])
            hard = [1 / len(positives[i]) if column in positives[i] else 0.0 for column in range(len(keys))]
            targets = [alpha * soft + (1 - alpha) * one for soft, one in zip(pseudo, hard)]
            total += soft_cross_entropy(logits, targets) / BATCH / 2
    return total


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize(("start", "alpha"), [("random_rows", 0.4), ("fill_level", 0.0)])
def test_contrast_equals_loops_over_local_keys_and_queue(start, alpha, with_ids):
    model, (images, token_ids) = tiny_albef(start), tiny_batch()
    model.insert(*unit(torch.randn(2, 3, DIM)).double(), torch.tensor([7, 9, 8]))
    ids = torch.tensor([7, 8, 7, 5]) if with_ids else None
    positives = [[0, 2, 4], [1, 6], [0, 2, 4], [3]] if with_ids else [[i] for i in range(BATCH)]
    expected = cross_modal_by_loops(model, model.encode_step(images, images, token_ids, ids), alpha, positives)
    actual = model(images, token_ids, None, None, alpha, ids).parts["contrast"]
    assert actual.item() == pytest.approx(expected, rel=1e-10)


def keys_behind(pool):
    """A pool of the same rows with a step's keys, the positives, behind them, as GeoMM's stand where they will be."""
    other = GeodesicPool(QUEUE + BATCH, DIM, distance="cosine", branching=(2,), num_neighbors=1).double()
    other.insert(pool.queue.rows())
    return other


def test_captions_of_like_length_go_through_text_tower_and_fusion_together(monkeypatch):
    """Losses and gradients are those of whole batches, for less than their tokens."""
    model, (images, _) = tiny_albef(end_id=SEP), tiny_batch()
    torch.manual_seed(2)
    lengths, rows = torch.randint(2, LENGTH + 1, (40,)), torch.arange(40)
    token_ids = torch.randint(4, VOCABULARY - 1, (40, LENGTH)) * (torch.arange(LENGTH) < lengths[:, None])
    token_ids[rows, lengths - 1] = SEP
    masked_ids, targets = masked_batch(token_ids)
    actual, numbers = [], []
    model.encoders.fusion.register_forward_pre_hook(lambda _, inputs: numbers.append(inputs[0][..., 0].numel()))
    pictures = torch.randn(40, *images.shape[1:]).double()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for _ in ("by length", "whole"):
        losses = model(pictures, token_ids, masked_ids, targets, 0.4, generator=torch.Generator().manual_seed(4))
        actual.append((sum(numbers), [*losses, *torch.autograd.grad(sum(losses.parts.values()), trained)]))
        numbers.clear()
        monkeypatch.setattr("common.methods.albef.tokens_by_length", lambda compute, *rows: compute(*rows))
    assert actual[0][0] < 0.85 * actual[1][0]
    torch.testing.assert_close(actual[0][1], actual[1][1], rtol=1e-9, atol=1e-11)


def test_matching_equals_one_pair_after_the_other():
    model, (images, token_ids) = tiny_albef(), tiny_batch()
    step = model.encode_step(images, images, token_ids, None)
    image_to_text, text_to_image, _ = model.cross_modal_contrast(step, 0.0)
    drawn = torch.Generator().manual_seed(5)
    image_of_text = hard_negatives(text_to_image, generator=drawn)
    text_of_image = hard_negatives(image_to_text, generator=drawn)
    state = torch.get_rng_state()
    loss = model.matching_loss(step, image_to_text, text_to_image, drawn.manual_seed(5))
    assert torch.equal(torch.get_rng_state(), state)
    rows, losses = range(BATCH), []
    pairs = [*zip(rows, rows), *zip(image_of_text.tolist(), rows), *zip(rows, text_of_image.tolist())]
    for number, (image, text) in enumerate(pairs):
        words = token_ids[text] != PAD  # the caption alone, without its padding
        tokens = model.encoders.text_tower.forward_tokens(token_ids[text][None, words])
        picture = model.encoders.image_tower.forward_tokens(images[image][None])
        fused = model.encoders.fusion(tokens, torch.ones(1, int(words.sum()), dtype=torch.bool), picture)
        logits = model.matching_head(fused[0, 0]).tolist()
        losses.append(soft_cross_entropy(logits, [0.0, 1.0] if number < BATCH else [1.0, 0.0]))
    assert loss.item() == pytest.approx(sum(losses) / len(losses), rel=1e-9)


@pytest.mark.parametrize("alpha", [0.0, 0.4])
def test_masked_words_equal_loops_over_the_masked_positions(alpha):
    model, (images, token_ids) = tiny_albef(end_id=SEP), tiny_batch()  # end tokens are masked too
    masked_ids, targets = masked_batch(token_ids)
    step = model.encode_step(images, images, token_ids, None)
    logits = model.encoders.word_logits(masked_ids, token_ids != PAD, step.image_tokens)
    soft = model.momentum_encoders.encoder.word_logits(masked_ids, token_ids != PAD, step.momentum_image_tokens)
    losses = []
    for place in (targets != NOT_MASKED).nonzero().tolist():
        true, of_word, of_momentum = (tensor[*place].tolist() for tensor in (targets, logits, soft))
        mixed = [alpha * share + (1 - alpha) * (word == true) for word, share in enumerate(softmax(of_momentum))]
        losses.append(soft_cross_entropy(of_word, mixed))
    assert len(losses) > 3
    expected = sum(losses) / len(losses)
    assert model.word_loss(step, masked_ids, targets, alpha).item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(("end_id", "put_in"), [(None, PAD), (SEP, SEP)])
def test_padding_is_that_of_the_caption_whatever_stands_in_place_of_its_words(end_id, put_in):
    model, (images, token_ids) = tiny_albef(end_id=end_id), tiny_batch()
    step = model.encode_step(images, images, token_ids, None)
    lengths = (token_ids != PAD).sum(dim=1).tolist()
    masked_ids = token_ids.clone()
    masked_ids[:, 1] = put_in  # a word
    masked_ids[torch.arange(BATCH), torch.tensor(lengths) - 1] = MASK  # the end token
    logits = model.encoders.word_logits(masked_ids, step.text_mask, step.image_tokens)
    for row, length in enumerate(lengths):  # the caption alone, without its padding
        whole = torch.ones(1, length, dtype=torch.bool)
        single = model.encoders.word_logits(masked_ids[row, None, :length], whole, step.image_tokens[row, None])
        torch.testing.assert_close(logits[row, :length], single[0], rtol=1e-9, atol=1e-11)


def test_without_a_masked_word_the_loss_is_zero_and_its_gradient_finite():
    model, (images, token_ids) = tiny_albef(), tiny_batch()
    losses = model(images, token_ids, token_ids, torch.full_like(token_ids, NOT_MASKED), 0.4)
    assert losses.parts["words"].item() == 0.0
    sum(losses.parts.values()).backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())


def test_masking_draws_fifteen_percent_and_treats_them_eighty_ten_ten():
    generator = torch.Generator().manual_seed(0)
    words = replaceable_words(12, NO_WORDS, "cpu")
    assert words.tolist() == [1, 5, 6, 7, 8, 9, 10, 11]
    ids = torch.full((400, 250), 9)
    ids[:, 0], ids[:, -50:], ids[:, -51] = CLS, PAD, SEP
    masked, targets = mask_words(ids, words, MASK, (PAD, CLS), 0.15, generator)
    drawn = targets != NOT_MASKED
    assert not drawn[:, 0].any()
    assert not drawn[:, -50:].any()
    assert drawn[:, -51].any()  # the end token can be drawn
    assert torch.equal(masked[~drawn], ids[~drawn])
    assert torch.equal(targets[drawn], ids[drawn])
    assert float(drawn[:, 1:-50].float().mean()) == pytest.approx(0.15, abs=0.005)
    put_in = torch.bincount(masked[drawn & (ids == 9)], minlength=12) / int((drawn & (ids == 9)).sum())
    expected = {MASK: 0.8, 9: 0.1 + 0.1 / 8} | {word: 0.1 / 8 for word in words.tolist() if word != 9}
    for word in range(12):  # any word alike; never padding, class or end
        assert float(put_in[word]) == pytest.approx(expected.get(word, 0.0), abs=0.01 if word in expected else 0)


def test_hard_negatives_follow_the_softmax_and_never_take_the_pair_itself_or_the_same_id():
    logits = torch.tensor([[9.0, 1.0, 2.0, 0.0], [0.0, 9.0, 0.0, 0.0], [0.0, 0.0, 9.0, 1.0], [3.0, 0.0, 0.0, 90.0]])
    generator = torch.Generator().manual_seed(0)
    for ids in (None, [1, -1, 1, -1], [4, 4, 4, 4]):  # unknown ids equal no other; nothing but the same
        given = None if ids is None else torch.tensor(ids)
        draws = torch.stack([hard_negatives(logits, given, generator) for _ in range(2000)])
        for row in range(4):
            weights = [weight + 1e-4 for weight in softmax(logits[row].tolist())]
            spared = {column for column in range(4) if ids and ids[column] == ids[row] >= 0} | {row}
            for column in {row} if len(spared) == 4 else spared:
                weights[column] = 0.0
            shares = torch.bincount(draws[:, row], minlength=4) / len(draws)
            for column in range(4):
                assert float(shares[column]) == pytest.approx(weights[column] / sum(weights), abs=0.045)
                assert weights[column] > 0 or shares[column] == 0
    with pytest.raises(ValueError, match=r"at least 2 samples, got \(1, 1\)"):
        hard_negatives(torch.zeros(1, 1))


def test_momentum_encoders_get_no_gradient_and_move_only_when_updated():
    model, (images, token_ids) = tiny_albef(), tiny_batch()
    momentum = list(model.momentum_encoders.encoder.parameters())
    before = [value.clone() for value in momentum]
    losses = model(images, token_ids, *masked_batch(token_ids), 0.4)
    sum(losses.parts.values()).backward()
    assert all(value.grad is None for value in momentum)
    assert not [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not losses.image_keys.requires_grad
    model.update_momentum_encoders(0.9)
    expected = [0.9 * old + 0.1 * online for old, online in zip(before, model.encoders.parameters())]
    torch.testing.assert_close(momentum, expected, rtol=1e-12, atol=1e-12)


def test_distillation_weight_rises_through_the_first_epoch():
    assert [distillation_weight(step, 100) for step in (0, 25, 100, 5000)] == pytest.approx([0, 0.1, 0.4, 0.4])


def local_contrast_by_loops(local, queries, scale, mask):
    total = 0.0
    for i in range(len(queries)):
        part_losses = []
        others = [
            scale * dot(queries[i], local[j, part])
            for j in range(len(queries))
            for part in range(local.shape[1])
            if j != i and mask[j, part]
        ]
        for part in range(local.shape[1]):
            if mask[i, part]:
                positive = scale * dot(queries[i], local[i, part])
                part_losses.append(soft_cross_entropy([positive, *others], [1.0] + [0.0] * len(others)))
        total += sum(part_losses) / len(part_losses) / len(queries)
    return total


def test_positives_may_stand_in_any_columns():
    tcl, (images, token_ids), losses = as_tcl(tiny_albef()), tiny_batch(), []
    for pools in ((tcl.image_pool, tcl.text_pool), map(keys_behind, (tcl.image_pool, tcl.text_pool))):
        tcl.image_pool, tcl.text_pool = pools
        losses.append(tcl(images, token_ids, None, None, 0.4).parts["contrast"])
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)


@pytest.mark.parametrize("num_spheres", [1, 2])
def test_tcls_contrast_is_the_mean_of_its_six_terms(num_spheres):
    """On two spheres this is the model of the oblique paper's Table 9."""

    def on_spheres(features):
        return unit(features.unflatten(-1, (num_spheres, -1))).flatten(-2)

    geometry = Sphere() if num_spheres == 1 else Oblique(DIM // num_spheres)
    model, (images, token_ids) = tiny_albef(geometry=geometry), tiny_batch()
    tcl = as_tcl(model)
    other_view = tiny_batch(seed=9)[0]
    step = model.encode_step(images, other_view, token_ids, None)
    alpha, scale = 0.4, model.logit_scale().item()
    cross = cross_modal_by_loops(model, step, alpha, [[i] for i in range(BATCH)])
    in_modal = 0.0
    for online, keys, pool in (
        (step.image_embeddings, step.image_keys, model.image_pool),
        (step.text_embeddings, step.text_keys, model.text_pool),
    ):
        columns = [*keys, *pool.queue.rows()]
        for i in range(BATCH):
            logits = [scale * dot(online[i], key) for key in columns]
            in_modal += soft_cross_entropy(logits, [float(c == i) for c in range(len(columns))]) / BATCH
    momentum = model.momentum_encoders.encoder
    patches = on_spheres(momentum.image_projection(step.momentum_image_tokens[:, 1:])).view(BATCH, 4, 4, DIM)
    assert torch.equal(pooled_patches(patches.flatten(1, 2), 4), patches.flatten(1, 2))  # no more than the grid has
    cells = torch.stack([patches[:, r : r + 2, c : c + 2].mean(dim=(1, 2)) for r in (0, 2) for c in (0, 2)], dim=1)
    words = on_spheres(momentum.text_projection(step.momentum_text_tokens[:, 1:]))
    local = local_contrast_by_loops(cells, step.image_embeddings, scale, torch.ones(BATCH, 4, dtype=torch.bool))
    local += local_contrast_by_loops(words, step.text_embeddings, scale, token_ids[:, 1:] != PAD)
    losses = tcl(images, token_ids, None, None, alpha, momentum_images=other_view)
    assert float(losses.parts["contrast"]) == pytest.approx((2 * cross + in_modal + local) / 6, rel=1e-9)
    model.insert(losses.image_keys, losses.text_keys)
    for pool in (model.image_pool, model.text_pool):  # random rows and keys alike lie where keys lie
        parts = pool.queue.features.unflatten(1, (num_spheres, -1)).norm(dim=2)
        torch.testing.assert_close(parts, torch.ones_like(parts))
        assert len(parts) == QUEUE


def test_two_views_of_a_caption_differ_by_weights_and_dropout_only():
    """With equal weights by the masks only: the momentum encoders draw their own, as in ALBEF's code."""
    images, token_ids = tiny_batch()
    tcl = as_tcl(tiny_albef(dropout=0.3))
    tcl.start_momentum_()
    for training in (False, True):
        step = tcl.train(training).encode_step(images, images, token_ids, None)
        assert torch.equal(step.image_embeddings, step.image_keys)  # no image is dropped
        assert torch.equal(step.text_embeddings, step.text_keys) == (not training)


def test_tcl_refuses_a_geometry_that_is_no_inner_product():
    with pytest.raises(ValueError, match="got the geometry euclidean; expected: one that is an inner product"):
        as_tcl(tiny_albef(geometry=L2()))


def contrast_and_gradients(kind):
    """Loss and gradients of the contrastive part on this process's share of a batch of 4, averaged over processes."""
    model, (images, token_ids) = tiny_albef("fill_level"), tiny_batch()
    generator = torch.Generator().manual_seed(3)
    for pool, rows in zip((model.image_pool, model.text_pool), torch.randn(2, 5, DIM, generator=generator)):
        pool.queue.enqueue(unit(rows.double()))  # the same on every process
    share = slice(rank() * BATCH // world_size(), (rank() + 1) * BATCH // world_size())
    ids = torch.tensor([4, 4, 6, 8])[share] if kind == "ids" else None
    other_view = tiny_batch(seed=9)[0][share]
    step = model.encode_step(images[share], other_view, token_ids[share], ids)
    loss = model.cross_modal_contrast(step, 0.4)[2] + sum(as_tcl(model).in_modal_contrast(step))
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    named = {name: mean_over_processes(value) for name, value in zip(parameters, gradients) if value is not None}
    slots = model.insert(step.image_keys, step.text_keys, ids)
    return mean_over_processes(loss), named, (model.image_pool.queue.features, model.text_pool.queue.ids, *slots)


def both_kinds():
    return {kind: contrast_and_gradients(kind) for kind in ("partners", "ids")} | {"ddp": steps_under_ddp()}


def steps_under_ddp():
    """Two steps of pre-training, then two of fine-tuning without masked words; what the last one's loss is."""
    if world_size() == 1:
        return None
    albef, (images, token_ids) = tiny_albef(), tiny_batch()
    share = slice(rank() * 2, rank() * 2 + 2)
    images, token_ids = images[share], token_ids[share]
    for model in (albef, as_tcl(albef)):
        for masked in (masked_batch(token_ids), (None, None)):
            wrapped = DistributedDataParallel(model, broadcast_buffers=False)
            for _ in range(2):
                losses = wrapped(images, token_ids, *masked, 0.4)
                sum(losses.parts.values()).backward()
    return losses.parts["words"].item()


def test_two_processes_equal_one_in_contrast_gradients_and_queues():
    single = both_kinds()
    for actual in in_processes(2, both_kinds):
        assert actual.pop("ddp") == 0.0
        for kind, (loss, gradients, queues) in actual.items():
            assert len(gradients) > 10
            torch.testing.assert_close((loss, queues), (single[kind][0], single[kind][2]), rtol=1e-12, atol=1e-13)
            torch.testing.assert_close(gradients, single[kind][1], rtol=1e-10, atol=1e-12)
