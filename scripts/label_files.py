"""Writes classnames.txt and zeroshot_classification_templates.txt of a labelled set, which `data.labelled` wants.

    python scripts/label_files.py /data/labelled/imagenet                        ImageNet's, as open_clip has them
    python scripts/label_files.py /data/labelled/imagenet_a --among /data/labelled/imagenet
    python scripts/label_files.py /data/labelled/food101 --source prompts.json --dataset food101
    python scripts/label_files.py /data/labelled/fruit --source folders          the names of its class folders

A JSON file holds {"food101": {"classes": ["apple pie", ...], "templates": ["a photo of {}, a type of food.", ...]}}.
With folders, a blank takes the place of "_" in a name, and the template is "a photo of a {}.".
The files are in the order of the labels, that of the class folders. A folder gets its name by what it is called: the
name itself, a WordNet id of ImageNet's, or a number from 0. Where none of these fits, `--order` states the order of the
names: `sorted` = that of the sorted folders, or a text file with the folder of each name, one per line. A set that has
only some of another's classes, in folders of the same names, gets those with `--among`.
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.base.arguments import Parser
from common.data.class_names import OPEN_CLIP, names_by_evidence, read_class_names, read_templates
from common.data.labelled import CLASS_NAMES_FILE, TEMPLATES_FILE, class_folders
from common.data.text_files import read_lines
from common.run.launch import run_or_explain

FOLDERS = "folders"  # as source: the class folders
FOLDER_TEMPLATE = "a photo of a {}."


def folders_of_classes(folder: Path) -> list[str]:
    """Sorted names of a set's class folders: in test, in val, in train, or directly in its folder; none for shards."""
    for place in (folder / "test", folder / "val", folder / "train", folder):
        if place.is_dir() and any(item.is_dir() and item.name[0] != "." for item in place.iterdir()):
            return class_folders(place)
    return []


def names_for(folder: Path, folders: list[str], names: list[str], order: str = "") -> list[str]:
    """The names in the order of the class folders, which is that of the labels.

    Args:
        folders: its class folders, sorted.
        names: in the order of the source.
        order: "sorted" = the names are in the order of the folders; else a file with the folder of each name; "" = the
            folders say it themselves.
    """
    if order and order != "sorted":
        folder_of = read_lines(Path(order).expanduser())
        if len(folder_of) != len(names) or sorted(folder_of) != sorted(folders):
            raise ValueError(
                f"--order {order} has {len(folder_of)} lines ({', '.join(folder_of[:3])}, ...) for {len(names)} names "
                f"and {len(folders)} class folders ({', '.join(folders[:3])}, ...); expected: the folder of each name"
            )
        name_of = dict(zip(folder_of, names))
        return [name_of[item] for item in folders]
    by_evidence = None if order else names_by_evidence(folders, names)
    if by_evidence is not None:
        return by_evidence
    if len(names) != len(folders):
        raise ValueError(
            f"{folder} has {len(folders)} class folders ({', '.join(folders[:3])}, ...) for {len(names)} names "
            f"({', '.join(names[:3])}, ...); expected one each. --source folders takes the names of the folders, "
            "--source FILE.json and --dataset choose other names, --among gives some of another set's"
        )
    if not order:
        pairs = ", ".join(f"{item} = {name!r}" for item, name in list(zip(folders, names))[:5])
        raise ValueError(
            f"{folder}: nothing says which class folder has which name; in the order of the folders it would be "
            f"{pairs}, ...; expected: folders called by the names, by ImageNet's WordNet ids, or by numbers from 0. If "
            "these pairs are right, give --order sorted, else --order FILE with the folder of each name, one per line"
        )
    return names


def names_among(names: list[str], folder: Path, whole: Path, order: str = "") -> list[str]:
    """The names of the classes that a set has, out of those of the set that has them all.

    Args:
        folder, whole: of the set with some of the classes, and of that with all of them.
        names, order: of `whole`, see `names_for`.
    """
    all_folders, some = folders_of_classes(whole), folders_of_classes(folder)
    if not some:
        raise ValueError(f"{folder} has no class folders; expected some in test, val or train, or directly in it")
    names = names_for(whole, all_folders, names, order)
    unknown = sorted(set(some) - set(all_folders))
    if unknown:
        raise ValueError(f"{folder}: {whole} has no class folder {unknown[0]!r}; expected folders of the same names")
    name_of = dict(zip(all_folders, names))
    return [name_of[item] for item in some]


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("folder", type=Path, help="of the set, with or without its pictures")
    parser.add_argument(
        "--source", default=OPEN_CLIP, help="open_clip (ImageNet's), folders, or a JSON file of several sets"
    )
    parser.add_argument("--dataset", default="", help="which one of the JSON file")
    parser.add_argument("--among", type=Path, help="folder of the set that has all classes of the source")
    parser.add_argument("--order", default="", help="sorted, or a file with the folder of each name, one per line")
    given = parser.parse_args(arguments)
    if given.dataset and given.source == OPEN_CLIP:
        raise ValueError(
            f"--dataset {given.dataset} needs --source FILE.json: without it the names are ImageNet's; expected both"
        )
    if given.source == FOLDERS:
        if given.dataset or given.among or given.order:
            raise ValueError("--source folders: the folders are the names; expected no --dataset, --among or --order")
        names = [name.replace("_", " ") for name in folders_of_classes(given.folder)]
        if not names:
            raise ValueError(f"--source folders: {given.folder} has no class folders")
        templates = [FOLDER_TEMPLATE]
    else:
        names = read_class_names(given.source, given.dataset)
        templates = read_templates(given.source, given.dataset)
    if given.among is not None:
        names = names_among(names, given.folder, given.among, given.order)
    elif folders := folders_of_classes(given.folder):
        names = names_for(given.folder, folders, names, given.order)
    elif given.order:
        raise ValueError(f"--order {given.order}: {given.folder} has no class folders whose order it could state")
    files = {given.folder / CLASS_NAMES_FILE: names, given.folder / TEMPLATES_FILE: templates}
    there = [path for path in files if path.exists()]
    if there:
        raise ValueError(f"{there[0]} exists already; remove it to write it again")
    given.folder.mkdir(parents=True, exist_ok=True)
    for path, lines in files.items():
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        print(f"{path}: {len(lines)} lines")


if __name__ == "__main__":
    run_or_explain(main)
