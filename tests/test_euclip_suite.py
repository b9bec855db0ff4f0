"""What EuCLIP's rows are evaluated on: means over sets, DataComp's metrics and layouts, WinoGAViL, prompts."""

import io
import itertools
from functools import partial
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from sklearn.metrics import jaccard_score
from tars import write_tar
from test_common_labelled import array
from test_euclip_model import config_of

from common.data.broken import BrokenSample
from common.data.labelled import open_webdataset
from common.data.pairs import EvaluationSets, image_transform, open_evaluation_sets
from common.data.scenes import annotation_task
from common.data.text import build_tokenizer
from common.evaluation.accuracy import (
    f1_macro_present,
    winogavil_jaccard,
    worst_group_accuracy,
    worst_region_accuracy,
)
from common.evaluation.embed import Encoder, evaluate_zero_shot
from common.evaluation.protocol import Evaluation
from common.report.statistics import bootstrap_interval
from euclip.config import Config, EvaluationData, MethodConfig
from euclip.datacomp import DATACOMP_TASKS
from euclip.model import build_model
from euclip.suite import (
    SCORE,
    Mean,
    evaluate_suite,
    further_metrics,
    mean_evaluation,
    open_suite,
    open_tests,
)
from euclip.winogavil import RowAssociations, SceneAssociations, chance_jaccard, evaluate_associations, open_winogavil

DATA = EvaluationData(num_train=8, num_val=4, num_test=6, num_labelled=8, image_size=32)


def encoder_of(geometry):
    """A tiny model with random weights, and its config."""
    config = config_of("table4_clip", "smoke", f"method.geometry={geometry}")
    tokenizer = build_tokenizer(DATA, None)
    torch.manual_seed(1)
    model = build_model(config, tokenizer).eval()
    return Encoder(model, image_transform(DATA), tokenizer, DATA.context_length, 64, torch.device("cpu"))


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


# means


@pytest.fixture(scope="module")
def results():
    config = Config(data=DATA, method=MethodConfig(geometry="euclidean_squared"))
    return evaluate_suite(config, encoder_of("euclidean_squared"), open_evaluation_sets(DATA))


def test_every_mean_is_the_plain_mean_over_its_sets(results):
    shifts = [results[name].metrics["acc1"] for name in ("imagenet_v2", "imagenet_a", "imagenet_r")]
    vtab = [result.metrics["acc1"] for role, result in results.items() if role.startswith("vtab/")]
    retrieval = [
        sum(results[role].metrics[f"{direction}_recall_at_1"] for direction in ("i2t", "t2i")) / 2
        for role in ("test", "second_test")
    ] + [results["winogavil"].metrics["jaccard_score_10-12"]]
    imagenet = results["imagenet"].metrics["acc1"]
    assert len(vtab) == 14
    expected = {
        "mean_imagenet": [imagenet],
        "mean_shifts": shifts,
        "mean_vtab": vtab,
        "mean_retrieval": retrieval,
        "mean_all": [imagenet, *shifts, *vtab, *retrieval],
    }
    for name, values in expected.items():
        assert results[name].metrics[SCORE] == pytest.approx(sum(values) / len(values)), name
    assert len(expected["mean_all"]) == 21


def test_the_hits_of_a_mean_give_it_back_and_an_interval_around_it(results):
    for name in ("mean_imagenet", "mean_shifts", "mean_vtab", "mean_retrieval", "mean_all"):
        hits = results[name].hits[SCORE]
        assert np.mean(flat(hits)) == pytest.approx(results[name].metrics[SCORE]), name
    low, high = bootstrap_interval(results["mean_all"].hits[SCORE])
    assert low < results["mean_all"].metrics[SCORE] < high


def test_a_mean_knows_its_sets_and_its_chance(results):
    mean = results["mean_shifts"]
    assert mean.protocol["data"] == "mean of scenes/imagenet_v2, scenes/imagenet_a, scenes/imagenet_r"
    assert list(mean.protocol["sets"]) == ["imagenet_v2", "imagenet_a", "imagenet_r"]
    assert mean.chance[SCORE] == pytest.approx((1 / 64 + 1 / 64 + 1 / 48) / 3)
    assert results["mean_all"].protocol["data"] == "mean of 21 sets, scenes/imagenet to scenes/winogavil"


