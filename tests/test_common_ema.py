"""optim.ema: the average against loops over saved weights and against timm's, its resume, its evaluations, refusals."""

import copy
import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from killed_run import assert_same_to_the_last_bit, killed_after
from refusals import refused
from runs import lines, logged
from test_oblique_topology_train import run
from timm.utils import ModelEmaV3
from torch import nn

from common.base.config import ConfigError, load_config
from common.data.caption_cache import CaptionCache
from common.data.pairs import open_evaluation_sets
from common.evaluation.embed import evaluate_retrieval
from common.run.checkpoint import ONLINE, last_checkpoint, open_checkpoint, write_published
from common.run.ema import averaged
from oblique_topology.config import Config
from oblique_topology.evaluate import load_encoder

DECAY, STEPS = 0.6, 6
# an update of several micro-batches enters the average once
AVERAGED = (
    f"optim.ema={DECAY}", "run.save_every=1", "run.keep_checkpoints=9", "optim.warmup_steps=1", "run.evaluate_every=3",
    "optim.micro_batch_size=9", "data.num_labelled=4",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run with the average and one without, of the same settings."""
    folder = tmp_path_factory.mktemp("ema")
    return run(folder / "average", *AVERAGED), run(folder / "plain", *AVERAGED[1:])


def checkpoints(files):
    return [open_checkpoint(path) for path in sorted(files.checkpoints.glob("step-*"))]


def test_the_average_is_that_of_a_loop_over_the_weights_of_every_step(runs):
    files, _ = runs
    saved = checkpoints(files)
    assert len(saved) == STEPS
    expected = {name: tensor.double() for name, tensor in saved[0].model_tensors(is_online=True).items()}
    for checkpoint in saved:
        if checkpoint.state["step"] > 1:
            for name, tensor in checkpoint.model_tensors(is_online=True).items():
                expected[name] = DECAY * expected[name] + (1 - DECAY) * tensor.double()
        averages = {name: tensor.double() for name, tensor in checkpoint.model_tensors().items()}
        torch.testing.assert_close(averages, expected, rtol=1e-5, atol=1e-6)
    scale = "logit_scale.log_logit_scale"  # a scalar is averaged as weights are
    online = [checkpoint.model_tensors(is_online=True)[scale].item() for checkpoint in saved]
    assert min(online) < averages[scale].item() < max(online)


def test_the_average_changes_no_loss_and_no_weight_that_trains(runs):
    files, plain = runs
    assert logged(files) == logged(plain)
    online, weights = checkpoints(files)[-1].weights(is_online=True), checkpoints(plain)[-1].weights(is_online=True)
    assert online.read_bytes() == weights.read_bytes()
    assert checkpoints(files)[-1].weights().read_bytes() != online.read_bytes()


def test_a_resumed_run_equals_an_uninterrupted_one_to_the_last_bit(runs, tmp_path):
    files, _ = runs
    resumed = run(killed_after(2, files, tmp_path / "run"), *AVERAGED, resume=True)
    assert_same_to_the_last_bit(files, resumed)
    assert (last_checkpoint(resumed.checkpoints).path / ONLINE).is_file()


def test_evaluations_are_those_of_the_average_and_the_log_says_so(runs):
    files, plain = runs
    config, encoder = load_encoder(last_checkpoint(files.checkpoints), torch.device("cpu"))
    metrics = evaluate_retrieval(encoder, open_evaluation_sets(config.data).retrieval["test"]).metrics
    one, other = (
        json.loads(folder.evaluation.read_text())["evaluations"]["test"]["metrics"] for folder in (files, plain)
    )
    assert one == metrics
    assert one != other
    assert [record["decay"] for record in lines(files, "ema")] == [DECAY]
    one, other = (lines(folder, "evaluate") for folder in (files, plain))
    assert len(one) == len(other) > 0
    assert one != other  # validation too


def test_a_published_model_is_the_average(runs, tmp_path):
    files, _ = runs
    checkpoint = last_checkpoint(files.checkpoints)
    write_published(checkpoint, tmp_path / "published")
    published = open_checkpoint(tmp_path / "published").model_tensors()
    assert all(torch.equal(tensor, published[name]) for name, tensor in checkpoint.model_tensors().items())
    assert not (tmp_path / "published" / ONLINE).exists()


def test_it_is_timm_s_average_of_the_parameters():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    config = SimpleNamespace(optim=SimpleNamespace(ema=0.9))
    ours, theirs = averaged(model, config, None), ModelEmaV3(model, decay=0.9)
    for step in range(1, 6):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn_like(parameter)
        ours.update_parameters(model)
        theirs.update(model, step=step)
        for one, other in zip(ours.module.parameters(), theirs.module.parameters(), strict=True):
            torch.testing.assert_close(one, other)


def test_batch_normalisation_that_trains_sharded_weights_and_impossible_decays_are_refused():
    model, sharded = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), nn.Linear(3, 4)
    sharded.weight.full_tensor = sharded.weight.clone  # as a DTensor has it
    config = SimpleNamespace(optim=SimpleNamespace(ema=0.9))
    statistics = r"optim\.ema = 0\.9 with batch normalisation that trains \(1\)"
    refused(
        (statistics, lambda: averaged(model, config, None)),
        (r"optim\.ema = 0\.9 under FSDP", lambda: averaged(sharded, config, None)),
        *((r"optim\.ema", partial(load_config, Config, [], [f"optim.ema={decay}"])) for decay in ("0", "1", "nan")),
        error=ConfigError,
    )
    model[1].requires_grad_(False)
    assert averaged(model, config, None) is not None


def test_a_copy_of_a_model_reads_the_same_cached_captions(tmp_path):

    cache = CaptionCache(tmp_path / "captions.f16", 4, 2, lambda ids: torch.zeros(*ids.shape, 4), 1e6)
    assert copy.deepcopy(SimpleNamespace(kept=cache)).kept is cache
