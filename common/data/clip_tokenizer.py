"""CLIP's byte-pair tokenizer: 49,408 ids, start 49406, end 49407, padded with 0.

Equal to OpenAI's and open_clip's, except that names of special tokens in a caption are ordinary text, so that no
caption ends early. Text is cleaned as in the release: ftfy, HTML entities twice, spaces, lower case.

ftfy repairs wrongly decoded text, curly quotes, ligatures and full-width letters.
"""

import html
import importlib.util
import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import ftfy
import tokenizers
from tokenizers import models, pre_tokenizers

from common.data.text_files import find_file, pack, read_json_object, read_lines, stated_file, unpack
from common.data.tokenizer import Tokenizer, ids_of

NUM_MERGES = 48_894  # CLIP uses the first 49,152 - 256 - 2 of the 262k lines of its file
START_TOKEN, END_TOKEN = "<start_of_text>", "<end_of_text>"  # open_clip's names
FILE_NAMES = ("merges.txt", "bpe_simple_vocab_16e6.txt.gz", "bpe_simple_vocab_16e6.txt", "tokenizer.json")

_WORD_END = "</w>"
# only U+0345 is dropped, as in the release: a mark whose other case is a letter, and its expression ignores case
_PIECES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|\p{L}+|\p{N}|[^\s\p{L}\p{N}\x{0345}]+"
# neither ftfy nor html.unescape changes such a text
_PLAIN = re.compile(r"[\t\n\r -%'-~]*")


def clean_text(text: str) -> str:
    """Cleans a text as the module states."""
    if not _PLAIN.fullmatch(text):
        text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return " ".join(text.split()).lower()


class ClipTokenizer(Tokenizer):
    """Byte pairs to ids: 256 bytes, the same as word ends, one id per merge, start, end. 0 pads (it is also "!").

    CLIP's context length is 77. `decode` gives byte characters, "</w>" at the end of a word.

    Args:
        merges: pairs "left right" in the order of merging.
    """

    stored = ("ftfy", "merges")

    def __init__(self, merges: Iterable[str]) -> None:
        self.merges: tuple[str, ...] = tuple(merges)
        try:
            vocabulary = _vocabulary(self.merges)
            pairs = [tuple(merge.split(" ")) for merge in self.merges]
            pieces = tokenizers.Tokenizer(models.BPE(ids_of(vocabulary[:-2]), pairs, end_of_word_suffix=_WORD_END))
        except Exception as error:  # tokenizers raises no narrower class
            raise ValueError(
                f"the merges from {self.merges[0]!r} on are no byte pairs: {str(error).partition(chr(10))[0]}; "
                "expected: two tokens with a space between them, as in CLIP's merges.txt"
            ) from None
        pieces.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(_PIECES), behavior="removed", invert=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        special = (0, len(vocabulary) - 2, len(vocabulary) - 1)
        super().__init__(pieces, clean_text, vocabulary, special, (self.merges,))

    @classmethod
    def from_vocabulary(cls, source: str = "") -> "ClipTokenizer":
        """From a vocabulary of CLIP.

        Args:
            source: bpe_simple_vocab_16e6.txt(.gz) or merges.txt, a folder with one of `FILE_NAMES`, or a hub name; ""
                is the file in the optional open_clip package.
        """
        path = find_file(source, FILE_NAMES, "data.vocabulary") if source else _bundled_file()
        tokenizer = cls(_read_merges(path))
        if path.name == "merges.txt" and (path.parent / "vocab.json").is_file():
            _check_ids(path.parent / "vocab.json", tokenizer.vocabulary)
        if path.name == "tokenizer.json":
            _check_ids(path, tokenizer.vocabulary)
        if len(tokenizer.merges) != NUM_MERGES:
            warnings.warn(
                f"{path} has {len(tokenizer.merges)} merges, CLIP's vocabulary has {NUM_MERGES}: the ids are others",
                stacklevel=2,
            )
        return tokenizer

    def check_beside(self, weights: str, key: str) -> None:
        """As `BertTokenizer.check_beside`, for the merges and ids beside the weights."""
        file = stated_file(weights, *FILE_NAMES)
        if file is not None and ClipTokenizer.from_vocabulary(str(file)) != self:
            raise ValueError(
                f"{key} = {weights}: {file.name} in it has other merges than data.vocabulary; expected: "
                f"data.vocabulary={weights}"
            )

    def _fields(self) -> tuple[Any, ...]:
        return True, pack("\n".join(self.merges))  # 280 kB with CLIP's vocabulary

    @classmethod
    def _from_fields(cls, ftfy: Any, merges: Any, version: int) -> "ClipTokenizer":
        if ftfy is not True:
            raise ValueError(f"ftfy is {ftfy!r}; expected: true, as captions cleaned without ftfy have other ids")
        merges = unpack(merges)
        return cls(merges.split("\n") if merges else [])


def _vocabulary(merges: tuple[str, ...]) -> tuple[str, ...]:
    # tokens in the order of their ids
    # printable bytes first, each as itself, then the others: the order of the characters that stand for them
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (letter + _WORD_END for letter in letters)
    return (*letters, *words, *(merge.replace(" ", "") for merge in merges), START_TOKEN, END_TOKEN)


def _bundled_file() -> Path:
    # the vocabulary file inside the open_clip package, without importing it
    package = importlib.util.find_spec("open_clip")
    path = Path(package.origin).parent / FILE_NAMES[1] if package and package.origin else None
    if path is None or not path.is_file():
        raise ValueError(
            'data.vocabulary = "" means the vocabulary in the optional package open_clip, which is not installed: '
            "pip install open_clip_torch, or set data.vocabulary to bpe_simple_vocab_16e6.txt.gz, to the folder of a "
            "transformers CLIP model, or to its name on the Hugging Face hub, e.g. openai/clip-vit-base-patch32"
        )
    return path


def _read_merges(path: Path) -> list[str]:
    if path.suffix == ".json":
        model = read_json_object(path).get("model")
        merges = model.get("merges") if isinstance(model, dict) else None
        if not isinstance(merges, list):
            raise ValueError(f"{path} holds no byte-pair model: model.merges is missing")
        return [" ".join(merge) if isinstance(merge, list) else merge for merge in merges]
    lines = read_lines(path)
    if "#version" in lines[0]:
        lines = lines[1:]
    return lines[:NUM_MERGES]


def _check_ids(path: Path, vocabulary: Sequence[str]) -> None:
    content = read_json_object(path)
    stated = content if path.name == "vocab.json" else content["model"].get("vocab")
    if not isinstance(stated, dict):
        raise ValueError(f"{path} holds no byte-pair model: model.vocab is missing")
    for position, token in enumerate(vocabulary[:-2]):
        if stated.get(token) != position:
            raise ValueError(f"{path}: {token!r} has id {stated.get(token)}, in CLIP's order it is {position}")
