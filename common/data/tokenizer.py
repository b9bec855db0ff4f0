"""What a tokenizer offers, and the word tokenizer: the words of the training captions, nothing downloaded.

The other two are in `clip_tokenizer.py` and `bert_tokenizer.py`; `text.py` chooses one and rebuilds it.
"""

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

PAD_ID, UNKNOWN_ID, CLS_ID, END_ID = 0, 1, 2, 3
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")  # no word has brackets, so they cannot collide

# letters and digits of any script; an apostrophe belongs to a word only between two of them (dog's, don't)
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


class Tokenizer(Protocol):
    """Texts to rows of ids: start, pieces, end, padding. No text can produce the ids of the special tokens.

    What follows the first `end_id` of a row is padding; `pad_id` alone does not tell, CLIP pads with an ordinary id.
    Equal tokenizers have equal fingerprints. `tokenizer_from_json` in `text.py` reads what `to_json` wrote, offline.
    """

    pad_id: int
    cls_id: int  # opens a row: [CLS] or start of text
    end_id: int  # [SEP] or end of text

    @property
    def vocabulary_size(self) -> int:
        """Ids lie in [0, vocabulary_size)."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all that decides the ids, 64 hex digits."""

    def encode(self, texts: list[str], context_length: int) -> Tensor:
        """(num_texts, context_length), int64; what does not fit is cut, the end token stays."""

    def decode(self, ids: Iterable[int]) -> list[str]:
        """The tokens of one row."""

    def to_json(self) -> str:
        """All that is needed to rebuild it, vocabulary included."""


def encode_rows(
    tokenizer: Tokenizer, piece_ids: Callable[[str], list[int]], texts: list[str], context_length: int
) -> Tensor:
    """Rows start, pieces, end, padding: what the tokenizers' `encode` have in common.

    Args:
        tokenizer: gives the special ids.
        piece_ids: ids of the pieces of one text, without special ones.
        texts: one string each; an empty one gives start, end.
        context_length: ids per row, at least 3. Pieces that do not fit are cut, the end token stays.
    Returns:
        (num_texts, context_length), int64.
    Raises:
        ValueError: if `context_length` is too small or `texts` is not a list of strings.
    """
    if context_length < 3:
        raise ValueError(f"context_length is {context_length!r}; start, one piece and end need at least 3")
    if isinstance(texts, str):
        raise ValueError(f"texts is the string {texts!r}; a list of strings is needed")
    rows = []
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"texts holds {text!r} of type {type(text).__name__}; each must be a string")
        row = [tokenizer.cls_id, *piece_ids(text)[: context_length - 2], tokenizer.end_id]
        rows.append(row + [tokenizer.pad_id] * (context_length - len(row)))
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), context_length)


def tokens_of(vocabulary: Sequence[str], ids: Iterable[int]) -> list[str]:
    """The entries of a vocabulary with the given ids.

    Raises:
        ValueError: if an id lies outside [0, len(vocabulary)).
    """
    tokens = []
    for token_id in map(int, ids):
        if not 0 <= token_id < len(vocabulary):
            raise ValueError(f"id {token_id} is outside [0, {len(vocabulary)})")
        tokens.append(vocabulary[token_id])
    return tokens


def without_lone_surrogates(text: str) -> str:
    """Halves of UTF-16 pairs, which broken JSON brings, joined where they fit and else replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def stored_fields(content: str | dict[str, Any], kind: str, version: int, keys: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a stored tokenizer of one kind.

    Args:
        content: JSON text, or the same already parsed.
        kind, version: what its "type" and "version" must be.
        keys: its other fields, no more and no less.
    Raises:
        ValueError: if it is not such a text; nothing is guessed.
    """
    try:
        fields = json.loads(content) if isinstance(content, str) else content
    except json.JSONDecodeError as error:
        raise ValueError(f"the tokenizer is not valid JSON: {error}") from error
    if not isinstance(fields, dict) or not {"type", "version"} <= set(fields):
        found = sorted(fields) if isinstance(fields, dict) else type(fields).__name__
        raise ValueError(f"a tokenizer has the keys type, version, {', '.join(keys)}; found {found}")
    if (fields["type"], fields["version"]) != (kind, version):
        raise ValueError(f"type, version are {fields['type']!r}, {fields['version']!r}; accepted: {kind!r}, {version}")
    if set(fields) != {"type", "version", *keys}:
        raise ValueError(f"a tokenizer has the keys type, version, {', '.join(keys)}; found {sorted(fields)}")
    return fields


def split_words(text: str) -> list[str]:
    """Lower-case words of a text: runs of letters and digits, with apostrophes inside them.

    Punctuation and signs only separate: "A man's T-shirt, size 10." gives a, man's, t, shirt, size, 10.
    """
    # NFC: an accent written as a sign of its own joins its letter
    return _WORD.findall(unicodedata.normalize("NFC", text.lower()).replace("\u2019", "'"))


