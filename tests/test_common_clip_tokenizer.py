"""common/data/clip_tokenizer.py: equal to open_clip's and transformers' tokenizers; laws; a tiny vocabulary by hand."""

import gzip
import json
import re
import time
import unicodedata

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from open_clip.tokenizer import SimpleTokenizer
from refusals import refused
from transformers import CLIPTokenizer

from common.data import clip_tokenizer
from common.data.clip_tokenizer import ClipTokenizer, clean_text
from common.data.tokenizer import WordTokenizer

TEXTS = [
    "a photo of a cat.",
    "",
    "   \n\t ",
    "A Man's T-shirt, SIZE 10; they'll've won't I'm you're 'quoted' ''twice''",
    "it's IT'S It'S 'S 's'ss 'll'd'm",
    "12345 3.14 1,000,000 \u00bd \u2167 \u0663\u0664 x2 2x",
    "tabs\tand\nnew\r\nlines\u00a0no-break\u2003em\u200bzero\ufeffbom",
    "caf\u00e9 cafe\u0301 na\u00efve \u00c5ngstr\u00f6m \u212b \ufb01ne o\ufb03ce",
    "\u201ccurly\u201d \u2018quotes\u2019 it\u2019s \u2014 dash\u2026",
    "\U0001f600\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f flags \U0001f1e9\U0001f1ea end",
    "AT&amp;T &lt;b&gt; &amp;lt; &#39;x&#39; &eacute; &amp;amp;amp; & && &notanentity; &copy",
    "<b>bold</b> <person> http://example.com/a?b=c&d=e #tag @user snake_case",
    "\u65e5\u672c\u8a9e\u306e\u6587 \ud55c\uad6d\uc5b4 \u0420\u0443\u0441\u0441\u043a\u0438\u0439 \u0639\u0631\u0628",
    "\uff21\uff22\uff23\uff11\uff12 full width \u0130stanbul \u1e9e stra\u00dfe \u017f '\u017f \u0345a",
    "sch\u00c3\u00b6n mojibake \u00e2\u20ac\u2122s \x00nul \x1b[31mred\x1b[0m \x85 \x1c \ufffd",
    "!!!??? ... !? \u00bf\u00a1 $5.00 100% a/b a\\b [x] {y} ~^`|",
    "supercalifragilisticexpialidocious antidisestablishmentarianism " + "z" * 300,
    "word " * 200,
    "\ud83d lone surrogate \ud83d\ude00 pair",
    "e\u0301\u0301\u0301 a\u0308\u0304 \u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
]


def is_old(character):
    """Of an old standard: the libraries agree on such characters, while the newest letters depend on their versions."""
    return unicodedata.ucd_3_2_0.category(character) != "Cn"


CHARACTERS = st.characters(exclude_categories=["Cs"]).filter(is_old)
PIECES = st.sampled_from(
    ["'s", "'LL", "&amp;", "&lt", "\u2019", "caf\u00e9", "\ufb01", "\U0001f600", " ", "\n", "3", "!!"]
)


@pytest.fixture(scope="module")
def clip():
    return ClipTokenizer.from_vocabulary()


@pytest.fixture(scope="module")
def reference():
    return SimpleTokenizer()


@pytest.fixture(scope="module")
def tiny():
    """hello is one token, low and lower share a part."""
    return ClipTokenizer(["h e", "l l", "he ll", "hell o</w>", "l o", "lo w</w>", "lo w", "e r</w>", "low er</w>"])


@pytest.mark.parametrize("context_length", [3, 77])
def test_rows_equal_open_clip(clip, reference, context_length):
    assert (clip.encode(TEXTS, context_length) == reference(TEXTS, context_length)).all()


@given(st.lists(CHARACTERS | PIECES, max_size=30).map("".join))
@settings(max_examples=100, deadline=None)
def test_rows_equal_open_clip_on_random_texts(clip, reference, text):
    assume(all(is_old(c) for c in clean_text(text) if c not in text))  # ftfy makes U+058B of "\xd6\x8b"
    assert clip.encode([text], 77).tolist() == reference([text], 77).tolist()


def test_all_local_captions_equal_open_clip(data_dir, clip, reference):
    with gzip.open(data_dir / "flickr8k/flickr8k_captions_karpathy_format.json.gz", "rt", encoding="utf-8") as file:
        captions = [sentence["raw"] for image in json.load(file)["images"][::32] for sentence in image["sentences"]]
    with gzip.open(data_dir / "annotations/multi30k_task1.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in list(file)[::160]]
    captions += [row[language] for row in rows for language in ("en", "de", "fr", "cs") if language in row]
    assert len(captions) > 1_400
    assert torch.equal(clip.encode(captions, 77), reference(captions, 77))


def test_a_text_is_cut_before_it_is_cleaned(clip, reference):
    long = " ".join(["\U0001f602" * 7] * 10 + ["&hearts;", *"antidisestablishmentarianism" * 30])
    assert torch.equal(clip.encode([long], 77), reference([long], 77))
    for tokenizer in (clip, WordTokenizer(["amp"])):
        start = time.process_time()
        tokenizer.encode(["&" + "amp;" * 16_000], 77)  # each round of repair resolves one of them
        assert time.process_time() - start < 3


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("it\u2019s", "it's"),
        ("o\ufb03ce", "office"),
        ("sch\u00c3\u00b6n", "sch\u00f6n"),
        ("\uff21\uff22", "ab"),
        ("cafe\u0301", "caf\u00e9"),
        ("AT&amp;amp;T \n X", "at&t x"),
        ("\ud83d a", "\ufffd a"),
    ],
)
def test_cleaning(text, clean):
    assert clean_text(text) == clean


