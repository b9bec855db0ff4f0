"""Trackers of a run: they receive its settings, and after a resume no step is drawn twice, whichever steps the killed
process had logged."""

import sys
from types import SimpleNamespace

import accelerate.tracking
import pytest
from accelerate.utils import LoggerType
from killed_run import killed_after
from runs import row_config, trained

from common.run.checkpoint import last_checkpoint
from common.run.launch import start_accelerator


class Events:
    """A stub of torch's SummaryWriter: what a reader of its folder shows. TensorBoard hides events of earlier writers
    whose step is not below the purge step of a later one."""

    folders: dict[str, list[tuple[str, int]]] = {}  # noqa: RUF012

    def __init__(self, log_dir, purge_step=None):
        before = self.folders.get(log_dir, [])
        self.shown = [point for point in before if purge_step is None or point[1] < purge_step]
        self.folders[log_dir] = self.shown

    def add_scalar(self, name, value, global_step):
        self.shown.append((name, global_step))

    def flush(self):
        pass

    close = flush


class Server:
    """A stub of wandb and trackio: runs by id, with the steps of each; `init` records its arguments."""

    def __init__(self):
        self.calls, self.steps, self.config = [], {}, {}

    def update(self, values, allow_val_change):
        self.config |= values

    def init(self, project, **options):
        self.calls.append({"project": project, **options})
        taken = self.steps.setdefault(options.get("id", options.get("name")), [])
        return SimpleNamespace(
            log=lambda values, step: taken.append(step) if "loss" in values else None, finish=lambda: None
        )


@pytest.fixture
def stubs(monkeypatch):
    """Modules in place of packages that are not installed."""
    server = Server()
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=server.init, config=server))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Events))
    monkeypatch.setattr("torch.utils.tensorboard", sys.modules["torch.utils.tensorboard"], raising=False)
    monkeypatch.setattr(Events, "folders", {})
    monkeypatch.setattr(
        accelerate.tracking, "_available_trackers", [*map(LoggerType, ("tensorboard", "wandb", "trackio"))]
    )
    monkeypatch.setattr("common.run.launch.find_spec", lambda package: SimpleNamespace(origin="installed"))
    return server


def run(folder, tracker, resume=False):
    settings = ["run.log_every=1", "run.evaluate_every=0", "run.test=false", "run.save_every=2"]
    settings += ["run.keep_checkpoints=3", f"run.tracker={tracker}", "run.mixed_precision=no"]
    config = row_config("oblique_topology", "table2_clip", *settings)
    accelerator = start_accelerator(config.run, folder)
    assert accelerator.trackers == []  # it starts when the step is known at which the run resumes
    return trained("oblique_topology", config, folder, resume, accelerator)


def test_tensorboard_shows_each_step_once_after_a_resume_and_in_a_folder_that_an_earlier_run_left(tmp_path, stubs):
    Events.folders[str(tmp_path / "run" / "contrastive-geometry")] = [("loss", 1), ("loss", 2), ("loss", 9)]
    files = run(tmp_path / "run", "tensorboard")
    (folder,) = Events.folders
    Events.folders[str(tmp_path / "killed" / "contrastive-geometry")] = list(Events.folders[folder])
    run(killed_after(2, files, tmp_path / "killed"), "tensorboard", resume=True)
    for shown in Events.folders.values():
        assert [step for name, step in shown if name == "loss"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("tracker", "key"), [("wandb", "id"), pytest.param("trackio", "name", marks=pytest.mark.slow)])
def test_a_resumed_run_is_one_run_of_the_tracker_and_another_run_another(tracker, key, tmp_path, stubs, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    files = run(tmp_path / "run", tracker)
    saved = last_checkpoint(files.checkpoints).state["tracker_run"]
    run(killed_after(4, files, tmp_path / "killed"), tracker, resume=True)
    run(tmp_path / "other", tracker)
    first, resumed, other = stubs.calls
    shared = {"project": "mine" if key == "id" else "contrastive-geometry", key: saved, "resume": "allow"}
    assert [first, resumed] == [{"name": f"{tmp_path.name}/{name}"} | shared for name in ("run", "killed")]
    assert (stubs.config["optim.steps"], stubs.config["run.tracker"]) == (6, tracker)
    assert other[key] != saved
    # W&B leaves out a step that is not above the last one
    assert stubs.steps == {saved: [1, 2, 3, 4, 5, 6, 5, 6], other[key]: [1, 2, 3, 4, 5, 6]}
