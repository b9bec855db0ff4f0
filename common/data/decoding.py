"""From bytes to an image, and the checks of captions and ids that all readers share."""

import hashlib
import io
import operator
import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from common.data.broken import Unusable, named

MAX_PIXELS = 100_000_000  # larger images are refused by their header, before they are decoded
MAX_SIDE = (
    65_535  # pixels; refused in the same way; a JPEG cannot have more. Resampling takes memory in proportion to a side
)
SHARD_FORMATS = ("JPEG", "PNG", "WebP")
FILE_FORMATS = (*SHARD_FORMATS, "BMP", "GIF", "PPM", "TIFF")  # of image files and tables; no format that runs code

_TURNS = dict(  # EXIF's orientations from 2 on
    enumerate(
        (Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.ROTATE_180, Image.Transpose.FLIP_TOP_BOTTOM,
         Image.Transpose.TRANSPOSE, Image.Transpose.ROTATE_270, Image.Transpose.TRANSVERSE,
         Image.Transpose.ROTATE_90),
        start=2,
    )
)  # fmt: skip
_BITS_PER_SAMPLE, _PHOTOMETRIC = 258, 262  # TIFF's numbers; of the second 0 means that 0 is white
_SAMPLED = 64  # images that a fingerprint reads
_HALF_SIGN = re.compile("[\ud800-\udfff]")  # JSON can spell it, UTF-8 cannot: no hash, no file would take it


def refuse_split(where: str | Path, split: str | None) -> None:
    """Raises ValueError for a split of a source that has none."""
    if split is not None:
        raise ValueError(f"{where} has no splits; split is {split!r}; expected: none, the name without '#{split}'")


def decode_picture(
    content: bytes, decode_size: int | None = None, formats: tuple[str, ...] = SHARD_FORMATS
) -> Image.Image:
    """An RGB image from the bytes of its file, upright (see `upright`).

    Args:
        decode_size: JPEGs may be decoded at 1/2, 1/4 or 1/8 if both sides keep this many pixels: several times faster
            for large photographs, slightly other pixels. None decodes in full.
    Raises:
        Unusable: it is too large or cannot be decoded in full.
    """
    try:
        # opening reads the header only; naming the formats keeps Pillow from trying its many others
        image = Image.open(io.BytesIO(content), formats=[name.upper() for name in formats])
    except UnidentifiedImageError:  # its own message names an object in memory, another one each time
        start = f"it starts with {content[:16]!r}" if content else "it has no bytes"
        accepted = f"{', '.join(formats[:-1])} or {formats[-1]}"
        raise Unusable(f"image cannot be decoded: no {accepted}, {start}") from None
    except MemoryError:
        raise
    except Exception as error:
        raise _undecodable(error) from None
    return upright(image, decode_size)


def upright(image: Image.Image, decode_size: int | None = None) -> Image.Image:
    """An RGB image from one that Pillow has opened, turned and mirrored as its EXIF data say.

    open_clip and torchvision leave it as it was stored. Pictures of the usual benchmarks almost never say so, those of
    phones do.

    Args, Raises: as `decode_picture`.
    """
    try:
        width, height = image.size
        if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
            size = f"{width} x {height} pixels, at most {MAX_PIXELS} in all and {MAX_SIDE} a side are decoded"
            raise Unusable(f"image is too large: {size}")
        if decode_size is not None:
            image.draft("RGB", (decode_size, decode_size))  # only JPEG has it, others ignore it
        image.load()  # decodes to the end; convert would copy an RGB image once more
        turn = _turn_of(image)  # of a TIFF none: Pillow turns it when it loads
        if image.mode == "F" or image.mode.startswith("I"):
            image = _upper_eight_bits(image)
        image = image if turn is None else image.transpose(turn)
        return image if image.mode == "RGB" else image.convert("RGB")
    except (Unusable, MemoryError):
        raise
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error and others
        raise _undecodable(error) from None


