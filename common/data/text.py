"""The tokenizer of a run, from the config or a checkpoint.

A checkpoint stores it with its vocabulary, so loading needs no other file and no network.
"""

import itertools
import json
import warnings
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import filelock

from common.base.files import NoLocks, locked, write_json
from common.base.places import outputs
from common.base.provenance import code_fingerprint, hash_of
from common.base.settings import DataConfig
from common.data.pairs import Pairs
from common.data.scenes import scene_words
from common.data.text_files import parsed_json
from common.data.tokenizer import Tokenizer, WordTokenizer, is_without_spaces

MAX_UNKNOWN_SHARE = 0.2  # of the words
_MIN_SHARE_WITHOUT_SPACES = 0.01  # of the captions
_JUDGED, _JUDGED_LENGTH = 2_000, 64  # captions of a set, ids of a caption
_INSTEAD = (
    "data.tokenizer=bert_wordpiece with a data.vocabulary of that language, e.g. "
    "google-bert/bert-base-multilingual-uncased, or data.tokenizer=clip_bpe, which has no unknown words"
)
_WAIT = 600.0  # seconds, for another process that counts the same words

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


def words_of(pairs: Pairs, min_count: int, max_size: int | None, folder: Path) -> WordTokenizer:
    """The word tokenizer of a training set's captions, counted once and cached.

    Of the processes that share a disk the first counts and the others wait, ten minutes at most. On separate disks, or
    without locks, each counts, with the same result.
    """
    key = hash_of([pairs.fingerprint, min_count, max_size, code_fingerprint(["common/data"])])
    file = folder / f"words-{key}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            with suppress(NoLocks, filelock.Timeout):  # then several may count, with the same result
                stack.enter_context(locked(file.with_suffix(".lock"), "no lock", wait=_WAIT))
            tokenizer = _read_cached(file)
            if tokenizer is None:
                tokenizer = WordTokenizer.from_captions(pairs.all_captions(), min_count, max_size)
                write_json(file, [tokenizer.fingerprint, tokenizer.to_json()])
            return tokenizer
    except OSError as error:
        warnings.warn(f"the words of the captions cannot be cached in {folder}: {error}", stacklevel=2)
        return WordTokenizer.from_captions(pairs.all_captions(), min_count, max_size)


def _read_cached(path: Path) -> WordTokenizer | None:
    # None where the file is missing or damaged
    try:
        fingerprint, text = json.loads(path.read_text(encoding="utf-8"))
        tokenizer = WordTokenizer.from_json(text)
    except (OSError, ValueError, TypeError):
        return None
    return tokenizer if tokenizer.fingerprint == fingerprint else None


def build_tokenizer(data: DataConfig, training_pairs: Pairs) -> Tokenizer:
    """The tokenizer that data.tokenizer names; "words": the scenes' closed vocabulary, or the words of captions."""
    if data.tokenizer != "words":
        return _class_of(_KIND_OF[data.tokenizer]).from_vocabulary(data.vocabulary)
    if data.vocabulary:
        raise ValueError(
            f"data.vocabulary = {data.vocabulary!r} is not used with data.tokenizer = words, whose vocabulary comes "
            f"from the training captions; expected one of: {', '.join(_KIND_OF)}"
        )
    if data.training_sources == {"scenes"}:
        return WordTokenizer.from_words(scene_words())
    return words_of(training_pairs, data.min_word_count, data.max_words, outputs() / "tokenizers")


def warn_of_unread_words(tokenizer: Tokenizer, *sets: Pairs) -> None:
    """Warns of many unknown words, or words without spaces between them, in the sets' first captions; skips scenes."""
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


def _unknown_words(tokenizer: Tokenizer, captions: list[str]) -> tuple[int, int]:
    # and all words of captions; 0 for a tokenizer that knows every character
    if not hasattr(tokenizer, "unknown_id"):
        return 0, 0
    ids = tokenizer.encode(captions, _JUDGED_LENGTH)
    words = (ids != tokenizer.pad_id) & (ids != tokenizer.cls_id) & (ids != tokenizer.end_id)
    return int((ids == tokenizer.unknown_id).sum()), int(words.sum())
