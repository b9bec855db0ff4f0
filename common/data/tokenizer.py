"""What all tokenizers share, and the word tokenizer: the words of the training captions, nothing downloaded."""

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import regex
import tokenizers
import torch
from tokenizers import models, pre_tokenizers
from torch import Tensor

from common.data.text_files import parsed_json

PAD_ID, UNKNOWN_ID, CLS_ID, END_ID = 0, 1, 2, 3
LONGEST_PIECE = 100  # characters; BERT knows no longer word, no piece of CLIP's vocabulary has as many
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")  # no word has brackets, so they cannot collide

# Scripts without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese): Unicode's word boundaries need a dictionary
# there, and without one each character is a word (UAX 29).
_SINGLE = r"[[\p{L}\p{N}]&&[\p{Ideographic}\p{Script=Hiragana}\p{Line_Break=Complex_Context}]]"
# A letter or digit with its vowel signs and accents; not what makes an emoji of it.
_LETTER = rf"[[\p{{L}}\p{{N}}]--{_SINGLE}][\p{{M}}--\p{{Me}}--[\ufe00-\ufe0f]]*"
# An apostrophe or a joiner belongs to a word only between two letters (dog's, don't).
_WORD = regex.compile(rf"(?={_SINGLE})\X\p{{M}}*|{_LETTER}(?:['\u200c\u200d]?{_LETTER})*", regex.VERSION1)
_WITHOUT_SPACES = regex.compile(_SINGLE, regex.VERSION1)
_WORD_OF_VERSION_1 = re.compile(r"[^\W_]+(?:'[^\W_]+)*")  # cuts at vowel signs


class Tokenizer:
    """Texts to rows of ids: start, pieces, end, padding.

    No text produces the ids of start, end and padding, except with CLIP, which pads with an ordinary id: what follows
    the first `end_id` of a row is padding.

    Args:
        clean: applied to a text before `pieces`.
        special: ids of padding, start and end.
        parts: arguments of the class for an equal tokenizer: of `==`, `hash` and pickle.
    """

    # keys of `to_json` beside type and version; a kind has their values in `_fields` and takes them in `_from_fields`
    stored: tuple[str, ...] = ()
    versions: tuple[int, ...] = (1,)  # that `from_json` reads
    cleaning = "none"  # of captions before the vocabulary's, as the protocol of an evaluation names it
    version = 1

    def __init__(
        self,
        pieces: tokenizers.Tokenizer,
        clean: Callable[[str], str],
        vocabulary: Iterable[str],
        special: tuple[int, int, int],
        parts: tuple[Any, ...],
    ) -> None:
        self.vocabulary: tuple[str, ...] = tuple(vocabulary)
        self.pad_id, self.cls_id, self.end_id = special  # cls_id opens a row: [CLS] or start of text
        self._pieces, self._clean, self._parts = pieces, clean, parts

    @property
    def vocabulary_size(self) -> int:
        """Special ids included: ids lie in [0, vocabulary_size)."""
        return len(self.vocabulary)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all that decides the ids, 64 hex digits."""
        return hashlib.sha256(self._identity().encode("utf-8")).hexdigest()

    def encode(self, texts: list[str], context_length: int) -> Tensor:
        """Ids of texts.

        Args:
            texts: an empty one gives start, end.
            context_length: at least 3. Pieces that do not fit are cut, the end token stays. Of a text `LONGEST_PIECE` *
                context_length characters are read: cleaning may take the square of their number.
        Returns:
            (num_texts, context_length), int64.
        """
        rows = []
        for text in _checked(texts, "texts"):
            # one text at a time: the batched call starts threads, after which loader workers cannot fork in peace
            text = self._clean(text[: LONGEST_PIECE * context_length])
            ids = self._pieces.encode(text, add_special_tokens=False).ids
            row = [self.cls_id, *ids[: context_length - 2], self.end_id]
            rows.append(row + [self.pad_id] * (context_length - len(row)))
        return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), context_length)

    def decode(self, ids: Iterable[int]) -> list[str]:
        """The tokens of one row."""
        ids = [int(token_id) for token_id in ids]
        outside = [token_id for token_id in ids if not 0 <= token_id < len(self.vocabulary)]
        if outside:
            raise ValueError(f"id {outside[0]} is outside [0, {len(self.vocabulary)})")
        return [self.vocabulary[token_id] for token_id in ids]

    def check_beside(self, weights: str, key: str) -> None:
        """Checks the vocabulary beside the text weights of a setting `key`; words have no such file."""

    def to_json(self) -> str:
        """A JSON text that rebuilds it offline, vocabulary included; equal tokenizers give equal texts."""
        return json.dumps(
            {"type": type(self).__name__, "version": self.version} | dict(zip(self.stored, self._fields()))
        )

    @classmethod
    def from_json(cls, text: str | dict[str, Any]) -> Self:
        """Reads what `to_json` wrote."""
        content = parsed_json(text, "the tokenizer")
        keys = ("type", "version", *cls.stored)
        if isinstance(content, dict) and {"type", "version"} <= set(content):
            kind, version = content["type"], content["version"]
            if kind != cls.__name__ or version not in cls.versions:
                known = " or ".join(map(str, cls.versions))
                raise ValueError(f"type, version are {kind!r}, {version!r}; expected: {cls.__name__!r}, {known}")
        if not isinstance(content, dict) or set(content) != set(keys):
            keys_read = sorted(content) if isinstance(content, dict) else type(content).__name__
            raise ValueError(f"a tokenizer has the keys {', '.join(keys)}; found {keys_read}")
        return cls._from_fields(*(content[key] for key in cls.stored), version=content["version"])

    def _identity(self) -> str:
        return json.dumps([type(self).__name__, 1, *self._parts[::-1]])

    def __reduce__(self) -> tuple:
        return type(self), self._parts

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._parts == other._parts

    def __hash__(self) -> int:
        return hash(self._parts)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(vocabulary_size={self.vocabulary_size})"


def ids_of(vocabulary: Sequence[str]) -> dict[str, int]:
    """Token -> id. Raises: ValueError: a token occurs twice."""
    ids = {token: position for position, token in enumerate(vocabulary)}
    if len(ids) != len(vocabulary):
        twice = [token for token, times in Counter(vocabulary).items() if times > 1]
        raise ValueError(f"the vocabulary has {twice[:5]} more than once")
    return ids


def without_lone_surrogates(text: str) -> str:
    """Joins halves of UTF-16 pairs, which broken JSON brings, where they fit; others become U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def split_words(text: str) -> list[str]:
    """Lower-case words of a text: runs of letters and digits, with apostrophes inside them.

    "A man's T-shirt, size 10." gives a, man's, t, shirt, size, 10. Vowel signs and accents belong to their letter. In
    scripts without spaces each character is a word.
    """
    if text.isascii():  # both rules agree there, and this one is faster
        return split_words_of_version_1(text)
    # NFC: an accent written as a character of its own joins its letter. The Turkish capital \u0130 is that of i.
    text = regex.sub("i\u0307+", "i", unicodedata.normalize("NFC", text).lower())
    return _WORD.findall(unicodedata.normalize("NFC", text).replace("\u2019", "'"))


