"""All that tests/test_launch.py asks of two processes, in one start; the slow tests start theirs by Accelerate."""

import contextlib
import io
import json
import sys
from pathlib import Path

import torch
from processes import as_launched

import scripts.check_distributed as check
from common import distributed, info_nce
from oblique_topology import train


def checked(*arguments: str) -> dict:
    """Exit status and output of scripts/check_distributed.py; the process group stays for the next question."""
    check.leave_process_group = distributed.wait_for_everyone
    sys.argv = ["check_distributed.py", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            check.main()
        except SystemExit as ended:
            return {"status": ended.code, "output": output.getvalue()}


def constant(tensor: torch.Tensor, gather=info_nce.gather_with_gradient) -> torch.Tensor:
    """A gather without its gradient: each process sees the others' embeddings as constants."""
    first = distributed.rank() * len(tensor)
    full = gather(tensor).detach().clone()
    full[first : first + len(tensor)] = tensor
    return full


def trained_and_checked(folder: Path, *overrides: str) -> None:
    as_launched()
    sys.argv = ["train.py", *overrides, "--output-dir", str(folder)]
    train.main()
    report = {"right": checked("--json", str(folder / "errors.json"))}
    info_nce.gather_with_gradient = constant
    report["wrong"] = checked()
    if distributed.is_main_process():
        (folder / "report.json").write_text(json.dumps(report))
