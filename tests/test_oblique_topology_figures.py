"""Every figure and analysis of the oblique paper at smoke scale, end to end: plots, data, tables, experiments."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from plotted import read_plotted
from runs import values_of

from common.base import drawing
from common.base.config import ConfigError, load_config
from common.base.random_keys import derive_key
from common.base.settings import DataConfig, OptimConfig
from common.data.scenes import annotation_task
from common.evaluation.embed import CaptionRule, embed_pairs
from common.report.claims.expressions import EXPERIMENT, cells
from common.report.claims.read import load_claims, load_paper_tables
from common.report.claims.show import judge
from common.report.claims.verdict import NOT_RUN, UNDECIDED
from common.report.table import read_table
from common.reproduce.command import Command
from common.reproduce.rows import RowRun, measured_once, paper_tables
from common.run.checkpoint import SUMS
from common.run.folder import RunFiles
from common.run.log import RunLog
from oblique_topology import class_token_cost, loss_landscape, low_precision, noise, temperature_order, temperature_rate
from oblique_topology.class_token_cost import counted
from oblique_topology.config import Config
from oblique_topology.distance_distributions import TOPOLOGIES, open_domains
from oblique_topology.equilibrium import log_ratios
from oblique_topology.loaded_rows import as_model_inputs, embed_batch, trained_model, training_batch
from oblique_topology.loss_landscape import (
    Grid,
    gradient_norms_on_line,
    losses_on_plane,
    movable_weights,
    random_directions,
    roughness,
)
from oblique_topology.reproduce import CODE, PARTS
from oblique_topology.temperature import STARTS, log_temperatures
from oblique_topology.temperature_curves import _findings, curve_of
from oblique_topology.token_maps import _folder, share_in_box, token_maps, with_words_of_others

# part -> its table and experiment, and its plots
ANALYSES = {
    "figure4": ("temperature_curves", ["temperature_curves_of_t"]),
    "figure5": ("token_pair_grad_cam", ["token_pair_grad_cam_pictures", "token_pair_grad_cam_words"]),
    "figure6": ("distance_distributions", ["distance_distributions_by_topology"]),
    "equilibrium": ("equilibrium", ["equilibrium_curves"]),
    "noise": ("noise", ["noise_multiplier_by_share"]),
    "temperature_order": ("temperature_order", ["temperature_order_curves"]),
    "temperature_rate": ("temperature_rate", ["temperature_rate_curves"]),
    "low_precision": ("low_precision", ["low_precision_by_multiplier"]),
    "loss_landscape": ("loss_landscape", ["loss_landscape_contours", "loss_landscape_gradient_norms"]),
    "class_token_cost": ("class_token_cost", []),
}
# their curves are drawn as those of figure4, and take half a second: they are looked at in numbers
LIKE_FIGURE_4 = {"equilibrium", "noise", "temperature_order", "temperature_rate", "low_precision"}
# rows that a part has at larger scales only
LARGER = {
    "noise": {*noise.rows_of("photos"), *noise.rows_of("demo")},
    "temperature_rate": {*temperature_rate.rows_of("photos")},
}


@pytest.fixture(scope="module")
def output(oblique):
    def of_a_block(config, words):
        """Costs of one block a tower: a count of twelve takes ten times as long."""
        image, text = (replace(tower, layers=1) for tower in (config.model.image, config.model.text))
        return counted(replace(config, model=replace(config.model, image=image, text=text)), words)

    draw, undrawn = drawing.write_picture, {stem for part in LIKE_FIGURE_4 for stem in ANALYSES[part][1]}
    fewer = (  # what claims read, and no more of a kind
        (class_token_cost, "counted", of_a_block),
        (class_token_cost, "TOKENS", (1, 16)),
        (low_precision, "TRAINED_AT", (1, 100)),
        (low_precision, "BATCHES", 17),  # one more than there are
        (noise, "BATCHES", 2),
        (temperature_order, "STARTS", dict(list(STARTS.items())[:2])),
        (temperature_order, "EVERY", {"smoke": 3}),
        (
            drawing,
            "write_picture",
            lambda figure, path, **more: path if path.stem in undrawn else draw(figure, path, **more),
        ),
    )
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in fewer:
            patch.setattr(module, name, value)
        for part in ANALYSES:
            oblique(part)
    oblique.write_page()
    return oblique.folder


def folder_of(output, part):
    return output / "results" / "oblique_topology" / part / "smoke"


def plotted(output, part, stem):
    return read_plotted(folder_of(output, part) / f"{stem}.png")


def only_run(output, row):
    folders = (output / "runs" / "oblique_topology").glob(f"{row}-smoke-*/seed0")
    if row == "table2_multi":  # Table 10 has 16 tokens of 32 numbers
        folders = (folder for folder in folders if "embedding_dim: 32\n" in (folder / "config.yaml").read_text())

    def varied(config):  # parts with noise, low precision or another rate train the same rows
        data, optim = config.data, config.optim
        return data.partner_noise, data.ambiguity, optim.loss_bf16_product, optim.logit_scale_rate

    default = varied(CODE.config(f"{row}.yaml", "smoke", ()))
    configs = {folder: load_config(Config, [folder / "config.yaml"]) for folder in folders}
    ((folder, config),) = (item for item in configs.items() if varied(item[1]) == default)
    return RowRun(RunFiles(folder), 0, {}, {}, "", "", "", "", config)


def test_every_part_that_is_no_table_is_looked_at_here():
    assert [part for part in PARTS if part not in paper_tables(CODE.name)["tables"]] == list(ANALYSES)


@pytest.mark.parametrize("part", ANALYSES)
def test_a_part_writes_its_table_its_experiment_and_its_plots_with_their_numbers(part, output):
    name, plots = ANALYSES[part]
    folder = folder_of(output, part)
    table = read_table(folder / f"{name}.json")
    assert table.table_id == name
    trained_on = "no data: random weights" if part == "class_token_cost" else "scenes/train, 256 pictures ("
    assert table.data.startswith(trained_on)
    assert table.rows
    for stem in plots:
        assert len(plotted(output, part, stem)) > 5
    for stem in plots if part not in LIKE_FIGURE_4 else ():
        with Image.open(folder / f"{stem}.png") as picture:
            grey = np.asarray(picture.convert("L"))
        assert grey.std() > 5  # not blank
        assert min(grey.shape) > 300
    assert (folder / f"{name}.png").is_file()
    assert (table.scale, table.seeds) == ("smoke", (0,))
    assert "oblique_topology" in table.command
    assert (output / "report_oblique_topology.html").read_text(encoding="utf-8").count(f"{name}, scale smoke") >= 1


def test_values_that_claims_name_are_there(output):
    paths = [folder_of(output, part) / f"{name}.json" for part, (name, _) in ANALYSES.items()]
    experiments = {path.stem: values_of(path) for path in paths}
    claims = load_claims(CODE.folder / "claims.yaml", load_paper_tables(CODE.folder / "paper_tables.yaml"))
    asked = {
        (cell.row, cell.column)
        for claim in claims
        for condition in claim.measured
        for cell in cells(condition)
        if cell.table == EXPERIMENT and cell.row != "final_temperature"  # which Table 2 writes
    }
    assert {name for name, _ in asked} == {name for name, _ in ANALYSES.values()} - {"temperature_curves"}
    larger = {
        (name, f"{row}_{column}")
        for (name, rows), columns in zip(LARGER.items(), (noise.COLUMNS, temperature_rate.COLUMNS))
        for row in rows
        for column in columns
    }
    missing = {(name, key) for name, key in asked if key not in experiments[name]} - larger
    # six steps of training may leave positives that no multiplier brings into balance
    assert all(name == "equilibrium" and "_balance_" in key for name, key in missing)
    tables = list(map(read_table, paths))
    verdicts = {claim.claim.id: claim.measured[0].verdict for claim in judge(CODE.folder, tables).judged}
    decided = {verdicts[name] for name in ("C4", "C18", "C25", "C26", "C27", "C28", "C29", "C34")}
    assert decided <= {UNDECIDED, NOT_RUN}  # nothing is decided at smoke scale
    assert verdicts["C28"] == verdicts["C4"] == UNDECIDED


def test_temperature_curves_are_those_of_the_logs(output):
    run = only_run(output, "ablation_sphere_264")
    steps, t = log_temperatures(run)
    drawn = [
        row
        for row in plotted(output, "figure4", "temperature_curves_of_t")
        if (row["panel"], row["curve"]) == ("Sphere", "start at e^2.64")
    ]
    assert [float(row["x"]) for row in drawn] == list(range(6)) == steps.tolist()  # every step
    assert [float(row["mean"]) for row in drawn] == pytest.approx(t.tolist(), rel=1e-4)
    assert float(drawn[0]["mean"]) == pytest.approx(np.log(1 / 0.07), rel=1e-4)
    assert curve_of([run, run])[2] == (2.0, [t[2], t[2]])
    table = read_table(folder_of(output, "figure4") / "temperature_curves.json")
    assert len(table.rows) == 12
    assert "1 times as fast as the weights" in table.notes[1]
    assert not any("fixed" in row.method for row in table.rows)


def test_distances_of_positives_are_those_of_the_test_set(output):
    config, encoder = trained_model(only_run(output, "ablation_euclidean_264"))
    assert not encoder.model.training
    assert not any(parameter.requires_grad for parameter in encoder.model.parameters())
    pairs = open_domains(config.data)
    assert [domain.name for domain in pairs.values()] == ["scenes/test", "scenes/test_other_domain"]
    for domain, data_set in pairs.items():
        embedded = embed_pairs(encoder, data_set, CaptionRule())
        expected = (embedded.images[embedded.text_to_image] - embedded.texts).norm(dim=1)
        table = read_table(folder_of(output, "figure6") / "distance_distributions.json")
        label = f"Euclidean, e^2.64, {'in' if domain == 'in_domain' else 'out of'} domain"
        (row,) = [row for row in table.rows if row.method == label]
        assert row.ours["positive_mean"].mean == pytest.approx(float(expected.mean()), rel=1e-4)
    assert len(table.rows) == 2 * len(TOPOLOGIES)


def test_both_domains_have_the_captions_that_the_config_names():
    domains = open_domains(DataConfig(num_test=6, num_captions=2))
    assert {name: len(domain[0]["captions"]) for name, domain in domains.items()} == {"in_domain": 2, "out_domain": 2}


def test_photographs_are_out_of_domain_where_a_second_test_set_is_named_and_never_among_the_results(tmp_path, capsys):
    command = Command("figure5", "photos", (0,), (), tmp_path, tmp_path / "results")
    photographs = DataConfig(source="shards", root=str(tmp_path))
    assert not _folder(command, CODE, photographs).is_relative_to(command.results)
    assert "not among the results" in capsys.readouterr().out
    assert _folder(command, CODE, DataConfig()).is_relative_to(command.results)


def test_the_equilibrium_of_the_trained_model_is_that_of_its_training_pairs(output):
    config, encoder = trained_model(only_run(output, "table2_clip"))
    pool = training_batch(config, encoder, 256, drawn_by=0)
    assert not torch.equal(pool[1], training_batch(config, encoder, 256)[1])
    images, texts = embed_batch(encoder, *pool)
    # the largest batch of the first draw is the only one of its size at this scale
    chosen = torch.randperm(256, generator=torch.Generator().manual_seed(derive_key("drawn similarities", 0)))[:64]
    expected = log_ratios(encoder.model.geometry.similarity(images[chosen], texts[chosen]), 1.0)["mean"]
    table = read_table(folder_of(output, "equilibrium") / "equilibrium.json")
    rows = {row.method: row.ours for row in table.rows}
    assert rows["trained, B = 64"]["ratio_1"].mean == pytest.approx(expected, abs=1e-5)
    labels = [f"{source}, {rest}" for source in ("drawn", "trained") for rest in (
        "B = 16", "B = 40", "B = 64", "B = 40, 5% shuffled", "B = 40, 10% shuffled", "B = 40, 20% shuffled"
    )]  # fmt: skip
    assert list(rows) == labels
    assert all(set(cells) >= {"ratio_1", "share_1", "slope_1", "felt_1"} for cells in rows.values())
    pixels, _ = training_batch(config, encoder, 1000)
    assert len(pixels) == config.data.num_train


def cells_of(output, part, name):
    table = read_table(folder_of(output, part) / f"{name}.json")
    return {row.method: {key: cell.mean for key, cell in row.ours.items() if cell} for row in table.rows}


def test_the_landscape_is_that_of_the_model_and_its_table_says_at_which_multiplier(output):
    config, encoder = trained_model(only_run(output, "table2_clip"))
    inputs = training_batch(config, encoder, 32)
    draws = torch.Generator().manual_seed(derive_key("landscape", 0))
    directions = random_directions(movable_weights(encoder.model), draws)
    cells = cells_of(output, "loss_landscape", "loss_landscape")
    for s in (1.0, 100.0):
        (plane,) = losses_on_plane(encoder.model, inputs, directions, [-1, -0.5, 0, 0.5, 1], [s])
        (line,) = gradient_norms_on_line(encoder.model, inputs, directions[0], [-1, 0, 1], [s])
        expected = {
            "loss": plane[2, 2],
            "roughness": roughness(plane),
            "roughness_over_multiplier": roughness(plane) / s,
            "gradient_norm": line.mean(),
            "gradient_norm_over_multiplier": line.mean() / s,
        }
        assert cells[f"multiplier {s:g}"] == pytest.approx(expected, rel=1e-4)
        drawn = [
            row
            for row in plotted(output, "loss_landscape", "loss_landscape_contours")
            if row["panel"] == f"multiplier {s:g}, seed 0"
        ]
        corner = [row for row in drawn if (float(row["x"]), float(row["y"])) == (1.0, -1.0)]
        assert float(corner[0]["value"]) == pytest.approx(plane[0, 4], rel=1e-4)
        assert len(drawn) == 25


def test_protocols_state_what_a_small_training_set_gave(output, monkeypatch):
    table = read_table(folder_of(output, "low_precision") / "low_precision.json")
    assert {cell.protocol.partition(";")[0] for row in table.rows for cell in row.ours.values()} == {
        "16 random training batches"
    }
    for measured in ("losses_on_plane", "gradient_norms_on_line"):
        monkeypatch.setattr(loss_landscape, measured, lambda *of_model: np.zeros((1, 1)))
    assert loss_landscape._landscape(only_run(output, "table2_clip"), Grid(batch=1024))["pairs"] == 256


def test_the_landscape_is_measured_once_per_run_grid_and_code(output, tmp_path, monkeypatch):
    whole = only_run(output, "table2_clip")
    kept = whole.files.folder / "measured"
    assert [path.name.partition("-")[0] for path in kept.glob("*.json")] == ["loss_landscape"]
    run = replace(whole, files=RunFiles(tmp_path))
    calls = []

    def ask(settings, script="loss_landscape.py"):
        return measured_once(
            run, CODE.folder / script, settings, lambda: calls.append(settings) or {"found": len(calls)}
        )

    assert [ask([1]), ask([1]), ask([2]), ask([1])] == [{"found": 1}, {"found": 1}, {"found": 2}, {"found": 1}]
    assert ask([1], "equilibrium.py") == {"found": 3}
    monkeypatch.setattr("common.reproduce.rows.changed_files", list)
    assert ask([1]) == {"found": 4}


def test_what_was_measured_on_other_weights_is_measured_again(tmp_path):
    run, step = SimpleNamespace(files=RunFiles(tmp_path), evaluations={}), tmp_path / "checkpoints" / "step-00000002"
    step.mkdir(parents=True)
    for weights in "ab":  # of one key, as a run that is trained again on another machine has them
        (step / SUMS).write_text(f"{weights * 64}  model.safetensors\n")
        for _ in range(2):
            assert measured_once(run, CODE.folder / "x.py", [], lambda: step.joinpath(SUMS).read_text()[0]) == weights


def test_heat_in_the_box_is_that_of_every_other_scene_and_its_words(output):
    cells = cells_of(output, "figure5", "token_pair_grad_cam")
    scenes = annotation_task("grounding", 12, 32)
    for row, label in (("table2_clip", "CLIP"), ("table2_multi", "Multi")):
        config, encoder = trained_model(only_run(output, row))
        assert config.data.image_size == 32
        items = [scenes[index] for index in range(12)]
        for words, name in (([item["text"] for item in items], ""), (None, ", words of another picture")):
            words = words or [item["text"] for item in with_words_of_others(items)]
            shares = []
            for item, text in list(zip(items, words))[1::2]:
                inputs = as_model_inputs(encoder, [item["image"]], [text])
                heat = token_maps(encoder.model, *inputs).pixels[0, 0].clamp(min=0).double().numpy()
                left, top, right, bottom = item["box"]
                area = (right - left) * (bottom - top)
                shares.append(share_in_box(heat, item["box"]) if heat.any() else area)
            assert cells[f"{label}, whole score{name}"]["share_in_box"] == pytest.approx(np.mean(shares), abs=1e-5)


def test_a_curve_has_the_steps_that_all_seeds_have_logged(tmp_path):
    t, seeds = np.log(np.arange(1.0, 13.0)), []
    for seed, every in enumerate((1, 3, 2)):
        files = RunFiles(tmp_path / str(seed))
        for step in range(every, 13, every):
            RunLog(files.log, step).write("train", step=step, logit_scale=float(np.exp(t[step - 1])))
        seeds.append(SimpleNamespace(files=files))
    for runs, every in ((seeds, 6), (seeds[::-1], 6), (seeds[:1], 1), (seeds[1::-1], 3)):
        expected = [(step - 1.0, [pytest.approx(t[step - 1])] * len(runs)) for step in range(every, 13, every)]
        assert curve_of(runs) == expected


def test_curves_come_to_rest_in_t_and_in_the_multiplier(tmp_path):
    steps = np.arange(300)
    t = 4 - 3 * np.exp(-steps / 20)
    log = RunFiles(tmp_path).log
    lines = [{"event": "train", "step": int(k) + 1, "logit_scale": float(np.exp(v))} for k, v in zip(steps, t)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    run = RowRun(RunFiles(tmp_path), 0, {}, {}, "made up", "", "", "", Config(optim=OptimConfig(warmup_steps=0)))
    late = replace(run, config=Config(optim=OptimConfig(steps=300, warmup_steps=200, logit_scale_rate=3.0)))
    findings = _findings({"Sphere, e^0": [run], "Sphere, e^2.64": [late]})
    assert "learns 1 or 3 times as fast" in findings.notes[1]
    values = findings.values
    assert values["sphere_e_2_64", "converged"] == [200.0]  # every run has its own warm-up
    ends = {column: values["sphere_e_0", column][0] for row, column in values if row == "sphere_e_0"}
    assert ends["final_t"] == pytest.approx(t[-1])
    assert ends["final_multiplier"] == pytest.approx(np.exp(t[-1]))
    # 300 steps have windows of 20: t moves by 3 (1 - 1/e) exp(-k / 20) within one
    moved = 3 * (1 - np.exp(-1)) * np.exp(-steps / 20)
    assert ends["converged"] == ends["settled"] == np.argmax(moved < 0.02 * t)
    assert ends["converged_multiplier"] == ends["settled_multiplier"] == np.argmax(np.exp(moved) - 1 < 0.02)
    assert ends["converged_multiplier"] > ends["converged"] + 20


def test_at_paper_scale_the_cost_is_counted_once_and_nothing_is_timed_or_set(tmp_path, monkeypatch):
    cost = dict.fromkeys(("vision", "text", "both", "parameters", "encoder_parameters", "kept"), 1.0)
    monkeypatch.setattr(class_token_cost, "counted", lambda config, words: cost)
    command = Command("class_token_cost", "paper", (0,), (), tmp_path, tmp_path)
    (table,) = PARTS["class_token_cost"](command)
    assert [row.method.split(",")[0] for row in table.rows] == ["ViT-B/16"] * 6 + ["ViT-S/16"] * 6
    assert not any("time" in row.ours for row in table.rows)
    with pytest.raises(ConfigError, match=r"class_token_cost takes no settings, got optim\.steps=2"):
        PARTS["class_token_cost"](replace(command, overrides=("optim.steps=2",)))
