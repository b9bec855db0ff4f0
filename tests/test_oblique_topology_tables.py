"""What the oblique paper's tables are made of: temperature, parts of the tokens, properties of topologies, MSCOCO."""

import json
import math
import shutil
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from common.base.config import load_row
from common.base.settings import OptimConfig
from common.data.pairs import EvaluationSets
from common.data.scenes import classification_task, scene_words
from common.data.tokenizer import WordTokenizer
from common.data.transforms import ImageTransform
from common.evaluation.embed import Encoder, evaluate_zero_shot
from common.report.table import from_json
from common.reproduce.rows import RowRun
from common.reproduce.tables import _versions_note, collapse_note, measured_cell
from common.run.folder import RunFiles
from oblique_topology.coco_table import CocoFiles, open_coco
from oblique_topology.config import Config, MethodConfig
from oblique_topology.evaluate import CACHED_PROBE, _fingerprint_of_probe, evaluate_all, evaluated_sets, probe_sets
from oblique_topology.model import build_model
from oblique_topology.reproduce import CODE, main
from oblique_topology.temperature import (
    converged_step,
    final_logit_scales,
    log_temperatures,
    settled_step,
    temperature_cells,
)
from oblique_topology.token_subsets import draw_subsets, subset_hits
from oblique_topology.topology_table import (
    TOPOLOGIES,
    broadcast_similarity,
    distance_range,
    kept_numbers,
)

FOLDER = Path(__file__).resolve().parents[1] / "oblique_topology"


# temperature (Table 6)


@pytest.mark.parametrize("rule", [converged_step, settled_step])
def test_a_constant_converges_at_once_and_one_that_keeps_moving_never(rule):
    steps = np.arange(1000)
    assert rule(steps, np.full(1000, 2.6), 50) == 0
    assert rule(steps, 2.6 * 1.001**steps, 50) is None
    assert rule(steps, np.full(1000, 0.05), 50) is None  # near 0 a relative change means nothing


@pytest.mark.parametrize("rule", [converged_step, settled_step])
def test_the_rules_are_those_of_loops(rule):
    generator = np.random.default_rng(0)
    steps = np.cumsum(generator.integers(1, 9, 120))
    for scale in (0.002, 0.02, 0.05):
        values = 3 - 2 * np.exp(-steps / 80) + scale * generator.normal(size=120)
        for start in (0, 150):
            at_rest = {}
            for s, t in zip(steps, values):
                if s + 40 <= steps[-1]:
                    window = [s + 40] if rule is converged_step else [*(u for u in steps if s < u <= s + 40), s + 40]
                    near = all(abs(np.interp(u, steps, values) - t) < 0.02 * abs(t) for u in window)
                    at_rest[s] = abs(t) > 0.1 and near and s >= start
            if rule is converged_step:
                expected = next((s for s, rests in at_rest.items() if rests), None)
            else:
                expected = next((s for s in at_rest if all(rests for u, rests in at_rest.items() if u >= s)), None)
            assert rule(steps, values, 40, start) == expected


def logged_run(folder, values, seed=0, name="logit_scale"):
    folder.mkdir()
    lines = [{"event": "train", "step": step + 1, name: value} for step, value in enumerate(values)]
    lines.insert(1, {"event": "evaluate", "step": 1})
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RowRun(RunFiles(folder), seed, {}, {}, "scenes", "a machine", "a revision", "versions", Config())


def test_a_run_that_ended_at_chance_level_is_named(tmp_path):
    runs = [
        logged_run(tmp_path / str(seed), ratios, seed, "loss_over_chance")
        for seed, ratios in enumerate(([1.0, 0.4], [1.0, 1.004], [0.5, 0.992]))
    ]
    assert collapse_note(runs) == "; seeds 1, 2 ended at the chance level of the loss"
    assert collapse_note(runs[:1]) == ""


