"""Where code, configs and outputs lie: in a checkout, in a copy of some folders, or installed by pip.

Only the standard library: `make` and `vlgeometry --help` look here before torch is imported.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of the checkout, or of site-packages
PAPERS = ("contrastive_basics", "oblique_topology", "euclip", "geomm")
DISTRIBUTION = "contrastive-vision-language-geometry"


def papers() -> list[str]:
    """The four papers and, in a checkout, folders of your own beside them, made from docs/template."""
    folders = [] if is_installed() else sorted(file.parent for file in ROOT.glob("*/evaluate.py"))
    local = [folder.name for folder in folders if (folder / "configs").is_dir()]
    return [*PAPERS, *(name for name in local if name not in PAPERS)]


def is_installed() -> bool:
    """Whether pip copied the packages into a folder that other projects share."""
    return any(ROOT.glob(f"{DISTRIBUTION.replace('-', '_')}-*.dist-info"))


def is_of_repository(file: Path) -> bool:
    """Whether a file belongs to this repository, or to a project that holds a copy."""
    file = file.resolve()
    if not file.is_relative_to(ROOT):
        return False
    parts = file.relative_to(ROOT).parts
    return parts[0] in ("common", "vlgeometry", *PAPERS) if is_installed() else "site-packages" not in parts


def outputs() -> Path:
    """Folder of runs, results and caches: of the checkout within it, elsewhere `outputs` in the current folder."""
    here = Path.cwd()
    return (ROOT if here.is_relative_to(ROOT) else here) / "outputs"
