"""How many seeds a difference of x takes, for each claim: from the spread over seeds and images only.

python -m common.report.seeds oblique_topology --scale photos
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from common.base.arguments import Parser
from common.base.config import SCALES
from common.base.places import PAPERS, ROOT
from common.report.claims.decide import seeds_for
from common.report.claims.ours import our_cells
from common.report.claims.read import load_claims, load_paper_tables
from common.report.page import collect


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("paper", choices=PAPERS)
    parser.add_argument("--scale", default="demo", choices=SCALES)
    parser.add_argument(
        "--results", nargs="+", type=Path, default=[Path("results"), Path("outputs/results")], help="folders to search"
    )
    options = parser.parse_args(arguments)
    tables = (entry.table for entry in collect(options.results) if not entry.changed)
    ours = our_cells([table for table in tables if table.paper == options.paper])
    printed = load_paper_tables(ROOT / options.paper / "paper_tables.yaml")
    print(f"{options.paper}, scale {options.scale}: seeds with which a difference of x shows in four cases of five")
    for claim in load_claims(ROOT / options.paper / "claims.yaml", printed):
        if count := seeds_for(claim, printed, ours[options.scale], options.scale):
            print(f"{claim.id:<10} {'more images, not seeds' if math.isinf(count) else count}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
