"""Cost of further class tokens: arithmetic, parameters and memory are counted, time is measured (C4, C18).

The paper's sizes are counted on the meta device, which needs neither memory nor time. The scale's sizes are counted
too, and a training step is timed. The embedding size is constant: m tokens of dim / m numbers.
"""

import statistics
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from common.base.config import ConfigError
from common.data.scenes import scene_words
from common.data.tokenizer import WordTokenizer
from common.distributed import is_main_process, wait_for_device
from common.encoders.two_towers import TwoTowers
from common.info_nce import symmetric_info_nce
from common.report.table import Table
from common.reproduce.command import Command
from common.reproduce.findings import Findings, findings_table
from common.reproduce.rows import PaperCode
from common.run.evaluation import this_device
from common.run.kept_memory import bytes_kept_for_backward
from oblique_topology.config import Config
from oblique_topology.model import build_model

DECIDES = "evaluation"

TOKENS = (1, 2, 4, 8, 16, 32)
SIZES = {  # key -> label, row that has the sizes, scale
    "b16": ("ViT-B/16", "table2_multi.yaml", "paper"),
    "s16": ("ViT-S/16", "ablation_multi_64_8.yaml", "paper"),
}
BERT_WORDS = SimpleNamespace(vocabulary_size=30_522, end_id=102)  # all that a text tower needs to be built
SCENE_WORDS = WordTokenizer.from_words(scene_words())
ROUNDS, BATCH = {"smoke": (2, 8), "demo": (9, 64)}, 64  # timed steps of each model, pairs a step; other scales as demo
COLUMNS = {
    "vision": ("FLOPs, image tower", "ratio to one token", "lower"),
    "text": ("FLOPs, text tower", "ratio to one token", "lower"),
    "both": ("FLOPs, both towers", "ratio to one token", "lower"),
    "parameters": ("parameters", "millions", "lower"),
    "encoder_parameters": ("parameters but the projections'", "millions", "lower"),
    "kept": ("kept for backward", "ratio to one token", "lower"),
    "time": ("time of a training step", "ratio to one token", "lower"),
}


def encoder_macs(tokens: int, layers: int, width: int) -> int:
    """Multiply-accumulates of the blocks of one tower by the paper's formula (B, appendix): t l (12 d^2 + 2 t d)."""
    return tokens * layers * (12 * width**2 + 2 * tokens * width)


