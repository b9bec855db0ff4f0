"""From the config to data sets of captioned or labelled images, and their transform."""

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from common.base.places import outputs
from common.base.settings import CAPTION_FILES, TAKEN_BY, DataConfig
from common.data.broken import BrokenSample
from common.data.held_out import split_off
from common.data.mixture import Mixture
from common.data.order import seed_of
from common.data.part import some_of
from common.data.pictures import Pictures
from common.data.scenes import ReferringScenes, SceneDataset, classification_task
from common.data.shard_paths import expand_shards
from common.data.transforms import ImageTransform

ZERO_SHOT_SETS = ("imagenet", "imagenet_v2", "imagenet_a", "imagenet_r")


class Pairs(Protocol):
    """A map-style data set of captioned images.

    Sets read from files also have `broken_at_open` (unusable samples), `all_captions()`, `image_id(index)` without
    decoding, and `caption_ids(index)` where captions have ids. A stream has `forward_only = True`: it is indexed by
    position in the run (`streamed.py`). Drawn sets have `lazily(index)`: an item whose captions are worded when read.
    """

    name: str
    fingerprint: str  # changes when the content changes

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """{"image": PIL image or uint8 (H, W, 3), "captions": list of str, "image_id": str}."""

    def captions(self, index: int) -> list[str]:
        """The captions, without drawing or decoding the image."""


def open_training_pairs(data: DataConfig, seed: int) -> Pairs:
    """The training set of the config. For scenes, each seed draws another world of the same kind."""
    if data.mixture:  # a separate seed for each set, so that two sets of scenes differ
        parts = [
            _open_training_set(part.as_data(data), seed_of(seed, number), f"data.mixture, set {number + 1}: train")
            for number, part in enumerate(data.mixture)
        ]
        return Mixture(parts, [part.weight for part in data.mixture])
    return _open_training_set(data, seed, "data.train")


def _open_training_set(data: DataConfig, seed: int, key: str) -> Pairs:
    if data.source == "scenes" and data.train == "train_referring":
        return ReferringScenes("train", data.num_train, data.image_size, seed, data.num_captions)
    if data.source == "scenes":
        return SceneDataset(
            split=data.train or "train",
            size=data.num_train,
            image_size=data.image_size,
            seed=seed,
            caption_noise=data.caption_noise,
            ambiguity=data.ambiguity,
            num_captions=data.num_captions,
        )
    photographs = _open_photographs(data, "train", seed, key)
    return split_off(photographs, data.val_share).training if data.val_share else photographs


def open_validation_pairs(data: DataConfig) -> Pairs:
    """The set ranked during training: a split of the source, or the share data.val_share of the training set."""
    if data.source == "scenes":
        return SceneDataset("val", data.validation_size, data.image_size, num_captions=data.num_captions)
    if data.val_share and data.val:
        raise ValueError(f"data.val = {data.val!r} and data.val_share = {data.val_share}; expected one of them")
    if data.val_share:
        held_out = split_off(_open_photographs(data, "train", is_ranked=True), data.val_share).validation
        if data.source == "shards":  # other sources join the captions of an image, or refuse a repeated one
            from common.data.shards import check_unique_ids

            check_unique_ids(held_out)
        return some_of(held_out, data.validation_size)
    return some_of(_open_photographs(data, "val"), data.validation_size)


def open_retrieval_sets(data: DataConfig) -> dict[str, Pairs]:
    """Test sets by role: "test" stands for Flickr30k, "second_test" for COCO. Roles without data are left out."""
    if data.source == "scenes":
        return {
            role: SceneDataset(split, data.num_test, data.image_size, num_captions=data.num_captions)
            for role, split in {"test": "test", "second_test": "test_crowded"}.items()
        }
    roles = ["test"] + (["second_test"] if data.second_test else [])
    return {role: _open_photographs(data, role) for role in roles}


def open_zero_shot_sets(data: DataConfig) -> dict[str, Any]:
    """Labelled sets by name: the scenes', which stand for ImageNet and its shifts, and those in data.labelled."""
    sets: dict[str, Any] = {}
    if data.source == "scenes":
        sets = {
            name: classification_task(name, size=data.num_labelled, image_size=data.image_size)
            for name in ZERO_SHOT_SETS
        }
    if data.labelled:
        from common.data.labelled import open_labelled_sets  # not every run needs torchvision's data sets

        labelled = open_labelled_sets(Path(data.root) / data.labelled, index_dir=_shard_index())
        taken = sorted(sets.keys() & labelled.keys())
        if taken:
            raise ValueError(
                f"data.labelled has a set called {taken[0]!r}, which the scenes have too; rename its folder"
            )
        sets |= labelled
    return sets