def test_special_ids_and_sizes_are_clips(clip):
    assert (clip.vocabulary_size, clip.pad_id, clip.cls_id, clip.end_id) == (49_408, 0, 49_406, 49_407)
    row = clip.encode(["a photo of a cat"], 9)[0]
    assert row.tolist() == [49406, 320, 1125, 539, 320, 2368, 49407, 0, 0]
    assert clip.decode(row)[:4] == ["<start_of_text>", "a</w>", "photo</w>", "of</w>"]


def write_model(folder, tokenizer, **changed_ids):
    """vocab.json and merges.txt as transformers writes them."""
    folder.mkdir()
    ids = {token: position for position, token in enumerate(tokenizer.vocabulary)} | changed_ids
    (folder / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(tokenizer.merges) + "\n", encoding="utf-8")


def test_vocabulary_files_folders_and_models_give_the_same_tokenizer(tmp_path, tiny):
    write_model(tmp_path / "model", tiny)
    (tmp_path / "plain.txt").write_text("\n".join(tiny.merges), encoding="utf-8", newline="\r\n")
    header = '"bpe_simple_vocab_16e6.txt#version: 0.2\n'
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress((header + "\n".join(tiny.merges) + "\n").encode()))
    saved = CLIPTokenizer(
        vocab={token: position for position, token in enumerate(tiny.vocabulary)},
        merges=[tuple(merge.split(" ")) for merge in tiny.merges],
        bos_token="<start_of_text>",
        eos_token="<end_of_text>",
        unk_token="<end_of_text>",
        pad_token="<end_of_text>",
    )
    saved.save_pretrained(tmp_path / "saved")
    for source in ("model", "model/merges.txt", "plain.txt", "packed.txt.gz", "saved", "saved/tokenizer.json"):
        with pytest.warns(UserWarning, match=r"has 9 merges, CLIP's vocabulary has 48894"):
            assert ClipTokenizer.from_vocabulary(str(tmp_path / source)) == tiny


def test_a_model_of_another_layout_and_a_cut_file_are_refused(tmp_path, tiny):
    write_model(tmp_path / "other", tiny, he=7)
    other = str(tmp_path / "other")
    refused(("vocab.json: 'he' has id 7, in CLIP's order it is 512", lambda: ClipTokenizer.from_vocabulary(other)))
    for vocabulary, message in (
        ({"!": 0, '"': 2}, "tokenizer.json: '\"' has id 2, in CLIP's order it is 1"),
        (None, "tokenizer.json holds no byte-pair model: model.vocab is missing"),
    ):
        model = {"type": "BPE", "merges": list(tiny.merges), "vocab": vocabulary}
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
        refused((message, lambda: ClipTokenizer.from_vocabulary(str(tmp_path))))
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"#version\nh e\n" * 100)[:30])
    refused(("cut.txt.gz cannot be read", lambda: ClipTokenizer.from_vocabulary(str(tmp_path / "cut.txt.gz"))))


def test_without_open_clip_the_default_vocabulary_is_explained(monkeypatch):
    monkeypatch.setattr(clip_tokenizer.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"optional package open_clip, which is not installed.*set data.vocabulary to"):
        ClipTokenizer.from_vocabulary("")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: ClipTokenizer(["h e", "hex a"]),
            "merges from 'h e' on are no byte pairs: Error while initializing BPE: Token `hex` out of",
        ),
        (lambda: ClipTokenizer(["h e", "h e"]), "the vocabulary has ['he'] more than once"),
        (lambda: ClipTokenizer([("h", "e")]), "the merges from ('h', 'e') on are no byte pairs"),
        (lambda: ClipTokenizer(["[PAD]", "[UNK]"]), "expected: two tokens with a space between them, as in CLIP's"),
        (
            lambda: ClipTokenizer.from_json({"type": "ClipTokenizer", "version": 1, "ftfy": False, "merges": ""}),
            "ftfy is False; expected: true",
        ),
        (
            lambda: ClipTokenizer.from_json({"type": "ClipTokenizer", "version": 1, "ftfy": True, "merges": "eJw="}),
            "packed text is damaged",
        ),
    ],
)
def test_bad_values_are_refused_with_the_value(call, words):
    refused((re.escape(words), call))