def features_by_all_tokens(tower: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """The value of tower(inputs), with all tokens in every block as the paper counts; ours drops unread tokens in the
    last block."""
    return tower.forward_tokens(inputs)[:, : tower.num_class_tokens] @ tower.projection


def forward_flops(tower: nn.Module, inputs: torch.Tensor) -> int:
    """FLOPs of a forward pass of all tokens, with tower and inputs on the meta device; a multiply-add counts as two."""
    from torch.utils.flop_counter import FlopCounterMode  # imports sympy, which no other part needs

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        features_by_all_tokens(tower, inputs)
    return counter.get_total_flops()


def counted(config: Config, tokenizer: Any) -> dict[str, float]:
    """Costs of one pair, counted; the tokenizer has vocabulary_size and end_id.

    Returns:
        "vision", "text", "both": FLOPs of a forward pass. "parameters", "encoder_parameters": number in millions, with
        and without the projections. "kept": bytes saved for the backward pass, with attention weights formed.
    """
    with torch.device("meta"):
        model = build_model(config, tokenizer).eval()  # with all patches
        images = torch.empty(1, *model.image_tower.picture_shape)
        token_ids = torch.zeros(1, config.data.context_length, dtype=torch.long)
    vision, text = forward_flops(model.image_tower, images), forward_flops(model.text_tower, token_ids)
    weights = list(model.parameters())
    projections = {id(model.image_tower.projection), id(model.text_tower.projection)}

    def features() -> torch.Tensor:
        towers = (model.image_tower, images), (model.text_tower, token_ids)
        return sum(features_by_all_tokens(*tower_inputs).sum() for tower_inputs in towers)

    return {
        "vision": vision,
        "text": text,
        "both": vision + text,
        "parameters": sum(weight.numel() for weight in weights) / 1e6,
        "encoder_parameters": sum(weight.numel() for weight in weights if id(weight) not in projections) / 1e6,
        "kept": bytes_kept_for_backward(features, weights),
    }


def step_seconds(model: TwoTowers, images: torch.Tensor, token_ids: torch.Tensor) -> float:
    """Wall-clock seconds of a forward and backward pass with the loss, on this process only; the device is idle."""
    wait_for_device(images.device)
    start = time.perf_counter()
    image_embeddings, text_embeddings, logit_scale = model(images, token_ids)
    symmetric_info_nce(logit_scale * model.geometry.similarity(image_embeddings, text_embeddings)).backward()
    wait_for_device(images.device)
    seconds = time.perf_counter() - start
    model.zero_grad(set_to_none=True)
    return seconds


def time_ratios(configs: Sequence[Config], tokenizer: Any, batch: int, rounds: int, seed: int) -> list[float]:
    """Time of a training step of each model over that of the first: the median over rounds of the ratio in a round.

    A round is one step of every model in turn, so that a busy machine slows all of them. The first round warms up and
    does not count.

    Args:
        batch: pairs a step.
        rounds: without the first.
        seed: of weights and inputs, which do not change the time.
    """
    device = this_device()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        models = [build_model(config, tokenizer).to(device).train() for config in configs]
        images = torch.randn(batch, *models[0].image_tower.picture_shape).to(device)
        length = configs[0].data.context_length
        token_ids = torch.randint(4, tokenizer.vocabulary_size, (batch, length)).to(device)
    seconds = [[step_seconds(model, images, token_ids) for model in models] for _ in range(rounds + 1)][1:]
    return [statistics.median(row[index] / row[0] for row in seconds) for index in range(len(models))]


def class_token_cost(command: Command, code: PaperCode) -> list[Table]:
    """Costs of 1 to 32 class tokens at the paper's sizes and at those of the scale.

    Raises:
        ConfigError: for overrides; sizes are those of the rows.
    """
    command.refuse_search()
    if command.changes:
        raise ConfigError(f"{command.part} takes no settings, got {' '.join(command.changes)}")
    if not is_main_process():
        return []
    here = f"scale_{command.scale}"
    sizes = dict(SIZES)
    if command.scale != "paper":  # SIZES has the paper's
        sizes[here] = (f"scale {command.scale}, Table 2", "table2_multi.yaml", command.scale)
        sizes[f"{here}_ablation"] = (f"scale {command.scale}, Table 4", "ablation_multi_64_8.yaml", command.scale)
    rounds, batch = ROUNDS.get(command.scale, ROUNDS["demo"])
    rows, values = {}, {}
    for key, (label, row, scale) in sizes.items():
        numbers = _with_tokens(code, row, scale, 1).model.embedding_dim
        tokens = [number for number in TOKENS if 2 * number <= numbers]  # a sphere has two numbers or more
        configs = [_with_tokens(code, row, scale, number) for number in tokens]
        words = BERT_WORDS if key in SIZES else SCENE_WORDS
        costs = [counted(config, words) for config in configs]
        # ratios to one token, as absolute costs of different sizes do not compare; parameters stay in millions
        for number, cost in zip(tokens, costs):
            name = f"{key}_m{number}"
            rows[name] = f"{label}, {number} token{'s' if number > 1 else ''}"
            ratios = {column: value / costs[0][column] for column, value in cost.items()}
            ratios |= {column: cost[column] for column in ("parameters", "encoder_parameters")}
            values |= {(name, column): [value] * len(command.seeds) for column, value in ratios.items()}
        # only these sizes are trained here; the paper's would need its machine
        if key == here:
            timed = [time_ratios(configs, words, batch, rounds, seed) for seed in command.seeds]
            for index, number in enumerate(tokens):
                values[f"{key}_m{number}", "time"] = [ratios[index] for ratios in timed]
    findings = Findings(
        name="class_token_cost",
        caption="What further class tokens cost, at equal size of the embedding.",
        data="no data: random weights",
        protocol="per pair",
        settings={"tokens": TOKENS, "rounds": rounds, "batch": batch},
        rows=rows,
        columns=COLUMNS,
        values=values,
        notes=[
            "FLOPs of a forward pass, counted with the patch convolution and the projections; the paper's formula for "
            "the blocks alone gives 1.0795 for the image tower of ViT-B/16 with 16 tokens and 1.0972 for both.",
            "Kept for backward: activations, with attention weights formed; a fused attention kernel keeps less.",
            f"Time, at the sizes of Table 2: models take turns, median of {rounds} rounds of {batch} pairs.",
            "Parameters: 30,522 word pieces at the paper's sizes, else the words of scenes.",
        ],
    )
    return [findings_table(command, code.name, findings)]


def _with_tokens(code: PaperCode, row: str, scale: str, number: int) -> Config:
    """A row's sizes with `number` class tokens."""
    settings = ["method.geometry=oblique", f"method.num_spheres={number}", "method.multi_token=true"]
    return code.config(row, scale, settings)
