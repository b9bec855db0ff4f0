"""Metrics give the same for torch tensors and for numpy arrays of any sensible type, and name what they cannot take."""

import inspect

import numpy as np
import pytest
import torch
from torch import nn

from common.evaluation import accuracy, annotated, grad_cam, knn, linear_probe, retrieval, zero_shot
from common.evaluation.coco import Relation, coco_results
from common.evaluation.linear_probe import PROBES, feature_batches, probe_scores
from common.evaluation.rerank import best_candidates, two_stage_ranks
from common.evaluation.retrieval import Positives, precisions_at_r, retrieval_ranks
from common.geometry import Sphere

DRAWS = torch.Generator().manual_seed(0)
SCORES = torch.randn(12, 60, generator=DRAWS).mul(2).round()
OWNERS = torch.arange(12).repeat_interleave(5)
FEATURES = torch.randn(60, 4, generator=DRAWS)
LABELS = OWNERS % 3
HEAT = torch.rand(6, 8, generator=DRAWS)
BOX, FRACTIONS = torch.tensor([1, 2, 3, 3]), torch.tensor([0.1, 0.2, 0.5, 0.7])
ATTENTION = torch.rand(2, 1, 3, 5, generator=DRAWS)
CLASSIFIER = nn.Linear(4, 3).requires_grad_(False)
RELATION = Relation("eccv", "y", "precision", {3: [4, 9]}, {4: [3, 11]})


def plainly_matched(images, texts):
    return (images * 7 + texts * 3).double()


def ranks(scores, owners):
    return vars(retrieval_ranks(scores, owners, text_scores=scores))


METRICS = {  # function under test -> call with a converter of scores and one of integers
    "retrieval_ranks": lambda real, whole: ranks(real(SCORES), whole(OWNERS)),
    "precisions_at_r": lambda real, whole: vars(
        precisions_at_r(real(SCORES), Positives.from_lists([whole(BOX[:3])] * 12, [whole(BOX[:2])] * 60))
    ),
    "recall_at_k": lambda real, whole: retrieval.recall_at_k(whole(OWNERS), 5),
    "hits_by_image": lambda real, whole: retrieval.hits_by_image(
        retrieval.recalls(retrieval_ranks(SCORES, OWNERS)), whole(OWNERS), 12
    ),
    "two_stage_ranks": lambda real, whole: vars(
        two_stage_ranks(real(SCORES), whole(OWNERS), plainly_matched, 10, text_scores=real(SCORES)).matched
    ),
    "best_candidates": lambda real, whole: best_candidates(real(SCORES), 7),
    "coco_results": lambda real, whole: {
        key: result.metrics
        for key, result in coco_results(
            real(SCORES), whole(OWNERS[::5]), whole(torch.arange(60)), whole(OWNERS), [RELATION], fold_size=4
        ).items()
    },
    "accuracy": lambda real, whole: accuracy.accuracy(whole(OWNERS), whole(LABELS)),
    "accuracy_at_k": lambda real, whole: accuracy.accuracy_at_k(real(SCORES), whole(LABELS[::5]), 3),
    "mean_per_class_recall": lambda real, whole: accuracy.mean_per_class_recall(whole(OWNERS), whole(LABELS)),
    "per_class_hits": lambda real, whole: accuracy.per_class_hits(whole(LABELS % 2), whole(OWNERS)),
    "f1_macro_present": lambda real, whole: accuracy.f1_macro_present(whole(OWNERS), whole(LABELS)),
    "f1_macro_hits": lambda real, whole: accuracy.f1_macro_hits(whole(OWNERS), whole(LABELS)),
    "group_accuracies": lambda real, whole: accuracy.group_accuracies(whole(LABELS), whole(OWNERS)),
    "worst_group_accuracy": lambda real, whole: accuracy.worst_group_accuracy(whole(LABELS % 2), whole(OWNERS)),
    "worst_group_hits": lambda real, whole: accuracy.worst_group_hits(whole(LABELS % 2), whole(OWNERS)),
    "worst_region_accuracy": lambda real, whole: accuracy.worst_region_accuracy(whole(LABELS[:2]), ["Asia", "Other"]),
    "worst_region_hits": lambda real, whole: accuracy.worst_region_hits(whole(LABELS[:2]), ["Asia", "Other"]),
    "winogavil_jaccard": lambda real, whole: accuracy.winogavil_jaccard(real(SCORES[0]), whole(BOX[:3])),
    "winogavil_metrics": lambda real, whole: accuracy.winogavil_metrics(
        real(SCORES[0, :4]), whole(torch.tensor([5, 6, 10, 12]))
    ),
    "classification_evaluation": lambda real, whole: vars(
        accuracy.classification_evaluation(real(SCORES), whole(LABELS[::5]), {})
    ),
    "classification_hits": lambda real, whole: zero_shot.classification_hits(real(SCORES), whole(LABELS[::5]), 3),
    "normalized_mean": lambda real, whole: zero_shot.normalized_mean(real(FEATURES)),
    "plain_mean": lambda real, whole: zero_shot.plain_mean(real(FEATURES)),
    "class_scores": lambda real, whole: zero_shot.class_scores(
        real(FEATURES), real(FEATURES.view(5, 12, 4)), Sphere().similarity, Sphere().mean, "scores"
    ),
    "prompt_scores": lambda real, whole: zero_shot.prompt_scores(
        real(FEATURES), lambda texts: real(FEATURES[: len(texts)]), ["a", "b"], ["{}", "a {}"], Sphere().similarity,
        Sphere().mean, "embeddings",
    ),
    "knn_scores": lambda real, whole: knn.knn_scores(real(FEATURES[:9]), real(FEATURES), whole(LABELS), 3, k=5),
    "probe_scores": lambda real, whole: probe_scores(CLASSIFIER, real(FEATURES), PROBES["oblique"]),
    "feature_batches": lambda real, whole: list(feature_batches(real(FEATURES), whole(LABELS), 16, 0)(0)),
    "entailment_metrics": lambda real, whole: annotated.entailment_metrics(whole(LABELS), whole(OWNERS % 3)),
    "nlvr2_metrics": lambda real, whole: annotated.nlvr2_metrics(whole(LABELS % 2), whole(OWNERS % 2)),
    "attention_heat": lambda real, whole: grad_cam.attention_heat(
        real(ATTENTION), real(ATTENTION), whole(torch.ones(2, 3, dtype=torch.long))
    ),
    "signed_heat": lambda real, whole: grad_cam.signed_heat(
        real(ATTENTION[:, 0]), real(ATTENTION[:, 0]), whole(torch.tensor([[1, 0, 1], [0, 0, 1]]))
    ),
    "resize_heat": lambda real, whole: grad_cam.resize_heat(real(HEAT), 12, 9),
    "box_scores": lambda real, whole: grad_cam.box_scores(real(HEAT), whole(BOX[None])),
    "inclusive_iou": lambda real, whole: grad_cam.inclusive_iou(whole(BOX), whole(BOX + 1)),
    "points_inside": lambda real, whole: grad_cam.points_inside(real(HEAT), whole(BOX)),
    "box_coverage": lambda real, whole: grad_cam.box_coverage(real(FRACTIONS), 6, 8),
    "share_in_box": lambda real, whole: grad_cam.share_in_box(real(HEAT), real(FRACTIONS)),
    "pixel_boxes": lambda real, whole: grad_cam.pixel_boxes(real(FRACTIONS[None]), 6, 8),
    "ground": lambda real, whole: vars(grad_cam.ground(real(HEAT), whole(BOX[None]), whole(BOX))),
}  # fmt: skip
ELSEWHERE = {  # no arrays: functions of results and of models
    "recalls", "ranks_of_parts", "precisions_of_parts", "retrieval_metrics", "means", "chance_level",
    "precision_chance_level", "combine_over_processes", "winogavil_prompt", "fill", "evaluate_knn",
    "labelled_features", "probe_rate_at", "train_probe", "augmented_batches", "backbone_encoder", "frozen",
    "evaluate_linear_probe", "check_classes", "vqa_score", "best_answers", "vqa_metrics", "recorded_input",
    "gradients_of", "grounding_metrics",
}  # fmt: skip


