"""The tokenizer of a run, from the config or a checkpoint.

A checkpoint stores it with its vocabulary, so loading needs no other file and no network.
"""

import itertools
import warnings
from typing import Any

from common.base.settings import DataConfig
from common.data.pairs import Pairs
from common.data.scenes import scene_words
from common.data.text_files import parsed_json
from common.data.tokenizer import Tokenizer, WordTokenizer, is_without_spaces

MAX_UNKNOWN_SHARE = 0.2  # of the words
MAX_CUT_SHARE = 0.2  # of the captions
_MIN_SHARE_WITHOUT_SPACES = 0.01  # of the captions
_JUDGED, _JUDGED_LENGTH = 2_000, 64  # captions of a set, ids of a caption
_INSTEAD = (
    "data.tokenizer=bert_wordpiece with a data.vocabulary of that language, e.g. "
    "google-bert/bert-base-multilingual-uncased, or data.tokenizer=clip_bpe, which has no unknown words"
)

_KINDS = ("WordTokenizer", "ClipTokenizer", "BertTokenizer", "AlbefTokenizer")
_KIND_OF = {"clip_bpe": "ClipTokenizer", "bert_wordpiece": "BertTokenizer", "albef_wordpiece": "AlbefTokenizer"}


def tokenizer_from_json(text: str | dict[str, Any]) -> Tokenizer:
    """The tokenizer of any kind that `to_json` wrote."""
    content = parsed_json(text, "the tokenizer")
    kind = content.get("type") if isinstance(content, dict) else None
    if kind not in _KINDS:
        raise ValueError(f"the tokenizer is of type {kind!r}; expected one of: {', '.join(_KINDS)}")
    return _class_of(kind).from_json(content)


def _class_of(kind: str) -> type[Tokenizer]:
    # imported here, so that a run depends only on the tokenizer that it uses
    if kind == "ClipTokenizer":
        from common.data.clip_tokenizer import ClipTokenizer

        return ClipTokenizer
    if kind in ("BertTokenizer", "AlbefTokenizer"):
        from common.data.bert_tokenizer import AlbefTokenizer, BertTokenizer

        return BertTokenizer if kind == "BertTokenizer" else AlbefTokenizer
    return WordTokenizer


def build_tokenizer(data: DataConfig, training_pairs: Pairs) -> Tokenizer:
    """The tokenizer that data.tokenizer names; "words": the scenes' closed vocabulary, or the words of captions."""
    if data.tokenizer != "words":
        return _class_of(_KIND_OF[data.tokenizer]).from_vocabulary(data.vocabulary)
    if data.vocabulary:
        raise ValueError(
            f"data.vocabulary = {data.vocabulary!r} is not used with data.tokenizer = words, whose vocabulary comes "
            f"from the training captions; expected one of: {', '.join(_KIND_OF)}"
        )
    if {part.source or data.source for part in data.mixture or [data]} == {"scenes"}:
        return WordTokenizer.from_words(scene_words())
    if not hasattr(training_pairs, "all_captions"):
        raise ValueError(
            f"data.tokenizer = words takes its words from captions, {training_pairs.name} has none; expected: the "
            f"tokens of a run that it starts from (start.run, model.init), or one of: {', '.join(_KIND_OF)}"
        )
    return WordTokenizer.from_captions(training_pairs.all_captions(), data.min_word_count, data.max_words)


def warn_of_unread_words(tokenizer: Tokenizer, context_length: int, *sets: Pairs) -> None:
    """Warns of many words that are unknown, not separated by spaces, or beyond `context_length`; skips scenes.

    The first captions of each set are read.
    """
    parts = [part for captioned in sets for part in getattr(captioned, "parts", [captioned])]
    for part in (part for part in parts if hasattr(part, "all_captions")):
        captions = list(itertools.islice(part.all_captions(), _JUDGED))
        where = f"{part.name}: of the first {len(captions)} captions"
        without_spaces = [caption for caption in captions if is_without_spaces(caption)]
        if isinstance(tokenizer, WordTokenizer) and len(without_spaces) > _MIN_SHARE_WITHOUT_SPACES * len(captions):
            warnings.warn(
                f"{where} {len(without_spaces)} are in a script without spaces between words, e.g. "
                f"{without_spaces[0][:20]!r}; data.tokenizer=words takes each character as a word. Take {_INSTEAD}",
                stacklevel=2,
            )
        unknown, words = _unknown_words(tokenizer, captions)
        if unknown > MAX_UNKNOWN_SHARE * words:
            warnings.warn(
                f"{where} {unknown / words:.0%} of the words are unknown to the tokenizer of this run, so that "
                f"different captions get the same ids; expected at most {MAX_UNKNOWN_SHARE:.0%}. Take {_INSTEAD}, or "
                "for data.tokenizer=words a lower data.min_word_count or a higher data.max_words",
                stacklevel=2,
            )
        is_cut = tokenizer.encode(captions, context_length + 1)[:, -1] == tokenizer.end_id
        if is_cut.sum() > MAX_CUT_SHARE * len(captions):
            warnings.warn(
                f"{where} {int(is_cut.sum())} have more than data.context_length = {context_length} tokens, start and "
                f"end included, and their ends are not read; expected at most {MAX_CUT_SHARE:.0%}. Take a higher "
                "data.context_length",
                stacklevel=2,
            )


def _unknown_words(tokenizer: Tokenizer, captions: list[str]) -> tuple[int, int]:
    # and all words of captions; 0 for a tokenizer that knows every character
    if not hasattr(tokenizer, "unknown_id"):
        return 0, 0
    ids = tokenizer.encode(captions, _JUDGED_LENGTH)
    words = (ids != tokenizer.pad_id) & (ids != tokenizer.cls_id) & (ids != tokenizer.end_id)
    return int((ids == tokenizer.unknown_id).sum()), int(words.sum())
