"""No setting is accepted and then ignored, and no number is stored under settings that did not make it."""

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from accelerate.utils import DistributedType
from refusals import refused
from runs import called, row_config
from torch import nn

import oblique_topology.low_precision
import scripts.map
import scripts.same_losses
import scripts.search
from common.accumulation import MicroBatches
from common.base.arguments import names_in
from common.base.config import ConfigError, override
from common.base.provenance import ROOT
from common.base.settings import DataConfig
from common.data.broken import BrokenSample
from common.data.part import Part
from common.methods import self_supervised
from common.report.formats import heading
from common.report.table import Column
from common.reproduce import tables
from common.reproduce.command import Command, _near, reproduce_main
from common.run.folder import settings_of_all_seeds
from common.run.launch import prepare
from common.run.pretraining import train_on_pictures
from common.run.training import _in_turn
from contrastive_basics.reproduce import table1
from contrastive_basics.vision.config import VisionModelConfig
from euclip import regime
from euclip import train as euclip_train
from euclip.regime import RegimeConfig
from euclip.stability import stability
from geomm import hierarchy_error, lookalikes, refcoco_plus
from geomm.ablations import settings_of
from geomm.readings import readings
from geomm.refcoco_plus import GroundConfig
from geomm.table3 import _of_public_answers
from geomm.train import CODE as GEOMM
from oblique_topology.noise import noise
from oblique_topology.temperature_order import temperature_order
from oblique_topology.temperature_rate import RateConfig, temperature_rate


def command(part: str, *overrides: str, scale: str = "photos", **more) -> Command:
    return Command(part, scale, (0,), overrides, Path("out"), Path("out/results"), **more)


@pytest.mark.parametrize(
    ("setting", "config_class", "is_change"),
    [
        ("grounding.layer=1", GroundConfig, True),
        ("temperature_rate.faster=false", RateConfig, False),  # leaves rows out
        ("regime.longer=false", RegimeConfig, False),
    ],
)
def test_a_setting_of_the_part_stays_in_its_folder_and_its_command(setting, config_class, is_change):
    whole = command("part", "optim.steps=3", setting)
    options, rows = whole.split(config_class)
    assert options != config_class()
    assert rows.overrides == ("optim.steps=3",)
    assert (rows.changes, rows.folder("p"), rows.text("p")) == (whole.changes, whole.folder("p"), whole.text("p"))
    assert (setting in whole.changes) is is_change
    assert f'SET="optim.steps=3 {setting}"' in whole.text("p")


@pytest.mark.parametrize("name", ["bob's.tar", "a$HOME.tar", 'a"b $1.tar', "`id`.tar"])
def test_a_command_with_signs_of_a_shell_can_be_pasted(name):
    text = command("table2", f"data.train={name}").text("p")
    words = subprocess.run(["sh", "-c", f"printf '%s\\n' {text}"], capture_output=True, text=True).stdout.splitlines()
    (setting,) = (word for word in words if word.startswith("SET="))
    assert shlex.split(setting.removeprefix("SET=")) == [f"data.train={name}"]
    assert heading("p", "table2", "photos", text).endswith(f', SET="data.train={name}"')  # as typed
    assert heading("p", "compare", "demo", f'make compare RUNS="{name}"') == "p, compare, scale demo"


def test_other_data_than_scenes_are_a_change_and_where_photographs_lie_is_none():
    for setting in ("data.train=train_crowded", "data.source=shards"):
        assert command("table4", setting, scale="demo").changes == [setting]
    assert command("table4", "data.train=/a/b.tar").changes == []


