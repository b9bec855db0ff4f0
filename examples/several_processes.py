"""Several processes: the loss gathers embeddings with their gradients; DDP averages the gradients of the weights.

torchrun --nproc-per-node 2 -m examples.several_processes
python -m examples.several_processes                        one process, the same losses

No picture: the point is that the numbers are equal.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.distributed import leave_process_group, mean_over_processes, rank, world_size
from common.encoders.two_towers import TwoTowers
from common.geometry import clamp_scalars_
from common.info_nce import contrastive_loss
from common.logit_scale import LogitScale
from euclip.geometry import Hyperbolic


def main(steps: int = 5, global_batch_size: int = 16) -> list:
    """The losses of the global batch, the same for any number of processes."""
    torch.manual_seed(0)  # the same weights everywhere
    # towers, geometry and logit scale are one module, so that DDP and checkpoints include the scalars
    towers = [nn.Sequential(nn.Flatten(), nn.Linear(12, 8)) for _ in range(2)]
    bare = TwoTowers(*towers, Hyperbolic(dim=8, squared=False), LogitScale())
    model = DistributedDataParallel(bare) if world_size() > 1 else bare
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, texts = torch.randn(2, global_batch_size, 12)
    share = slice(rank() * global_batch_size // world_size(), (rank() + 1) * global_batch_size // world_size())
    losses = []
    for _ in range(steps):
        # DDP's forward pass embeds this process's share; the loss compares it with the embeddings of all processes
        image_embeddings, text_embeddings, logit_scale = model(images[share], texts[share])
        loss = contrastive_loss(image_embeddings, text_embeddings, bare.geometry, logit_scale)
        optimizer.zero_grad()
        loss.backward()  # DDP's mean over processes is the gradient of the global loss: no factor of world_size
        optimizer.step()
        clamp_scalars_(bare.scalars())
        losses.append(mean_over_processes(loss.detach()).item())
    return losses


if __name__ == "__main__":
    if "RANK" in os.environ:  # set by torchrun
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    losses = main()
    if rank() == 0:
        print(f"{world_size()} processes: losses {', '.join(f'{loss:.4f}' for loss in losses)}")
    leave_process_group()
