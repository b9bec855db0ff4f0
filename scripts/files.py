"""The files of this repository that a method needs, to take along into another project.

    vlgeometry files geomm.pool
    vlgeometry files common.oblique common.info_nce --copy ../my_project

Imports are read from the syntax tree. So nothing runs, no library has to be installed, and imports inside of functions
are known: `optional` are the files and packages that only such an import names, which is needed when the function is
called. Imports for type checkers do not count, nor does what a library imports. Data files are not listed.
"""

import ast
import filecmp
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.base.arguments import Parser, did_you_mean
from common.base.places import DISTRIBUTION, PAPERS, ROOT, is_installed

PACKAGES = ("common", *PAPERS)


@dataclass(frozen=True)
class Needed:
    """files, optional_files: relative to the repository -> lines. packages, optional_packages: of third parties."""

    files: dict[str, int]
    optional_files: dict[str, int]
    packages: list[str]
    optional_packages: list[str]

    @property
    def lines(self) -> int:
        """Of all files, docstrings and comments included."""
        return sum(self.files.values()) + sum(self.optional_files.values())


def needed_by(modules: Sequence[str]) -> Needed:
    """Files and packages that modules import, and what these import."""
    for module in modules:
        if _file_of(module) is None:
            known = [_module_of(file) for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
            hint = did_you_mean(module, known) or "; expected a module such as geomm.pool"
            raise ValueError(f"there is no module {module}{hint}")
    files, packages = _closure(modules, with_optional=False)
    all_files, all_packages = _closure(modules, with_optional=True)
    lines = {file: len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in all_files}
    return Needed(
        {file: lines[file] for file in sorted(files)},
        {file: lines[file] for file in sorted(all_files - files)},
        sorted(packages),
        sorted(all_packages - packages),
    )


def _closure(modules: Sequence[str], with_optional: bool) -> tuple[set[str], set[str]]:
    # Files of the repository, and packages of third parties.
    files, packages, waiting = set(), set(), list(modules)
    while waiting:
        module = waiting.pop()
        file = _file_of(module)
        if file is None:
            top = module.partition(".")[0]
            if top not in PACKAGES and top not in sys.stdlib_module_names:
                packages.add(top)
        elif file not in files:
            files.add(file)
            waiting += [module.rpartition(".")[0]] if "." in module else []  # its package
            tree = ast.parse((ROOT / file).read_bytes())
            waiting += [name for name, is_optional in _imports(tree) if with_optional or not is_optional]
    return files, packages


def _imports(node: ast.AST, in_function: bool = False) -> Iterator[tuple[str, bool]]:
    # (module, whether a function imports it); of `from a import b` both a and a.b, as b may be a module.
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, in_function) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield child.module, in_function
            names = (f"{child.module}.{alias.name}" for alias in child.names)
            yield from ((name, in_function) for name in names if _file_of(name))
        elif not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from _imports(child, in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


def _file_of(module: str) -> str | None:
    # None for a module of another project.
    if module.partition(".")[0] not in PACKAGES:
        return None
    path = module.replace(".", "/")
    return next((file for file in (f"{path}.py", f"{path}/__init__.py") if (ROOT / file).is_file()), None)


def _module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def licence() -> Path:
    """File of the licence, in the checkout or beside an installed package."""
    if not is_installed():
        return ROOT / "LICENSE"
    return next(ROOT.glob(f"{DISTRIBUTION.replace('-', '_')}-*.dist-info/**/LICENSE"))


def copy(needed: Needed, folder: Path) -> None:
    """Copies the files with their folders, and the licence; skips files that exist with the same bytes."""
    sources = {file: ROOT / file for file in (*needed.files, *needed.optional_files)} | {"LICENSE": licence()}
    existing = {file: source for file, source in sources.items() if (folder / file).exists()}
    unlike = [folder / file for file, source in existing.items() if not filecmp.cmp(source, folder / file, False)]
    if unlike:
        raise FileExistsError(f"--copy {folder}: {unlike[0]} exists with other content; expected equal files or none")
    for file, source in sources.items() - existing.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / file)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("modules", nargs="+", metavar="MODULE", help="such as geomm.pool")
    parser.add_argument("--copy", type=Path, metavar="FOLDER", help="copy the files there, with the licence")
    options = parser.parse_args()
    needed = needed_by(options.modules)
    if options.copy:
        copy(needed, options.copy)
    name, holder = [line for line in licence().read_text(encoding="utf-8").splitlines() if line][:2]
    for file, lines in needed.files.items():
        print(f"{lines:6}  {file}")
    for file, lines in needed.optional_files.items():
        print(f"{lines:6}  {file} (optional: imported by a function)")
    print(f"{needed.lines:6}  lines in {len(needed.files) + len(needed.optional_files)} files")
    optional = f"; imported by functions: {', '.join(needed.optional_packages)}" if needed.optional_packages else ""
    print(f"packages: {', '.join(needed.packages) or 'none'}{optional}")
    print(f"{name}, {holder}: keep the file LICENSE with the copies")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
