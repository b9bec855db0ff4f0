"""common/data/bert_tokenizer.py: equal to transformers' BERT tokenizers; laws; ALBEF's cleaning of captions."""

import functools
import gzip
import json
import re
import unicodedata

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from common.data.bert_tokenizer import SPECIAL_TOKENS, AlbefTokenizer, BertTokenizer, clean_caption

LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)] + [str(digit) for digit in range(10)]
SIGNS = list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
WORDS = ["the", "a", "dog", "cat", "un", "##aff", "##able", "##ing", "run", "##s", "\u65e5", "\u672c", "\u00df", "don"]
TINY = list(dict.fromkeys([*SPECIAL_TOKENS, *SIGNS, *LETTERS, *(f"##{letter}" for letter in LETTERS), *WORDS]))
TEXTS = [
    "a photo of a cat.",
    "",
    " \t\n ",
    "Unaffable dogs' don't UNAFFABLE; running-dog/cat (10%) [x] {y} snake_case",
    "caf\u00e9 cafe\u0301 na\u00efve \u00c5ngstr\u00f6m \u212b \ufb01ne \u1e9e stra\u00dfe \u0130stanbul",
    "\u201ccurly\u201d it\u2019s \u2014 dash\u2026 \u20ac5 \u00bd",
    "\u65e5\u672c\u8a9e\u306e\u6587 \ud55c\uad6d\uc5b4 \u0420\u0443\u0441\u0441\u043a\u0438\u0439 \u0639\u0631\u0628",
    "\U0001f600 \u2764\ufe0f \U0001f468\u200d\U0001f469 \x00nul \ufffd \u00ad \u200b \u2028",
    "AT&amp;T &lt;b&gt; <b>bold</b>",
    "dog " * 100,
    "x" * 100 + " " + "y" * 101 + " dog",
    "12345 3.14 1,000,000",
]
CHARACTERS = st.characters(exclude_categories=["Cs"]).filter(lambda c: unicodedata.ucd_3_2_0.category(c) != "Cn")


@functools.cache
def by_transformers(vocabulary):
    """texts, length -> rows, by transformers. A caption that names a special token is split as any text."""
    theirs = transformers.BertTokenizer(vocab={token: position for position, token in enumerate(vocabulary)})
    return lambda texts, length: theirs(
        texts,
        padding="max_length",
        truncation=True,
        max_length=length,
        return_tensors="pt",
        split_special_tokens=True,
    )["input_ids"]


@pytest.fixture(scope="module")
def tiny():
    return BertTokenizer(TINY)


@pytest.fixture(scope="module")
def bert(data_dir):
    return BertTokenizer.from_vocabulary(str(data_dir / "text/bert_base_uncased_vocab.txt.gz"))


@pytest.mark.parametrize("length", [3, 77])
def test_rows_equal_transformers(tiny, length):
    rows = tiny.encode(TEXTS, length)
    assert torch.equal(rows, by_transformers(tuple(TINY))(TEXTS, length))
    assert tiny.encode([], length).shape == (0, length)


@given(st.lists(CHARACTERS | st.sampled_from([*WORDS, " ", "[SEP]", "\u0301"]), max_size=30).map("".join))
@settings(max_examples=40, deadline=None)
def test_rows_equal_transformers_on_random_texts(tiny, text):
    assert tiny.encode([text], 40).tolist() == by_transformers(tuple(TINY))([text], 40).tolist()


def test_the_bert_vocabulary_has_the_known_ids(bert):
    assert bert.vocabulary_size == 30_522
    assert (bert.pad_id, bert.unknown_id, bert.cls_id, bert.end_id, bert.mask_id) == (0, 100, 101, 102, 103)
    assert bert.encode(["a photo of a cat"], 9).tolist() == [[101, 1037, 6302, 1997, 1037, 4937, 102, 0, 0]]
    assert (bert.encode(["dog " * 100], 77)[0, 1:76] == bert.encode(["dog"], 3)[0, 1]).all()  # 75 pieces are kept


