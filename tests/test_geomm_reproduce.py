"""Every part of GeoMM at smoke scale, end to end: tables beside the paper's numbers, and the readings of Eq. 3."""

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from conftest import SmokeParts
from plotted import read_plotted
from scipy import stats
from scipy.stats import spearmanr

from common.base.config import ConfigError, from_dict, load_row, override
from common.base.files import read_repository_yaml
from common.base.provenance import ROOT
from common.data.pairs import open_evaluation_sets
from common.report.claims.decide import measured
from common.report.claims.expressions import Cell
from common.report.claims.intervals import OurCell
from common.report.claims.read import load_claims, load_paper_tables
from common.report.table import Column, Measured, Row, Table, from_json
from common.reproduce.command import Command
from common.reproduce.tables import ran_as
from common.run.checkpoint import last_checkpoint
from common.run.folder import RunFiles
from common.run.log import read_log
from geomm import lookalikes
from geomm.ablations import branching_of, seeds_notes, settings_of
from geomm.config import Config
from geomm.cost import Steps, seconds_of_100_steps
from geomm.evaluate import evaluate_all, load_encoder
from geomm.finetune import code_of
from geomm.geodesic import geodesic_distance
from geomm.graph_table import AT_THE_END, BESIDE_A_TABLE, OF_GRAPHS
from geomm.hierarchy_error import deviation, ways_of
from geomm.lookalikes import SugarCrepeFiles, measure, open_lookalikes, share_distinguished
from geomm.readings import CURVE, figures_of, gains, readings, rows_of
from geomm.reproduce import main
from geomm.table3 import WITHOUT, learnt, why_undecided
from geomm.train import CODE as CODE_OF_GEOMM
from oblique_topology.reproduce import CODE

LOADED = load_paper_tables(ROOT / "geomm" / "paper_tables.yaml")
PRINTED = read_repository_yaml(ROOT / "geomm" / "paper_tables.yaml")["tables"]
FEW = ("optim.steps=4", "optim.warmup_steps=0", "data.num_train=64", "data.num_val=8", "data.num_test=16",
       "run.evaluate_every=0", "run.save_every=0")  # fmt: skip
# tables of ALBEF, TCL and MAFA train one of them in turn: the others go through the same code
ROWS = {
    "table1": "albef albef_geo albef_soft",
    "table2": "finetuned_tcl finetuned_tcl_geo finetuned_tcl_soft",
    "table3": "mafa_geo",
    "table4": "clip clip_geo clip_soft flip_geo",
    "table9": " ".join(f"finetuned_crowded_mafa{then}" for then in ("", "_then_oblique", "_then_geo", "_then_soft")),
}


class FewRows(SmokeParts):
    def __call__(self, part, seeds=1):
        self.overrides = (*FEW, "--rows", ROWS.get(part, ""))
        return super().__call__(part, seeds)


@pytest.fixture(scope="module")
def geomm(tmp_path_factory):
    return FewRows("geomm", tmp_path_factory.mktemp("geomm"), ())


