"""Text towers on a pre-trained BERT: tokens are transformers' own, kept captions those computed anew."""

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from refusals import refused
from runs import logged, row_config, trained
from safetensors.torch import load_file
from test_common_weights import shaken

from common.base.config import ConfigError
from common.data.bert_tokenizer import SPECIAL_TOKENS, BertTokenizer
from common.data.caption_cache import CaptionCache
from common.data.pairs import open_training_pairs
from common.encoders.stem import PooledStem, Stem, StemError
from common.encoders.text import BidirectionalTextTransformer, CausalTextTransformer
from common.encoders.text_stem import PooledTextStem, TextStem
from common.encoders.transformer import QuickGELU
from common.encoders.weights import Weights, WeightsError, fill_, read_source
from common.run.checkpoint import last_checkpoint
from common.run.folder import RunFiles, check_same_run, run_key
from common.run.initial import InitialWeights, open_source
from common.run.inputs import feature_cache
from contrastive_basics.model import PatchTokens

WORDS = ["a", "red", "blue", "cube", "ball", "cone", "left", "of", "right", "two", "in", "the", "and"]
TOKENIZER = BertTokenizer([*SPECIAL_TOKENS, *WORDS])
CAPTIONS = ["a red cube", "two balls left of the blue cone", "ball", "a cube and a ball in the red cone and a cube"]
LENGTH = 12
IDS = TOKENIZER.encode(CAPTIONS, LENGTH)
LIT = ("model.image.stem.name=test_efficientnet", "model.image.stem.weights=x", "model.image.layers=0",
       "model.image.projection=false", "data.image_size=64", "model.patch_size=32")  # fmt: skip


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A folder of weights by name: a random BERT of three layers with its vocabulary, and the model."""
    folder = tmp_path_factory.mktemp("weights") / "tiny"
    torch.manual_seed(5)
    config = transformers.BertConfig(
        vocab_size=TOKENIZER.vocabulary_size, hidden_size=24, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=40, max_position_embeddings=20,
    )  # fmt: skip
    model = shaken(transformers.BertModel(config)).eval()
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(TOKENIZER.vocabulary) + "\n")
    return folder, model


def random_stem(layers, heads=2, length=LENGTH, ids=TOKENIZER.vocabulary_size, trainable=False):
    return TextStem(trainable, vocabulary_size=ids, context_length=length, width=24, layers=layers, heads=heads,
                    mlp_ratio=40 / 24, end_id=TOKENIZER.end_id)  # fmt: skip


def stem_of(bert, layers, trainable=False):
    stem = random_stem(layers, trainable=trainable)
    stem.load_(str(bert[0]), read_source(str(bert[0])).text_tower)
    return stem


def words_of(ids):
    return (ids != TOKENIZER.pad_id)[..., None]


@pytest.mark.parametrize("layers", [0, 2])
def test_tokens_are_those_of_transformers_after_as_many_layers(bert, layers):
    mask = words_of(IDS)
    with torch.no_grad():
        wanted = bert[1](IDS, attention_mask=mask[..., 0].long(), output_hidden_states=True).hidden_states[layers]
    actual = stem_of(bert, layers)(IDS)
    torch.testing.assert_close(actual * mask, wanted * mask, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [BidirectionalTextTransformer, CausalTextTransformer])
def test_a_tower_gives_the_same_on_kept_captions_whatever_they_are_padded_to(bert, kind, tmp_path):
    stem = stem_of(bert, 2)
    torch.manual_seed(0)
    more = {"num_class_tokens": 3} if kind is BidirectionalTextTransformer else {}
    tower = kind(TOKENIZER.vocabulary_size, LENGTH, 16, 1, 2, 8, end_id=TOKENIZER.end_id, stem=stem, **more).eval()
    with torch.no_grad():
        wanted = tower(IDS)
        stem.kept = cache_of(tmp_path, stem)
        stem.kept.keep("captions", IDS[:3], torch.device("cpu"))
        stem.kept.compute = lambda ids: stem.compute(ids) if len(ids) == 1 else pytest.fail("computed again")
        torch.testing.assert_close(tower(IDS), wanted, rtol=5e-3, atol=5e-3)  # the fourth is not kept
        torch.testing.assert_close(tower(IDS[:1, :5]), wanted[:1], rtol=5e-3, atol=5e-3)
    assert wanted.shape == (4, 8 * more.get("num_class_tokens", 1))
    assert not any(item.requires_grad for item in stem.parameters())
    tower(IDS).square().sum().backward()
    assert tower.token_embedding.weight.grad.abs().sum() > 0


def test_a_fingerprint_tells_networks_apart_and_not_lengths_of_captions(bert):
    def of(length=LENGTH, layers=2, heads=2, scale=1.0):
        stem, tower = random_stem(layers, heads, length), read_source(str(bert[0])).text_tower
        tower.transformer.blocks[0].attention.heads = heads  # which a user cannot
        stem.load_("", tower)
        stem.network.transformer.blocks[0].mlp[0].bias.data[0] *= scale
        return stem.fingerprint()

    assert of() == of(length=7)
    assert len({of(), of(layers=1), of(heads=4), of(scale=1.001)}) == 4


def test_bfloat16_leaves_a_stem_that_is_held_still_in_float32_and_a_trained_one_gets_a_gradient(bert):
    stem = stem_of(bert, 1)
    with torch.autocast("cpu", torch.bfloat16):
        actual = stem(IDS)
    torch.testing.assert_close(actual, stem(IDS), rtol=0, atol=0)
    trained = stem_of(bert, 1, trainable=True)
    trained(IDS).sum().backward()
    assert all(item.grad is not None for item in trained.parameters())


def cache_of(folder, stem=None, compute=None, max_bytes=1e9):
    compute = compute or (stem.compute if stem else counted)
    return CaptionCache(folder / "captions.f16", 24 if stem else 2, TOKENIZER.end_id, compute, max_bytes)


def counted(ids):
    """Stands for a network: the id, and the place in the caption."""
    places = torch.arange(ids.shape[1]).expand_as(ids)
    return torch.stack([ids.float(), places.float()], dim=-1)


def many(count, length=LENGTH):
    words = torch.Generator().manual_seed(3)
    texts = [" ".join(WORDS[i] for i in torch.randint(len(WORDS), (n % 7 + 1,), generator=words)) for n in range(count)]
    return TOKENIZER.encode(texts, length)


def computed_of(calls):
    return lambda ids: calls.append(len(ids)) or counted(ids)


def test_each_caption_is_computed_once_whatever_set_it_comes_from(tmp_path):
    ids, calls = many(700), []
    cache = cache_of(tmp_path, compute=computed_of(calls))
    cache.keep("a", ids[:500], torch.device("cpu"))
    cache.keep("b", ids, torch.device("cpu"))
    assert sum(calls) == len(ids.unique(dim=0))
    calls.clear()
    for again in (cache, cache_of(tmp_path, compute=computed_of(calls))):
        again.keep("c", ids, torch.device("cpu"))
        rows = torch.randperm(700)[:64]
        torch.testing.assert_close(again(ids[rows]), counted(ids[rows]) * words_of(ids[rows]), rtol=0, atol=0)
    assert not calls


def test_a_disk_that_fills_up_meanwhile_is_reported_with_the_file(tmp_path):
    full = Mock(side_effect=OSError(28, "No space left on device"))
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/captions\.f16'"):
        cache_of(tmp_path, compute=full).keep("a", many(9), torch.device("cpu"))


def test_what_is_interrupted_goes_on_and_torn_ends_are_cut_off(tmp_path):
    ids, calls = many(900).unique(dim=0), []

    def stops(part):
        if calls:
            raise KeyboardInterrupt
        return computed_of(calls)(part)

    with pytest.raises(KeyboardInterrupt):
        cache_of(tmp_path, compute=stops).keep("a", ids, torch.device("cpu"))
    for file in (tmp_path / "captions.f16", tmp_path / "captions.index"):
        with file.open("ab") as stream:
            stream.write(b"torn!")
    cache = cache_of(tmp_path, compute=computed_of(calls))
    cache.keep("a", ids, torch.device("cpu"))
    assert sum(calls) == len(ids)
    torch.testing.assert_close(cache(ids), counted(ids) * words_of(ids), rtol=0, atol=0)
    # numbers that the index names and a power cut has lost
    with (tmp_path / "captions.f16").open("r+b") as stream:
        stream.truncate(400)
    again = cache_of(tmp_path, compute=computed_of(calls))
    torch.testing.assert_close(again(ids), counted(ids) * (words_of(ids) | (again(ids) != 0)), rtol=0, atol=0)
    again.keep("a", ids, torch.device("cpu"))
    torch.testing.assert_close(cache_of(tmp_path)(ids), counted(ids) * words_of(ids), rtol=0, atol=0)


def test_a_file_that_would_be_too_large_is_refused_before_anything_is_computed(tmp_path):
    calls = []
    message = r"of the captions of a: \d+ tokens take .* 0.00 GB are allowed \(model.text.stem.cache_gb\)"
    cache = cache_of(tmp_path, compute=computed_of(calls), max_bytes=99)
    refused((message, lambda: cache.keep("a", many(50), torch.device("cpu"))))
    assert not calls


def test_of_two_at_once_one_computes_and_both_read(tmp_path):
    """The lock is one of the file system: it parts two that opened the file, in one process or in two."""
    ids, calls = many(60), []

    def kept(_):
        cache = cache_of(tmp_path, compute=lambda part: time.sleep(0.1) or computed_of(calls)(part))
        cache.keep("a", ids, torch.device("cpu"))
        return cache(ids)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(kept, range(2))
    assert sum(calls) == len(ids.unique(dim=0))
    assert torch.equal(first, second)


def test_what_is_no_stem_is_refused(bert):
    tower = read_source(str(bert[0])).text_tower
    changed = read_source(str(bert[0])).text_tower
    changed.input_norm.eps, changed.transformer.blocks[0].mlp[1] = 1e-5, QuickGELU()
    cases = (
        (random_stem(2, ids=99), tower, r"has 18 ids, the tokenizer of this run 99; expected: .*wordpiece"),
        (random_stem(5), tower, r"does not fit this run: transformer.blocks.3.* instead of none"),
        (random_stem(1, length=30), tower, r"does not fit this run: position_embedding \(30, 24\) instead of"),
        (random_stem(2, heads=4), tower, "does not fit this run: heads 4 instead of 2"),
        (random_stem(2), changed, r"activation gelu instead of QuickGELU\(\), eps 1e-12 instead of 1e-05"),
        (random_stem(1), None, "there is no BERT"),
    )
    refused(*((text, partial(wrong.load_, "there", weights)) for wrong, weights, text in cases), error=StemError)


def test_a_folder_without_a_text_tower_is_no_text_stem(tmp_path):
    config = transformers.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    transformers.ViTModel(config).save_pretrained(tmp_path)
    config = row_config("euclip", "table4_meru", f"model.text.stem.weights={tmp_path}")
    message = rf"model\.text\.stem\.weights = {tmp_path} is no BERT; expected: a folder or hub name of one"
    refused((message, lambda: InitialWeights.opened(config)), error=StemError)


def test_a_tower_does_not_start_from_one_whose_stem_has_other_heads_or_another_mlp():
    def tower(**sizes):
        ids, end_id = TOKENIZER.vocabulary_size, TOKENIZER.end_id
        sizes = {"width": 24, "layers": 1, "heads": 2, "mlp_ratio": 2.0} | sizes
        stem = TextStem(vocabulary_size=ids, context_length=LENGTH, end_id=end_id, **sizes)
        return CausalTextTransformer(ids, LENGTH, 16, 1, 2, None, end_id, stem=stem)

    source = Weights("there", text_tower=tower())
    fill_(tower(), source, "model.init")
    refused(
        ("1 layers of width 24, 4 heads, .* in the weights .* 2 heads", partial(fill_, tower(heads=4), source, "x")),
        ("MLPs of 96, in the weights .* MLPs of 48", partial(fill_, tower(mlp_ratio=4.0), source, "x")),
        error=WeightsError,
    )


def test_weights_meet_the_vocabulary_beside_them(bert):
    name, swapped = str(bert[0]), BertTokenizer([*SPECIAL_TOKENS, "red", "a", *WORDS[2:]])
    TOKENIZER.check_beside(name, "model.text.init")
    message = "token 5 is 'a', that of data.vocabulary is 'red'; expected: data.vocabulary="
    refused((message, lambda: swapped.check_beside(name, "model.text.init")))


# ---------------------------------------------------------------- in runs


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Twelve pictures with a caption each, as a table."""
    folder = tmp_path_factory.mktemp("photographs")
    rng, lines = np.random.default_rng(0), ["path\tcaption"]
    for number in range(12):
        Image.fromarray(rng.integers(0, 255, (64, 64, 3), np.uint8)).save(folder / f"{number}.png")
        lines.append(f"{number}.png\ta {WORDS[1 + number % 2]} {WORDS[3 + number % 3]} {WORDS[number]}")
    (folder / "all.tsv").write_text("\n".join(lines) + "\n")
    return folder


