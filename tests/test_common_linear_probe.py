"""Linear probes: recipes and rates by hand, training against closed forms, frozen networks."""

import math
from dataclasses import replace

import pytest
import torch
from processes import in_processes
from refusals import refused
from torch import nn
from toys import ListedPictures

from common.data.scenes import classification_task
from common.data.transforms import ImageTransform
from common.encoders.vision import VisionTransformer
from common.evaluation.embed import Encoder
from common.evaluation.linear_probe import (
    PROBES,
    ProbeConfig,
    TowerFeatures,
    augmented_batches,
    backbone_encoder,
    evaluate_linear_probe,
    feature_batches,
    frozen,
    probe_rate_at,
    probe_scores,
    train_probe,
)

CPU = torch.device("cpu")
PLAIN = ProbeConfig(0.5, batch_size=16, epochs=5, schedule="cosine")


def clusters(count=90, dim=4, num_classes=3, spread=0.3):
    labels = torch.arange(count) % num_classes
    return torch.randn(num_classes, dim)[labels] * 2 + spread * torch.randn(count, dim), labels


def encoder_of(model, size=16):
    return Encoder(model.eval(), ImageTransform(size=size), None, 0, 32, CPU)


class RandomFeatures(nn.Module):
    """The ReLU of a fixed Gaussian projection of the pixels: features that have learned nothing."""

    def __init__(self, image_size, dim):
        super().__init__()
        rows = 3 * image_size**2
        self.projection = torch.randn(rows, dim, generator=torch.Generator().manual_seed(0)) * rows**-0.5

    def encode_image(self, images):
        return (images.flatten(1) @ self.projection).relu()


def tiny_vit(**options):
    return VisionTransformer(16, 8, width=16, layers=1, heads=2, projection_dim=6, **options)


# --- recipes -------------------------------------------------------------------------------------------------------


def test_recipes_hold_the_values_of_the_papers():
    v3, vit, v1, oblique = (PROBES[name] for name in ("moco_v3_resnet", "moco_v3_vit", "moco_v1", "oblique"))
    assert probe_rate_at(0, v3, 10) == pytest.approx(0.4)  # 0.1 x 1024 / 256
    assert (probe_rate_at(0, vit, 10), probe_rate_at(0, v1, 10)) == (pytest.approx(12.0), 30.0)
    assert probe_rate_at(50, oblique, 10) == pytest.approx(1.0)  # the peak, after five epochs of ten steps
    assert (oblique.sgd_momentum, oblique.epochs, oblique.crop_scale) == (0.0, 100, (0.75, 1.0))
    assert oblique.use_rand_augment
    assert all(config.augments and config.weight_decay == 0 for config in PROBES.values())


def test_rates_of_each_schedule():
    v1 = PROBES["moco_v1"]
    rates = [probe_rate_at(epoch * 7 + 6, v1, 7) for epoch in (0, 59, 60, 79, 80, 99)]
    assert rates == pytest.approx([30, 30, 3, 3, 0.3, 0.3])
    by_epoch = replace(PLAIN, schedule="cosine_per_epoch", epochs=4)
    assert [probe_rate_at(step, by_epoch, 2) for step in range(8)] == pytest.approx(
        [0.25 * (1 + math.cos(math.pi * epoch / 4)) for epoch in (0, 0, 1, 1, 2, 2, 3, 3)]
    )
    warm = replace(PLAIN, epochs=3, warmup_epochs=1)
    assert [probe_rate_at(step, warm, 2) for step in range(6)] == pytest.approx(
        [0.25, 0.5, 0.5, 0.25 * (1 + math.cos(math.pi / 4)), 0.25, 0.25 * (1 + math.cos(3 * math.pi / 4))]
    )


def test_bad_recipes_are_refused():
    known = "cosine, cosine_per_epoch, steps"
    refused(
        (f"probe.schedule = 'linear'; expected one of: {known}", lambda: replace(PLAIN, schedule="linear")),
        (r"probe.learning_rate = 0\.0; expected: above 0", lambda: replace(PLAIN, learning_rate=0.0)),
        ("probe.warmup_epochs = 5 of 5", lambda: replace(PLAIN, warmup_epochs=5)),
        ("with schedule 'steps'", lambda: replace(PLAIN, warmup_epochs=1, schedule="steps")),
    )


# --- training ------------------------------------------------------------------------------------------------------