def test_a_row_that_a_column_measures_is_no_custom_row(tmp_path):
    with pytest.raises(ConfigError, match="ROWS=nlvr2_albef: table3 trains no such row"):
        main(["table3", "--scale", "smoke", "--rows", "albef nlvr2_albef", "--output", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def table_of(geomm, part):
    return from_json((geomm(part) / f"{part}.json").read_text())


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("part", ROWS)
def test_chosen_rows_are_trained_with_their_further_runs_and_stand_beside_the_papers_numbers(geomm, part, whole):
    geomm = SmokeParts("geomm", geomm.folder / "whole", FEW) if whole else geomm
    printed_rows = PRINTED[part]["rows"] + [{**row, "values": []} for row in PRINTED[part].get("beyond", ())]
    for row, printed in zip(table_of(geomm, part).rows, printed_rows, strict=True):
        assert list(row.paper.values()) == printed["values"]
        if "config" not in printed:
            assert row.status == f"not run: needs {printed['needs']}"
        elif not whole and Path(printed["config"]).stem not in ROWS[part].split():
            assert row.ours == {}
        else:
            for column in PRINTED[part]["columns"]:
                role, metric, *field = column["measure"]
                config = Path(printed[field[0] if field else "config"]).stem
                results = json.loads((run_of(geomm, config) / "evaluation.json").read_text())["evaluations"]
                ranked = results[role + printed.get("suffix", "")]
                assert row.ours[column["key"]].values == pytest.approx((100 * ranked["metrics"][metric],))


def test_table8_counts_the_training_sets_below_the_papers(geomm, tmp_path):
    mixed = "data.mixture=[{weight: 3}, {source: scenes, train: train_crowded, num_train: 25, weight: 1}]"
    mixture = SmokeParts("geomm", tmp_path, (*FEW, mixed))
    for parts, expected in ((geomm, [0.064]), (mixture, [0.064, 0.025])):
        rows = table_of(parts, "table8").rows
        assert [list(row.paper.values()) for row in rows[:4]] == [row["values"] for row in PRINTED["table8"]["rows"]]
        assert [row.ours["images"].mean for row in rows[4:]] == expected
        assert [row.ours["texts"].mean for row in rows[4:]] == pytest.approx([5 * count for count in expected])


def test_the_oblique_papers_tcl_is_trained_by_these_rows(geomm, monkeypatch):
    with pytest.raises(ConfigError, match=r"trained by gone/, which is missing; expected a copy of the repository"):
        CODE.of("../../gone/configs/tcl.yaml")
    printed = CODE.printed("table9")
    printed["beyond"] = [row for row in printed["beyond"] if "own_towers" in row["config"]]  # of four of ours
    monkeypatch.setattr("common.reproduce.rows.PaperCode.printed", lambda code, table_id: printed)
    table, sources = table_of(SmokeParts("oblique_topology", geomm.folder, FEW), "table9"), printed["rows"]
    for row, source in zip(table.rows, [*sources, *printed["beyond"]], strict=True):
        for column in printed["columns"] if "config" in source else ():
            role, metric, *field = column["measure"]
            if field and field[0] not in source:  # a row of ours without fine-tuning
                assert row.ours[column["key"]] is None
                continue
            run = run_of(geomm, Path(source[field[0] if field else "config"]).stem)
            results = json.loads((run / "evaluation.json").read_text())["evaluations"]
            role += "_contrastive" if row.method.endswith("alignment") else ""
            assert row.ours[column["key"]].values == pytest.approx((100 * results[role]["metrics"][metric],))
    queue = last_checkpoint(run_of(geomm, "tcl_oblique") / "checkpoints").model_tensors()
    keys = queue["text_pool.queue.features"][: int(queue["text_pool.queue.fill_level"])]
    norms = keys.float().unflatten(1, (2, -1)).norm(dim=2)  # "all embedding spaces": those of the pool, too
    assert (norms.min().item(), norms.max().item()) == pytest.approx((1, 1), abs=1e-4)


@cache  # a table's cells ask for the same few
def config_of(kind, file):
    return from_dict(kind, yaml.safe_load(file.read_text()), "run")


def run_of(geomm, row):
    """The run of a row without settings of its own, from trained towers where it has any."""
    runs, file = geomm.folder.glob(f"runs/geomm/{row}-smoke-*/seed0"), ROOT / f"geomm/configs/{row}.yaml"
    kind = code_of(file).config_class
    whole = load_row(kind, ROOT / "geomm", file, "smoke")
    (run,) = (
        run for run in runs
        if (config := config_of(kind, run / "config.yaml")).method == whole.method
        and not getattr(config.data, "blank", False)
        and bool(whole.start.row) == any(line["event"] == "start" for line in read_log(run / "log.jsonl"))
    )  # fmt: skip
    return run


def test_tasks_stand_beside_blank_and_exchanged_pictures(geomm):
    tasks = {row.method: row.ours for row in from_json((geomm("table3") / "tasks.json").read_text()).rows}
    for row in table_of(geomm, "table3").rows:
        for key, cell in row.ours.items():
            assert (cell.values, cell.chance) == (tasks[row.method][key].values, tasks[row.method][key].chance)
    assert tasks.keys() == {"Geo-MAFA", *(f"Geo-MAFA, {without}" for without in WITHOUT.values())}
    assert tasks[f"Geo-MAFA, {WITHOUT['blank']}"].keys() == tasks["Geo-MAFA"].keys()
    assert tasks[f"Geo-MAFA, {WITHOUT['exchanged']}"].keys() == {"nlvr2_test_p"}
    paths = geomm.folder.glob("runs/geomm/vqa_mafa_geo-*/seed0/config.yaml")
    (blank,) = [path for path in paths if "blank: true" in path.read_text()]
    assert "blank pictures" in json.loads((blank.parent / "evaluation.json").read_text())["training_data"]


def validated(*accuracies, files=(None, None, None)):
    """Runs of one model by seed; of the test they know nothing."""
    return [
        SimpleNamespace(files=of_run, git_revision="a", evaluated_at="a", validation={"val": {"accuracy": accuracy}})
        for accuracy, of_run in zip(accuracies, files)
    ]


def test_a_task_is_learnt_by_validation_figures_whatever_the_test_says():
    seeing, blank = [validated(0.6, 0.62, 0.61)], [validated(0.4, 0.42, 0.39)]
    assert why_undecided(seeing, blank) == ""
    assert "blank pictures do as well on validation items" in why_undecided(blank, seeing)
    bare = [[SimpleNamespace(validation={})]]
    assert "no validation figure" in why_undecided(bare, blank) == why_undecided(seeing, bare)
    # one-sided 95 %: t of the differences lies between the quantiles of 95 and 97.5 %
    gains = 50 + np.linspace(-1, 1, 5) + 2.5 * stats.sem(np.linspace(-1, 1, 5))
    assert stats.t.isf(0.05, 4) < 2.5 < stats.t.isf(0.025, 4)
    assert learnt([gains], [[50.0] * 5])


def test_what_is_not_learnt_decides_no_claim():
    assert learnt([[60], [40]], [[41], [50]])
    assert not learnt([[60], [40]], [[61], [50]])
    assert not learnt([[60, 40, 50]], [[40, 42, 39]])  # the spread is larger than the gain
    alike = [40, 41, 42]
    assert [learnt([gain, gain], [alike, alike]) for gain in ([55, 66, 92], [35, 46, 72])] == [True, False]  # Welch's
    claims = {claim.id: claim for claim in load_claims(ROOT / "geomm/claims.yaml", LOADED)}

    def number(value, undecided):
        values = value, value + 1, value - 1
        return Measured(values, (0, 1, 2), None, "", "demo", "x", "y", undecided=undecided)

    def verdict(undecided):
        ours = {
            Cell("table3", method, column): OurCell(of_row, "percent", "one", method, {method: of_row})
            for method, value in (("ALBEF", 50), ("Geo-ALBEF", 70))
            for column in LOADED.columns["table3"]
            for of_row in [number(value, undecided if "nlvr2" in column else "")]
        }
        return measured(claims["C3-ALBEF"], LOADED, ours, "demo")

    assert verdict("").verdict == "holds"
    undecided = verdict("NLVR2 is not learnt")
    assert (undecided.verdict, undecided.reason) == ("undecided", "NLVR2 is not learnt")


@pytest.mark.parametrize(("accuracies", "failure"), [
    ([0.6, 0.65], "is not trained: accuracy of 62 % on validation data, chance level 50 %"),  # odds of 1.7, chance's 1
    ([0.6, 0.75], ""),
])  # fmt: skip
def test_a_task_near_chance_on_its_validation_set_is_not_trained(accuracies, failure, tmp_path):
    files = [RunFiles(tmp_path / str(number)) for number in range(2)]
    for of_run, accuracy in zip(files, accuracies):
        of_run.folder.mkdir()
        records = [
            {"event": "evaluate", "step": step, "metrics": {"accuracy": value, "chance_accuracy": 0.5}}
            for step, value in ((150, 0.9), (300, accuracy))
        ]
        of_run.log.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    assert why_undecided([validated(*accuracies, files=files)], [validated(0.2, 0.22)]) == failure


# of b, c and d the settings: test_table_7_varies_one_size_in_the_papers_proportions
@pytest.mark.parametrize(
    ("parts", "rows", "graphs"),
    [
        ("a", 3, 1 + 2),
        # default; 7a; 7b; 7c; 7d, where all but 50 are alike
        pytest.param("abcd", 15, 1 + 2 + 3 + 3 + 1, marks=pytest.mark.slow),
    ],
)
def test_every_graph_of_table_7_is_another_run_and_says_its_sizes(geomm, parts, rows, graphs):
    notes = {row.method: row.note for part in parts for row in table_of(geomm, f"table7{part}").rows}
    assert len(notes) == rows
    for row, sizes in {"1 layer": "8 centres", "2 layers": "8 x 2 centres", "3 layers": "8 x 2 x 2 centres",
                      "384 clusters": "12 x 2 centres", "12 neighbours": "4 neighbours",
                      "50 steps": "every 1 steps"}.items():  # fmt: skip
        assert (row not in notes and parts == "a") or sizes in notes[row]
    settings = {
        str(from_dict(Config, yaml.safe_load(path.read_text()), "run").method)
        for path in geomm.folder.glob("runs/geomm/finetuned_crowded_albef_then_geo-smoke-*/seed0/config.yaml")
    }
    assert len(settings) == graphs


def test_costs_are_those_of_steps_and_a_cosine_pays_for_no_graph(geomm, monkeypatch):
    rows = table_of(geomm, "table6").rows
    assert [row.method for row in rows] == ["ALBEF", "Geo-ALBEF", "CLIP_FT", "Geo-CLIP_FT"]
    assert all("; timed steps of 16 pairs; " in row.note and "starts from" not in row.note for row in rows)
    assert min(row.ours["seconds"].mean for row in (*rows, *table_of(geomm, "table7a").rows)) > 0
    monkeypatch.setattr(Steps, "_timed", lambda _, work: 0.0 if work() == [] or work() == [False] * 2 else 1.0)
    folder = ROOT / "geomm"
    every = ["method.geodesic_from_step=5", "method.graph_update_interval=4"]  # at steps 8, 12, ...
    files = {row: folder / f"configs/{row}.yaml" for row in ("tcl", "clip_geo")}
    configs = {row: load_row(Config, folder, file, "smoke", every) for row, file in files.items()}
    assert seconds_of_100_steps(configs, 1, 0) == pytest.approx({"tcl": 100, "clip_geo": 100 + 100 / 4})


def test_grounding_stands_beside_guesses_and_its_pictures_show_every_model(geomm):
    table = table_of(geomm, "refcoco_plus")
    models = ["ALBEF", "Geo-ALBEF", "ALBEF as soft as Geo"]
    assert [row.method for row in table.rows if row.ours] == models
    controls = from_json((geomm("refcoco_plus") / "grounding.json").read_text())
    accuracies = {row.method: row.ours for row in controls.rows}
    for row in table.rows[2:]:
        for name, cell in row.ours.items():
            assert cell.values == accuracies[row.method][f"{name}_accuracy"].values
            flat = accuracies["a flat map"][f"{name}_accuracy"]
            assert cell.chance == flat.chance == pytest.approx(max(12.5, flat.mean))  # one of eight boxes, the largest
            assert flat.data.startswith(f"scenes/referring_{name.split('_')[0]} (")  # its own set alone
    lost = [  # of one seed what is not better, summed over the models, is not learnt
        name
        for name in ("val", "test_a", "test_b")
        if sum(
            accuracies[method][f"{name}_accuracy"].mean
            - accuracies[f"{method}, words of another thing"][f"{name}_accuracy"].mean
            for method in models
        )
        <= 1e-9
    ]
    assert {name for row in table.rows for name, cell in row.ours.items() if cell.undecided} == set(lost)
    oracle = accuracies["an oracle, heat in the right box alone"]
    assert {cell.values for name, cell in oracle.items() if name != "no_heat"} == {(100.0,)}
    both = [f"{model}{words}" for model in models for words in ("", ", words of another thing")]
    assert [row.method for row in table_of(geomm, "figure3").rows] == both
    drawn = read_plotted(geomm("figure3") / "figure3_pictures.png")
    assert {point["map"] for point in drawn} == set(models)


@pytest.mark.parametrize(
    ("scale", "layers", "clusters", "neighbours", "intervals", "steps"),
    [
        ("smoke", [[8], None, [8, 2, 2]], [4, 6, 8, 12], [1, 2, 3, 4], [1, 2, 2, 2], 3 + 6 * 2),
        ("demo", [[64], None, [64, 2, 2]], [32, 48, 64, 96], [4, 5, 6, 7], [12, 19, 25, 31], 32 + 6 * 31),
        ("paper", [[256], None, [256, 2, 2]], [128, 192, 256, 384], [6, 8, 10, 12], [50, 75, 100, 125], 11_075),
    ],
)
@pytest.mark.filterwarnings("ignore:method.num_neighbors")  # the smallest graphs of smoke scale
def test_table_7_varies_one_size_in_the_papers_proportions(scale, layers, clusters, neighbours, intervals, steps):
    def methods(letter):
        default = CODE_OF_GEOMM.config("finetuned_crowded_albef_then_geo.yaml", scale)
        rows = settings_of(f"table7{letter}", default).values()
        configs = [CODE_OF_GEOMM.config("finetuned_crowded_albef_then_geo.yaml", scale, row) for row in rows]
        assert {config.optim.steps for config in configs} == {steps if letter == "d" else default.optim.steps}
        return [config.method for config in configs]

    default = [clusters[2], 2]
    assert [list(method.branching) for method in methods("a")] == [sizes or default for sizes in layers]
    assert [list(method.branching) for method in methods("b")] == [[count, 2] for count in clusters]
    assert [method.num_neighbors for method in methods("c")] == neighbours
    assert len({method.num_attached for method in methods("c")}) == 1  # only the graph changes
    assert [method.graph_update_interval for method in methods("d")] == intervals
    assert branching_of(64, 1) == (64,)


def test_an_exact_distance_deviates_nowhere_and_a_scaled_one_only_in_size():
    exact = torch.rand(5, 40, generator=torch.Generator().manual_seed(0)).double() + 0.1
    exact[0, 3] = torch.inf
    same = deviation(exact.clone(), exact)
    assert (same["rank_correlation"], same["relative_error"]) == pytest.approx((1, 0))
    assert same["unreachable"] == pytest.approx(100 / 200)
    scaled = deviation(1.5 * exact, exact)
    assert (scaled["rank_correlation"], scaled["relative_error"]) == pytest.approx((1, 50))
    noisy = exact[1:] + torch.rand(4, 40, generator=torch.Generator().manual_seed(1)).double()
    expected = [spearmanr(one, other).statistic for one, other in zip(noisy, exact[1:])]
    assert deviation(noisy, exact[1:])["rank_correlation"] == pytest.approx(sum(expected) / 4)


def test_the_hierarchy_is_compared_over_every_size(geomm):
    table = table_of(geomm, "hierarchy_error")
    assert table.rows[0].method == "the plain angle"
    assert len(table.rows) == 1 + len(ways_of(40))
    assert all(-1 <= row.ours["rank_correlation"].mean <= 1 for row in table.rows)


def test_what_a_discriminator_finds_is_reported_for_shuffled_and_grouped_batches(geomm):
    table = table_of(geomm, "mining")
    assert [row.method for row in table.rows] == [
        "MAFA, before its first step",
        "MAFA, shuffled",
        "MAFA, grouped",
        "Geo-MAFA, before its first step",
        "Geo-MAFA, shuffled",
        "Geo-MAFA, grouped",
    ]
    assert all(0 < row.ours["alike"].mean < 100 and 0 <= row.ours["mined"].mean <= 100 for row in table.rows)
    assert {row.ours["mined"].protocol for row in table.rows} == {"4 batches, both directions"}  # 64 pairs by 16


def test_a_row_of_mafa_is_named_by_what_it_is_on_scenes():
    folder, rows = ROOT / "geomm", read_repository_yaml(ROOT / "geomm/paper_tables.yaml")["tables"].values()
    rows = [row for table in rows for row in table["rows"] if "mafa" in row.get("config", "")]
    assert len(rows) == 9
    for row in rows:
        on_scenes, on_photographs = (
            load_row(Config, folder, folder / "configs" / row["config"], scale) for scale in ("demo", "photos")
        )
        assert ran_as(row["ours"], on_photographs) == row["method"]
        assert ran_as(row["ours"], on_scenes) == row["method"].replace("MAFA", "ALBEF on grouped batches")


def test_lookalikes_are_those_of_the_test_set_counted_one_by_one(geomm):
    row = table_of(geomm, "lookalikes").rows[0]
    config, encoder = load_encoder(last_checkpoint(run_of(geomm, "clip") / "checkpoints"), torch.device("cpu"))
    pairs = open_evaluation_sets(config.data).retrieval["test"]
    hits = []
    for index in range(len(pairs)):
        picture = encoder.transform.eval(pairs[index]["image"])[None]
        with torch.no_grad():
            image = encoder.model.eval().encode_image(encoder.transform.inputs(picture))[0].float()
        for true, false in pairs.hard_negatives(index):
            cosines = (encoder.texts([true, false]) @ image).tolist()
            hits.append((cosines[0] > cosines[1]) + 0.5 * (cosines[0] == cosines[1]))
    assert row.ours["cosine"].mean == pytest.approx(100 * sum(hits) / len(hits), abs=100 / len(hits))
    true, false = torch.tensor([0.1, 0.4, torch.inf, 2.0]), torch.tensor([0.2, 0.3, torch.inf, torch.inf])
    assert share_distinguished(true, false) == pytest.approx(62.5)


def test_lookalikes_state_how_many_pairs_could_not_be_read(geomm, monkeypatch):
    geomm("lookalikes")
    shares = dict.fromkeys(lookalikes.COLUMNS, 50.0)
    monkeypatch.setattr(lookalikes, "measure", lambda _, pairs: shares | {"measured": len(pairs.triples) - 3})
    command = Command("lookalikes", "smoke", (0,), FEW, geomm.folder, geomm.folder / "results")
    (table,) = lookalikes.lookalikes(command, CODE_OF_GEOMM)
    assert table.rows[0].ours["cosine"].protocol == "all pairs of the test set, 3 of unreadable pictures left out"


def test_an_evaluation_takes_the_gallery_and_the_local_clusters_of_its_command(geomm, monkeypatch):
    geomm("lookalikes")
    run, taken = RunFiles(run_of(geomm, "clip")), []
    config, encoder = load_encoder(last_checkpoint(run.checkpoints), torch.device("cpu"))
    changed = override(config, ["method.local=attached", "data.gallery=8"])
    monkeypatch.setattr(
        "geomm.lookalikes.geodesic_distance", lambda *given: taken.append(given[5]) or geodesic_distance(*given)
    )
    pairs = open_lookalikes(config.data, SugarCrepeFiles())
    shares = measure(SimpleNamespace(files=run, config=changed), pairs)
    assert shares["measured"] == len(pairs.triples)  # all can be read
    assert set(taken) == {"attached"}
    ranked = evaluate_all(changed, encoder, open_evaluation_sets(config.data))
    assert ranked["test"].protocol["num_images"] == 8


def test_every_row_of_the_readings_is_trained_from_the_same_towers_and_stands_in_the_table(geomm):
    table, rows = table_of(geomm, "readings"), rows_of(8, few=True)
    assert [row.method for row in table.rows] == [
        "the trained towers themselves",
        *(row.label for row in rows.values()),
    ]
    assert len(list(geomm.folder.glob("runs/geomm/towers-*"))) == 1
    for row in table.rows:
        assert 0 < row.ours["mean_recall"].mean <= 100
        assert 0 < row.ours["entropy"].mean <= math.log(40) + 1e-5
        is_geodesic = not row.method.startswith(("cosine", "the trained towers"))
        assert ("positive_local" in row.ours) == ("hops" in row.ours) == is_geodesic
    cells = {row.method: row.ours for row in table.rows}
    assert cells["cosine, scale x 0.3"]["scale_factor"].mean == pytest.approx(0.3)
    complete = cells[rows["knn_local_st_complete"].label]
    assert [complete[name].mean for name in ("hops", "path_over_angle", "components")] == pytest.approx([1, 1, 1])
    drawn = read_plotted(geomm("readings") / "readings_softness.png")
    cosine = [point for point in drawn if point["curve"] == CURVE]
    panel = "nearest centres, local"
    assert {point["panel"] for point in cosine} == {panel, f"{panel}, as sharp as the cosine"}
    expected = [(cells[row.label]["entropy"].mean, cells[row.label]["mean_recall"].mean)
                for row in (rows["cosine"], rows["cosine_x0.3"])]  # fmt: skip
    of_panel = [number for point in cosine[:2] for number in (point["x"], point["mean"])]
    assert of_panel == pytest.approx([number for point in sorted(expected) for number in point], rel=1e-4)


def rates_of(overrides, monkeypatch, scale="photos"):
    """Row of the readings -> its learning rate and that of its start; trains nothing."""
    seen = {}
    monkeypatch.setattr("geomm.readings.run_rows", seen.update)
    monkeypatch.setattr("geomm.readings.is_main_process", lambda: False)
    readings(Command("readings", scale, (0,), overrides, Path("out"), Path("out")), CODE_OF_GEOMM)
    return {
        name: [one.config().optim.learning_rate for one in (job, *job.parents().values())]
        for name, (job,) in seen.items()
    }


def searched_rates(scale: str) -> dict[str, dict[float, float]]:
    """Row -> learning rate -> mean recall on validation data, of the committed searches."""
    return {
        row: {
            float(trial["settings"][0].removeprefix("optim.learning_rate=")): trial["mean"]
            for trial in searched["trials"]
        }
        for file in (ROOT / "results/geomm/search").glob(f"{scale}-*-learning_rate-*/search.json")
        for row, searched in json.loads(file.read_text())["rows"].items()
    }


def test_on_scenes_rows_have_the_searched_rates_which_order_them_as_the_conclusions_tell():
    searched = searched_rates("demo")
    for row, rates in searched.items():
        config = code_of(ROOT / "geomm/configs" / f"{row}.yaml").config(f"{row}.yaml", "demo", ())
        assert config.optim.learning_rate == max(rates, key=rates.get), row
    cosine, geodesic, soft = (searched[row] for row in ("clip", "clip_geo", "clip_soft"))
    assert max(soft.values()) > max(cosine.values()) > max(geodesic.values())
    assert max(cosine, key=cosine.get) < max(geodesic, key=geodesic.get)
    assert [soft[rate] > geodesic[rate] for rate in soft.keys() & geodesic.keys()] == [True] * 4


def test_readings_on_photographs_have_the_rates_that_validation_data_chose_and_those_on_scenes_one(monkeypatch):
    best = {row: max(rates, key=rates.get) for row, rates in searched_rates("photos").items()}
    rates = rates_of((), monkeypatch)
    assert rates.pop("start") == [best["towers"]]
    assert set(map(tuple, rates.values())) == {(best["clip"], best["towers"])}
    on_scenes = rates_of((), monkeypatch, "demo")
    assert on_scenes.pop("start") == [1e-3]
    assert set(map(tuple, on_scenes.values())) == {(5e-4, 1e-3)}  # one rate for all, as the conclusions say
    given = rates_of(("optim.learning_rate=7e-4",), monkeypatch)
    assert {rate for of_row in given.values() for rate in of_row} == {7e-4}


def test_a_gain_is_the_difference_of_two_rows_with_the_spread_that_pictures_and_all_rows_show():
    # a seed does the same to all rows, so that pictures alone are left: V_P - V_C by loops
    rows, random, seeds, pictures = rows_of(8, few=True), np.random.default_rng(0), 3, 40
    of_seed = random.normal(0, 0.1, seeds)
    hits = {name: random.random((1, pictures)) + 0.3 + of_seed[:, None] for name in rows}
    values = {(name, "mean_recall"): [100 * of_run.mean() for of_run in hits[name]] for name in rows}
    values |= {("cosine", "validation_recall"): [50.0] * seeds, ("cosine_x0.3", "validation_recall"): [51.0] * seeds}
    runs = {
        name: [SimpleNamespace(hits={"test": {"mean_recall": [[hit] for hit in of_run]}}) for of_run in hits[name]]
        for name in rows
    }
    gained = gains(rows, runs, values, SimpleNamespace(data="", settings={}, measured_on={"mean_recall": "x"}))
    z = [
        100 * (ours - control)
        for ours, control in zip(hits["knn_local_st"][0], hits["cosine_as_soft_as_knn_local_st"][0])
    ]
    mean = math.fsum(z) / pictures
    half = 1.959964 * math.sqrt(math.fsum((value - mean) ** 2 for value in z) / (pictures - 1) / pictures)
    assert gained.values["knn_local_st", "as_soft"] == pytest.approx([mean] * seeds)
    assert gained.intervals["knn_local_st", "as_soft"] == pytest.approx((mean - half, mean + half))
    best = np.subtract(values["knn_local_st", "mean_recall"], values["cosine_x0.3", "mean_recall"])
    assert gained.values["knn_local_st", "best_cosine"] == pytest.approx(best.tolist())  # by validation data


def test_figures_of_a_run_are_those_of_its_log_and_of_its_validation(tmp_path):
    lines = [
        {"event": "graph", "step": 1, "pool": "image", **dict.fromkeys(OF_GRAPHS, 9.0)},
        {"event": "graph", "step": 3, "pool": "image", "hops": 2.0, "path_over_angle": 1.5, "components": 1},
        {"event": "graph", "step": 3, "pool": "text", "hops": 3.0, "path_over_angle": 1.1, "components": 3},
        {"event": "train", "step": 3, "logit_scale": 14.0}
        | {f"{side}_{name}": value for side, value in (("i2t", 0.1), ("t2i", 0.3)) for name in AT_THE_END}
        | {f"{side}_positive_{name}": 0.2 for side in ("i2t", "t2i") for name in ("unreachable", "truncated")},
    ]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = SimpleNamespace(
        files=SimpleNamespace(log=log),
        evaluations={"test": {"metrics": {"mean_recall": 0.5}}},
        validation={"scenes/val": {"mean_recall": 0.4}},
    )
    figures = figures_of(run)
    assert (figures["hops"], figures["path_over_angle"], figures["components"]) == pytest.approx((2.5, 1.3, 2))
    assert (figures["mean_recall"], figures["validation_recall"]) == pytest.approx((50, 40))
    assert (figures["entropy"], figures["positive_local"], figures["positive_lost"]) == pytest.approx((0.2, 20, 40))


def test_readings_of_one_start_differ_from_the_first_graph_on(geomm):
    geomm("readings")
    losses, folder, rows = {}, ROOT / "geomm", rows_of(8, few=True)
    for name, row in rows.items():
        method = load_row(Config, folder, folder / "configs" / row.config, "smoke", list(row.settings)).method
        for run in geomm.folder.glob(f"runs/geomm/{Path(row.config).stem}-smoke-*/seed0"):
            if config_of(Config, run / "config.yaml").method == method:
                losses[name] = [line["loss"] for line in read_log(run / "log.jsonl") if line["event"] == "train"]
    assert losses.keys() == rows.keys()
    assert len({of_row[0] for of_row in losses.values()}) == 1  # no pool is full yet
    assert len({of_row[-1] for of_row in losses.values()}) == len(rows)


@pytest.mark.parametrize("part", ["table1", "table2", "table4", "table9"])
def test_the_base_as_soft_has_the_entropy_of_a_graph_that_it_does_not_use(geomm, part):
    """Also where it is fine-tuned: the factor of each run is solved for at its first graph."""
    rows = {row.method: row for row in table_of(geomm, part).rows if row.ours}
    (base,) = [row for row in rows if f"{row} as soft as Geo" in rows]
    soft = rows[f"{base} as soft as Geo"]
    assert soft.ours.keys() == rows[base].ours.keys()
    assert "compared by the cosine, as soft as the geodesic distance from the first graph on" in soft.note
    (row,) = [row for row in PRINTED[part]["beyond"] if row["method"] == soft.method]
    for config in {row["config"], row.get("crowded", row["config"])}:
        run = run_of(geomm, Path(config).stem)
        lines = read_log(run / "log.jsonl")
        (matched,) = [line for line in lines if line["event"] == "scale_factor"]
        assert 0 < matched["scale_factor"] != 1
        assert not [line for line in lines if line["event"] == "graph"]
        queue = last_checkpoint(run / "checkpoints").model_tensors()["text_pool.scale_factor"]
        assert queue.item() == pytest.approx(matched["scale_factor"])


def test_every_table_with_a_geodesic_row_shows_its_graphs(geomm):
    for part in ("table1", "table2", "table3", "table4", "table7a", "table9", "refcoco_plus", "table6"):
        graphs = from_json((geomm(part) / f"{part}_graphs.json").read_text())
        assert graphs.rows, part
        for row in graphs.rows:
            assert min(row.ours[name].mean for name in ("hops", "path_over_angle", "components")) >= 1 - 1e-9
            assert 0 <= row.ours["unreachable_pairs"].mean <= 100
            assert part == "table6" or row.ours.keys() == BESIDE_A_TABLE.keys()
        if part == "table7a":
            assert [row.method for row in graphs.rows] == [row.ran for row in table_of(geomm, part).rows]
    table1 = from_json((geomm("table1") / "table1_graphs.json").read_text())
    assert [row.method for row in table1.rows] == ["Geo-ALBEF", "Geo-ALBEF, crowded"]
    lines = read_log(run_of(geomm, "albef_geo") / "log.jsonl")
    last = {line["pool"]: line["hops"] for line in lines if line["event"] == "graph"}
    assert table1.rows[0].ours["hops"].mean == pytest.approx(sum(last.values()) / 2)


def test_a_table_of_sizes_says_how_many_seeds_a_difference_takes():
    """One spread: of differences d with variance s^2, n = 7.85 s^2 / 1.5^2, and two more as 40 seeds estimate it."""
    seeds = tuple(range(4))

    def cell(values):
        return Measured(values, seeds, None, "", "demo", "x", "y")

    rows = {"128 clusters": (50.0, 54.0, 46.0, 50.0), "256 clusters": (50.0, 50.0, 50.0, 50.0)}
    column = Column("tr_r1", "TR R@1")
    table = Table(paper="geomm", table_id="table7b", columns=[column], scale="demo", seeds=seeds, command="x",
                  rows=[Row(row, {}, {"tr_r1": cell(values)}, "measured") for row, values in rows.items()],
                  paper_title="x", paper_version="x", caption="x", data="x", git_revision="x", created="2026-01-01",
                  hardware="x", errata=())  # fmt: skip
    variance = 32 / 3  # of the differences 0, 4, -4, 0
    (note,) = seeds_notes(table)
    needs = math.ceil(7.85 * variance / 1.5**2) + 2
    assert abs(int(note.split("about ")[1].split()[0]) - needs) <= 1
    assert note.startswith("A difference of 1.5 points to 256 clusters takes: TR R@1 about ")
    assert seeds_notes(replace(table, rows=table.rows[:1])) == []