@dataclass(frozen=True)
class EvaluationSets:
    """What a model is evaluated on, by role."""

    zero_shot: dict[str, Any]
    retrieval: dict[str, Pairs]


def open_evaluation_sets(data: DataConfig) -> EvaluationSets:
    """All test sets, opened before training, so that a missing one is reported at once."""
    return EvaluationSets(open_zero_shot_sets(data), open_retrieval_sets(data))


def open_validation_task(data: DataConfig) -> Any | None:
    """The labelled set classified during training, without images of the test sets; None without one."""
    if data.source == "scenes":
        return classification_task("imagenet", size=data.validation_size, image_size=data.image_size, part="val")
    if not data.labelled:
        return None
    from common.data.labelled import open_labelled_validation

    return some_of(open_labelled_validation(Path(data.root) / data.labelled, _shard_index()), data.validation_size)


def open_validation_sets(data: DataConfig) -> list[Any]:
    """The pairs ranked during training, and the labelled set classified, if there is one."""
    sets = (open_validation_pairs(data), open_validation_task(data))
    return [data_set for data_set in sets if data_set is not None]


def lost_at_open(*sets: Pairs) -> list[BrokenSample]:
    """`broken_at_open` of several sets."""
    return [sample for pairs in sets for sample in getattr(pairs, "broken_at_open", [])]


def _open_photographs(
    data: DataConfig, role: str, seed: int = 0, key: str | None = None, is_ranked: bool = False
) -> Pairs:
    # The set of one role; the seed is that of a stream's order, the key names it in messages. is_ranked: a share of the
    # training set is.
    is_trained = role == "train" and not is_ranked
    options: dict[str, Any] = {
        "role": role,
        "max_broken_share": data.max_broken_share,
        # training may decode a JPEG at a fraction of its size; ranking sees every pixel
        "decode_size": 2 * data.image_size if is_trained else None,
    }
    if data.source == "shards":
        return _open_shards(data, role, {**options, "key": key, "is_ranked": is_ranked})
    root = Path(data.root).expanduser()
    name, split = _name_and_split(data, role, root)
    options |= {"root": root, "split": split}
    if data.images and role != "second_test":  # which lies somewhere else
        options["images"] = root / data.images
    for column in ("image_column", "caption_column"):
        if data.source in TAKEN_BY[column]:
            options[column] = getattr(data, column) or None
    if data.source == "hugging_face":
        stream_buffer = data.stream_buffer if is_trained else 0
        options |= {"stream_buffer": stream_buffer, "seed": seed, "key": key}
    if data.source in ("hugging_face", "karpathy"):
        options["is_ranked"] = is_ranked
    opened = _reader(data.source)(name if data.source == "hugging_face" else root / name, **options)
    for trained in [] if role == "train" else _training_sets(data):
        if trained.source == data.source and trained.train:  # "" where an evaluation needs no training set
            _check_apart(opened, trained, data, role)
    return opened


def _training_sets(data: DataConfig) -> list[DataConfig]:
    return [part.as_data(data) for part in data.mixture] or [data]


def _check_apart(opened: Pairs, trained: DataConfig, data: DataConfig, role: str) -> None:
    # whether a set that is ranked is a training set of the same source, or shares a file or a split with it
    key, value = f"data.{role}", getattr(data, role)
    root, root_of_training = Path(data.root).expanduser(), Path(trained.root).expanduser()
    name, split = _name_and_split(data, role, root)
    name_of_training, split_of_training = _name_and_split(trained, "train", root_of_training)
    other, training = (root / name).resolve(), (root_of_training / name_of_training).resolve()
    if trained.source == "folder":
        check_folders_apart(training, other, f"{key} = {value!r}")
    if training != other:
        if data.source == "hugging_face" and (files := _files(name, root) & _files(name_of_training, root_of_training)):
            _warn_of_training_data(f"{key} = {value!r}: its file {min(files)} is what data.train names")
        return
    if split and split_of_training:
        if splits := set(split.split("+")) & set(split_of_training.split("+")):
            _warn_of_training_data(f"{key} = {value!r}: its split {min(splits)!r} is what data.train names")
        return
    try:
        beside = _open_photographs(replace(trained, stream_buffer=0), "train")
    except (FileNotFoundError, ValueError):
        if not value:
            raise
        return  # an evaluation needs no training set
    if opened.fingerprint != beside.fingerprint and not _is_mostly_of(opened, beside):
        return
    if not value:
        raise ValueError(
            f"{key} is empty and data.train = {trained.train!r} has no split for it: it would be the training set "
            f"itself; expected: {CAPTION_FILES[trained.source]}"
        )
    _warn_of_training_data(f"{key} = {value!r} is what data.train names")