def _undecodable(error: Exception) -> Unusable:
    return Unusable(f"image cannot be decoded: {type(error).__name__}, {error}")


def _turn_of(image: Image.Image) -> Image.Transpose | None:
    try:
        return _TURNS.get(image.getexif().get(ExifTags.Base.Orientation))
    except Exception:  # damaged EXIF data say nothing, and the picture is readable
        return None


def _upper_eight_bits(image: Image.Image) -> Image.Image:
    # Grey of 9 to 16 bits as 8 bits. Pillow's own conversion makes all above 255 white.
    is_tiff = image.format == "TIFF"
    if image.mode == "F" or (is_tiff and image.mode == "I"):  # elsewhere "I" has the range of 16 bits
        raise Unusable("image cannot be decoded: its pixels are signed, of 32 bits or floats; expected: 1 to 16 bits")
    bits = image.tag_v2[_BITS_PER_SAMPLE][0] if is_tiff else 16
    upper = (np.asarray(image) >> (bits - 8)).astype(np.uint8)
    # Pillow inverts such a TIFF of 8 bits only
    return Image.fromarray(255 - upper if is_tiff and image.tag_v2.get(_PHOTOMETRIC) == 0 else upper)


def file_bytes(path: Path) -> bytes:
    """Content of an image file. Raises: Unusable."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise Unusable(f"image cannot be read: {error.strerror}") from None


def read_picture(path: Path, decode_size: int | None = None) -> Image.Image:
    """`decode_picture` of a file. Raises: BrokenSample."""
    with named(path):
        return decode_picture(file_bytes(path), decode_size, FILE_FORMATS)


def checked_captions(value: Any, allow_empty: bool) -> list[str]:
    """Captions that a file gives as one string or as a list.

    Raises:
        Unusable: another type, none at all, or a caption that UTF-8 cannot write or that is blank (unless
            `allow_empty`).
    """
    captions = [value] if isinstance(value, str) else value
    if not isinstance(captions, list | tuple):
        raise Unusable(f"captions has the wrong type: {type(value).__name__} instead of a string or a list of strings")
    if not captions:
        raise Unusable("missing caption: the list is empty")
    for caption in captions:
        if not isinstance(caption, str):
            raise Unusable(f"caption is not a string: {type(caption).__name__}")
        if not allow_empty and not caption.strip():
            raise Unusable(f"empty caption: {caption!r}")
        if _HALF_SIGN.search(caption):
            raise Unusable(f"caption has half a surrogate pair: {caption!r}")
    return list(captions)


def id_text(value: Any, what: str = "image_id") -> str:
    """An id, a string or a whole number, as text. Raises: Unusable."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise Unusable(f"{what} has the wrong type: {type(value).__name__} instead of a string or whole number")
    text = str(value)
    if _HALF_SIGN.search(text):
        raise Unusable(f"{what} has half a surrogate pair: {text!r}")
    return text


def number_of(image_id: str) -> int:
    """63 bits of an id's hash: a number >= 0, the same in every process and every set."""
    return int.from_bytes(hashlib.blake2b(image_id.encode("utf-8", "surrogateescape"), digest_size=8).digest()) >> 1


def row_of(index: int, data_set: Any) -> int:
    """A sample's place in [0, len(data_set)); a negative index counts from the end. Raises: IndexError."""
    index = operator.index(index)
    if not -len(data_set) <= index < len(data_set):
        raise IndexError(f"sample {index} of {data_set.name!r}, which has {len(data_set)}")
    return index % len(data_set)


def sampled_places(count: int) -> list[int]:
    """Evenly spaced places in [0, count), first and last included, whose images a fingerprint reads in full.

    Elsewhere a changed image of the same size does not show.
    """
    return sorted(set(np.linspace(0, count - 1, min(count, _SAMPLED)).round().astype(int).tolist()))


def content_hash(path: Path) -> bytes:
    """SHA-256 of a file; b"" where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return b""
