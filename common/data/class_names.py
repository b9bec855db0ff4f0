"""Class names and prompt templates of zero-shot classification, read from files or from the open_clip package.

Sources:
    names.txt[.gz]              one per line; templates have one {} or {c} where the class name goes
    prompts.json[.gz]           {data set: {"classes": [...], "templates": [...]}} or {data set: [...]}
    "open_clip"                 ImageNet's 1,000 names and 80 templates, from the optional package
Names stand in label order, that of the class folders (`label_order`): for ImageNet of the WordNet ids, not the names.
"""

import unicodedata
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import regex

from common.base.arguments import accepted
from common.data.text_files import read_json_object, read_lines

OPEN_CLIP = "open_clip"
_IMAGENET_CLASSES = 1000


def read_class_names(source: str | Path, dataset: str = "") -> list[str]:
    """Class names in label order, from one of the module's sources.

    Repeated names stay, with a warning: ImageNet's `missile` and `sunglasses` occur twice; of equal scores the first
    wins. Of several names of one class the first is used, with a warning.
    """
    if str(source) == OPEN_CLIP:
        names, where = list(_open_clip("IMAGENET_CLASSNAMES")), "open_clip's ImageNet"
    else:
        names, where = _read_list(Path(source), dataset, "classes")
    names = [_single_name(name, f"{where}: class {index}") for index, name in enumerate(names)]
    if "" in names:
        raise ValueError(f"{where}: the name of class {names.index('')} is blank; expected: a name, or no such line")
    _warn_of_repeats(names, where)
    return names


def read_templates(source: str | Path, dataset: str = "") -> list[str]:
    """Prompt templates, each with one `{}` for the class name."""
    if str(source) == OPEN_CLIP:
        texts, where = [template("{}") for template in _open_clip("OPENAI_IMAGENET_TEMPLATES")], "open_clip's ImageNet"
    else:
        texts, where = _read_list(Path(source), dataset, "templates")
    templates = [_checked_template(template, f"{where}: template {index}") for index, template in enumerate(texts, 1)]
    _warn_of_repeats(templates, where)
    return templates


def label_order(classes: Sequence[str]) -> list[str]:
    """Class folders in label order: sorted, as numbers where all are numbers."""
    if all(name.isdecimal() for name in classes):
        return sorted(classes, key=lambda name: (int(name), name))
    return sorted(classes)


def names_by_evidence(classes: Sequence[str], names: Sequence[str]) -> list[str] | None:
    """The name of each class folder, if the folders state it; else None.

    A folder states its name (capitals, spaces, signs, and a number or WordNet id before it do not count), a WordNet id
    of ImageNet (with 1,000 names), or a number from 0 (with as many folders as names).
    """
    name_of = dict(zip(map(_letters, names), names))
    for keys in _spellings(classes):
        if len(set(keys)) == len(keys) == len(names) and name_of.keys() == set(keys):
            return [name_of[key] for key in keys]
    if len(names) == _IMAGENET_CLASSES and all(map(_WORDNET_ID.fullmatch, classes)):
        from timm.data import ImageNetInfo  # slow

        number_of = {synset: number for number, synset in enumerate(ImageNetInfo().label_names())}
        if number_of.keys() >= set(classes):
            return [names[number_of[synset]] for synset in classes]
    if all(name.isdecimal() for name in classes) and sorted(map(int, classes)) == list(range(len(names))):
        return [names[int(number)] for number in classes]
    return None


def in_label_order(classes: Sequence[str], names: Sequence[str], where: str) -> list[str]:
    """Names in label order; the classes' own names in another order are sorted into it.

    Args:
        classes: the source's class names, in label order, also with a number or WordNet id before them.
    Raises:
        ValueError: a name is that of another class.
    """
    keys = [_letters(name) for name in names]
    for classes_of in _spellings(classes):
        if keys == classes_of:
            return list(names)
        if len(set(keys)) == len(keys) and set(keys) == set(classes_of):
            return list(names_by_evidence(classes, names))
        place_of = {key: place for place, key in enumerate(classes_of) if key}
        for place, key in enumerate(keys):
            if key != classes_of[place] and place_of.get(key, place) != place:
                raise ValueError(
                    f"{where}: class name {place} is {names[place]!r}, but class {place} is {classes[place]!r} and "
                    f"class {place_of[key]} is {classes[place_of[key]]!r}; expected: the names in the order of the "
                    f"classes ({', '.join(classes[:3])}, ...)"
                )
    return list(names)


