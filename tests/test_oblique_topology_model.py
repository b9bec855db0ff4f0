"""The oblique paper's rows at every scale, their sizes and costs, and the laws of several class tokens."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runs import rows_of_paper

from common.base.config import SCALES, ConfigError, load_row
from common.base.files import read_repository_yaml
from common.info_nce import symmetric_info_nce
from common.reproduce.command import Command
from common.run.schedule import learning_rate_at
from oblique_topology.config import Config
from oblique_topology.model import build_model
from oblique_topology.reproduce import towers_with_tokens

FOLDER = Path(__file__).resolve().parents[1] / "oblique_topology"
BERT_IDS = SimpleNamespace(vocabulary_size=30_522, end_id=102)
FEW_IDS = SimpleNamespace(vocabulary_size=40, end_id=3)
ROWS = [FOLDER / "configs" / f"{row}.yaml" for row in rows_of_paper(FOLDER)]
TABLES = read_repository_yaml(FOLDER / "paper_tables.yaml")["tables"]


def row(name, scale="smoke", *overrides):
    return load_row(Config, FOLDER, FOLDER / "configs" / f"{name}.yaml", scale, list(overrides))


def on_meta(config, ids=BERT_IDS):
    with torch.device("meta"):
        return build_model(config, ids)


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


# rows and scales


def test_every_row_is_trained_by_a_table_and_every_config_of_a_table_exists():
    named = {row["config"] for table in TABLES.values() for row in table["rows"] if "config" in row}
    others = {name for name in named if "/" in name}
    assert named - others == {path.name for path in ROWS}
    assert all((FOLDER / "configs" / name).is_file() for name in others)
    for table in TABLES.values():
        for row_of_table in table["rows"]:
            assert len(row_of_table["values"]) == len(table["columns"]), row_of_table["method"]


@pytest.mark.parametrize("scale", SCALES)
def test_rows_of_table_4_have_towers_of_one_kind(scale):
    settings = towers_with_tokens(Command("table4", scale, (0,), (), Path(), Path()))
    configs = [row(Path(row_of_table["config"]).stem, scale, *settings) for row_of_table in TABLES["table4"]["rows"]]
    kinds = {
        (config.model.image, config.model.text, config.data.tokenizer, config.data.vocabulary) for config in configs
    }
    assert len(kinds) == 1
    assert configs[0].model.image.layers


@pytest.mark.parametrize("table", ["table2", "table3", "table4", "table8"])
def test_a_rows_config_builds_the_structure_that_its_name_says(table):
    for row_of_table in TABLES[table]["rows"]:
        if "config" not in row_of_table:
            continue
        config = row(Path(row_of_table["config"]).stem, "paper")
        method, geometry = row_of_table["method"], config.method.geometry
        if method.startswith(("Ob(", "Multi(")) or "[Multi(" in method:
            assert config.structure in method
            assert geometry == ("oblique_geodesic" if "geodesic" in method else "oblique")
        else:
            expected = {"Euclidean": "euclidean"}.get(method.split(",")[0], "sphere")
            assert (geometry, config.num_class_tokens) == (expected, 1)
        if table == "table3":
            start = method.split(", ")[-1]
            exponent = {"e^2.64": math.log(1 / 0.07), "e^5.31": 5.31}.get(start, 0.0)
            assert math.log(config.method.logit_scale_init) == pytest.approx(exponent, abs=1e-4)
            assert config.method.logit_scale_trainable == ("fixed" not in start)
            assert (config.method.logit_scale_max is None) == (start == "e^5.31")
        expected_dim = 1024 if table == "table8" and method != "Sphere(512)" else 512
        assert config.model.embedding_dim == expected_dim


def test_the_ablation_rows_have_the_papers_other_settings_at_paper_scale():
    ablation, large = row("ablation_ob_64_16", "paper"), row("table2_multi", "paper")
    settings = [
        (c.model.image.width, c.model.image.heads, c.optim.steps, c.optim.global_batch_size, c.optim.warmup_steps,
         c.optim.weight_decay, c.optim.beta2) for c in (ablation, large)
    ]  # fmt: skip
    assert settings == [(384, 6, 108_000, 2048, 5000, 0.5, 0.98), (768, 12, 410_000, 32_768, 2000, 0.2, 0.998)]
    assert ablation.data == large.data
    assert ablation.model.text == large.model.text


@pytest.mark.parametrize("scale", ["demo", "photos", "photos_scratch"])
def test_the_rates_of_the_temperature_add_up_to_those_of_the_papers_ablation_and_to_six_in_table_2(scale):
    def total(name, scale):
        optim = row(name, scale).optim
        return optim.logit_scale_rate * sum(learning_rate_at(step, optim) for step in range(optim.steps))

    assert total("ablation_sphere_531", scale) == pytest.approx(total("ablation_sphere_531", "paper"), rel=0.02)
    assert total("table2_clip", scale) == pytest.approx(6, rel=0.05)


@pytest.mark.parametrize("scale", ["demo", "photos", "photos_scratch"])
def test_multi_at_a_small_scale_keeps_the_baselines_numbers_the_papers_n_and_its_bound_of_the_logits(scale):
    multi, clip, paper = row("table2_multi", scale), row("table2_clip", scale), row("table2_multi", "paper")
    assert multi.model == clip.model
    assert (multi.data, multi.optim) == (clip.data, clip.optim)
    assert multi.sphere_dim == paper.sphere_dim == 32
    bounds = [config.method.logit_scale_max * config.method.num_spheres for config in (multi, paper)]
    assert bounds[0] == pytest.approx(bounds[1])


@pytest.mark.parametrize(
    ("name", "image", "text", "total"),
    [
        ("table2_clip", 86_192_640, 53_759_488, 139_952_129),
        ("table2_multi", 85_847_040, 53_521_408, 139_368_449),
        ("ablation_sphere_264", 21_862_656, 53_759_488, 75_622_145),
        ("ablation_multi_256_2", 21_765_120, 53_628_928, 75_394_049),
        ("ablation_multi_64_8", 21_696_000, 53_533_696, 75_229_697),
        ("ablation_multi_16_32", 21_696_000, 53_521_408, 75_217_409),
    ],
)
def test_parameter_counts_at_paper_scale_are_those_of_the_released_files(name, image, text, total):
    model = on_meta(row(name, "paper"))
    assert (count(model.image_tower), count(model.text_tower), count(model)) == (image, text, total)


# several class tokens


@pytest.mark.parametrize("num_spheres", [2, 8])
def test_token_counts_follow_only_the_config(num_spheres):
    config = row("table2_multi", "smoke", f"method.num_spheres={num_spheres}", "model.embedding_dim=32")
    model = build_model(config, FEW_IDS)
    assert model.image_tower.num_class_tokens == model.text_tower.num_class_tokens == num_spheres
    assert model.image_tower.projection.shape == (32, 32 // num_spheres)  # one, shared by all tokens
    assert model.text_tower.position_embedding.shape[0] == config.data.context_length + num_spheres - 1
    embeddings = model.encode_image(torch.randn(3, 3, 32, 32))
    assert embeddings.shape == (3, num_spheres, 32 // num_spheres)
    torch.testing.assert_close(embeddings.norm(dim=-1), torch.ones(3, num_spheres))


def batch(config, num=5):
    images = torch.randn(num, 3, config.data.image_size, config.data.image_size)
    ids = torch.randint(4, 40, (num, config.data.context_length))
    ids[:, 0], ids[:, -1] = 1, 3
    return images, ids


def loss_of(config, images, ids):
    torch.manual_seed(1)
    model = build_model(config, FEW_IDS)
    image_embeddings, text_embeddings, logit_scale = model(images, ids)
    return model, symmetric_info_nce(logit_scale * model.geometry.similarity(image_embeddings, text_embeddings))


@pytest.mark.parametrize("multi_token", ["true", "false"])
def test_one_sphere_trains_as_the_baseline_to_the_last_bit(multi_token):
    """Multi with one class token, and Ob with one sphere: same weights, same loss, same gradients."""
    clip = row("table2_clip")
    one = row(
        "table2_multi",
        "smoke",
        "method.num_spheres=1",
        f"method.multi_token={multi_token}",
        "method.logit_scale_max=100",
    )
    images, ids = batch(clip)
    (model, expected), (other, actual) = loss_of(clip, images, ids), loss_of(one, images, ids)
    assert other.geometry.name == "oblique"
    assert torch.equal(actual, expected)
    expected.backward()
    actual.backward()
    for (name, parameter), (same_name, same) in zip(model.named_parameters(), other.named_parameters()):
        assert name == same_name
        assert torch.equal(parameter.grad, same.grad), name


def multi(**options):
    config = row("table2_multi", "smoke", "method.num_spheres=4", *(f"{key}={value}" for key, value in options.items()))
    return config, build_model(config, FEW_IDS).double()


def test_the_similarity_is_that_of_the_papers_pseudo_code_written_as_loops():
    config, model = multi()
    images, ids = batch(config)
    x, y, _ = model(images.double(), ids)
    image_tokens = model.image_tower(images.double()).view(5, 4, -1)
    text_tokens = model.text_tower(ids).view(5, 4, -1)
    logits = model.geometry.similarity(x, y)
    for i in range(5):
        for j in range(5):
            expected = sum(
                torch.dot(image_tokens[i, k], text_tokens[j, k])
                / (image_tokens[i, k].norm() * text_tokens[j, k].norm())
                for k in range(4)
            )
            assert logits[i, j].item() == pytest.approx(expected.item(), abs=1e-12)
    rows = [-logits[i, i] + torch.logsumexp(logits[i], 0) for i in range(5)]
    columns = [-logits[i, i] + torch.logsumexp(logits[:, i], 0) for i in range(5)]
    assert symmetric_info_nce(logits).item() == pytest.approx(sum(rows + columns).item() / 10, abs=1e-12)


def test_class_tokens_differ_from_the_start():
    config, model = multi()
    images, ids = batch(config)
    for embeddings in (model.encode_image(images.double()), model.encode_text(ids)):
        cosines = embeddings @ embeddings.transpose(1, 2)
        others = cosines[:, ~torch.eye(4, dtype=torch.bool)]
        assert others.max() < 1 - 1e-6


# errors


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("table2_clip", ["method.num_spheres=8"], r"num_spheres = 8, .*method.geometry = sphere.*expected: 1 and"),
        ("table2_clip", ["method.multi_token=true"], "multi_token = true"),
        (
            "table2_multi",
            ["model.embedding_dim=100", "method.num_spheres=16"],
            r"table2_multi.yaml.*embedding_dim = 100 .*method.num_spheres = 16 .*multiple of 16 from 32",
        ),
        ("table2_multi", ["model.embedding_dim=16", "method.num_spheres=16"], r"dim = 16 .*multiple of 16 from 32"),
        (
            "table2_multi",
            ["method.geometry=torus"],
            "expected one of: sphere, euclidean, oblique, oblique_geodesic, max_average",
        ),
        (
            "table2_multi",
            ["method.geometry=max_average", "method.prompt_average=embeddings"],
            "max_average, whose tokens have no mean; expected: scores",
        ),
        (
            "table2_multi",
            ["method.geometry=max_average", "optim.loss_tile=8"],
            r"optim\.loss_tile = 8 with method\.geometry = max_average.*expected: 0",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_what_is_accepted(name, overrides, message):
    with pytest.raises(ConfigError, match=message):
        row(name, "smoke", *overrides)


def test_towers_without_layers_have_no_class_tokens():
    with pytest.raises(ConfigError, match=r"text\.layers = 0: a tower without layers has no class tokens"):
        row("ablation_oblique_264", "photos", "method.multi_token=true")
