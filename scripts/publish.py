"""Makes a model folder of a run: weights, config, vocabulary, measured numbers and a model card; --to uploads it.

python scripts/publish.py --run outputs/runs/euclip/<run>/seed0 --licence cc-by-4.0 --output published/my-euclip
python euclip/evaluate.py --checkpoint published/my-euclip data.root=<folder of the data>
python euclip/train.py --config table4_euclip --scale demo model.init=published/my-euclip

Nothing leaves the machine without --to, which creates the repository if there is none (huggingface_hub, your login).
A model on the hub is named by its repository in the place of the folder.
"""

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import yaml

from common.base.arguments import Parser
from common.base.config import ConfigError
from common.base.files import read_json, write_atomically
from common.base.provenance import hash_of
from common.data.text import tokenizer_from_json
from common.evaluation.protocol import HEADLINES
from common.run.checkpoint import Checkpoint, CheckpointError, named_checkpoint, new_folder, write_published
from common.run.evaluation_files import read_evaluations
from common.run.folder import RunFiles, RunName
from common.run.launch import run_or_explain


def publish(run: Path, folder: Path, licence: str) -> None:
    """Writes the model folder of a finished run."""
    checkpoint = named_checkpoint(run)
    if not (run / "config.yaml").is_file():  # a checkpoint, which holds none
        raise ConfigError(f"--run {run} has no config.yaml; expected the folder of a run")
    state = {**checkpoint.state, "config": without_places(checkpoint.state["config"])}
    if "kind" in state:
        raise CheckpointError(
            f"{checkpoint.path} is a model of kind {state['kind']!r}; expected a run of images and captions"
        )
    with new_folder(folder) as place:
        write_published(replace(checkpoint, state=state), place)
        (place / "config.yaml").write_text(yaml.safe_dump(state["config"], sort_keys=False), encoding="utf-8")
        words = tokenizer_from_json(state["tokenizer"]).vocabulary
        (place / "vocabulary.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
        saved = read_evaluations(RunFiles(run))
        measured = saved[0]["evaluations"] if saved and saved[0]["step"] == state["step"] else {}
        if measured:
            shutil.copy(run / "evaluation.json", place)
        write_atomically(place / "README.md", card(checkpoint, run, measured, licence, folder.name))


def without_places(settings: Any) -> Any:
    """Settings with the last part of every absolute path: where files lie on one machine is nothing to publish."""
    if isinstance(settings, dict):
        return {key: without_places(value) for key, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [without_places(value) for value in settings]
    is_place = isinstance(settings, str) and Path(settings).expanduser().is_absolute()
    return Path(settings).name if is_place else settings


def card(checkpoint: Checkpoint, run: Path, measured: dict[str, Any], licence: str, name: str) -> str:
    """The model card, in Markdown with the hub's header; `measured`: evaluations by role."""
    state = checkpoint.state
    config, paper = without_places(state["config"]), state["paper"]
    row = RunName.of(run)
    has_towers = any(tensor.startswith("image_tower.") for tensor in checkpoint.model_tensors())
    # where the data lie is not published
    is_elsewhere = config["data"].get("root") or config["data"] != state["config"]["data"]
    data = " data.root=<folder of the data>" if is_elsewhere else ""
    start = ""
    if has_towers and row.scale:  # GeoMM's encoders start no other run
        start = f"\npython {paper}/train.py --config {row.row} --scale {row.scale} model.init={name}"
    what = f"row {row.row} at {row.scale} scale" if row.scale else "settings of its own"
    step, steps = state["step"], config["optim"]["steps"]
    after = f"{step:,} steps" if step == steps else f"{step:,} of {steps:,} steps: its training is not finished"
    made_of = "".join(f"\n- started from {key}: {value}" for key, value in state.get("initial_weights", {}).items())
    files = read_json(RunFiles(run).dependencies)  # of an installed package the revision is the version alone
    code = f", hash of its files {hash_of(files)}" if files else ""
    recipe = yaml.safe_dump({part: config[part] for part in ("method", "model", "optim")}, sort_keys=False)
    lines = []
    for role, one in measured.items():
        for metric in [name for name in HEADLINES if name in one["metrics"]]:  # all are in the JSON
            chance = one["chance"].get(metric)
            chance_level = "-" if chance is None else f"{100 * chance:.1f}"
            number = f"{100 * one['metrics'][metric]:.1f}"
            lines.append(f"| {role} | {one['protocol'].get('data', '-')} | {metric} | {number} | {chance_level} |")
    table = "\n".join(lines)
    numbers = f"""Percent. What each number means, its protocol and test set, is in `evaluation.json`.

| role | data | metric | this model | chance level |
|---|---|---|---|---|
{table}"""
    return f"""---
license: {licence}
library_name: contrastive-geometry
pipeline_tag: zero-shot-image-classification
---
# {name}

Two towers for pictures and captions, compared by the geometry `{state["geometry"]}`; folder `{paper}` of the
repository, {what}, seed {config["run"]["seed"]}, after {after}.

```sh
python {paper}/evaluate.py --checkpoint {name}{data}{start}
```

## Data

- trained on {state["training_data"]}
- words: `vocabulary.txt`; pictures: {state["transform"]}{made_of}

## Recipe

Code: {state["training_revision"]}{code}; all settings are in `config.yaml`.

```yaml
{recipe}```

## Measured

{numbers if lines else "This model was not evaluated; the command above does so."}

## Limits

The numbers hold for the data and the scale named above and for no other. The model repeats what is in its training
captions, wrong or not; nobody has looked at it for bias or safety. It reproduces no number of a paper unless its data
are the paper's.

## Licence

Weights: {licence}. The data that they were trained on have licences of their own.
"""


def upload(folder: Path, repository: str) -> str:
    """Creates a model repository on the Hugging Face hub, if there is none, and uploads the folder; its address."""
    from huggingface_hub import HfApi

    hub = HfApi()
    hub.create_repo(repository, exist_ok=True)
    return str(hub.upload_folder(repo_id=repository, folder_path=folder))


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--run", required=True, type=Path, help="folder of a finished run, .../seed0")
    parser.add_argument("--licence", required=True, help="of the weights, as the hub names it: mit, cc-by-4.0, ...")
    parser.add_argument("--output", type=Path, help="new folder; default published/<row>-<seed>")
    parser.add_argument("--to", help="repository on the Hugging Face hub, user/name; without it nothing is uploaded")
    given = parser.parse_args()
    run = given.run.resolve()  # "." has no name
    folder = given.output or Path("published") / f"{run.parent.name}-{run.name}"
    publish(given.run, folder, given.licence)
    print(f"{folder}: {', '.join(sorted(file.name for file in folder.iterdir()))}")
    if given.to is not None:
        print(f"uploaded to {upload(folder, given.to)}")


if __name__ == "__main__":
    run_or_explain(main)