def test_a_cell_of_none_hit_has_an_interval_and_says_of_what_kind(tmp_path):
    evaluation = {"protocol": {"data": "d", "fingerprint": "0" * 64}, "metrics": {"acc1": 0.0}, "chance": {}}
    run = RowRun(RunFiles(tmp_path), 0, {"knn": evaluation}, {"knn": {"acc1": [[0.0]] * 40}}, "d", "", "", "", Config())
    cell = measured_cell([run], "knn", "acc1", "smoke")
    assert cell.interval == (0, pytest.approx(8.76, abs=0.01))  # percent
    assert cell.interval_kind == "95 % Wilson over queries where all or none are hits, one seed"
    evaluation["metrics"]["acc1"] = 7.5
    with pytest.raises(ValueError, match=r"seed 0, knn: acc1 = 7.5; expected a share in \[0, 1\]"):
        measured_cell([run], "knn", "acc1", "smoke")
    with pytest.raises(ValueError, match=r"measure: \[knn, acc2\] of a column: knn has no such metric; .* acc1\?$"):
        measured_cell([run], "knn", "acc2", "smoke")


def test_a_printed_row_of_too_few_values_is_refused_before_a_row_is_trained(monkeypatch):
    rows = [{"method": "CLIP", "values": [1.0]}]
    tables = {"tables": {"table2": {"columns": [{"key": "a"}, {"key": "b"}], "rows": rows}}}
    monkeypatch.setattr("common.reproduce.rows.paper_tables", lambda paper: tables)
    with pytest.raises(ValueError, match=r"paper_tables\.yaml, table2, row CLIP: 1 values for 2 columns; expected"):
        CODE.printed("table2")


def test_runs_made_with_unlike_versions_are_named_and_others_are_not(tmp_path):
    clip, multi = logged_run(tmp_path / "clip", [1.0]), replace(logged_run(tmp_path / "multi", [1.0]), versions="newer")
    assert _versions_note({"CLIP": [clip], "Multi": [clip]}) == []
    (note,) = _versions_note({"CLIP": [clip], "Multi": [clip, multi]})
    assert (
        note == "Runs were made with different versions. versions: CLIP, seed 0, Multi, seed 0; newer: Multi, seed 0."
    )


def row(trainable):
    return Config(method=MethodConfig(logit_scale_trainable=trainable), optim=OptimConfig(warmup_steps=20))


def test_the_cells_come_from_the_logs_one_value_per_seed(tmp_path):
    runs = [
        logged_run(tmp_path / str(seed), [math.exp(min(0.01 * (seed + 1) * step, 3.0)) for step in range(900)], seed)
        for seed in (0, 1)
    ]
    cells = temperature_cells(runs, row(trainable=True), "demo")
    assert cells["temp_final"].values == pytest.approx((3.0, 3.0))
    expected = []
    for run in runs:
        steps, values = log_temperatures(run)
        assert (steps[0], steps[-1], values[0]) == (0, 899, 0)
        expected.append(converged_step(steps, values, 60, 20) / 1000)
    assert cells["converge_step"].values == pytest.approx(expected)
    assert expected[0] > expected[1] > 0.1
    assert cells["settle_step"].values == cells["converge_step"].values  # these rise to the end of the window
    assert cells["settle_step"].full_protocol != cells["converge_step"].full_protocol
    assert cells["converge_step"].full_protocol["task"] == "temperature"
    assert final_logit_scales(runs) == pytest.approx([math.e**3] * 2)
    frozen = temperature_cells(runs, row(trainable=False), "demo")
    assert frozen["converge_step"] is frozen["settle_step"] is None
    moving = [logged_run(tmp_path / "moving", [1.05**step for step in range(900)]), runs[1]]
    # a run that never comes to rest counts with its end, which is a lower bound
    assert temperature_cells(moving, row(trainable=True), "demo")["converge_step"].values == (0.899, expected[1])


# parts of the class tokens (Table 10)


