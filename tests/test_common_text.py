"""common/data/text.py and text_files.py: choosing, storing and finding tokenizers."""

import gzip
import re
import warnings
from functools import partial
from types import SimpleNamespace

import huggingface_hub
import huggingface_hub.constants
import pytest
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from refusals import refused

from common.base.config import load_config
from common.base.settings import DataConfig
from common.data.bert_tokenizer import SPECIAL_TOKENS, AlbefTokenizer, BertTokenizer
from common.data.scenes import scene_words
from common.data.text import build_tokenizer, tokenizer_from_json, warn_of_unread_words
from common.data.text_files import find_file, pack, read_lines, stated_file, unpack
from common.data.tokenizer import WordTokenizer

CAPTIONS = ["A dog runs.", "a dog, a cat", "the cat's dog", "A bird"]


def messages_of(call):
    """What a call warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


def photographs(captions):
    return SimpleNamespace(name="photographs", all_captions=lambda: iter(captions))


def test_what_is_no_tokenizer_is_refused():
    names = "WordTokenizer, ClipTokenizer, BertTokenizer, AlbefTokenizer"
    refused(
        ("the tokenizer: not valid JSON", lambda: tokenizer_from_json("{")),
        (f"of type None; expected one of: {names}", lambda: tokenizer_from_json("[]")),
        ("of type 'SentencePiece'", lambda: tokenizer_from_json({"type": "SentencePiece"})),
    )


def test_the_config_chooses_the_tokenizer(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "a", "dog"]))
    bert = build_tokenizer(DataConfig(tokenizer="bert_wordpiece", vocabulary=str(tmp_path)), None)
    assert bert == BertTokenizer([*SPECIAL_TOKENS, "a", "dog"])
    albef = build_tokenizer(DataConfig(tokenizer="albef_wordpiece", vocabulary=str(tmp_path)), None)
    assert albef == AlbefTokenizer([*SPECIAL_TOKENS, "a", "dog"])
    assert build_tokenizer(DataConfig(tokenizer="clip_bpe"), None).vocabulary_size == 49_408
    assert build_tokenizer(DataConfig(), None).words == tuple(scene_words())
    named = DataConfig(vocabulary="x.txt")
    items = SimpleNamespace(name="vqa/train")  # of a task
    kinds = "tokenizer = 'bpe'; expected one of: words, clip_bpe, bert_wordpiece"
    refused(
        ("data.vocabulary = 'x.txt' is not used with data.tokenizer = words", lambda: build_tokenizer(named, None)),
        ("takes its words from captions, vqa/train has none", lambda: build_tokenizer(DataConfig(source="tsv"), items)),
        (kinds, lambda: load_config(DataConfig, [], ["tokenizer=bpe"])),
    )


def test_a_file_is_read_by_path_folder_and_cached_hub_name(tmp_path, monkeypatch):
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.txt").write_text("a")
    assert find_file(str(tmp_path / "b.txt"), ("a.txt",), "key") == tmp_path / "b.txt"
    assert find_file(str(tmp_path), ("c.txt", "a.txt", "b.txt"), "key") == tmp_path / "a.txt"

    model = tmp_path / "cache/models--some--model"
    for name, content in {"refs/main": "0123", "snapshots/0123/vocab.txt": "a"}.items():
        (model / name).parent.mkdir(parents=True)
        (model / name).write_text(content)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert find_file("some/model", ("merges.txt", "vocab.txt"), "key") == model / "snapshots/0123/vocab.txt"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some").mkdir()  # no other name in it is downloaded
    assert find_file("some/model", ("vocab.txt",), "key") == model / "snapshots/0123/vocab.txt"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("{tmp}", "is a folder without any of vocab.txt; it has: nothing"),
        (
            "{tmp}/none",
            "no such file; expected: a file or a folder that holds one of vocab.txt, or the name of a model",
        ),
        ("docs/nowhere", "(nothing is downloaded, as the folder docs is here)"),
        ("vocab.txt.gz", "no such file"),
        ("odd..name/model", "Cannot have -- or .. in repo_id"),
        ("not-cached/model", "no vocab.txt of a model of that name could be had from the Hugging Face hub"),
    ],
)
def test_a_file_that_is_not_there_is_explained(tmp_path, monkeypatch, name, words):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    asked = partial(find_file, name.replace("{tmp}", str(tmp_path)), ("vocab.txt",), "data.vocabulary")
    refused((rf"data\.vocabulary = .*{re.escape(words)}", asked))


def test_lines_part_at_line_feeds_only(tmp_path):
    text = "\ufeffone\r\ntwo\u2028still\x85two\n\nfour\n"
    (tmp_path / "plain.txt").write_bytes(text.encode())
    (tmp_path / "named_plain.txt").write_bytes(gzip.compress(text.encode()))
    for name in ("plain.txt", "named_plain.txt"):
        assert read_lines(tmp_path / name) == ["one", "two\u2028still\x85two", "", "four"]


def test_unreadable_text_is_named(tmp_path):
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    refused(
        (r"latin.txt is no text in UTF-8", lambda: read_lines(tmp_path / "latin.txt")),
        (r"none.txt cannot be read", lambda: read_lines(tmp_path / "none.txt")),
    )


def test_damaged_packed_text_is_refused():
    packed = pack("some words of a vocabulary " * 100)
    for damaged in (packed[:-8], packed[:4] + "A" + packed[5:], "\u00e9", "", None):
        refused(("a packed text is damaged", partial(unpack, damaged)))


CHINESE = ["两只猫在床上", "一只狗在海滩上", "红色的花"]


@pytest.mark.parametrize(
    ("tokenizer", "captions", "messages"),
    [
        (WordTokenizer.from_captions(CAPTIONS, 1), CAPTIONS, []),
        (WordTokenizer.from_captions(CAPTIONS, 1), [*CAPTIONS, "a dog and a bird in a house"], []),  # 3 of 20
        (WordTokenizer.from_words(["a"]), ["a a a a bird"], []),  # 20 % are not more than 20 %
        (WordTokenizer.from_captions(CAPTIONS, 1), ["a bird", "red birds"], ["50% of the words are unknown"]),
        (WordTokenizer.from_captions(CHINESE, 1), CHINESE, ["3 are in a script without spaces .*猫在床上'"]),
        (WordTokenizer.from_words(["a"]), CHINESE, ["script without spaces", "100% of the words are unknown"]),
        (BertTokenizer([*SPECIAL_TOKENS, "a"]), CHINESE, ["of the first 3 captions 100% .*multilingual"]),
    ],
)
def test_captions_that_a_tokenizer_does_not_suit_are_named_at_the_start(tokenizer, captions, messages):
    warned = messages_of(lambda: warn_of_unread_words(tokenizer, 64, photographs(captions), object()))
    for text, message in zip(warned, messages, strict=True):
        assert re.search(f"^photographs: .*{message}.*data.tokenizer=clip_bpe", text)


@pytest.mark.parametrize(("long", "is_warned"), [(1, False), (2, True)])  # of 5; 20 % are not more than 20 %
def test_captions_beyond_the_context_are_named_at_the_start(long, is_warned):
    tokenizer = WordTokenizer.from_words(["a", "b"])
    fitting, longer = "a a a a a a", "a a a a a a b"  # of six words between start and end
    assert tokenizer.encode([fitting], 8).tolist() == tokenizer.encode([longer], 8).tolist()
    captions = photographs([fitting] * (5 - long) + [longer] * long)
    words = "photographs: of the first 5 captions 2 have more than data.context_length = 8 tokens"
    warned = messages_of(lambda: warn_of_unread_words(tokenizer, 8, captions))
    assert [text.startswith(words) for text in warned] == [True] * is_warned


def test_a_file_that_may_be_on_the_hub_is_warned_of_and_one_that_is_not_there_is_not(tmp_path, monkeypatch):
    def unreached(*_):
        raise LocalEntryNotFoundError("offline")

    def missing(*_):
        raise EntryNotFoundError("404")

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    for load, warned in ((unreached, True), (missing, False)):
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", load)
        messages = messages_of(partial(stated_file, "someone/model", "modules.json"))
        assert [text.endswith("it is taken to have none") for text in messages] == [True] * warned
    assert stated_file("someone/model", "modules.json") is stated_file(str(tmp_path), "modules.json") is None
    (tmp_path / "weights.pt").touch()
    assert stated_file(str(tmp_path / "weights.pt"), "modules.json") is None
