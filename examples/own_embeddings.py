"""Retrieval and zero-shot classification of your embeddings, by any geometry.

python -m examples.own_embeddings

No picture: three numbers, one with its interval.
"""

import torch

from common.evaluation.accuracy import accuracy_at_k
from common.evaluation.retrieval import hits_by_image, recalls, retrieval_metrics, retrieval_ranks
from common.evaluation.zero_shot import class_scores
from common.geometry import Sphere
from common.report.statistics import bootstrap_interval


def main() -> dict[str, float]:
    torch.manual_seed(0)
    geometry = Sphere()

    # 100 images with five captions each; text_to_image is the image of each caption
    image_features = torch.randn(100, 32)
    text_to_image = torch.arange(100).repeat_interleave(5)
    text_features = image_features[text_to_image] + 1.5 * torch.randn(500, 32)
    similarity = geometry.similarity(geometry.embed_image(image_features), geometry.embed_text(text_features))
    ranks = retrieval_ranks(similarity, text_to_image)  # ties go to the lower index
    metrics = retrieval_metrics(ranks)
    hits = hits_by_image(recalls(ranks), text_to_image, len(image_features))  # of the queries of each image
    low, high = bootstrap_interval(hits["t2i_recall_at_1"])  # 95 %, over images
    print(f"R@1 {100 * metrics['i2t_recall_at_1']:.1f} i2t, {100 * metrics['t2i_recall_at_1']:.1f} t2i", end=" ")
    print(f"[{100 * low:.1f}, {100 * high:.1f}]")

    # 10 classes, 3 prompt templates: (num_templates, num_classes, dim)
    classes, labels = torch.randn(10, 32), torch.arange(100) % 10
    prompts = geometry.embed_text(classes + 0.5 * torch.randn(3, 10, 32))
    pictures = geometry.embed_image(classes[labels] + 2 * torch.randn(100, 32))
    scores = class_scores(pictures, prompts, geometry.similarity, geometry.mean, average="embeddings")
    metrics["accuracy"] = accuracy_at_k(scores, labels, k=1)
    print(f"zero-shot accuracy {100 * metrics['accuracy']:.1f} of 100")
    return metrics


if __name__ == "__main__":
    main()