def test_what_is_evaluated_is_what_the_cache_compares(results):
    tests = open_tests(DATA)
    assert {role: test.fingerprint for role, test in tests.items()} == {
        role: result.protocol["fingerprint"] for role, result in results.items()
    }
    other = EvaluationData(num_train=8, num_val=4, num_test=7, num_labelled=8, image_size=32)
    changed = {role for role, test in open_tests(other).items() if test.fingerprint != tests[role].fingerprint}
    assert changed == {"test", "second_test", "mean_retrieval", "mean_all"}


def test_datacomps_table_has_38_tasks_and_four_are_scored_by_their_classes():
    tasks = len(DATACOMP_TASKS), len({task.key for task in DATACOMP_TASKS}), len({task.name for task in DATACOMP_TASKS})
    assert tasks == (38, 38, 38)
    per_class = {task.name for task in DATACOMP_TASKS if task.metric == "mean_per_class_recall"}
    assert per_class == {"Caltech-101", "Oxford Flowers-102", "Oxford-IIIT Pet", "FGVC Aircraft"}


def datacomp_sets():
    """DataComp's 38 sets by role, its folders' names, with nothing in them but metadata; and the role of each key."""
    role_of = {
        "retrieval/flickr_1k_test_image_text_retrieval": "test",
        "retrieval/mscoco_2014_5k_test_image_text_retrieval": "second_test",
        "misc/winogavil": "winogavil",
    }
    roles = {
        task.key: role_of.get(task.key, task.key.removeprefix("fairness/").replace("/", "-")) for task in DATACOMP_TASKS
    }
    return {
        role: SimpleNamespace(name=role, fingerprint=role, metadata=lambda index: [0]) for role in roles.values()
    }, roles


def suite_of(sets, averages, monkeypatch):
    """What `open_suite` makes of sets by role."""
    kept = dict(sets)
    there = "there" if "winogavil" in kept else ""
    monkeypatch.setattr("euclip.suite.open_winogavil", lambda source, root: sets["winogavil"])
    kept.pop("winogavil", None)
    retrieval = {role: kept.pop(role) for role in ("test", "second_test") if role in kept}
    data = EvaluationData(source="shards", averages=averages, winogavil=there)
    return open_suite(data, EvaluationSets(kept, retrieval))


@pytest.mark.parametrize("averages", ["datacomp", "present"])
def test_of_datacomps_sets_the_means_are_those_of_its_table_however_they_are_asked_for(averages, monkeypatch):
    sets, roles = datacomp_sets()
    means = suite_of(sets, averages, monkeypatch).means
    assert len(means["mean_all"].metrics) == 38
    values = {task.key: (3 + 7 * number) % 38 / 38 for number, task in enumerate(DATACOMP_TASKS)}
    metric_of = {"mean_recall@1": "mean_recall_at_1"}
    results = {
        roles[task.key]: Evaluation(
            {metric_of.get(task.metric, task.metric): values[task.key]},
            {"data": task.name},
            {},
            {metric_of.get(task.metric, task.metric): [[values[task.key]]]},
        )
        for task in DATACOMP_TASKS
    }
    for group in ("imagenet", "shifts", "vtab", "retrieval", "all"):
        members = [values[task.key] for task in DATACOMP_TASKS if group in (task.group, "all")]
        mean = mean_evaluation(means[f"mean_{group}"], results)
        assert mean.metrics[SCORE] == pytest.approx(sum(members) / len(members)), group
        assert mean.chance == {}