def test_sets_of_tokens_are_different_of_one_size_and_all_where_there_are_few():
    assert draw_subsets(16, 1) == [[k] for k in range(16)]
    assert draw_subsets(4, 2) == [list(pair) for pair in combinations(range(4), 2)]
    assert draw_subsets(16, 16) == [list(range(16))]
    drawn = draw_subsets(16, 8)
    assert len(drawn) == len({tuple(tokens) for tokens in drawn}) == 20
    assert all(tokens == sorted(set(tokens)) and len(tokens) == 8 for tokens in drawn)
    assert drawn == draw_subsets(16, 8)
    assert drawn != draw_subsets(16, 8, seed=1)
    assert {token for tokens in drawn for token in tokens} == set(range(16))
    with pytest.raises(ValueError, match="17 of 16 class tokens; expected: 1 to 16"):
        draw_subsets(16, 17)


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    config = load_row(Config, FOLDER, FOLDER / "configs" / "table2_multi.yaml", "smoke", ["method.num_spheres=4"])
    task = classification_task("imagenet", size=130, image_size=32)
    tokenizer = WordTokenizer.from_words(scene_words())
    model = build_model(config, tokenizer)
    transform = ImageTransform(size=32, mode="squeeze", crop_scale=None)
    return config, Encoder(model, transform, tokenizer, 32, 64, torch.device("cpu")), task


def test_all_tokens_give_the_full_models_hits_and_parts_give_those_of_their_sums(encoder):
    _, encoder, task = encoder
    hits = subset_hits(encoder, task, [1, 2, 4], "scores")
    assert [draws.shape for draws in hits.values()] == [(4, 130), (6, 130), (1, 130)]
    full = evaluate_zero_shot(encoder, task, "scores")
    assert hits[4][0].double().mean().item() == pytest.approx(full.metrics["acc1"], abs=1e-9)
    # by hand: the score of the set {0, 3}, prompts averaged
    images, _ = encoder.images(task)
    total = 0
    for template in task.templates:
        prompts = encoder.texts([template.replace("{}", name).replace("{c}", name) for name in task.class_names])
        total = total + images[:, 0] @ prompts[:, 0].T + images[:, 3] @ prompts[:, 3].T
    labels = torch.tensor([task.label(index) for index in range(130)])
    place = draw_subsets(4, 2).index([0, 3])
    assert torch.equal(total.argmax(dim=1) == labels, hits[2][place])
    by_embeddings = subset_hits(encoder, task, [4], "embeddings")[4][0].double().mean().item()
    assert by_embeddings == pytest.approx(evaluate_zero_shot(encoder, task, "embeddings").metrics["acc1"], abs=1e-9)


# properties of the topologies (Table 1)


@pytest.fixture(scope="module")
def measured(oblique):
    table = from_json((oblique("table1") / "table1.json").read_text())
    means = {row.method: {key: cell and cell.mean for key, cell in row.ours.items()} for row in table.rows}
    assert means.keys() == TOPOLOGIES.keys()
    return means


def test_memory_is_counted_for_twice_as_much_of_a_size(measured):
    """Of every topology: tests/test_oblique_topology_claims.py."""
    broadcast = measured["Euclidean, l2, broadcast"]
    growth = [broadcast[f"memory_by_{what}"] for what in ("batch", "dim", "spheres")]
    assert growth == pytest.approx([4, 2, 1], abs=0.05)
    assert measured["Sphere, inner product"]["kept_per_pair"] == 1  # nothing but the similarities
    assert broadcast["kept_per_pair"] >= 512


def test_the_count_of_kept_numbers_sees_a_copy():
    topology = TOPOLOGIES["Ob(64, 8), inner product"]
    per_sphere = replace(
        topology, similarity=lambda geometry: lambda x, y: torch.einsum("imn,jmn->ijm", x, y).square().sum(dim=2)
    )
    assert kept_numbers(topology, 16, 64, 8) == 16 * 16
    assert kept_numbers(per_sphere, 16, 64, 8) >= 9 * 16 * 16  # the squares' input, m numbers a pair, and the result


def test_ranges_are_those_of_the_formulas(measured):
    ends = {name: (values["range_low"], values["range_high"]) for name, values in measured.items()}
    assert ends["Sphere, inner product"] == pytest.approx((-1, 1), abs=1e-9)
    assert ends["Ob(64, 8), inner product"] == pytest.approx((-8, 8), abs=1e-9)
    assert ends["Ob(64, 8), geodesic"] == pytest.approx((0, math.pi * 8**0.5), rel=1e-6)
    for name in ("Euclidean, l2", "Euclidean, l2, broadcast"):
        assert ends[name] == (0, None)  # no bound
        assert distance_range(TOPOLOGIES[name], torch.Generator().manual_seed(0))[1] > 1e6