def plain(result):
    """Anything of arrays as nested lists."""
    if isinstance(result, dict):
        return {str(key): plain(value) for key, value in result.items()}
    if isinstance(result, list | tuple):
        return [plain(value) for value in result]
    return result.tolist() if hasattr(result, "tolist") else result


def frozen_array(values):
    array = values.numpy().copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("name", METRICS)
def test_numpy_arrays_and_narrow_integers_give_what_tensors_give(name):
    expected = plain(METRICS[name](lambda real: real, lambda whole: whole))
    for whole in (np.uint8, np.dtype(">i4"), torch.uint8):

        def narrow(values, kind=whole):
            return values.to(kind) if isinstance(kind, torch.dtype) else values.numpy().astype(kind)

        for real in (frozen_array, torch.Tensor.detach):
            assert plain(METRICS[name](real, narrow)) == expected


def test_every_public_function_of_arrays_is_tried():
    modules = (retrieval, accuracy, zero_shot, knn, linear_probe, annotated, grad_cam)
    public = {
        name
        for module in modules
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
    }
    assert public - METRICS.keys() == ELSEWHERE


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: retrieval_ranks(SCORES, OWNERS.float()), "text_to_image of dtype torch.float32; expected integers"),
        (lambda: knn.knn_scores(FEATURES, FEATURES, LABELS / 2, 3), "bank labels of dtype torch.float32; expected"),
        (lambda: zero_shot.classification_hits(SCORES, LABELS), r"\(12, 60\) and labels of shape \(60,\); expected"),
        (
            lambda: retrieval_ranks(np.array(["a"] * 12), OWNERS),
            "scores: ndarray .*; expected numbers in a",
        ),
        (lambda: retrieval_ranks(SCORES.numpy().astype(np.float16), OWNERS), "must be float32 or float64"),
        (lambda: annotated.entailment_metrics([0.5], [0]), r"labels \[0.5\]; expected: 0, 1, 2"),
        (lambda: grad_cam.gradients_of(HEAT.numpy(), []), "carry no gradient"),
    ],
)
def test_what_is_no_score_or_label_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