def test_pictures_add_to_a_mean_over_sets_what_they_add_to_each_set():
    """Its variance over pictures is that of independent sets, whatever their levels and sizes."""
    random = np.random.default_rng(0)
    sizes, levels = (100, 400, 1000), (0.2, 0.9, 0.5)
    hits = {f"s{size}": (random.random(size) < level).astype(float) for size, level in zip(sizes, levels)}
    results = {
        name: Evaluation({"acc1": float(of.mean())}, {"data": name}, {}, {"acc1": [[hit] for hit in of]})
        for name, of in hits.items()
    }
    mean = mean_evaluation(
        Mean("mean_all", {name: SimpleNamespace(fingerprint=name) for name in hits}, dict.fromkeys(hits, "acc1")),
        results,
    )
    entries = np.concatenate(mean.hits[SCORE])
    expected = np.mean([of.mean() for of in hits.values()])
    assert [entries.mean(), mean.metrics[SCORE]] == pytest.approx([expected, expected])
    assert entries.var() / len(entries) == pytest.approx(sum(of.var() / len(of) for of in hits.values()) / 9)


def test_datacomps_averages_without_one_of_its_sets_are_an_error_before_training(monkeypatch):
    sets, _ = datacomp_sets()
    kept = {role: members for role, members in sets.items() if role not in ("vtab-pets", "second_test", "winogavil")}
    message = (
        "data.averages = datacomp: 3 of DataComp's 38 tasks are missing, .*: vtab/pets, retrieval/mscoco_2014_.*, "
    )
    end = "misc/winogavil; or take data.averages=present"
    refused((message + end, lambda: suite_of(kept, "datacomp", monkeypatch)))
    means = suite_of(kept, "present", monkeypatch).means
    assert {name: len(mean.sets) for name, mean in means.items()} == {
        "mean_imagenet": 1, "mean_shifts": 6, "mean_vtab": 12, "mean_retrieval": 1, "mean_all": 35
    }  # fmt: skip


def test_a_folder_named_after_a_set_of_datacomp_counts_in_its_group_by_its_metric(monkeypatch):
    names = (
        "imagenet1k",
        "imagenetv2",
        "imagenet-o",
        "objectnet",
        "vtab-flowers",
        "sun397",
        "fgvc_aircraft",
        "my_own",
        "imagenet100",
    )
    sets = {name: SimpleNamespace(name=name, fingerprint=name) for name in (*names, "test")}
    means = suite_of(sets, "present", monkeypatch).means
    assert {name: dict(mean.metrics) for name, mean in means.items() if name != "mean_all"} == {
        "mean_imagenet": {"imagenet1k": "acc1"},
        "mean_shifts": dict.fromkeys(("imagenetv2", "imagenet-o", "objectnet"), "acc1"),
        "mean_vtab": {"vtab-flowers": "mean_per_class_recall", "sun397": "acc1"},
        "mean_retrieval": {"test": "mean_recall_at_1"},
    }
    assert means["mean_all"].metrics["fgvc_aircraft"] == "mean_per_class_recall"
    assert means["mean_all"].metrics["my_own"] == means["mean_all"].metrics["imagenet100"] == "acc1"


@pytest.mark.parametrize("role", ["wilds-fmow", "geode", "fairness-dollar_street"])
def test_a_set_that_lacks_the_metadata_of_its_metric_is_refused_when_the_suite_is_opened(role, monkeypatch):
    for more in ({}, {"metadata": lambda index: None}):
        task = SimpleNamespace(name=role, fingerprint=role, **more)
        refused((f"{role}, picture 0: no metadata", partial(suite_of, {role: task}, "present", monkeypatch)))


def test_sets_of_fairness_go_by_their_folders_or_their_keys_and_two_without_a_score_are_left_out(monkeypatch):
    """DataComp's script writes "wds_geode_test" for fairness/geode."""
    names = ("geode", "fairness-dollar_street", "fairface", "fairness-utkface")
    sets = {name: SimpleNamespace(name=name, fingerprint=name, metadata=lambda index: [0]) for name in names}
    others = {
        name: SimpleNamespace(name=name, fingerprint=name) for name in ("imagenet1k", "sun397", "imagenetv2", "test")
    }
    suite = suite_of(sets | others, "present", monkeypatch)
    assert suite.zero_shot.keys() == {"geode", "dollar_street", "imagenet1k", "sun397", "imagenetv2"}
    metrics = suite.means["mean_all"].metrics
    assert len(metrics) == 6
    assert (metrics["geode"], metrics["dollar_street"]) == ("acc_wg", "acc_top5_wg")
    twice = sets | {"fairness-geode": sets["geode"]}
    message = "geode and fairness-geode are two folders of one DataComp task"
    refused((message, lambda: suite_of(twice, "present", monkeypatch)))


