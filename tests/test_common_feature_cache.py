"""common/data/feature_cache.py: features computed once are those computed anew, whatever interrupts or breaks."""

import ctypes
import json
import pickle
import resource
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from processes import in_processes
from refusals import refused

from common.data.broken import BrokenSample
from common.data.feature_cache import FeatureCache, _keep_freed_memory
from common.data.mixture import Mixture
from common.data.order import seed_of
from common.data.scenes import SceneDataset
from common.data.transforms import ImageTransform
from common.distributed import rank, world_size

SIZE = 16
TRANSFORM = ImageTransform(SIZE, crop_scale=(0.4, 1.0))


class Pictures(SceneDataset):
    """Scenes, some of which cannot be read; counts how often a picture is drawn."""

    broken = (2, 7)

    def __init__(self, size=10):
        super().__init__("test", size, 24)
        self.drawn = []

    @property
    def fingerprint(self):
        return f"{self.size} pictures"

    def __getitem__(self, index):
        if index in self.broken:
            raise BrokenSample("scenes", str(index), "torn")
        self.drawn.append(index)
        return super().__getitem__(index)


def pooled(pixels):
    """Stands for a network: (batch, 3, 16, 16) uint8 -> (batch, 3, 2, 2)."""
    return torch.nn.functional.avg_pool2d(pixels.float(), 8)


def cache(folder, compute=pooled, **options):
    return FeatureCache(folder, "net", compute, (3, 2, 2), batch_size=4, **options)


def check(folder, *indices, pictures=None):
    """The features of these pictures are those computed on the fly, whatever the folder holds."""
    rows, transform = cache(folder).of(pictures or Pictures(), TRANSFORM, training=False)
    for index in indices:
        torch.testing.assert_close(transform.eval(rows[index]["image"]), on_the_fly("centre", index), rtol=0, atol=0)


def stopped_after(chunks):
    """`pooled`, interrupted behind so many chunks of four."""
    calls = []

    def stops(pixels):
        calls.append(pixels)
        if len(calls) > chunks:
            raise KeyboardInterrupt
        return pooled(pixels)

    return stops


def on_the_fly(view, index):
    picture = SceneDataset("test", 10, 24)[index]["image"]
    pixels = TRANSFORM.train(picture, seed_of(index, view)) if isinstance(view, int) else TRANSFORM.eval(picture)
    return pooled((pixels.flip(-1) if view == "mirror" else pixels)[None])[0].half()


def test_views_are_those_computed_on_the_fly_and_computed_once(tmp_path):
    pictures, views = Pictures(), ("centre", "mirror", 0, 1)
    for _ in range(2):
        rows, transform = cache(tmp_path, views=views).of(pictures, TRANSFORM, training=True)
    good = [index for index in range(10) if index not in Pictures.broken]
    assert sorted(pictures.drawn) == sorted(good * len(views))
    for index in good:
        sample = rows[index]
        assert sample["captions"] == pictures.captions(index)
        assert sample["image_id"] == SceneDataset("test", 10, 24)[index]["image_id"]
        torch.testing.assert_close(transform.eval(sample["image"]), on_the_fly("centre", index), rtol=0, atol=0)
        seen = {tuple(transform.train(sample["image"], seed).flatten().tolist()) for seed in range(60)}
        assert seen == {tuple(on_the_fly(view, index).flatten().tolist()) for view in views}
    refused(*(("torn", partial(rows.__getitem__, index)) for index in Pictures.broken), error=BrokenSample)
    assert (rows.name, rows.fingerprint, len(rows)) == (pictures.name, pictures.fingerprint, 10)


def test_other_weights_pictures_or_preprocessing_are_computed_again_and_another_crop_of_training_is_not(tmp_path):
    pictures = Pictures()
    cache(tmp_path).of(pictures, TRANSFORM, training=False)
    before = len(pictures.drawn)
    cache(tmp_path).of(pictures, ImageTransform(SIZE), training=True)
    assert len(pictures.drawn) == before
    FeatureCache(tmp_path, "other", pooled, (3, 2, 2)).of(pictures, TRANSFORM, training=False)
    cache(tmp_path).of(pictures, ImageTransform(SIZE, "squeeze"), training=False)
    cache(tmp_path).of(pictures, ImageTransform(SIZE, resize_with="torchvision"), training=False)
    cache(tmp_path).of(Pictures(9), TRANSFORM, training=False)
    assert len(pictures.drawn) == 4 * before
    for crop_scale in (None, (0.4, 0.5)):  # of crops, it does
        cache(tmp_path, views=(0,)).of(pictures, ImageTransform(SIZE, crop_scale=crop_scale), training=True)
    assert len(pictures.drawn) == 6 * before


def test_what_is_interrupted_goes_on_and_a_torn_end_is_written_again(tmp_path):
    pictures = Pictures()
    with pytest.raises(KeyboardInterrupt):
        cache(tmp_path, stopped_after(1)).of(pictures, TRANSFORM, training=False)
    assert not list(tmp_path.glob("*.npy"))
    (part,) = tmp_path.glob("*.part")
    part.write_bytes(part.read_bytes() + b"torn")
    pictures.drawn.clear()
    check(tmp_path, 0, 5, 9, pictures=pictures)
    assert min(pictures.drawn) == 4  # the first chunk is not computed again