def config_of(photographs, bert, *overrides):
    settings = [
        "data.source=tsv", f"data.root={photographs}", "data.train=all.tsv", "data.val=all.tsv", "data.test=all.tsv",
        f"model.weights={bert[0].parent}", "model.text.stem.weights=someone/tiny", "data.tokenizer=bert_wordpiece",
        "data.vocabulary=someone/tiny", "data.image_size=32", "model.patch_size=16", f"data.context_length={LENGTH}",
        "optim.steps=3", "optim.warmup_steps=0", "optim.global_batch_size=6", "run.log_every=1", "run.save_every=1",
        "run.keep_checkpoints=3", "run.mixed_precision=no", *overrides,
    ]  # fmt: skip
    return row_config("euclip", "table4_euclip", *settings)


def run(folder, config, resume=False):
    files = trained("euclip", config, folder, resume)
    return logged(files), json.loads(files.evaluation.read_text())["evaluations"]["test"]["metrics"]


def test_a_stem_beside_another_vocabulary_does_not_train(photographs, bert, tmp_path, monkeypatch):
    monkeypatch.setattr("common.run.inputs.outputs", lambda: tmp_path / "outputs")
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "red", "a", *WORDS[2:]]) + "\n")
    other = config_of(photographs, bert, f"data.vocabulary={tmp_path / 'vocab.txt'}")
    refused((r"model\.text\.stem\.weights = .*: token 5 is 'a'", lambda: run(tmp_path / "run", other)))


