"""Started by tests/test_launch.py on two gloo processes: three steps under FSDP2 and alone, then a whole checkpoint."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from common.distributed import leave_process_group, mean_over_processes, rank
from common.info_nce import contrastive_loss, symmetric_info_nce
from common.run.checkpoint import last_checkpoint, save_checkpoint
from common.run.config import OptimConfig
from common.run.schedule import build_optimizer
from common.run.session import with_encode_methods
from scripts.check_distributed import batch, build


def train(model, optimizer, loss_of, images, token_ids):
    losses = []
    for _ in range(3):
        image_embeddings, text_embeddings, logit_scale = model(images, token_ids)
        loss = loss_of(image_embeddings, text_embeddings, logit_scale)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        model.logit_scale.clamp_()
        losses.append(mean_over_processes(loss).item())
    return losses


def main(folder: Path) -> None:
    Accelerator(cpu=True)  # starts the process group
    images, token_ids = batch(16, torch.float64)
    share = slice(8 * rank(), 8 * rank() + 8)

    alone = build(torch.float64)

    def whole_loss(x, y, scale):
        return symmetric_info_nce(scale * alone.geometry.similarity(x, y))

    expected = train(alone, build_optimizer(alone, OptimConfig()), whole_loss, images, token_ids)

    sharded, mesh = build(torch.float64), init_device_mesh("cpu", (dist.get_world_size(),))
    for tower in (sharded.image_tower, sharded.text_tower):
        for block in tower.transformer.blocks:
            fully_shard(block, mesh=mesh)
    sharded = with_encode_methods(fully_shard(sharded, mesh=mesh))
    optimizer = build_optimizer(sharded, OptimConfig())

    def share_loss(x, y, scale):
        return contrastive_loss(x, y, sharded.geometry.similarity, scale)

    found = train(sharded, optimizer, share_loss, images[share], token_ids[share])
    with torch.no_grad():
        embedding_error = (sharded.encode_image(images) - alone.encode_image(images)).abs().max().item()
    save_checkpoint(folder / "checkpoints", 3, sharded, optimizer, {})
    if rank() == 0:
        loaded = build(torch.float64)
        last_checkpoint(folder / "checkpoints").load_model(loaded)
        errors = [
            (one - other).abs().max().item() for one, other in zip(loaded.parameters(), alone.parameters(), strict=True)
        ]
        report = {"alone": expected, "sharded": found, "embedding_error": embedding_error}
        (folder / "report.json").write_text(json.dumps({**report, "checkpoint_error": max(errors)}))
    leave_process_group()


main(Path(sys.argv[1]))
