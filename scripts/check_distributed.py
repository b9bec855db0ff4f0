"""Is the contrastive gradient right on your machines? Compares W processes with one, for every parameter.

    ACCELERATE_USE_CPU=true accelerate launch --config_file scripts/accelerate/cpu_two_processes.yaml \\
        scripts/check_distributed.py
    accelerate launch --config_file scripts/accelerate/multi_gpu.yaml scripts/check_distributed.py

Every process knows the whole batch. Each trains on its share through Accelerate and DDP, with the gather with gradient
or in tiles, at once or in micro-batches, and then computes loss and gradients of the whole batch alone and at once.
Exit status 1 if they differ by more than the tolerance.
"""

import itertools
import json
import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from accelerate import Accelerator

from common.accumulation import MicroBatches
from common.base.arguments import Parser
from common.distributed import leave_process_group, mean_over_processes, rank, world_size
from common.encoders.text import BidirectionalTextTransformer
from common.encoders.two_towers import TwoTowers
from common.encoders.vision import VisionTransformer
from common.geometry import Geometry, Sphere
from common.info_nce import symmetric_info_nce
from common.logit_scale import LogitScale
from common.run.launch import launched_accelerator, run_or_explain
from common.tiled import geometry_loss
from euclip.geometry import Hyperbolic

DIM = 24
GEOMETRIES = {"cosine": Sphere, "hyperbolic": lambda: Hyperbolic(DIM, squared=True)}  # without and with own scalars
SCHEMES = {"at once": (0, None), "in tiles": (5, None), "in tiles and micro-batches": (5, 4)}  # tile, micro-batch
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}  # worst error of a tensor over its largest entry


def build(dtype: torch.dtype, geometry: Geometry | None = None) -> TwoTowers:
    """The same small two-tower model on every process; None = the sphere."""
    torch.manual_seed(0)
    return TwoTowers(
        VisionTransformer(32, 8, 48, 2, 4, DIM),
        BidirectionalTextTransformer(60, 12, 48, 2, 4, DIM),
        Sphere() if geometry is None else geometry,
        LogitScale(1 / 0.07, maximum=100.0),
    ).to(dtype)


def batch(size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The same global batch of random pictures and captions on every process."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(size, 3, 32, 32, generator=generator, dtype=dtype)
    return images, torch.randint(2, 60, (size, 12), generator=generator)


def compare(
    accelerator: Accelerator, dtype: torch.dtype, global_batch_size: int, geometry: str, scheme: str
) -> dict[str, float]:
    """Worst relative error of the loss and of each parameter's gradient, distributed against alone and at once.

    The error of a tensor is max |ours - alone| / max |alone|.
    """
    tile, micro_batch_size = SCHEMES[scheme]
    images, token_ids = batch(global_batch_size, dtype)
    share = slice(rank() * global_batch_size // world_size(), (rank() + 1) * global_batch_size // world_size())
    device = accelerator.device
    bare = build(dtype, GEOMETRIES[geometry]()).to(device)
    model = accelerator.prepare(bare)
    micro_batches = MicroBatches(accelerator, model, micro_batch_size)
    embedded = micro_batches.embed(images[share].to(device), token_ids[share].to(device))
    loss = geometry_loss(embedded[0], embedded[1], bare.geometry, embedded[2], tile=tile)
    micro_batches.backward(loss)

    single = build(dtype, GEOMETRIES[geometry]()).to(device)
    image_embeddings, text_embeddings, logit_scale = single(images.to(device), token_ids.to(device))
    expected = symmetric_info_nce(logit_scale * single.geometry.similarity(image_embeddings, text_embeddings))
    expected.backward()

    errors = {"loss": float((mean_over_processes(loss) - expected.detach()).abs() / expected.detach().abs())}
    ours = dict(bare.named_parameters())
    for name, parameter in single.named_parameters():
        largest = parameter.grad.abs().max().clamp(min=torch.finfo(dtype).tiny)
        errors[name] = float((ours[name].grad - parameter.grad).abs().max() / largest)
    return errors


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--global-batch-size", type=int, default=48)
    parser.add_argument("--json", type=Path, default=None, help="write the errors of every case and parameter here")
    arguments = parser.parse_args()
    accelerator = launched_accelerator(mixed_precision="no")
    if arguments.global_batch_size % world_size():
        raise ValueError(
            f"--global-batch-size {arguments.global_batch_size} cannot be dealt out evenly to {world_size()} processes"
        )
    failed, report = False, {"processes": world_size(), "device": str(accelerator.device.type)}
    for dtype, tolerance in TOLERANCE.items():
        name = str(dtype).removeprefix("torch.")
        report[name] = {}
        for geometry, scheme in itertools.product(GEOMETRIES, SCHEMES):
            errors = compare(accelerator, dtype, arguments.global_batch_size, geometry, scheme)
            worst = max(errors, key=errors.get)
            failed |= not errors[worst] <= tolerance
            report[name][f"{geometry}, {scheme}"] = errors
            accelerator.print(
                f"{world_size()} processes against one, {name}, {geometry} {scheme}: loss differs by "
                f"{errors['loss']:.1e}, the worst of {len(errors) - 1} gradients by {errors[worst]:.1e} ({worst}); "
                f"allowed {tolerance:.0e}: {'ok' if errors[worst] <= tolerance else 'WRONG'}"
            )
    if arguments.json is not None and accelerator.is_main_process:
        arguments.json.write_text(json.dumps(report, indent=1))
    leave_process_group()
    sys.exit(int(failed))


if __name__ == "__main__":
    run_or_explain(main)
