"""Every row and scale of EuCLIP's tables loads and builds; parameter counts, trainable scalars and their bounds."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from refusals import refused
from runs import row_config, rows_of_paper

from common.base.config import SCALES, ConfigError
from common.base.files import read_repository_yaml
from common.base.settings import OptimConfig
from common.geometry import clamp_scalars_
from common.run.folder import run_key
from common.run.schedule import build_optimizer, learning_rate_at
from euclip.geometry import Hyperbolic
from euclip.model import build_model, multiply_scalar_gradients_

FOLDER = Path(__file__).resolve().parents[1] / "euclip"
CLIP_IDS = SimpleNamespace(vocabulary_size=49_408, end_id=49_407)
FEW_IDS = SimpleNamespace(vocabulary_size=64, end_id=63)
ROWS = [FOLDER / "configs" / f"{row}.yaml" for row in rows_of_paper(FOLDER)]


def config_of(row, scale="paper", *overrides):
    return row_config("euclip", row, *overrides, scale=scale)


def on_meta(row, *overrides):
    with torch.device("meta"):
        return build_model(config_of(row, "paper", *overrides), CLIP_IDS)


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("table4_clip", 151_277_313),
        ("table4_euclip", 151_274_753),
        ("redcaps_euclip", 151_274_753),
        ("table4_meru", 151_277_316),
        ("table4_hyperbolic_squared", 151_274_756),
        ("b16_clip", 149_620_737),
        ("b16_euclip", 149_618_177),
        ("b16_meru", 149_620_740),
    ],
)
def test_parameter_counts_at_paper_scale_are_those_of_the_authors_models(row, expected):
    assert count(on_meta(row)) == expected


def test_euclip_has_the_parameters_of_clip_without_the_final_layer_norms():
    clip, euclip = (dict(on_meta(f"table4_{row}").named_parameters()) for row in ("clip", "euclip"))
    assert not euclip.keys() - clip.keys()
    assert clip.keys() - euclip.keys() == {
        f"{tower}.final_norm.{part}" for tower in ("image_tower", "text_tower") for part in ("weight", "bias")
    }
    assert sum(clip[name].numel() for name in clip.keys() - euclip.keys()) == 2 * 768 + 2 * 512
    assert any("input_norm" in name for name in euclip)  # the LayerNorm before the blocks stays


@pytest.mark.slow  # two models of the paper's size
@pytest.mark.parametrize(("row", "image", "text"), [("table4_euclidean", 0.99, 0.97), ("table4_euclip", 1.26, 0.84)])
def test_norms_at_the_start_are_those_measured_of_the_authors_towers(row, image, text):
    """Section 3; without the final LayerNorm texts start nearer to the origin than images."""
    model = build_model(config_of(row), CLIP_IDS)
    images = torch.nn.functional.interpolate(torch.randn(8, 3, 8, 8), size=224, mode="bicubic")
    token_ids = torch.randint(1, 49_405, (8, 77))
    token_ids[:, 20] = CLIP_IDS.end_id
    with torch.no_grad():
        norms = [embeddings.norm(dim=1).mean().item() for embeddings in model(images, token_ids)[:2]]
    assert norms == pytest.approx([image, text], rel=0.08)  # of other pictures and words


def test_the_rows_hold_the_papers_settings():
    """Section 2 of the specification: geometry, final LayerNorm, lambda, K, start of the logit scale."""
    large, one, small = 1 / 0.07, 1.0, math.exp(-1)
    expected = {
        "clip": ("sphere", True, 0, None, large),
        "elliptic": ("elliptic", True, 0, None, large),
        "euclidean": ("euclidean", True, 0, None, large),
        "euclidean_no_ln": ("euclidean", False, 0, None, large),
        "euclidean_squared": ("euclidean_squared", False, 0, None, one),
        "euclidean_squared_entailment": ("euclidean_squared", False, 0.2, 0.3, small),
        "euclip": ("euclidean_squared", False, 0.1, 0.3, small),
        "euclip_ln": ("euclidean_squared", True, 0.1, 0.3, small),
        "hyperbolic": ("hyperbolic", True, 0, None, large),
        "hyperbolic_no_ln": ("hyperbolic", False, 0, None, large),
        "hyperbolic_squared": ("hyperbolic_squared", False, 0, None, one),
        "hyperbolic_squared_entailment": ("hyperbolic_squared", False, 0.2, 0.3, small),
        "meru": ("hyperbolic", True, 0.2, 0.1, large),
        "meru_no_ln": ("hyperbolic", False, 0.2, 0.1, large),
    }
    for path in ROWS:
        config = config_of(path.stem)
        method = config.method
        settings = (method.geometry, config.model.final_layer_norm, method.entailment_weight, method.min_radius)
        variant = expected[path.stem.partition("_")[2]]
        assert settings == variant[:4], path.name
        assert method.logit_scale_init == pytest.approx(variant[4], rel=1e-12), path.name
        assert (method.logit_scale_min, method.logit_scale_max) == (None, 100.0)


def test_the_paper_scale_is_datacomps_recipe():
    medium, small, fine = (config_of(row) for row in ("table4_euclip", "table8_euclip", "b16_euclip"))
    assert (medium.optim.steps, small.optim.steps) == (31_250, 3_125)
    assert medium.optim.steps * medium.optim.global_batch_size == 128_000_000
    assert small.optim.steps * small.optim.global_batch_size == 12_800_000
    assert (medium.model.patch_size, fine.model.patch_size) == (32, 16)
    for config in (medium, small, fine):
        optim = config.optim
        assert (optim.global_batch_size, optim.micro_batch_size, optim.warmup_steps) == (4096, 256, 500)
        assert (optim.learning_rate, optim.weight_decay, optim.max_gradient_norm) == (5e-4, 0.2, None)
        assert (optim.beta1, optim.beta2, optim.epsilon, optim.logit_scale_rate) == (0.9, 0.98, 1e-6, 1.0)


@pytest.mark.parametrize("scale", SCALES)
def test_vit_b16_has_more_patches_and_small_datacomp_fewer_steps_at_every_scale(scale):
    coarse, fine, few = (config_of(row, scale) for row in ("table4_euclip", "b16_euclip", "table8_euclip"))
    ratio = (fine.data.image_size / fine.model.patch_size) / (coarse.data.image_size / coarse.model.patch_size)
    assert ratio == (1.5 if scale == "demo" else 2)
    assert fine.optim == coarse.optim
    assert few.optim.steps < coarse.optim.steps
    assert few.model == coarse.model


def test_every_trained_row_of_the_tables_has_its_config_and_every_config_its_row():
    tables = read_repository_yaml(FOLDER / "paper_tables.yaml")["tables"]
    named = {row["config"] for table in tables.values() for row in table["rows"] if "config" in row}
    not_rows = {"redcaps_euclip.yaml", "unstable_hyperbolic_no_ln.yaml", "unstable_meru_no_ln.yaml"}
    assert named == {row.name for row in ROWS} - not_rows
    for name in ("table1", "table4", "table5", "table8"):
        assert all("config" in row for row in tables[name]["rows"]), name


@pytest.mark.parametrize(("row", "scalars"), [("table4_euclip", 1), ("table4_meru", 4)])
def test_the_parameters_that_decay_are_those_of_open_clip_and_no_scalar_does(row, scalars):
    """Spared there: fewer than two dimensions (the class token has one), norms, biases and the logit scale."""
    model = build_model(config_of(row, "smoke"), FEW_IDS)
    assert sum(".log_" in name for name, _ in model.named_parameters()) == scalars
    decayed = {id(parameter) for parameter in build_optimizer(model, OptimConfig()).param_groups[0]["params"]}
    for name, parameter in model.named_parameters():
        spared = parameter.squeeze().ndim < 2 or "norm" in name or name.endswith("bias") or ".log_" in name
        assert (id(parameter) in decayed) != spared, name


@pytest.mark.parametrize("scale", ["demo", "photos", "photos_scratch"])
def test_the_rates_of_the_trainable_scalars_add_up_to_those_of_the_papers_run(scale):
    def total(scale):
        optim = config_of("table4_euclip", scale).optim
        return optim.logit_scale_rate * sum(learning_rate_at(step, optim) for step in range(optim.steps))

    assert total(scale) == pytest.approx(total("paper"), rel=0.02)


def test_a_start_below_one_survives_by_default_and_is_one_under_the_authors_bound():
    model = build_model(config_of("table4_euclip", "smoke"), FEW_IDS)
    assert clamp_scalars_(model.scalars()) == 0
    assert model.logit_scale().item() == pytest.approx(math.exp(-1))
    published = build_model(config_of("table4_euclip", "smoke", "method.logit_scale_min=1.0"), FEW_IDS)
    assert published.logit_scale().item() == 1.0


def test_bounds_of_the_scalars_are_those_of_the_config_and_absorb_where_it_says_so():
    more = ("method.absorbing_curvature_bounds=true", "method.embedding_scale_max=1.0")
    models = [build_model(config_of("table4_meru", "smoke", *overrides), FEW_IDS) for overrides in ((), more)]
    plain, bounded = ({scalar.name: scalar for scalar in model.scalars()} for model in models)
    assert (plain["curvature"].minimum, plain["curvature"].maximum, plain["logit_scale"].maximum) == (0.1, 10, 100)
    # alpha has no bound in EuCLIP's code, and one in MERU's
    assert (plain["image_scale"].maximum, bounded["image_scale"].maximum) == (None, 1)
    assert not any(scalar.absorbing for scalar in plain.values())
    assert [name for name, scalar in bounded.items() if scalar.absorbing] == ["curvature"]


def test_the_authors_accumulation_multiplies_only_the_gradients_of_beta_and_c():
    model = build_model(config_of("table4_meru", "smoke"), FEW_IDS)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    multiply_scalar_gradients_(model, 2.0)
    doubled = {name for name, parameter in model.named_parameters() if (parameter.grad == 2).all()}
    assert doubled == {"logit_scale.log_logit_scale", "geometry.log_curvature"}
    assert isinstance(model.geometry, Hyperbolic)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["method.entailment_weight=0.1"],
            "method.entailment_weight = 0.1 has no effect with method.geometry = sphere; expected: method.geometry = e",
        ),
        (["method.min_radius=0.3"], "method.min_radius = 0.3 has no effect with method.geometry = sphere"),
        (
            ["method.curvature_init=2"],
            "curvature_init = 2.0 has no effect .* = hyperbolic or hyperbolic_squared, or the default, 1.0",
        ),
        (["method.embedding_scale_max=1", "method.geometry=euclidean"], "scale_max = 1.0 has no effect .* = euclidean"),
        (
            ["method.geometry=euclidean", "method.entailment_weight=0.1"],
            r"method.entailment_weight = 0.1 needs method.min_radius \(K\); the paper: 0.3",
        ),
        (
            ["method.geometry=hyperbolic", "method.curvature_init=20"],
            r"method.curvature_init = 20.0 is outside .* = \[0.1, 10.0\]",
        ),
        (["method.geometry=lorentz"], "method.geometry = 'lorentz'; expected one of: sphere, elliptic, euclidean"),
        (["method.min_radius=-1"], "method.min_radius = -1.0; expected: >= 0"),
        (["method.logit_scale_min=200"], "logit_scale_min = 200.0, logit_scale_max = 100.0; expected: 0 < min <= max"),
        (["method.curvature=1"], "unknown key 'method.curvature'; did you mean method.curvature_"),
        (["data.averages=38"], "data.averages = '38'; expected one of: present, datacomp"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_what_is_accepted(overrides, message):
    refused((message, lambda: config_of("table4_clip", "smoke", *overrides)), error=ConfigError)


def test_what_the_averages_are_taken_over_decides_no_run_and_scenes_take_no_rows_of_winogavil():
    photographs = ("data.source=shards", "data.root=/data")
    keys = {
        run_key("euclip", config_of("table4_clip", "photos", *photographs, *further), "data")
        for further in ((), ("data.averages=datacomp",), ("data.winogavil=/data/winogavil",))
    }
    assert len(keys) == 1
    message = r"data\.winogavil = /w with data\.source = scenes, which has its own instances"
    refused((message, lambda: config_of("table4_clip", "demo", "data.winogavil=/w")), error=ConfigError)