# DataComp's own metrics


@pytest.fixture
def grouped():
    """Random scores of 40 pictures in 7 classes, whose metadata begins with one of four groups."""
    generator = torch.Generator().manual_seed(3)
    scores, labels = torch.randn(40, 7, generator=generator), torch.randint(0, 6, (40,), generator=generator)
    groups = torch.randint(0, 4, (40,), generator=generator).tolist()
    task = SimpleNamespace(name="task", metadata=lambda index: np.array([groups[index], 99]))
    return scores, labels, task, groups


def test_special_metrics_are_those_of_the_arrays(grouped):
    scores, labels, task, groups = grouped
    predictions, indices = scores.argmax(dim=1), list(range(40))
    hits = (predictions == labels).tolist()
    top5 = (scores.topk(5, dim=1).indices == labels[:, None]).any(dim=1).tolist()
    regions = [("Asia", "Europe", "Africa", "Americas", "Oceania", "Other")[group + 2] for group in groups]
    task_of_regions = SimpleNamespace(name="fmow", metadata=lambda index: np.array([groups[index] + 2, 2016]))
    expected = {
        "wilds-iwildcam": (task, {"F1-macro_all": f1_macro_present(predictions, labels)}),
        "geode": (task, {"acc_wg": worst_group_accuracy(hits, groups)}),
        "dollar_street": (task, {"acc_top5_wg": worst_group_accuracy(top5, groups)}),
        "wilds-fmow": (task_of_regions, worst_region_accuracy(hits, regions)),
    }
    for role, (of_task, metrics) in expected.items():
        values = further_metrics(role, of_task)(scores, labels, indices)
        assert {name: np.mean(flat(lists)) for name, lists in values.items()} == pytest.approx(metrics), role
        assert all(len(lists) == 40 for lists in values.values())
    assert further_metrics("cifar10", task) is None


def picture(colour, size=32):
    content = io.BytesIO()
    Image.new("RGB", (size, size), colour).save(content, "PNG")
    return content.getvalue()


def geode(folder, samples):
    """A folder of a set whose metric needs metadata."""
    folder = folder / "wds_geode_test"
    (folder / "test").mkdir(parents=True)
    (folder / "classnames.txt").write_text("red circle\nblue square\n")
    (folder / "zeroshot_classification_templates.txt").write_text("a {c}\na picture of a {c}\n")
    (folder / "test" / "nshards.txt").write_text("1")
    write_tar(folder / "test" / "0.tar", samples)
    return open_webdataset(folder)


def test_a_webdataset_with_metadata_is_scored_by_its_worst_group(tmp_path):
    samples = {
        f"s{number}": {
            "png": picture((255, 0, 0) if number % 2 else (0, 0, 255)),
            "cls": str(number % 2).encode(),
            "npy": array(number // 4, 7),
        }
        for number in range(12)
    }
    task = geode(tmp_path, samples)
    assert task.name == "geode"
    evaluation = evaluate_zero_shot(encoder_of("euclidean_squared"), task, "embeddings", further_metrics("geode", task))
    hits = [value for (value,) in evaluation.hits["acc1"]]
    by_group = [np.mean(hits[start : start + 4]) for start in (0, 4, 8)]
    assert evaluation.metrics["acc_wg"] == pytest.approx(min(by_group))


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        (array(7), ""),
        (b"\x93NUMPY garbage", r"geode: .*0.tar \[s5\]: npy cannot be decoded"),
        (array("africa"), "geode, picture 5: metadata begins with .*africa.*; expected: a whole number"),
        (array(np.nan), "geode, picture 5: metadata begins with .*nan"),
        (array(0.5), "geode, picture 5: metadata begins with .*0.5"),
    ],
)
def test_groups_of_pictures_are_whole_numbers(stored, named, tmp_path):
    samples = {
        f"s{number}": {"png": picture((255, 0, 0)), "cls": b"0", "npy": stored if number == 5 else array(1)}
        for number in range(8)
    }
    task = geode(tmp_path, samples)
    scores, labels = torch.eye(2)[[0] * 8], torch.zeros(8, dtype=torch.long)

    def measured():
        return further_metrics("geode", task)(scores, labels, list(range(8)))

    if named:
        refused((named, measured))
    else:
        measured()