def test_what_a_part_chooses_is_refused_and_two_processes_where_it_measures_on_one(monkeypatch):
    monkeypatch.setattr("common.reproduce.command.world_size", lambda: 2)
    code, searched = SimpleNamespace(), {"row": ("optim.learning_rate=1e-3",)}
    refused(
        ("chooses optim.global_batch_size", lambda: temperature_rate(command("t", "optim.learning_rate=1"), code)),
        ("leave it out", lambda: temperature_rate(command("temperature_rate", searched=searched), code)),
        ("partner_noise=0.1 cannot be set", lambda: noise(command("noise", "data.partner_noise=0.1"), code)),
        ("attach=knn cannot be set", lambda: readings(command("readings", "method.attach=knn"), code)),
        (
            "every=5 cannot be set",
            lambda: temperature_order(command("order", "run.evaluate_every=5", scale="demo"), code),
        ),
        ("cannot be set", lambda: stability(command("stability", "method.logit_scale_init=2"), code)),
        ("one process", lambda: oblique_topology.low_precision.low_precision(command("low_precision"), code)),
        error=ConfigError,
    )


def test_near_keeps_the_best_of_a_rows_other_searches(monkeypatch):
    monkeypatch.setattr("common.reproduce.command.near_settings", lambda *_: {("optim.learning_rate=2",): ("row",)})
    best = {"row": ("optim.learning_rate=1", "optim.weight_decay=3")}
    (near,) = _near(command("table2", searched=best), "p", ["row"])
    assert near.settings_of("row.yaml") == ("optim.weight_decay=3", "optim.learning_rate=2")


def test_commands_refuse_what_would_be_dropped(tmp_path):
    def made(paper: str, part: str, *arguments: str) -> None:
        reproduce_main("", paper, {part: lambda _: []}, [part, "--output", str(tmp_path), *arguments])

    row = tmp_path / "MERU.yaml"
    row.write_text("optim: {steps: 3}\n")
    refused(
        ("run.test cannot be overridden", lambda: made("euclip", "table4", "run.test=false")),
        ("two rows have the name MERU", lambda: made("euclip", "table4", "--rows", f"table4_clip {row}")),
        ("trains no row at SCALE=paper", lambda: table1(command("table1", scale="paper", rows=("table1_ours",)))),
        error=ConfigError,
    )


def test_configs_refuse_settings_without_an_effect():
    def config(paper: str, row: str, *overrides: str):
        return lambda: row_config(paper, row, *overrides)

    late = ("method.loss=late_interaction", "method.prompt_average=scores")
    refused(
        ("ranks the whole test set", config("geomm", "albef", "data.num_test=40", "data.gallery=20")),
        ("method.match_entropy = false", config("geomm", "clip_soft", "optim.steps=2")),
        (
            "model.image.projection = false",
            lambda: row_config("contrastive_basics", "lit_ours", *late, scale="photos"),
        ),
        ("data.root = '/photos' with data.source = scenes", config("euclip", "table4_clip", "data.root=/photos")),
        (
            "start.scale_factor = 0.5 without start.row",
            config("geomm", "clip_geo", "start.row=", "start.scale_factor=0.5"),
        ),
    )
    assert row_config("euclip", "table4_clip", "data.root=/photos", "data.labelled=sets").data.root == "/photos"
    photographs = replace(row_config("euclip", "table4_clip"), data=DataConfig(source="shards", root="/photos"))
    assert override(photographs, ["data.source=scenes"]).data.source == "scenes"  # whose root nobody named


def test_lower_layers_of_a_hierarchy_stay_as_they_are_set():
    config = row_config("geomm", "clip_geo", "method.branching=[8,3]", "method.queue_size=64")
    assert settings_of("table7b", config)["256 clusters"] == []
    assert settings_of("table7b", config)["128 clusters"] == ["method.branching=[4, 3]"]
    assert settings_of("table7a", config)["3 layers"] == ["method.branching=[8, 3, 2]"]


