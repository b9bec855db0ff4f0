"""The oblique paper's claims: signs of its printed numbers, our results beside them, what a test decides."""

import re
from dataclasses import replace

import numpy as np
import pytest

from common.base.files import read_repository_yaml
from common.base.places import ROOT
from common.report.claims.decide import audit
from common.report.claims.expressions import Cell
from common.report.claims.read import HOLDS, load_claims, load_paper_tables
from common.report.claims.show import judge
from common.report.table import read_table
from common.reproduce.command import Command, _write
from oblique_topology.reproduce import PARTS
from oblique_topology.topology_table import TOPOLOGIES, kept_numbers

PAPER = ROOT / "oblique_topology"
PRINTED = load_paper_tables(PAPER / "paper_tables.yaml")
CLAIMS = {claim.id: claim for claim in load_claims(PAPER / "claims.yaml", PRINTED)}


def test_claim_13_has_the_sign_of_the_correlation():
    verdict = audit(CLAIMS["C13"], PRINTED)
    correlations = []
    for topology in ("Sphere", "Ob(64, 8), geodesic", "Ob(64, 8), inner product"):
        rows = [f"{topology}, {start}" for start in ("e^2.64", "e^5.31", "e^0")]
        steps = [PRINTED.numbers[Cell("table6", row, "converge_step")] for row in rows]
        for column in ("zs_cls_acc", "zs_t2i_r1"):
            correlations.append(
                np.corrcoef(steps, [PRINTED.numbers[Cell("table3", row, column)] for row in rows])[0, 1]
            )
    assert [finding.verdict == HOLDS for finding in verdict.findings] == [value < 0 for value in correlations]
    assert np.allclose(correlations, [-0.18, 0.06, -0.83, -0.69, -1.0, 0.81], atol=0.01)


def test_a_table_is_marked_as_not_run_yet_as_long_as_nothing_here_reproduces_it():
    tables = read_repository_yaml(PAPER / "paper_tables.yaml")["tables"]
    runnable = {name for name, table in tables.items() if not table.get("not_run_yet")}
    assert runnable == PARTS.keys() & tables.keys()
    for name in set(tables) - runnable:
        assert not any("config" in row for row in tables[name]["rows"]), name


def test_no_number_of_the_paper_reaches_the_measured_side(tmp_path, committed_tables):
    folder = tmp_path / "oblique_topology"
    folder.mkdir()
    # a margin of equivalence is a share of the paper's difference; without that rule nothing else may come in
    claims, rules = re.subn(r"^equal_within: .*\n", "", (PAPER / "claims.yaml").read_text(encoding="utf-8"), flags=re.M)
    assert rules == 1
    (folder / "claims.yaml").write_text(claims, encoding="utf-8")
    text = (PAPER / "paper_tables.yaml").read_text(encoding="utf-8")
    (folder / "paper_tables.yaml").write_text(text, encoding="utf-8")
    committed = (entry for entry in committed_tables if entry.table.paper == folder.name)
    tables = [entry.table for entry in committed if entry.path.parent.name.startswith("photos")]  # with all claims
    before = judge(folder, tables)
    # every printed value becomes another one, in the file and in the paper's cells of the tables
    shifted = re.sub(r"values: (&\w+ )?\[[^\]]*\]", lambda m: re.sub(r"\d+\.\d+", "1.5", m.group()), text)
    assert shifted.count("1.5") > 200
    (folder / "paper_tables.yaml").write_text(shifted, encoding="utf-8")
    assert any(row.paper for table in tables for row in table.rows)
    tables = [replace(table, rows=[replace(row, paper={}) for row in table.rows]) for table in tables]
    after = judge(folder, tables)
    assert [judged.measured for judged in after.judged] == [judged.measured for judged in before.judged]
    assert [judged.audit for judged in after.judged] != [judged.audit for judged in before.judged]


def written(command, table, monkeypatch, capsys, without=("plot_table", "collect_page")):
    """What the screen says of a table that is written without its picture and its page, which take seconds."""
    for name in without:
        monkeypatch.setattr(f"common.reproduce.command.{name}", lambda *arguments, **words: None)
    _write(command, "oblique_topology", [table])
    return capsys.readouterr().out


