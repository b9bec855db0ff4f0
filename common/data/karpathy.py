"""Captioned pictures from one JSON file and a folder of pictures.

Four layouts are recognised by their content (papers/evaluation.md, 13.1 to 13.3):
  Karpathy splits   {"images": [{"filename", "split", "sentences": [{"raw", "sentid"}], ...}], "dataset"}; COCO adds
                    "filepath" and "cocoid". Flickr8k, Flickr30k and COCO come so.
  COCO captions     {"images": [{"id", "file_name"}], "annotations": [{"id", "image_id", "caption"}]}
  retrieval lists   [{"image": path, "caption": str or list}] (ALBEF); "captions", "image_id" and "caption_ids" too
Files may be packed with gzip. The raw captions are used, not the joined tokens, as the file gives them.
"""

import json
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from common.data.broken import BrokenSample
from common.data.picture_files import Entry, PictureFiles, picture_path
from common.data.samples import Unusable, caption_list, check_captions, id_text
from common.data.text_files import read_text

# data set and split -> pictures, captions (0 = not checked); evaluation.md, 2.1 and 2.2
EXPECTED = {
    ("coco", "train"): (82_783, 0),
    ("coco", "restval"): (30_504, 0),
    ("coco", "val"): (5_000, 0),
    ("coco", "test"): (5_000, 25_010),
    ("flickr30k", "train"): (29_000, 145_000),
    ("flickr30k", "val"): (1_014, 5_070),
    ("flickr30k", "test"): (1_000, 5_000),
    ("flickr8k", "train"): (6_000, 30_000),
    ("flickr8k", "val"): (1_000, 5_000),
    ("flickr8k", "test"): (1_000, 5_000),
}

_SPLIT_OF_ROLE = {"train": "train", "val": "val", "test": "test", "second_test": "test"}


def open_karpathy(
    annotations: str | Path,
    images: str | Path | None = None,
    *,
    split: str | None = None,
    role: str = "train",
    root: Path | None = None,
    max_broken_share: float = 0.01,
    decode_size: int | None = None,
) -> PictureFiles:
    """The pictures of one split, each once, with all their captions.

    Retrieval lists repeat a picture for each caption; its captions are put together, in file order. A picture that the
    other layouts list twice, by id or by path, is broken the second time in a set that is ranked; training may repeat.

    Args:
        annotations: JSON file, or JSON packed with gzip.
        images: folder of the pictures; None looks for it, see `find_images`.
        split: Karpathy splits joined by "+"; None is the role's own, and for training "train+restval" where the file
            has a restval split (COCO: 82,783 + 30,504 pictures are the usual training set). The other layouts have no
            splits.
        role: "train" refuses empty captions; the others accept them, as there an empty caption is one more text.
        root, max_broken_share, decode_size: see `PictureFiles`.
    Raises:
        ValueError: names the file and what is wrong with it: no JSON, another layout, a split that it does not have.
        FileNotFoundError: if there is no folder with the pictures.
    Warns:
        UserWarning: if a known split has not the usual number of pictures or captions.
    """
    annotations = Path(annotations).expanduser()
    content = _read_json(annotations)
    if isinstance(content, dict) and isinstance(content.get("images"), list):
        if isinstance(content.get("annotations"), list):
            _refuse_split(annotations, split)
            set_name, records = annotations.name, _coco_records(content)
        else:
            split = _chosen_split(annotations, content["images"], split, role)
            set_name, records = _karpathy_records(annotations, content, split)
    elif isinstance(content, list):
        _refuse_split(annotations, split)
        set_name, records = annotations.name, _grouped(annotations, content)
    else:
        keys = ", ".join(content)[:200] if isinstance(content, dict) else ""
        found = f"an object with the keys {keys}" if keys else f"of type {type(content).__name__}"
        raise ValueError(
            f"{annotations}: the top level is {found}; accepted: an object with a list 'images' (Karpathy splits, "
            "COCO captions), or a list of objects with 'image' and 'caption'"
        )
    entries, broken = _checked(annotations, records, role != "train")
    return PictureFiles(
        entries,
        broken,
        annotations,
        images,
        set_name.partition(".")[0],
        role=role,
        root=root,
        max_broken_share=max_broken_share,
        decode_size=decode_size,
    )


