"""common/data/pairs.py: from the config to every kind of data set, and to batches whose order nothing changes."""

import itertools
import json
import pickle
import re
import shutil
import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from processes import run_script
from readable import read_all
from refusals import refused
from runs import row_config
from tars import as_plain, jpeg, pair, write_tar

from common.base.provenance import ROOT
from common.base.settings import DataConfig, MixedSet
from common.data import pairs as pairs_module
from common.data.batches import TrainingView, training_batches
from common.data.order import BatchPositions, order_of
from common.data.pairs import (
    ZERO_SHOT_SETS,
    image_transform,
    lost_at_open,
    open_evaluation_sets,
    open_retrieval_sets,
    open_training_pairs,
    open_validation_pairs,
    open_zero_shot_sets,
)
from common.data.part import some_of
from common.data.scenes import captions as captions_module
from common.data.scenes import classification_task
from common.data.scenes.wording import say
from common.data.text import build_tokenizer
from common.data.tokenizer import WordTokenizer

NUM_SAMPLES = 24
CAPTIONS = [json.loads(pair(number)["json"])["captions"] for number in range(NUM_SAMPLES)]
SIZE = (24, 20)  # of a picture, pixels
COUNTS = {"train": NUM_SAMPLES, "val": 3, "test": 4}  # of the sets that a writer writes
TENSORS = ("images", "token_ids", "image_index")  # of a batch


@pytest.fixture(autouse=True)
def folders_below_the_test(tmp_path, monkeypatch):
    """Indices of shards and the library's caches go below the test's folder."""
    monkeypatch.setattr(pairs_module, "outputs", lambda: tmp_path / "root" / "outputs")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def config_of(source, root, **values):
    return DataConfig(source=source, root=str(root), image_size=16, crop_scale=(0.5, 1.0), **values)


def view_of(data, **options):
    pairs = open_training_pairs(data, 3)
    words = WordTokenizer.from_words(sorted({"picture", "a", "view", "of", *map(str, range(NUM_SAMPLES))}))
    return TrainingView(pairs, order_of(pairs, 6, 3), image_transform(data), words, 8, **options)


def ids_of(pairs):
    return [pairs.image_id(index) for index in range(len(pairs))]


def sizes_of(sets):
    return {role: len(pairs) for role, pairs in sets.items()}


def batches_of(data, steps=9, first=0, num_workers=0, num_processes=1):
    """Global batches: the shares of all processes, of which each opens the data, put together."""
    shares = []
    for process in range(num_processes):
        view = view_of(data)
        positions = BatchPositions(view.order, first, steps, process, num_processes)
        shares.append(list(training_batches(view, positions, num_workers, False)))
    return [
        {
            **{key: torch.cat([getattr(share, key) for share in step]) for key in TENSORS},
            "image_ids": [image_id for share in step for image_id in share.image_ids],
            "broken": [broken for share in step for broken in share.broken],
        }
        for step in zip(*shares)
    ]


def ids_in(batches):
    return [image_id for batch in batches for image_id in batch["image_ids"]]


def assert_same(ours, theirs):
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs):
        assert all(torch.equal(one[key], other[key]) for key in TENSORS)
        assert (one["image_ids"], one["broken"]) == (other["image_ids"], other["broken"])


def test_two_views_of_a_picture_are_two_draws_and_the_first_is_that_of_one_view():
    data, positions = DataConfig(image_size=32, crop_scale=(0.3, 0.6)), [3, 700, 41]
    one, both = (view_of(data, two_views=two).__getitems__(positions) for two in (False, True))
    assert one.second_views is None
    assert torch.equal(one.images, both.images)
    again = view_of(data, two_views=True).__getitems__(positions[::-1])
    assert torch.equal(again.second_views, both.second_views.flip(0))
    assert not any(torch.equal(first, second) for first, second in zip(both.images, both.second_views, strict=True))


@pytest.mark.parametrize("name", ["albef", "tcl"])
def test_augmented_views_are_drawn_apart_from_the_crop(name):
    view, places = view_of(DataConfig(image_size=32), two_views=True, augmentation=name), list(range(40))
    batch, plain = view.__getitems__(places), view_of(DataConfig(image_size=32)).__getitems__(places)
    assert torch.equal(view.__getitems__([7]).images[0], batch.images[7])
    changed = (batch.images != plain.images).flatten(1).any(dim=1)
    assert 0.5 < changed.float().mean() <= 1
    assert not torch.equal(batch.images, batch.second_views)
    assert batch.images.dtype == torch.uint8


