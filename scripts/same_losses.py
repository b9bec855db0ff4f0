"""Whether a change of the code leaves training as it was: smoke rows of every method, to the last bit.

    python scripts/same_losses.py run outputs/before         before the change: logs and evaluations of all rows
    python scripts/same_losses.py run outputs/after          after it
    python scripts/same_losses.py compare outputs/before outputs/after

`run` makes its folder, which must not exist; `run --tree FOLDER` trains with the code of another checkout. Speeds and
times are not compared. Both runs must use the same machine and libraries. Exit status 1 if a value differs.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.base.arguments import Parser
from common.base.provenance import ROOT
from common.run.launch import run_or_explain

# script -> rows, of which several differ in what their step does
ROWS = {
    "euclip/train.py": ("table4_clip", "table4_euclip", "table4_meru", "table4_elliptic"),
    "oblique_topology/train.py": ("table2_multi", "ablation_geodesic_fixed"),
    "contrastive_basics/train.py": ("table1_ours", "table1_late_interaction", "negatives_batch", "negatives_queue"),
    "contrastive_basics/pretrain.py": ("vision_simclr", "vision_moco_v3", "vision_simsiam", "vision_random_weights"),
    "geomm/train.py": ("clip", "clip_geo", "albef_geo", "tcl_geo", "mafa_geo"),
    "geomm/pretrain.py": ("vision_moco_v2_geo", "vision_swav_geo"),
    "geomm/finetune.py": ("vqa_albef_geo", "visual_entailment_albef_geo", "nlvr2_albef_geo"),
}
SETTINGS = ("run.log_every=1", "run.num_workers=0")
NOT_COMPARED = ("seconds", "samples_per_second", "data_wait_share", "folder")


def train_rows(tree: Path, output: Path) -> None:
    """Trains every row at smoke scale below `output`, a new folder, with the code of a checkout."""
    output.mkdir(parents=True)
    for script, rows in ROWS.items():
        for row in rows:
            folder = output / Path(script).with_suffix("") / row
            print(f"{script} {row}", flush=True)
            config = f"{script.split('/')[0]}/configs/{row}.yaml"
            command = [sys.executable, script, "--config", config, "--scale", "smoke", "--output-dir", str(folder)]
            log = output / f"{row}.txt"
            environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
            with log.open("w") as screen:
                finished = subprocess.run(
                    [*command, *SETTINGS], cwd=tree, env=environment, stdout=screen, stderr=subprocess.STDOUT
                )
            if finished.returncode:
                raise ValueError(f"{script} {row} ended with status {finished.returncode}; see {log}")


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, number or text) of everything in a JSON value that is compared."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            if not any(word in str(key) for word in NOT_COMPARED):
                yield from leaves(part, f"{path}.{key}")
    else:
        yield path, value


def values_of(folder: Path) -> dict[str, Any]:
    """Logged values of a run by step, and the metrics of its evaluation."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    values = {f"{line['event']} {line['step']}": line for line in lines if "loss" in line}
    evaluations = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))["evaluations"]
    values["evaluation"] = {role: evaluation["metrics"] for role, evaluation in evaluations.items()}
    return dict(leaves(values))


def compare(before: Path, after: Path) -> int:
    """Prints the values that differ; returns how many."""
    differences = values = 0
    for script, rows in ROWS.items():
        for row in rows:
            one, two = (values_of(folder / Path(script).with_suffix("") / row) for folder in (before, after))
            values += len(one)
            # NaN differs from itself, so texts are compared; a value that is new is no difference
            unlike = [key for key in one if repr(one[key]) != repr(two.get(key))]
            differences += len(unlike)
            for key in unlike[:5]:
                print(f"{script} {row}{key}: {one.get(key)} before, {two.get(key)} after")
    print(f"{values} values of {sum(map(len, ROWS.values()))} rows compared, {differences} differ")
    return differences


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("action", choices=("run", "compare"))
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout whose code is run")
    arguments = parser.parse_args()
    if arguments.action == "run":
        train_rows(arguments.tree.resolve(), arguments.folders[0].resolve())
    elif compare(*arguments.folders):
        sys.exit(1)


if __name__ == "__main__":
    run_or_explain(main)