# A record is (key for messages, path, captions, image id, caption ids) as the file has them, or (key, reason).
_Record = tuple[Any, ...]


def _checked(annotations: Path, records: Iterable[_Record], is_ranked: bool) -> tuple[list[Entry], list[BrokenSample]]:
    """The entries that can be used, and the others with the reason."""
    entries, broken, seen = [], [], {}
    for key, *record in records:
        try:
            if len(record) == 1:
                raise Unusable(record[0])
            path, captions, image_id, caption_ids = record
            captions = caption_list(captions)
            caption_ids = _id_list(caption_ids, len(captions))
            check_captions(captions, allow_empty=is_ranked)
            path, image_id = picture_path(path), id_text(image_id)
            for name in (("image_id", image_id), ("path", path)) if is_ranked else ():
                if name in seen:
                    raise Unusable(f"duplicate {name[0]}: {name[1]!r}, first at {seen[name]}")
            seen |= {("image_id", image_id): key, ("path", path): key}
            entries.append(Entry(path, captions, image_id, caption_ids))
        except Unusable as error:
            broken.append(BrokenSample(annotations, key, str(error)))
    return entries, broken


def _karpathy_records(annotations: Path, content: dict[str, Any], split: str) -> tuple[str, list[_Record]]:
    """Name of the set and its records; says so where a known split has another size than usual."""
    wanted = split.split("+")
    records, pictures, captions = [], Counter(), Counter()
    for number, image in enumerate(content["images"]):
        key = f"images[{number}]"
        if not isinstance(image, dict):
            records.append((key, f"entry has the wrong type: {type(image).__name__} instead of an object"))
            continue
        if not isinstance(image.get("split"), str):
            kind = type(image.get("split")).__name__
            records.append((key, f"split has the wrong type: {kind} instead of a string"))
            continue
        if image["split"] not in wanted:
            continue
        sentences = image.get("sentences")
        pictures[image["split"]] += 1
        captions[image["split"]] += len(sentences) if isinstance(sentences, list) else 0
        if not isinstance(sentences, list) or not all(isinstance(sentence, dict) for sentence in sentences):
            records.append((key, "sentences has the wrong type: it is no list of objects"))
            continue
        raw = [sentence.get("raw") for sentence in sentences]
        ids = _given([sentence.get("sentid") for sentence in sentences]) or image.get("sentids")
        folder, file = image.get("filepath", ""), image.get("filename")
        if isinstance(folder, str) and folder and isinstance(file, str):
            file = f"{folder}/{file}"
        with suppress(Unusable):  # the check says what is wrong
            file = picture_path(file)
        image_id = image["cocoid"] if "cocoid" in image else _without_extension(file)
        records.append((key, file, raw, image_id, ids))
    known = str(content.get("dataset", "coco" if any("cocoid" in image for image in _objects(content)) else "")).lower()
    for part in wanted:
        expected_pictures, expected_captions = EXPECTED.get((known, part), (pictures[part], 0))
        if pictures[part] != expected_pictures or (expected_captions and captions[part] != expected_captions):
            text = f" and {expected_captions:,} captions" if expected_captions else ""
            warnings.warn(
                f"{annotations}: split {part} of {known} has {pictures[part]:,} pictures and {captions[part]:,} "
                f"captions; usual are {expected_pictures:,} pictures{text}",
                stacklevel=3,
            )
    return f"{known or annotations.name.partition('.')[0]}-{wanted[0]}", records


