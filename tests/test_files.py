"""`vlgeometry files`: the lists, the table of docs/library.md, and that the copies work without the repository."""

import json
import re
import tempfile
from pathlib import Path

import pytest
from processes import run_script
from runs import called

from common.base.places import ROOT
from scripts import files
from scripts.files import needed_by

LOOP = "common.geometry common.info_nce common.logit_scale"  # imported by the first loop of the page
POOL, EUCLIP, EUCLIP_LOOP, OBLIQUE = (
    "geomm.pool",
    "euclip.geometry",
    f"euclip.geometry {LOOP}",
    f"common.oblique {LOOP}",
)
MOST_LINES = {POOL: 2_000, EUCLIP: 1_100, EUCLIP_LOOP: 2_000, OBLIQUE: 1_400}
PAGE = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
LOOP_IMPORTS = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
LOOP_STEP = f"""
{LOOP_IMPORTS}
torch.manual_seed(0)
logit_scale, features = LogitScale(), torch.randn(2, 16, 8, requires_grad=True)
images, texts = geometry.embed_image(features[0]), geometry.embed_text(features[1])
loss = contrastive_loss(images, texts, geometry, logit_scale())
loss.backward()
clamp_scalars_([*logit_scale.scalars(), *geometry.scalars()])
values += [loss, features.grad]
"""
# what a user writes with the copies; `values` are compared with the repository's
USES = {
    POOL: """
from common.pool import pool_info_nce
from geomm.geodesic import geodesic_distance
from geomm.pool import GeodesicPool
torch.manual_seed(0)
pool = GeodesicPool(64, 8, branching=(2, 2), num_neighbors=2, attach="knn_local")
for step in range(3):
    keys, queries = F.normalize(torch.randn(2, 32, 8), dim=2).unbind()
    queries.requires_grad_()
    pool.rebuild(step)
    candidates = pool.open(keys)
    loss, _ = pool_info_nce(candidates, queries, torch.tensor(10.0), candidates.columns)
    loss.backward()
    pool.insert(keys)
values += [loss, queries.grad, geodesic_distance(queries.detach(), pool.queue.features, pool.graph())]
""",
    EUCLIP: """
from euclip.geometry import Euclidean, Hyperbolic
for geometry in (Euclidean(squared=True), Hyperbolic(8, squared=False)):
    torch.manual_seed(0)
    features = torch.randn(2, 16, 8, requires_grad=True)
    images, texts = geometry.embed_image(features[0]), geometry.embed_text(features[1])
    residual = geometry.entailment_residual(images=images, texts=texts, min_radius=0.1)
    loss = F.cross_entropy(geometry.similarity(images, texts), torch.arange(16)) + residual.mean()
    loss.backward()
    values += [loss, features.grad, *(parameter.grad for parameter in geometry.parameters())]
""",
    EUCLIP_LOOP: f"""
from euclip.geometry import Hyperbolic
geometry = Hyperbolic(8, squared=False)
{LOOP_STEP}""",
    OBLIQUE: f"""
from common.oblique import Oblique
geometry = Oblique(sphere_dim=4)
{LOOP_STEP}""",
}
PROGRAM = """
import json, sys
sys.path.insert(0, {folder!r})
import torch
import torch.nn.functional as F
results = []
for use in {uses}:
    values = []
    exec(use)
    results.append([value.tolist() for value in values])
ours = [module.__file__ for module in list(sys.modules.values()) if module.__name__.split(".")[0] in {packages}]
print(json.dumps([results, ours]))
"""


def used(folder, *modules):
    """Values of uses in a process without modules of the repository, and the files of these packages that it loads."""
    uses = [USES[name] for name in modules]
    with tempfile.TemporaryDirectory() as elsewhere:
        program = Path(elsewhere, "program.py")
        program.write_text(PROGRAM.format(folder=str(folder), uses=uses, packages=files.PACKAGES))
        done = run_script(Path(elsewhere), program.name)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def of_repository():
    """Values of all uses with the repository's files."""
    return dict(zip(USES, used(ROOT, *USES)[0]))


def printed(capsys, *words):
    called(files.main, *words)
    return capsys.readouterr().out


@pytest.mark.parametrize("modules", [POOL, EUCLIP, EUCLIP_LOOP, pytest.param(OBLIQUE, marks=pytest.mark.slow)])
def test_the_copies_give_the_values_of_the_repository(modules, of_repository, tmp_path, capsys):
    printed(capsys, *modules.split(), "--copy", tmp_path)
    copied = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*") if file.is_file()}
    needed = needed_by(modules.split())
    assert copied == {*needed.files, *needed.optional_files, "LICENSE"}
    (values,), loaded = used(tmp_path, modules)
    assert {Path(file).relative_to(tmp_path).as_posix() for file in loaded} == copied - {"LICENSE"}  # and none too many
    assert values == of_repository[modules]


@pytest.mark.parametrize("modules", USES)
def test_a_list_is_short_and_has_nothing_that_the_method_does_not_use(modules):
    needed = needed_by(modules.split())
    assert needed.lines <= MOST_LINES[modules]
    assert needed.packages == ["torch"]
    # compiled loops and exact paths of samples, where a graph is built
    assert needed.optional_packages == (["numba", "numpy", "scipy"] if modules == POOL else [])
    paths = [ROOT / file for file in needed.files | needed.optional_files]
    assert needed.lines == sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def test_the_page_states_the_lists():
    rows = re.findall(r"^\| .* \| `vlgeometry files ([\w. ]+)` \| (\d+) \| ([\d,]+) \| (.*) \|$", PAGE, re.MULTILINE)
    assert {modules for modules, *_ in rows} == set(USES)
    for modules, count, lines, packages in rows:
        needed = needed_by(modules.split())
        assert int(count) == len(needed.files) + len(needed.optional_files)
        assert int(lines.replace(",", "")) == round(needed.lines, -2)
        assert re.findall(r"\w+", packages.replace("for a graph", "")) == needed.packages + needed.optional_packages


def test_a_list_on_the_screen_names_files_lines_and_licence(capsys):
    needed, text = needed_by([POOL]), printed(capsys, POOL)
    assert f"{needed.files['geomm/pool.py']:6}  geomm/pool.py\n" in text
    assert f"{needed.lines:6}  lines in {len(needed.files) + len(needed.optional_files)} files\n" in text
    assert "MIT License, Copyright (c)" in text


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("geomm.pol", "there is no module geomm.pol; did you mean geomm.pool?"),
        ("numpy", "there is no module numpy; expected a module such as geomm.pool"),
    ],
)
def test_a_name_that_does_not_exist_has_a_nearest(module, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        needed_by([module])


def test_a_copy_skips_equal_files_and_overwrites_no_other(tmp_path, capsys):
    printed(capsys, "common.vectors", "--copy", tmp_path)
    printed(capsys, "common.scalars", "--copy", tmp_path)
    assert (tmp_path / "common" / "scalars.py").is_file()
    (tmp_path / "LICENSE").write_text("of the project")
    with pytest.raises(FileExistsError, match="LICENSE exists with other content; expected equal files or none"):
        printed(capsys, "common.distances", "--copy", tmp_path)
    assert not (tmp_path / "common" / "distances.py").exists()