def test_a_region_that_fmow_does_not_have_is_named(grouped):
    scores, labels, *_ = grouped

    def measured(region_of):
        task = SimpleNamespace(name="fmow", metadata=lambda index: np.array([region_of(index)]))
        return further_metrics("wilds-fmow", task)(scores, labels, list(range(40)))

    refused(
        ("fmow, picture 3: region 6; expected: 0 to 5", lambda: measured(lambda index: 6 if index == 3 else 0)),
        (r"fmow: all \d+ items lie in region Other", lambda: measured(lambda index: 5)),
    )


# WinoGAViL


def test_associations_of_scenes_are_scored_as_by_hand():
    encoder, instances = encoder_of("hyperbolic"), SceneAssociations(8, 32)
    result = evaluate_associations(encoder, instances)
    task = annotation_task("winogavil", 8, 32)
    expected = []
    for number in range(8):
        item = task[number]
        images, _ = encoder.images([{"image": image} for image in item["images"]])
        article = "An" if item["cue"][0] in "aeiou" else "A"
        scores = encoder.model.geometry.similarity(images, encoder.texts([f"{article} {item['cue']}"]))[:, 0]
        chosen = set(scores.argsort()[-item["k"] :].tolist())
        if len(item["images"]) >= 10:
            expected.append(len(chosen & set(item["gold"])) / len(chosen | set(item["gold"])))
    assert result.metrics["jaccard_score_10-12"] == pytest.approx(np.mean(expected))
    assert flat(result.hits["jaccard_score_10-12"]) == pytest.approx(expected)
    assert set(result.hits) <= set(result.metrics)
    assert result.protocol["num_instances"] == 8


def test_the_jaccard_index_of_a_guess_is_the_mean_over_all_choices():
    for candidates, k in ((5, 2), (6, 3), (10, 4)):
        gold = set(range(k))
        values = [
            len(gold & set(chosen)) / len(gold | set(chosen)) for chosen in itertools.combinations(range(candidates), k)
        ]
        assert chance_jaccard(candidates, k) == pytest.approx(np.mean(values))


def winogavil_rows(counts=(5, 6, 10, 12), damaged=()):
    rows = []
    for number, count in enumerate(counts):
        names = [f"{number}_{place}" for place in range(count)]
        pictures = [
            {"bytes": b"no picture" if (number, place) in damaged else picture((20 * place, 9, 90)), "path": None}
            for place in range(count)
        ]
        rows.append({"candidate_images": pictures, "candidates": names, "cue": "owl", "associations": names[1:3]})
    features = datasets.Features(
        {
            "candidate_images": [datasets.Image()],
            "candidates": [datasets.Value("string")],
            "cue": datasets.Value("string"),
            "associations": [datasets.Value("string")],
        }
    )
    return datasets.Dataset.from_list(rows, features=features)


