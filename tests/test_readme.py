"""What the pages and config headers tell a reader to type exists."""

import re
import runpy
import shlex
import subprocess
import sys
from functools import cache

import pytest
import torch
from runs import values_of

from common.base.files import read_repository_yaml
from common.base.places import ROOT
from common.report.claims.expressions import parse
from common.report.claims.intervals import estimate
from common.report.claims.ours import our_cells
from common.report.conclusions import load_conclusions
from common.report.table import read_table
from scripts.parts import parts_of

PAGES = sorted(path for path in ROOT.rglob("*.md") if not {".venv", "outputs", "results"} & set(path.parts))
RESULTS = sorted(ROOT.glob("results/*/*.md"))
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


@cache
def anchors(page):
    """Of the headings of a page, as GitHub makes them: a repeated one ends in -1, -2, ..."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    before = [slugs[:place].count(slug) for place, slug in enumerate(slugs)]
    return {f"{slug}-{count}" if count else slug for slug, count in zip(slugs, before)}


def test_a_repeated_heading_has_an_anchor_of_its_own_and_a_comment_of_code_has_none(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A b\n```sh\n# c\n```\n## A b!\n# d\n### a b\n")
    assert anchors(page) == {"a-b", "a-b-1", "a-b-2", "d"}


@pytest.mark.parametrize("page", PAGES + RESULTS, ids=ids(PAGES + RESULTS))
def test_scripts_configs_and_links_of_a_page_exist(page):
    lines, inline = code(page)
    for link, section in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
        if "://" not in link:
            target = page.parent / link if link else page
            assert target.exists(), f"{page.name} links to {link}"
            assert not section or section in anchors(target), f"{page.name} links to {link}#{section}"
    folders = "common|oblique_topology|geomm|euclip|contrastive_basics|scripts|tests|docs"
    for text in lines + inline:
        for name in re.findall(rf"(?<![\w/.-])(?:{folders})/[\w./-]*\w\.(?:py|yaml|sh|md|png)", text):
            assert (ROOT / name).exists() or "my_geometry" in name, f"{page.name} names {name}"


def test_every_entry_script_named_anywhere_answers_help(monkeypatch, capsys):
    scripts = set()
    for page in PAGES:
        for command in commands(page):
            scripts |= set(re.findall(r"[\w]+/[\w]+\.py", command))
    scripts = sorted(name for name in scripts if (ROOT / name).is_file())
    assert "oblique_topology/train.py" in scripts
    monkeypatch.setenv("WORLD_SIZE", "2")  # of a launch, whose processes are not joined for that
    for name in scripts:  # in this process, which has the imports: as `python name --help` sets it up
        monkeypatch.setattr(sys, "path", [str((ROOT / name).parent), *sys.path[1:]])
        monkeypatch.setattr(sys, "argv", [name, "--help"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / name), run_name="__main__")
        assert not ended.value.code, name
        assert "usage:" in capsys.readouterr().out, name


def test_the_library_code_of_the_first_screen_runs_as_it_stands(capsys):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n(.*?)```", text[: text.index("## Four papers")], re.DOTALL)
    assert len(snippet.splitlines()) <= 18
    torch.manual_seed(0)
    exec(compile(snippet, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["sphere", "oblique", "euclidean", "hyperbolic"]
    # unrelated features: ln 64 = 4.2 where all similarities are equal, more where they spread
    assert all(3.5 < float(line.split()[1]) < 30 for line in lines)


def test_a_rows_header_gives_its_command_the_papers_numbers_and_what_was_run():
    rows = {str(row.relative_to(ROOT)): row.read_text(encoding="utf-8") for row in ROWS}
    # rows that CONTRIBUTING.md adds, whose files are not here
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    added = {re.match(r"# ([^\s:]+)", text)[1]: text for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)}
    added["my_geometry/configs/ball.yaml"] = (ROOT / "docs/template/configs/ball.yaml").read_text(encoding="utf-8")
    assert len(added) == 2
    wrong = []
    for name, content in (rows | added).items():
        header = "".join(line for line in content.splitlines(True) if line.startswith("#"))
        wrong += [f"{name} lacks {text!r}" for text in (name, "# Run: ", "# Paper: ", "Ours: ") if text not in header]
        for command in re.findall(r"^# Run: (.*)$", header, re.MULTILINE):
            named = re.findall(r"\S+\.(?:py|yaml)", command)
            wrong += [
                f"{name} names {file}"
                for file in named
                if file != name and not (ROOT / file.replace("my_geometry/", "docs/template/")).is_file()
            ]
    assert len(ROWS) > 100
    assert not wrong, "\n".join(wrong)


def test_a_rows_header_names_the_committed_results_of_its_tables_and_no_others():
    named = {row: set(re.findall(r"results/\w+/\w+", row.read_text(encoding="utf-8"))) for row in ROWS}
    for row, folders in named.items():
        assert all((ROOT / folder).is_dir() for folder in folders), row.name
    for printed in sorted(ROOT.glob("*/paper_tables.yaml")):
        paper = printed.parent.name
        for name, source in read_repository_yaml(printed)["tables"].items():
            folder = f"results/{paper}/{name}"
            tables = [read_table(path) for path in ROOT.glob(f"{folder}/*/{name}.json")]
            measured = {row.method for table in tables for row in table.rows if row.status == "measured"}
            for row in source["rows"]:
                if "config" in row:
                    says = folder in named[(printed.parent / "configs" / row["config"]).resolve()]
                    assert says == (row["method"] in measured), f"{row['config']}: {folder}"


def test_what_a_config_calls_not_run_has_no_committed_result():
    texts = {file: file.read_text(encoding="utf-8") for file in ROOT.glob("results/*/*/*/*.json")}
    for row in ROWS:
        if "Ours: not run" in row.read_text(encoding="utf-8"):
            assert not [file for file, text in texts.items() if f'"{row.name}"' in text], row.name
    for scale in set(CONFIGS) - set(ROWS):
        if re.search(r"^# .*CPU cores: not run", scale.read_text(encoding="utf-8"), re.MULTILINE):
            name = scale.stem.removeprefix("scale_")
            assert not [*ROOT.glob(f"results/{scale.parts[-3]}/*/{name}*")], scale.name


def test_intervals_stand_where_pages_are_filled_from_the_results():
    for page in (*PAGES, *ROOT.glob("*/conclusions.yaml")):
        conclusions = r"(<!-- conclusions: \w+ -->\n\n)(\d\. .*\n)+"  # filled, too
        lines = re.sub(conclusions, "", page.read_text(encoding="utf-8")).splitlines()
        by_hand = [line for line in lines if re.search(r"\d ± \d", line) and not line.startswith("| ")]
        assert not by_hand, f"{page.name}: {by_hand[0]}"


def test_a_page_that_calls_a_choice_inferred_or_recalled_says_what_it_means():
    meanings = {
        r" Inferred[.;]": r"Inferred\b.*: [^.]*our conclusion",
        r"\(recalled\)": r"Recalled: .*not checked here",
    }
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\n", " ")
        for used, meaning in meanings.items():
            assert not re.search(used, text) or re.search(meaning, text), f"{page}: {used}"


def test_committed_results_name_no_folder_of_a_machine():
    for file in (ROOT / "results").rglob("*"):
        if file.suffix in (".json", ".md"):
            place = re.search(r'[="\s](/[\w.-]+){2,}[^\n]{0,40}', file.read_text(encoding="utf-8"))
            assert place is None, f"{file}: {place[0]}"


@pytest.mark.parametrize("page", sorted(ROOT.glob("*/conclusions.yaml")), ids=lambda path: path.parent.name)
def test_numbers_of_a_papers_findings_are_filled_in(page):
    # by hand stand settings alone, such as e^2.64, K = 0.8, "0.07" and whole numbers
    for conclusion in read_repository_yaml(page):
        by_hand = re.sub(r"\{.*?\}", "", f"{conclusion['text']} {conclusion.get('details', '')}")
        assert not re.findall(r"(?<!\^)(?<!= )(?<!of )\d+\.\d", by_hand), by_hand


def test_verdicts_that_the_pages_tell_are_those_of_the_report(committed_claims):
    judged = {claims.paper: claims.judged for claims in committed_claims}
    folders = [page.parent for page in ROOT.glob("*/conclusions.yaml")]
    conclusions = [(folder.name, conclusion) for folder in folders for conclusion in load_conclusions(folder)]
    assert len(conclusions) > 20
    assert max(len(conclusion.text.split()) for _, conclusion in conclusions) <= 80  # the rest is details
    for paper, conclusion in conclusions:
        for claim, verdict in conclusion.claims.items():
            (measured,) = (entry.measured for entry in judged[paper] if entry.claim.id == claim)
            at = {of_scale.scale: of_scale.verdict for of_scale in measured}
            means = {of_scale.scale: of_scale.mean.verdict for of_scale in measured if of_scale.mean}
            at |= {scale: f"{at[scale]}; on the mean: {mean}" for scale, mean in means.items() if mean != at[scale]}
            assert at.get(conclusion.scale) == verdict, f"{paper}/conclusions.yaml: {claim}, {conclusion.scale}: {at}"


@pytest.mark.parametrize("paper", sorted(path.parent.name for path in ROOT.glob("*/conclusions.yaml")))
def test_the_finding_on_the_first_page_is_a_conclusion_of_the_paper_with_its_scales_and_seeds(paper):
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    short, seeds = re.search(rf"\[([^\]]+)\]\({paper}/README.md#what-we-found\) \(([^)]+)\)", page).groups()
    assert (short, f"numbers: {seeds}") in {(one.short, one.measured) for one in load_conclusions(ROOT / paper)}


def test_the_multipliers_of_the_first_page_are_those_of_the_committed_experiment():
    values = values_of(ROOT / "results/oblique_topology/table2/demo/table2_temperature.json")
    sphere, multi = (sum(values[row]) / len(values[row]) for row in ("clip", "multi_32_16"))
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert re.search(rf"sphere('s multiplier climbs to| ends at) {sphere:.0f}, .*? at {multi:.0f}[.,]", text)
    assert f"({sphere:.0f} and {multi:.0f})" in text
    assert f"times the range they are {sphere:.0f} and {4 * multi:.0f}." in text  # of Multi(32, 4): four spheres


GAIN = 'table4["Multi(64, 8)"]["linear_probe_acc"] > table4["Ob(64, 8)"]["linear_probe_acc"]'
ORDERS = [
    ("ALBEF+Oblique", "ALBEF"),
    ("ALBEF+Oblique", "ALBEF+Geo"),
    ("ALBEF+Oblique", "ALBEF as soft as Geo"),
    ("ALBEF+Geo", "ALBEF"),
    ("ALBEF+Geo", "ALBEF as soft as Geo"),
    ("ALBEF as soft as Geo", "ALBEF"),
]
BY_COLUMN = {
    column: [f'table9["{one}"]["{column}"] > table9["{other}"]["{column}"]' for one, other in ORDERS]
    for column in ("tr_r1", "ir_r1")
}
CAPTIONS = {text: place < 2 for place, text in enumerate(BY_COLUMN["tr_r1"])}
PICTURES = dict.fromkeys(BY_COLUMN["ir_r1"], False)
KEPT = 'table3["Sphere, fixed e^0"]["zs_i2t_r1"] < 0.25 * table3["Sphere, e^0"]["zs_i2t_r1"]'
L2 = 'table3["Euclidean, e^2.64"]["zs_t2i_r1"] < table3["{other}, e^2.64"]["zs_t2i_r1"]'
BEHIND = {L2.format(other="Ob(64, 8), inner product"): True, L2.format(other="Sphere"): False}
GAINS = {"tr_r1": 2, "ir_r1": 2, "ir_r5": 2, "ir_r10": 1, "tr_r5": 0, "tr_r10": 0}  # over how many of the two cosines
PHOTOS = {
    f'table2["Geo-ALBEF"]["flickr_{column}"] > table2["{other}"]["flickr_{column}"]': place < count
    for column, count in GAINS.items()
    for place, other in enumerate(("ALBEF", "ALBEF as soft as Geo"))
}
LOSSES = {"ir_r1": 1, "ir_r10": 2, "ir_r5": 1, "tr_r10": 0, "tr_r1": 0, "tr_r5": 0}  # as GAINS, by embeddings
EMBEDDED = 'table2["{row}, by embeddings"]["flickr_{column}"]'
EMBEDDINGS = {
    f"{EMBEDDED.format(row=other, column=column)} > {EMBEDDED.format(row='Geo-ALBEF', column=column)}": place < count
    for column, count in LOSSES.items()
    for place, other in enumerate(("ALBEF as soft as Geo", "ALBEF"))
}
HEAD = {
    f'table2["{row}"]["flickr_{column}"] > {EMBEDDED.format(row=row, column=column)}': row != "Geo-ALBEF"
    for row in ("ALBEF", "ALBEF as soft as Geo", "Geo-ALBEF")
    for column in ("tr_r1", "ir_r1")
}


@pytest.mark.parametrize(
    ("table", "words", "shown"),
    [
        ("oblique_topology/table4/demo", "eight tokens of 64 numbers gain in the linear probe is open", {GAIN: False}),
        ("geomm/table9/demo-428062af1503", "ahead of the geodesic in captions at 95 %", CAPTIONS),
        ("geomm/table9/demo-428062af1503", "all other differences are open, in pictures all of them", PICTURES),
        ("oblique_topology/table3/demo", "about a quarter", {KEPT: False}),
        ("oblique_topology/table3/demo", "on scenes behind the inner product", BEHIND),
        ("geomm/table2/photos-3e83e2afb467", "are shown at 95 % each", PHOTOS),
        ("geomm/table2/photos-3e83e2afb467", "behind the plain cosine in R@10 of pictures", EMBEDDINGS),
        ("geomm/table2/photos-3e83e2afb467", "that it takes any from Geo-ALBEF is not shown", HEAD),
    ],
)
def test_what_a_conclusion_calls_shown_or_open_beside_its_claims_is_so_by_the_interval(table, words, shown):
    paper, name, _ = table.split("/")
    assert any(words in f"{conclusion.text} {conclusion.details}" for conclusion in load_conclusions(ROOT / paper))
    result = read_table(ROOT / "results" / table / f"{name}.json")
    cells = our_cells([result])[result.scale]
    for margin, is_shown in ((parse(text), is_shown) for text, is_shown in shown.items()):
        used = {cell: cells[cell] for cell in margin.cells}
        slopes = margin.slopes({cell: ours.number.mean for cell, ours in used.items()})
        low, high = estimate(margin, slopes, used).interval_at(0.05)
        assert (low > 0 or high < 0) == is_shown, margin.text
