"""Similarities and cones of EuCLIP as the papers print them, of one pair, on lists of numbers; with few imports.

Points are as a model embeds them: on the sphere, in the plane, or tangent vectors at the origin of the hyperboloid.
"""

import math


def dot(x: list[float], y: list[float]) -> float:
    """Inner product."""
    return math.fsum(a * b for a, b in zip(x, y))


def length(x: list[float]) -> float:
    """Euclidean norm."""
    return math.sqrt(dot(x, x))


def lifted(u: list[float], c: float) -> tuple[list[float], float]:
    """Space and time of the exponential map at the origin (MERU, Eq. 6)."""
    z = math.sqrt(c) * length(u)
    space = [math.sinh(z) / z * a if z else a for a in u]
    return space, math.sqrt(1 / c + dot(space, space))


def lorentz_product(u: list[float], v: list[float], c: float) -> float:
    """Of the lifted points (MERU, Eq. 1)."""
    (x, x_time), (y, y_time) = lifted(u, c), lifted(v, c)
    return dot(x, y) - x_time * y_time


def distance(name: str, x: list[float], y: list[float], c: float = 1.0) -> float:
    """Geodesic distance of a geometry's embeddings (Section 5 of the specification)."""
    if name in ("sphere", "elliptic"):
        return math.acos(max(-1.0, min(1.0, dot(x, y))))
    if name.startswith("euclidean"):
        return length([a - b for a, b in zip(x, y)])
    return math.acosh(max(1.0, -c * lorentz_product(x, y, c))) / math.sqrt(c)


def similarity(name: str, x: list[float], y: list[float], c: float = 1.0) -> float:
    """What the logit scale multiplies."""
    if name == "sphere":
        return dot(x, y)
    return -(distance(name, x, y, c) ** (2 if name.endswith("squared") else 1))


def exterior_angle(name: str, text: list[float], image: list[float], c: float = 1.0) -> float:
    """Between the ray through the text and the geodesic from it to the image (Section 7)."""
    if name.startswith("euclidean"):
        gap = [b - a for a, b in zip(text, image)]
        cosine = dot(gap, text) / (length(gap) * length(text))
    else:
        (x, x_time), (_, y_time) = lifted(text, c), lifted(image, c)
        inner = c * lorentz_product(text, image, c)
        cosine = (y_time + x_time * inner) / (length(x) * math.sqrt(inner * inner - 1))
    return math.acos(max(-1.0, min(1.0, cosine)))


def half_aperture(name: str, text: list[float], min_radius: float, c: float = 1.0) -> float:
    """Of the cone behind the text (Section 7)."""
    if name.startswith("euclidean"):
        return math.asin(min(1.0, min_radius / length(text)))
    return math.asin(min(1.0, 2 * min_radius / (math.sqrt(c) * length(lifted(text, c)[0]))))


def excess(name: str, text: list[float], image: list[float], min_radius: float, c: float = 1.0) -> float:
    """Exterior angle minus half-aperture: positive outside of the cone, where it is the entailment loss."""
    return exterior_angle(name, text, image, c) - half_aperture(name, text, min_radius, c)
