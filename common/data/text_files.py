"""Text files of data and vocabularies: plain or gzip, by path, folder, or name on the Hugging Face hub.

An unreadable one is a ValueError that names the file and the fault.
"""

import base64
import binascii
import codecs
import gzip
import json
import re
import warnings
import zlib
from pathlib import Path
from typing import Any

_FILE_SUFFIXES = (".txt", ".gz", ".json", ".model", ".vocab", ".safetensors", ".pt", ".pth", ".bin")  # no hub names
_HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?", re.ASCII)
_MARKS_OF_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def unpacked(content: bytes) -> bytes:
    """The content of a gzip file, recognised by its first bytes; any other stays as it is.

    Raises:
        OSError, EOFError, zlib.error: it is damaged.
    """
    return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content


def decoded(content: bytes, errors: str = "strict") -> str:
    """Text in UTF-8, or in UTF-16 if it opens with a byte order mark, as Windows writes it."""
    return content.decode("utf-16") if content.startswith(_MARKS_OF_UTF16) else content.decode("utf-8-sig", errors)


def _refused_text(path: Path, error: UnicodeDecodeError) -> ValueError:
    # the error of a file that `decoded` cannot read, with its first wrong byte
    byte, line = error.object[error.start], error.object[: error.start].count(b"\n") + 1
    return ValueError(
        f"{path} is no text in {error.encoding.upper()}: byte 0x{byte:02x} at position {error.start}, line {line}; "
        "expected UTF-8, or UTF-16 with a byte order mark. To convert a file of Windows: iconv -f CP1252 -t UTF-8"
    )


def raw_text(path: Path, errors: str = "strict") -> str:
    """Content of a text file, `unpacked` and `decoded`, with its own line ends."""
    try:
        return decoded(unpacked(path.read_bytes()), errors)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise _refused_text(path, error) from None


def read_text(path: Path) -> str:
    """`raw_text` with line ends of Unix."""
    return raw_text(path).replace("\r\n", "\n")


def read_json(path: Path) -> Any:
    """Content of a JSON file, plain or gzip."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected: a JSON file, which may be packed with gzip")
    return parsed_json(read_text(path), path)


def parsed_json(text: Any, where: str | Path) -> Any:
    """Content of a JSON text; parsed content stays as it is."""
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file, plain or gzip."""
    content = parsed_json(read_text(path), path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; expected: a mapping")
    return content


def read_lines(path: Path) -> list[str]:
    """Lines without their ends; a blank line counts, the end of the last line does not start another."""
    # split at \n only: a vocabulary may hold the other characters at which str.splitlines would part
    return read_text(path).removesuffix("\n").split("\n")


def find_file(name: str, file_names: tuple[str, ...], key: str) -> Path:
    """A file by its path, by a folder that holds it, or by the name of a model on the hub.

    A hub name is first searched in the local cache, then downloaded; a path never touches the network.

    Args:
        file_names: inside a folder or a model, the preferred one first.
    Raises:
        ValueError: there is none.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    accepted = ", ".join(file_names)
    if path.is_dir():
        for file_name in file_names:
            if (path / file_name).is_file():
                return path / file_name
        names = ", ".join(sorted(item.name for item in path.iterdir())[:10])
        raise ValueError(f"{key} = {name!r} is a folder without any of {accepted}; it has: {names or 'nothing'}")
    if not _HUB_NAME.fullmatch(name) or name.endswith(_FILE_SUFFIXES):
        raise ValueError(
            f"{key} = {name!r}: no such file; expected: a file or a folder that holds one of {accepted}, "
            "or the name of a model on the Hugging Face hub"
        )
    return _hub_file(name, file_names, key)


def stated_file(name: str, *file_names: str) -> Path | None:
    """The first of these files in a folder, or a model on the hub; None where it has none (warned of if not known).

    A bare file has none beside it.
    """
    if Path(name).expanduser().is_file():
        return None
    try:
        return find_file(name, file_names, "weights")
    except _NotReachedError as error:
        warnings.warn(f"{error}; it is taken to have none", stacklevel=2)
    except ValueError:
        pass
    return None


class _NotReachedError(ValueError):
    # neither in the cache nor known to be missing on the hub
    pass


def _hub_file(name: str, file_names: tuple[str, ...], key: str) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    reason, kind, loads = "", _NotReachedError, (try_to_load_from_cache, hf_hub_download)
    if "/" in name and (folder := Path(name).parent).is_dir():  # a mistyped path need not wait for a network
        reason, loads = f"nothing is downloaded, as the folder {folder} is here", loads[:1]
    for load in loads:
        for file_name in file_names:
            try:
                path = load(name, file_name)
            except LocalEntryNotFoundError as error:  # offline; a subclass of the next one
                reason, kind = str(error), _NotReachedError
                break
            except EntryNotFoundError:
                reason, kind = "the model has none of them", ValueError
                continue
            except (OSError, ValueError) as error:  # no such model, no such name; errors of connections are OSErrors
                reason = str(error)
                break
            if isinstance(path, str):
                return Path(path)
    below = f"; or model.weights=<folder> (make: WEIGHTS=<folder>) with {name.rpartition('/')[2]}/ in it"
    raise kind(
        f"{key} = {name!r}: no such file or folder, and no {', '.join(file_names)} of a model of that name could be "
        f"had from the Hugging Face hub or its local cache; expected: a file, a folder with one of these, or the name "
        f"of a model{below if key.startswith(('model.', 'data.')) else ''} ({reason.strip().partition(chr(10))[0]})"
    )


def pack(text: str) -> str:
    """A long text as short ASCII: deflate, then base64."""
    return base64.b64encode(zlib.compress(text.encode("utf-8"), 9)).decode("ascii")


def unpack(packed: str) -> str:
    """Inverse of `pack`."""
    try:
        return zlib.decompress(base64.b64decode(packed, validate=True)).decode("utf-8")
    except (TypeError, ValueError, binascii.Error, zlib.error) as error:
        raise ValueError(f"a packed text is damaged: {error}") from error
