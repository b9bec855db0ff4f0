"""Published checkpoints: tiny random CLIP and FLAVA on disk, against the library's own forward pass and processors."""

import json
import shutil

import pytest
import torch
import transformers
from PIL import Image
from refusals import refused
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from common.base.config import ConfigError, load_config
from common.base.settings import RunConfig
from common.data.scenes import SceneDataset
from common.evaluation.embed import Encoder
from contrastive_basics import public
from contrastive_basics.config import Config
from contrastive_basics.public import MODELS, open_public, weights_fingerprint

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


def write_model(folder, name):
    """A "clip" or "flava" of random weights, as transformers writes it."""
    torch.manual_seed(1)
    size, end = write_tokenizer(folder, bert=name == "flava")
    sides = {"intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
    pictures, square = sides | {"image_size": 32, "patch_size": 16}, {"height": 32, "width": 32}
    if name == "clip":
        text = sides | {"vocab_size": size, "max_position_embeddings": 77, "eos_token_id": end}
        config = transformers.CLIPConfig(text_config=text, vision_config=pictures, projection_dim=12)
        model, processor = transformers.CLIPModel, transformers.CLIPImageProcessor
    else:
        config = transformers.FlavaConfig(
            text_config=sides | {"vocab_size": size, "max_position_embeddings": 100}, image_config=pictures,
            multimodal_config=sides, projection_dim=12, hidden_size=16,
        )  # fmt: skip
        model, processor = transformers.FlavaModel, transformers.FlavaImageProcessor
    model(config).save_pretrained(folder)
    processor(size={"shortest_edge": 32} if name == "clip" else square, crop_size=square).save_pretrained(folder)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, folder in folders.items():
        write_model(folder, name)
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
    return open_public(str(folder), Config(run=RunConfig(evaluation_batch_size=2)), torch.device("cpu"))


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_embeddings_are_those_of_the_librarys_processors_and_forward_passes(checkpoints, name, pictures):
    folder, encoder = checkpoints[name], opened(checkpoints[name])
    theirs = encoder.model.model
    assert next(theirs.parameters()).dtype == torch.float32
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    pixels = processor(pictures, return_tensors="pt")["pixel_values"]
    words = transformers.AutoTokenizer.from_pretrained(folder)(
        CAPTIONS, padding="max_length", truncation=True, max_length=77, return_tensors="pt"
    )
    assert words["input_ids"].shape == (3, 77)
    read = theirs.text_model(input_ids=words["input_ids"], attention_mask=words["attention_mask"])
    if name == "clip":
        seen = theirs.visual_projection(theirs.vision_model(pixels).pooler_output)
        read = theirs.text_projection(read.pooler_output)
    else:
        seen = theirs.image_projection(theirs.image_model(pixels).last_hidden_state[:, 0])
        read = theirs.text_projection(read.last_hidden_state[:, 0])
    embeddings, readable = encoder.images([{"image": picture} for picture in pictures])
    assert readable.all()
    torch.testing.assert_close(embeddings, seen / seen.norm(dim=1, keepdim=True), rtol=1e-4, atol=1e-5)
    expected = read / read.norm(dim=1, keepdim=True)
    torch.testing.assert_close(encoder.texts(CAPTIONS), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:scenes")
@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_is_ranked_on_any_test_set_with_its_protocol(checkpoints, name, tmp_path, monkeypatch):
    prefix, mode = {"clip": ("a photo of ", "crop"), "flava": ("", "squeeze")}[name]
    arguments = "--checkpoint", str(checkpoints[name]), "--output", str(tmp_path / "found.json"), "--prefix", prefix
    monkeypatch.setattr("sys.argv", ["public.py", *arguments, *DATA, "data.gallery=6"])
    public.main()
    plain = json.loads((tmp_path / "found.json").read_text())
    assert set(plain["evaluations"]) == {"test", "second_test"}
    protocol = plain["evaluations"]["test"]["protocol"]
    assert (protocol["num_images"], protocol["num_texts"], protocol["caption_prefix"]) == (6, 30, prefix)
    assert (protocol["preprocessing"]["size"], protocol["preprocessing"]["mode"]) == (32, mode)
    assert str(tmp_path.parent) not in json.dumps(plain)
    hits = json.loads((tmp_path / "found_hits.json").read_text())["test"]["t2i_recall_at_1"]
    expected = plain["evaluations"]["test"]["metrics"]["t2i_recall_at_1"]
    assert sum(map(sum, hits)) / sum(map(len, hits)) == pytest.approx(expected)


def test_the_prefix_reaches_the_model(checkpoints, monkeypatch):
    seen, texts = [], Encoder.texts
    monkeypatch.setattr(Encoder, "texts", lambda self, given: seen.append(given) or texts(self, given))
    public.evaluate_public(opened(checkpoints["clip"]), load_config(Config, [], DATA), "a photo of ")
    captions = SceneDataset(split="test", size=12, image_size=24).captions(0)
    assert seen[0][:2] == [f"a photo of {caption}" for caption in captions[:2]]


def test_another_kind_of_model_and_a_missing_one_are_refused_by_name(checkpoints, tmp_path):
    vit = tmp_path / "vit"
    transformers.ViTConfig(hidden_size=16, num_attention_heads=2).save_pretrained(vit)
    (tmp_path / "empty").mkdir()
    refused(
        (r"is a vit; expected: clip, flava \(BEiT-3", lambda: opened(vit)),
        (r"empty.*cannot read it", lambda: opened(tmp_path / "empty")),
        (r"nowhere/at-all.*cannot read it", lambda: opened("nowhere/at-all")),
    )


@pytest.mark.parametrize("name", MODELS)
def test_weights_that_do_not_fit_their_configuration_are_refused_by_name(checkpoints, name, tmp_path):
    def variant(kind, tensors=None, layers=2):
        folder = shutil.copytree(checkpoints[name], tmp_path / kind)
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["num_hidden_layers"] = layers
        (folder / "config.json").write_text(json.dumps(config))
        if tensors is not None:
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder

    whole = load_file(checkpoints[name] / "model.safetensors")
    lacking = {key: value for key, value in whole.items() if key != "text_projection.weight"}
    reshaped = whole | {"text_projection.weight": torch.ones(3, 16)}
    cut = variant("cut")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-100])
    without_scale = variant("scale", {key: value for key, value in whole.items() if key != "logit_scale"})
    torch.testing.assert_close(opened(without_scale).texts(CAPTIONS), opened(checkpoints[name]).texts(CAPTIONS))
    refused(
        (r"lacks text_projection\.weight$", lambda: opened(variant("lacking", lacking))),
        (r"lacks text_model\.encoder\.layers?\.2\.", lambda: opened(variant("more", layers=3))),
        (r"no place for: text_model\.encoder\.layers?\.1\.", lambda: opened(variant("fewer", layers=1))),
        (r"other shapes than its config\.json states: text_projection\.weight \(3, 16\)",
         lambda: opened(variant("reshaped", reshaped))),
        (r"cut cannot be read by transformers: ", lambda: opened(cut)),
    )  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_preprocessing_of_another_size_is_refused_before_any_image_is_read(checkpoints, name, tmp_path):
    folder, square = shutil.copytree(checkpoints[name], tmp_path / name), {"height": 48, "width": 48}
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    processor |= {"size": {"shortest_edge": 48} if name == "clip" else square, "crop_size": square}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    refused((r"makes images of 48 pixels, its image tower takes 32; expected the same", lambda: opened(folder)))


def test_settings_that_published_weights_bring_themselves_are_refused(checkpoints, monkeypatch):
    for asked in ("model.patch_size=7", "optim.steps=3", "method.loss=late_interaction"):
        monkeypatch.setattr("sys.argv", ["public.py", "--checkpoint", str(checkpoints["clip"]), asked])
        with pytest.raises(ConfigError, match=rf"{asked}: published weights bring their own; expected: data\.\*"):
            public.main()


def test_the_fingerprint_of_a_folder_follows_its_content(checkpoints, tmp_path):
    write_model(tmp_path, "clip")
    assert weights_fingerprint(str(tmp_path)) == weights_fingerprint(str(checkpoints["clip"]))
    weights = tmp_path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    assert weights_fingerprint(str(tmp_path)) != weights_fingerprint(str(checkpoints["clip"]))