def test_a_disk_that_fills_up_meanwhile_is_reported_with_the_file(tmp_path):
    full = Mock(side_effect=OSError(28, "No space left on device"))
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}.*\.part'"):
        cache(tmp_path, full).of(Pictures(), TRANSFORM, training=False)


@pytest.mark.parametrize("in_reader", [False, True])  # as a Hugging Face set
def test_a_set_that_training_decodes_at_a_fraction_has_its_own_features(tmp_path, in_reader):
    ranked, trained = Pictures(), Pictures()
    of_role = {"role": "train", "decode_size": 2 * SIZE}
    vars(trained).update({"reader": SimpleNamespace(**of_role)} if in_reader else of_role)
    for pictures in (ranked, trained, ranked, trained):
        cache(tmp_path).of(pictures, TRANSFORM, training=False)
    assert sorted(ranked.drawn) == sorted(trained.drawn) == sorted({*range(10)} - {*Pictures.broken})


@pytest.mark.parametrize(("chunks", "notes"), [(0, '{"rows": 8, "broken": {}}'), (2, '{"rows": 8, "bro')])
def test_notes_that_are_torn_or_of_more_rows_than_reached_the_disk_are_not_believed(tmp_path, chunks, notes):
    with pytest.raises(KeyboardInterrupt):
        cache(tmp_path, stopped_after(chunks)).of(Pictures(), TRANSFORM, training=False)
    (part,) = tmp_path.glob("*.part")
    part.with_suffix(".json").write_text(notes)
    check(tmp_path, 0, 5, 9)
    assert json.loads(part.with_suffix(".json").read_text())["rows"] == 10


def test_a_set_too_large_for_the_bound_or_the_disk_is_refused_before_anything_is_computed(tmp_path, monkeypatch):
    pictures = Pictures()
    small = cache(tmp_path, views=("centre", "mirror"), max_bytes=400)
    message = r"10 images x 2 views take 0.00 GB in [^ ]*; 0.00 GB are allowed \(model.image.stem.cache_gb\), "
    refused((message, lambda: small.of(pictures, TRANSFORM, training=True)))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=200))
    message = r"take 0.00 GB in [^ ]*; 20.00 GB are allowed \(model.image.stem.cache_gb\), 0.00 GB are free"
    refused((message, lambda: cache(tmp_path).of(pictures, TRANSFORM, training=False)))
    assert not pictures.drawn


def test_a_copy_for_another_process_takes_no_features_with_it(tmp_path):
    both = cache(tmp_path).of(Pictures(), TRANSFORM, training=False)
    both[1].eval(both[0][0]["image"])
    rows, transform = pickle.loads(pickle.dumps(both))
    assert len(pickle.dumps(both)) < 5000
    torch.testing.assert_close(transform.eval(rows[0]["image"]), on_the_fly("centre", 0), rtol=0, atol=0)


def of_one_process(folder):
    drawn = Pictures()
    rows, transform = cache(folder).of(drawn, TRANSFORM, training=False)
    return rank(), world_size(), len(drawn.drawn), np.asarray(transform.eval(rows[1]["image"])).tolist()


def test_of_two_processes_one_computes_and_both_read(tmp_path):
    first, second = in_processes(2, of_one_process, tmp_path)
    assert {first[2], second[2]} == {0, 8}
    assert first[3] == second[3] == on_the_fly("centre", 1).tolist()


def test_sets_of_a_mixture_are_kept_apart_and_a_stream_is_refused(tmp_path):
    mixture = Mixture([Pictures(), Pictures(8)], [1.0, 3.0])
    rows, transform = cache(tmp_path, views=("mirror",)).of(mixture, TRANSFORM, training=True)
    assert (rows.name, rows.fingerprint) == (mixture.name, mixture.fingerprint)
    for index in (0, 1, 9, 11):  # sample index // 2 of set index % 2
        features = transform.train(rows[index]["image"], 5)
        torch.testing.assert_close(features, on_the_fly("mirror", index // 2), rtol=0, atol=0)
        assert rows[index]["image_id"] == mixture[index]["image_id"]
    stream = Pictures()
    stream.forward_only = True
    message = "is a stream, .*; expected: data.stream_buffer=0, or .*stem.cache_gb=0"
    refused((message, lambda: cache(tmp_path).of(stream, TRANSFORM, training=True)))


def fresh_pages(keep):
    """Pages that a process is given while it fills and frees 64 MiB ten times."""
    if keep:
        _keep_freed_memory()
    for _ in range(10):  # the heap grows to what it needs
        torch.ones(2**24)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library than glibc")
def test_large_blocks_are_used_again_while_features_are_computed():
    (given,), (kept,) = in_processes(1, fresh_pages, False), in_processes(1, fresh_pages, True)
    assert given > 100  # 32 a block where pages are huge ones
    assert kept < given / 10


def test_a_picture_that_can_be_read_again_is_told_with_what_to_do(tmp_path):
    pictures = Pictures()
    rows, _ = cache(tmp_path).of(pictures, TRANSFORM, training=False)
    refused(("torn", lambda: rows[7]), error=BrokenSample)
    pictures.broken = (2,)
    with pytest.warns(UserWarning, match="can be read now; remove the file"):
        cache(tmp_path).of(pictures, TRANSFORM, training=False)