def test_a_reproduced_table_ends_with_the_claims_that_it_touches(tmp_path, monkeypatch, capsys):
    table = read_table(ROOT / "results/oblique_topology/table2/demo/table2.json")
    command = Command("table2", "demo", (0, 1, 2), (), tmp_path, tmp_path / "results")
    text = written(command, table, monkeypatch, capsys, without=("plot_table",))
    assert re.findall(r"^(C\d+) ", text, re.MULTILINE) == ["C1", "C2", "C3", "C22"]
    assert "needs published weights" in " ".join(text.split())
    page = (tmp_path / "report_oblique_topology.html").read_text(encoding="utf-8")
    for name in CLAIMS:
        assert page.count(f'id="claim-oblique_topology-{name}"') == 1
    text = written(replace(command, overrides=("optim.steps=2",)), table, monkeypatch, capsys)
    assert "Claims are not judged by changed settings." in text
    text = written(replace(command, rows=("table2_clip",)), table, monkeypatch, capsys)
    assert "Claims about these rows are judged where there is no whole table" in text


def test_a_run_just_made_counts_before_committed_ones(tmp_path, monkeypatch, capsys):
    """Committed results hold three seeds; a single seed made now is what its own verdicts are about."""
    committed = read_table(ROOT / "results/oblique_topology/table2/demo/table2.json")
    row = next(row for row in committed.rows if row.status == "measured")
    ours = {key: replace(cell, values=cell.values[:1], seeds=(0,), hits=None) for key, cell in row.ours.items()}
    rows = [replace(row, ours=ours), replace(row, method="CLIP [Multi(32, 16)], ViT-B/16", ours=ours)]
    command = Command("table2", "demo", (0,), (), tmp_path, tmp_path / "results")
    text = written(command, replace(committed, rows=rows), monkeypatch, capsys)
    assert "C1" in text
    assert "undecided (one seed) at demo scale (margin 0 points)" in " ".join(text.split())


# ---- claims that a test decides -------------------------------------------------------------------------------------


def test_similarities_keep_as_many_numbers_as_table_1_says():
    """Claim C33: b^2 for both inner products, b^2 m for the geodesic, b^2 d for l2 where it is broadcast."""

    def growth(name, **twice):
        sizes = {"batch": 32, "dim": 256, "num_spheres": 8}
        kept = [kept_numbers(TOPOLOGIES[name], **{**sizes, **more}) for more in ({}, twice)]
        return kept[1] / kept[0]

    for name in TOPOLOGIES:
        assert growth(name, batch=64) == pytest.approx(4, rel=0.01), name
    for name in ("Sphere, inner product", "Ob(64, 8), inner product"):
        assert growth(name, dim=512) == growth(name, num_spheres=16) == 1
    assert (
        1.7 < growth("Ob(64, 8), geodesic", num_spheres=16) < 2.05
    )  # a cosine for each sphere, and a few numbers more
    assert growth("Ob(64, 8), geodesic", dim=512) == 1
    assert growth("Euclidean, l2, broadcast", dim=512) == pytest.approx(2, rel=0.05)
    assert growth("Euclidean, l2", dim=512) == 1  # of one matrix product, which is ours


def test_only_under_a_metric_a_false_negative_caps_negatives_at_three_times_the_positives():
    generator = np.random.default_rng(0)
    image_1, text_1, image_2, text_2 = generator.normal(size=(4, 20_000, 3))

    def ratio(distance):
        # (image_1, text_2) is labelled negative but in truth related, so it is as close as a positive
        positives = [distance(image_1, text_1), distance(image_2, text_2), distance(image_1, text_2)]
        return distance(image_2, text_1) / np.max(positives, axis=0)

    assert ratio(lambda a, b: np.linalg.norm(a - b, axis=-1)).max() <= 3
    angle = np.radians([90.0, 135.0, 0.0, 45.0])  # image_1, text_1, image_2, text_2 on a circle
    image_1, text_1, image_2, text_2 = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    assert ratio(lambda a, b: 1 - a @ b) > 5  # 1 - cosine is no metric
    assert ratio(lambda a, b: np.arccos(np.clip(a @ b, -1, 1))) == pytest.approx(3)  # the angle is one