class WordTokenizer:
    """Words to ids: 0 pads, 1 stands for unknown words, 2 (CLS) opens, 3 (SEP) ends, words follow from 4.

    Args:
        words: the vocabulary in the order of its ids; see `from_words` and `from_captions`.
    Raises:
        ValueError: if there is no word, one occurs twice, or one is not what `split_words` would give.
    """

    pad_id, unknown_id, cls_id, end_id = PAD_ID, UNKNOWN_ID, CLS_ID, END_ID

    def __init__(self, words: Iterable[str]) -> None:
        if isinstance(words, str):
            raise ValueError(f"words is the string {words!r}; a list of words is needed")
        self.words: tuple[str, ...] = tuple(words)
        if not self.words:
            raise ValueError("the vocabulary has no word")
        for word in self.words:
            if not isinstance(word, str) or split_words(word) != [word]:
                raise ValueError(f"{word!r} is not a lower-case word of letters and digits, no text would contain it")
        self.vocabulary = SPECIAL_TOKENS + self.words
        self._ids = {word: position for position, word in enumerate(self.words, start=len(SPECIAL_TOKENS))}
        if len(self._ids) != len(self.words):
            twice = [word for word, times in Counter(self.words).items() if times > 1]
            raise ValueError(f"the vocabulary has {twice[:5]} more than once")

    @classmethod
    def from_words(cls, words: Iterable[str]) -> "WordTokenizer":
        """A closed vocabulary, ids in the given order."""
        return cls(words)

    @classmethod
    def from_captions(cls, captions: Iterable[str], min_count: int = 2, max_size: int | None = None) -> "WordTokenizer":
        """The words of a set of captions, most frequent first, ties in alphabetical order.

        Args:
            captions: texts; only their words count, not their order.
            min_count: rarer words stay unknown, at least 1.
            max_size: largest `vocabulary_size`, the four special tokens included; None for no bound.
        Raises:
            ValueError: if a bound is out of range, `captions` is a single string, or no word is frequent enough.
        """
        if min_count < 1:
            raise ValueError(f"min_count is {min_count!r}; it is at least 1")
        if max_size is not None and max_size <= len(SPECIAL_TOKENS):
            raise ValueError(f"max_size is {max_size!r}; {len(SPECIAL_TOKENS)} ids are special, so it is at least 5")
        counts = _count_words(captions)
        frequent = [word for word, times in counts.items() if times >= min_count]
        if not frequent:
            raise ValueError(f"none of the {len(counts)} words of the captions occurs {min_count} times (min_count)")
        frequent.sort(key=lambda word: (-counts[word], word))
        return cls(frequent if max_size is None else frequent[: max_size - len(SPECIAL_TOKENS)])

    @property
    def vocabulary_size(self) -> int:
        """Number of ids, special tokens included: ids lie in [0, vocabulary_size)."""
        return len(self.vocabulary)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the vocabulary in order, 64 hex digits."""
        return hashlib.sha256(self.to_json().encode("utf-8")).hexdigest()

    def encode(self, texts: list[str], context_length: int) -> Tensor:
        """Ids of several texts, [CLS] words [SEP] [PAD]...: see `encode_rows`."""
        return encode_rows(self, self._word_ids, texts, context_length)

    def _word_ids(self, text: str) -> list[int]:
        return [self._ids.get(word, UNKNOWN_ID) for word in split_words(text)]

    def decode(self, ids: Iterable[int]) -> list[str]:
        """The tokens of one row, special ones by their names in brackets.

        Raises:
            ValueError: if an id lies outside [0, vocabulary_size).
        """
        return tokens_of(self.vocabulary, ids)

    def to_json(self) -> str:
        """The tokenizer as a JSON text; equal vocabularies give equal texts."""
        return json.dumps({"type": "WordTokenizer", "version": 1, "words": self.words})

    @classmethod
    def from_json(cls, text: str | dict) -> "WordTokenizer":
        """Read what `to_json` wrote, as text or already parsed.

        Raises:
            ValueError: if it is not such a text; nothing is guessed.
        """
        content = stored_fields(text, "WordTokenizer", 1, ("words",))
        if not isinstance(content["words"], list | tuple):
            raise ValueError(f"words is of type {type(content['words']).__name__}; accepted: a list of strings")
        return cls(content["words"])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WordTokenizer) and self.words == other.words

    def __hash__(self) -> int:
        return hash(self.words)

    def __repr__(self) -> str:
        return f"WordTokenizer(vocabulary_size={self.vocabulary_size})"


def _count_words(captions: Iterable[str]) -> Counter[str]:
    if isinstance(captions, str):
        raise ValueError(f"captions is the string {captions!r}; several captions are needed")
    counts: Counter[str] = Counter()
    for caption in captions:
        if not isinstance(caption, str):
            raise ValueError(f"captions holds {caption!r} of type {type(caption).__name__}; each must be a string")
        counts.update(split_words(caption))
    return counts