def _chosen_split(annotations: Path, images: list[Any], split: str | None, role: str) -> str:
    names = (image.get("split") for image in images if isinstance(image, dict))
    there = Counter(name for name in names if isinstance(name, str))
    if split is None:
        split = _SPLIT_OF_ROLE.get(role, role)
        if split == "train" and "restval" in there:
            split = "train+restval"
    missing = [name for name in split.split("+") if name not in there]
    if missing:
        has = ", ".join(f"{name} ({count:,} pictures)" for name, count in there.items())
        raise ValueError(f"{annotations} has no split {missing[0]!r}; accepted: {has or 'it has none'}, joined by +")
    return split


def _coco_records(content: dict[str, Any]) -> list[_Record]:
    captions: dict[Any, list[tuple[Any, Any]]] = {}
    records: list[_Record] = []
    for number, item in enumerate(content["annotations"]):
        image_id = item.get("image_id") if isinstance(item, dict) else None
        if _is_id(image_id):
            captions.setdefault(image_id, []).append((item.get("caption"), item.get("id")))
        else:
            records.append((f"annotations[{number}]", "image_id has the wrong type: no string or whole number"))
    for number, image in enumerate(content["images"]):
        key = f"images[{number}]"
        if not isinstance(image, dict) or not _is_id(image.get("id")):
            records.append((key, "entry has the wrong type: no object with an 'id'"))
            continue
        texts = captions.pop(image["id"], [])
        ids = _given([number for _, number in texts])
        records.append((key, image.get("file_name"), [text for text, _ in texts], image["id"], ids))
    lost = [(f"annotations of image {image_id}", "missing picture: no such image") for image_id in captions]
    return records + lost


def _grouped(annotations: Path, content: list[Any]) -> list[_Record]:
    """Records of a retrieval list; rows of one picture become one record, at the place of the first."""
    if not content:
        raise ValueError(f"{annotations}: the list is empty")
    records: dict[str | int, _Record] = {}  # by path, and what cannot be put together by its number
    for number, row in enumerate(content):
        key = f"[{number}]"
        if not isinstance(row, dict):
            records[number] = (key, f"entry has the wrong type: {type(row).__name__} instead of an object")
            continue
        path, ids = row.get("image"), row.get("caption_ids")
        with suppress(Unusable):  # the check says what is wrong
            path = picture_path(path)
        image_id = row.get("image_id")
        image_id = path if image_id in (None, "") else image_id
        captions = row.get("captions", row.get("caption"))
        captions = [captions] if isinstance(captions, str) else captions
        if not isinstance(path, str) or not isinstance(captions, list):
            records[number] = (key, path, captions, image_id, ids)  # the check says what is wrong
        elif path not in records:
            records[path] = (key, path, list(captions), image_id, ids)
        elif records[path][3] != image_id:
            first = records[path]
            reason = f"image_id differs: {image_id!r}, the same picture has {first[3]!r} at {first[0]}"
            records[number] = (key, reason)
        else:
            first, _, before, _, before_ids = records[path]
            before += captions
            both = isinstance(before_ids, list) and isinstance(ids, list)
            records[path] = (first, path, before, image_id, before_ids + ids if both else None)
    return list(records.values())


def _read_json(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; accepted: a JSON file, which may be packed with gzip")
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: not valid JSON: nested too deeply") from None


def _refuse_split(annotations: Path, split: str | None) -> None:
    if split is not None:
        raise ValueError(f"{annotations} has no splits; split is {split!r}, accepted: none")


def _objects(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (image for image in content["images"] if isinstance(image, dict))


def _is_id(value: Any) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)  # True would be the key 1


def _id_list(ids: Any, count: int) -> list[int | None] | None:
    if ids is None:
        return None
    if not isinstance(ids, list) or len(ids) != count:
        raise Unusable(f"caption ids do not fit: {str(ids)[:60]} for {count} captions")
    for number in ids:
        if number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 1 << 63:
            raise Unusable(f"caption id has the wrong type: {number!r} instead of a whole number from 0")
    return _given(ids)


def _given(ids: list[Any]) -> list[Any] | None:
    """The ids, or None where no caption has one."""
    return None if all(number is None for number in ids) else ids


def _without_extension(file: Any) -> Any:
    return file.removesuffix(PurePosixPath(file).suffix) if isinstance(file, str) else file
