"""Evaluates a run, a model folder, a file of weights or a hub name: retrieval and zero-shot classification, as JSON.

    vlgeometry evaluate outputs/runs/euclip/<run>/seed0
    vlgeometry evaluate openai/clip-vit-base-patch32 --json data.source=shards data.root=/data/flickr8k

MODEL comes first. A run or published model of this repository is evaluated by the evaluate.py of its paper, other
weights by euclip/published.py; what follows MODEL is passed on to it (its options: MODEL --help).

Several models, or --tasks, give one table of all models on the same test sets:

    vlgeometry evaluate RUN openai/clip-vit-base-patch32 --tasks retrieval,zero_shot --csv table.csv
    vlgeometry evaluate RUN RUN --tasks probe,knn,hierarchy --json

(its options: MODEL MODEL --help).
"""

import argparse
import importlib
import itertools
import re
import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.base.arguments import Parser
from common.run.launch import run_or_explain
from common.run.named_models import evaluator_of


def is_table(words: list[str]) -> bool:
    """Whether arguments ask for a table: several models, or an option that only the table has."""
    models = list(itertools.takewhile(lambda word: not re.match(r"-|\w+\.[\w.]+=", word), words))
    return len(models) > 1 or any(word.partition("=")[0] in ("--tasks", "--csv") for word in words)


def main() -> None:
    if is_table(sys.argv[1:]):
        importlib.import_module(f"{__package__ or 'scripts'}.evaluate_table").main()
        return
    parser = Parser(__doc__)
    parser.add_argument("model", metavar="MODEL", help="folder, checkpoint, file of weights or name on the hub")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="options and section.key=value")
    options = parser.parse_args()
    script = importlib.import_module(evaluator_of(options.model))
    sys.argv = [sys.argv[0], "--checkpoint", options.model, *options.arguments]
    script.main()


if __name__ == "__main__":
    run_or_explain(main)
