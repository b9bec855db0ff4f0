"""For tests/test_launch.py, in two gloo processes: three steps under FSDP2 and alone, then a whole checkpoint."""

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from processes import as_launched
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from common.accumulation import MicroBatches
from common.base.settings import OptimConfig
from common.distributed import mean_over_processes, rank, wait_for_everyone
from common.geometry import Geometry, Sphere, clamp_scalars_
from common.info_nce import symmetric_info_nce
from common.run.checkpoint import last_checkpoint, save_checkpoint
from common.run.schedule import build_optimizer
from common.sharded import copy_whole_, whole, whole_weights
from common.tiled import geometry_loss
from euclip.geometry import Hyperbolic
from scripts.check_distributed import DIM, batch, build


def train(micro_batches, optimizer, loss_of, images, token_ids):
    """Losses of three steps, and the gradients of the first."""
    model, losses, gradients = micro_batches.model, [], {}
    for _ in range(3):
        loss = loss_of(*micro_batches.embed(images, token_ids))
        micro_batches.backward(loss)
        if not gradients:
            gradients = {name: whole(weight.grad).clone() for name, weight in model.named_parameters()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clamp_scalars_([*model.logit_scale.scalars(), *model.geometry.scalars()])
        losses.append(mean_over_processes(loss).item())
    return losses, gradients


def compare(folder: Path, geometry: type[Geometry], tile: int, size: int | None) -> dict:
    """Losses and largest differences, FSDP2 on two processes against one alone."""
    accelerator = Accelerator(cpu=True)
    images, token_ids = batch(16, torch.float64)
    share = slice(8 * rank(), 8 * rank() + 8)

    single = build(torch.float64, geometry())

    def whole_loss(x, y, scale):
        return symmetric_info_nce(scale * single.geometry.similarity(x, y))

    at_once = MicroBatches(accelerator, single, None)
    expected, right = train(at_once, build_optimizer(single, OptimConfig()), whole_loss, images, token_ids)

    sharded, mesh = build(torch.float64, geometry()), init_device_mesh("cpu", (dist.get_world_size(),))
    for tower in (sharded.image_tower, sharded.text_tower):
        for block in tower.transformer.blocks:
            fully_shard(block, mesh=mesh)
    sharded = fully_shard(sharded, mesh=mesh)
    optimizer = build_optimizer(sharded, OptimConfig())

    def share_loss(x, y, scale):
        return geometry_loss(x, y, sharded.geometry, scale, tile=tile)

    in_parts = MicroBatches(accelerator, sharded, size)
    losses, gradients = train(in_parts, optimizer, share_loss, images[share], token_ids[share])
    plain = build(torch.float64, geometry())
    copy_whole_(plain, sharded)
    with torch.no_grad():
        embedding_error = (plain.encode_image(images) - single.encode_image(images)).abs().max().item()
        with whole_weights(sharded):
            outside = sharded.image_tower(images)
        embedding_error += (outside - plain.image_tower(images)).abs().max().item()
    save_checkpoint(folder, 3, sharded, optimizer, {})
    wait_for_everyone()
    loaded = build(torch.float64, geometry())
    last_checkpoint(folder).load_model(loaded)
    gradient_errors = {
        name: ((gradients[name] - wanted).abs().max() / wanted.abs().max()).item() for name, wanted in right.items()
    }
    errors = {
        name: (one - other).abs().max().item()
        for (name, one), other in zip(loaded.named_parameters(), single.parameters(), strict=True)
    }
    return {
        "single": expected,
        "sharded": losses,
        "gradient_errors": gradient_errors,
        "embedding_error": embedding_error,
        "checkpoint_errors": errors,
    }


def compare_all(folder: Path) -> dict[str, dict]:
    """Every case's report."""
    as_launched()
    hyperbolic = partial(Hyperbolic, DIM, squared=True)
    cases = {
        "sphere": (Sphere, 0, None),
        "hyperbolic": (hyperbolic, 0, None),
        "hyperbolic in micro-batches": (hyperbolic, 0, 3),
        "hyperbolic in tiles and micro-batches": (hyperbolic, 3, 3),
    }
    return {name: compare(folder / name, *case) for name, case in cases.items()}
