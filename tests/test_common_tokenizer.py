"""common/data/tokenizer.py: laws of all tokenizers, and of words."""

import json
import pickle
import random
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from tokenizers import normalizers, pre_tokenizers

from common.data import bert_tokenizer
from common.data import tokenizer as tokenizer_module
from common.data.bert_tokenizer import AlbefTokenizer, BertTokenizer
from common.data.clip_tokenizer import ClipTokenizer
from common.data.text import tokenizer_from_json
from common.data.tokenizer import (
    SPECIAL_TOKENS,
    UNKNOWN_ID,
    WordTokenizer,
    split_words,
    split_words_of_version_1,
    without_lone_surrogates,
)

TEXTS = (
    st.text(max_size=60)
    | st.text(alphabet="ab 'A,.-1_\u2019\u0130\u00df\u0301\u0307", max_size=40)
    | st.text(
        alphabet="a1 '\u0939\u094d\u200d\u0e19\u0e49\u0e33\u1018\u102c\u732b\u05d0\u05b8\u20e3\ufe0f\u0315\u0307",
        max_size=20,
    )
)
CAPTIONS = ["A dog runs.", "a dog, a cat", "the cat's dog", "A bird"]


@given(TEXTS)
@settings(max_examples=100, deadline=None)
def test_splitting_twice_is_splitting_once(text):
    words = split_words(text)
    assert split_words(" ".join(words)) == words
    assert all(word == word.lower() and word.strip("'") == word and word for word in words)


@given(TEXTS, TEXTS)
@settings(max_examples=100, deadline=None)
def test_case_and_spacing_do_not_matter_and_texts_concatenate(left, right):
    assert split_words(f"{left}  \n{right}") == split_words(left) + split_words(right)
    ascii_text = left.encode("ascii", "ignore").decode()
    assert split_words(ascii_text.upper()) == split_words(ascii_text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A man's T-shirt, size 10.", ["a", "man's", "t", "shirt", "size", "10"]),
        ("'quoted' don\u2019t O'Neil's", ["quoted", "don't", "o'neil's"]),
        ("dogs' '' rock'n'roll _x_", ["dogs", "rock'n'roll", "x"]),
        ("caf\u00e9 cafe\u0301 \u5341 \u0414\u0410", ["caf\u00e9", "caf\u00e9", "\u5341", "\u0434\u0430"]),
        ("एक हिन्दी किताब", ["एक", "हिन्दी", "किताब"]),
        ("ఒక కుక్క, పరిగెత్తుతోంది", ["ఒక", "కుక్క", "పరిగెత్తుతోంది"]),
        ("قِطَّةٌ عَلَى السَّرِيرِ", ["قِطَّةٌ", "عَلَى", "السَّرِيرِ"]),
        ("כֶּלֶב חוּם", ["כֶּלֶב", "חוּם"]),
        ("می\u200cخواهم", ["می\u200cخواهم"]),
        ("İki kedi, İSTANBUL", ["iki", "kedi", "istanbul"]),
        ("고양이 두 마리", ["고양이", "두", "마리"]),
        ("1\ufe0f\u20e3 dog \u2764\ufe0f", ["1", "dog"]),
        # scripts without spaces: characters with what belongs to them (UAX 29 without a dictionary)
        ("两只猫, 3 dogs", ["两", "只", "猫", "3", "dogs"]),
        ("ベッドの上", ["ベッド", "の", "上"]),
        ("น้ำสุนัข", ["น้ำ", "สุ", "นั", "ข"]),
        ("ខ្មែរ ဘာသာ ນ້ຳ", ["ខ្មែ", "រ", "ဘာ", "သာ", "ນ້ຳ"]),
        (" .,!? ", []),
    ],
)
def test_words_are_runs_of_letters_and_digits_with_inner_apostrophes(text, words):
    assert split_words(text) == words


