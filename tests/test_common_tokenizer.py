"""common/data/tokenizer.py: laws of the word tokenizer."""

import json
import pickle
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.data.tokenizer import (
    CLS_ID,
    END_ID,
    PAD_ID,
    SPECIAL_TOKENS,
    UNKNOWN_ID,
    WordTokenizer,
    split_words,
    without_lone_surrogates,
)

TEXTS = st.text(max_size=60) | st.text(alphabet="ab 'A,.-1_\u2019\u0130\u00df\u0301", max_size=40)
CAPTIONS = ["A dog runs.", "a dog, a cat", "the cat's dog", "A bird"]


@given(TEXTS)
@settings(max_examples=300, deadline=None)
def test_splitting_twice_is_splitting_once(text):
    words = split_words(text)
    assert split_words(" ".join(words)) == words
    assert all(word == word.lower() and word.strip("'") == word and word for word in words)


@given(TEXTS, TEXTS)
@settings(max_examples=200, deadline=None)
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
        (" .,!? ", []),
    ],
)
def test_words_are_runs_of_letters_and_digits_with_inner_apostrophes(text, words):
    assert split_words(text) == words


@given(st.lists(TEXTS, min_size=1, max_size=5), st.integers(3, 12))
@settings(max_examples=200, deadline=None)
def test_every_row_is_cls_words_sep_padding(texts, context_length):
    tokenizer = WordTokenizer.from_words(["a", "b", "ab", "1"])
    rows = tokenizer.encode(texts, context_length)
    assert rows.shape == (len(texts), context_length)
    assert rows.dtype == torch.int64
    assert 0 <= int(rows.min()) <= int(rows.max()) < tokenizer.vocabulary_size
    for text, row in zip(texts, rows.tolist()):
        end = row.index(END_ID)
        assert row[0] == CLS_ID
        assert row.count(END_ID) == row.count(CLS_ID) == 1
        assert set(row[end + 1 :]) <= {PAD_ID}
        assert PAD_ID not in row[:end]
        expected = [word if word in tokenizer.words else "[UNK]" for word in split_words(text)]
        assert tokenizer.decode(row[1:end]) == expected[: context_length - 2]


@given(st.lists(st.lists(st.sampled_from(["red", "green", "blue", "dog", "cat"]), max_size=6), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_a_longer_context_only_appends_and_decoding_gives_the_words_back(sentences):
    tokenizer = WordTokenizer.from_words(["red", "green", "blue", "dog", "cat"])
    texts = [" ".join(words) for words in sentences]
    short, long = tokenizer.encode(texts, 8), tokenizer.encode(texts, 11)
    assert (long[:, :8] == short).all()
    assert (long[:, 8:] == PAD_ID).all()
    for words, row in zip(sentences, short.tolist()):
        assert tokenizer.decode(row)[1 : len(words) + 1] == words


def test_over_length_cuts_words_and_keeps_the_end():
    tokenizer = WordTokenizer.from_words(["a", "b", "c"])
    assert tokenizer.encode(["a b c a", "a x", ""], 4).tolist() == [[2, 4, 5, 3], [2, 4, 1, 3], [2, 3, 0, 0]]
    assert tokenizer.encode([], 4).shape == (0, 4)


def test_the_special_ids_are_fixed():
    tokenizer = WordTokenizer.from_words(["a"])
    ids = (tokenizer.pad_id, tokenizer.unknown_id, tokenizer.cls_id, tokenizer.end_id)
    assert ids == (PAD_ID, UNKNOWN_ID, CLS_ID, END_ID) == (0, 1, 2, 3)
    assert tokenizer.vocabulary_size == 5
    assert tokenizer.decode(range(5)) == [*SPECIAL_TOKENS, "a"]


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
    assert first == second
    assert first.fingerprint == second.fingerprint
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


def test_the_vocabulary_lists_tokens_by_id():
    tokenizer = WordTokenizer.from_words(["dog", "a"])
    assert tokenizer.vocabulary == (*SPECIAL_TOKENS, "dog", "a")
    assert tokenizer.encode(["dog a"], 4)[0].tolist() == [CLS_ID, 4, 5, END_ID]


def test_json_and_pickle_give_an_equal_tokenizer():
    tokenizer = WordTokenizer.from_captions([*CAPTIONS, "caf\u00e9 caf\u00e9"])
    for copy in (
        WordTokenizer.from_json(tokenizer.to_json()),
        WordTokenizer.from_json(json.loads(tokenizer.to_json())),
        pickle.loads(pickle.dumps(tokenizer)),
    ):
        assert copy == tokenizer
        assert copy.fingerprint == tokenizer.fingerprint
        assert hash(copy) == hash(tokenizer)
        assert copy.encode(CAPTIONS, 7).tolist() == tokenizer.encode(CAPTIONS, 7).tolist()
    assert WordTokenizer.from_words(["dog", "a"]).fingerprint != WordTokenizer.from_words(["a", "dog"]).fingerprint


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
        (lambda: WordTokenizer.from_captions(["a a"], min_count=0), "min_count is 0"),
        (lambda: WordTokenizer.from_captions(["a a"], max_size=4), "max_size is 4"),
        (lambda: WordTokenizer(["a"]).encode(["a"], 2), "context_length is 2"),
        (lambda: WordTokenizer(["a"]).encode("a", 5), "texts is the string"),
        (lambda: WordTokenizer(["a"]).encode([None], 5), "of type NoneType"),
        (lambda: WordTokenizer(["a"]).decode([5]), "id 5 is outside [0, 5)"),
        (lambda: WordTokenizer(["a"]).decode([-1]), "id -1 is outside"),
        (lambda: WordTokenizer.from_json("{"), "not valid JSON"),
        (lambda: WordTokenizer.from_json("[]"), "found list"),
        (lambda: WordTokenizer.from_json('{"words": ["a"]}'), "found ['words']"),
        (lambda: WordTokenizer.from_json({"type": "Bpe", "version": 1, "words": ["a"]}), "'Bpe', 1"),
        (lambda: WordTokenizer.from_json({"type": "WordTokenizer", "version": 1, "words": "a"}), "type str"),
    ],
)
def test_bad_values_are_refused_with_the_value(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert words in str(error.value)
