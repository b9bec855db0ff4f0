"""Is the contrastive gradient right on your machines? Compares W processes with one, for every parameter.

    ACCELERATE_USE_CPU=true accelerate launch --config_file scripts/accelerate/cpu_two_processes.yaml \\
        scripts/check_distributed.py
    accelerate launch --config_file scripts/accelerate/multi_gpu.yaml scripts/check_distributed.py

Every process knows the whole batch. Each trains on its share through Accelerate, DDP and the gather with gradient, and
then computes loss and gradients of the whole batch alone. Exit status 1 if they differ by more than the tolerance.
"""

import argparse
import json
import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from accelerate import Accelerator

from common.distributed import leave_process_group, mean_over_processes, rank, world_size
from common.encoders.text import BidirectionalTextTransformer
from common.encoders.two_towers import TwoTowers
from common.encoders.vision import VisionTransformer
from common.geometry import Sphere
from common.info_nce import contrastive_loss, symmetric_info_nce
from common.logit_scale import LogitScale
from common.run.session import launched_accelerator, run_or_explain

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}  # worst error of a tensor over its largest entry


def build(dtype: torch.dtype) -> TwoTowers:
    """The same small two-tower model on every process."""
    torch.manual_seed(0)
    return TwoTowers(
        VisionTransformer(32, 8, 48, 2, 4, 24),
        BidirectionalTextTransformer(60, 12, 48, 2, 4, 24),
        Sphere(),
        LogitScale(1 / 0.07, maximum=100.0),
    ).to(dtype)


def batch(size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The same global batch of random pictures and captions on every process."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(size, 3, 32, 32, generator=generator, dtype=dtype)
    return images, torch.randint(2, 60, (size, 12), generator=generator)


def compare(accelerator: Accelerator, dtype: torch.dtype, global_batch_size: int) -> dict[str, float]:
    """Worst relative error of the loss and of each parameter's gradient, distributed against alone.

    The error of a tensor is max |ours - alone| / max |alone|.
    """
    images, token_ids = batch(global_batch_size, dtype)
    share = slice(rank() * global_batch_size // world_size(), (rank() + 1) * global_batch_size // world_size())
    device = accelerator.device
    model = accelerator.prepare(build(dtype).to(device))
    image_embeddings, text_embeddings, logit_scale = model(images[share].to(device), token_ids[share].to(device))
    loss = contrastive_loss(image_embeddings, text_embeddings, Sphere().similarity, logit_scale)
    accelerator.backward(loss)

    alone = build(dtype).to(device)
    image_embeddings, text_embeddings, logit_scale = alone(images.to(device), token_ids.to(device))
    expected = symmetric_info_nce(logit_scale * Sphere().similarity(image_embeddings, text_embeddings))
    expected.backward()

    errors = {"loss": float((mean_over_processes(loss) - expected.detach()).abs() / expected.detach().abs())}
    ours = dict(accelerator.unwrap_model(model).named_parameters())
    for name, parameter in alone.named_parameters():
        largest = parameter.grad.abs().max().clamp(min=torch.finfo(dtype).tiny)
        errors[name] = float((ours[name].grad - parameter.grad).abs().max() / largest)
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--global-batch-size", type=int, default=48)
    parser.add_argument("--json", type=Path, default=None, help="write the errors of every parameter here")
    arguments = parser.parse_args()
    accelerator = launched_accelerator(mixed_precision="no")
    if arguments.global_batch_size % world_size():
        raise ValueError(
            f"--global-batch-size {arguments.global_batch_size} cannot be dealt out evenly to {world_size()} processes"
        )
    failed, report = False, {"processes": world_size(), "device": str(accelerator.device.type)}
    for dtype, tolerance in TOLERANCE.items():
        errors = compare(accelerator, dtype, arguments.global_batch_size)
        worst = max(errors, key=errors.get)
        failed |= not errors[worst] <= tolerance
        name = str(dtype).removeprefix("torch.")
        report[name] = errors
        accelerator.print(
            f"{world_size()} processes against one, {name}: loss differs by {errors['loss']:.1e}, the worst of "
            f"{len(errors) - 1} gradients by {errors[worst]:.1e} ({worst}); allowed {tolerance:.0e}: "
            f"{'ok' if errors[worst] <= tolerance else 'WRONG'}"
        )
    if arguments.json is not None and accelerator.is_main_process:
        arguments.json.write_text(json.dumps(report, indent=1))
    leave_process_group()
    sys.exit(int(failed))


if __name__ == "__main__":
    run_or_explain(main)