def test_training_on_kept_captions_is_training_on_captions_and_goes_on(photographs, bert, tmp_path, monkeypatch):
    monkeypatch.setattr("common.run.inputs.outputs", lambda: tmp_path / "outputs")
    config = config_of(photographs, bert)
    whole, metrics = run(tmp_path / "kept", config)
    (file,) = (tmp_path / "outputs" / "features").glob("*.f16")
    size = file.stat().st_size
    assert size == 2 * 24 * sum(len(TOKENIZER.encode([text], 30)[0].nonzero()) for text in
                                set(open_training_pairs(config.data, 0).all_captions()))  # fmt: skip
    computed, same = run(tmp_path / "computed", config_of(photographs, bert, "model.text.stem.cache_gb=0"))
    assert whole == pytest.approx(computed, rel=2e-3)
    assert metrics.keys() == same.keys()
    last = last_checkpoint(tmp_path / "kept" / "checkpoints")
    for step in (2, 3):
        (last.path.parent / f"step-{step:08}").rename(tmp_path / f"away{step}")
    files, data = RunFiles(tmp_path / "kept"), open_training_pairs(config.data, 0).fingerprint
    assert None in (config.model.text.stem.layers, config.model.text.stem.heads)  # the weights', as a table asks for it
    check_same_run(last_checkpoint(files.checkpoints), files, config, data)
    other = config_of(photographs, bert, "model.text.stem.layers=2")
    refused(
        (r"text.stem.layers 3 -> 2", lambda: check_same_run(last_checkpoint(files.checkpoints), files, other, data)),
        error=ConfigError,
    )
    again, _ = run(tmp_path / "kept", config, resume=True)
    assert (again[-2:], file.stat().st_size) == (whole[-2:], size)
    # a run of ours is weights, too, and needs the BERT no more
    source = open_source(str(tmp_path / "kept")).text_tower
    stem = stem_of(bert, 3)
    torch.testing.assert_close(source.stem(IDS), stem(IDS), rtol=0, atol=0)
    start = (f"model.init={tmp_path / 'kept'}", "optim.steps=1")
    child, _ = run(tmp_path / "child", config_of(photographs, bert, *start))
    assert child[0] != whole[0]