def test_the_layer_starts_as_the_recipe_says():
    still = replace(PLAIN, epochs=1, learning_rate=1e-20)
    layer = train_probe(lambda epoch: [(torch.zeros(1, 500), torch.zeros(1).long())], 1, 500, 200, still, 3, CPU)
    assert layer.weight.std().item() == pytest.approx(0.01, rel=0.02)
    torch.testing.assert_close(layer.bias, torch.zeros(200), rtol=0, atol=1e-15)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_training_equals_hand_written_steps(momentum):
    features, labels = clusters(count=10)
    config = replace(PLAIN, epochs=2, batch_size=10, sgd_momentum=momentum, weight_decay=0.1)
    batches = feature_batches(features, labels, 10, 0)
    start = train_probe(batches, 10, 4, 3, replace(config, epochs=1, learning_rate=1e-30), 5, CPU)
    weight, bias = start.weight.detach().double(), start.bias.detach().double()
    velocity_w, velocity_b = torch.zeros_like(weight), torch.zeros_like(bias)
    x, one_hot = features.double(), torch.nn.functional.one_hot(labels, 3).double()
    for step in range(2):
        error = ((x @ weight.T + bias).softmax(dim=1) - one_hot) / 10
        velocity_w = momentum * velocity_w + error.T @ x + 0.1 * weight
        velocity_b = momentum * velocity_b + error.sum(0) + 0.1 * bias
        rate = 0.25 * (1 + math.cos(math.pi * step / 2))
        weight, bias = weight - rate * velocity_w, bias - rate * velocity_b
    layer = train_probe(batches, 10, 4, 3, config, 5, CPU)
    torch.testing.assert_close(layer.weight.double(), weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer.bias.double(), bias, rtol=1e-5, atol=1e-6)