# --- every source ----------------------------------------------------------------------------------------------------


def write_shards(root, size=SIZE):
    for role, count in COUNTS.items():
        samples = {f"k{number:03d}": pair(number, jpg=jpeg(number, size)) for number in range(count)}
        write_tar(root / f"x-{role}-0.tar", samples)
    return "shards", {}


def write_pictures(folder, size=SIZE, count=NUM_SAMPLES):
    folder.mkdir()
    for number in range(count):
        (folder / f"id{number}.jpg").write_bytes(jpeg(number, size))
    return folder


def write_karpathy(root, size=SIZE):
    write_pictures(root / "pictures", size)
    splits = ["test"] * 4 + ["val"] * 3 + ["train"] * (NUM_SAMPLES - 7)
    images = [
        {"filename": f"id{number}.jpg", "split": split, "sentences": [{"raw": text} for text in CAPTIONS[number]]}
        for number, split in enumerate(splits)
    ]
    (root / "dataset.json").write_text(json.dumps({"images": images, "dataset": "mine"}))
    return "karpathy", {"train": "dataset.json#train+val+test", "val": "dataset.json", "test": "dataset.json"}


def write_tables(root, size=SIZE):
    write_pictures(root / "pictures", size)
    for role, count in COUNTS.items():
        rows = [f"id{number}.jpg\t{text}\n" for number in range(count) for text in CAPTIONS[number]]
        (root / f"{role}.tsv").write_text("".join(rows))
    return "tsv", {role: f"{role}.tsv" for role in COUNTS}


def write_folder(root, size=SIZE):
    for role, count in COUNTS.items():
        folder = write_pictures(root / role, size, count)
        for number in range(count):
            (folder / f"id{number}.txt").write_text("\n".join(CAPTIONS[number]))
    return "folder", {role: role for role in COUNTS}


def columns_of(numbers, size=SIZE):
    return {
        "image": [jpeg(number, size) for number in numbers],
        "captions": [CAPTIONS[number] for number in numbers],
        "image_id": [f"id{number}" for number in numbers],
    }


def write_hugging_face(root, size=SIZE):
    splits = {
        {"val": "validation"}.get(role, role): datasets.Dataset.from_dict(columns_of(range(count), size))
        for role, count in COUNTS.items()
    }
    datasets.DatasetDict(splits).save_to_disk(root / "saved")
    return "hugging_face", {"train": "saved"}


def write_parquet(root):
    for role, count in COUNTS.items():
        datasets.Dataset.from_dict(columns_of(range(count))).to_parquet(root / f"{role}.parquet")
    return "hugging_face", {}


WRITERS = [write_shards, write_karpathy, write_tables, write_folder, write_hugging_face]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_every_source_can_hold_out_a_share_of_its_training_pictures(tmp_path, write):
    source, values = write(tmp_path)
    values.pop("val", None)
    whole, data = config_of(source, tmp_path, **values), config_of(source, tmp_path, **values, val_share=0.25)
    train, validation = open_training_pairs(data, 0), open_validation_pairs(data)
    every = open_training_pairs(whole, 0)
    assert sorted(ids_of(train) + ids_of(validation)) == sorted(ids_of(every))
    assert len({every.fingerprint, train.fingerprint, validation.fingerprint}) == 3
    assert validation[0]["captions"] == validation.captions(0)
    assert len(list(train.all_captions())) == 2 * len(train)
    assert set(ids_in(batches_of(data))) <= set(ids_of(train))
    refused(("expected one of them", lambda: open_validation_pairs(replace(data, val="x"))))