def _files(pattern: str, root: str | Path | None) -> set[Path]:
    with suppress(FileNotFoundError, ValueError):  # a folder, a name on the hub; an evaluation needs no training set
        return set(expand_shards(pattern, root))
    return set()


def check_folders_apart(training: Path, other: Path, key: str) -> None:
    """Raises ValueError where one holds the other: a folder is read with those below it."""
    training, other = training.resolve(), other.resolve()
    if training.is_relative_to(other) or other.is_relative_to(training):
        raise ValueError(
            f"{key}: {other} and the folder of data.train, {training}, are not apart; expected: two folders"
        )


def _warn_of_training_data(what: str) -> None:
    expected = "expected: another file or split, or data.val_share for validation"
    warnings.warn(f"{what}: a model is ranked on what it was trained on; {expected}", stacklevel=2)


def _reader(source: str) -> Callable[..., Pairs]:
    # imported here, so that a run depends only on the reader that it uses
    if source == "karpathy":
        from common.data.karpathy import open_karpathy as reader
    elif source == "tsv":
        from common.data.tsv import open_tsv as reader
    elif source == "folder":
        from common.data.folder import open_folder as reader
    else:
        from common.data.hugging_face import open_hugging_face as reader
    return reader


def _is_mostly_of(opened: Pairs, training: Pairs) -> bool:
    # of one file: training leaves out rows that ranking keeps, so the sets may differ in a few images
    if not (isinstance(opened, Pictures) and isinstance(training, Pictures)):
        return False
    trained = {training.image_id(index) for index in range(len(training))}
    return 2 * sum(opened.image_id(index) in trained for index in range(len(opened))) > len(opened)


def _open_shards(data: DataConfig, role: str, options: dict[str, Any]) -> Pairs:
    pattern = getattr(data, role) or f"*{role}*.tar"
    if not data.root and not Path(pattern).is_absolute():
        raise FileNotFoundError(
            f"data.source = shards needs a folder: set data.root (make: DATA=<folder>) or a full path in data.{role}"
        )
    from common.data.shards import open_shards

    opened = open_shards(
        pattern,
        root=data.root or None,
        index_dir=_shard_index(),
        **options,
    )
    of_shards = [trained for trained in _training_sets(data) if trained.source == "shards"]
    for trained in [] if role == "train" else of_shards:
        of_training = trained.train or "*train*.tar"
        shared = _files(of_training, trained.root or None) & {shard.path for shard in opened.shards}
        if shared and pattern == of_training:
            _warn_of_training_data(f"data.{role} = {pattern!r} is what data.train names")
        elif shared:  # as with a wide pattern, data.train=*.tar
            raise ValueError(
                f"data.{role} = {pattern!r} and the training set {of_training!r} both name {min(shared)}; expected: "
                "different shards"
            )
    return opened


def _shard_index() -> Path:
    return outputs() / "shard_index"


def _name_and_split(data: DataConfig, role: str, root: Path) -> tuple[str, str | None]:
    # the name and the split behind the #; one file often holds the splits of all roles
    text = getattr(data, role)
    if not text and data.source not in ("tsv", "folder"):
        text = data.train if (root / data.train).exists() else data.train.partition("#")[0]
    if not text:
        raise ValueError(f"data.source = {data.source} needs data.{role}; expected: {CAPTION_FILES[data.source]}")
    name, sign, split = text.partition("#")
    if not sign or (root / text).exists():  # a name may have the sign, too
        return text, None
    return name, split


def image_transform(data: DataConfig) -> ImageTransform:
    """Saved with the checkpoint, so that evaluation cannot silently use another one."""
    return ImageTransform(data.image_size, data.resize, data.crop_scale, resize_with=data.resize_with)
