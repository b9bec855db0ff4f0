"""Shared test set-up: the repository root first on the path, no network, few threads."""

import copy
import functools
import gc
import importlib
import io
import os
import shutil
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
# a disk takes a minute to write, and to delete, what the tests leave; 1 GB of it is there at a time, scripts among it
MEMORY = Path("/dev/shm")
may_execute = os.access(MEMORY, os.W_OK) and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC
if may_execute and shutil.disk_usage(MEMORY).free > 8e9:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
# a make that a test starts is a user's own, whatever started the tests: one below `make test` checks no settings, and
# `make test PYTHON=python3.12` passes its setting on
for name in [name for name in os.environ if name.startswith(("MAKE", "MFLAGS")) or name == "PYTHON"]:
    del os.environ[name]

# collecting the tests makes 900,000 objects that stay: the collector searches them once, not 10 times
gc.set_threshold(200_000, 20, 100)

import pytest

# files whose tests read the same trained runs (`oblique`, `euclip`) or verdicts: one process has them all, and makes
# these once
TOGETHER = {
    "test_oblique_topology_every_table.py": "oblique",
    "test_oblique_topology_figures.py": "oblique",
    "test_oblique_topology_reproduce.py": "oblique",
    "test_oblique_topology_tables.py": "oblique",
    "test_euclip_figures.py": "euclip",
    "test_euclip_reproduce.py": "euclip",
    "test_claims.py": "committed",
    "test_common_report_page.py": "committed",
    "test_fill_pages.py": "committed",
    "test_readme.py": "committed",
}
# begun last, one of them would have to be waited for
LONG = (
    "oblique",
    "euclip",
    "test_geomm_reproduce.py",
    "test_launch.py",
    "test_resume.py",
    "test_sharding.py",
    "test_photos_scale.py",
    "test_packages.py",
    "test_fake_cuda.py",
    "test_contrastive_basics_pretrain.py",
)

# a file for the results of `make test-gpu`, or None
RESULTS = Path(os.environ["TEST_RESULTS"]).absolute() if os.environ.get("TEST_RESULTS") else None


def group_of(file: str) -> str:
    """The tests that stay in one process: those of a file, and of the files it shares runs with."""
    return TOGETHER.get(file, file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones first; of a CUDA device rows first, and before all what has not passed yet."""
    items.sort(key=lambda item: (*LONG, group_of(item.path.name)).index(group_of(item.path.name)))
    if RESULTS:
        lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
        passed = {line.partition(" ")[2] for line in lines if line.startswith("passed ")}
        items.sort(key=lambda item: (item.nodeid in passed, "test_a_row_of_each_method" not in item.nodeid))


def pytest_collection_finish() -> None:
    """What the tests themselves make is collected seldom; their processes are copies of this one, before any test."""
    gc.set_threshold(20_000, 20, 100)
    gc.freeze()
    if "PYTEST_XDIST_WORKER" in os.environ:  # one test alone may need no process
        importlib.import_module("tests.preloaded")
        importlib.import_module("processes").start_server_as_fork()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Writes a test's result as soon as it has one: a run that is cut short keeps what it has tried."""
    if RESULTS and (report.when == "call" or report.outcome != "passed"):
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(f"{report.outcome} {report.nodeid}\n")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """For --dist loadscope. The plugin's own groups, by marks, reach no process with pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(Path(nodeid.partition("::")[0]).name)

    return Groups(config, log)


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same random state, and with no precision chosen by another's Accelerator."""
    import torch  # not above: the process that hands out the tests needs no torch, and all wait for its start
    from accelerate.state import AcceleratorState

    torch.manual_seed(0)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session", autouse=True)
def no_seeds_for_devices_that_are_not_here():
    """torch notes the stack of each seed for a device that may start later, a millisecond in a test."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        for device in (torch.cuda, torch.xpu):
            if not device.is_available():
                patch.setattr(device, "manual_seed_all", lambda seed: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_revision_and_no_wait_for_the_disk():
    """Of each run git is asked twice and the disk ten times, a tenth of the time of a smoke run."""
    folder = sys.modules.get("common.run.folder")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        if folder is not None:
            patch.setattr(folder, "git_revision", functools.cache(folder.git_revision))
        yield


@pytest.fixture
def not_evaluated(monkeypatch):
    """Runs leave out the final evaluation, most of a run of a few steps, where it is not the point."""
    monkeypatch.setattr("common.run.training.evaluate_and_save", lambda *arguments: None)


@pytest.fixture
def terminal_signals():
    """Signals as a program in a terminal has them, also where the tests run under nohup or in the background."""
    from processes import take_terminal_signals

    before = take_terminal_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def two_threads():
    """Sums over threads in any order would show; the tests run with one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def small_data_is_no_change():
    """Results of runs on fewer pictures go where those of the plain command go, experiments included."""
    from common.reproduce.command import Command

    real = Command.changes.fget
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Command, "changes", property(lambda self: [text for text in real(self) if not text.startswith("data.")])
        )
        yield


@pytest.fixture(scope="session", autouse=True)
def committed_results_left_out():
    """Reading all of them takes seconds in every part that is reproduced: for a page, and for claims at smoke scale,
    at which none are committed."""
    command = sys.modules.get("common.reproduce.command")
    with pytest.MonkeyPatch.context() as patch:
        if command is not None:
            collect_page, write_claims = command.collect_page, command._print_claims

            def claims_without_committed(asked, paper, tables, roots):
                write_claims(asked, paper, tables, roots[1:] if asked.scale == "smoke" else roots)

            patch.setattr(command, "collect_page", lambda roots, page: collect_page(roots[1:], page))
            patch.setattr(command, "_print_claims", claims_without_committed)
        yield