@given(st.text(alphabet=st.characters(max_codepoint=127), max_size=60))
@settings(max_examples=100, deadline=None)
def test_ascii_captions_have_the_words_of_the_first_rule(text):
    assert tokenizer_module._WORD.findall(text.lower()) == split_words(text) == split_words_of_version_1(text)


SCRIPTS = {
    "Hindi": ["एक लाल किताब मेज़ पर है", "एक लाल कुत्ता मेज़ पर है"],
    "Telugu": ["ఒక కుక్క పరిగెత్తుతోంది", "ఒక కోకిల పరిగెత్తుతోంది"],
    "vowelled Arabic": ["قِطَّةٌ عَلَى السَّرِيرِ", "قُطْنٌ عَلَى السَّرِيرِ"],
    "vowelled Hebrew": ["כֶּלֶב חוּם רָץ", "כָּלַב חוּם רָץ"],
    "Korean": ["고양이 두 마리", "고양이 세 마리"],
    "Chinese": ["两只猫在床上。", "两只狗在床上。"],
}


@pytest.mark.parametrize("captions", SCRIPTS.values(), ids=SCRIPTS)
def test_words_of_other_scripts_are_those_of_the_tokenizers_library(captions):
    normalizer = normalizers.BertNormalizer(strip_accents=False, lowercase=True)
    for caption in captions:
        pieces = pre_tokenizers.BertPreTokenizer().pre_tokenize_str(normalizer.normalize_str(caption))
        assert split_words(caption) == [word for word, _ in pieces if word != "。"]
    rows = WordTokenizer.from_captions(captions, 1).encode(captions, 12)
    assert not torch.equal(*rows)
    assert UNKNOWN_ID not in rows


def test_a_vocabulary_that_was_stored_with_the_first_rule_keeps_its_ids():
    stored = {"type": "WordTokenizer", "version": 1, "words": ["ह", "न", "द", "两只猫在床上", "i", "ki", "café"]}
    old = WordTokenizer.from_json(stored)
    assert old.encode(["हिन्दी", "两只猫在床上", "İki café"], 6).tolist() == [
        [2, 4, 5, 6, 3, 0], [2, 7, 3, 0, 0, 0], [2, 8, 9, 10, 3, 0]
    ]  # fmt: skip
    assert json.loads(old.to_json()) == stored
    new = WordTokenizer(["हिन्दी", "两", "只"])
    assert json.loads(new.to_json())["version"] == 2
    assert new.encode(["हिन्दी 两只"], 5).tolist() == [[2, 4, 5, 6, 3]]
    assert WordTokenizer(["café"]).fingerprint != WordTokenizer(["café"], version=1).fingerprint
    # one rule for a vocabulary of ASCII words: runs of either age start from each other
    assert WordTokenizer(["a", "dog"]) == WordTokenizer(["a", "dog"], version=1)


def test_over_length_cuts_words_and_keeps_the_end():
    tokenizer = WordTokenizer.from_words(["a", "b", "c"])
    assert tokenizer.encode(["a b c a", "a x", ""], 4).tolist() == [[2, 4, 5, 3], [2, 4, 1, 3], [2, 3, 0, 0]]
    assert tokenizer.encode([], 4).shape == (0, 4)
    assert tokenizer.decode(range(7)) == [*SPECIAL_TOKENS, "a", "b", "c"]


def test_captions_give_words_by_count_then_alphabet():
    assert WordTokenizer.from_captions(CAPTIONS).words == ("a", "dog")
    everything = WordTokenizer.from_captions(CAPTIONS, min_count=1)
    assert everything.words == ("a", "dog", "bird", "cat", "cat's", "runs", "the")
    assert WordTokenizer.from_captions(iter(CAPTIONS), min_count=1, max_size=7).words == ("a", "dog", "bird")


