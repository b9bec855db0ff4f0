"""GeoMM in your momentum-contrast loop: past keys compared along the graph of their clusters.

python -m examples.geodesic_pool

No picture: two recalls at the end.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common.geometry import clamp_scalars_
from common.logit_scale import LogitScale
from common.momentum import MomentumEncoder
from common.pool import pool_info_nce
from examples.loop import noisy_pairs
from geomm.pool import GeodesicPool

EMA_MOMENTUM = 0.99


def train(towers: nn.ModuleList, pools: list, logit_scale: LogitScale, batches) -> MomentumEncoder:
    """Trains two towers against past keys of their momentum copies; returns the copies."""
    copies = MomentumEncoder(towers)
    optimizer = torch.optim.AdamW([*towers.parameters(), *logit_scale.parameters()], lr=1e-3)
    for step, samples in enumerate(batches):
        queries = [F.normalize(tower(of_it), dim=1) for tower, of_it in zip(towers, samples)]
        with torch.no_grad():
            keys = [F.normalize(copy(of_it), dim=1) for copy, of_it in zip(copies.encoder, samples)]
        losses = []
        for query, key, pool in zip(queries, reversed(keys), pools):  # images against texts, texts against images
            pool.rebuild(step)  # every graph_update_interval steps, once the pool is full
            candidates = pool.open(key)  # past keys and those of this step; writes nothing
            loss, _ = pool_info_nce(candidates, query, logit_scale(), candidates.columns)
            losses.append(loss)
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
        clamp_scalars_(logit_scale.scalars())
        copies.update_(towers, EMA_MOMENTUM)
        for key, pool in zip(reversed(keys), pools):
            pool.insert(key)  # after the step, over the oldest
    return copies


def main() -> dict[str, float]:
    """R@1 among 256 by the cosine, after training with each distance."""
    recalls = {}
    for distance in ("cosine", "geodesic"):  # both with the same pools
        torch.manual_seed(0)
        towers = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))
        pools = [
            GeodesicPool(
                1024,
                32,
                distance,
                branching=(16, 2),
                num_neighbors=3,
                attach="knn_local_st",
                graph_update_interval=8,
                geodesic_from_step=40,  # with random weights paths along the data have no meaning
            )
            for _ in ("texts", "pictures")
        ]
        train(towers, pools, LogitScale(), noisy_pairs(steps=100))
        with torch.no_grad():
            (samples,) = noisy_pairs(steps=1, batch_size=256)
            pictures, texts = (F.normalize(tower(of_it), dim=1) for tower, of_it in zip(towers, samples))
        right = (pictures @ texts.T).argmax(dim=1) == torch.arange(256)
        recalls[distance] = 100 * right.float().mean().item()
        print(f"{distance}: R@1 {recalls[distance]:.1f} %; chance level {100 / 256:.1f} %")
    return recalls


if __name__ == "__main__":
    main()
