"""common/evaluation/embed.py: modules whose output depends on their mode, and the text that goes to the tokenizer."""

import struct
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from torch import nn
from toys import ListedPictures, encoder_of

from common.data.broken import BrokenSample, TooManyBroken
from common.data.decoding import read_picture
from common.data.scenes import SceneDataset
from common.data.tokenizer import WordTokenizer
from common.evaluation.embed import evaluate_retrieval, evaluation_mode

TOKENIZER = WordTokenizer.from_words([f"word{number}" for number in range(8)])


class Noisy(nn.Module):
    """Pixels or ids through dropout and BatchNorm, both of which act otherwise in train mode."""

    def __init__(self, inputs):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 8))

    def forward(self, batch):
        return self.layers(batch.flatten(1).float())


def pictures(rows=range(8), **more):
    """Random pictures of 8 x 8, with a caption each."""
    draws = [torch.Generator().manual_seed(row) for row in rows]
    pixels = [torch.randint(256, (8, 8, 3), generator=draw, dtype=torch.uint8).numpy() for draw in draws]
    return ListedPictures(pixels, **{"captions": lambda row: [f"word{rows[row]}"]} | more)


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    return encoder_of(Noisy(8 * 8 * 3), Noisy(5), TOKENIZER)


def test_embeddings_do_not_depend_on_the_mode_and_leave_the_model_as_it_was(encoder):
    model, texts = encoder.model, [f"word{number}" for number in range(8)]
    model.eval()
    expected = encoder.images(pictures())[0], encoder.texts(texts), evaluate_retrieval(encoder, pictures()).metrics
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.train()
    model.text_tower.layers[1].eval()  # one that the user froze
    modes = [module.training for module in model.modules()]
    actual = encoder.images(pictures())[0], encoder.texts(texts), evaluate_retrieval(encoder, pictures()).metrics
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())  # BatchNorm's averages
    assert not torch.equal(model.encode_text(TOKENIZER.encode(texts, 5)), expected[1])  # the test would see the mode


def test_a_text_that_comes_again_goes_through_the_tower_once(encoder):
    texts = [f"word{number}" for number in (3, 1, 3, 2, 5, 1, 3)]
    one_by_one = torch.cat([encoder.texts([text]) for text in texts])
    lengths = []
    encoder.model.text_tower.register_forward_pre_hook(lambda _, inputs: lengths.append(len(inputs[0])))
    actual = encoder.texts(texts)
    assert sum(lengths) == 4
    torch.testing.assert_close(actual, one_by_one)
    assert torch.equal(actual[[0, 2, 1]], actual[[6, 0, 5]])


def test_pictures_of_scenes_are_embedded_without_their_captions(monkeypatch):
    scenes = SceneDataset("test", size=8, image_size=16)
    encoder = encoder_of(Noisy(16 * 16 * 3), Noisy(5), TOKENIZER, size=16)
    expected = encoder.images([{"image": scenes[index]["image"]} for index in range(8)])[0]
    monkeypatch.setattr(SceneDataset, "captions", None)
    assert torch.equal(encoder.images(scenes)[0], expected)


def test_what_is_left_out_is_named_and_half_a_set_is_no_test_set(encoder):
    at_open = {"broken_at_open": (BrokenSample("rows.tsv", "row 9", "missing image"),)}
    with pytest.warns(UserWarning, match="left out") as warned:
        _, readable = encoder.images(pictures(broken=range(5), **at_open))
    assert readable.tolist() == [False] * 5 + [True] * 3
    cut, opened = (str(warning.message) for warning in warned)
    assert cut.startswith("pictures: 5 of 8 pictures cannot be read and are left out: pictures [0]: torn; pictures [1]")
    assert opened == "pictures: left out when opened, 1 in all: rows.tsv [row 9]: missing image"
    six = pictures(broken=range(6), **at_open)
    refused(("6 of 8 samples are broken", lambda: encoder.images(six)), error=TooManyBroken)
    assert not replace(encoder, max_broken_share=1.0).images(six)[1][:6].any()


# EXIF's numbers -> how the stored rows and columns become the picture that was taken
ORIENTATIONS = {
    1: lambda stored: stored,
    2: np.fliplr,
    3: lambda stored: np.rot90(stored, 2),
    4: np.flipud,
    5: lambda stored: stored.swapaxes(0, 1),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: np.rot90(stored, 2).swapaxes(0, 1),
    8: np.rot90,
}


@pytest.mark.parametrize(("orientation", "turned"), ORIENTATIONS.items())
def test_pictures_are_embedded_upright_as_files_and_opened(encoder, tmp_path, orientation, turned):
    stored = np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(stored).save(file := tmp_path / "photo.png", exif=exif)
    expected = encoder.pictures([Image.fromarray(np.ascontiguousarray(turned(stored)))])
    with Image.open(file) as opened:
        torch.testing.assert_close(encoder.pictures([opened, file, str(file)]), expected.expand(3, -1))
    assert np.array_equal(read_picture(file), turned(stored))


