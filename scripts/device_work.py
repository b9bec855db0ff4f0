"""What a step of each row, and the loss of each geometry, asks of a GPU: waits of the host, kernels, bytes.

    python scripts/device_work.py                           all rows at smoke scale, about ten minutes on a CPU
    python scripts/device_work.py --only euclip/configs/table4_euclip.yaml losses

Counted on the CUDA device in host memory of tests/fake_cuda, so it says nothing about time. A whole count is written to
results/device/work.json and README.md, a part to outputs/device.
"""

import argparse
import sys
import tempfile
from functools import partial
from importlib import import_module
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tests.fake_cuda import fake_cuda

if reason := fake_cuda.missing():
    sys.exit(f"error: {reason}")
fake_cuda.enable()  # before the project is imported

import torch
from tqdm import tqdm

from common.base.config import ConfigError
from common.base.files import write_atomically, write_json
from common.base.provenance import ROOT, git_revision
from common.geometry import Geometry, Sphere
from common.oblique import Oblique
from common.reproduce.rows import Job, run_row
from common.run.training import Run
from common.tiled import geometry_loss
from euclip.geometry import Elliptic, Euclidean, Hyperbolic
from oblique_topology.geometry import ObliqueGeodesic

PAPERS = ("oblique_topology", "geomm", "euclip", "contrastive_basics")
PLAIN = ("run.log_every=1000", "run.evaluate_every=0", "run.save_every=0", "run.test=false")
DIM, TILE = 512, 1024
_WORKS: dict[str, list[fake_cuda.Work]] = {}  # row -> that of its steps; one that others start from is trained once
GEOMETRIES = {
    "sphere": Sphere,
    "oblique (32, 16)": partial(Oblique, 32),
    "Euclidean, d": partial(Euclidean, squared=False),
    "Euclidean, d^2": partial(Euclidean, squared=True),
    "elliptic": Elliptic,
    "hyperbolic, d": partial(Hyperbolic, DIM, squared=False),
    "hyperbolic, d^2": partial(Hyperbolic, DIM, squared=True),
    "oblique geodesic (32, 16)": partial(ObliqueGeodesic, 32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="CONFIG", help="configs of rows, or: losses")
    parser.add_argument("--output", type=Path, help="folder; default: see above")
    arguments = parser.parse_args()
    only = arguments.only
    rows_known = all_rows()
    rows = [row for row in rows_known if not only or row in only]
    if unknown := sorted(set(only) - {*rows, "losses"}):
        sys.exit(f"error: --only {unknown[0]}; expected one of: losses, or a row's config such as {rows_known[0]}")
    content = {"git_revision": git_revision(), "torch": torch.__version__, "losses": {}, "steps": {}}
    if not only or "losses" in only:
        content["losses"] = {name: loss_work(make()) for name, make in GEOMETRIES.items()}
    with tempfile.TemporaryDirectory() as runs:
        for row in tqdm(rows, unit="row"):
            try:
                content["steps"][row] = step_work(row, Path(runs))
            except ConfigError as error:  # it needs pre-trained weights, which smoke scale has none of
                tqdm.write(f"{row} is left out: {error}")
    folder = arguments.output or ROOT / ("outputs" if only else "results") / "device"
    write_json(folder / "work.json", content)
    write_atomically(folder / "README.md", page(content).encode())
    print(page(content))


def all_rows() -> list[str]:
    """The configs of all papers' rows."""
    files = (file for paper in PAPERS for file in sorted((ROOT / paper / "configs").glob("*.yaml")))
    return [str(file.relative_to(ROOT)) for file in files if not file.name.startswith("scale_")]


def step_work(row: str, runs: Path) -> dict[str, float]:
    """Waits and kernels of a row's steps but the first, which makes constants, and the last, which has a log line.

    Returns:
        waits, kernels: of a step that only trains. most_waits: of any step, for example one that builds a graph.
    """
    paper, _, file = row.split("/")
    plain_steps = Run.steps

    def counted_steps(run):
        folder = run.files.folder.relative_to(runs)  # paper/row-smoke-hash/seed0
        works = _WORKS[f"{folder.parts[0]}/configs/{folder.parts[1].partition('-smoke-')[0]}.yaml"] = []
        steps = plain_steps(run)
        for _ in range(run.num_steps):
            with fake_cuda.counted() as work:
                yield next(steps)
            works.append(work)
        yield from steps

    Run.steps = counted_steps
    try:
        module = import_module(f"{paper}.reproduce")
        code = getattr(module, "EVERY_ROW", module.CODE).of(file)
        run_row(Job(code, file, "smoke", 0, PLAIN, runs))
    finally:
        Run.steps = plain_steps
    works = _WORKS.get(row, ())
    if len(works) < 3:
        return {}  # nothing is trained
    works = works[1:-1]
    plain = min(works, key=lambda work: work.num_waits)
    most = max(work.num_waits for work in works)
    return {"waits": plain.num_waits, "kernels": plain.num_kernels, "most_waits": most}


def loss_work(geometry: Geometry) -> dict[str, float]:
    """Kernels, bytes and products of the tiled loss with gradients.

    One, four and nine tiles tell what the tiles take, what the embeddings take, and what is left.

    Returns:
        kernels: of a tile. bytes: an entry of the tiles. embedding_bytes: a number of the embeddings. products:
        floating-point operations over B^2 d. waits: of four tiles.
    """
    geometry = geometry.cuda()

    def of(batch: int) -> fake_cuda.Work:
        images, texts = (torch.randn(batch, DIM, device="cuda") for _ in "it")
        images = geometry.embed_image(images).detach().requires_grad_()
        texts = geometry.embed_text(texts).detach().requires_grad_()
        scale = torch.tensor(10.0, device="cuda", requires_grad=True)
        with fake_cuda.counted() as work:
            geometry_loss(images, texts, geometry, scale, tile=TILE).backward()
        return work

    torch.manual_seed(0)
    works = [of(number * TILE) for number in (1, 2, 3)]
    kernels, moved, products = (
        _quadratic([getattr(work, name) for work in works]) for name in ("num_kernels", "bytes_moved", "product_flops")
    )
    return {
        "kernels": kernels[0],
        "bytes": moved[0] / TILE**2,
        "embedding_bytes": moved[1] / (2 * TILE * DIM),
        "products": products[0] / TILE**2 / DIM,
        "waits": works[1].num_waits,
    }


def _quadratic(values: list[float]) -> tuple[float, float]:
    # a and b of a n^2 + b n + c, from its values at 1, 2, 3
    first, second = values[1] - values[0], values[2] - values[1]
    return (second - first) / 2, (5 * first - 3 * second) / 2


def page(content: dict) -> str:
    """The count as Markdown."""
    lines = [
        "# Work of a GPU",
        "",
        f"Counted by `python scripts/device_work.py` at {content['git_revision']}, torch {content['torch']}, on a CUDA "
        "device in host memory (tests/fake_cuda). No time was measured.",
    ]
    if content["losses"]:
        lines += [
            "",
            f"The tiled loss with its gradients, tiles of {TILE:,} x {TILE:,}, d = {DIM}, float32. Bytes are read or "
            "written by kernels: by tiles, for an entry of the similarity matrix, and by what comes before and after "
            "them, for a number of the embeddings. Products are floating-point operations over B^2 d.",
            "",
            "| geometry | bytes an entry | bytes a number | kernels a tile | products | waits |",
            "|---|---|---|---|---|---|",
            *(
                f"| {name} | {work['bytes']:.0f} | {work['embedding_bytes']:.0f} | {work['kernels']:.0f} | "
                f"{work['products']:.1f} | {work['waits']} |"
                for name, work in content["losses"].items()
            ),
        ]
    if content["steps"]:
        lines += [
            "",
            "A training step at smoke scale. Waits are those of a step that neither logs, validates, saves, orders an "
            "epoch nor builds a graph; the last column has the step of the run with most of them. At smoke scale every "
            "step of mafa_geo and mafa_soft orders a part of the next epoch, which takes six waits.",
            "",
            "| row | waits | kernels | most waits |",
            "|---|---|---|---|",
            *(
                f"| {row} | {work['waits']} | {work['kernels']} | {work['most_waits']} |"
                for row, work in content["steps"].items()
                if work
            ),
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