def test_a_held_out_share_of_rows_ranks_each_picture_once_with_all_its_captions(tmp_path):
    numbers = [number for number in range(20) for _ in range(3)]
    content = {"image": [jpeg(number) for number in numbers], "caption": [f"{row}" for row in range(60)]}
    datasets.Dataset.from_dict(content).save_to_disk(tmp_path / "saved")
    data = config_of("hugging_face", tmp_path, train="saved", val_share=0.3)
    train, validation = open_training_pairs(data, 0), open_validation_pairs(data)
    assert len(set(ids_of(validation))) == len(validation) == 20 - len(train) // 3
    assert all(len(validation.captions(index)) == 3 for index in range(len(validation)))
    assert not set(ids_of(validation)) & set(ids_of(train))


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_every_source_opens_by_role_and_trains(tmp_path, write):
    source, values = write(tmp_path)
    data = config_of(source, tmp_path, **values)
    train, sets = open_training_pairs(data, 0), open_evaluation_sets(data)
    assert (len(train), len(open_validation_pairs(data))) == (NUM_SAMPLES, 3)
    assert (sizes_of(sets.retrieval), sets.zero_shot) == ({"test": 4}, {})
    assert lost_at_open(train, *sets.retrieval.values()) == []
    for pairs in (train, sets.retrieval["test"]):
        number = int(pairs.image_id(2).removeprefix("id").removesuffix(".jpg"))
        assert (pairs.captions(2), len(pairs.fingerprint)) == (CAPTIONS[number], 64)
    assert len(list(train.all_captions())) == 2 * NUM_SAMPLES
    assert len(set(ids_in(batches_of(data, steps=4)))) == NUM_SAMPLES
    assert pickle.loads(pickle.dumps(view_of(data))).order.forward_only is False


def test_evenly_spaced_pictures_are_validated_where_the_config_says_how_many(tmp_path):
    source, values = write_shards(tmp_path)
    whole = open_validation_pairs(config_of(source, tmp_path, **values))
    one, part, *same = (
        open_validation_pairs(config_of(source, tmp_path, num_val=count, **values)) for count in (1, 2, 3, 7)
    )
    for pairs in same:
        assert (len(pairs), pairs.name, pairs.fingerprint) == (3, whole.name, whole.fingerprint)
    assert part.name == f"{whole.name} (2 of 3)"
    assert read_all(part)[0] == {index: as_plain(whole[index]) for index in (0, 1)}  # 3 * row // 2
    assert (ids_of(part), part.captions(1)) == (ids_of(whole)[:2], whole.captions(1))
    assert list(part.all_captions()) == [*whole.captions(0), *whole.captions(1)]
    assert len({one.fingerprint, part.fingerprint, whole.fingerprint}) == 3


def test_the_pictures_of_a_part_are_spread_over_the_whole_set():
    whole = classification_task("imagenet", size=1_000, image_size=16)
    part = some_of(whole, 8)
    assert [part[row]["image_id"] for row in range(8)] == [whole[place]["image_id"] for place in range(0, 1_000, 125)]
    assert [part.label(row) for row in range(8)] == [whole.label(place) for place in range(0, 1_000, 125)]
    assert part.class_names == whole.class_names
    assert some_of(None, 8) is None