def test_batch_normalisation_has_as_many_parts_on_two_processes_as_on_one(monkeypatch):
    model, parts = VisionModelConfig(), []

    def split(*_, num_parts: int) -> nn.Module:
        parts.append(num_parts)
        return nn.BatchNorm2d(*_)

    monkeypatch.setattr(self_supervised, "SplitBatchNorm", split)
    for processes in (1, 2):
        monkeypatch.setattr(self_supervised, "world_size", lambda processes=processes: processes)
        self_supervised.build_backbone(model, 8)
    assert set(parts) == {8, 4}
    config = SimpleNamespace(method=SimpleNamespace(batch_norm_parts=8))
    with pytest.raises(ConfigError, match="8 on 3 processes"):
        train_on_pictures("p", None, config, None, None, False, SimpleNamespace(num_processes=3), "")


def test_an_unusable_caption_of_a_held_out_share_is_left_out_as_it_is_elsewhere():
    def captions(row: int) -> list[str]:
        if row == 1:
            raise BrokenSample("a.tar", "000001", "empty caption")
        return [f"caption {row}"]

    whole = SimpleNamespace(name="set", captions=captions)
    assert [*Part(whole, [0, 1, 3], "part").all_captions()] == ["caption 0", "caption 3"]


def test_the_first_version_of_fsdp_is_refused():
    plugin = SimpleNamespace(fsdp_version=1)
    accelerator = SimpleNamespace(distributed_type=DistributedType.FSDP, state=SimpleNamespace(fsdp_plugin=plugin))
    with pytest.raises(ConfigError, match=r"fsdp_version = 1; expected: 2"):
        prepare(accelerator, nn.Linear(2, 2), None)


def test_a_run_whose_path_holds_a_space_is_one_run(tmp_path):
    (tmp_path / "my run").mkdir()
    assert names_in([str(tmp_path / "my run"), "'b c' d"]) == [str(tmp_path / "my run"), "b c", "d"]


def test_rows_beyond_the_paper_stand_at_their_scales_alone():
    source = {"rows": [{"method": "a"}], "beyond": [{"method": "b", "scales": ["demo"]}, {"method": "c"}]}
    methods = {
        scale: [row["method"] for row in tables.with_custom_rows(command("table9", scale=scale), source)["rows"]]
        for scale in ("demo", "paper")
    }
    assert methods == {"demo": ["a", "b", "c"], "paper": ["a", "c"]}


def test_two_rows_of_one_run_have_one_training_curve(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(tables, "plot_training", lambda logs, *_: drawn.extend(logs))
    for name in ("one", "other"):
        (tmp_path / name).write_text("")
    one, other = (SimpleNamespace(files=SimpleNamespace(log=tmp_path / name), seed=0) for name in ("one", "other"))
    tables.plot_runs(command("noise"), "oblique_topology", {"by head": [one], "by contrast": [one], "c": [other]})
    assert drawn == ["by head, seed 0", "c, seed 0"]


def test_columns_of_vqa_name_the_questions_that_were_asked_at_paper_scale_too():
    cell = SimpleNamespace(data="vqa val2014")
    table = SimpleNamespace(
        rows=[SimpleNamespace(ours={}), SimpleNamespace(ours={"vqa_test_dev": cell, "nlvr2_dev": cell})]
    )
    columns = [_of_public_answers(Column(key, key), table) for key in ("vqa_test_dev", "nlvr2_dev")]
    assert [column.stands_in_for for column in columns] == ["vqa val2014", None]


def test_micro_batches_take_a_frozen_network_that_normalises_by_what_it_learnt():
    accelerator = SimpleNamespace(gradient_accumulation_steps=1)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match="batch normalisation"):
        MicroBatches(accelerator, model, 2)
    model[1].eval()
    assert MicroBatches(accelerator, model, 2).size == 2


def test_seeds_that_start_from_runs_of_their_seed_share_their_settings(tmp_path):
    configs = []
    for name, seed, steps in (("x", 0, 2), ("y", 1, 2), ("z", 2, 5)):
        (tmp_path / name).mkdir()
        parent = {"optim": {"steps": steps}, "run": {"seed": seed}}
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(parent))
        start = {"row": "towers", "run": str(tmp_path / name)}
        configs.append({"optim": {"steps": 3}, "run": {"seed": seed}, "start": start})
    first, second, other = map(settings_of_all_seeds, configs)
    assert first == second != other  # of another parent it is another model


