"""Broken pictures, captions and shards, from the tar file to the end of a training run."""

import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from runs import lines, logged, row_config, trained
from tars import write_tar

from common.data import pairs as pairs_module
from common.data.batches import TrainingView
from common.data.loader import NoBatch
from common.data.order import SampleOrder
from common.data.pairs import image_transform, open_training_pairs
from common.data.scenes import SceneDataset
from common.data.tar_index import index_shard
from common.data.text import build_tokenizer
from common.evaluation.protocol import evaluation_text
from common.run.checkpoint import named_checkpoint
from common.run.evaluation import evaluate_checkpoint
from common.run.log import read_log
from oblique_topology.evaluate import MODELS

FOLDER = Path(__file__).resolve().parents[1] / "oblique_topology"
NUM_TRAIN = 80  # five batches of 16: an epoch meets every sample
FEW = (
    "data.source=shards", "data.min_word_count=1", "optim.steps=7", "run.log_every=1", "run.evaluate_every=0",
    "run.save_every=0",
)  # fmt: skip


def scene(index, split="train"):
    """Members of one good sample: a PNG where the index is odd, else a JPEG."""
    sample = SceneDataset(split=split, size=NUM_TRAIN, image_size=32)[index]
    extension, kind = ("png", "PNG") if index % 2 else ("jpg", "JPEG")
    picture = io.BytesIO()
    Image.fromarray(np.asarray(sample["image"])).save(picture, kind)
    content = {"image_id": f"{split}{index}", "captions": sample["captions"]}
    return {extension: picture.getvalue(), "json": json.dumps(content).encode()}


GOOD = {f"k{index:03d}": scene(index) for index in range(NUM_TRAIN)}
GOOD_TEST = {f"t{index:03d}": scene(index, "val") for index in range(12)}
FAULTS = {  # key -> what replaces a member, and what the log says about it
    "k004": (
        {"jpg": b"<html>404 not found</html>"},
        "image cannot be decoded: no JPEG, PNG or WebP, it starts with b'<html>404",
    ),
    "k010": ({"jpg": GOOD["k010"]["jpg"][:-100]}, "image cannot be decoded: OSError, image file is truncated"),
    "k021": ({"json": b'{"captions": ["a red square", "  "]}'}, "empty caption: '  '"),
    "k030": ({"json": b'{"captions": ["a red square", 7]}'}, "caption is not a string: int"),
    "k041": ({"json": b'{"captions": ["a red sq'}, "json cannot be decoded"),
}


