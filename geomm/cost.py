"""Cost of the distance compared with the cosine: time of training steps and, on a GPU, memory (Table 6, C7, C8).

Weights, images and words are random. Models take turns, so that a busy machine slows all of them.
"""

import statistics
import time
from collections.abc import Mapping
from types import SimpleNamespace

import torch

from common.distributed import wait_for_device
from common.geometry import unit
from common.methods.albef import Albef, mask_words, replaceable_words
from common.report.table import Measured, measured_over_seeds
from common.reproduce.command import Command
from common.run.evaluation import this_device
from common.run.folder import precision_of
from common.run.schedule import build_optimizer
from geomm.config import Config
from geomm.graph_report import pool_report
from geomm.graph_table import figures_of_graphs
from geomm.model import build_model, mask_id_of
from geomm.pool import GeodesicPool

DECIDES = "evaluation"

# of published vocabularies; others have some hundred
NUM_WORDS = {"bert_wordpiece": 30_522, "albef_wordpiece": 30_522, "clip_bpe": 49_408}
PAD, CLS, END = 0, 2, 3
RANDOM = "random weights, pictures and words"
TIMED_STEPS = {"smoke": 1}  # of each model; at other scales 5


class Steps:
    """Training steps of one model on one batch; a call makes one and returns its time."""

    def __init__(self, config: Config, device: torch.device) -> None:
        data, model, batch = config.data, config.model, config.optim.global_batch_size
        tokenizer = SimpleNamespace(
            vocabulary_size=NUM_WORDS.get(data.tokenizer, 200), pad_id=PAD, cls_id=CLS, end_id=END, unknown_id=1
        )
        self.config, self.device = config, device
        self.model = build_model(config, tokenizer).to(device).train()
        self.optimizer = build_optimizer(self.model, config.optim)
        self.images = torch.randn(batch, *self.model.image_tower.picture_shape, device=device)
        lengths = torch.randint(6, data.context_length + 1, (batch, 1))
        places = torch.arange(data.context_length)
        ids = torch.randint(4, tokenizer.vocabulary_size, (batch, data.context_length))
        ids = ids.where(places < lengths - 1, END).where(places < lengths, PAD).where(places > 0, CLS)
        self.token_ids, self.mask_id = ids.to(device), mask_id_of(tokenizer)
        self.words = replaceable_words(tokenizer.vocabulary_size, (PAD, CLS, END, self.mask_id), device)
        self.pools = self.model.image_pool, self.model.text_pool
        keys = unit(torch.randn(config.method.queue_size, model.embedding_dim, device=device))
        for pool in self.pools:
            pool.insert(keys)

    def rebuild(self) -> float:
        """Seconds for rebuilding both graphs; 0 for the cosine."""
        method = self.config.method
        # the first step that rebuilds a graph also where there is one
        step = -(-method.geodesic_from_step // method.graph_update_interval) * method.graph_update_interval
        return self._timed(lambda: [pool.rebuild(step) for pool in self.pools])

    def __call__(self) -> float:
        """Seconds of a step without a rebuild."""
        return self._timed(self._step)

    def _step(self) -> None:
        method, model = self.config.method, self.model
        views = {"momentum_images": self.images} if method.base == "tcl" else {}
        masked = ()
        if isinstance(model, Albef):
            masked = None, None
            if method.mask_probability:
                masked = mask_words(self.token_ids, self.words, self.mask_id, (PAD, CLS), method.mask_probability)
        bf16 = precision_of(self.config.run) == "bf16"
        model.update_momentum_encoders(method.ema_momentum)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            losses = model(self.images, self.token_ids, *masked, method.distillation, **views)
        sum(losses.parts.values()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        model.insert(losses.image_keys, losses.text_keys)

    def _timed(self, work) -> float:
        wait_for_device(self.device)
        start = time.perf_counter()
        work()
        wait_for_device(self.device)
        return time.perf_counter() - start


def seconds_of_100_steps(configs: Mapping[str, Config], rounds: int, seed: int) -> dict[str, float]:
    """Median time of 100 training steps with their share of rebuilds, by name.

    Args:
        rounds: timed steps of each model, after one for warm-up.
        seed: of weights and inputs.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        models = {name: Steps(config, this_device()) for name, config in configs.items()}
        timings = {name: ([], []) for name in models}
        for _ in range(rounds + 1):
            for name, model in models.items():
                rebuilds, steps = timings[name]
                rebuilds.append(model.rebuild())
                steps.append(model())
    return {
        name: 100 * (statistics.median(steps[1:]) + statistics.median(rebuilds[1:]) / interval)
        for name, (rebuilds, steps) in timings.items()
        for interval in [configs[name].method.graph_update_interval]
    }


def peak_gigabytes(config: Config, seed: int) -> float | None:
    """Peak memory of a rebuild and a training step on a CUDA device, in GB; None elsewhere."""
    device = this_device()
    if device.type != "cuda":
        return None
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Steps(config, device)
        model()  # makes the optimiser's state, which later steps hold beside their activations
        torch.cuda.reset_peak_memory_stats(device)
        model.rebuild()
        model()
    return torch.cuda.max_memory_allocated(device) / 1e9


def graph_of_random_keys(config: Config, seed: int) -> dict[str, float]:
    """What `OF_GRAPHS` reports of the graph whose cost is measured: of a pool full of random keys."""
    method, dim = config.method, config.model.embedding_dim
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pool = GeodesicPool.from_config(method, dim)
        pool.insert(unit(torch.randn(method.queue_size, dim)))
        pool.rebuild(method.geodesic_from_step)
        return figures_of_graphs([pool_report(pool)])


def costs(command: Command, configs: dict[str, Config], memory: bool = True) -> dict[str, dict[str, Measured]]:
    """Cells of time and, on a GPU, of memory by method; seeds are repetitions."""
    rounds = TIMED_STEPS.get(command.scale, 5)
    times = [seconds_of_100_steps(configs, rounds, seed) for seed in command.seeds]
    cells = {}
    for method, config in configs.items():
        measurements = {"seconds": [seconds_of[method] for seconds_of in times]}
        if memory:
            measurements["memory"] = [peak_gigabytes(config, seed) for seed in command.seeds]
        cells[method] = {
            key: measured_over_seeds(
                values, command.seeds, scale=command.scale, data=RANDOM, protocol=f"median of {rounds} steps, in turns"
            )
            for key, values in measurements.items()
            if None not in values
        }
    return cells