_WORDNET_ID = regex.compile(r"n\d{8}")
_NUMBERED = regex.compile(r"^(n\d{8}|\d+)[-._ ]+")  # "001.Black_footed_Albatross", "n02085620-Chihuahua"


def _letters(name: str) -> str:
    # common letters of a class and its folder: "Apple pie", "apple_pie"
    return regex.sub(r"[^\p{L}\p{M}\p{N}]", "", unicodedata.normalize("NFC", name.casefold()))


def _spellings(classes: Sequence[str]) -> tuple[list[str], list[str]]:
    # the classes as they are called, and without the number or WordNet id before the name
    return [_letters(name) for name in classes], [_letters(_NUMBERED.sub("", name)) for name in classes]


def _open_clip(name: str) -> Any:
    try:
        import open_clip
    except ImportError as error:
        raise ValueError(
            'source = "open_clip" needs the optional package open_clip (pip install open_clip_torch); or give a text '
            "file with one entry per line"
        ) from error
    return getattr(open_clip, name)


def _read_list(path: Path, dataset: str, key: str) -> tuple[list[Any], str]:
    # the entries of a file under `key`, and how messages name the place
    if ".json" not in path.suffixes:
        if dataset:
            raise ValueError(f"{path} is a text file for one data set; data set {dataset!r} can be chosen in JSON only")
        entries, where = [line.strip() for line in read_lines(path)], str(path)
        for number, line in enumerate(entries, 1):
            if regex.fullmatch(r"(['\"]).*\1,", line):
                raise ValueError(f"{path}, line {number}: {line} of a list in Python; expected: the text alone")
    else:
        content = read_json_object(path)  # from data sets to lists
        if dataset not in content:
            raise ValueError(f"{path} has no data set {dataset!r}; {accepted(dataset, sorted(content))}")
        entries, where = content[dataset], f"{path}, {dataset}"
        if isinstance(entries, dict):
            if key not in entries:
                raise ValueError(f"{where} has no {key!r}; it has: {', '.join(sorted(entries)) or 'nothing'}")
            entries = entries[key]
        if not isinstance(entries, list):
            raise ValueError(f"{where}: {key} is of type {type(entries).__name__}; expected: a list of strings")
    if not any(entries):
        raise ValueError(f"{where} has no {key}")
    return entries, where


def _single_name(name: Any, where: str) -> str:
    if isinstance(name, list) and name and all(isinstance(item, str) for item in name):
        if len(name) > 1:
            warnings.warn(f"{where} has the names {name}; the first is used", stacklevel=3)
        name = name[0]
    if not isinstance(name, str):
        raise ValueError(f"{where} is {name!r} of type {type(name).__name__}; expected: a string")
    return name.strip()


def _checked_template(template: Any, where: str) -> str:
    if not isinstance(template, str):
        raise ValueError(f"{where} is {template!r} of type {type(template).__name__}; expected: a string")
    text = template.strip().replace("{c}", "{}")
    if not text:
        raise ValueError(f"{where} is blank")
    if regex.match(r"lambda\s+\w+\s*:", text):
        raise ValueError(f"{where}, {template!r}, is a Python function; expected its text, as in 'a photo of a {{}}.'")
    if text.count("{}") != 1 or any(sign in text.replace("{}", "") for sign in "{}"):
        raise ValueError(f"{where}, {template!r}, must have exactly one {{}} or {{c}} and no other brace")
    return text


def _warn_of_repeats(entries: list[str], where: str) -> None:
    repeated = [f"{entry!r} ({times} times)" for entry, times in Counter(entries).items() if times > 1]
    if repeated:
        warnings.warn(f"{where}: repeated names or templates: {', '.join(repeated[:5])}", stacklevel=3)
