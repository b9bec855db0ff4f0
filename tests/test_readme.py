"""What the pages and config headers tell a reader to type exists."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from common.report.layout import format_measured
from common.report.schema import from_json
from scripts.parts import parts_of

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(path for path in ROOT.rglob("*.md") if not {".venv", "outputs", "results"} & set(path.parts))
CONFIGS = sorted(ROOT.glob("*/configs/*.yaml"))
ROWS = [path for path in CONFIGS if not path.name.startswith("scale_")]


def code(page):
    """Shell lines of a page's fenced blocks, and its inline code."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.DOTALL)
    lines = [line.partition(" #")[0].strip() for block in blocks for line in block.splitlines()]
    without_blocks = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [line for line in lines if line], re.findall(r"`([^`\n]+)`", without_blocks)


def commands(page):
    lines, inline = code(page)
    return lines + [text for text in inline if re.match(r"(make|python|accelerate|pip) \S", text)]


def ids(paths):
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_make_commands_of_a_page_have_their_target(page):
    for command in commands(page):
        for one in command.split(" / "):
            if not one.startswith("make ") or "<" in one or "reproduce-tableN" in one:
                continue
            words = shlex.split(one)
            # PY=python: prints what would run without wanting the environment to be set up
            done = subprocess.run(["make", "-n", "PY=python", *words[1:]], cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, f"{page.name}: {one}: {done.stderr}"
            part = words[1].removeprefix("reproduce-")
            if part not in (words[1], "all"):  # make takes any name behind reproduce-
                given = dict(word.split("=", 1) for word in words[2:])
                paper = given.get("PAPER", "oblique_topology")
                says_so = re.search(rf"`{re.escape(one)}`[^.]*says so", page.read_text(encoding="utf-8"))
                assert part in parts_of(paper) or says_so, f"{page.name}: {one}"


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_scripts_configs_and_links_of_a_page_exist(page):
    lines, inline = code(page)
    links = re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        if "://" not in link:
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
    folders = "common|oblique_topology|geomm|euclip|contrastive_basics|scripts|tests|docs"
    for text in lines + inline:
        for name in re.findall(rf"(?<![\w/.-])(?:{folders})/[\w./-]*\w\.(?:py|yaml|sh|md|png)", text):
            exists = (ROOT / name).exists() or "my_geometry" in name
            assert exists, f"{page.name} names {name}"


def test_every_entry_script_named_anywhere_answers_help():
    scripts = set()
    for page in PAGES:
        for command in commands(page):
            scripts |= set(re.findall(r"[\w]+/[\w]+\.py", command))
    scripts = sorted(name for name in scripts if (ROOT / name).is_file())
    assert "oblique_topology/train.py" in scripts
    started = [
        subprocess.Popen([sys.executable, name, "--help"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for name in scripts
    ]
    for name, process in zip(scripts, started):
        out, error = process.communicate(timeout=120)
        assert process.returncode == 0, f"{name}: {error.decode()}"
        assert "usage:" in out.decode(), name


@pytest.mark.parametrize("row", ROWS, ids=ids(ROWS))
def test_a_rows_header_gives_its_command_the_papers_numbers_and_what_was_run(row):
    header = "".join(line for line in row.read_text(encoding="utf-8").splitlines(True) if line.startswith("#"))
    assert str(row.relative_to(ROOT)) in header
    command = re.search(r"^# Run: (.*)$", header, re.MULTILINE).group(1)
    for name in re.findall(r"\S+\.(?:py|yaml)", command):
        assert (ROOT / name).is_file(), name
    assert "# Paper: " in header
    assert "Ours: " in header


@pytest.mark.parametrize("scale", [path for path in CONFIGS if path not in ROWS], ids=lambda path: path.name)
def test_a_scale_says_what_it_is_for(scale):
    assert scale.read_text(encoding="utf-8").startswith("# ")


def test_no_page_was_left_half_written():
    for page in PAGES:
        assert "PLACEHOLDER" not in page.read_text(encoding="utf-8"), page.name


def test_every_accelerate_file_is_listed_with_whether_it_was_run():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in sorted((ROOT / "scripts" / "accelerate").glob("*.yaml")):
        assert f"scripts/accelerate/{path.name}" in readme
        header = path.read_text(encoding="utf-8").split("compute_environment")[0].lower()
        assert "run on:" in header or "not run" in header, path.name


@pytest.mark.parametrize(
    ("page", "scale"),
    [("README.md", "demo"), ("oblique_topology/README.md", "demo"), ("oblique_topology/README.md", "photos")],
)
def test_measured_numbers_of_a_page_are_those_of_the_committed_results(page, scale):
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in ("table2", "table2_recalls") if scale == "photos" else ("table2",):
        path = ROOT / "results" / "oblique_topology" / "table2" / scale / f"{name}.json"
        table = from_json(path.read_text(encoding="utf-8"))
        rows = [row for row in table.rows if row.status == "measured"]
        assert rows
        for row in rows:
            cells = [row.ours[column.key] for column in table.columns]
            shown = [
                format_measured(cell, column.unit, with_seeds=False)
                for cell, column in zip(cells, table.columns)
                if cell is not None
            ]
            assert f"| {' | '.join(shown)} |" in text, f"{page}: {row.method} at {scale} scale is {shown}"


@pytest.mark.parametrize("page", ["README.md", "oblique_topology/README.md"])
def test_the_multipliers_of_a_page_are_those_of_the_committed_experiment(page):
    path = ROOT / "results" / "oblique_topology" / "experiments" / "demo" / "final_temperature.json"
    values = json.loads(path.read_text(encoding="utf-8"))["values"]
    sphere, multi = (sum(values[row]) / len(values[row]) for row in ("clip", "multi_32_16"))
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert re.search(rf"sphere('s multiplier climbs to| ends at) {sphere:.0f}, .*? at {multi:.0f}[.,]", text)
