"""Weighted nearest neighbours against loops and scikit-learn."""

import numpy as np
import pytest
import torch
from given_features import GivenFeatures, ReadsFeatures
from refusals import refused

from common.evaluation.knn import evaluate_knn, knn_scores
from common.geometry import unit


def make(num_images=23, bank=60, dim=6, num_classes=5):
    return (
        torch.randn(num_images, dim, dtype=torch.float64),
        torch.randn(bank, dim, dtype=torch.float64),
        torch.randint(0, num_classes, (bank,)),
    )


@pytest.mark.parametrize(
    ("k", "temperature", "chunk_size"), [(1, 0.1, None), (20, 1.0, 1), (60, 0.01, 5), (200, 0.1, 1000)]
)
def test_shares_equal_scikit_learn_in_chunks_of_any_size(k, temperature, chunk_size):
    neighbors = pytest.importorskip("sklearn.neighbors")
    features, bank, labels = make()
    labels[:5] = torch.arange(5)  # every class occurs, so that the columns agree
    classifier = neighbors.KNeighborsClassifier(
        min(k, 60), metric="cosine", algorithm="brute", weights=lambda distance: np.exp((1 - distance) / temperature)
    )
    theirs = classifier.fit(bank.numpy(), labels.numpy()).predict_proba(features.numpy())
    ours = knn_scores(features, bank, labels, 5, k, temperature, chunk_size)
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("k", [20, 200])
def test_neighbours_on_the_border_are_those_of_a_stable_sort(k):
    bank, labels = torch.ones(300, 2), torch.randint(0, 5, (300,))
    bank[::7, 1] = 1.5  # nearer to the query, the others tie
    bank[1::5, 1] = 0.0  # farther
    query = torch.tensor([[1.0, 1.5]])
    cosines = unit(query) @ unit(bank).T
    nearest = cosines.sort(dim=1, descending=True, stable=True).indices[0, :k]
    expected = torch.zeros(5).index_add(0, labels[nearest], (cosines[0, nearest] / 0.1).softmax(dim=0))
    torch.testing.assert_close(knn_scores(query, bank, labels, 5, k)[0], expected)


def test_cosines_are_in_float32_under_autocast():
    features, bank, labels = make()
    expected = knn_scores(features.float(), bank.float(), labels, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(knn_scores(features.float(), bank.float(), labels, 5), expected)


def test_a_low_temperature_does_not_overflow():
    features, bank, labels = make()
    scores = knn_scores(features.float(), bank.float(), labels, 5, temperature=1e-3)  # exp(1000) is infinite
    assert scores.isfinite().all()
    nearest = (unit(features) @ unit(bank).T).argmax(dim=1)
    assert torch.equal(scores.argmax(dim=1), labels[nearest])


def test_bad_input_is_refused():
    features, bank, labels = make()
    damaged = bank.clone()
    damaged[3, 2] = float("nan")
    refused(
        (r"bank labels 0\.\.4; expected: 0\.\.3", lambda: knn_scores(features, bank, labels, 4)),
        ("0 bank features", lambda: knn_scores(features, bank[:0], labels[:0], 5)),
        ("one dim", lambda: knn_scores(features[:, :3], bank, labels, 5)),
        ("1 of 360 bank features are not finite", lambda: knn_scores(features, damaged, labels, 5)),
        (
            r"temperature = 0\.0",
            lambda: knn_scores(features, features, torch.zeros(23, dtype=torch.long), 5, temperature=0.0),
        ),
    )


def on_two_sides(name, count, broken=()):
    labels = torch.arange(count) % 2
    features = torch.stack([2.0 * labels - 1, torch.rand(count)], dim=1)[:, None]  # (count, 1 token, 2)
    return GivenFeatures(name, features, labels, ("left", "right"), broken)


def test_evaluation_states_the_bank_and_leaves_out_what_cannot_be_read():
    encoder, bank, test = ReadsFeatures(), on_two_sides("bank", 12), on_two_sides("test", 9)
    evaluation = evaluate_knn(encoder, bank, on_two_sides("test", 9, broken=[4]), k=5)
    assert evaluation.metrics == {"acc1": 1.0, "mean_per_class_recall": 1.0}
    stated = [evaluation.protocol[key] for key in ("bank_size", "num_images", "unreadable_images")]
    assert stated == [12, 8, 1]
    assert evaluate_knn(encoder, on_two_sides("bank", 3), test).protocol["neighbours"] == 3
    bank.class_names.reverse()
    refused(("bank and test have unlike class names", lambda: evaluate_knn(encoder, bank, test)))
