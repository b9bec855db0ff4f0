"""Runs of rows that tests train in this process, and the values that their logs hold."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from common.base.arguments import rows_of
from common.base.config import load_row
from common.base.provenance import ROOT
from common.data.pairs import open_training_pairs
from common.report.claims.expressions import EXPERIMENT
from common.report.claims.ours import our_cells
from common.report.table import read_table
from common.run.checkpoint import last_checkpoint
from common.run.folder import RunFiles
from common.run.log import read_log


def row_config(paper: str, row: str, *overrides: str, scale: str = "smoke") -> Any:
    """The config of a row of image-caption pairs, as paper/train.py reads it."""
    config_class = importlib.import_module(f"{paper}.config").Config
    return load_row(config_class, ROOT / paper, ROOT / paper / "configs" / f"{row}.yaml", scale, list(overrides))


def rows_of_paper(folder: Path) -> list[str]:
    """A paper's rows without those that it does not print: other losses, locked towers."""
    return [row for row in rows_of(folder) if not row.startswith(("beyond_", "lit_"))]


def trained(
    paper: str, config: Any, folder: Path, resume: bool = False, accelerator: Accelerator | None = None, **identity: Any
) -> RunFiles:
    """paper/train.py with a config, on one process; `identity` is of the files."""
    pairs, files = open_training_pairs(config.data, config.run.seed), RunFiles(folder, identity)
    accelerator = Accelerator(cpu=True) if accelerator is None else accelerator
    importlib.import_module(f"{paper}.train").train(config, pairs, files, resume, accelerator, "test")
    return files


def called(main: Callable[[], Any], *words: Any, name: str = "script") -> Any:
    """A script's `main` with these words on its command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, words)])
        return main()


def lines(files: RunFiles, event: str = "train") -> list[dict[str, Any]]:
    """A log's records of one kind."""
    return [record for record in read_log(files.log) if record["event"] == event]


def logged(files: RunFiles, name: str = "loss") -> list[Any]:
    """A value of every logged step."""
    return [record[name] for record in lines(files)]


def weights(files: RunFiles) -> dict[str, torch.Tensor]:
    """A model's tensors in the last checkpoint."""
    return last_checkpoint(files.checkpoints).model_tensors()


def values_of(path: Path) -> dict[str, tuple[float, ...]]:
    """The numbers of a table as claims name them in an experiment: name -> value per seed."""
    table = read_table(path)
    cells = our_cells([table])[table.scale].items()
    return {cell.column: ours.number.values for cell, ours in cells if cell.table == EXPERIMENT}