def test_metrics_obey_the_triangle_inequality_and_inner_products_break_it(measured):
    violations = {name: values["triangle_violations"] for name, values in measured.items()}
    for name in ("Euclidean, l2", "Ob(64, 8), geodesic"):
        assert violations[name] == 0
    for name in ("Sphere, inner product", "Ob(64, 8), inner product"):
        assert violations[name] == pytest.approx(50, abs=1)  # all triples on one arc


def test_points_that_are_pushed_apart_settle_on_closed_spaces_and_leave_the_plain_one(measured):
    for name, values in measured.items():
        if name.startswith("Euclidean"):
            assert values["spread_growth"] > 1.5
        else:
            assert values["spread_growth"] == pytest.approx(1, abs=0.01)


def test_the_broadcast_distance_is_the_distance():
    x, y = torch.randn(5, 8).double(), torch.randn(6, 8).double()
    torch.testing.assert_close(-broadcast_similarity(x, y), torch.cdist(x, y))


# linear probe


def test_the_probe_reads_all_class_tokens_before_the_projection_and_is_known_by_both_of_its_sets(encoder):
    config, encoder, _ = encoder
    config = replace(config, data=replace(config.data, num_labelled=130))
    sets = evaluated_sets(config.data)
    task, other = sets["imagenet"], sets["imagenet_v2"]
    result = evaluate_all(config, encoder, EvaluationSets({"imagenet": task}, {}))["linear_probe"]
    protocol = result.protocol
    assert protocol["feature_dim"] == 4 * config.model.image.width
    assert (protocol["num_train"], protocol["num_images"]) == (520, 130)
    assert protocol["test_fingerprint"] == task.fingerprint
    assert len({protocol[f"{name}fingerprint"] for name in ("", "train_", "test_")}) == 3
    assert protocol["fingerprint"] == sets["linear_probe"].fingerprint  # or it would be measured again each time
    assert len({_fingerprint_of_probe(train, test) for train in (task, other) for test in (task, other)}) == 4
    assert result.metrics["acc1"] > 1 / 64  # of pictures like those of the training set


def test_labelled_photographs_are_probed_by_the_papers_recipe_where_there_is_a_training_set():
    config = load_row(Config, FOLDER, FOLDER / "configs" / "table2_multi.yaml", "photos")
    task, train = (SimpleNamespace(name=name, class_names=["a", "b"]) for name in ("imagenet", "imagenet_train"))
    both = SimpleNamespace(zero_shot={"imagenet": task, "imagenet_train": train})
    assert probe_sets(config.data, SimpleNamespace(zero_shot={"imagenet": task})) is None
    probe = probe_sets(config.data, both)
    assert probe[:2] == (train, task)
    assert probe[2].augments
    assert not CACHED_PROBE.augments
    train.class_names = ["a", "c"]  # said when the sets are opened, before a model is trained
    with pytest.raises(ValueError, match="class"):
        probe_sets(config.data, both)


# MSCOCO (Table 7)