def with_faults(*keys):
    return {key: members | (FAULTS[key][0] if key in keys else {}) for key, members in GOOD.items()}


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A folder of good shards; tests spoil them."""
    monkeypatch.setattr(pairs_module, "outputs", lambda: tmp_path / "outputs")  # the index of the shards lies below it
    folder = tmp_path / "data"
    folder.mkdir()
    write_tar(folder / "train.tar", GOOD)
    write_tar(folder / "test.tar", GOOD_TEST)
    return folder


def config_of(root, *overrides):
    return row_config("oblique_topology", "table2_clip", *FEW, f"data.root={root}", *overrides)


def run(root, *overrides, name="run", resume=False):
    return trained("oblique_topology", config_of(root, *overrides), root.parent / name, resume)


def broken(files):
    """(step, line) of every broken sample in the log."""
    records = lines(files, "broken")
    assert all(record["count"] == len(record["samples"]) for record in records)
    return [(record["step"], line) for record in records for line in record["samples"]]


def retrieval(files, role="test"):
    return json.loads(files.evaluation.read_text())["evaluations"][role]


def test_a_few_broken_samples_are_replaced_and_each_is_named_with_its_reason_in_workers_too(data, monkeypatch):
    samples = {key.replace("k004", "k\udcfc4"): members for key, members in with_faults(*FAULTS).items()}  # Latin-1 ü
    shard = write_tar(data / "train.tar", samples)
    files = run(data, "data.max_broken_share=0.2")
    assert np.isfinite(logged(files)).tolist() == [True] * 7
    first_epoch = [line for step, line in broken(files) if step <= 5]
    reasons = {key.replace("k004", r"k\udcfc4"): reason for key, (_, reason) in FAULTS.items()}
    for key, reason in reasons.items():
        assert any(line.startswith(f"{shard} [{key}]: {reason}") for line in first_epoch), key
    assert {line.partition("[")[2].partition("]")[0] for _, line in broken(files)} == reasons.keys()
    assert retrieval(files)["protocol"]["num_images"] == 12
    monkeypatch.setattr("common.run.training.evaluate_and_save", lambda *arguments: None)
    in_workers = run(data, "data.max_broken_share=0.2", "run.num_workers=2", name="workers")
    assert (broken(in_workers), logged(in_workers)) == (broken(files), logged(files))


def test_too_many_broken_samples_stop_the_run_with_one_message(data):
    shard = write_tar(data / "train.tar", with_faults(*FAULTS))
    with pytest.raises(NoBatch, match="saved at step 6 of 7") as error:
        run(data, "data.max_broken_share=0.005")
    count, seen = map(int, re.match(r"(\d+) of (\d+) samples are broken", str(error.value)).groups())
    assert 100 <= seen < 7 * 16 + count
    assert str(error.value).count(f"{shard} [k") == 5
    assert not (data.parent / "run" / "evaluation.json").exists()


def test_a_set_without_one_good_picture_is_named_not_searched_for_ever(data):
    write_tar(data / "train.tar", {key: {"jpg": b"no picture", "json": scene["json"]} for key, scene in GOOD.items()})
    with pytest.raises(NoBatch) as error:
        run(data, "run.num_workers=1")
    assert str(error.value).startswith(f"20 samples in a row are broken; the last: {data / 'train.tar'} [k")
    assert str(error.value).endswith("no JPEG, PNG or WebP, it starts with b'no picture'")


def test_a_cut_shard_trains_on_its_complete_samples_and_the_log_opens_with_the_cut(data, capsys, not_evaluated):
    shard = write_tar(data / "train-1.tar", {f"second_{key}": members for key, members in GOOD.items()})
    in_a_picture = index_shard(shard).rows["image"][20].as_py()[0] + 100
    shard.write_bytes(shard.read_bytes()[:in_a_picture])
    overrides = ("data.train=train{,-1}.tar", "data.max_broken_share=0.02", "run.save_every=3")
    assert len(open_training_pairs(config_of(data, *overrides).data, 0)) == NUM_TRAIN + 20
    files = run(data, *overrides)
    assert np.isfinite(logged(files)).all()
    ((step, line),) = broken(files)
    assert (step, read_log(files.log)[0]["event"]) == (0, "broken")
    assert line.startswith(f"{shard} [second_k020]: shard is cut: second_k020.jpg has 100 of ")
    assert f"samples that cannot be used: 1, named in log.jsonl; the first: {line}" in capsys.readouterr().err

    before = logged(files)
    shutil.rmtree(files.checkpoints / "step-00000007")
    run(data, *overrides, resume=True)
    assert (logged(files), broken(files)) == (before, [(0, line)])  # named once, not once per start


def test_broken_test_photographs_are_left_out_with_their_captions_and_counted(data):
    faults = {"t002": {"jpg": GOOD_TEST["t002"]["jpg"][:-100]}, "t005": {"png": b""},
              "t007": {"json": b'{"captions": ["lost \\ud83d"]}'}}  # fmt: skip
    cut = write_tar(data / "test.tar", {key: members | faults.get(key, {}) for key, members in GOOD_TEST.items()})
    cut.write_bytes(cut.read_bytes()[: index_shard(cut).rows["image"][11].as_py()[0] + 100])
    kept = {key: members for key, members in GOOD_TEST.items() if key not in (*faults, "t011")}
    write_tar(data / "kept.tar", kept)
    files = run(data, "data.second_test=kept.tar", "optim.steps=2")
    assert [(step, line.partition(": ")[0]) for step, line in broken(files)] == [(0, f"{cut} [t011]")]
    with_broken, without = retrieval(files), retrieval(files, "second_test")
    assert with_broken["metrics"] == without["metrics"]
    captions = sum(len(json.loads(members["json"])["captions"]) for members in kept.values())
    for content, lost in ((with_broken, 4), (without, 0)):
        protocol = content["protocol"]
        assert (protocol["num_images"], protocol["num_texts"], protocol["unreadable_images"]) == (8, captions, lost)
        assert protocol["captions_hash"] == without["protocol"]["captions_hash"]
    shown = [line for line in evaluation_text(json.loads(files.evaluation.read_text())).splitlines() if "R@1" in line]
    assert [line.endswith("; left out: 4 broken or surplus files or rows") for line in shown] == [True, False]


def test_a_replaced_sample_leaves_all_others_where_they_were(data):
    def batches(key=None):
        write_tar(data / "train.tar", with_faults(key))
        config = config_of(data)
        pairs = open_training_pairs(config.data, 0)
        order = SampleOrder(len(pairs), 16, seed=0)
        tokenizer = build_tokenizer(config.data, pairs)
        view = TrainingView(pairs, order, image_transform(config.data), tokenizer, config.data.context_length)
        return [view.__getitems__(list(range(first, first + 16))) for first in range(0, 2 * NUM_TRAIN, 16)]

    changed = 0
    for whole, replaced in zip(batches(), batches("k010")):
        assert [sample.key for sample in replaced.broken] == ["k010"] * whole.image_ids.count("train10")
        kept = [image_id != "train10" for image_id in whole.image_ids]
        for one, other in ((whole.images, replaced.images), (whole.token_ids, replaced.token_ids)):
            assert (one == other).flatten(1).all(dim=1).tolist() == kept
        assert [one == other for one, other in zip(whole.image_ids, replaced.image_ids)] == kept
        changed += kept.count(False)
    assert changed == 2  # once in each of two epochs


def test_names_that_are_no_utf8_train_resume_and_evaluate_as_any_other(data, monkeypatch):
    plain = run(data, "run.save_every=3", "run.evaluate_every=3", "data.val=test.tar")
    old = data.with_name("\udcdcbung")  # Latin-1
    data.rename(old)
    (old / "train.tar").unlink()
    write_tar(old / "train-\udcfc.tar", {f"\udce4{key}": members for key, members in GOOD.items()})
    (old / "test.tar").rename(old / "test-\udcfc.tar")
    settings = "run.save_every=3", "run.evaluate_every=3", "data.val=test-\udcfc.tar"
    files = run(old, *settings, name="l\udce4uft")
    assert logged(files) == logged(plain)
    assert retrieval(files)["metrics"] == retrieval(plain)["metrics"]
    assert retrieval(files)["protocol"]["data"] == r"test-\udcfc"
    assert yaml.safe_load(files.config.read_text())["data"]["root"] == str(old)

    shutil.rmtree(files.checkpoints / "step-00000007")
    monkeypatch.setattr("common.run.training.evaluate_and_save", lambda *arguments: None)
    run(old, *settings, name="l\udce4uft", resume=True)
    assert logged(files) == logged(plain)
    checkpoint = named_checkpoint(files.folder)
    assert checkpoint.state["config"]["data"]["root"] == str(old)
    content, _ = evaluate_checkpoint(MODELS, checkpoint, [f"data.root={old}"])
    assert content["evaluations"]["test"]["metrics"] == retrieval(plain)["metrics"]


def test_a_missing_test_set_is_known_before_training(data):
    (data / "test.tar").unlink()
    with pytest.raises(FileNotFoundError, match=r"no shards for pattern '\*test\*\.tar'"):
        run(data)
    assert not (data.parent / "run" / "log.jsonl").exists()
