"""A CUDA device without a GPU: its memory is that of the host, its kernels are those of the CPU.

    import fake_cuda
    fake_cuda.enable()                                # before the project is imported
    with fake_cuda.counted() as work:
        loss.backward()
    work.num_waits, work.waits, work.kernels          # see `Work`

Processes that are started with this folder on PYTHONPATH have it from the start (sitecustomize.py). It needs torch's
ordinary build with CUDA, a C++ compiler, and 30 to 90 s once to compile device.cpp. Mixed devices, CPU generators for
device tensors and `.numpy()` of them fail as on a GPU. It says nothing about speed.
"""

import collections
import contextlib
import hashlib
import importlib.util
import os
import shutil
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NAME = "fake_cuda_device"
_extension: Any = None


def missing() -> str:
    """Why there can be no such device here; empty if nothing is missing."""
    import torch

    if torch.version.cuda is None:
        return "torch is a build without CUDA"
    if torch.cuda.is_available():
        return "there is a real CUDA device: make test-gpu"
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "there is no C++ compiler"
    if shutil.which("ninja", path=_path()) is None:
        return "ninja is not installed (requirements-dev.txt)"
    return ""


def _path() -> str:
    # programs of the environment whose Python this is, also where it is not activated
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))


def build() -> Any:
    """The compiled device.cpp. All checkouts with the same file and build of torch share it: it is compiled once."""
    import logging

    import filelock
    import torch
    from torch.utils.cpp_extension import load

    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "no CUDA runtime is found"
    os.environ["PATH"] = _path()
    source = (HERE / "device.cpp").read_bytes()
    made_by = f"{torch.__version__} {torch.version.git_version} {torch.version.cuda} {sys.version}"
    key = hashlib.sha256(source + made_by.encode()).hexdigest()[:12]
    cache = os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions")
    folder = Path(cache) / f"fake_cuda_{key}"
    folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder / "building"):
        if (folder / "whole").exists():  # `load` compiles again for an environment in another place
            return _imported(folder / f"{NAME}.so")
        (folder / "lock").unlink(missing_ok=True)  # torch's, of a build that was killed: it would wait for ever
        if not (folder / "device.cpp").exists():  # a new file would be compiled again
            (folder / "device.cpp").write_bytes(source)
        extension = load(NAME, [str(folder / "device.cpp")], extra_cflags=["-O1"], build_directory=str(folder))
        (folder / "whole").touch()
        return extension


def _imported(library: Path) -> Any:
    spec = importlib.util.spec_from_file_location(NAME, library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def enable() -> None:
    """Puts the device in place of CUDA, for the rest of the process."""
    global _extension
    if _extension is not None:
        return
    import torch

    _extension = build()
    _pretend(torch)
    _extension.enable()


def is_enabled() -> bool:
    return _extension is not None


def _pretend(torch: Any) -> None:
    """Replaces what Python asks of the driver."""
    properties = SimpleNamespace(
        name="CUDA device in host memory", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132,
        gcnArchName="", warp_size=32, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536,
        shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
        L2_cache_size=50 * 2**20,
    )  # fmt: skip

    class Stream:
        device, cuda_stream = torch.device("cuda", 0), 0

        def __init__(self, *arguments: Any, **options: Any) -> None:
            pass

        def __enter__(self) -> "Stream":
            return self

        def __exit__(self, *error: Any) -> None:
            pass

        def record_event(self, event: Any = None) -> Any:
            return event

        def wait_stream(self, other: Any) -> None:
            pass

        wait_event = wait_stream

        def synchronize(self) -> None:
            pass

    def gives(value: Any) -> Any:
        return lambda *arguments, **options: value

    cuda = torch.cuda
    for name, value in {
        "_lazy_init": None, "is_available": True, "is_initialized": True, "_is_compiled": True, "device_count": 1,
        "_device_count_nvml": 1, "current_device": 0, "set_device": None, "get_device_name": properties.name,
        "get_device_properties": properties, "get_device_capability": (9, 0), "is_bf16_supported": True,
        "synchronize": None, "empty_cache": None, "manual_seed": None, "manual_seed_all": None,
        "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0,
        "reset_peak_memory_stats": None, "mem_get_info": (80 * 2**30, 80 * 2**30), "_exchange_device": 0,
        "_maybe_exchange_device": 0, "is_current_stream_capturing": False, "current_stream": Stream(),
        "default_stream": Stream(), "stream": contextlib.nullcontext(), "set_rng_state_all": None,
    }.items():  # fmt: skip
        setattr(cuda, name, gives(value))
    cuda.random.manual_seed = cuda.random.manual_seed_all = gives(None)
    cuda._initialized, cuda.Stream = True, Stream
    # one random state: that of the host
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.get_rng_state_all = lambda: [torch.get_rng_state()]
    for name, value in {
        "is_available": True, "device_count": 1, "current_accelerator": torch.device("cuda"),
        "set_device_index": None, "current_device_index": 0, "synchronize": None,
    }.items():  # fmt: skip
        setattr(torch.accelerator, name, gives(value))
    torch.amp.autocast_mode.is_autocast_available = gives(True)
    with contextlib.suppress(ImportError):
        from torch.cuda.amp import common

        common.amp_definitely_not_available = gives(False)
    plain_clone = torch.UntypedStorage.clone

    def clone(storage: Any) -> Any:
        if storage.device.type != "cuda":
            return plain_clone(storage)
        return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage).clone().untyped_storage()

    torch.UntypedStorage.clone = clone


@dataclass
class Work:
    """What a GPU would have had to do.

    waits: (operator, place in the project's code) -> how often the host waited for the device there.
    kernels: operator -> (calls, bytes read and written, floating-point operations of matrix products).
    """

    waits: collections.Counter = field(default_factory=collections.Counter)
    kernels: dict[str, list[float]] = field(default_factory=dict)

    @property
    def num_waits(self) -> int:
        return self.waits.total()

    @property
    def num_kernels(self) -> int:
        """Calls that move bytes; views and allocations launch nothing."""
        return int(sum(calls for calls, bytes_moved, _ in self.kernels.values() if bytes_moved))

    @property
    def bytes_moved(self) -> float:
        return sum(bytes_moved for _, bytes_moved, _ in self.kernels.values())

    @property
    def product_flops(self) -> float:
        return sum(flops for *_, flops in self.kernels.values())


@contextlib.contextmanager
def counted() -> Iterator[Work]:
    """The work within the context; complete when it ends."""
    work = Work()

    def waited(reason: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if _is_ours(frame.filename)]
        places = (f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno}" for frame in reversed(frames[-3:]))
        work.waits[reason, " < ".join(places)] += 1

    _extension.start_counting(waited)
    try:
        yield work
    finally:
        work.kernels = _extension.stop_counting()


def _is_ours(file: str) -> bool:
    path = Path(file)
    return path.is_relative_to(ROOT) and not path.is_relative_to(HERE) and ".venv" not in path.parts


if __name__ == "__main__":
    reason = missing()
    if not reason:
        print("compiling a CUDA device in host memory, for tests (about a minute, once) ...")
        build()
    else:
        print(f"tests of a CUDA device without a GPU will be skipped: {reason}")
