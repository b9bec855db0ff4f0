"""Labelled pictures for zero-shot accuracy during training: of a labelled set's training part, never its test part."""

from pathlib import Path

from common.data.class_names import read_class_names, read_templates
from common.data.labelled import (
    CLASS_NAMES_FILE,
    TEMPLATES_FILE,
    TORCHVISION_SETS,
    LabelledPictures,
    open_image_folder,
    open_torchvision,
    open_webdataset,
)


def open_labelled_validation(root: str | Path, index_dir: str | Path | None = None) -> LabelledPictures | None:
    """The training part of "imagenet" below a folder of labelled sets (data.labelled), else of the first that has one.

    A set has one if there is train/nshards.txt with tar shards, or torchvision's training part, or a folder train with
    one folder per class. Tables report the test parts, so that no number of a table is seen during training.

    Returns:
        None if no set has a training part.
    """
    folders = sorted(Path(root).expanduser().iterdir(), key=lambda folder: (folder.name != "imagenet", folder.name))
    for folder in folders:
        if not (folder / CLASS_NAMES_FILE).is_file():
            continue
        if (folder / "train" / "nshards.txt").is_file():
            return open_webdataset(folder, part="train", index_dir=index_dir)
        names, templates = read_class_names(folder / CLASS_NAMES_FILE), read_templates(folder / TEMPLATES_FILE)
        spec = TORCHVISION_SETS.get(folder.name)
        if spec is not None and (folder / spec.folder).exists():
            if "train" in spec.parts:
                return open_torchvision(folder.name, folder, names, templates, part="train")
        elif (folder / "train").is_dir():
            return open_image_folder(folder / "train", names, templates, name=f"{folder.name}-train")
    return None