def test_a_link_to_nothing_names_its_set_of_a_mixture_and_its_role(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_shards(tmp_path / name)
    for role in ("train", "val", "test"):
        (tmp_path / "b" / f"{role}-1.tar").symlink_to("/annex/gone")
    mixed, data = (config_of("shards", tmp_path, mixture=(MixedSet(root="a"), MixedSet(root="b"))),
                   config_of("shards", tmp_path / "b"))  # fmt: skip
    for key, role, opened in (
        ("data.mixture, set 2: train", "train", lambda: open_training_pairs(mixed, 0)),
        ("data.train", "train", lambda: open_training_pairs(data, 0)),
        ("data.val", "val", lambda: open_validation_pairs(data)),
        ("data.test", "test", lambda: open_retrieval_sets(data)),
    ):
        place = tmp_path / "b" / f"{role}-1.tar"
        message = f"{key} = '*{role}*.tar': {place}, a link to /annex/gone, cannot be opened"
        refused((f"^{re.escape(message)}", opened))


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_every_source_can_be_chosen_on_top_of_a_scale_of_photographs(tmp_path, write):
    """As the README says: the source and the names that it takes, nothing else."""
    source, values = write(tmp_path, (8, 8))
    if source == "karpathy":
        values = {"train": "dataset.json"}
    named = [f"data.{name}={value}" for name, value in {"source": source, "root": tmp_path, **values}.items()]
    rows = {"contrastive_basics": "table1_ours", "euclip": "table4_clip", "oblique_topology": "table2_clip"}
    for paper, scale in itertools.product(rows, ("photos", "paper")):
        data = row_config(paper, rows[paper], *named, scale=scale).data
        if (source, paper, scale) == ("shards", "euclip", "paper"):  # the same source keeps its names
            assert (data.train, data.second_test) == ("train/*.tar", "mscoco_5k_test*.tar")
            continue
        data = replace(data, labelled="", **({"winogavil": ""} if hasattr(data, "winogavil") else {}))
        assert len(open_training_pairs(data, 0)) == (NUM_SAMPLES - 7 if source == "karpathy" else NUM_SAMPLES)
        assert len(open_validation_pairs(data)) == 3
        assert sizes_of(open_retrieval_sets(data)) == {"test": 4}


def test_one_file_serves_all_roles_unless_another_is_named(tmp_path):
    write_karpathy(tmp_path)
    data = config_of("karpathy", tmp_path, train="dataset.json#train")
    assert len(open_training_pairs(data, 0)) == NUM_SAMPLES - 7
    assert sizes_of(open_retrieval_sets(data)) == {"test": 4}
    data = config_of("karpathy", tmp_path, train="dataset.json", test="dataset.json#val", second_test="dataset.json")
    assert sizes_of(open_retrieval_sets(data)) == {"test": 3, "second_test": 4}
    (tmp_path / "odd#name.json").write_bytes((tmp_path / "dataset.json").read_bytes())
    data = config_of("karpathy", tmp_path, train="odd#name.json", images="pictures")
    assert (len(open_training_pairs(data, 0)), len(open_validation_pairs(data))) == (NUM_SAMPLES - 7, 3)


def test_a_config_that_names_no_data_says_which_key_and_what_is_accepted(tmp_path):
    write_karpathy(tmp_path)
    (tmp_path / "train.tsv").write_text("id0.jpg\ta\n")
    write_hugging_face(tmp_path)
    cases = (
        ("karpathy", {}, "data.source = karpathy needs data.train; expected: a JSON file of captions"),
        ("tsv", {}, "data.source = tsv needs data.train; expected: a table of path and caption"),
        (
            "folder",
            {},
            "data.source = folder needs data.train; expected: a folder of images with NAME.txt beside each",
        ),
        ("folder", {"train": "nothing"}, "nothing: no such folder; expected images with NAME.txt beside each"),
        ("folder", {"train": "train#val"}, "train has no splits; split is 'val'"),
        ("folder", {"train": ".", "images": "x"}, "data.images = 'x' has no effect with data.source = folder"),
        ("hugging_face", {}, "data.source = hugging_face needs data.train; expected: a folder, files"),
        (
            "tsv",
            {"train": "train.tsv#test"},
            "train.tsv has no splits; split is 'test'; expected: none, the name without '#test'",
        ),
        ("karpathy", {"train": "dataset.json#dev"}, "has no split 'dev'; expected one of: test (4 images), val"),
        ("karpathy", {"train": "nothing.json"}, "nothing.json: no such file"),
        ("karpathy", {"train": "dataset.json", "images": "nowhere"}, "no such folder of images (data.images)"),
        ("tsv", {"train": "train.tsv", "caption_column": "c"}, "line 1: no column 'c' (data.caption_column)"),
        ("hugging_face", {"train": "saved#dev"}, "has no split 'dev'; expected one of: train, validation, test"),
        ("hugging_face", {"train": "saved", "image_column": "x"}, "column data.image_column 'x' is missing"),
        ("hugging_face", {"train": "saved", "stream_buffer": 4}, "read it so: data.stream_buffer=0"),
        ("shards", {"root": ""}, "set data.root (make: DATA=<folder>) or a full path in data.train"),
    )

    def opened(source, values):
        return open_training_pairs(DataConfig(**{"source": source, "root": str(tmp_path), **values}), 0)

    calls = ((re.escape(words), partial(opened, source, values)) for source, values, words in cases)
    refused(*calls, error=(ValueError, FileNotFoundError))


@pytest.mark.parametrize("train", [".", "test", "test/below"])
def test_folders_of_training_and_test_that_hold_one_another_are_refused(tmp_path, train):
    source, values = write_folder(tmp_path)
    data = config_of(source, tmp_path, **{**values, "train": train})
    mixed = replace(data, train="", mixture=(MixedSet(train="train"), MixedSet(train=train)))
    apart = r"data\.test = 'test': .* are not apart; expected: two folders"
    refused(*((apart, partial(open_retrieval_sets, config)) for config in (data, mixed)))


@pytest.mark.parametrize(
    ("write", "train", "test", "is_named"),
    [
        (write_tables, "./test.tsv", "test.tsv", True),
        (write_tables, "train.tsv", "test.tsv", False),
        (write_karpathy, "dataset.json#test", "dataset.json#test", True),
        (write_karpathy, "dataset.json#train", "dataset.json#test", False),
        (write_karpathy, "dataset.json#train+val", "dataset.json#val+test", True),
        (write_karpathy, "dataset.json", "dataset.json", False),  # each has its split
        (write_parquet, "*.parquet", "test.parquet", True),
        (write_parquet, "train.parquet", "test.parquet", False),
        (write_shards, "*-test-*.tar", "*-test-*.tar", True),
    ],
)
def test_a_test_set_that_is_a_training_set_is_named(tmp_path, write, train, test, is_named):
    source, values = write(tmp_path)
    data = config_of(source, tmp_path, **{**values, "train": train, "test": test})
    for config in (data, replace(data, train="", mixture=(MixedSet(train=train), MixedSet(source="scenes")))):
        with warnings.catch_warnings(record=True) as caught:
            open_retrieval_sets(config)
        assert ["is what data.train names" in str(warning.message) for warning in caught] == [True] * is_named


def test_one_pattern_in_two_folders_is_no_training_set(tmp_path):
    for name in ("evaluated", "trained"):
        (tmp_path / name).mkdir()
        write_shards(tmp_path / name)
    mixture = (MixedSet(root=str(tmp_path / "trained"), train="*-test-*.tar"), MixedSet(source="scenes"))
    data = config_of("shards", tmp_path / "evaluated", test="*-test-*.tar", mixture=mixture)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(open_retrieval_sets(data)["test"]) == 4


def test_an_evaluation_needs_no_pictures_of_the_training_set(tmp_path):
    source, values = write_karpathy(tmp_path)
    for number in range(7, NUM_SAMPLES):
        (tmp_path / "pictures" / f"id{number}.jpg").unlink()
    data = config_of(source, tmp_path, **values | {"train": "dataset.json", "images": "pictures"})
    assert len(open_retrieval_sets(data)["test"]) == 4
    refused(("no captioned image in mine-train", lambda: open_training_pairs(data, 0)))


@pytest.mark.parametrize("values", [{"train": "*.tar"}, {"train": "x-test-0.tar", "test": "*-test-*.tar"}])
def test_a_test_set_with_a_shard_of_the_training_set_is_refused(tmp_path, values):
    write_shards(tmp_path)
    data = config_of("shards", tmp_path, **values)
    both = r"data\.test = .* and the training set .* both name .*\.tar; "
    parts = (MixedSet(source="scenes"), MixedSet(train=values["train"]))
    mixed = replace(data, train="not_here/*.tar", mixture=parts)
    refused(*((both, partial(open_retrieval_sets, config)) for config in (data, mixed)))
    elsewhere = config_of("shards", tmp_path, train="not_here/*.tar")
    for other in (replace(data, train="*-test-*.tar", test="*-test-*.tar"), elsewhere):  # on purpose; an evaluation
        assert len(open_retrieval_sets(other)["test"]) == 4


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_training_decodes_large_jpegs_at_a_fraction_and_ranking_in_full(tmp_path, write):
    """A crop of half the area or more still has as many pixels as the model sees."""
    source, values = write(tmp_path, (200, 160))
    data = config_of(source, tmp_path, **values, second_test=values.get("test", values.get("train", "*-test-*.tar")))
    assert data.image_size == 16
    assert open_training_pairs(data, 0)[0]["image"].size == (50, 40)  # of 200 x 160: both sides at least 2 * 16
    ranked = {"val": open_validation_pairs(data), **open_retrieval_sets(data)}
    assert list(ranked) == ["val", "test", "second_test"]
    assert {role: pairs[0]["image"].size for role, pairs in ranked.items()} == dict.fromkeys(ranked, (200, 160))


def test_labelled_sets_come_from_the_config_and_two_of_one_name_are_refused(tmp_path):
    task = tmp_path / "labelled" / "wds_vtab-pets_test"
    (task / "test").mkdir(parents=True)
    (task / "classnames.txt").write_text("cat\ndog\n")
    (task / "zeroshot_classification_templates.txt").write_text("a photo of a {c}.\n")
    (task / "test" / "nshards.txt").write_text("1")
    write_tar(task / "test" / "0.tar", {f"s{n}": {"jpg": jpeg(n), "cls": str(n % 2).encode()} for n in range(4)})
    write_shards(tmp_path)
    sets = open_zero_shot_sets(config_of("shards", tmp_path, labelled="labelled"))
    assert {name: [task.label(index) for index in range(4)] for name, task in sets.items()} == {
        "vtab-pets": [0, 1, 0, 1]
    }
    scenes = open_zero_shot_sets(DataConfig(labelled=str(tmp_path / "labelled"), num_labelled=4))
    assert list(scenes) == [*ZERO_SHOT_SETS, "vtab-pets"]
    assert list(open_zero_shot_sets(DataConfig(num_labelled=4))) == list(ZERO_SHOT_SETS)
    shutil.copytree(task, task.with_name("wds_vtab-pets"))
    refused(("two labelled sets called 'vtab-pets'",
             lambda: open_zero_shot_sets(config_of("shards", tmp_path, labelled="labelled"))))  # fmt: skip


def test_a_list_without_splits_is_not_ranked_on_what_it_was_trained_on(tmp_path):
    write_pictures(tmp_path / "pictures")
    rows = [{"image": f"id{number}.jpg", "caption": CAPTIONS[number]} for number in range(NUM_SAMPLES)]
    (tmp_path / "all.json").write_text(json.dumps(rows))
    (tmp_path / "few.json").write_text(json.dumps(rows[:3]))
    data = config_of("karpathy", tmp_path, train="all.json", val="few.json", max_broken_share=0.5)
    assert len(open_validation_pairs(data)) == 3
    for caption in ("id 0", ""):  # training leaves an empty caption out, ranking does not
        rows[0]["caption"] = caption
        (tmp_path / "all.json").write_text(json.dumps(rows))
        message = r"data\.test is empty and data\.train = 'all\.json' has no split for it"
        refused((message, partial(open_evaluation_sets, data)))


# --- order -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """The same samples in 1, 2, 5 and 24 shards, one of them broken."""
    folder = tmp_path_factory.mktemp("layouts")
    samples = {f"k{number:03d}": pair(number) for number in range(NUM_SAMPLES)}
    samples["k007"]["jpg"] = b"no picture"
    keys = list(samples)
    for num_shards in (1, 2, 5, 24):
        (folder / str(num_shards)).mkdir()
        for shard in range(num_shards):
            part = keys[shard * NUM_SAMPLES // num_shards : (shard + 1) * NUM_SAMPLES // num_shards]
            write_tar(folder / str(num_shards) / f"train-{shard:03d}.tar", {key: samples[key] for key in part})
    return folder


def without_place(batches):
    """A broken sample names its shard, which depends on the layout."""
    for batch in batches:
        batch["broken"] = [(broken.key, broken.reason) for broken in batch["broken"]]
    return batches


@pytest.mark.parametrize(("num_shards", "num_workers", "num_processes"), [(24, 0, 6), (2, 2, 3)])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_global_batches_do_not_depend_on_shards_workers_or_processes(layouts, num_shards, num_workers, num_processes):
    one, many = (config_of("shards", layouts / str(number)) for number in (1, num_shards))
    plain = without_place(batches_of(one))
    other = batches_of(many, num_workers=num_workers, num_processes=num_processes)
    assert_same(plain, without_place(other))
    assert {key for batch in plain for key, _ in batch["broken"]} == {"k007"}
    tail = batches_of(many, first=4, num_workers=num_workers)  # as a resume with another layout
    assert_same(plain[4:], without_place(tail))


def test_a_picture_listed_twice_has_one_image_index(tmp_path):
    """So targets by ids, the queue and the count of duplicates see that it is one."""
    twice = [number % 12 for number in range(NUM_SAMPLES)]
    datasets.Dataset.from_dict(columns_of(twice)).save_to_disk(tmp_path / "saved")
    batches = batches_of(config_of("hugging_face", tmp_path, train="saved"), steps=4)
    assert len(set(numbers_of(batches).values())) == 12


def numbers_of(batches):
    """The one image_index of every image_id."""
    numbers = {}
    for batch in batches:
        for image_id, index in zip(batch["image_ids"], batch["image_index"].tolist()):
            assert numbers.setdefault(image_id, index) == index >= 0
    return numbers


# --- streams ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def stream(tmp_path):
    """Config of a streamed training set of 24 rows in three files; row 7 is broken."""
    (tmp_path / "set").mkdir()
    for file in range(3):
        columns = columns_of(range(8 * file, 8 * file + 8))
        columns["image"][7] = b"no picture" if file == 0 else columns["image"][7]
        datasets.Dataset.from_dict(columns).to_parquet(tmp_path / "set" / f"train-{file:05d}-of-00003.parquet")
    return config_of("hugging_face", tmp_path, train="set", stream_buffer=5)


def test_a_stream_resumes_where_it_was_and_replaces_broken_rows_by_the_next(stream):
    whole = batches_of(stream, steps=10)
    assert_same(whole, batches_of(stream, 10, num_workers=2, num_processes=2))
    for first in (3, 6):
        assert_same(whole[first:], batches_of(stream, 10, first))
    for epoch in (whole[:4], whole[4:8]):
        assert set(ids_in(epoch)) == {f"id{number}" for number in range(NUM_SAMPLES)} - {"id7"}
        (broken,) = [broken for batch in epoch for broken in batch["broken"]]
        assert "it starts with b'no picture'" in broken.reason
    assert len(set(numbers_of(whole).values())) == NUM_SAMPLES - 1  # the same in every epoch


def test_evaluation_sets_are_never_streamed(stream, tmp_path):
    datasets.Dataset.from_dict({"image": [jpeg(0)], "captions": [["a"]]}).to_parquet(tmp_path / "set" / "test.parquet")
    assert open_training_pairs(stream, 0).forward_only
    test = open_retrieval_sets(stream)["test"]
    assert not hasattr(test, "forward_only")
    assert test[0]["captions"] == ["a"]


# --- mixtures --------------------------------------------------------------------------------------------------------


@pytest.fixture
def mixture(stream, tmp_path):
    """A table of pictures, one of them broken, three times as often as a stream of rows and as scenes."""
    (tmp_path / "table").mkdir()
    write_tables(tmp_path / "table")
    (tmp_path / "table" / "pictures" / "id3.jpg").write_bytes(b"no picture")
    parts = (
        MixedSet(weight=3),
        MixedSet(source="hugging_face", root=str(tmp_path), train="set", stream_buffer=5),
        MixedSet(source="scenes", num_train=40),
    )
    return config_of("tsv", tmp_path / "table", train="train.tsv", mixture=parts)


def test_a_mixture_trains_in_one_order_for_any_number_of_workers_and_processes_and_from_any_step(mixture):
    plain = batches_of(mixture, steps=10)
    assert_same(plain[7:], batches_of(mixture, 10, first=7, num_workers=2))
    assert_same(plain, batches_of(mixture, 10, num_processes=3))


def test_a_broken_sample_of_a_mixture_is_replaced_by_one_of_its_set_and_ids_of_two_sets_never_meet(mixture):
    batches = batches_of(mixture, steps=30)
    drawn = view_of(mixture).order.epochs_and_indices(np.arange(1_000))[1] % 3
    assert np.bincount(drawn).tolist() == [600, 200, 200]  # weights 3, 1, 1
    assert [image_id[:2] for image_id in ids_in(batches)] == [f"{number}:" for number in drawn[: 30 * 6]]
    assert {broken.path.rpartition("/")[2] for batch in batches for broken in batch["broken"]} > {"id3.jpg"}
    assert {"0:id2.jpg", "1:id2"} < set(ids_in(batches))
    assert len(open_training_pairs(mixture, 0)) == 2 * NUM_SAMPLES + 40


def test_the_words_of_a_mixture_are_those_of_all_its_sets_and_its_fingerprint_knows_weights_and_buffers(mixture):
    pairs = open_training_pairs(mixture, 0)
    tokenizer = build_tokenizer(mixture, pairs)
    assert tokenizer.unknown_id not in tokenizer.encode(["picture view of", "circle square triangle"], 8)
    half = replace(mixture, mixture=(replace(mixture.mixture[0], weight=1.5), *mixture.mixture[1:]))
    table, stream, scenes = mixture.mixture
    buffer = replace(mixture, mixture=(table, replace(stream, stream_buffer=6), scenes))
    others = (open_training_pairs(half, 0), open_training_pairs(buffer, 0), open_training_pairs(mixture, 1))
    assert len({mixed.fingerprint for mixed in (pairs, *others)}) == 4
    assert pairs.name.startswith("60 % train + 20 % ")


def test_a_mixture_of_scenes_keeps_the_words_of_the_scenes_and_draws_two_worlds():
    data = DataConfig(num_train=8, image_size=16, mixture=(MixedSet(), MixedSet(caption_noise=1.0)))
    pairs = open_training_pairs(data, 0)
    assert build_tokenizer(data, pairs).fingerprint == build_tokenizer(DataConfig(), None).fingerprint
    assert pairs.parts[0].captions(0) != pairs.parts[1].captions(0)
    assert [pairs.captions(index) for index in range(4)] == [pairs[index]["captions"] for index in range(4)]
    assert not (pairs.parts[0][0]["image"] == pairs.parts[1][0]["image"]).all()


def test_a_batch_of_scenes_words_one_caption_of_each_item_and_is_that_of_whole_items(monkeypatch):
    data = DataConfig(num_train=8, image_size=16, mixture=(MixedSet(ambiguity=1.0), MixedSet(caption_noise=1.0)))
    pairs, worded = open_training_pairs(data, 0), []
    view = TrainingView(pairs, order_of(pairs, 6, 3), image_transform(data), build_tokenizer(data, pairs), 32)
    monkeypatch.setattr(captions_module, "say", lambda *parts: worded.append(parts) or say(*parts))
    batch = view.__getitems__([*range(12)])
    assert len(worded) == 12
    view.pairs = SimpleNamespace(__getitem__=pairs.__getitem__)
    assert torch.equal(batch.token_ids, view.__getitems__([*range(12)]).token_ids)
    assert len(worded) == 6 * 12  # one by the first view, five by the other


# --- what a process loads --------------------------------------------------------------------------------------------

READERS = ("karpathy", "tsv", "folder", "shards", "hugging_face", "clip_tokenizer", "bert_tokenizer")
SCENES = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
import contrastive_basics.train, euclip.train, geomm.train, oblique_topology.train
import contrastive_basics.pretrain, geomm.finetune, geomm.pretrain
from euclip.config import Config
from common.base.config import load_row
from common.data import pairs, text
folder = Path("euclip")
for overrides in {overrides}:
    config = load_row(Config, folder, folder / "configs" / "table4_clip.yaml", "smoke", overrides)
    training = pairs.open_training_pairs(config.data, 0)
    text.tokenizer_from_json(text.build_tokenizer(config.data, training).to_json())
    pairs.open_validation_pairs(config.data), pairs.open_evaluation_sets(config.data)
    print(*(name for name in {readers} if f"common.data.{{name}}" in sys.modules))
"""


def test_a_process_loads_the_reader_and_the_tokenizer_that_it_uses_and_no_other(tmp_path):
    """A run is known by the files that its process loaded, so what it does not use must not be among them."""
    (tmp_path / "a.jpg").write_bytes(jpeg(0))
    (tmp_path / "a.tsv").write_text("a.jpg\ta dog\n", encoding="utf-8")
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\ndog\n", encoding="utf-8")
    files = [f"data.{role}=a.tsv" for role in ("train", "val", "test")]
    files += ["data.source=tsv", "data.tokenizer=bert_wordpiece"]
    files += [f"data.root={tmp_path}", f"data.vocabulary={tmp_path}"]
    (tmp_path / "loads.py").write_text(SCENES.format(root=str(ROOT), overrides=[[], files], readers=READERS))
    done = run_script(ROOT, str(tmp_path / "loads.py"))
    assert done.returncode == 0, done.stderr
    assert [line.split() for line in done.stdout.splitlines()] == [[], ["tsv", "bert_tokenizer"]]