@given(st.lists(TEXTS, min_size=1, max_size=8), st.integers(0, 1000), st.integers(5, 12))
@settings(max_examples=100, deadline=None)
def test_the_order_of_captions_does_not_matter(captions, seed, max_size):
    captions = [*captions, "word"]
    shuffled = random.Random(seed).sample(captions, len(captions))
    first = WordTokenizer.from_captions(captions, min_count=1, max_size=max_size)
    second = WordTokenizer.from_captions(shuffled, min_count=1, max_size=max_size)
    assert (first, first.fingerprint) == (second, second.fingerprint)
    assert first.vocabulary_size <= max_size
    unbounded = WordTokenizer.from_captions(captions, min_count=1)
    assert unbounded.words[: len(first.words)] == first.words
    assert unbounded.unknown_id not in unbounded.encode(captions, 200)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("dog", "dog"),
        ("caf\u00e9 \U0001f600", "caf\u00e9 \U0001f600"),
        ("\ud83d\ude00", "\U0001f600"),
        ("\ud83d a", "\ufffd a"),
    ],
)
def test_halves_of_utf_16_pairs_are_joined_or_replaced(text, clean):
    assert without_lone_surrogates(text) == clean
    without_lone_surrogates(text).encode("utf-8")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: WordTokenizer.from_words([]), "has no word"),
        (lambda: WordTokenizer.from_words("dog"), "the string 'dog'"),
        (lambda: WordTokenizer.from_words(["Dog"]), "'Dog' is not a lower-case word"),
        (lambda: WordTokenizer.from_words(["a dog"]), "'a dog' is not"),
        (lambda: WordTokenizer.from_words(["[PAD]"]), "'[PAD]' is not"),
        (lambda: WordTokenizer.from_words([3]), "3 is not"),
        (lambda: WordTokenizer.from_words(["a", "b", "a"]), "['a'] more than once"),
        (lambda: WordTokenizer.from_captions(["a b c"]), "none of the 3 words of the captions occurs 2 times"),
        (lambda: WordTokenizer.from_captions("a a"), "captions is the string"),
        (lambda: WordTokenizer.from_captions([["a", "a"]]), "of type list"),
        (lambda: WordTokenizer.from_json({"type": "WordTokenizer", "version": 1, "words": "a"}), "type str"),
        (lambda: WordTokenizer.from_json({"type": "WordTokenizer", "version": 1, "words": None}), "type NoneType"),
    ],
)
def test_bad_values_are_refused_with_the_value(call, words):
    refused((re.escape(words), call))


# --- laws of all three kinds -----------------------------------------------------------------------------------------

MERGES = ["h e", "l l", "he ll", "hell o</w>", "l o", "lo w</w>", "lo w", "e r</w>", "low er</w>"]
LETTERS = [*"abcdehlnorstuw0123456789,.!'", "##s", "##e", "dog", "cat", "the"]
KINDS = {
    "words": WordTokenizer(["a", "b", "ab", "1", "caf\u00e9"]),
    "clip": ClipTokenizer(MERGES),
    "clip without merges": ClipTokenizer([]),
    "bert": BertTokenizer([*bert_tokenizer.SPECIAL_TOKENS, *LETTERS]),
    "bert behind ALBEF's cleaning": AlbefTokenizer([*bert_tokenizer.SPECIAL_TOKENS, *LETTERS]),
}
every_kind = pytest.mark.parametrize("tokenizer", KINDS.values(), ids=KINDS)
SPECIAL = st.sampled_from(["[SEP]", "[PAD]", "<end_of_text>", "<|endoftext|>", "\ud83d", "\U0001f600", "dog ", "!"])


