"""BERT's WordPiece tokenizer, lower-cased and without accents: of the oblique paper, ALBEF, TCL and GeoMM.

With the vocabulary of bert-base-uncased (the oblique paper's is byte-identical): PAD 0, UNK 100, CLS 101, SEP 102, MASK
103. Names of special tokens in a caption are ordinary text.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from common.data.text_files import find_file, pack, read_json_object, read_lines, read_text, stated_file, unpack
from common.data.tokenizer import Tokenizer, ids_of, without_lone_surrogates

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
FILE_NAMES = ("vocab.txt", "vocab.txt.gz", "tokenizer.json")
DEFAULT_SOURCE = "google-bert/bert-base-uncased"  # on the hub

_ALBEF_MAX_WORDS = 30
_ALBEF_REMOVED = str.maketrans(dict.fromkeys(",.'!?\"()*#:;~", "") | {"-": " ", "/": " "})


def clean_caption(text: str) -> str:
    """A caption as ALBEF, TCL and GeoMM clean it before WordPiece; may be empty.

    Lower case; , . ' ! ? " ( ) * # : ; ~ removed; - and / to spaces; <person> to person; at most 30 words. ALBEF counts
    "a<tab>b" as one word; here every blank separates.
    """
    text = without_lone_surrogates(text).lower().translate(_ALBEF_REMOVED).replace("<person>", "person")
    return " ".join(text.split()[:_ALBEF_MAX_WORDS])


class BertTokenizer(Tokenizer):
    """Word pieces to ids.

    Args:
        vocabulary: tokens in the order of their ids; those that continue a word start with ##.
    """

    stored = ("vocabulary",)

    def __init__(self, vocabulary: Iterable[str]) -> None:
        vocabulary = tuple(vocabulary)
        missing = sorted(set(SPECIAL_TOKENS) - set(vocabulary), key=SPECIAL_TOKENS.index)
        if missing:
            raise ValueError(f"the vocabulary of {len(vocabulary)} tokens lacks {', '.join(missing)}: is it a BERT's?")
        ids = ids_of(vocabulary)
        capital = [token for token in vocabulary if token != token.lower() and not re.fullmatch(r"\[.*\]", token)]
        if capital:
            raise ValueError(f"the vocabulary has capital letters ({capital[:3]}); only uncased models are supported")
        pad_id, self.unknown_id, cls_id, end_id, self.mask_id = (ids[token] for token in SPECIAL_TOKENS)
        pieces = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
        pieces.normalizer = normalizers.BertNormalizer(strip_accents=True, lowercase=True)
        pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        super().__init__(pieces, without_lone_surrogates, vocabulary, (pad_id, cls_id, end_id), (vocabulary,))

    @classmethod
    def from_vocabulary(cls, source: str = "") -> "BertTokenizer":
        """From a BERT vocabulary.

        Args:
            source: vocab.txt(.gz), a folder with one of `FILE_NAMES`, or a hub name; "" is that of `DEFAULT_SOURCE`.
        """
        key = "data.vocabulary" if source else "data.vocabulary is not set, its default"
        path = find_file(source or DEFAULT_SOURCE, FILE_NAMES, key)
        try:
            tokenizer = cls(_read_vocabulary(path))
            _check_cleaning(path, source or DEFAULT_SOURCE)
            return tokenizer
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def check_beside(self, weights: str, key: str) -> None:
        """As in the base class: with another list of the same length embeddings would be those of other words.

        Raises:
            ValueError: a token beside the weights, a folder or a name on the hub, is another one here.
        """
        file = stated_file(weights, *FILE_NAMES)
        for number, (theirs, ours) in enumerate(zip(_read_vocabulary(file), self.vocabulary) if file else ()):
            if theirs != ours:
                raise ValueError(
                    f"{key} = {weights}: token {number} is {theirs!r}, that of data.vocabulary is {ours!r}; expected: "
                    f"data.vocabulary={weights}"
                )

    def _fields(self) -> tuple[Any, ...]:
        return (pack("\n".join(self.vocabulary)),)  # 150 kB with BERT's vocabulary

    @classmethod
    def _from_fields(cls, vocabulary: Any, version: int) -> "BertTokenizer":
        return cls(unpack(vocabulary).split("\n"))


class AlbefTokenizer(BertTokenizer):
    """A `BertTokenizer` that applies `clean_caption` first, in training and evaluation."""

    cleaning = "albef"

    def __init__(self, vocabulary: Iterable[str]) -> None:
        super().__init__(vocabulary)
        self._clean = clean_caption


# What the text is cleaned by, in tokenizer_config.json and in tokenizer.json; other values give other ids.
_CLEANING = {
    "do_lower_case": (True,),
    "strip_accents": (True, None),
    "tokenize_chinese_chars": (True,),
    "do_basic_tokenize": (True,),
    "never_split": (None, []),
    "lowercase": (True,),
    "handle_chinese_chars": (True,),
    "clean_text": (True,),
    "type": ("BertNormalizer",),
}


def _check_cleaning(path: Path, source: str) -> None:
    # refuses a vocabulary whose folder, or model on the hub, states another cleaning of texts
    if path.suffix == ".json":
        normalizer = json.loads(read_text(path)).get("normalizer")
        file, content = path, {"type": None} if normalizer is None else normalizer
    else:  # of a model on the hub only what is asked for lies beside the vocabulary
        folder = path.parent if Path(source).expanduser().exists() else source
        file = stated_file(str(folder), "tokenizer_config.json")
        content = {} if file is None else read_json_object(file)
    for key, values in _CLEANING.items():
        if key in content and content[key] not in values:
            raise ValueError(
                f"{file.name}: {key} = {content[key]!r}; expected: {values[0]!r}, as uncased BERTs have it"
            )


def _read_vocabulary(path: Path) -> list[str]:
    if path.suffix != ".json":
        return read_lines(path)
    try:
        model = json.loads(read_text(path))["model"]
        ids = model["vocab"]
        tokens = sorted(ids, key=ids.__getitem__)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"no WordPiece model in it ({type(error).__name__}: {error})") from error
    if [ids[token] for token in tokens] != list(range(len(tokens))):
        raise ValueError("the ids of its tokens are not 0, 1, 2, ... without a gap")
    return tokens
