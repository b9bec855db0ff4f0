"""The least that a loss asks of a geometry, made of functions."""

from common.geometry import both_ways


class Comparison:
    """Compares by a function of all pairs; partners by another one, or by the diagonal of the first."""

    def __init__(self, similarity, paired_similarity=None):
        self.similarity = similarity
        self.paired_similarity = paired_similarity or (lambda x, y: similarity(x, y).diagonal())

    def directions(self, image_embeddings, text_embeddings):
        return both_ways(self.similarity(image_embeddings, text_embeddings))