@every_kind
@given(texts=st.lists(TEXTS | SPECIAL, max_size=4), context_length=st.integers(3, 12))
@settings(max_examples=60, deadline=None)
def test_every_row_is_start_pieces_end_padding_and_a_shorter_one_is_its_beginning(tokenizer, texts, context_length):
    rows, whole = tokenizer.encode(texts, context_length), tokenizer.encode(texts, 300)
    assert rows.shape == (len(texts), context_length)
    assert rows.dtype == whole.dtype == torch.int64
    for row, long in zip(rows.tolist(), whole.tolist()):
        end = row.index(tokenizer.end_id)
        assert (end, row[:end]) == (min(long.index(tokenizer.end_id), context_length - 1), long[:end])
        assert row[0] == tokenizer.cls_id
        assert row.count(tokenizer.end_id) == row.count(tokenizer.cls_id) == 1  # no text can end a row early
        assert set(row[end + 1 :]) <= {tokenizer.pad_id}
        assert len(tokenizer.decode(row)) == context_length


@every_kind
def test_json_and_pickle_give_an_equal_tokenizer(tokenizer):
    state = json.loads(json.dumps({"tokenizer": tokenizer.to_json()}, indent=1, ensure_ascii=False))["tokenizer"]
    copies = [tokenizer_from_json(state), tokenizer_from_json(json.loads(state)), pickle.loads(pickle.dumps(tokenizer))]
    for copy in (*copies, type(tokenizer).from_json(state)):
        assert type(copy) is type(tokenizer)
        assert copy == tokenizer
        assert (copy.fingerprint, hash(copy), repr(copy)) == (tokenizer.fingerprint, hash(tokenizer), repr(tokenizer))
        assert copy.vocabulary_size == tokenizer.vocabulary_size == len(tokenizer.vocabulary)
        assert copy.encode(CAPTIONS, 7).tolist() == tokenizer.encode(CAPTIONS, 7).tolist()
    assert len({other.fingerprint for other in KINDS.values()}) == len(set(KINDS.values())) == len(KINDS)
    assert all((other == tokenizer) == (other is tokenizer) for other in KINDS.values())


STORED = {  # what a checkpoint of each kind holds; these texts must be read for ever
    '{"type": "WordTokenizer", "version": 1, "words": ["a", "dog"]}': WordTokenizer(["a", "dog"]),
    '{"type": "ClipTokenizer", "version": 1, "ftfy": true, "merges": "eNrLUEjlylHIAQAHsAHw"}':
    ClipTokenizer(["h e", "l l"]),
    '{"type": "BertTokenizer", "version": 1, "vocabulary": "eNqLDnB0ieWKDvXzBpLOPsFAMtg1AEj6OgYDhRK5UvLTAbpQCik="}':
    BertTokenizer([*bert_tokenizer.SPECIAL_TOKENS, "a", "dog"]),
}  # fmt: skip


@pytest.mark.parametrize("text", STORED)
def test_a_stored_tokenizer_is_read_for_ever(text):
    assert tokenizer_from_json(text) == STORED[text]


@every_kind
def test_bad_texts_and_stored_forms_are_refused(tokenizer):
    name, size = type(tokenizer).__name__, tokenizer.vocabulary_size
    keys = ", ".join(json.loads(tokenizer.to_json()))
    for call, words in (
        (lambda: tokenizer.encode("a", 5), "texts is the string 'a'"),
        (lambda: tokenizer.encode(["a", None], 5), "texts holds None of type NoneType"),
        (lambda: tokenizer.decode([size]), f"id {size} is outside [0, {size})"),
        (lambda: tokenizer.decode([-1]), "id -1 is outside"),
        (lambda: tokenizer.from_json("{"), "not valid JSON"),
        (lambda: tokenizer.from_json("[]"), "found list"),
        (lambda: tokenizer.from_json({"type": name}), f"has the keys {keys}; found ['type']"),
        (lambda: tokenizer.from_json({"type": name, "version": 1}), f"has the keys {keys}; found"),
        (lambda: tokenizer.from_json({"type": name, "version": 9}), f"{name!r}, 9; expected: {name!r}, 1"),
        (lambda: tokenizer.from_json({"type": "Bpe", "version": 1, "words": 3}), "'Bpe', 1"),
    ):
        refused((re.escape(words), call))
