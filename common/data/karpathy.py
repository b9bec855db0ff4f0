"""Captioned images from one JSON file and a folder of images.

The layout is recognised by its content:
  Karpathy splits   {"images": [{"filename", "split", "sentences": [{"raw", "sentid"}], ...}], "dataset"}; COCO adds
                    "filepath" and "cocoid". Flickr8k, Flickr30k and COCO come so.
  COCO captions     {"images": [{"id", "file_name"}], "annotations": [{"id", "image_id", "caption"}]}
  retrieval lists   [{"image": path, "caption": str or list}] (ALBEF); "captions", "image_id" and "caption_ids" too,
                    and "sentence" or "text" of RefCOCO+ (`annotated.py`), without its boxes
Files are plain or gzip. Captions are the raw ones, not the joined tokens.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from common.data.broken import Unusable
from common.data.decoding import refuse_split
from common.data.picture_files import pictures_in_files
from common.data.pictures import Pictures
from common.data.rows import Row, picture_path, pictures_of, refuse_splits
from common.data.text_files import read_json

_SPLIT_OF_ROLE = {"train": "train", "val": "val", "test": "test", "second_test": "test"}


def open_karpathy(
    annotations: str | Path,
    images: str | Path | None = None,
    *,
    split: str | None = None,
    role: str = "train",
    is_ranked: bool = False,
    **options: Any,
) -> Pictures:
    """The images of one split, each with all its captions.

    A retrieval list repeats an image for each caption; its captions are joined in file order. In the other layouts a
    second entry of an id or path is broken in a ranked set; training may repeat.

    Args:
        images: see `find_images`.
        split: Karpathy splits joined by "+"; None is the role's, for training "train+restval" if the file has restval
            (COCO's usual 82,783 + 30,504 images). The other layouts have no splits.
        is_ranked: a part of the training set is, as other roles are.
    """
    annotations = Path(annotations).expanduser()
    content = read_json(annotations)
    # the layout, by its content
    set_name, together = annotations.name, None
    if isinstance(content, dict) and isinstance(content.get("images"), list):
        if isinstance(content.get("annotations"), list):
            refuse_split(annotations, split)
            rows = _coco_rows(content)
        else:
            splits = _chosen_split(annotations, content["images"], split, role).split("+")
            set_name, rows = _set_name(annotations, content, splits), _karpathy_rows(content["images"], splits)
    elif isinstance(content, list):
        refuse_split(annotations, split)
        if not content:
            raise ValueError(f"{annotations}: the list is empty")
        refuse_splits(annotations, (row.get("split") for row in content if isinstance(row, dict)))
        rows, together = map(_list_row, itertools.count(), content), "path"
    else:
        keys = ", ".join(content)[:200] if isinstance(content, dict) else ""
        kind = f"an object with the keys {keys}" if keys else f"of type {type(content).__name__}"
        raise ValueError(
            f"{annotations}: the top level is {kind}; expected: an object with a list 'images' (Karpathy splits, "
            "COCO captions), or a list of objects with 'image' and 'caption'"
        )
    entries, broken = pictures_of(rows, annotations, "val" if is_ranked else role, together)
    return pictures_in_files(entries, broken, annotations, images, set_name.partition(".")[0], role=role, **options)


def _karpathy_rows(images: list[Any], splits: list[str]) -> Iterator[Row]:
    for number, image in enumerate(images):
        place = f"images[{number}]"
        if not isinstance(image, dict):
            yield Row(place, fault=f"entry has the wrong type: {type(image).__name__} instead of an object")
        elif not isinstance(image.get("split"), str):
            kind = type(image.get("split")).__name__
            yield Row(place, fault=f"split has the wrong type: {kind} instead of a string")
        elif image["split"] in splits:
            yield _karpathy_row(place, image)


def _karpathy_row(place: str, image: dict[str, Any]) -> Row:
    sentences = image.get("sentences")
    if not isinstance(sentences, list) or not all(isinstance(sentence, dict) for sentence in sentences):
        return Row(place, fault="sentences has the wrong type: it is no list of objects")
    captions = [sentence.get("raw") for sentence in sentences]
    ids = _known_ids([sentence.get("sentid") for sentence in sentences]) or image.get("sentids")
    folder, path = image.get("filepath", ""), image.get("filename")
    if isinstance(folder, str) and folder and isinstance(path, str):
        path = f"{folder}/{path}"
    image_id = image.get("cocoid")
    if "cocoid" not in image:
        with suppress(Unusable):  # the engine says what is wrong with the path
            path = picture_path(path)
            image_id = path.removesuffix(PurePosixPath(path).suffix)
    return Row(place, path, captions, image_id, ids)


def _set_name(annotations: Path, content: dict[str, Any], splits: list[str]) -> str:
    is_coco = any("cocoid" in image for image in content["images"] if isinstance(image, dict))
    name = str(content.get("dataset", "coco" if is_coco else "")).lower()
    return f"{name or annotations.name.partition('.')[0]}-{splits[0]}"


def _chosen_split(annotations: Path, images: list[Any], split: str | None, role: str) -> str:
    names = (image.get("split") for image in images if isinstance(image, dict))
    counts = Counter(name for name in names if isinstance(name, str))
    if split is None:
        split = _SPLIT_OF_ROLE.get(role, role)
        if split == "train" and "restval" in counts:
            split = "train+restval"
    missing = [name for name in split.split("+") if name not in counts]
    if missing:
        has = ", ".join(f"{name} ({count:,} images)" for name, count in counts.items())
        raise ValueError(
            f"{annotations} has no split {missing[0]!r}; expected one of: {has or 'it has none'}, joined by +"
        )
    return split


def _coco_rows(content: dict[str, Any]) -> Iterator[Row]:
    captions: dict[str, list[tuple[Any, Any]]] = {}  # 5 and "5" are one image
    for number, item in enumerate(content["annotations"]):
        image_id = item.get("image_id") if isinstance(item, dict) else None
        if _is_id(image_id):
            captions.setdefault(str(image_id), []).append((item.get("caption"), item.get("id")))
        else:
            yield Row(f"annotations[{number}]", fault="image_id has the wrong type: no string or whole number")
    for number, image in enumerate(content["images"]):
        place = f"images[{number}]"
        if not isinstance(image, dict) or not _is_id(image.get("id")):
            yield Row(place, fault="entry has the wrong type: no object with an 'id'")
            continue
        texts = captions.pop(str(image["id"]), [])
        ids = _known_ids([caption_id for _, caption_id in texts])
        yield Row(place, image.get("file_name"), [text for text, _ in texts], image["id"], ids)
    for image_id in captions:
        yield Row(f"annotations of image {image_id}", fault="missing image: no such image")


def _list_row(number: int, row: Any) -> Row:
    place = f"[{number}]"
    if not isinstance(row, dict):
        return Row(place, fault=f"entry has the wrong type: {type(row).__name__} instead of an object")
    captions = next((row[key] for key in ("captions", "caption", "sentence", "text") if key in row), None)
    return Row(place, row.get("image"), captions, row.get("image_id"), row.get("caption_ids"))


def _is_id(value: Any) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)  # True would be the key 1


def _known_ids(ids: list[Any]) -> list[Any] | None:
    # the ids, or None where no caption has one
    return None if all(number is None for number in ids) else ids