def test_winogavils_rows_are_read_from_disk_whatever_wrote_them(tmp_path):
    rows = winogavil_rows()
    rows.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"test": rows}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "parquet").mkdir()
    rows.to_parquet(str(tmp_path / "parquet" / "test.parquet"))
    fingerprints = set()
    for name in ("saved", "splits", "parquet"):
        opened = open_winogavil(name, tmp_path)
        assert (opened.counts, opened.gold[0], opened.cues[0]) == ([5, 6, 10, 12], [1, 2], "owl")
        assert opened[5 + 3]["image"].getpixel((0, 0)) == (60, 9, 90)
        fingerprints.add(opened.fingerprint)
        result = evaluate_associations(encoder_of("sphere"), opened)
        assert result.protocol["num_instances"] == 4
        assert set(result.metrics) >= {"jaccard_score_10-12", "jaccard_score_all"}
    assert len(fingerprints) == 1
    for place in (3, 11):  # the words stay
        changed = rows.to_list()
        changed[-1]["candidate_images"][place] = {"bytes": picture((1, 2, 3)), "path": None}
        fingerprints.add(RowAssociations(datasets.Dataset.from_list(changed), "rows").fingerprint)
    assert len(fingerprints) == 3


def test_a_right_name_that_occurs_twice_is_right_at_both_places_as_in_datacomps_code():
    names = ["a", "b", "a", "c", "d"]
    rows = winogavil_rows().to_list()
    rows[0] |= {"candidates": names, "associations": ["a", "c"]}
    opened = RowAssociations(datasets.Dataset.from_list(rows, features=winogavil_rows().features), "rows")
    assert opened.gold[0] == [0, 2, 3]
    scores = np.array([0.9, 0.8, 0.1, 0.7, 0.2])
    y_true = np.isin(names, rows[0]["associations"])
    y_pred = np.isin(np.arange(5), np.argsort(scores)[-y_true.sum() :])
    assert winogavil_jaccard(scores, opened.gold[0]) == jaccard_score(y_true, y_pred) == 0.5


def test_an_instance_of_more_pictures_than_names_cannot_be_read():
    rows = winogavil_rows().to_list()
    rows[0]["candidate_images"] = rows[1]["candidate_images"]
    opened = RowAssociations(datasets.Dataset.from_list(rows, features=winogavil_rows().features), "rows")
    refused((r"row 0, candidate 0\W+6 pictures for 5 candidates", lambda: opened[0]), error=BrokenSample)


def test_an_instance_with_a_damaged_picture_is_left_out_and_counted(tmp_path):
    winogavil_rows((5, 6, 10, 12, 12), damaged=[(4, 7)]).save_to_disk(str(tmp_path / "saved"))
    opened = open_winogavil("saved", tmp_path)
    with pytest.raises(BrokenSample, match="row 4, candidate 7"):
        opened[5 + 6 + 10 + 12 + 7]
    protocol = evaluate_associations(encoder_of("sphere"), opened).protocol
    assert (protocol["num_instances"], protocol["unreadable_instances"]) == (4, 1)


def test_rows_that_are_no_winogavil_are_refused(tmp_path):
    strange = winogavil_rows((5,)).map(lambda row: {"associations": ["nowhere"]})
    datasets.DatasetDict({"train": winogavil_rows((5,))}).save_to_disk(str(tmp_path / "train"))

    def without(column):
        rows = winogavil_rows()
        return datasets.Dataset.from_list([row | {column: None} for row in rows.to_list()], features=rows.features)

    refused(
        (
            "other: no column candidate_images; expected: candidate_images, candidates",
            lambda: RowAssociations(datasets.Dataset.from_dict({"image": ["a"]}), "other"),
        ),
        (
            "rows, row 0: cue None, candidates .*; expected: a word",
            lambda: RowAssociations(without("cue"), "rows"),
        ),
        (
            "rows, row 0: cue .* associations None; expected",
            lambda: RowAssociations(without("associations"), "rows"),
        ),
        (
            r"rows, row 0: associations \['nowhere'\]; expected: one or more of",
            lambda: RowAssociations(strange, "rows"),
        ),
        (
            "rows: no WinoGAViL instances for jaccard_score_6, jaccard_score_12; the sizes",
            lambda: RowAssociations(winogavil_rows((5, 10)), "rows"),
        ),
        (r"data\.winogavil = 'train' has no split test; it has: train", lambda: open_winogavil("train", tmp_path)),
        (r"data\.winogavil = 'nowhere' cannot be read", lambda: open_winogavil("nowhere", tmp_path)),
    )
