"""Chains of nouns from a small table, cones against loops, and the part end to end."""

import itertools

import pytest
import torch

from common.report.experiments import read_experiment
from common.report.schema import from_json
from common.run.config import ConfigError
from euclip.geometry import Euclidean, Hyperbolic
from euclip.hierarchies import Chains, cone_scores, noun_chains, text_scores
from euclip.reproduce import main

TABLE = """synset\tlexname\tlemmas\thypernyms
1\tx\tthing\t
2\tx\tbeing|living thing\t1
3\tx\tdog|domestic dog\t2|5
4\tx\tspaniel\t3
5\tx\tpet\t1
6\tx\tbank\t1
7\tx\tbank\t5
8\tx\tunicorn\t2
9\tx\tbeagle\t3|404
10\tx\tstone\t
"""
TINY = [
    "optim.steps=2", "optim.warmup_steps=0", "optim.global_batch_size=16", "data.num_train=24", "data.num_val=8",
    "data.num_test=8", "data.num_labelled=8", "run.evaluate_every=0", "run.save_every=0",
]  # fmt: skip


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "nouns.tsv"
    path.write_text(TABLE, encoding="utf-8")
    return path


def all_but(*unknown):
    return lambda words: [word not in unknown for word in words]


def words_of(found):
    return [[found.texts[place] for place in chain] for chain in found.chains]


def test_chains_go_up_from_words_of_one_meaning(table):
    found = noun_chains(table, all_but("unicorn"))
    line = ["dog", "being", "thing"]
    assert words_of(found) == [["spaniel", *line], ["pet", "thing"], ["beagle", *line]]  # bank has two meanings
    true = [{found.texts[place] for place in row.nonzero().squeeze(1).tolist()} for row in found.holds]
    assert true == [{"spaniel", "pet", *line}, {"pet", "thing"}, {"beagle", "pet", *line}]


def test_unknown_words_are_passed_over_and_other_paths_hold(table):
    # without "being" its other word stands for it; without either the line goes on above
    assert words_of(noun_chains(table, all_but("unicorn", "being")))[0] == ["spaniel", "dog", "living thing", "thing"]
    found = noun_chains(table, all_but("spaniel", "beagle", "being", "living thing", "dog"))
    assert words_of(found) == [["domestic dog", "thing"], ["pet", "thing"], ["unicorn", "thing"]]
    pet = found.texts.index("pet")
    assert [bool(row[pet]) for row in found.holds] == [True, True, False]  # by the second hypernym of dog


def test_size_spreads_over_the_table_and_circles_end(table):
    table.write_text(
        "synset\tlemmas\thypernyms\n" + "".join(f"{n}\tword{n}\t{n + 1}\n" for n in range(0, 40, 2))
        + "".join(f"{n}\tword{n}\t\n" for n in range(1, 41, 2)), encoding="utf-8"
    )  # fmt: skip
    assert len(noun_chains(table, all_but()).chains) == 20
    assert words_of(noun_chains(table, all_but(), size=7)) == [[f"word{n}", f"word{n + 1}"] for n in range(0, 40, 6)]
    table.write_text("synset\tlemmas\thypernyms\na\tone\tb\nb\ttwo\tc\nc\tthree\tb\n", encoding="utf-8")
    assert words_of(noun_chains(table, all_but())) == [["one", "two", "three"]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("synset\tlemmas\n1\ta\n", "nouns.tsv has no column 'hypernyms'; accepted: a header with synset, lemmas"),
        ("", "nouns.tsv has no column 'synset'"),
        ("synset\tlemmas\thypernyms\n1\ta\t\n", "nouns.tsv: the model's vocabulary has no noun together with one"),
    ],
)
def test_a_table_that_does_not_serve_is_named(tmp_path, text, words):
    path = tmp_path / "nouns.tsv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        noun_chains(path, all_but())


