"""optim.compile: losses, names, resume and evaluation of a compiled run; what is compiled, and a missing compiler."""

import json

import pytest
import torch
from killed_run import assert_same_to_the_last_bit, killed_after
from runs import logged, weights
from test_oblique_topology_train import run
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from common.base.config import ConfigError
from common.encoders.resnet import NarrowResNet
from common.encoders.transformer import Transformer
from common.run.compilation import compile_towers_

SMALL = [f"model.{side}.{size}" for side in ("image", "text") for size in ("layers=1", "width=16", "heads=2")]
# the last micro-batch is smaller; captions are cut to their lengths; patches are drawn
SETTINGS = (*SMALL, "model.embedding_dim=16", "model.patch_dropout=0.4", "optim.micro_batch_size=12")


@pytest.fixture(autouse=True)
def from_scratch():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def has_compiler():
    try:
        return bool(get_cpp_compiler())
    except InvalidCxxCompiler:
        return False


# a minute of a core or more where the compiler's cache is empty
INDUCTOR = (pytest.mark.slow, pytest.mark.skipif(not has_compiler(), reason="no C++ compiler, which inductor needs"))


# in `make test` the launch option compiles by the same function (test_launch.py)
@pytest.mark.parametrize(
    "backend", [pytest.param("aot_eager", marks=pytest.mark.slow), pytest.param("inductor", marks=INDUCTOR)]
)
def test_a_compiled_run_has_the_losses_names_and_evaluations_of_another_and_resumes_exactly(
    backend, tmp_path, monkeypatch
):
    settings = (*SETTINGS, "run.save_every=3")
    plain = run(tmp_path / "plain", *settings)
    counters.clear()
    if backend != "inductor":  # the setting's
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", backend.upper())
    compiled = run(tmp_path / "compiled", *settings, "optim.compile=true")
    assert bool(counters["inductor"]) == (backend == "inductor")
    assert counters["frames"]["ok"] > 0, "nothing was compiled"
    assert not counters["graph_break"]
    assert counters["frames"]["ok"] == counters["frames"]["total"]  # no shape fell back for the number of variants
    assert logged(compiled) == pytest.approx(logged(plain), rel=1e-4)
    one, other = (weights(files) for files in (compiled, plain))
    assert one.keys() == other.keys()
    metrics = [
        json.loads(files.evaluation.read_text())["evaluations"]["test"]["metrics"] for files in (compiled, plain)
    ]
    assert metrics[0] == pytest.approx(metrics[1], abs=0.06)  # a near tie may fall either way

    torch._dynamo.reset()  # as in another process
    killed = killed_after(3, compiled, tmp_path / "killed")
    assert_same_to_the_last_bit(compiled, run(killed, *settings, "optim.compile=true", resume=True))


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler, which inductor needs")
def test_dropout_draws_the_same_numbers_as_without_compilation():
    inputs, results = torch.randn(5, 7, 8, generator=torch.Generator().manual_seed(0)), []
    for is_on in (False, True):
        torch.manual_seed(1)
        tower = Transformer(8, layers=1, heads=2, dropout=0.5)
        assert compile_towers_(tower, is_on) == is_on
        torch.manual_seed(2)
        results.append(tower(inputs))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_towers_are_compiled_in_place_and_nothing_else(monkeypatch):
    model = nn.ModuleDict({"tower": Transformer(8, 1, 2), "backbone": NarrowResNet(4, (1,)), "head": nn.Linear(2, 2)})
    names = list(model.state_dict())
    assert compile_towers_(model, False) == 0
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")  # a launch with --dynamo_backend does the same
    assert compile_towers_(model, False) == 2
    assert [name for name, module in model.named_modules() if module._compiled_call_impl] == ["tower", "backbone"]
    assert list(model.state_dict()) == names


def test_every_shape_beyond_the_first_uses_its_graph(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    tower = Transformer(8, 1, 2)
    compile_towers_(tower, True)
    counters.clear()
    for rows, length in ((4, 5), (3, 9)):
        tower(torch.randn(rows, length, 8))
    assert counters["stats"]["unique_graphs"] == 1


def test_without_a_compiler_the_setting_is_refused_before_the_first_step(monkeypatch):
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    with pytest.raises(ConfigError, match=r"optim\.compile = true needs a C\+\+ compiler: .*expected: g\+\+ or clang"):
        compile_towers_(nn.Linear(2, 2), True)
