"""BERT's WordPiece tokenizer, lower-cased and without accents (oblique spec Sec. 9, GeoMM spec Sec. 13).

With the vocabulary of bert-base-uncased (the oblique paper's is byte-identical to it): PAD 0, UNK 100, CLS 101,
SEP 102, MASK 103; of a caption the first context_length - 2 pieces are kept. Normalising and splitting are the
`tokenizers` library's. Names of special tokens in a caption are ordinary text.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers
from torch import Tensor

from common.data.text_files import find_file, pack, read_lines, read_text, unpack
from common.data.tokenizer import encode_rows, stored_fields, tokens_of, without_lone_surrogates

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
FILE_NAMES = ("vocab.txt", "vocab.txt.gz", "tokenizer.json")
DEFAULT_SOURCE = "google-bert/bert-base-uncased"  # on the hub

_ALBEF_REMOVED = str.maketrans(dict.fromkeys(",.'!?\"()*#:;~", "") | {"-": " ", "/": " "})


def clean_caption(text: str, max_words: int = 30) -> str:
    """A caption as ALBEF, TCL and GeoMM clean it before WordPiece (GeoMM spec Sec. 13).

    Lower case; , . ' ! ? " ( ) * # : ; ~ removed; - and / to spaces; <person> to person; at most max_words words.
    ALBEF collapses only runs of two and more blanks and counts "a<tab>b" as one word; here every blank separates.

    Args:
        text: as annotated.
        max_words: at least 1.
    Returns:
        Words with single spaces between them; may be empty.
    Raises:
        ValueError: if max_words is below 1.
    """
    if max_words < 1:
        raise ValueError(f"max_words is {max_words!r}; it is at least 1")
    text = text.lower().translate(_ALBEF_REMOVED).replace("<person>", "person")
    return " ".join(text.split()[:max_words])


class BertTokenizer:
    """Word pieces to ids, by a vocabulary in the order of its ids.

    Args:
        vocabulary: tokens; those that go on within a word start with ##. See `from_vocabulary`.
    Raises:
        ValueError: if a special token is missing, a token occurs twice, or one has capital letters.
    """

    def __init__(self, vocabulary: Iterable[str]) -> None:
        self.vocabulary: tuple[str, ...] = tuple(vocabulary)
        ids = {token: position for position, token in enumerate(self.vocabulary)}
        missing = [token for token in SPECIAL_TOKENS if token not in ids]
        if missing:
            raise ValueError(f"the vocabulary of {len(ids)} tokens lacks {', '.join(missing)}: is it a BERT's?")
        if len(ids) != len(self.vocabulary):
            twice = [token for token, times in Counter(self.vocabulary).items() if times > 1]
            raise ValueError(f"the vocabulary has {twice[:5]} more than once")
        capital = [token for token in self.vocabulary if token != token.lower() and not re.fullmatch(r"\[.*\]", token)]
        if capital:
            raise ValueError(f"the vocabulary has capital letters ({capital[:3]}); only uncased models are supported")
        self.pad_id, self.unknown_id, self.cls_id, self.end_id, self.mask_id = (ids[token] for token in SPECIAL_TOKENS)
        self._pieces = tokenizers.Tokenizer(models.WordPiece(vocab=ids, unk_token="[UNK]"))
        self._pieces.normalizer = normalizers.BertNormalizer(strip_accents=True, lowercase=True)
        self._pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    @classmethod
    def from_vocabulary(cls, source: str = "") -> "BertTokenizer":
        """From a BERT vocabulary.

        Args:
            source: vocab.txt(.gz), a folder with one of `FILE_NAMES`, or a name on the Hugging Face hub; "" = that of
                bert-base-uncased from the hub.
        Raises:
            ValueError: if there is no such file, or it is no uncased BERT's.
        """
        key = "data.vocabulary" if source else "data.vocabulary is not set, its default"
        path = find_file(source or DEFAULT_SOURCE, FILE_NAMES, key)
        try:
            return cls(_read_vocabulary(path))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @property
    def vocabulary_size(self) -> int:
        """Number of ids, special tokens included; BERT's is 30,522."""
        return len(self.vocabulary)

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids that masked language modelling neither hides nor predicts: PAD, UNK, CLS, SEP, MASK."""
        return (self.pad_id, self.unknown_id, self.cls_id, self.end_id, self.mask_id)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the vocabulary in order, 64 hex digits."""
        content = json.dumps(["BertTokenizer", 1, self.vocabulary])
        return hashlib.sha256(content.encode("utf-8")).hexdigest()

    def encode(self, texts: list[str], context_length: int) -> Tensor:
        """Ids of several texts, [CLS] pieces [SEP] [PAD]...: see `encode_rows`."""
        return encode_rows(self, self._piece_ids, texts, context_length)

    def _piece_ids(self, text: str) -> list[int]:
        # one text at a time: the batched call starts threads, after which loader workers cannot fork in peace
        return self._pieces.encode(without_lone_surrogates(text), add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> list[str]:
        """The tokens of one row; those that go on within a word start with ##.

        Raises:
            ValueError: if an id lies outside [0, vocabulary_size).
        """
        return tokens_of(self.vocabulary, ids)

    def to_json(self) -> str:
        """The tokenizer as a JSON text, about 150 kB with BERT's vocabulary."""
        return json.dumps({"type": "BertTokenizer", "version": 1, "vocabulary": pack("\n".join(self.vocabulary))})

    @classmethod
    def from_json(cls, text: str | dict) -> "BertTokenizer":
        """Read what `to_json` wrote, as text or already parsed.

        Raises:
            ValueError: if it is not such a text; nothing is guessed.
        """
        content = stored_fields(text, "BertTokenizer", 1, ("vocabulary",))
        return cls(unpack(content["vocabulary"]).split("\n"))

    def __reduce__(self) -> tuple:
        return BertTokenizer, (self.vocabulary,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BertTokenizer) and self.vocabulary == other.vocabulary

    def __hash__(self) -> int:
        return hash(self.vocabulary)

    def __repr__(self) -> str:
        return f"BertTokenizer(vocabulary_size={self.vocabulary_size})"


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
