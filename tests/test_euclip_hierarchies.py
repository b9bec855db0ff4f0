"""Chains of nouns from a small table, cones against loops, and the part end to end."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import SmokeParts
from refusals import refused
from runs import values_of
from test_euclip_claims import columns_of_claims

from common.base.config import ConfigError, override
from common.data.scenes import SceneDataset
from common.geometry import unit
from common.report.table import from_json
from common.reproduce.command import Command
from common.run.checkpoint import open_checkpoint
from common.run.folder import RunFiles
from euclip import hierarchies
from euclip.evaluate import load_encoder
from euclip.geometry import Elliptic, Euclidean, Hyperbolic
from euclip.hierarchies import cone_scores, measure, noun_pool, text_scores
from euclip.loaded_rows import load_run
from euclip.reproduce import CODE, main
from euclip.traversal import Hierarchy, nearest_on_walk

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


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "nouns.tsv"
    path.write_text(TABLE, encoding="utf-8")
    return path


def all_but(*unknown):
    return lambda words: [word not in unknown for word in words]


def words_of(pool):
    return [[pool.tags[place] for place in chain] for chain in pool.hierarchy.chains]


def test_chains_go_up_from_words_of_one_meaning(table):
    pool = noun_pool(table, all_but("unicorn"))
    line = ["dog", "being", "thing"]
    assert words_of(pool) == [["spaniel", *line], ["pet", "thing"], ["beagle", *line]]  # bank has two meanings
    true = [{pool.tags[place] for place in row.nonzero().squeeze(1).tolist()} for row in pool.hierarchy.holds]
    assert true == [{"spaniel", "pet", *line}, {"pet", "thing"}, {"beagle", "pet", *line}]


def test_other_words_of_an_ancestor_hold_too(table):
    table.write_text(TABLE + "11\tx\tliving thing\t\n12\tx\tamoeba\t11\n", encoding="utf-8")
    pool = noun_pool(table, all_but("unicorn"))
    spaniel = next(row for chain, row in zip(words_of(pool), pool.hierarchy.holds) if chain[0] == "spaniel")
    assert spaniel[pool.tags.index("living thing")]  # a word of "being", also of another synset in the pool


def test_unknown_words_are_passed_over_and_other_paths_hold(table):
    # without "being" its other word stands for it; without either the line goes on above
    assert words_of(noun_pool(table, all_but("unicorn", "being")))[0] == ["spaniel", "dog", "living thing", "thing"]
    pool = noun_pool(table, all_but("spaniel", "beagle", "being", "living thing", "dog"))
    assert words_of(pool) == [["domestic dog", "thing"], ["pet", "thing"], ["unicorn", "thing"]]
    pet = pool.tags.index("pet")
    assert [bool(row[pet]) for row in pool.hierarchy.holds] == [True, True, False]  # by the second hypernym of dog


def test_size_spreads_over_the_table_and_circles_end(table):
    table.write_text(
        "synset\tlemmas\thypernyms\n" + "".join(f"{n}\tword{n}\t{n + 1}\n" for n in range(0, 40, 2))
        + "".join(f"{n}\tword{n}\t\n" for n in range(1, 41, 2)), encoding="utf-8"
    )  # fmt: skip
    assert len(noun_pool(table, all_but()).hierarchy.chains) == 20
    assert words_of(noun_pool(table, all_but(), size=7)) == [[f"word{n}", f"word{n + 1}"] for n in range(0, 40, 6)]
    table.write_text("synset\tlemmas\thypernyms\na\tone\tb\nb\ttwo\tc\nc\tthree\tb\n", encoding="utf-8")
    assert words_of(noun_pool(table, all_but())) == [["one", "two", "three"]]


def test_a_table_that_does_not_serve_is_named_and_a_vocabulary_without_nouns_has_no_pool(table):
    assert noun_pool(table, all_but("thing", "being", "living thing", "pet", "dog", "domestic dog")) is None
    for text, message in (("synset\tlemmas\n1\ta\n", "'hypernyms'; expected: a header with synset"), ("", "'synset'")):
        table.write_text(text, encoding="utf-8")
        refused((f"nouns.tsv has no column {message}", lambda: noun_pool(table, all_but())))


def test_hypernyms_that_lead_nowhere_are_named_and_synsets_occur_once(table):
    head = "synset\tlemmas\thypernyms\n"
    table.write_text(head + "1\tcat\t2;3\n2\tpet\t 3\n3\tthing\t\n", encoding="utf-8")
    with pytest.warns(UserWarning, match="1 hypernyms are no synset of the table and end their chains, such as '2;3'"):
        assert words_of(noun_pool(table, all_but())) == [["pet", "thing"]]
    table.write_text(head + "1\tcat\t\n1\tdog\t\n", encoding="utf-8")
    refused(("nouns.tsv: 1 synsets occur twice, such as '1'", lambda: noun_pool(table, all_but())))
    table.write_text(head + f"1\t{'x' * 200_000}\t\n", encoding="utf-8")
    refused(("nouns.tsv cannot be read: field larger than", lambda: noun_pool(table, all_but())))
    table.write_text(head + "1\tcat\t2\n2\tpet\t1\n", encoding="utf-8")  # a circle has no top
    command = Command("hierarchies", "smoke", (0,), (f"hierarchies.nouns={table}",), table, table)
    refused(
        ("none of its synsets leads to another one", lambda: hierarchies.hierarchies(command, CODE)), error=ConfigError
    )


def test_a_model_that_knows_no_noun_of_the_table_is_warned_of(table, monkeypatch):
    monkeypatch.setattr(hierarchies, "hierarchy_task", lambda *_: None)
    monkeypatch.setattr(hierarchies, "known_words", lambda _: lambda words: [False] * len(words))
    encoder = SimpleNamespace(model=SimpleNamespace(geometry=None))
    with pytest.warns(UserWarning, match="nouns.tsv: no chain of nouns consists of words that the model knows"):
        assert measure(encoder, SimpleNamespace(method=SimpleNamespace(min_radius=0.1)), str(table)) == {}


def test_case_makes_no_other_word(table):
    table.write_text(
        "synset\tlemmas\thypernyms\n1\tmetal\t\n2\tMercury|quicksilver\t1\n3\tmercury\t\n", encoding="utf-8"
    )
    assert words_of(noun_pool(table, all_but())) == [["quicksilver", "metal"]]  # not the word of two meanings
    assert noun_pool(table, all_but()).texts[0] == "a photo of a quicksilver."


def few_chains(seed=0):
    draws = torch.Generator().manual_seed(seed)
    subjects, texts = (torch.randn(size, 6, generator=draws, dtype=torch.float64) for size in (4, 9))
    chains = [[0, 1, 2], [3, 4, 2], [5, 1], [6, 7, 8]]
    holds = torch.zeros(4, 9, dtype=torch.bool)
    for row, chain in zip(holds, chains):
        row[chain] = True
    holds[0, 7] = True
    return subjects, texts, Hierarchy.of_chains(chains, holds)


@pytest.mark.parametrize("geometry", [Euclidean(squared=True), Hyperbolic(dim=6, squared=False)], ids=lambda g: g.name)
def test_cones_equal_loops_over_triples(geometry):
    subjects, texts, known = few_chains()
    triples = [  # of a text, a subject in whose chain it is, and one of which it is not true
        (place, true, other)
        for true, chain in enumerate(known.chains)
        for place in chain
        for other in range(4)
        if not known.holds[other, place]
    ]

    def angle(place, subject):
        return float(geometry.entailment_residual(images=subjects[subject], texts=texts[place], min_radius=0.0))

    def inside(place, subject):
        return float(geometry.entailment_residual(images=subjects[subject], texts=texts[place], min_radius=0.4)) <= 0

    def mean(score):
        """Over the others of a text and chain first, then over texts and chains."""
        of_pair = {}
        for place, true, other in triples:
            of_pair.setdefault((place, true), []).append(score(place, true, other))
        return sum(sum(values) / len(values) for values in of_pair.values()) / len(of_pair)

    scores = cone_scores(geometry, subjects, texts, known, 0.4)
    assert scores == {
        "auc": pytest.approx(mean(lambda place, true, other: angle(place, true) < angle(place, other)), abs=1e-12),
        "inside": pytest.approx(mean(lambda place, true, other: inside(place, true)), abs=1e-12),
        "inside_other": pytest.approx(mean(lambda place, true, other: inside(place, other)), abs=1e-12),
    }
    assert cone_scores(geometry, subjects, texts, known, None) == {"auc": scores["auc"]}
    # a chain's most specific text is a subject, and no text of its own cone
    places = [[number, *(4 + place for place in chain)] for number, chain in enumerate(known.chains)]
    of_texts = Hierarchy.of_chains(places, torch.cat([torch.eye(4, dtype=torch.bool), known.holds], dim=1))
    root = torch.zeros(6, dtype=torch.float64)
    both = text_scores(geometry, torch.cat([subjects, texts]), root, of_texts, 0.4)
    del both["generic_nearer"]
    assert both == {f"text_{name}": value for name, value in scores.items()}
    # nor where its chain says it twice
    again = replace(of_texts, chains=[[chain[0], *chain] for chain in of_texts.chains])
    del (twice := text_scores(geometry, torch.cat([subjects, texts]), root, again, 0.4))["generic_nearer"]
    assert twice == both


def test_a_pair_in_many_chains_counts_once():
    texts = torch.tensor([[1.0], [2.0], [5.0], [6.0], [7.0]])  # 1 is nearer than 2; 5, 6, 7 are farther than both
    known = Hierarchy.of_chains([[0, 1], [2, 0, 1], [3, 0, 1], [4, 0, 1]], torch.ones(4, 5, dtype=torch.bool))
    scores = text_scores(
        Elliptic(), unit(torch.cat([torch.ones(5, 1), texts], dim=1)), unit(torch.tensor([1.0, 0.0])), known, None
    )
    assert scores == {"generic_nearer": pytest.approx(6 / 7)}  # wrong: the pair 0, 1


def test_the_part_measures_captions_and_nouns_of_every_model(euclip, monkeypatch, table):
    table.write_text("synset\tlemmas\thypernyms\n1\tshape\t\n2\tcircle\t1\n3\tsquare\t1\n4\tred\t5\n5\tblue\t\n")
    seen = []

    def spy(geometry, texts, root, known, min_radius):
        seen.append((geometry.name, min_radius, bool(root.abs().sum() > 0)))
        return text_scores(geometry, texts, root, known, min_radius)

    monkeypatch.setattr(hierarchies, "text_scores", spy)
    part = SmokeParts("euclip", euclip.folder, (*euclip.overrides, f"hierarchies.nouns={table}"))("hierarchies")
    # without cones, with cones, and trained with their K
    assert seen[::2] == [
        ("sphere", None, True), ("euclidean_squared", None, False), ("euclidean_squared", 0.3, False),
        ("hyperbolic", None, False), ("hyperbolic", 0.1, False),
    ]  # fmt: skip
    measured = from_json((part / "hierarchies.json").read_text(encoding="utf-8"))
    assert len(measured.rows) == 5 * 2 + 2
    assert measured.data.startswith("scenes/train, 24 pictures")
    assert "8 pictures of scenes/test; 3 chains of 5 nouns, nouns.tsv (" in measured.measured("text_auc")[0].data
    values = values_of(part / "hierarchies.json")
    for model in hierarchies.MODELS:
        names = {name.removeprefix(f"{model}_captions_") for name in values if name.startswith(f"{model}_captions_")}
        assert ("image_auc" in names) == ("text_auc" in names) == (model != "clip")
        assert ("image_inside" in names) == (model in ("euclip", "meru"))
        assert f"{model}_nouns_generic_nearer" in values
    assert values["euclip_regime_in_regime"] == (0.0,)  # two steps
    for model in ("euclip_lambda0", "euclip"):
        assert values[f"{model}_regime_root_norm"][0] > 0
    # one model again, by hand
    (run,) = euclip.folder.glob("runs/euclip/table4_meru-smoke-*/seed0/checkpoints/step-00000002")
    config, encoder = load_encoder(open_checkpoint(run), torch.device("cpu"))
    scenes = SceneDataset("test", size=8, image_size=config.data.image_size)
    captions = [scenes.captions(index) for index in range(8)]
    pool = list(dict.fromkeys(text for chain in captions for text in chain))
    radii = encoder.model.geometry.distance_to(encoder.texts(pool), torch.zeros(config.model.embedding_dim))
    pairs = {(a, b) for chain in captions for number, a in enumerate(chain) for b in chain[number + 1 :]}
    nearer = [radii[pool.index(b)] < radii[pool.index(a)] for a, b in pairs]
    expected = sum(map(float, nearer)) / len(nearer)
    assert values["meru_captions_generic_nearer"] == (pytest.approx(expected, abs=1e-3),)
    images, _ = encoder.images(scenes)
    root, texts = torch.zeros(config.model.embedding_dim), encoder.texts(pool)
    walks = [set(nearest_on_walk(encoder.model.geometry, image, texts, root)) - {len(pool)} for image in images]
    assert values["meru_captions_walk_captions"] == (pytest.approx(sum(map(len, walks)) / 8),)
    named = columns_of_claims("hierarchies")
    assert {name.partition("_")[2] for name in named} <= {name.partition("_")[2] for name in values}
    # a later command with another test set: the set counts, not that of the training
    files, later = RunFiles(run.parents[1], {}), override(config, ["data.num_test=5"])
    config, encoder = load_run(SimpleNamespace(files=files, config=later))
    assert measure(encoder, config, "")["captions"][0] == "5 pictures of scenes/test"


def test_missing_hierarchies_are_an_error_before_training(tmp_path, data_dir):
    with pytest.raises(ConfigError, match=r"no test set has hierarchies.*hierarchies\.nouns=<file>"):
        main([
            "hierarchies", "--scale", "photos", "--data", str(data_dir / "flickr8k"), "--output", str(tmp_path)
        ])  # fmt: skip
    assert not list(tmp_path.glob("runs/*"))
