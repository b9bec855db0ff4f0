"""Published checkpoints: tiny random CLIP and FLAVA on disk, against the library's own forward pass and processors."""

import json
import sys
from functools import partial

import pytest
import torch
import transformers
from PIL import Image
from refusals import refused
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from common.base.config import ConfigError, load_config
from common.base.settings import RunConfig
from common.data.scenes import SceneDataset
from contrastive_basics import public
from contrastive_basics.config import Config
from contrastive_basics.public import open_public, weights_fingerprint

WORDS = ["a", "red", "blue", "circle", "square", "photo", "of", "large", "small"]
CAPTIONS = ["a red circle", "a large blue square", "a " + "small " * 90 + "square"]  # the last one is too long
DATA = ["data.num_test=12", "data.image_size=24"]


def write_tokenizer(folder, bert):
    """A word tokenizer in the form that transformers reads, opened and ended as BERT's or CLIP's, lower case."""
    opening, ending, pad = ("[CLS]", "[SEP]", "[PAD]") if bert else ("<|startoftext|>", "<|endoftext|>", None)
    names = ["[PAD]", "[UNK]", *WORDS, opening, ending]
    words = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    ids = [(opening, names.index(opening)), (ending, names.index(ending))]
    words.post_processor = processors.TemplateProcessing(single=f"{opening} $A {ending}", special_tokens=ids)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token=pad or ending, bos_token=opening, eos_token=ending
    )  # CLIP pads with its end token
    tokenizer.save_pretrained(folder)
    return len(names), names.index(ending)


def write_clip(folder):
    size, end = write_tokenizer(folder, bert=False)
    sides = {"intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
    config = transformers.CLIPConfig(
        text_config={**sides, "vocab_size": size, "max_position_embeddings": 77, "eos_token_id": end},
        vision_config={**sides, "image_size": 32, "patch_size": 16},
        projection_dim=12,
    )
    transformers.CLIPModel(config).save_pretrained(folder)
    side = {"height": 32, "width": 32}
    transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=side).save_pretrained(folder)