def test_a_row_whose_entailment_is_switched_off_is_judged_by_no_entailment(monkeypatch):
    monkeypatch.setattr(regime, "measure", lambda *_: {"recall": 1.0})
    off = SimpleNamespace(config=row_config("euclip", "table4_euclip", "method.entailment_weight=0"))
    assert regime.regime_of_rows({"euclip": [off]}) == ({}, [])


def test_test_sets_that_are_not_evaluated_are_not_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(euclip_train, "open_training_data", lambda *_: SimpleNamespace(evaluation_sets=None))
    monkeypatch.setattr(euclip_train, "check_tests", lambda *_: asked.append(1))
    for test in ("true", "false"):
        euclip_train.open_data(row_config("euclip", "table4_clip", f"run.test={test}"), None, None)
    assert len(asked) == 1


def test_analyses_of_a_pool_embed_on_every_process_and_write_on_one(monkeypatch):
    options, asked = SimpleNamespace(sugarcrepe=None), []
    on_smoke = SimpleNamespace(scale="smoke", overrides=(), split=lambda _: (options, on_smoke))
    code = SimpleNamespace(config=lambda *_: row_config("geomm", "clip"))
    monkeypatch.setattr(lookalikes, "open_lookalikes", lambda *_: None)
    for module, part in ((hierarchy_error, hierarchy_error.hierarchy_error), (lookalikes, lookalikes.lookalikes)):
        monkeypatch.setattr(module, "is_main_process", lambda: False)
        monkeypatch.setattr(module, "train_rows", lambda *_: {"clip": ["a", "b"]})
        monkeypatch.setattr(module, "measure", lambda run, *_, module=module: asked.append((module, run)))
        assert part(on_smoke, code) == []
        assert asked[-2:] == [(module, "a"), (module, "b")]


def test_a_pool_that_its_steps_do_not_fill_is_refused_before_anything_is_trained():
    settings = ("method.queue_size=2048",)
    command = Command("x", "smoke", (0,), settings, None, None)
    for part in (hierarchy_error.hierarchy_error, lookalikes.lookalikes):
        with pytest.raises(
            ConfigError, match=r"optim.steps = 6, which leave 96 keys .* at least 128 steps, or at most 96"
        ):
            part(command, GEOMM)


def test_boxes_are_measured_by_the_settings_of_the_command(monkeypatch):
    monkeypatch.setattr(refcoco_plus, "last_checkpoint", lambda _: None)
    monkeypatch.setattr(refcoco_plus, "load_encoder", lambda *_, config: (None, config))
    run = SimpleNamespace(files=SimpleNamespace(checkpoints=None), config="of the command")
    assert refcoco_plus._encoder(run) == "of the command"


def test_commands_without_a_name_are_refused():
    refused(
        ("RUNS names no run", lambda: called(scripts.map.main, "")),
        ("ROWS=: no row of geomm", lambda: scripts.search.main(["geomm", "--rows", "", "--set", "optim.steps=1,2"])),
        error=ConfigError,
    )


def test_rows_of_two_versions_of_the_code_share_no_folder(tmp_path):
    with pytest.raises(FileExistsError):
        scripts.same_losses.train_rows(ROOT, tmp_path)


def test_a_run_that_went_on_in_another_precision_says_both():
    before = SimpleNamespace(state={"precision": "bf16"})
    assert [_in_turn("precision", now, before) for now in ("bf16", "no")] == ["bf16", "bf16, then no"]
    assert _in_turn("precision", "no", None) == "no"
    assert _in_turn("processes", "2", SimpleNamespace(state={"processes": "12"})) == "12, then 2"
