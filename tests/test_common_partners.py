"""Wrong partners of training pairs: counted by brute force, the same for two processes and after a resume."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from refusals import refused

from common.base.settings import DataConfig, MixedSet
from common.data.batches import TrainingView
from common.data.broken import BrokenSample
from common.data.order import BatchPositions, SampleOrder, order_of
from common.data.pairs import image_transform
from common.data.partners import Partners
from common.data.tokenizer import WordTokenizer
from common.run.folder import run_key
from oblique_topology.config import Config

SIZE, BATCH, STEPS = 50, 10, 15  # three epochs


class Numbered:
    """Pairs whose captions state the number of their image and their own."""

    name, fingerprint = "numbered", "0" * 16

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        picture = np.zeros((8, 8, 3), dtype=np.uint8)
        return {"image": picture, "captions": self.captions(index), "image_id": str(index)}

    def captions(self, index):
        return [f"p{index} c{number}" for number in range(3)]


def texts_of(share, drawn="every_batch", first=0, num_processes=1):
    """(number of the image, text) of every pair from a step on, a list for each step."""
    pairs, data = Numbered(), DataConfig(image_size=8)
    words = [*(f"p{number}" for number in range(SIZE)), "c0", "c1", "c2"]
    tokenizer = WordTokenizer.from_words(words)
    order = order_of(pairs, BATCH, seed=3)
    view = TrainingView(pairs, order, image_transform(data), tokenizer, 4, False, "none", share, drawn)
    names = {int(tokenizer.encode([word], 4)[0, 1]): word for word in words}
    shares = [list(BatchPositions(order, first, STEPS, process, num_processes)) for process in range(num_processes)]
    return [
        [
            (int(image_id), tuple(names[int(word)] for word in row[1:3]))
            for batch in map(view.__getitems__, of_step)
            for image_id, row in zip(batch.image_ids, batch.token_ids)
        ]
        for of_step in zip(*shares)
    ]


def wrong(step):
    return sorted((image, int(text[0][1:])) for image, text in step if text[0] != f"p{image}")


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.5, 5), (1.0, 10)])
def test_in_every_batch_this_share_of_the_images_has_the_caption_of_another_one(share, count):
    clean, noisy = texts_of(0.0), texts_of(share)
    for before, after in zip(clean, noisy):
        assert [image for image, _ in before] == [image for image, _ in after]
        # the captions of the batch change places and are the same ones
        assert Counter(text for _, text in before) == Counter(text for _, text in after)
        assert len(wrong(after)) == count
        changed = [one != other for one, other in zip(before, after)]
        assert sum(changed) == count
    if share == 0.5:
        assert len({tuple(wrong(step)) for step in noisy}) == STEPS
        # by place, too: no batch repeats the exchange of the one before
        places = [tuple(one != other for one, other in zip(*steps)) for steps in zip(clean, noisy)]
        assert len(set(places)) > STEPS / 2
        chosen = Counter(image for step in noisy for image, _ in wrong(step))
        assert len(chosen) > 0.8 * SIZE  # 1 - 0.5^3 on average


def test_drawn_once_an_epoch_repeats_the_wrong_pairs_of_the_one_before():
    steps = texts_of(0.3, "once")
    per_epoch = SIZE // BATCH
    epochs = [sorted(pair for step in steps[at : at + per_epoch] for pair in wrong(step)) for at in range(0, 15, 5)]
    assert len(epochs[0]) == round(0.3 * SIZE)
    assert epochs[0] == epochs[1] == epochs[2]
    images, sources = zip(*epochs[0])
    assert sorted(images) == sorted(sources)


@pytest.mark.parametrize("drawn", ["every_batch", "once"])
def test_two_processes_and_a_later_start_draw_the_same_partners(drawn):
    whole = texts_of(0.5, drawn)
    assert texts_of(0.5, drawn, num_processes=2) == whole
    assert texts_of(0.5, drawn, first=7) == whole[7:]


def test_a_stream_and_a_mixture_have_no_partners_and_say_so():
    mixed = (MixedSet(), MixedSet())
    refused(
        ("data.partner_noise = 0.5 with data.mixture", lambda: DataConfig(partner_noise=0.5, mixture=mixed)),
        ("expected: 0, or one training set", lambda: DataConfig("hugging_face", partner_noise=0.5, stream_buffer=8)),
    )


def test_runs_without_noise_keep_their_key_and_noise_makes_another_run():
    keys = {
        run_key("oblique_topology", Config(data=data), "0")
        for data in (DataConfig(partner_noise=0.2), DataConfig(partner_noise=0.2, partners_drawn="once"), DataConfig())
    }
    assert len(keys) == 3
    never = replace(DataConfig(), partners_drawn="once")
    assert run_key("oblique_topology", Config(data=never), "0") in keys


def test_one_wrong_pair_needs_another_to_exchange_with():
    order = SampleOrder(SIZE, BATCH, 0)
    assert torch.equal(torch.tensor(Partners(order, 0.1).of(np.arange(10))[1]), torch.arange(10))


def test_a_partner_without_a_usable_caption_is_replaced_and_counted(monkeypatch):
    def captions(self, index):
        if index == 7:
            raise BrokenSample("numbered", "7", "no caption")
        return [f"p{index} c0"]

    monkeypatch.setattr(Numbered, "captions", captions)
    monkeypatch.setattr(Numbered, "__getitem__", lambda self, index: {
        "image": np.zeros((8, 8, 3), dtype=np.uint8), "captions": [f"p{index} c0"], "image_id": str(index)
    })  # fmt: skip
    assert all(text[0] != "p7" for step in texts_of(1.0) for _, text in step)
