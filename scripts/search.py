"""Searches settings of some rows by validation numbers: one grid for all of them, seeds that no table uses.

    python scripts/search.py contrastive_basics --rows "table1_ours beyond_sigmoid" \\
        --set "optim.learning_rate=3e-4,1e-3,3e-3"

A setting with several values belongs to the rows alone; one with a single value also to the rows that they start from
(and with both only to these).
Writes search.json and search.md below <results>/<paper>/search. docs/search.md says how a setting is chosen.
"""

import importlib
import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.base.arguments import Parser, accepted, rows_of, words_in
from common.base.config import SCALES, ConfigError
from common.base.fields import deciding
from common.base.files import shown
from common.base.places import ROOT, outputs, papers
from common.distributed import is_main_process
from common.reproduce.command import SEARCH_SEEDS, set_text, with_folders
from common.reproduce.rows import Job, PaperCode
from common.reproduce.search import axes_of, content_of, markdown_of, name_of, run_search, write_search
from common.run.launch import join_processes, run_or_explain


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("paper", choices=papers())
    parser.add_argument("--rows", required=True, help="names of rows of the paper (`make rows`), 'a b'")
    parser.add_argument("--set", required=True, help="section.key=value,value,... ; quotes as in a shell")
    parser.add_argument("--scale", default="demo", choices=SCALES)
    parser.add_argument("--data", default="", help="folder of tar shards with captioned photographs")
    parser.add_argument("--weights", default="", help="folder of pre-trained weights by name; others from the hub")
    parser.add_argument("--output", type=Path, default=outputs(), help="runs, and results unless --results")
    parser.add_argument("--results", type=Path, default=None, help="where the tables go; default <output>/results")
    given = parser.parse_args(arguments)

    folder, rows = ROOT / given.paper, list(dict.fromkeys(words_in("ROWS", given.rows)))
    for row in rows or [""]:
        if row not in rows_of(folder):
            raise ConfigError(f"ROWS={row}: no row of {given.paper}; {accepted(row, rows_of(folder))}")
    settings = words_in("SET", given.set)
    axes, fixed = axes_of(settings)
    overrides = with_folders(fixed, given.scale, given.data, given.weights)
    with_folders([f"{axis.key}=" for axis in axes], given.scale, "", "")  # refuses run.seed, which each run sets itself
    jobs = {row: _job(given.paper, row, given.scale, overrides, given.output / "runs") for row in rows}
    for row, job in jobs.items():
        decides = deciding(job.paper.config_class)
        for axis in axes:
            if decides.get(axis.key, "weights") != "weights":
                raise ConfigError(
                    f"SET: {axis.key} changes no weights of {row}, there is nothing to search; expected a setting of "
                    "model, method or optim, or one value"
                )
            of_starts = [text for text in fixed if text.startswith(f"{axis.key}=")]
            if of_starts and not job.parents():
                raise ConfigError(f"SET: {of_starts[0]} is for what {row} starts from, and it starts from no other row")
    places = "".join(f" {name.upper()}=<folder>" for name in ("data", "weights") if getattr(given, name))
    command = f'make search PAPER={given.paper} SCALE={given.scale}{places} ROWS="{" ".join(rows)}"'
    command += set_text(settings)

    join_processes(overrides)
    if is_main_process():
        print(
            f"{given.paper}, scale {given.scale}: {len(rows)} rows, seeds {', '.join(map(str, SEARCH_SEEDS))}",
            flush=True,
        )
    searched = run_search(jobs, axes)
    if is_main_process():
        content = content_of(searched, command)
        print("\n" + markdown_of(content))
        name = name_of(given.scale, rows, axes, fixed)
        written = write_search(content, given.results or given.output / "results", name)
        print(f"search.json and search.md: {shown(written)}")


def _job(paper: str, row: str, scale: str, overrides: tuple[str, ...], runs: Path) -> Job:
    module = importlib.import_module(f"{paper}.reproduce")
    code: PaperCode = getattr(module, "EVERY_ROW", module.CODE).of(f"{row}.yaml")
    return Job(code, f"{row}.yaml", scale, SEARCH_SEEDS[0], overrides, runs)


if __name__ == "__main__":
    run_or_explain(main)