def test_a_key_holds_the_hash_of_weights_and_not_their_path(photographs, bert, tmp_path):
    def key(*overrides):
        return run_key("euclip", config_of(photographs, bert, *overrides), "data")

    copied = shutil.copytree(bert[0], tmp_path / "elsewhere" / "tiny")
    assert key() == key(f"model.weights={copied.parent}") == key(f"model.text.stem.weights={copied}")
    (copied / "config.json").write_bytes((bert[0] / "config.json").read_bytes() + b"\n")
    assert key() != key(f"model.weights={copied.parent}")
    assert key() != key("model.text.stem.layers=1")
    missing = "some/net is not in .* which holds tiny; expected: .*/net, another"
    refused(
        (
            "model.weights = /nowhere: no such folder; expected: one that holds weights",
            lambda: key("model.weights=/nowhere"),
        ),
        (f"model.text.stem.weights = {missing}", lambda: key("model.text.stem.weights=some/net")),
        (f"data.vocabulary = {missing}", lambda: key("data.vocabulary=some/net")),
        (f"model.image.stem.weights = {missing}", lambda: key("model.image.stem.name=some/net")),
        (f"model.init = {missing}", lambda: key("model.init=some/net")),
        error=ConfigError,
    )


def test_lit_trains_only_the_text_side(photographs, bert, tmp_path, monkeypatch):
    monkeypatch.setattr("common.run.inputs.outputs", lambda: tmp_path / "outputs")
    monkeypatch.setattr(Stem, "load_", lambda self, weights: None)
    monkeypatch.setattr("common.run.sources.weights_fingerprint", lambda *arguments: "")
    channels = Stem("test_efficientnet", 64).channels
    config = config_of(photographs, bert, *LIT, f"model.embedding_dim={channels}")
    run(tmp_path / "lit", config)
    first, last = (last_checkpoint(tmp_path / "lit" / "checkpoints").path.with_name(f"step-0000000{n}") for n in (1, 3))
    before, after = load_file(first / "model.safetensors"), load_file(last / "model.safetensors")
    moved = {name.partition(".")[0] for name in after if not torch.equal(after[name], before[name])}
    assert moved & {"image_tower", "text_tower"} == {"text_tower"}
    wrong = config_of(photographs, bert, *LIT, "model.embedding_dim=16")
    no_layers = "has no layers in its image tower; expected a run of two transformers"
    refused(
        (
            f"model.embedding_dim = 16 .*; expected: {channels}, as the features of",
            lambda: run(tmp_path / "wrong", wrong),
        ),
        (no_layers, lambda: open_source(str(tmp_path / "lit"))),
        (
            "model.image.layers = 0 without a stem; expected: ",
            lambda: config_of(photographs, bert, "model.image.layers=0"),
        ),
    )