def write_flava(folder):
    size, _ = write_tokenizer(folder, bert=True)
    sides = {"intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
    config = transformers.FlavaConfig(
        text_config={**sides, "vocab_size": size, "max_position_embeddings": 100},
        image_config={**sides, "image_size": 32, "patch_size": 16},
        multimodal_config=sides,
        projection_dim=12,
        hidden_size=16,
    )
    transformers.FlavaModel(config).save_pretrained(folder)
    side = {"height": 32, "width": 32}
    transformers.FlavaImageProcessor(size=side, crop_size=side).save_pretrained(folder)


WRITERS = {"clip": write_clip, "flava": write_flava}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folders = {}
    for name, write in WRITERS.items():
        folders[name] = tmp_path_factory.mktemp(name)
        torch.manual_seed(1)
        write(folders[name])
    return folders


@pytest.fixture(scope="module")
def pictures():
    generator = torch.Generator().manual_seed(0)
    sizes = ((40, 60), (72, 36), (32, 32))  # even margins: odd ones are cut a pixel apart, see pixels_of_processor
    return [
        Image.fromarray(torch.randint(0, 255, (*size, 3), generator=generator, dtype=torch.uint8).numpy())
        for size in sizes
    ]


def opened(folder):
    return open_public(str(folder), RunConfig(evaluation_batch_size=2), torch.device("cpu"))


def as_set(pictures):
    return [{"image": picture} for picture in pictures]


@pytest.mark.parametrize("name", list(WRITERS))
def test_text_embeddings_are_those_of_the_librarys_forward_pass(checkpoints, name):
    folder = checkpoints[name]
    encoder = opened(folder)
    assert next(encoder.model.parameters()).dtype == torch.float32
    theirs = encoder.model.model
    inputs = transformers.AutoTokenizer.from_pretrained(folder)(
        CAPTIONS, padding="max_length", truncation=True, max_length=77, return_tensors="pt"
    )
    assert inputs["input_ids"].shape == (3, 77)
    with torch.no_grad():
        hidden = theirs.text_model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        if name == "clip":
            features = theirs.text_projection(hidden.pooler_output)
        else:
            features = theirs.text_projection(hidden.last_hidden_state[:, 0])
    expected = features / features.norm(dim=1, keepdim=True)
    torch.testing.assert_close(encoder.texts(CAPTIONS), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", list(WRITERS))
def test_image_embeddings_are_those_of_the_librarys_processor_and_forward_pass(checkpoints, name, pictures):
    folder = checkpoints[name]
    encoder = opened(folder)
    theirs = encoder.model.model
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    pixels = processor(pictures, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        if name == "clip":
            features = theirs.visual_projection(theirs.vision_model(pixels).pooler_output)
        else:
            features = theirs.image_projection(theirs.image_model(pixels).last_hidden_state[:, 0])
    expected = features / features.norm(dim=1, keepdim=True)
    embeddings, readable = encoder.images(as_set(pictures))
    assert readable.all()
    torch.testing.assert_close(embeddings, expected, rtol=1e-4, atol=1e-5)


def evaluated(folder, output, *extra):
    arguments = ["--checkpoint", str(folder), "--output", str(output), *extra, *DATA]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["public.py", *arguments])
        public.main()
    return json.loads(output.read_text())


@pytest.mark.filterwarnings("ignore:scenes")
@pytest.mark.parametrize("name", list(WRITERS))
def test_a_checkpoint_is_ranked_on_any_test_set_with_its_protocol(checkpoints, name, tmp_path):
    prefix = {"clip": "a photo of ", "flava": ""}[name]
    plain = evaluated(checkpoints[name], tmp_path / "found.json", "--prefix", prefix)
    assert set(plain["evaluations"]) == {"test", "second_test"}
    protocol = plain["evaluations"]["test"]["protocol"]
    assert (protocol["num_images"], protocol["num_texts"], protocol["caption_prefix"]) == (12, 60, prefix)
    mode = {"clip": "crop", "flava": "squeeze"}[name]
    assert (protocol["preprocessing"]["size"], protocol["preprocessing"]["mode"]) == (32, mode)
    assert str(tmp_path.parent) not in json.dumps(plain)
    hits = json.loads((tmp_path / "found_hits.json").read_text())["test"]["t2i_recall_at_1"]
    expected = plain["evaluations"]["test"]["metrics"]["t2i_recall_at_1"]
    assert sum(map(sum, hits)) / sum(map(len, hits)) == pytest.approx(expected)


def test_the_prefix_reaches_the_model(checkpoints):
    encoder = opened(checkpoints["clip"])
    config = load_config(Config, [], DATA)
    pairs = SceneDataset(split="test", size=12, image_size=24)
    seen = []
    texts = type(encoder).texts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(encoder), "texts", lambda self, given: seen.append(given) or texts(self, given))
        public.evaluate_public(encoder, config, "a photo of ")
    assert seen[0][:2] == [f"a photo of {caption}" for caption in pairs.captions(0)[:2]]


def test_another_kind_of_model_and_a_missing_one_are_refused_by_name(checkpoints, tmp_path):
    vit = tmp_path / "vit"
    transformers.ViTConfig(hidden_size=16, num_attention_heads=2).save_pretrained(vit)
    (tmp_path / "empty").mkdir()
    refused(
        (r"is a vit; expected: clip, flava \(BEiT-3", lambda: opened(vit)),
        (r"empty.*cannot read it", lambda: opened(tmp_path / "empty")),
        (r"nowhere/at-all.*cannot read it", lambda: opened("nowhere/at-all")),
    )


def test_settings_that_published_weights_bring_themselves_are_refused(checkpoints, monkeypatch):
    for asked in ("model.patch_size=7", "optim.steps=3", "method.loss=late_interaction"):
        monkeypatch.setattr("sys.argv", ["public.py", "--checkpoint", str(checkpoints["clip"]), asked])
        with pytest.raises(ConfigError, match=rf"{asked}: published weights bring their own; expected: data\.\*"):
            public.main()


def test_the_fingerprint_of_a_folder_follows_its_content(checkpoints, tmp_path):
    write = partial(write_clip, tmp_path)
    torch.manual_seed(1)
    write()
    assert weights_fingerprint(str(tmp_path)) == weights_fingerprint(str(checkpoints["clip"]))
    weights = tmp_path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    assert weights_fingerprint(str(tmp_path)) != weights_fingerprint(str(checkpoints["clip"]))
