"""README.md of a run's folder: what the run is, and the commands that resume, evaluate, compare and publish it."""

import shlex
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from torch import nn

from common.base.files import read_json, shown, write_atomically
from common.base.places import ROOT, is_installed, papers
from common.distributed import is_main_process
from common.evaluation.protocol import evaluation_text
from common.run.folder import RunFiles

DECIDES = "nothing"


@cache
def _template() -> jinja2.Template:
    # compiled once for all runs of a process
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    ).get_template("readme.md.jinja")


def write_readme(
    files: RunFiles, state: Mapping[str, Any], model: nn.Module, steps: int, typed: str, is_finished: bool = False
) -> None:
    """Writes the file on the main process: when the run opens, and once more when it is evaluated.

    Args:
        typed: the command of this process, which resumes a run without `files.command`.
    """
    if not is_main_process():
        return
    config = state["config"]
    results = read_json(files.evaluation) if is_finished and config["run"]["test"] else None
    parameters = list(model.parameters())
    text = _template().render(
        state=state,
        config=config,
        files=files,
        folder=shlex.quote(shown(files.folder)),
        steps=steps,
        is_finished=is_finished,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        cwd=shlex.quote(str(Path.cwd())),
        resume=files.command or typed,
        commands=_commands(files, state["paper"], state.get("kind", "")),
        results=evaluation_text(results) if results else "",
    )
    write_atomically(files.readme, text)


def _commands(files: RunFiles, paper: str, kind: str) -> dict[str, str]:
    # Purpose -> shell line, of the scripts that exist here and take a run of this kind.
    folder, python = shlex.quote(shown(files.folder)), shlex.quote(sys.orig_argv[0])
    lines = {}
    if paper in papers():
        lines["Evaluate the last checkpoint, on other data if you name them"] = "evaluate", folder
        lines["Compare it with other runs"] = "compare", f"{folder} OTHER_RUN"
    if not kind:
        name = shlex.quote(files.identity.get("row", files.folder.name))
        arguments = f"--run {folder} --licence LICENCE --output published/{name}"
        lines["Publish it as a model folder (`--to USER/NAME` uploads it)"] = "publish", arguments
    scripts = {name: ROOT / "scripts" / f"{name}.py" for name, _ in lines.values()}
    return {
        purpose: f"vlgeometry {name} {arguments}"
        if is_installed()
        else f"{python} {shlex.quote(shown(scripts[name]))} {arguments}"
        for purpose, (name, arguments) in lines.items()
        if is_installed() or scripts[name].is_file()
    }