@pytest.fixture(scope="module")
def coco(tmp_path_factory):
    """A thousand pictures with five captions each, in Karpathy's form, and positives of CxC and ECCV Caption."""
    tmp_path = tmp_path_factory.mktemp("coco")
    images = tmp_path / "images"
    images.mkdir()
    entries = []
    for image in range(1000):
        name = f"{image:04d}.png"
        Image.new("RGB", (32, 32), (image % 256, image // 4 % 256, 80)).save(images / name, compress_level=1)
        numbers = range(5 * image, 5 * image + 5)
        sentences = [{"raw": f"a red circle {number}", "sentid": number, "imgid": image} for number in numbers]
        entries.append({"filename": name, "split": "test", "cocoid": image, "imgid": image, "sentences": sentences})
    (tmp_path / "dataset_coco.json").write_text(json.dumps({"dataset": "coco", "images": entries}))
    rows = ["caption,image,agg_score,sampling_method"]
    rows += [f"COCO_val2014:sentid:{5 * k},COCO_val2014_{k:012d}.jpg,4.5,c2i_original" for k in range(1000)]
    (tmp_path / "sits_test.csv").write_text("\n".join(rows) + "\n")
    eccv = tmp_path / "eccv"
    eccv.mkdir()
    (eccv / "eccv_image_to_caption.json").write_text(json.dumps({str(k): [5 * k, 5 * k + 6] for k in range(900)}))
    (eccv / "eccv_caption_to_image.json").write_text(json.dumps({str(5 * k): [k, k + 1] for k in range(900)}))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("common.evaluation.coco.NUM_IMAGES", len(entries))
        yield CocoFiles(
            root=str(tmp_path),
            test="dataset_coco.json#test",
            images="images",
            cxc=str(tmp_path / "sits_test.csv"),
            eccv=str(eccv),
        )


def test_table_7_ranks_a_trained_row_on_the_users_files_and_finds_it_again(coco, tmp_path, oblique, monkeypatch):
    monkeypatch.setattr("common.reproduce.command.plot_table", lambda *arguments, **words: None)
    oblique("table2", seeds=2)
    for runs in oblique.folder.glob("runs/oblique_topology/table2_clip-*"):
        shutil.copytree(runs, tmp_path / "out" / "runs" / "oblique_topology" / runs.name)
    settings = [f"coco.{name}={value}" for name, value in vars(coco).items()]
    few = ["--scale", "smoke", "--rows", "table2_clip", "--output", str(tmp_path / "out")]
    main(["table7", *few, *settings, *oblique.overrides])
    (path,) = (tmp_path / "out").glob("results/oblique_topology/table7/*/table7.json")
    table = from_json(path.read_text())
    (row,) = [row for row in table.rows if row.status == "measured"]
    assert row.method == "CLIP [our-impl.], ViT-B/16"
    assert all(cell is not None for cell in row.ours.values())
    assert row.ours["eccv_i2t_map_at_r"].chance == pytest.approx(0.03, abs=0.02)
    assert "num_images 1000, num_texts 5000" in row.ours["coco5k_i2t_r1"].protocol
    assert "unknown" not in table.models  # how the row was trained stands in its folder, not in that of the protocol
    assert row.training.loss_over_chance
    assert coco.root not in table.command
    (evaluation,) = (tmp_path / "out").glob("runs/*/*/*/coco-*/evaluation.json")
    before = evaluation.stat().st_mtime_ns
    main(["table7", *few, *settings, *oblique.overrides])
    assert evaluation.stat().st_mtime_ns == before


def test_other_annotations_are_another_test(coco, tmp_path):
    key, other = open_coco(coco).key, tmp_path / "sits_test.csv"
    text = Path(coco.cxc).read_text()
    other.write_text(text.replace("4.5,c2i_original\nCOCO_val2014:sentid:10,", "1.5,x\nCOCO_val2014:sentid:10,"))
    assert open_coco(coco).key == key
    assert len({key, open_coco(replace(coco, cxc="")).key, open_coco(replace(coco, cxc=str(other))).key}) == 3
    # ECCV Caption has a file for each direction
    folder = tmp_path / "eccv"
    shutil.copytree(coco.eccv, folder)
    for name in ("eccv_image_to_caption.json", "eccv_caption_to_image.json"):
        before, text = open_coco(replace(coco, eccv=str(folder))).key, (folder / name).read_text()
        query, right = next(iter(json.loads(text).items()))
        (folder / name).write_text(json.dumps(json.loads(text) | {query: right[:-1]}))
        assert open_coco(replace(coco, eccv=str(folder))).key != before, name
    with pytest.raises(ValueError, match="nowhere"):
        open_coco(replace(coco, cxc=str(tmp_path / "nowhere.csv")))
    other.write_text(Path(coco.cxc).read_text().replace("sentid:10,", "sentid:9999,"))
    with pytest.raises(ValueError, match=r"Crisscrossed Captions, score >= 3 names caption 9999, which is not among"):
        open_coco(replace(coco, cxc=str(other)))  # before a model is trained
