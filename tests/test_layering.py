"""The wall between folders, and the rules that keep entry scripts runnable by path."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAPERS = ("oblique_topology", "geomm", "euclip", "contrastive_basics")
ALLOWED = {
    "common": {"common"},
    **{paper: {"common", paper} for paper in PAPERS},
    "scripts": {"common", "scripts", *PAPERS},
}
OURS = {"common", "scripts", *PAPERS}


@functools.cache
def python_files(folder):
    return sorted((ROOT / folder).rglob("*.py"))


@functools.cache
def source_of(path):
    return path.read_text(encoding="utf-8")


@functools.cache
def tree_of(path):
    return ast.parse(source_of(path))


def imported(path):
    """Top-level names that a file imports, absolute imports only."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_no_folder_imports_through_the_wall(folder):
    seen = set()
    for path in python_files(folder):
        ours = {name for name in imported(path) if name in OURS}
        outside = sorted(ours - ALLOWED[folder])
        assert not outside, (
            f"{path.relative_to(ROOT)} imports {', '.join(outside)}; a file of {folder}/ may import "
            f"{', '.join(sorted(ALLOWED[folder]))}. What two papers need belongs in common/."
        )
        seen |= ours
    assert "common" in seen


# from the ground up; the science is every file directly in common/
FLOORS = ("science", "base", "data", "encoders", "methods", "evaluation", "run", "report", "reproduce")


def floor_of(module):
    """Number of the floor on which a module of common/ stands."""
    parts = module.split(".")
    return FLOORS.index(parts[1]) if len(parts) > 1 and parts[1] in FLOORS else 0


def imports_upwards(path):
    """Modules of common/ that a file of it imports from a higher floor, in functions and branches too."""
    floor = floor_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.startswith("common.") and floor_of(name) > floor)


def test_no_import_of_common_runs_upwards():
    imports = {str(path.relative_to(ROOT)): list(imports_upwards(path)) for path in python_files("common")}
    assert {floor_of(".".join(Path(name).parts)) for name in imports} == set(range(len(FLOORS)))
    upwards = [f"{name} imports {', '.join(sorted(modules))}" for name, modules in imports.items() if modules]
    assert not upwards, (
        f"{'; '.join(upwards)}. In common/ a floor imports only those below it, bottom first: {', '.join(FLOORS)}. "
        "Move what the lower file needs down, or the file up."
    )


def test_only_entry_scripts_touch_sys_path():
    for folder in ALLOWED:
        for path in python_files(folder):
            source = source_of(path)
            if "sys.path" in source:
                assert source.count("sys.path") == 1, path
                assert "if not __package__:\n    sys.path[0] = str(Path(__file__).resolve().parents[1])" in source, path
                assert '__name__ == "__main__"' in source, path


def test_nothing_stands_behind_the_call_of_main():
    """Run as a script, a function below it is not there yet; imported, it is, so that no other test would see it."""
    for folder in (*ALLOWED, "examples"):
        for path in python_files(folder):
            if 'if __name__ == "__main__":' in source_of(path):
                last = tree_of(path).body[-1]
                assert isinstance(last, ast.If), path
                assert ast.unparse(last.test) == "__name__ == '__main__'", path


def test_no_module_takes_the_name_of_a_standard_or_installed_one():
    taken = set(sys.stdlib_module_names) | {"datasets", "tokenizers", "torch", "transformers", "accelerate", "numpy"}
    for folder in ALLOWED:
        for path in python_files(folder):
            # relative modules are only in the way where a script's own folder is first on the path
            if path.parent == ROOT / folder and folder != "common":
                assert path.stem not in taken, path


def test_every_module_and_public_function_says_what_it_is():
    missing = []
    for folder in ALLOWED:
        for path in python_files(folder):
            of_file = tree_of(path)
            public = [node for node in of_file.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
            public = [node for node in public if not node.name.startswith("_") and node.name != "main"]
            documented = public if path.name == "__init__.py" else [of_file, *public]
            missing += [(path, getattr(node, "name", "")) for node in documented if not ast.get_docstring(node)]
    assert not missing


CLOSURES = """
import sys
import torch

def loaded():
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    return {each for each in files if each.startswith(sys.argv[1]) and not each.endswith("__init__.py")}

import euclip.geometry
geometry = loaded()
import euclip.model
model = loaded()
import common.info_nce
print(*geometry | loaded() - model)
print(*model)
print(*sorted({"torch.distributed.tensor", "transformers", "accelerate"} & sys.modules.keys()))
import common.losses
import common.tiled
print(*sorted({"triton", "common.triton_tiles"} & sys.modules.keys()))
"""


def test_a_geometry_and_a_model_load_few_lines_and_no_heavy_library_and_the_loss_no_kernel():
    """For those who take one function: measured about 0.01 s after `import torch`."""
    folders = tuple(f"{ROOT / folder}/" for folder in OURS)
    command = [sys.executable, "-c", CLOSURES.replace("sys.argv[1]", repr(folders))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    geometry, model, heavy, kernel = done.stdout.split("\n")[:4]
    lines = [sum(len(Path(file).read_text().splitlines()) for file in files.split()) for files in (geometry, model)]
    assert lines[0] <= 1_650, geometry
    assert lines[1] <= 1_850, model
    assert not heavy
    assert not kernel


def test_nothing_asks_a_geometry_for_its_class_or_for_what_it_may_have():
    # only the tiled loss asks for a closed form, which no geometry needs to have and which saves nothing but time
    asked = re.compile(r"(isinstance|hasattr|getattr)\([\w.]*geometry\b(?!, ChordGeometry\))")
    for folder in ALLOWED:
        for path in python_files(folder):
            assert not asked.search(source_of(path)), path
    for path in python_files("common"):
        assert not re.search(r"log_(curvature|image_scale|text_scale)", source_of(path)), path
