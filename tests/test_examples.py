"""docs/library.md and examples/: what the page shows is in the files, and the files do what they say."""

import importlib
import math
import re
from pathlib import Path

import pytest
import torch
from processes import in_processes

from common.base.provenance import ROOT
from common.geometry import Sphere
from common.logit_scale import LogitScale
from common.oblique import Oblique
from euclip.geometry import Elliptic, Euclidean, Hyperbolic
from oblique_topology.geometry import L2, ObliqueGeodesic

PAGE = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
# as the page's table has them
GEOMETRIES = [Sphere(), Oblique(8), ObliqueGeodesic(8), L2(), Elliptic(), Euclidean(squared=False)]
GEOMETRIES += [Euclidean(squared=True), Hyperbolic(32, squared=False), Hyperbolic(32, squared=True)]


def example(name: str):
    return importlib.import_module(f"examples.{name}")


def test_the_page_shows_what_the_examples_hold():
    files = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")}
    shown = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(shown) >= 10
    for block in shown:
        assert any(block in text for text in files.values()), block
    for name in files:
        assert f"examples/{name}" in PAGE
    imports = {geometry.__class__.__name__: geometry.__class__.__module__ for geometry in GEOMETRIES}
    assert all(re.search(rf"\| `{name}\(.*\)` \| `{module}` \|", PAGE) for name, module in imports.items())


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.name)
def test_the_loop_trains_with_every_geometry_from_the_start_that_the_page_names(geometry, capsys):
    squared = getattr(geometry, "squared", False)
    losses = example("loop").main(geometry, LogitScale(1.0 if squared else 1 / 0.07))
    assert losses[-1] < 0.7 * math.log(64)
    assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.parametrize("name", ["around_open_clip", "around_transformers"])
def test_other_libraries_models_learn_under_our_geometries(name):
    losses = example(name).main()
    assert losses[-1] < 0.7 * losses[0]


def test_pictures_move_into_their_cones():
    missed = example("entailment").main()
    assert missed[-1] < 0.5 * missed[0]


def test_one_sphere_is_the_cosine():
    torch.testing.assert_close(*example("class_tokens").main())


def test_two_processes_give_the_losses_of_one():
    alone = example("several_processes").main()
    assert alone[-1] < alone[0]
    for losses in in_processes(2, example("several_processes").main):
        assert losses == pytest.approx(alone, rel=1e-5)


def test_own_embeddings_are_ranked_and_classified():
    metrics = example("own_embeddings").main()
    assert 0.2 < metrics["i2t_recall_at_1"] < 1
    assert 0.5 < metrics["accuracy"] <= 1


def test_every_example_names_its_command():
    for path in Path(ROOT / "examples").glob("*.py"):
        assert f"-m examples.{path.stem}\n" in path.read_text(encoding="utf-8")
