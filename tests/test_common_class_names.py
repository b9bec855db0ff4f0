"""common/data/class_names.py: lists from text, JSON and open_clip; what is wrong is named, what is odd is kept."""

import gzip
import json
import re
import sys
from functools import partial

import open_clip
import pytest
from refusals import refused

from common.data.class_names import names_by_evidence, read_class_names, read_templates


@pytest.fixture
def write(tmp_path):
    """write(name, content) -> path; gzip where the name ends so, JSON for anything that is no text."""

    def write(name, content):
        text = content if isinstance(content, str) else json.dumps(content)
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return write


def test_the_same_lists_come_from_text_and_json(write):
    names, templates = ["tench", "caf\u00e9 au lait", "T-shirt {x}"], ["a photo of a {}.", "{}", 'the "{}" sign']
    with_c = [template.replace("{}", "{c}") for template in templates]
    files = [
        (write("names.txt", "\n".join(names) + "\n"), ""),
        (write("names.txt.gz", "\r\n".join(names)), ""),
        (write("both.json", {"set": {"classes": names, "templates": with_c}}), "set"),
        (write("names.json.gz", {"other": ["a"], "set": names}), "set"),
    ]
    for path, dataset in files:
        assert read_class_names(path, dataset) == read_class_names(str(path), dataset) == names
    files = [
        (write("templates.txt", "\n".join(with_c)), ""),
        (write("templates.txt.gz", "\n".join(templates) + "\n"), ""),
        (write("both.json", {"set": {"classes": names, "templates": with_c}}), "set"),
        (write("templates.json", {"set": templates}), "set"),
    ]
    for path, dataset in files:
        assert read_templates(path, dataset) == templates


def test_open_clip_gives_imagenets_names_and_templates():
    with pytest.warns(
        UserWarning, match=r"repeated names or templates: 'missile' \(2 times\), 'sunglasses' \(2 times\)"
    ):
        names = read_class_names("open_clip")
    assert names == list(open_clip.IMAGENET_CLASSNAMES)
    templates = read_templates("open_clip")
    assert len(templates) == 80
    for template, theirs in zip(templates, open_clip.OPENAI_IMAGENET_TEMPLATES):
        assert template.format("dog") == theirs("dog")


def test_the_first_of_several_names_is_used_with_a_warning(write):
    path = write("faces.json", {"faces": {"classes": [["angry"], ["happy", "smiling"]], "templates": ["{}"]}})
    with pytest.warns(UserWarning, match=r"faces: class 1 has the names \['happy', 'smiling'\]; the first is used"):
        assert read_class_names(path, "faces") == ["angry", "happy"]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("a photo", "template 2, 'a photo', must have exactly one {} or {c}"),
        ("a {} and a {}", "template 2, 'a {} and a {}'"),
        ("a {x}", "must have exactly one {} or {c} and no other brace"),
        ("a {} {", "no other brace"),
        ("a {0}", "no other brace"),
        ("", "template 2 is blank"),
        ("lambda c: f'a photo of a {c}.'", "is a Python function; expected its text, as in 'a photo of a {}.'"),
    ],
)
def test_a_template_has_one_placeholder(write, template, words):
    for path, dataset in (
        (write("templates.txt", f"the {{}}\n{template}\nmy {{}}\n"), ""),
        (write("templates.json", {"set": ["the {}", template]}), "set"),
    ):
        refused((f"(?=.*{path.stem}).*{re.escape(words)}", partial(read_templates, path, dataset)))


@pytest.mark.parametrize(
    ("name", "content", "dataset", "words"),
    [
        ("a.txt", "", "", "a.txt has no classes"),
        ("a.txt", "near\n\nfar\n", "", "a.txt: the name of class 1 is blank; expected: a name, or no such line"),
        ("a.txt", "cat\n", "pets", "is a text file for one data set; data set 'pets' can be chosen in JSON only"),
        ("a.txt", "near\n'far off',\n", "", "a.txt, line 2: 'far off', of a list in Python; expected: the text"),
        ("a.json", "{", "", "a.json: not valid JSON"),
        ("a.json", ["cat"], "", "holds a list; expected: a mapping"),
        ("a.json", {"cifar10": ["cat"]}, "CIFAR10", "has no data set 'CIFAR10'; expected one of: cifar10"),
        ("a.json", {"cifar10": ["cat"]}, "cifar100", "expected one of: cifar10; did you mean cifar10?"),
        ("a.json", {"pets": {"templates": ["{}"]}}, "pets", "pets has no 'classes'; it has: templates"),
        ("a.json", {"pets": "cat"}, "pets", "classes is of type str; expected: a list"),
        ("a.json", {"pets": []}, "pets", "pets has no classes"),
        ("a.json", {"pets": ["cat", 3]}, "pets", "class 1 is 3 of type int"),
        ("a.json", {"pets": ["cat", ["dog", 3]]}, "pets", "class 1 is ['dog', 3] of type list"),
    ],
)
def test_bad_lists_are_refused_with_place_and_value(write, name, content, dataset, words):
    refused((f"(?=.*{name}).*{re.escape(words)}", lambda: read_class_names(write(name, content), dataset)))


def test_without_open_clip_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "open_clip", None)
    message = r"needs the optional package open_clip \(pip install open_clip_torch\)"
    refused(*((message, partial(read, "open_clip")) for read in (read_class_names, read_templates)))


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        (["1", "2", "0"], ["Emu bird", "ox", "dog"]),
        (["02", "00", "01"], ["ox", "dog", "Emu bird"]),
        (["OX", "dog", "emu_bird"], ["ox", "dog", "Emu bird"]),
        *(
            ([f"{number}ox", f"{number}emu bird", f"{number}Dog"], ["ox", "Emu bird", "dog"])
            for number in ("7-", "001.", "n02085620-", "3_")
        ),
        (["1", "2", "3"], None),
        (["0", "1"], None),
        (["dog", "cat", "emu bird"], None),
        (["n01440764", "n01443537", "n01484850"], None),  # ImageNet's, of other names
    ],
)
def test_a_folder_gets_a_name_only_by_evidence_whatever_the_order_of_folders(folders, expected):
    assert names_by_evidence(folders, ["dog", "Emu bird", "ox"]) == expected