def test_a_pooled_text_stem_is_the_mean_over_words_as_sentence_encoders_take_it(bert):
    tower, mask = PooledTextStem(stem_of(bert, 3), 5), words_of(IDS)
    with torch.no_grad():
        tokens = bert[1](IDS, attention_mask=mask[..., 0].long()).last_hidden_state
    wanted = (tokens * mask).sum(dim=1) / mask.sum(dim=1) @ tower.projection
    torch.testing.assert_close(tower(IDS), wanted, rtol=1e-4, atol=1e-5)


def test_a_pooled_stem_is_the_mean_over_its_places():
    stem = Stem("test_resnet", 64).eval()
    pixels = torch.rand(2, 3, 64, 64)
    tower = PooledStem(stem, 5)
    torch.testing.assert_close(tower(pixels), stem(pixels).mean(dim=(2, 3)) @ tower.projection)
    torch.testing.assert_close(tower(stem(pixels)), tower(pixels))


def test_only_the_mean_is_cached_for_a_tower_that_reads_nothing_else(photographs, bert):
    config = config_of(photographs, bert, *LIT)
    stem = Stem("test_efficientnet", 64)
    whole = (stem.channels, stem.grid, stem.grid)
    tower = PooledStem(stem, None)
    caches = [
        feature_cache(SimpleNamespace(image_tower=item), config, torch.device("cpu"))
        for item in (tower, PatchTokens(tower))  # late interaction compares places
    ]
    assert [cache.shape for cache in caches] == [(stem.channels, 1, 1), whole]
    assert caches[0].network != caches[1].network
    pixels = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    mean, places = (cache.compute(pixels) for cache in caches)
    torch.testing.assert_close(tower(mean), tower(places))
