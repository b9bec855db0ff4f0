"""What the log says beside the loss: each value by hand, over processes, and without a trace in the training."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from processes import in_processes
from runs import lines, row_config, trained, weights
from torch import nn

from common.base.config import override
from common.diagnosis import (
    COLLAPSED,
    PLATEAU_STEPS,
    SAMPLE,
    Watch,
    at_bound,
    diagnose,
    gradient_norms,
)
from common.distributed import rank, world_size
from common.encoders.two_towers import TwoTowers
from common.geometry import Scalar, Sphere, unit
from common.info_nce import QueuedPairs, contrastive_loss, info_nce_chance
from common.late_interaction import LateInteraction
from common.logit_scale import LogitScale
from common.oblique import Oblique
from common.run.journal import Journal
from contrastive_basics.config import Config
from euclip.geometry import Elliptic, Euclidean, Hyperbolic


class Scaled(Sphere):
    """The sphere with a trainable scalar, as a hyperbolic geometry has its curvature."""

    name = "scaled"

    def __init__(self):
        super().__init__()
        self.log_curvature = nn.Parameter(torch.tensor([0.5]))

    def scalars(self):
        return [Scalar("curvature", self.log_curvature)]

    def similarity(self, image_embeddings, text_embeddings):
        return self.log_curvature.exp() * super().similarity(image_embeddings, text_embeddings)

    def paired_similarity(self, image_embeddings, text_embeddings):
        return self.log_curvature.exp() * super().paired_similarity(image_embeddings, text_embeddings)


def model_of(geometry=None, init=10.0, **bounds):
    return TwoTowers(nn.Identity(), nn.Identity(), geometry or Sphere(), LogitScale(init, **bounds))


def look(model, *values, **more):
    return diagnose(model.geometry, model.scalars(), *values, **more)


# ---- the values of one step -----------------------------------------------------------------------------------------


def test_a_hand_made_batch_gives_the_values_that_its_pictures_show():
    images = torch.eye(4)  # four directions
    texts = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0]])  # the last one is wrong
    ids, token_ids = torch.tensor([5, 6, 7, 6]), torch.tensor([[1, 2], [1, 3], [1, 4], [1, 3]])
    model, state = model_of(), torch.get_rng_state()
    actual = diagnose(model.geometry, model.scalars(), images, texts, 10.0, token_ids, ids)
    assert torch.equal(torch.get_rng_state(), state)
    # centred, the four directions keep three of equal variance; three texts, one of them twice, keep two
    directions = texts - texts.mean(dim=0)
    variances = torch.linalg.eigvalsh(directions.T.double() @ directions.double()).clamp(min=0)
    shares = [float(v / variances.sum()) for v in variances if v > 1e-9]
    assert actual == pytest.approx({
        "image_effective_rank": 3.0,
        "image_mean_cosine": 0.0,
        "image_logit_std": 10 * 0.5,  # each caption meets one 1 among four pictures
        "text_effective_rank": math.exp(-sum(share * math.log(share) for share in shares)),
        "text_mean_cosine": 2 / 12,
        "text_logit_std": 10 * (0.5 + math.sqrt(1 / 3) + 0.5 + 0.0) / 4,  # the last picture meets none
        "matched_similarity": 3 / 4,
        "unmatched_similarity": 0.0,  # image 1 with caption 3 shows 1, but both are of picture 6
        "duplicate_ids": 0.5,
        "duplicate_captions": 0.5,
    }, abs=1e-6)  # fmt: skip
    without_ids = look(model_of(), images, texts, 10.0)
    assert without_ids["unmatched_similarity"] == pytest.approx(1 / 12)
    assert not {"duplicate_ids", "duplicate_captions"} & without_ids.keys()


def test_ids_that_are_not_known_are_no_duplicates_and_a_batch_of_one_picture_has_nothing_unmatched():
    embeddings = unit(torch.randn(4, 8))
    unknown = look(model_of(), embeddings, embeddings, 10.0, ids=torch.tensor([-1, -1, 3, 4]))
    assert unknown["duplicate_ids"] == 0.0
    off = (embeddings @ embeddings.T)[~torch.eye(4, dtype=torch.bool)]
    assert unknown["unmatched_similarity"] == pytest.approx(float(off.mean()), abs=1e-6)
    alike = look(model_of(), embeddings, embeddings, 10.0, ids=torch.zeros(4, dtype=torch.long))
    assert alike["duplicate_ids"] == 1.0
    assert "unmatched_similarity" not in alike


def test_a_model_that_guesses_is_at_one_whatever_is_in_the_queue():
    embeddings = torch.ones(8, 4) / 2
    queue = QueuedPairs(torch.ones(24, 4) / 2, torch.ones(24, 4) / 2, torch.arange(24))
    for queued in (None, queue):
        loss = contrastive_loss(embeddings, embeddings, Sphere(), torch.tensor(10.0), queue=queued)
        assert float(loss) == pytest.approx(info_nce_chance(8, queued), abs=1e-6)


def test_token_wise_embeddings_are_one_long_vector_and_are_compared_token_by_token():
    images, texts = unit(torch.randn(6, 3, 4)), unit(torch.randn(6, 5, 4))
    texts[2, 3:] = 0.0  # padding
    geometry = LateInteraction()
    actual = look(model_of(geometry), images, texts, 10.0)
    rows = unit(texts.flatten(1))
    cosines = [float(rows[i] @ rows[j]) for i in range(6) for j in range(6) if i != j]
    assert actual["text_mean_cosine"] == pytest.approx(sum(cosines) / 30, abs=1e-6)
    similarity = geometry.similarity(images, texts)
    assert actual["matched_similarity"] == pytest.approx(float(similarity.diagonal().mean()))
    off = [float(similarity[i, j]) for i in range(6) for j in range(6) if i != j]
    assert actual["unmatched_similarity"] == pytest.approx(sum(off) / 30)


def test_gradient_norms_are_those_of_the_loss_by_the_logarithm_of_the_scale_and_by_the_geometry_s_scalars():
    model, images, texts = model_of(Scaled()), unit(torch.randn(5, 8)), unit(torch.randn(5, 8))

    def loss_at(log_scale, log_curvature):
        similarity = math.exp(log_curvature) * (images.double() @ texts.double().T)
        logits, diagonal = math.exp(log_scale) * similarity, torch.arange(5)
        return float(sum([nn.functional.cross_entropy(one, diagonal) for one in (logits, logits.T)]) / 2)

    assert gradient_norms(model.scalars()) == {}  # before backward
    contrastive_loss(images, texts, model.geometry, model.logit_scale()).backward()
    actual = diagnose(model.geometry, model.scalars(), images, texts, 10.0)
    start, step = (math.log(10.0), 0.5), 1e-5
    for name, move in (("logit_scale", (step, 0.0)), ("curvature", (0.0, step))):
        low, high = (loss_at(*np.add(start, np.multiply(sign, move))) for sign in (-1, 1))
        assert actual[f"gradient_norm_{name}"] == pytest.approx(abs(high - low) / (2 * step), rel=1e-4)


@pytest.mark.parametrize(
    ("bounds", "init", "expected"),
    [
        ({"maximum": 100.0}, 100.0, True),
        ({"maximum": 1000.0}, 5000.0, True),  # moved into them
        ({"maximum": 100.0}, 99.9, False),
        ({"minimum": 1.0, "maximum": 100.0}, 1.0, True),
        ({"maximum": None}, 100.0, False),
        ({"maximum": 100.0, "trainable": False}, 100.0, False),  # it is fixed there on purpose
    ],
)
def test_a_bound_is_reached_by_a_scale_that_could_move(bounds, init, expected):
    model = model_of(init=init, **bounds)
    model.logit_scale.clamp_()
    assert at_bound(model.logit_scale, model.logit_scale().item()) is expected


def big_batch(size):
    generator = torch.Generator().manual_seed(4)
    images = unit(torch.randn(size, 3, 6, generator=generator))
    texts = unit(images[:, :2] + torch.randn(size, 2, 6, generator=generator))
    return (
        images,
        texts,
        torch.randint(7, (size, 2), generator=generator),
        torch.randint(30, (size,), generator=generator),
    )


def values_of_a_share(size):
    share = slice(rank() * size // world_size(), (rank() + 1) * size // world_size())
    rows = [values[share] for values in big_batch(size)]
    queue = QueuedPairs(torch.zeros(9, 3, 6), torch.zeros(9, 2, 6), torch.arange(9))
    return {"chance": info_nce_chance(len(rows[0]), queue)} | look(
        model_of(LateInteraction(), maximum=10.0), *rows[:2], 10.0, *rows[2:]
    )


def test_two_processes_see_the_values_of_one():
    single = values_of_a_share(20)
    assert 0 < single["duplicate_ids"] * single["duplicate_captions"] < 1
    for actual in in_processes(2, values_of_a_share, 20):
        assert actual == pytest.approx(single, rel=1e-6)


def test_of_a_large_batch_embeddings_are_sampled_and_duplicates_counted_in_full():
    images, texts, token_ids, _ = big_batch(2 * SAMPLE)
    ids = torch.arange(2 * SAMPLE) // 2 % SAMPLE
    whole = look(model_of(LateInteraction()), images, texts, 10.0, token_ids, ids)
    first = look(model_of(LateInteraction()), images[:SAMPLE], texts[:SAMPLE], 10.0, token_ids, ids[:SAMPLE])
    assert whole["image_effective_rank"] == first["image_effective_rank"]
    assert whole["unmatched_similarity"] == first["unmatched_similarity"]
    assert whole["duplicate_ids"] == 1.0


# ---- more than one step ---------------------------------------------------------------------------------------------


def test_the_share_at_a_bound_is_that_since_the_last_line():
    watch = Watch(warmup_steps=0)
    for hits in ([True, False, False, True], [False, False], [True]):
        for hit in hits:
            watch.count(1, 0.5, hit)
        assert watch.read() == {"logit_scale_bound_share": sum(hits) / len(hits)}


def warnings_of(watch, ratios, first=1):
    """Step -> what is said after it; the logit scale is at a bound in step 1 alone."""
    actual = {}
    for done, ratio in enumerate(ratios, start=first):
        watch.count(done, ratio, done == 1)
        for text in watch.warnings(done, 5.545, {}):
            actual[done] = text
    return actual


def test_a_loss_at_its_plateau_is_reported_once_after_a_hundred_steps_behind_the_warm_up():
    assert PLATEAU_STEPS == 100
    actual = warnings_of(Watch(warmup_steps=50), [1.0] * 120 + [0.98] + [0.995, 1.005] * 150)  # step 121 interrupts
    assert list(actual) == [221]
    assert actual[221].startswith(
        "warning at step 221: the loss has stayed at 5.545, its chance level, for 100 steps. "
    )
    assert list(warnings_of(Watch(warmup_steps=50), [1.0] * 300)) == [150]
    assert not warnings_of(Watch(warmup_steps=1000), [1.0] * 1000)


def test_a_run_that_goes_on_counts_on_and_warns_of_nothing_twice():
    ratios = [1.0] * 160 + [0.5] + [1.0] * 200
    for stopped_after in (1, 60, 99, 100, 130, 161, 260, 261):
        watch = Watch(warmup_steps=0)
        before = warnings_of(watch, ratios[:stopped_after])
        resumed = Watch(warmup_steps=0, state=json.loads(json.dumps(watch.state())))
        assert list(before | warnings_of(resumed, ratios[stopped_after:], stopped_after + 1)) == [100]
        assert resumed.read() == {"logit_scale_bound_share": 1 / len(ratios)}


def diagnosed(geometry, images, texts):
    return look(model_of(geometry), geometry.embed_image(images), geometry.embed_text(texts), 10.0)


GEOMETRIES = {
    "sphere": Sphere,
    "oblique": lambda: Oblique(4),
    "elliptic": Elliptic,
    "euclidean": lambda: Euclidean(squared=False),
    "euclidean_squared": lambda: Euclidean(squared=True),
    "hyperbolic": lambda: Hyperbolic(16, squared=False),
    "hyperbolic_squared": lambda: Hyperbolic(16, squared=True),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_collapse_of_either_side_is_reported_once_after_the_warm_up_in_every_geometry(name):
    generator = torch.Generator().manual_seed(0)
    spread, constant = torch.randn(32, 16, generator=generator), torch.randn(16, generator=generator).expand(32, 16)
    geometry = GEOMETRIES[name]()
    with torch.no_grad():
        neither = diagnosed(geometry, spread, spread + 0.1)
        images, texts = diagnosed(geometry, constant, spread), diagnosed(geometry, spread, constant)
    watch = Watch(warmup_steps=10)
    assert not watch.warnings(10, 1.0, images | texts)
    assert not watch.warnings(20, 1.0, neither)
    for done, values, side in ((30, texts, "texts"), (40, images, "images")):
        (text,) = watch.warnings(done, 1.0, values)
        assert f"the logits of different {side} are all alike" in text
    assert not watch.warnings(50, 1.0, images | texts)


@pytest.mark.parametrize("squared", [False, True])
def test_an_offset_that_all_embeddings_of_a_euclidean_space_share_is_no_collapse(squared):
    generator = torch.Generator().manual_seed(0)
    images = 50.0 + torch.randn(32, 16, generator=generator)
    texts = images + 0.1 * torch.randn(32, 16, generator=generator)
    actual = diagnosed(Euclidean(squared=squared), images, texts)
    assert actual["image_mean_cosine"] > 0.99
    assert min(actual["image_logit_std"], actual["text_logit_std"]) > 100 * COLLAPSED
    assert not Watch(warmup_steps=0).warnings(20, 1.0, actual)


def test_points_drawn_together_at_the_origin_are_a_collapse_though_their_directions_differ():
    points = 1e-5 * torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    actual = diagnosed(Euclidean(squared=False), points, points)
    assert abs(actual["image_mean_cosine"]) < 0.1
    assert len(Watch(warmup_steps=0).warnings(20, 1.0, actual)) == 2


def test_embeddings_that_are_not_finite_end_no_run():
    embeddings = torch.full((8, 4), math.nan)
    actual = look(model_of(), embeddings, embeddings, 10.0)
    assert not Watch(warmup_steps=0).warnings(20, 1.0, actual)


# ---- in training ----------------------------------------------------------------------------------------------------


def run(folder, *overrides, row="table1_ours", resume=False):
    few = ("run.evaluate_every=0", "run.save_every=0", "data.num_test=4", "data.num_labelled=4", *overrides)
    return trained("contrastive_basics", row_config("contrastive_basics", row, *few), folder, resume)


def test_the_weights_of_a_run_that_is_looked_at_are_those_of_one_that_is_not(tmp_path, not_evaluated):
    extra = ("optim.steps=4", "method.queue_size=32", "optim.micro_batch_size=5", "model.patch_dropout=0.5")
    often = run(tmp_path / "often", "run.log_every=1", "run.diagnose_every=1", *extra)
    never = run(tmp_path / "never", "run.log_every=100", "run.diagnose_every=0", *extra)
    assert [[record["step"] for record in lines(files)] for files in (often, never)] == [[1, 2, 3, 4], [4]]
    torch.testing.assert_close(*(weights(files) for files in (often, never)), rtol=0, atol=0)
    looked_at, not_looked_at = lines(often)[-1], lines(never)[-1]
    assert looked_at.keys() - not_looked_at >= {"image_effective_rank", "text_logit_std", "gradient_norm_logit_scale"}
    same = not_looked_at.keys() - {"samples_per_second", "data_wait_share", "logit_scale_bound_share"}
    assert "loss_over_chance" in same
    assert {key: looked_at[key] for key in same} == {key: not_looked_at[key] for key in same}


@pytest.mark.parametrize(
    ("log_every", "diagnose_every", "steps", "expected"),
    [
        (1, 10, 35, [10, 20, 30, 35]),
        (3, 10, 35, [12, 21, 30, 35]),  # the first line in every ten steps
        (50, 10, 200, [50, 100, 150, 200]),
        (1, 0, 20, []),
    ],
)
def test_every_so_many_steps_a_line_of_the_log_is_diagnosed(log_every, diagnose_every, steps, expected):
    settings = [f"run.log_every={log_every}", f"run.diagnose_every={diagnose_every}", f"optim.steps={steps}"]
    journal = object.__new__(Journal)
    journal.config = override(Config(), [*settings, "optim.warmup_steps=0"])
    journal.num_steps = steps
    assert [done for done in range(1, steps + 1) if journal.diagnoses_at(done)] == expected


def test_most_steps_read_only_loss_and_logit_scale(tmp_path, monkeypatch, not_evaluated):
    calls = []
    monkeypatch.setattr("common.run.step.diagnose", lambda *arguments: calls.append(1) or diagnose(*arguments))
    bounds = ("method.logit_scale_min=14.0", "method.logit_scale_max=14.0001", "method.logit_scale_init=14.0")
    every = ("run.log_every=3", "run.diagnose_every=6")
    files = run(tmp_path, "optim.steps=7", "optim.learning_rate=0.01", *every, *bounds)
    assert len(calls) == 2  # steps 6 and 7
    assert [record["logit_scale_bound_share"] for record in lines(files)] == [1.0, 1.0, 1.0]
    first, *looked_at = lines(files)
    assert "gradient_norm_logit_scale" not in first
    assert first["loss"] / first["loss_over_chance"] == pytest.approx(math.log(first["samples_seen"] / 3))
    assert all(0 < record["gradient_norm_logit_scale"] <= record["gradient_norm"] for record in looked_at)


@pytest.mark.parametrize(
    ("setting", "candidates"), [("method.group_size=2", [2, 2, 2]), ("method.queue_size=32", [16, 32, 48])]
)
def test_the_chance_level_is_that_of_the_candidates(setting, candidates, tmp_path, not_evaluated):
    records = lines(run(tmp_path, setting, "run.log_every=1", "optim.steps=3"))
    ratios = [record["loss"] / record["loss_over_chance"] for record in records]
    assert ratios == pytest.approx([math.log(count) for count in candidates])


def test_a_run_whose_temperature_is_fixed_too_high_is_warned_of_once_and_not_again_after_a_resume(
    tmp_path, monkeypatch, capsys, not_evaluated
):
    monkeypatch.setattr("common.diagnosis.PLATEAU_STEPS", 10)
    fixed = ("method.logit_scale_trainable=false", "method.logit_scale_init=0.001", "method.logit_scale_min=null")
    settings = ("optim.steps=20", "optim.warmup_steps=2", "run.log_every=7", "run.save_every=15", *fixed)
    files = run(tmp_path, *settings)
    warned = lines(files, "warning")
    assert [record["step"] for record in warned] == [12, 14, 14]  # plateau; images and texts, when they are looked at
    assert capsys.readouterr().err.count("its chance level") == 1

    shutil.rmtree(files.checkpoints / "step-00000020")
    unbroken = lines(files)
    run(tmp_path, *settings, resume=True)
    assert lines(files, "warning") == warned
    assert capsys.readouterr().err.count("its chance level") == 0
    assert lines(files)[-1]["logit_scale_bound_share"] == unbroken[-1]["logit_scale_bound_share"]
