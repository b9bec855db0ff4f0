"""How many digits the Lorentz distance keeps in float32: a table of measured errors against 60 digits.

    python scripts/lorentz_errors.py            about half a minute -> results/numerics/lorentz_distance.json and .md

Random tangent vectors u of 512 numbers, rounded to float32, and partners at a given distance from them; the error is
that of float32 arithmetic on these vectors, the largest of 40 pairs. Forms: that for matched pairs and its square, that
for all pairs (one matrix product), and the paper's arccosh as it stands.
"""

import json
import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import mpmath
import numpy as np
import torch

from common.base.arguments import Parser
from common.base.provenance import ROOT
from common.geometry import unit
from common.run.launch import run_or_explain
from euclip.lorentz import (
    MAX_RADIUS,
    exp_map0,
    lorentz_distance,
    lorentz_inner,
    paired_lorentz_distance,
    paired_squared_lorentz_distance,
)

CURVATURES = (0.1, 1.0, 10.0)
LENGTHS = (0.1, 1.0, 5.0, 20.0)  # of u
DISTANCES = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 20.0, 40.0)
FORMS = ("matched", "matched, squared", "all pairs", "arccosh")


def pairs_at(
    length: float, distance: float, c: float, direction: str = "any", num: int = 40, dim: int = 512
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Float32 tangent vectors and partners at about a distance.

    Args:
        length: |u|.
        distance: d(u, v).
        direction: from u to v: "any", or "ray" = along u.
    Returns:
        u and v, (num, dim) each, or None where float32 has no such pairs.
    """
    curvature = torch.tensor(c, dtype=torch.float64)
    first = length * unit(torch.randn(num, dim))
    step = unit(torch.randn(num, dim)) if direction == "any" else unit(first)
    low, high = torch.zeros(num, 1, dtype=torch.float64), torch.full((num, 1), 60.0, dtype=torch.float64)
    for _ in range(60):
        middle = (low + high) / 2
        short = paired_lorentz_distance(first.double(), first.double() + middle * step, curvature)[:, None] < distance
        low, high = torch.where(short, middle, low), torch.where(short, high, middle)
    second = (first.double() + middle * step).float()
    computed = paired_lorentz_distance(first.double(), second.double(), curvature)
    longest = max(first.norm(dim=1).max(), second.norm(dim=1).max()) * c**0.5
    return (first, second) if (computed / distance - 1).abs().max() < 0.5 and longest < MAX_RADIUS else None


def exact_distance(first: torch.Tensor, second: torch.Tensor, c: float) -> float:
    """arccosh(-c <x, y>_L) / sqrt(c) of the lifted points of two tangent vectors, (dim,) each, with 60 digits."""
    with mpmath.workdps(60):
        root_c = mpmath.sqrt(c)
        u, v = ([mpmath.mpf(value) for value in vector.tolist()] for vector in (first, second))
        u_norm, v_norm = mpmath.sqrt(mpmath.fdot(u, u)), mpmath.sqrt(mpmath.fdot(v, v))
        r, s = root_c * u_norm, root_c * v_norm
        cosine = mpmath.fdot(u, v) / (u_norm * v_norm)
        argument = mpmath.cosh(r) * mpmath.cosh(s) - mpmath.sinh(r) * mpmath.sinh(s) * cosine
        return float(mpmath.acosh(argument) / root_c)


def naive_distance(first: torch.Tensor, second: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """The paper's formula as it stands, in the dtype of the vectors: (num, dim) twice -> (num,)."""
    inner = lorentz_inner(exp_map0(first, c), exp_map0(second, c), c).diagonal()
    return torch.acosh((-c * inner).clamp(min=1)) / c.sqrt()


def errors(length: float, distance: float, c: float, direction: str = "any", num: int = 40) -> tuple[float, ...] | None:
    """Largest relative error of each form over `num` pairs; None: float32 has no such pairs."""
    pairs = pairs_at(length, distance, c, direction, num)
    if pairs is None:
        return None
    curvature = torch.tensor(c)
    expected = np.array([exact_distance(*pair, c) for pair in zip(*pairs)])

    def worst(values: torch.Tensor, power: int = 1) -> float:
        return float(np.abs(values.double().numpy() / expected**power - 1).max())

    return (
        worst(paired_lorentz_distance(*pairs, curvature)),
        worst(paired_squared_lorentz_distance(*pairs, curvature), 2),
        worst(lorentz_distance(*pairs, curvature).diagonal()),
        worst(naive_distance(*pairs, curvature)),
    )


def measure() -> list[dict[str, float]]:
    """One record for each curvature, length and distance of which float32 has pairs."""
    torch.manual_seed(0)
    records = []
    for c in CURVATURES:
        for length in LENGTHS:
            for distance in DISTANCES:
                if form_errors := errors(length, distance, c):
                    record = {"curvature": c, "length": length, "distance": distance}
                    records.append(record | {form: float(f"{error:.1e}") for form, error in zip(FORMS, form_errors)})
    return records


def markdown(records: list[dict[str, float]]) -> str:
    """The table for a reader."""
    lines = [
        "# Lorentz distance in float32",
        "",
        "Largest relative errors of 40 random pairs of tangent vectors with 512 numbers, against 60 digits",
        "(`scripts/lorentz_errors.py`). Matched pairs are the partners of a batch; all pairs come from one matrix",
        "product, exact enough where pairs are not close; arccosh is the formula of the paper as it stands. A row is",
        "missing where float32 has no such pairs.",
        "",
        "| curvature | norm of u | distance | " + " | ".join(FORMS) + " |",
        "|---|---|---|" + "---|" * len(FORMS),
    ]
    for record in records:
        place = f"{record['curvature']:g} | {record['length']:g} | {record['distance']:.0e}"
        lines.append(f"| {place} | " + " | ".join(f"{record[form]:.0e}" for form in FORMS) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "results" / "numerics", help="folder, default %(default)s"
    )
    output, records = parser.parse_args().output, measure()
    output.mkdir(parents=True, exist_ok=True)
    place = output / "lorentz_distance"
    place.with_suffix(".json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    place.with_suffix(".md").write_text(markdown(records), encoding="utf-8")
    print(f"-> {place}.json, {place}.md")


if __name__ == "__main__":
    run_or_explain(main)
