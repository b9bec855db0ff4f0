"""Names of the shapes and their indices; apart from the other attributes because the masks need nothing else."""

SHAPES = ("circle", "square", "triangle", "diamond", "star", "cross", "ring", "heart", "moon", "arrow")
CIRCLE, SQUARE, TRIANGLE, DIAMOND, STAR, CROSS, RING, HEART, MOON, ARROW = range(10)