@pytest.fixture(scope="session", autouse=True)
def rows_one_after_the_other():
    """Processes of their own take longer to start than the small runs of a test take."""
    module = sys.modules.get("common.reproduce.side_by_side")
    with pytest.MonkeyPatch.context() as patch:
        if module is not None:
            patch.setattr(module, "at_once", lambda: 1)
        yield


@pytest.fixture(scope="session", autouse=True)
def small_pictures_at_smoke_scale():
    """Drawn once, without axes, layout and palette: at full size those of a part take two seconds. As a user gets them
    tests look at the plots of the oblique paper, and at the pictures of tests/test_common_report_page.py and others."""
    drawing, figures = (sys.modules.get(f"common.{name}") for name in ("base.drawing", "report.figures"))
    with pytest.MonkeyPatch.context() as patch:
        if figures is not None:
            from matplotlib.backends.backend_agg import FigureCanvasAgg

            write_picture = drawing.write_picture

            def small(figure, path, **options):
                path = Path(path)
                of_table = path.stem.startswith("table") or path.with_suffix(".json").exists()
                if path.parent.name != "smoke" or ("oblique_topology" in path.parts and not of_table):
                    return write_picture(figure, path, **options)
                for axis in figure.axes:
                    axis.set_axis_off()
                figure.set_layout_engine("none")
                figure.set_dpi(20)
                drawn = io.BytesIO()
                FigureCanvasAgg(figure).print_png(drawn)  # savefig draws it twice
                return drawing.write_atomically(path, drawn.getvalue())

            for module in (drawing, figures):
                patch.setattr(module, "write_picture", small)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_curves_of_runs():
    """Drawing the log of a smoke run takes a third of a second; tests/test_common_run_curves.py draws."""
    from common.run import curves

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "plot_run", lambda *arguments: None)
        yield


class SmokeParts:
    """Tables and figures of a paper at smoke scale in one folder, for the tests of all files to read.

    A part runs when it is first asked for, and rows that several parts share are trained once. Results are written as
    those of an unchanged command, experiments included.

    Args:
        paper: the folder.
        folder: takes runs and results.
        overrides: of every part.
    """

    def __init__(self, paper: str, folder: Path, overrides: tuple[str, ...]) -> None:
        self.paper, self.folder, self.overrides = paper, folder, overrides
        self.done, self.items = set(), {}

    def __call__(self, part: str, seeds: int = 1) -> Path:
        """Where the part's tables and plots lie."""
        if part not in self.done:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("common.reproduce.command.Command.changes", [])
                patch.setattr("common.reproduce.command.collect_page", lambda roots, page: None)
                hash_of = importlib.import_module("common.base.dependencies")._hash_of  # the code stays as it is
                patch.setattr("common.base.dependencies._hash_of", functools.cache(hash_of))
                for kind in ("SceneDataset", "AnnotationTask", "ClassificationTask"):
                    self._draw_once(patch, getattr(importlib.import_module("common.data.scenes"), kind))
                few = ["--scale", "smoke", "--seeds", str(seeds), *self.overrides]
                if part == "temperature_order":  # which chooses it itself
                    few.remove("run.evaluate_every=0")
                main = importlib.import_module(f"{self.paper}.reproduce").main
                main([part, *few, "--output", str(self.folder)])
            self.done.add(part)
        return self.folder / "results" / self.paper / part / "smoke"

    def _draw_once(self, patch: pytest.MonkeyPatch, kind: type) -> None:
        """Rows of a table read the same few scenes, and drawing them takes longer than a smoke run's steps."""
        draw = kind.__getitem__

        def item(data_set, index):
            key = (int(index), str(vars(data_set)))
            if key not in self.items:
                self.items[key] = draw(data_set, index)
            return copy.deepcopy(self.items[key])

        patch.setattr(kind, "__getitem__", item)

    def write_page(self) -> None:
        """The page that each part would have written anew, once."""
        page = importlib.import_module("common.report.page")
        page.collect_page([self.folder / "results"], self.folder / "report.html")


@pytest.fixture(scope="session")
def oblique(tmp_path_factory) -> SmokeParts:
    few = ("data.num_test=16", "data.num_labelled=8", "run.evaluate_every=0")
    return SmokeParts("oblique_topology", tmp_path_factory.mktemp("oblique"), few)


@pytest.fixture(scope="session")
def euclip(tmp_path_factory) -> SmokeParts:
    few = (
        "optim.steps=2", "optim.warmup_steps=0", "optim.global_batch_size=16", "data.num_train=24", "data.num_val=8",
        "data.num_test=8", "data.num_labelled=8", "run.evaluate_every=0", "run.save_every=0",
    )  # fmt: skip
    return SmokeParts("euclip", tmp_path_factory.mktemp("euclip"), few)


@pytest.fixture(scope="session")
def committed_tables() -> list:
    """All tables of the committed results, which take half a second to read."""
    return importlib.import_module("common.report.page").collect([ROOT / "results"])


@pytest.fixture(scope="session")
def committed_claims(committed_tables) -> list:
    """The claims of every paper, judged by the committed results, which takes three seconds."""
    return importlib.import_module("common.report.page").collect_claims(committed_tables)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Local real data; tests that need it skip with a reason where it is not there."""
    folder = os.environ.get("VL_DATA_DIR")
    if not folder or not Path(folder).is_dir():
        pytest.skip("VL_DATA_DIR is not set to a folder with the local data sets")
    return Path(folder)