def test_one_text_is_no_list_of_letters(encoder):
    refused(*((r"is 'word1'; expected a list", partial(embed, "word1")) for embed in (encoder.texts, encoder.pictures)))


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_grey_of_sixteen_bits_is_the_same_as_a_file_and_opened(encoder, tmp_path, suffix):
    stored = np.linspace(0, 65_535, 96, dtype=np.uint16).reshape(8, 12)
    exif = Image.Exif()
    exif[0x0112] = 6
    # packed: Pillow reads a turned TIFF that is not, and lies in a file, with width and height exchanged
    Image.fromarray(stored).save(file := tmp_path / f"photo.{suffix}", exif=exif, compression="tiff_lzw")
    assert np.array_equal(np.asarray(read_picture(file))[..., 0], np.rot90((stored >> 8).astype(np.uint8), -1))
    with Image.open(file) as opened:
        torch.testing.assert_close(*encoder.pictures([opened, file]).split(1))


@pytest.mark.parametrize(("exif", "turned"), [(b"Exif\0\0no TIFF", False), ("torn", True)])
def test_damaged_exif_data_cost_no_picture(tmp_path, exif, turned):
    if exif == "torn":  # a turn that can be read, beside an entry that cannot be written again
        whole = Image.Exif()
        whole[0x0112], whole[0x010F] = 6, "camera"
        exif = whole.tobytes()
        for order in "<>":  # of the bytes, which Pillow chooses: the type of the second entry, text, becomes a ratio
            exif = exif.replace(struct.pack(f"{order}HH", 0x010F, 2), struct.pack(f"{order}HH", 0x010F, 5))
        assert exif != whole.tobytes()
    pixels = np.repeat(np.arange(0, 240, 20, dtype=np.uint8)[None, :, None], 8, axis=0).repeat(3, axis=2)
    Image.fromarray(pixels).save(file := tmp_path / "photo.jpg", quality=100, exif=exif)
    expected = np.rot90(pixels, -1) if turned else pixels
    np.testing.assert_allclose(np.asarray(read_picture(file), int), expected, atol=3)


def test_what_is_no_picture_is_named(encoder, tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(whole := tmp_path / "whole.jpg")
    cut = tmp_path / "cut.jpg"
    cut.write_bytes(whole.read_bytes()[:-1000])
    nowhere = tmp_path / "nowhere.jpg"
    two_of_three = r"2 of 3 pictures cannot be read; the first: .*nowhere\.jpg: .*No such file"
    no_picture = r"the first: pictures\[1\]: a NoneType; expected a path, or a picture that Pillow"
    refused(
        (two_of_three, lambda: encoder.pictures([whole, nowhere, cut])),
        (r"the first: pictures\[0\]: image cannot be decoded: OSError", lambda: encoder.pictures([Image.open(cut)])),
        (no_picture, lambda: encoder.pictures(iter([whole, None]))),
        ("pictures is empty; expected at least one", lambda: encoder.pictures([])),
    )


def test_the_mode_comes_back_after_an_error(encoder):
    encoder.model.train()
    with pytest.raises(ZeroDivisionError), evaluation_mode(encoder.model):
        _ = 1 / 0
    assert all(module.training for module in encoder.model.modules())


def test_embedding_that_takes_long_shows_a_bar(encoder, monkeypatch, capsys):
    encoder.images(pictures())
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("common.evaluation.embed.BAR_AFTER", 0.0)
    encoder.images(pictures())
    assert "pictures:   0%" in capsys.readouterr().err


def part(rows):
    """Every second picture of these has two captions."""
    return pictures(rows, captions=lambda row: [f"word{rows[row]}", f"word{rows[row]} word0"][: 1 + row % 2])


def test_galleries_are_the_mean_of_parts_ranked_by_themselves(encoder):
    whole = evaluate_retrieval(encoder, part(range(8)), gallery=4)
    parts = [evaluate_retrieval(encoder, part(range(start, start + 4))) for start in (0, 4)]
    for key, value in whole.metrics.items():
        assert value == pytest.approx(sum(part.metrics[key] for part in parts) / 2, abs=1e-12)
    assert whole.hits == {key: parts[0].hits[key] + parts[1].hits[key] for key in whole.hits}
    assert whole.chance["i2t_recall_at_1"] == parts[0].chance["i2t_recall_at_1"]  # six captions each
    stated = [whole.protocol[key] for key in ("candidates", "num_images", "num_texts")]
    assert stated == ["own gallery of 4 images, mean over 2 folds", 4, 6]
    assert evaluate_retrieval(encoder, part(range(8)), gallery=9) == evaluate_retrieval(encoder, part(range(8)))
    no_multiple = "pictures: 8 readable pictures are no multiple of the gallery of 3"
    refused((no_multiple, lambda: evaluate_retrieval(encoder, part(range(8)), gallery=3)))
