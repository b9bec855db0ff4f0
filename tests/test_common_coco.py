"""COCO 5K, 1K, CxC and ECCV Caption against loops, the files of both annotation sets, and the package of the latter."""

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refused
from toys import ListedPictures, colour_encoder, plain_picture

from common.evaluation.coco import Relation, check_coco, coco_results, evaluate_coco, read_cxc, read_eccv, read_id_lists
from common.evaluation.embed import CaptionRule
from common.evaluation.protocol import first_difference
from common.evaluation.retrieval import retrieval_metrics, retrieval_ranks
from common.geometry import unit

COLOURS = [(row % 250, 60 * (row // 250), 76) for row in range(1000)]
HEADER = "caption,image,agg_score,sampling_method\n"


def small_set(num_images=20, extra=()):
    """Scores with ties, image ids, caption ids and owners; five captions an image, six for those in `extra`."""
    owners = torch.tensor([image for image in range(num_images) for _ in range(6 if image in extra else 5)])
    scores = torch.randn(num_images, len(owners)).round(decimals=1)
    scores[owners, torch.arange(len(owners))] += 1
    ids = torch.randperm(10_000)
    return scores, ids[:num_images].tolist(), ids[1000 : 1000 + len(owners)].tolist(), owners


def relation(image_ids, caption_ids, key="eccv", metrics="precision"):
    rng = np.random.default_rng(0)
    captions = {image: rng.choice(caption_ids, 7, False).tolist() for image in image_ids[::3]}
    images = {
        caption: rng.choice(image_ids, 1 + index % 4, False).tolist() for index, caption in enumerate(caption_ids[::5])
    }
    return Relation(key, "by hand", metrics, captions, images)


def loops(ranking, right):
    """mAP@R, R-Precision and R@1 of one ranked list of ids, from their definitions."""
    hits = [candidate in right for candidate in ranking]
    total = len(right)
    summed = sum(sum(hits[:r]) / r * hits[r - 1] for r in range(1, total + 1))
    return summed / total, sum(hits[:total]) / total, float(hits[0])


def test_all_protocols_equal_loops_over_ids():
    scores, image_ids, caption_ids, owners = small_set()
    precision = relation(image_ids, caption_ids)
    recall = relation(image_ids, caption_ids, "cxc", "recall")
    results = coco_results(scores, image_ids, caption_ids, owners, [recall, precision], fold_size=4)
    assert list(results) == ["coco_5k", "coco_1k", "cxc", "eccv"]

    captions_by_image = {
        image: [caption_ids[text] for text in np.argsort(-scores[row].numpy(), kind="stable")]
        for row, image in enumerate(image_ids)
    }
    images_by_caption = {
        caption: [image_ids[row] for row in np.argsort(-scores[:, text].numpy(), kind="stable")]
        for text, caption in enumerate(caption_ids)
    }
    matching_captions = {image: caption_ids[5 * row : 5 * row + 5] for row, image in enumerate(image_ids)}
    matching_image = {caption: [image_ids[text // 5]] for text, caption in enumerate(caption_ids)}

    def recall_of(rankings, right, k, among=None):
        cut = {query: [one for one in rankings[query] if among is None or one in among][:k] for query in right}
        return np.mean([bool(set(cut[query]) & set(right[query])) for query in right])

    for k in (1, 5, 10):
        expected = recall_of(captions_by_image, matching_captions, k), recall_of(images_by_caption, matching_image, k)
        assert _both(results["coco_5k"], f"recall_at_{k}") == pytest.approx(expected)
        expected = (
            recall_of(captions_by_image, recall.captions_of_image, k),
            recall_of(images_by_caption, recall.images_of_caption, k),
        )
        assert _both(results["cxc"], f"recall_at_{k}") == pytest.approx(expected)
        folds = []
        for start in range(0, 20, 4):
            images, captions = image_ids[start : start + 4], caption_ids[5 * start : 5 * start + 20]
            i2t = recall_of(captions_by_image, {image: matching_captions[image] for image in images}, k, captions)
            folds.append((i2t, recall_of(images_by_caption, {one: matching_image[one] for one in captions}, k, images)))
        assert _both(results["coco_1k"], f"recall_at_{k}") == pytest.approx(np.mean(folds, axis=0))
    for place, metric in enumerate(("map_at_r", "r_precision", "recall_at_1")):
        expected = [
            np.mean([loops(rankings[query], right)[place] for query, right in relation.items()])
            for rankings, relation in (
                (captions_by_image, precision.captions_of_image),
                (images_by_caption, precision.images_of_caption),
            )
        ]
        assert _both(results["eccv"], metric) == pytest.approx(expected)
    for result in results.values():
        for key, lists in result.hits.items():
            if key.startswith(("i2t", "t2i")):
                assert np.mean([value for values in lists for value in values]) == pytest.approx(result.metrics[key]), (
                    key
                )


def _both(result, metric):
    return result.metrics[f"i2t_{metric}"], result.metrics[f"t2i_{metric}"]


def test_other_positives_are_another_protocol():
    scores, image_ids, caption_ids, owners = small_set()
    first = relation(image_ids, caption_ids)
    image, captions = next(iter(first.captions_of_image.items()))

    def protocol(captions):
        other = replace(first, captions_of_image=first.captions_of_image | {image: captions})
        return coco_results(scores, image_ids, caption_ids, owners, [other], fold_size=4)["eccv"].protocol

    assert first_difference(protocol(captions), protocol(captions[::-1])) is None
    assert first_difference(protocol(captions), protocol(captions[1:]))[0] == "positives_hash"


def test_a_sixth_caption_counts_only_in_5k():
    scores, image_ids, caption_ids, owners = small_set(8, extra=(0, 5))
    five = [column for column in range(42) if column not in (5, 36 - 5)]
    assert (owners[5], owners[31]) == (0, 5)
    relations = [relation(image_ids, [caption_ids[column] for column in five])]
    results = coco_results(scores, image_ids, caption_ids, owners, relations, fold_size=4)
    without_sixth = coco_results(
        scores[:, five], image_ids, [caption_ids[column] for column in five], owners[five], relations, fold_size=4
    )
    assert results["coco_5k"].metrics == retrieval_metrics(retrieval_ranks(scores, owners))
    assert results["coco_5k"].metrics != without_sixth["coco_5k"].metrics
    for key in ("coco_1k", "eccv"):
        assert results[key].metrics == without_sixth[key].metrics
    stated = {
        key: [result.protocol[name] for name in ("captions_per_image", "num_images", "num_texts")]
        for key, result in results.items()
    }
    assert stated == {"coco_5k": ["all", 8, 42], "coco_1k": [5, 4, 20], "eccv": [5, 8, 40]}


def test_two_matrices_rank_the_two_directions():
    scores, image_ids, caption_ids, owners = small_set(8, extra=(2,))
    text_scores = torch.randn(8, 41)
    five = [column for column in range(41) if column != 15]
    arguments = image_ids, caption_ids, owners, [relation(image_ids, [caption_ids[column] for column in five])]
    both = coco_results(scores, *arguments, text_scores=text_scores, fold_size=4)
    plain, other = (coco_results(table, *arguments, fold_size=4) for table in (scores, text_scores))
    for key in both:
        for metric in both[key].hits:
            if metric.startswith(("i2t", "t2i")):
                from_one = plain if metric.startswith("i2t") else other
                assert both[key].metrics[metric] == from_one[key].metrics[metric]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a | {"image_ids": [7, 7, *a["image_ids"][2:]]}, "image id 7 occurs 2 times"),
        (lambda a: a | {"caption_ids": a["caption_ids"][:-1]}, "99 caption ids for 100 captions"),
        (lambda a: a | {"fold_size": 3}, "20 images make no folds of 3; the protocols need the whole Karpathy split"),
        (
            lambda a: a | {"text_to_image": a["text_to_image"].clone().index_fill_(0, torch.tensor([4]), 1)},
            "has 4 captions",
        ),
        (
            lambda a: a | {"relations": [Relation("cxc", "CxC", "recall", {a["image_ids"][0]: [-3]}, {})]},
            "CxC names caption -3, which is not among the 20 images and 100 captions",
        ),
    ],
)
def test_ids_that_do_not_fit_are_refused(change, message):
    scores, image_ids, caption_ids, owners = small_set()
    arguments = {"image_ids": image_ids, "caption_ids": caption_ids, "text_to_image": owners, "fold_size": 4}
    refused((message, lambda: coco_results(scores, **change(arguments))))


def test_cxc_positives_are_the_pairs_from_three_on(tmp_path):
    rows = [(11, 1, "5.0"), (12, 1, "2.99"), (12, 2, "3"), (11, 2, "3.01"), (13, 3, "1"), (11, 1, "4.0")]
    text = HEADER + "".join(f"COCO_val2014:sentid:{c},COCO_val2014_{i:012}.jpg,{s},c2i_original\n" for c, i, s in rows)
    (tmp_path / "sits.csv").write_text(text)
    (tmp_path / "sits.csv.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("sits.csv", "sits.csv.gz"):
        actual = read_cxc(tmp_path / name)
        assert actual.captions_of_image == {1: [11], 2: [12, 11]}
        assert actual.images_of_caption == {11: [1, 2], 12: [2]}  # 13 has no positive left and is no query
    assert read_cxc(tmp_path / "sits.csv", score=1).images_of_caption[13] == [3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("caption1,caption2,agg_score,sampling_method\n", "line 1: .*expected: the header caption,image"),
        (HEADER + "COCO_val2014:sentid:x,COCO_val2014_000000000001.jpg,4,c\n", "line 2: COCO_val2014:sentid:x"),
    ],
)
def test_a_file_that_is_no_sits_file_is_named_with_its_line(tmp_path, text, message):
    (tmp_path / "sits.csv").write_text(text)
    refused((rf"sits.csv, {message}", lambda: read_cxc(tmp_path / "sits.csv")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "holds a list; expected: a mapping"),
        ('{"1": [2, "3"]}', "'1': .*expected: an id with a list of ids"),
    ],
)
def test_a_file_that_holds_no_id_lists_is_named(tmp_path, text, message):
    (tmp_path / "ids.json").write_text(text)
    refused(
        (rf"ids.json.*{message}", lambda: read_id_lists(tmp_path / "ids.json")),
        (r"nowhere\.json", lambda: read_id_lists(tmp_path / "nowhere.json")),
    )


def numbered(without_ids=None):
    """Pictures of 1,000 colours of two channels, with one caption that names the colour and four that do not."""

    def captions(row):
        return [f"n{row}", *["else"] * (5 if row == 999 else 4)]

    def caption_ids(row):
        return None if row == without_ids else [10 * row + place for place in range(len(captions(row)))]

    pictures = [plain_picture(colour, 4) for colour in COLOURS]
    return ListedPictures(
        pictures, captions, name="coco", image_id=lambda row: str(5000 - row), caption_ids=caption_ids
    )


def test_a_model_is_evaluated_by_ids_in_all_protocols():
    encoder = colour_encoder({"else": (0, 0, 76), **{f"n{row}": colour for row, colour in enumerate(COLOURS)}}, size=4)
    named = {5000 - index: [10 * index] for index in range(0, 1000, 2)}
    eccv = Relation("eccv", "ECCV", "precision", named, {captions[0]: [image] for image, captions in named.items()})
    actual = evaluate_coco(encoder, numbered(), [eccv], CaptionRule())
    assert {key: result.protocol["num_texts"] for key, result in actual.items()} == {
        "coco_5k": 5001,
        "coco_1k": 5000,
        "eccv": 5000,
    }
    assert actual["eccv"].protocol["num_image_queries"] == actual["eccv"].protocol["num_text_queries"] == 500
    assert actual["eccv"].metrics["t2i_r_precision"] > 0.99
    assert actual["coco_5k"].metrics["t2i_recall_at_1"] == pytest.approx(0.2, abs=0.01)  # four in five say nothing
    without = numbered(without_ids=3)
    refused(
        (
            "coco: image 4997 has 5 captions and the ids None; expected: 5 captions or more, and COCO's number of each",
            lambda: evaluate_coco(encoder, without, [eccv]),
        )
    )


def test_files_of_another_split_are_refused_before_a_model_is_trained(monkeypatch):
    pictures = numbered()
    refused((r"coco: 1000 images; expected: the 5000 of Karpathy's test split", lambda: check_coco(pictures, [])))
    monkeypatch.setattr("common.evaluation.coco.NUM_IMAGES", 1000)
    check_coco(pictures, [Relation("cxc", "CxC", "recall", {5000: [4]}, {4: [5000]})])
    other = Relation("cxc", "CxC", "recall", {77: [4]}, {4: [77]})
    refused((r"CxC names image 77, which is not among the 1000 images", lambda: check_coco(pictures, [other])))
    captions, ids = pictures.captions, pictures.caption_ids
    for texts, numbers, said in (
        (
            lambda row: ["else"] * 4,
            lambda row: [4 * row + place for place in range(4)],
            r"4 captions and the ids \[0, 1",
        ),
        (captions, lambda row: ["a"] * 5, r"5 captions and the ids \['a'"),
    ):
        pictures.captions, pictures.caption_ids = texts, numbers
        refused((rf"coco: image 5000 has {said}.*; expected: 5 captions", lambda: check_coco(pictures, [])))
    pictures.captions = captions
    pictures.caption_ids, pictures.image_id = ids, lambda row: f"a{row}"
    refused((r"coco: image 'a0'; expected: COCO's number of each image", lambda: check_coco(pictures, [])))


@pytest.fixture(scope="module")
def whole():
    """Ids, scores of a synthetic model and its results on the 5,000 test images, by the files of eccv_caption."""
    folder = Path(pytest.importorskip("eccv_caption").__file__).parent / "data"
    ids = np.load(folder / "coco_test_ids.npy").tolist()
    image_of = read_id_lists(folder / "original_caption_to_image.json")
    image_ids = list(dict.fromkeys(image_of[caption][0] for caption in ids))
    owners = torch.arange(5000).repeat_interleave(5)
    assert [image_of[caption] for caption in ids] == [[image_ids[owner]] for owner in owners]
    draws = torch.Generator().manual_seed(0)
    images = unit(torch.randn(5000, 32, generator=draws))
    scores = images @ unit(images[owners] + 0.35 * torch.randn(25_000, 32, generator=draws)).T
    of_cxc = (read_id_lists(folder / f"cxc_{sides}.json") for sides in ("image_to_caption", "caption_to_image"))
    relations = [Relation("cxc", "CxC", "recall", *of_cxc), read_eccv(folder)]
    return ids, image_ids, scores, coco_results(scores, image_ids, ids, owners, relations)


def test_cxc_from_its_scores_equals_the_packaged_json(data_dir):
    actual = read_cxc(data_dir / "annotations/cxc/sits_test.csv.gz")
    folder = data_dir / "annotations/eccv_caption"
    for ours, name in (
        (actual.captions_of_image, "cxc_image_to_caption.json"),
        (actual.images_of_caption, "cxc_caption_to_image.json"),
    ):
        theirs = read_id_lists(folder / name)
        assert {key: sorted(ids) for key, ids in ours.items()} == {key: sorted(ids) for key, ids in theirs.items()}
    assert (len(actual.captions_of_image), len(actual.images_of_caption)) == (5000, 24_972)


def test_the_whole_split_has_the_published_numbers_of_queries(whole):
    *_, results = whole
    names = ("num_images", "num_texts", "num_image_queries", "num_text_queries", "captions_per_image")
    assert {key: [result.protocol[name] for name in names] for key, result in results.items()} == {
        "coco_5k": [5000, 25_000, 5000, 25_000, 5],
        "coco_1k": [1000, 5000, 1000, 5000, 5],
        "cxc": [5000, 25_000, 5000, 24_972, 5],
        "eccv": [5000, 25_000, 1261, 1332, 5],
    }
    for key in results["coco_5k"].hits:
        assert results["coco_1k"].metrics[key] > results["coco_5k"].metrics[key]
    assert results["eccv"].metrics["i2t_map_at_r"] < results["eccv"].metrics["i2t_r_precision"]


def test_metrics_equal_those_of_the_eccv_caption_package(whole):
    ids, image_ids, scores, ours = whole
    # 50 of each are more than any R; COCO 1K would need the whole lists and minutes of the package's loops
    captions, images = scores.topk(50).indices.tolist(), scores.T.topk(50).indices.tolist()
    package = pytest.importorskip("eccv_caption").Metrics()
    theirs = package.compute_all_metrics(
        {image: [ids[text] for text in actual] for image, actual in zip(image_ids, captions)},
        {caption: [image_ids[row] for row in actual] for caption, actual in zip(ids, images)},
        target_metrics=("coco_5k_recalls", "cxc_recalls", "eccv_map_at_r", "eccv_rprecision", "eccv_r1"),
        Ks=(1, 5, 10),
    )
    names = {"eccv_map_at_r": "map_at_r", "eccv_rprecision": "r_precision", "eccv_r1": "recall_at_1"}
    assert len(theirs) == 9
    for key, actual in theirs.items():
        metric = names.get(key) or f"recall_at_{key.rpartition('_r')[2]}"
        result = ours["eccv" if key in names else key.rpartition("_r")[0]]
        assert _both(result, metric) == pytest.approx((actual["i2t"], actual["t2i"]), abs=1e-12), key
