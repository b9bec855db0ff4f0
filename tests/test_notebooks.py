"""notebooks/: both run from the first cell to the last at smoke size, and are committed without outputs."""

import json
import math

import nbformat
import pytest
from nbclient import NotebookClient

from common.base.places import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def results_of(name: str, parameters: str, expression: str):
    """Runs the notebook with other parameters; returns the value of the expression at its end."""
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    (sizes,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    sizes.source = parameters
    notebook.cells.append(nbformat.v4.new_code_cell(f"import json\nprint(json.dumps({expression}))"))
    # in its folder, as in Jupyter: the first cell puts the repository on the path
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT / "notebooks")}}).execute()
    pictures = [
        output for cell in notebook.cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})
    ]
    return json.loads(notebook.cells[-1].outputs[-1].text), len(pictures)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_no_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.slow
def test_ten_geometries_are_compared_on_features(tmp_path):
    sizes = f"NUM_TRAIN, NUM_TEST, SEEDS, STEPS, DATA, OUTPUT = 400, 100, 2, 12, None, Path({str(tmp_path)!r})"
    table, num_pictures = results_of("which_geometry_for_my_data", sizes, 'table.to_dict("list")')
    assert num_pictures == 3
    assert {len(column) for column in table.values()} == {10}
    learned = table["t2i, temperature learned"]
    assert learned == sorted(learned, reverse=True)
    assert sum(learned) / 10 > 1.7  # chance level: 100 / 100
    assert all(0 < value <= 100 for value in table["logit scale at the end"])
    assert {path.name for path in tmp_path.glob("*.png")} == {"recalls.png", "courses.png", "temperature.png"}


@pytest.mark.slow
def test_a_clip_learns_with_another_geometry(tmp_path):
    sizes = "MODEL, LEARNING_RATE, NUM_TRAIN, NUM_TEST, STEPS, BATCH = None, 1e-3, 64, 16, 60, 32\n"
    sizes += f"OUTPUT = Path({str(tmp_path)!r})"
    logits = "s() * g.similarity(g.embed_image(images_), g.embed_text(texts_))"
    expression = (
        "[{name: losses for name, (_, losses, _) in tuned.items()}, "
        "{name: (%s).std(1).mean().item() "
        "for images_, texts_ in [all_features(clip, 'train')] for name, (g, s) in starts.items()}]"
    )
    (losses, spread), num_pictures = results_of("another_geometry_for_a_public_clip", sizes, expression % logits)
    assert num_pictures == 1
    # both begin with the same softmax, up to the norms of single features, which differ more with random weights
    assert losses["squared distance"][0] == pytest.approx(losses["cosine"][0], rel=0.15)
    assert 0.8 < spread["squared distance"] / spread["cosine"] < 1.6
    for of_geometry in losses.values():
        assert sum(of_geometry[-5:]) / 5 < 0.95 * math.log(32)  # chance level of a batch
