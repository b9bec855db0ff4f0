"""A word tokenizer: the words of the training captions, nothing learned and nothing downloaded."""

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

PAD_ID, UNKNOWN_ID, CLS_ID, END_ID = 0, 1, 2, 3
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")  # no word has brackets, so they cannot collide

# letters and digits of any script; an apostrophe belongs to a word only between two of them (dog's, don't)
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


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
        return len(SPECIAL_TOKENS) + len(self.words)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the vocabulary in order, 64 hex digits."""
        return hashlib.sha256(self.to_json().encode("utf-8")).hexdigest()

    def encode(self, texts: list[str], context_length: int) -> Tensor:
        """Ids of several texts: [CLS] words [SEP] [PAD]...

        Args:
            texts: one string each; an empty one gives [CLS] [SEP].
            context_length: ids per row, at least 3. Words that do not fit are cut, the end token stays.
        Returns:
            (num_texts, context_length), int64.
        Raises:
            ValueError: if `context_length` is too small or `texts` is not a list of strings.
        """
        if context_length < 3:
            raise ValueError(f"context_length is {context_length!r}; [CLS], a word and [SEP] need at least 3")
        if isinstance(texts, str):
            raise ValueError(f"texts is the string {texts!r}; a list of strings is needed")
        rows = []
        for text in texts:
            if not isinstance(text, str):
                raise ValueError(f"texts holds {text!r} of type {type(text).__name__}; each must be a string")
            ids = [self._ids.get(word, UNKNOWN_ID) for word in split_words(text)[: context_length - 2]]
            rows.append([CLS_ID, *ids, END_ID] + [PAD_ID] * (context_length - 2 - len(ids)))
        return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), context_length)

    def decode(self, ids: Iterable[int]) -> list[str]:
        """The tokens of one row, special ones by their names in brackets.

        Raises:
            ValueError: if an id lies outside [0, vocabulary_size).
        """
        tokens = []
        for token_id in map(int, ids):
            if not 0 <= token_id < self.vocabulary_size:
                raise ValueError(f"id {token_id} is outside [0, {self.vocabulary_size})")
            special = token_id < len(SPECIAL_TOKENS)
            tokens.append(SPECIAL_TOKENS[token_id] if special else self.words[token_id - len(SPECIAL_TOKENS)])
        return tokens

    def unknown_share(self, captions: Iterable[str]) -> float:
        """Share of the running words of the captions that have no id of their own, in [0, 1]; 0 without words."""
        counts = _count_words(captions)
        total = sum(counts.values())
        unknown = sum(times for word, times in counts.items() if word not in self._ids)
        return unknown / total if total else 0.0

    def to_json(self) -> str:
        """The tokenizer as a JSON text; equal vocabularies give equal texts."""
        return json.dumps({"type": "WordTokenizer", "version": 1, "words": self.words})

    @classmethod
    def from_json(cls, text: str | dict) -> "WordTokenizer":
        """Read what `to_json` wrote, as text or already parsed.

        Raises:
            ValueError: if it is not such a text; nothing is guessed.
        """
        try:
            content = json.loads(text) if isinstance(text, str) else text
        except json.JSONDecodeError as error:
            raise ValueError(f"the tokenizer is not valid JSON: {error}") from error
        if not isinstance(content, dict) or set(content) != {"type", "version", "words"}:
            found = sorted(content) if isinstance(content, dict) else type(content).__name__
            raise ValueError(f"a tokenizer has the keys type, version, words; found {found}")
        if (content["type"], content["version"]) != ("WordTokenizer", 1):
            raise ValueError(
                f"type, version are {content['type']!r}, {content['version']!r}; accepted: 'WordTokenizer', 1"
            )
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
