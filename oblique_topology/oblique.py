"""The geodesic distance on a product of spheres (oblique paper, submission, Sec. 3.1 and Table 1, "Geo").

The paper's proposal, the sum of inner products, the map onto the manifold and the distance of pairs are in
common/oblique.py, as another paper and the map of embeddings use them. An embedding is (batch, num_spheres,
sphere_dim), unit norm on the last axis.
"""

import torch

from common.distances import safe_sqrt, squared_arccos
from common.oblique import paired_oblique_geodesic_distance  # noqa: F401
from common.vectors import at_least_float32, check_same_dim, full_precision


def oblique_geodesic_distance(image_embeddings: torch.Tensor, text_embeddings: torch.Tensor) -> torch.Tensor:
    """Geodesic distance of the product manifold, sqrt of the sum of squared angles (Table 1, "Geo").

    The paper prints the range [0, m pi]; the formula gives [0, sqrt(m) pi]. It takes one matrix product per sphere and
    one arc cosine per sphere and pair.

    Args:
        image_embeddings: (num_images, num_spheres, sphere_dim).
        text_embeddings: (num_texts, num_spheres, sphere_dim).
    Returns:
        (num_images, num_texts), radians in [0, sqrt(num_spheres) * pi]; smaller is closer.
    Raises:
        ValueError: if the last two axes differ; the message gives both shapes.
    """
    check_same_dim(image_embeddings, text_embeddings)
    with full_precision(image_embeddings):
        images, texts = at_least_float32(image_embeddings), at_least_float32(text_embeddings)
        total = images.new_zeros(len(images), len(texts))
        for sphere in range(images.shape[1]):
            total = total + squared_arccos(images[:, sphere] @ texts[:, sphere].T)
        return safe_sqrt(total)