@pytest.mark.parametrize("geometry", [Euclidean(squared=True), Hyperbolic(dim=6, squared=False)], ids=lambda g: g.name)
@pytest.mark.parametrize("start", [0, 1])
def test_cones_equal_loops_over_pairs(geometry, start):
    draws = torch.Generator().manual_seed(0)
    points, texts = (torch.randn(size, 6, generator=draws, dtype=torch.float64) for size in (4, 9))
    chains = [[0, 1, 2], [3, 4, 2], [5, 1], [6, 7, 8]]
    holds = torch.zeros(4, 9, dtype=torch.bool)
    for row, chain in zip(holds, chains):
        row[chain] = True
    holds[0, 7] = True
    found = cone_scores(geometry, points, texts, Chains([""] * 9, chains, holds), 0.4, start)
    levels = []
    for level in range(start, 3):
        true, other = [], []
        for number, chain in enumerate(chains):
            if len(chain) <= level:
                continue
            for place in sorted({other_chain[level] for other_chain in chains if len(other_chain) > level}):
                missed = float(geometry.entailment_residual(texts[place], points[number], 0.4))
                if place == chain[level]:
                    true.append(missed)
                elif not holds[number, place]:
                    other.append(missed)
        wins = [(a < b) + (a == b) / 2 for a, b in itertools.product(true, other)]
        levels.append([
            sum(value <= 0 for value in true) / len(true), sum(value <= 0 for value in other) / len(other),
            sum(wins) / len(wins),
        ])  # fmt: skip
    expected = [sum(each) / len(levels) for each in zip(*levels)]
    assert [found[name] for name in ("entailed", "entailed_other", "auc")] == pytest.approx(expected, abs=1e-12)


def test_texts_in_a_line_from_the_origin_are_in_perfect_order():
    directions = torch.eye(4, dtype=torch.float64)[:2]
    texts = torch.cat([scale * directions for scale in (3.0, 2.0, 1.0)])  # specific ones are farther out
    chains = Chains([""] * 6, [[0, 2, 4], [1, 3, 5]], torch.eye(2, dtype=torch.bool).repeat(1, 3))
    geometry, root = Euclidean(squared=True), torch.zeros(4, dtype=torch.float64)
    assert text_scores(geometry, texts, root, chains, 0.1) == {
        "generic_nearer": 1.0, "text_entailed": 1.0, "text_entailed_other": 0.0, "text_auc": 1.0,
    }  # fmt: skip
    backwards = Chains(chains.texts, [chain[::-1] for chain in chains.chains], chains.holds)
    assert text_scores(geometry, texts, root, backwards, 0.1)["generic_nearer"] == 0.0


def test_the_part_measures_captions_and_nouns_of_every_model(tmp_path, monkeypatch, table):
    table.write_text("synset\tlemmas\thypernyms\n1\tshape\t\n2\tcircle\t1\n3\tsquare\t1\n4\tred\t5\n5\tblue\t\n")
    monkeypatch.setattr("common.report.command.Command.changes", [])
    main(["hierarchies", "--scale", "smoke", "--output", str(tmp_path), f"hierarchies.nouns={table}", *TINY])
    folder = tmp_path / "results" / "euclip"
    measured = from_json((folder / "hierarchies" / "smoke" / "hierarchies.json").read_text(encoding="utf-8"))
    assert len(measured.rows) == 10
    assert "8 pictures of scenes/test" in measured.data
    values = read_experiment(folder / "experiments" / "smoke" / "hierarchies.json").values
    for model in ("clip", "euclip_lambda0", "euclip", "meru_lambda0", "meru"):
        names = {name.removeprefix(f"{model}_captions_") for name in values if name.startswith(f"{model}_captions_")}
        assert ("image_auc" in names) == ("text_auc" in names) == (model != "clip")
        assert "generic_nearer" in names
        assert f"{model}_nouns_generic_nearer" in values
    assert all(0 <= value <= 1 for seeds in values.values() for value in seeds)


def test_nothing_to_measure_on_is_said_before_training(tmp_path, data_dir):
    with pytest.raises(ConfigError, match=r"no test set brings hierarchies.*hierarchies\.nouns=<file>"):
        main([
            "hierarchies", "--scale", "photos", "--data", str(data_dir / "flickr8k"), "--output", str(tmp_path)
        ])  # fmt: skip
    assert not list(tmp_path.glob("runs/*"))