def test_local_captions_equal_both_tokenizers_of_transformers(data_dir, bert, tmp_path):
    with gzip.open(data_dir / "flickr8k/flickr8k_captions_karpathy_format.json.gz", "rt", encoding="utf-8") as file:
        captions = [sentence["raw"] for image in json.load(file)["images"][::40] for sentence in image["sentences"]]
    with gzip.open(data_dir / "annotations/multi30k_task1.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in list(file)[::320]]
    captions += TEXTS + [row[language] for row in rows for language in ("en", "de", "fr", "cs") if language in row]
    assert len(captions) > 900
    ours = bert.encode(captions, 77)
    assert torch.equal(ours, by_transformers(bert.vocabulary)(captions, 77))

    # the former one, in Python: what ALBEF's generation of code ran
    legacy = pytest.importorskip("transformers.models.bert.tokenization_bert_legacy")
    (tmp_path / "vocab.txt").write_text("\n".join(bert.vocabulary) + "\n", encoding="utf-8")
    theirs = legacy.BertTokenizerLegacy(str(tmp_path / "vocab.txt"))
    for caption, row in list(zip(captions, ours.tolist()))[::4]:
        pieces = theirs.convert_tokens_to_ids(theirs.tokenize(caption))[:75]
        assert row == [101, *pieces, 102] + [0] * (75 - len(pieces)), caption


def test_vocabulary_files_folders_and_models_give_the_same_tokenizer(tmp_path, tiny):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/vocab.txt").write_text("\n".join(TINY) + "\n", encoding="utf-8")
    (tmp_path / "my_words.gz").write_bytes(gzip.compress("\r\n".join(TINY).encode()))
    saved = transformers.BertTokenizer(vocab={token: position for position, token in enumerate(TINY)})
    saved.save_pretrained(tmp_path / "saved")
    for source in ("model", "model/vocab.txt", "my_words.gz", "saved", "saved/tokenizer.json"):
        assert BertTokenizer.from_vocabulary(str(tmp_path / source)) == tiny


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["a"], "the vocabulary of 1 tokens lacks [PAD], [UNK], [CLS], [SEP], [MASK]"),
        ([*TINY, "dog"], "has ['dog'] more than once"),
        ([*TINY, "Dog"], "has capital letters (['Dog']); only uncased models"),
    ],
)
def test_vocabularies_of_other_kinds_are_refused(tmp_path, tokens, words):
    (tmp_path / "vocab.txt").write_text("\n".join(tokens))
    refused((rf"vocab\.txt: .*{re.escape(words)}", lambda: BertTokenizer.from_vocabulary(str(tmp_path))))


def test_broken_model_files_are_named(tmp_path):
    file = tmp_path / "tokenizer.json"
    for content, words in (
        ('{"model": {}}', r"no WordPiece model in it \(KeyError: 'vocab'\)"),
        ('{"model": {"vocab": {"a": 0, "b": 2}}}', "are not 0, 1, 2"),
    ):
        file.write_text(content)
        refused((f"{re.escape(str(file))}.*{words}", lambda: BertTokenizer.from_vocabulary(str(tmp_path))))


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("A man's dog, running!", "a mans dog running"),
        ('"Quoted" (text) *star* #tag; a: b ~ c? d.', "quoted text star tag a b c d"),
        ("black-and-white and/or T-shirt", "black and white and or t shirt"),
        ("<PERSON> and <person>'s dog", "person and persons dog"),
        ("  many   spaces\n\there \n", "many spaces here"),
        ("", ""),
        ("?!...", ""),
        ("$5 & 10% [x] caf\u00c9 \u201cquote\u201d", "$5 & 10% [x] caf\u00e9 \u201cquote\u201d"),
        (" ".join(["word"] * 35), " ".join(["word"] * 30)),
        ("- a - b", "a b"),
    ],
)
def test_albefs_cleaning_of_captions(text, cleaned):
    assert clean_caption(text) == cleaned


@given(st.text(max_size=80))
@settings(max_examples=40, deadline=None)
def test_cleaned_captions_have_at_most_thirty_words_and_none_of_the_signs(text):
    cleaned = clean_caption(text)
    assert cleaned == " ".join(cleaned.split())
    assert not set(cleaned) & set(",.'!?\"()*#:;~-/")
    assert clean_caption(" ".join([*cleaned.split(), *["a"] * 31])).split() == (cleaned.split() + ["a"] * 30)[:30]


@pytest.mark.parametrize("text", ["A dog-house: (no. 1)!", "<person> walks ~ \ud83d"])
def test_albefs_tokenizer_reads_the_cleaned_caption_for_training_and_evaluation(text, bert):
    albef = AlbefTokenizer(bert.vocabulary)
    assert torch.equal(albef.encode([text], 40), bert.encode([clean_caption(text)], 40))
    assert (albef.cleaning, bert.cleaning) == ("albef", "none")  # as a protocol names it