def split_words_of_version_1(text: str) -> list[str]:
    """The words of tokenizers stored as version 1; for ASCII the same as `split_words`."""
    return _WORD_OF_VERSION_1.findall(unicodedata.normalize("NFC", text.lower()).replace("\u2019", "'"))


def is_without_spaces(text: str) -> bool:
    """Whether a text has characters of a script without spaces between words."""
    return not text.isascii() and _WITHOUT_SPACES.search(text) is not None


class WordTokenizer(Tokenizer):
    """Words to ids: 0 pads, 1 stands for unknown words, 2 (CLS) opens, 3 (SEP) ends, words follow from 4.

    Args:
        words: the vocabulary in the order of its ids.
        version: 2 splits texts by `split_words`, 1 by `split_words_of_version_1`. A vocabulary of ASCII words is stored
            as 1.
    """

    stored = ("words",)
    versions = (1, 2)
    unknown_id = UNKNOWN_ID

    def __init__(self, words: Iterable[str], version: int = 2) -> None:
        if isinstance(words, str):
            raise ValueError(f"words is the string {words!r}; a list of words is needed")
        self.words: tuple[str, ...] = tuple(words)
        if not self.words:
            raise ValueError("the vocabulary has no word")
        is_ascii = all(isinstance(word, str) and word.isascii() for word in self.words)
        self.version = 1 if is_ascii else version
        split = split_words if is_ascii or version == 2 else split_words_of_version_1
        for word in self.words:
            if not isinstance(word, str) or split(word) != [word]:
                raise ValueError(f"{word!r} is not a lower-case word of letters and digits, no text would contain it")
        vocabulary = SPECIAL_TOKENS + self.words
        pieces = tokenizers.Tokenizer(models.WordLevel(ids_of(vocabulary), unk_token=SPECIAL_TOKENS[UNKNOWN_ID]))
        pieces.pre_tokenizer = pre_tokenizers.CharDelimiterSplit(" ")
        parts = (self.words, self.version)
        super().__init__(pieces, lambda text: " ".join(split(text)), vocabulary, (PAD_ID, CLS_ID, END_ID), parts)

    @classmethod
    def from_words(cls, words: Iterable[str]) -> "WordTokenizer":
        """A closed vocabulary, ids in the given order."""
        return cls(words)

    @classmethod
    def from_captions(cls, captions: Iterable[str], min_count: int = 2, max_size: int | None = None) -> "WordTokenizer":
        """The words of captions, most frequent first, ties in alphabetical order.

        Args:
            min_count: at least 1; rarer words stay unknown.
            max_size: largest `vocabulary_size`, at least 5, as four ids are special; None for no bound.
        """
        counts: Counter[str] = Counter()
        for caption in _checked(captions, "captions"):
            counts.update(split_words(caption))
        frequent = [word for word, times in counts.items() if times >= min_count]
        if not frequent:
            raise ValueError(f"none of the {len(counts)} words of the captions occurs {min_count} times (min_count)")
        frequent.sort(key=lambda word: (-counts[word], word))
        return cls(frequent if max_size is None else frequent[: max_size - len(SPECIAL_TOKENS)])

    def _identity(self) -> str:
        return self.to_json()

    def _fields(self) -> tuple[Any, ...]:
        return (self.words,)

    @classmethod
    def _from_fields(cls, words: Any, version: int) -> "WordTokenizer":
        if not isinstance(words, list | tuple):
            raise ValueError(f"words is of type {type(words).__name__}; expected: a list of strings")
        return cls(words, version)


def _checked(texts: Iterable[str], name: str) -> Iterator[str]:
    # the texts, one by one; a single string, itself a sequence of strings, is refused
    if isinstance(texts, str):
        raise ValueError(f"{name} is the string {texts!r}; a list of strings is needed")
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"{name} holds {text!r} of type {type(text).__name__}; each must be a string")
        yield text