def test_a_seed_fixes_the_result_and_another_changes_it():
    features, labels = clusters()
    weights = []
    for seed in (7, 7, 8):
        torch.rand(1)  # the global generator has no say
        weights.append(train_probe(feature_batches(features, labels, 16, seed), 90, 4, 3, PLAIN, seed, CPU).weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_every_epoch_sees_every_picture_once_in_another_order():
    features, labels = torch.arange(21.0)[:, None], torch.arange(21)
    epochs = [torch.cat([rows for _, rows in feature_batches(features, labels, 8, 0)(epoch)]) for epoch in range(3)]
    assert all(sorted(order.tolist()) == list(range(21)) for order in epochs)
    assert len({tuple(order.tolist()) for order in epochs}) == 3
    assert [len(rows) for _, rows in feature_batches(features, labels, 8, 0)(0)] == [8, 8, 5]


def test_normalised_features_do_not_depend_on_their_norm():
    features, labels = clusters()
    config = replace(PLAIN, normalize_features=True)
    one = train_probe(feature_batches(features, labels, 16, 0), 90, 4, 3, config, 0, CPU)
    two = train_probe(feature_batches(features * 100, labels, 16, 0), 90, 4, 3, config, 0, CPU)
    torch.testing.assert_close(one.weight, two.weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(probe_scores(one, features, config), probe_scores(one, features * 7, config))


def test_a_loss_that_is_not_finite_is_refused():
    features, labels = clusters()
    spoilt = feature_batches(features * torch.nan, labels, 16, 0)
    refused(("loss is nan at step 0", lambda: train_probe(spoilt, 90, 4, 3, PLAIN, 0, CPU)), error=FloatingPointError)


# --- frozen networks -----------------------------------------------------------------------------------------------


def test_frozen_network_evaluates_keeps_its_statistics_and_gets_its_modes_back():
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    network[0].bias.requires_grad_(False)
    mean = network[1].running_mean.clone()
    with frozen(network):
        assert not any(module.training for module in network.modules())
        assert not network(torch.randn(8, 4)).requires_grad
    assert all(module.training for module in network.modules())
    assert [parameter.requires_grad for parameter in network.parameters()] == [True, False, True, True]
    assert torch.equal(network[1].running_mean, mean)
    with pytest.raises(RuntimeError, match="mat1 and mat2"), frozen(network):
        network(torch.randn(8, 5))
    assert network.training


def test_tower_features_are_the_class_tokens_before_projection():
    images = torch.randn(2, 3, 16, 16)
    tower = tiny_vit(num_class_tokens=3).eval()
    features = TowerFeatures(tower).encode_image(images)
    assert features.shape == (2, 48)
    projected = (features.view(2, 3, 16) @ tower.projection).flatten(1)
    torch.testing.assert_close(projected, tower(images))
    pooled = nn.Sequential(nn.Conv2d(3, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert torch.equal(TowerFeatures(pooled).encode_image(images), pooled(images))


# --- on pictures ---------------------------------------------------------------------------------------------------


def colours(part, size):
    return classification_task("vtab/colour", size=size, image_size=16, part=part)


def test_probe_of_an_untrained_tower_reports_sizes_and_leaves_it_as_it_was():
    encoder = backbone_encoder(encoder_of(nn.Identity()), tiny_vit())
    before = {name: tensor.clone() for name, tensor in encoder.model.state_dict().items()}
    train, test = colours("train", 200), colours("test", 100)
    protocol = evaluate_linear_probe(encoder, train, test, PLAIN, seed=1).protocol
    assert (protocol["num_train"], protocol["num_images"], protocol["feature_dim"]) == (200, 100, 16)
    assert protocol["probe"]["batch_size"] == 16
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.model.state_dict().items())


def test_augmented_training_sees_new_views_in_every_epoch_and_repeats_with_the_seed():
    encoder = encoder_of(RandomFeatures(16, 12))
    config = replace(PROBES["oblique"], batch_size=16, epochs=6, warmup_epochs=1)
    task = colours("train", 40)
    batches, same = (augmented_batches(encoder, task, config, 3) for _ in range(2))
    features, labels = zip(*batches(0))
    assert [len(rows) for rows in features] == [16, 16, 8]
    assert sorted(torch.cat(labels).tolist()) == sorted(task.label(index) for index in range(40))
    assert torch.equal(torch.cat(features), torch.cat([rows for rows, _ in same(0)]))
    by_feature = {tuple(row.tolist()) for row in torch.cat(features)}
    later = torch.cat([rows for rows, _ in batches(1)])
    assert not by_feature & {tuple(row.tolist()) for row in later}


def augmented_probe() -> tuple[torch.Tensor, torch.Tensor, int, dict[str, float]]:
    """Features and labels of an epoch, how many images this process embedded for it, and the metrics of a probe."""
    network, sizes = RandomFeatures(16, 12), []
    encode = network.encode_image
    network.encode_image = lambda images: sizes.append(len(images)) or encode(images)
    encoder, task = encoder_of(network), colours("train", 37)
    config = replace(PROBES["oblique"], batch_size=16, epochs=3, warmup_epochs=1)
    features, labels = map(torch.cat, zip(*augmented_batches(encoder, task, config, 3)(0)))
    embedded = sum(sizes)
    return features, labels, embedded, evaluate_linear_probe(encoder, task, colours("test", 30), config).metrics


def test_two_processes_share_the_views_of_a_batch_and_train_the_probe_of_one():
    features, labels, embedded, metrics = augmented_probe()
    assert embedded == 37
    for of_process in in_processes(2, augmented_probe):
        torch.testing.assert_close(of_process[0], features)
        assert torch.equal(of_process[1], labels)
        assert of_process[2] == 8 + 8 + 3  # of 16, 16 and 5
        assert of_process[3] == metrics


def partly_broken(part, size, broken):
    task = colours(part, size)
    about = {"label": task.label, "class_names": task.class_names, "name": task.name}
    return ListedPictures([task[row]["image"] for row in range(size)], broken=broken, **about)


def test_broken_training_pictures_are_replaced_by_the_next_and_broken_test_pictures_left_out():
    encoder = encoder_of(RandomFeatures(16, 12))
    config = replace(PLAIN, epochs=1, flip_probability=0.5)
    task = partly_broken("train", 20, {3, 4, 19})
    _, labels = zip(*augmented_batches(encoder, task, config, 0)(0))
    expected = [task.label({3: 5, 4: 5, 19: 0}.get(index, index)) for index in range(20)]
    assert sorted(torch.cat(labels).tolist()) == sorted(expected)
    protocol = evaluate_linear_probe(encoder, task, partly_broken("test", 10, {7}), PLAIN).protocol
    assert (protocol["num_train"], protocol["num_images"], protocol["unreadable_images"]) == (17, 9, 1)
    none, counts = partly_broken("train", 20, range(20)), classification_task("vtab/count", size=10, image_size=16)
    refused(
        ("20 samples in a row are broken", lambda: next(iter(augmented_batches(encoder, none, config, 0)(0)))),
        ("vtab/count and scenes/vtab/colour have unlike class names",
         lambda: evaluate_linear_probe(encoder, counts, colours("test", 10), PLAIN)),
    )  # fmt: skip
