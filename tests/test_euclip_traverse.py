"""Walks to the root: laws, loops written from the formulas, cases made by hand, pools, files and the command line."""

import itertools
import json
import math

import pytest
import torch
from euclip_encoders import DIM, GEOMETRIES, encoder_of
from euclip_formulas import distance, excess, length
from PIL import Image
from refusals import refused
from scipy import stats
from tars import pair, write_tar
from toys import ListedPictures

from common.data.scenes import SceneDataset, describes
from common.data.shards import open_shards
from common.geometry import Sphere, unit
from euclip import traverse
from euclip.config import MethodConfig
from euclip.geometry import Euclidean, Hyperbolic
from euclip.model import build_geometry
from euclip.traversal import (
    ROOT,
    Hierarchy,
    Stay,
    chance_of_order,
    entailed,
    generic_nearer,
    kendall_tau,
    mean_of_modalities,
    mean_score,
    met,
    nearest_on_walk,
    root_of,
    stays,
    walk_scores,
)
from euclip.traversal_data import (
    PHOTO_CAPTIONS,
    Task,
    captions_pool,
    embed_task,
    has_hierarchy,
    hierarchy_pool,
    open_task,
    pairs_task,
    read_pool,
    scenes_pool,
    scenes_task,
    unknown_words,
    walk_all,
)
from euclip.traverse import report, to_markdown, without_texts, write_report

WITH_CONES = [name for name in GEOMETRIES if name not in ("sphere", "elliptic")]


def embeddings(name, num, seed=0):
    """Random embeddings of a geometry, (num, DIM), float64 with norms about 1."""
    vectors = torch.randn(num, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / 2
    return vectors / vectors.norm(dim=1, keepdim=True) if name in ("sphere", "elliptic") else vectors


def curvature_of(geometry):
    return geometry.curvature().item() if hasattr(geometry, "curvature") else 1.0


# the formulas as printed, on lists of numbers


def walk_by_formula(name, image, captions, root, num_points, min_radius, c):
    places = []
    for step in range(num_points):
        weight = 1 - step / (num_points - 1)
        point = [r + weight * (y - r) for y, r in zip(image, root)]
        if name in ("sphere", "elliptic"):
            point = [a / length(point) for a in point]
        best, place = distance(name, point, root, c), len(captions)
        for number, caption in enumerate(captions):
            allowed = min_radius is None or excess(name, caption, point, min_radius, c) <= 0
            if allowed and distance(name, point, caption, c) < best:
                best, place = distance(name, point, caption, c), number
        places.append(place)
    return places


@pytest.mark.parametrize(
    ("name", "min_radius"), [*((name, None) for name in GEOMETRIES), *((name, 0.3) for name in WITH_CONES)]
)
def test_every_point_is_nearest_to_the_caption_that_loops_over_the_formulas_find(name, min_radius):
    geometry = GEOMETRIES[name]()
    curvature = curvature_of(geometry)
    images = embeddings(name, 12, 3)
    captions, seen = embeddings(name, 40, 1), set()
    if geometry.has_cones:  # and near the images' rays, for the filter to keep some
        near = torch.cat([share * images + 0.03 * embeddings(name, 12, 4) for share in (0.3, 0.5, 0.8)])
        captions = torch.cat([captions, near])
    root = root_of(geometry, embeddings(name, 5, 2), captions)
    for image in images:
        places = nearest_on_walk(geometry, image, captions, root, 20, min_radius)
        expected = walk_by_formula(name, image.tolist(), captions.tolist(), root.tolist(), 20, min_radius, curvature)
        assert places == expected
        seen |= set(places)
    assert len(seen) > 5  # of captions, not the root alone


def walk_through_all_cones(geometry, image, captions, root, num_points, min_radius):
    """The entailment residual of every point and caption, then the first best of what is left."""
    points = geometry.interpolate(image, root, num_points)
    scores = geometry.similarity(points, torch.cat([captions, root[None]]))
    outside = ~entailed(geometry, points, captions, min_radius)
    scores[:, :-1] = scores[:, :-1].masked_fill(outside, -math.inf)
    return scores.numpy().argmax(axis=1).tolist()


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "min_radius"), [(torch.float32, 0.0), (torch.float32, 0.8), (torch.float64, 0.1)])
@pytest.mark.parametrize("name", WITH_CONES)
def test_the_filter_that_skips_cones_keeps_the_captions_of_the_one_that_computes_all(name, dtype, min_radius):
    dim, draw = 32, torch.Generator().manual_seed(3)
    geometry = build_geometry(MethodConfig(geometry=name), dim).to(dtype)
    # captions around a common direction, so that many are nearer than the root; norms from 1e-3 to 3
    middle = torch.randn(dim, generator=draw, dtype=dtype)
    norms = torch.logspace(-3, 0.5, 240, dtype=dtype)[torch.randperm(240, generator=draw)]
    captions = norms[:, None] * unit(torch.randn(240, dim, generator=draw, dtype=dtype) + middle)
    images = 1.5 * captions[:6] + 0.05 * torch.randn(6, dim, generator=draw, dtype=dtype)
    # in the cone of a caption on the ray, on its apex, beside it, and before it; a caption twice, and the origin
    root = torch.zeros(dim, dtype=dtype)
    rays = torch.cat([images * share for share in (0.5, 0.75, 1, 1.2)])
    captions = torch.cat([captions, rays, rays + 5e-5 * unit(torch.randn(24, dim, generator=draw, dtype=dtype)), rays])
    captions = torch.cat([captions, root[None]])
    places = [nearest_on_walk(geometry, image, captions, root, 30, min_radius) for image in images]
    assert places == [walk_through_all_cones(geometry, image, captions, root, 30, min_radius) for image in images]
    assert len({place for walk in places for place in walk}) > 5
    elsewhere = captions[0]  # no way to the origin: nothing follows from the first point
    assert nearest_on_walk(geometry, images[1], captions, elsewhere, 30, min_radius) == walk_through_all_cones(
        geometry, images[1], captions, elsewhere, 30, min_radius
    )


@torch.no_grad()
def test_the_filter_computes_few_residuals_of_a_long_walk(monkeypatch):
    geometry, draw, pairs = Hyperbolic(64, squared=False), torch.Generator().manual_seed(0), []
    residual = geometry.entailment_residual

    def counted(*, images, texts, min_radius):
        pairs.append(max(len(images), len(texts)) * images.shape[-1])
        return residual(images=images, texts=texts, min_radius=min_radius)

    monkeypatch.setattr(geometry, "entailment_residual", counted)
    captions, image = (torch.randn(num, 64, generator=draw) / 8 for num in (3000, 1))
    nearest_on_walk(geometry, image[0], captions, torch.zeros(64), 50, 0.1)
    assert 0 < sum(pairs) < 50 * 3000 * 64 / 100


@pytest.mark.parametrize("name", WITH_CONES)
def test_on_a_ray_the_walk_passes_from_caption_to_caption_and_ties_go_to_the_first(name):
    ray = torch.tensor([[2.0, 0, 0, 0], [1.0, 0, 0, 0]])
    image, root = torch.tensor([3.0, 0, 0, 0]), torch.zeros(DIM)
    geometry = GEOMETRIES[name]()
    # points at 3, 2.75, ..., 0; on a ray distances are differences of norms in every one of these geometries
    assert nearest_on_walk(geometry, image, ray, root, 13)[:6] == [0] * 6  # up to 1.75
    assert nearest_on_walk(geometry, image, ray, root, 13)[7:10] == [1] * 3  # 1.25 to 0.75
    assert nearest_on_walk(geometry, image, ray, root, 13)[11:] == [2] * 2  # 0.25 and 0
    # a cone opens away from the origin: behind its apex a caption is out
    assert nearest_on_walk(geometry, image, ray, root, 13, 0.01) == [0] * 5 + [1] * 4 + [2] * 4


@pytest.mark.parametrize("name", ["sphere", "elliptic"])
def test_the_root_of_a_sphere_is_the_mean_in_which_both_modalities_weigh_alike(name):
    images, texts = embeddings(name, 3, 1), embeddings(name, 15, 2)
    mean = (images.sum(dim=0) / 3 + texts.sum(dim=0) / 15) / 2
    assert torch.allclose(mean_of_modalities(images, texts), mean)
    assert torch.allclose(root_of(GEOMETRIES[name](), images, texts), mean / mean.norm())
    assert torch.allclose(root_of(GEOMETRIES[name](), images, texts, normalised=False), mean)


def test_what_cannot_be_walked_is_refused_in_one_line():
    image, captions, root = torch.ones(DIM), torch.ones(2, DIM), torch.zeros(DIM)
    flat, lost = Euclidean(True), captions * math.nan
    refused(
        (
            r"'sphere' has no entailment cones: min_radius = 0\.3",
            lambda: nearest_on_walk(Sphere(), image, captions, image, 5, 0.3),
        ),
        ("min_radius = -1; expected: at least 0", lambda: nearest_on_walk(flat, image, captions, root, 5, -1)),
        ("walk of 1 points", lambda: nearest_on_walk(flat, image, captions, root, 1)),
        ("not finite", lambda: nearest_on_walk(flat, image, lost, root, 5, 0.3)),
        ("must be finite", lambda: entailed(flat, image[None], lost, 0.3)),
    )


def test_distinct_captions_are_counted_once_by_their_text_and_without_the_root():
    tags = ["a dog", "an animal", "a dog"]
    assert met([0, 0, 2, 1, 0, 3, 3], tags) == [0, 1]
    assert met([2, 0, 3], tags) == [2]
    assert met([3, 3], tags) == []


def test_stays_are_stretches_of_one_caption_with_the_root_among_them():
    stretches = stays([0, 2, 1, 0, 3, 3], ["a dog", "an animal", "a dog"])
    assert stretches == [Stay("a dog", 1, 2), Stay("an animal", 3, 3), Stay("a dog", 4, 4), Stay(ROOT, 5, 6)]


def test_kendall_tau_is_scipys():
    draws = torch.Generator().manual_seed(0)
    for size in (2, 5, 20, 50):
        for levels in torch.randint(4, (10, size), generator=draws).tolist():
            expected = stats.kendalltau(range(size), levels).statistic
            tau = kendall_tau(levels)
            assert (tau is None and math.isnan(expected)) or tau == pytest.approx(expected, abs=1e-12)
    assert kendall_tau([]) is None
    refused((r"levels \[1\.0, nan\]; expected: no NaN", lambda: kendall_tau([1.0, math.nan])))


@pytest.mark.parametrize("levels", [[0], [2, 0, 2, 1, 2], [0, 1, 2, 3, 4]])
def test_chance_of_order_is_the_share_of_permutations_in_order(levels):
    orders = list(itertools.permutations(levels))
    assert chance_of_order(levels) == pytest.approx(sum(list(o) == sorted(o) for o in orders) / len(orders))


def test_the_scores_of_walks_made_by_hand():
    # captions: 0 specific and 1 generic of picture 0; 2 specific and 1 generic of picture 1
    holds = torch.tensor([[True, True, False], [False, True, True]])
    hierarchy = Hierarchy.of_chains([[0, 1], [2, 1]], holds)
    assert hierarchy.levels == [0, 1, 0]
    assert Hierarchy.of_chains([[0, 1, 2], [1, 2]], holds).levels == [0, 0.5, 1.5]  # the mean of a caption's levels
    refused(("caption 2 is in no chain", lambda: Hierarchy.of_chains([[0, 1], [0, 1]], holds)))
    tags = ["a red ball", "a thing", "a blue box"]
    walks = [[0, 0, 1, 3], [1, 0, 2, 2]]
    assert walk_scores(walks, tags, hierarchy) == {
        "captions": [2, 3],
        "monotone": [1, 0],
        "monotone_by_chance": [1 / 2, 1 / 3],
        "kendall_tau": [kendall_tau([0, 0, 1]), kendall_tau([1, 0, 0, 0])],
        "true_share": [1, 2 / 3],
        "first_level": [0, 1],
        "last_level": [1, 0],
    }
    only_root = walk_scores([[3, 3, 3, 3]], tags, hierarchy.of_pictures([1]))
    assert {name: values[0] for name, values in only_root.items()} == dict.fromkeys(only_root, None) | {"captions": 0}
    assert walk_scores(walks, tags, None) == {"captions": [2, 3]}
    assert mean_score([None, 1, 2]) == 1.5
    assert mean_score([None]) is None


def test_generic_nearer_counts_the_pairs_of_captions_of_one_picture():
    distances = torch.tensor([3.0, 2.0, 2.0, 9.0, 1.0])
    assert generic_nearer(distances, [[0, 1, 2], [4, 3]]) == pytest.approx((1 + 1 + 0.5 + 0) / 4)
    assert generic_nearer(distances, [[0], []]) is None
    refused((r"root with NaN", lambda: generic_nearer(distances / 0 * 0, [[0, 1]])))


# pools


def test_a_pool_of_lines_skips_empty_ones_and_a_pool_of_json_encodes_prompts_and_reports_tags(tmp_path):
    lines = tmp_path / "captions.txt"
    lines.write_text("a dog \n\n  a cat\n", encoding="utf-8")
    assert read_pool(lines).tags == ("a dog", "a cat") == read_pool(lines).texts
    whole = tmp_path / "pool.json"
    whole.write_text(json.dumps({"adjectives": ["bright"], "nouns": ["dog"], "captions": ["a dog runs "]}))
    assert read_pool(whole).tags == ("a dog runs ", "dog", "bright")
    assert read_pool(whole).texts == ("a dog runs ", "a photo of a dog.", "this photo is bright.")
    assert read_pool(whole, "a photo of {}.").texts[1] == "a photo of dog."
    assert read_pool(whole, "a {} {x} }").texts[1] == "a dog {x} }"  # no other place is looked for
    whole.write_text(json.dumps(["a dog", "a cat"]))
    assert read_pool(whole).tags == ("a dog", "a cat")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no caption"),
        ('{"captions": []}', "holds no caption"),
        ('{"caption": ["a"]}', "unknown key 'caption'"),
        ('{"nouns": "dog"}', "nouns is a str"),
        ('["a", 3]', "captions has 3"),
        ("[", "not valid JSON"),
    ],
)
def test_a_pool_that_cannot_be_used_is_named_with_what_is_wrong(tmp_path, content, message):
    path = tmp_path / "pool"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        read_pool(path)
    assert str(path) in str(error.value)


def test_a_missing_pool_and_a_prompt_without_a_place_are_errors(tmp_path):
    refused(
        (r"nothing\.txt cannot be read", lambda: read_pool(tmp_path / "nothing.txt")),
        ("expected: a text with one", lambda: read_pool(PHOTO_CAPTIONS, "a photo")),
    )


def test_merus_pool_has_the_sizes_of_the_specification_and_ours_shares_no_caption_with_it(data_dir):
    meru, ours = read_pool(data_dir / "meru" / "pexels_text.json"), read_pool(PHOTO_CAPTIONS)
    assert (len(meru.tags), len(set(meru.tags))) == (60 + 624 + 67, 749)
    assert "a photo of a avocado toast." in meru.texts
    captions = [
        set(json.loads(path.read_text())["captions"])
        for path in (data_dir / "meru" / "pexels_text.json", PHOTO_CAPTIONS)
    ]
    assert not captions[0] & captions[1]
    assert len(ours.tags) == len(set(ours.tags)) > 200


def test_the_truth_of_every_caption_about_every_scene_is_that_of_its_statement():
    scenes = SceneDataset("test", size=12, image_size=16)
    pool = scenes_pool(scenes)
    statement_of = {
        caption: statement for i in range(12) for caption, statement in zip(scenes.captions(i), scenes.statements(i))
    }
    assert pool.tags == pool.texts == tuple(statement_of)
    expected = [[describes(statement_of[tag], scenes.scene(i)) for tag in pool.tags] for i in range(12)]
    assert pool.hierarchy.holds.tolist() == expected
    for index, chain in enumerate(pool.hierarchy.chains):
        assert [pool.tags[place] for place in chain] == scenes.captions(index)
        assert pool.hierarchy.holds[index, chain].all()
    assert not pool.hierarchy.holds.all()
    assert set(pool.hierarchy.levels) >= {0, 4}


def test_chains_of_photographs_run_from_specific_to_generic(data_dir):
    shards = open_shards(data_dir / "coco_mini" / "coco-test-000000.tar", role="test")
    pool = hierarchy_pool(shards, range(20))
    for index, chain in enumerate(pool.hierarchy.chains):
        assert [pool.tags[place] for place in chain][::-1] == shards.metadata(index)["hierarchy"]
        assert pool.hierarchy.holds[index].nonzero().squeeze(1).tolist() == sorted(set(chain))
    assert max(pool.hierarchy.levels) == 3
    assert pairs_task(shards, 20).pool.tags == pool.tags


@pytest.mark.parametrize("key", ["hierarchy", "captions"])
def test_a_sample_that_cannot_be_read_has_no_chain_and_no_walk(tmp_path, key):
    texts = [[f"dog {number}", f"an animal {number}"] for number in range(3)]
    contents = [b"{", *(json.dumps({"captions": ["a"], key: chain}).encode() for chain in texts)]
    samples = {f"{row}": pair(row, json=content) for row, content in enumerate(contents)}
    shards = open_shards(write_tar(tmp_path / "x-test.tar", samples), role="test")
    assert has_hierarchy(shards) is (key == "hierarchy")
    first = {"a": pair(3, json=b'{"captions": ["a"]}'), **samples}  # nor is the first one all of them
    assert has_hierarchy(open_shards(write_tar(tmp_path / "y-test.tar", first))) is (key == "hierarchy")
    task = pairs_task(shards, 4, None if has_hierarchy(shards) else captions_pool(shards, range(4)))
    embedded = embed_task(encoder_of(Euclidean(True)), task)
    assert embedded.rows == [1, 2, 3]
    of_rows = [[task.pool.tags[place] for place in chain] for chain in embedded.hierarchy.chains]
    assert of_rows == [chain[::-1] if key == "hierarchy" else chain for chain in texts]


def test_photographs_without_chains_are_refused_or_use_our_captions(data_dir):
    shards = open_shards(str(data_dir / "flickr8k" / "flickr8k-test-*.tar"), role="test")
    with pytest.raises(ValueError, match="expected: a list of captions from general to specific"):
        hierarchy_pool(shards, range(2))
    assert pairs_task(shards, 2).pool == read_pool(PHOTO_CAPTIONS)


# with a model


FACTS = {"geometry": "euclidean", "step": 3, "training_data": "scenes", "root": "the origin", "num_points": 9}


def walked(task, radii=(None, 0.5), geometry=None):
    encoder = encoder_of(Euclidean(squared=True) if geometry is None else geometry)
    embedded = embed_task(encoder, task)
    walks = [walk_all(encoder, embedded, torch.zeros(DIM), radius, 9) for radius in radii]
    facts = {**FACTS, "unknown_words": unknown_words(encoder, task.pool), "generic_nearer": 0.25}
    return embedded, walks, report(embedded, walks, **facts)


def test_a_report_says_of_every_picture_and_filter_what_the_walk_met():
    task = scenes_task(16, 6)
    embedded, walks, content = walked(task)
    tags = task.pool.tags
    assert (content["num_pictures"], content["unreadable_pictures"], content["num_captions"]) == (6, 0, len(tags))
    assert [entry["min_radius"] for entry in content["filters"]] == [None, 0.5]
    for entry, group in zip(content["filters"], walks):
        for number, view in enumerate(entry["pictures"]):
            assert view["walk"][0][1] == 1
            assert view["walk"][-1][0] == ROOT
            assert view["walk"][-1][2] == 9
            assert view["captions"] == [tags[place] for place in met(group.places[number], tags)]
            true = [place for place in met(group.places[number], tags) if embedded.hierarchy.holds[number, place]]
            assert view["true_captions"] == [tags[place] for place in true]
        assert entry["means"]["captions"] == pytest.approx(
            sum(map(len, (v["captions"] for v in entry["pictures"]))) / 6
        )
    assert json.loads(json.dumps(content)) == content


def test_the_files_of_a_report_hold_all_captions(tmp_path):
    _, _, content = walked(scenes_task(16, 4))
    for view in content["filters"][0]["pictures"]:  # the toy model meets none
        view["captions"] = [f"met | from {view['image_id']}"]
    paths = write_report(content, tmp_path / "new")
    assert [path.name for path in paths] == ["traversal.json", "traversal.md"]
    assert json.loads(paths[0].read_text()) == content
    text = paths[1].read_text()
    assert all(f"met \\| from {view['image_id']}" in text for view in content["filters"][0]["pictures"])
    assert "25.0% of the pairs" in text
    # of photographs only the captions of their own chains are known (`hierarchy_pool`)
    assert "captions known to be true of the picture" in text


def test_a_report_without_texts_keeps_every_score_and_no_caption(tmp_path):
    _, _, content = walked(scenes_task(16, 4))
    content["filters"][0]["pictures"][1]["captions"] = ["a striped ring"]
    paths = write_report(without_texts(content), tmp_path)
    assert [path.name for path in paths] == ["traversal.json", "traversal.md"]
    report = json.loads(paths[0].read_text())
    assert [entry["means"] for entry in report["filters"]] == [entry["means"] for entry in content["filters"]]
    assert {key: value for key, value in report.items() if key != "filters"} == {
        key: value for key, value in content.items() if key != "filters"
    }
    texts = "".join(path.read_text() for path in paths)
    assert "a striped ring" in to_markdown(content)
    assert "a striped ring" not in texts
    assert to_markdown(content).startswith(paths[1].read_text())


def test_a_folder_of_pictures_is_walked_from_and_what_cannot_be_read_is_counted(tmp_path):
    for name, colour in (("b.png", "red"), ("a.jpg", "blue")):
        Image.new("RGB", (300, 200), colour).save(tmp_path / name)
    (tmp_path / "c.png").write_bytes(b"no picture")
    for unread in ("notes.txt", "._a.jpg"):  # the second one a file manager's
        (tmp_path / unread).write_text("not looked at")
    _, _, content = walked(open_task(str(tmp_path), 16, 10, None))
    assert content["pictures"] == tmp_path.name
    assert content["unreadable_pictures"] == 1
    assert [view["image_id"] for view in content["filters"][0]["pictures"]] == ["a.jpg", "b.png"]
    assert content["pool"] == PHOTO_CAPTIONS.name
    assert list(content["filters"][0]["means"]) == ["captions"]
    assert 0.2 < content["unknown_words"] < 1
    assert "does not know" in to_markdown(content)
    (tmp_path / "broken").mkdir()
    (tmp_path / "c.png").rename(tmp_path / "broken" / "c.png")
    broken = open_task(str(tmp_path / "broken"), 16, 10, None)
    refused(("none of the 1 pictures could be read", lambda: embed_task(encoder_of(Euclidean(True)), broken)))


def test_unreadable_pictures_take_their_row_of_the_hierarchy_with_them():
    scenes = scenes_task(16, 4)
    pictures = ListedPictures((scenes.pictures[row]["image"] for row in range(4)), broken={1})
    task = Task("three", pictures, str, scenes.pool)
    embedded, walks, content = walked(task)
    assert embedded.rows == [0, 2, 3]
    assert torch.equal(embedded.hierarchy.holds, scenes.pool.hierarchy.holds[[0, 2, 3]])
    assert [view["image_id"] for view in content["filters"][0]["pictures"]] == ["0", "2", "3"]
    whole = walked(scenes)[1]
    assert walks[0].places == [whole[0].places[row] for row in (0, 2, 3)]
    assert walks[1].scores["true_share"] == [whole[1].scores["true_share"][row] for row in (0, 2, 3)]


def test_what_images_names_must_be_there(tmp_path):
    nowhere = "no such folder; expected: scenes, a folder of pictures, tar shards"
    refused(
        (nowhere, lambda: open_task(str(tmp_path / "nothing"), 16, 3, None)),
        ("holds no picture", lambda: open_task(str(tmp_path), 16, 3, None)),
    )
    refused((r"nothing\.tar", lambda: open_task(str(tmp_path / "nothing.tar"), 16, 3, None)), error=FileNotFoundError)


def test_published_weights_are_walked_like_ours(monkeypatch, tmp_path, capsys):
    asked = []

    def published(checkpoint, layout, geometry, activation, config, device):
        asked.append((checkpoint, layout, geometry, config.method.geometry))
        return encoder_of(Euclidean(True))

    monkeypatch.setattr(traverse, "open_published", published)
    captions = tmp_path / "captions.txt"
    captions.write_text("a red circle\na blue square\n")
    weights = ["--checkpoint", "a/euclip.pt", "--layout", "open_clip", "--geometry", "euclidean_squared"]
    traverse.main([*weights, "--captions", str(captions), "--pictures", "2", "--min-radius", "0.3"])
    assert asked == [("a/euclip.pt", "open_clip", "euclidean_squared", "euclidean_squared")]
    assert "model: euclidean_squared, published weights euclip.pt" in capsys.readouterr().out


def test_published_weights_on_a_sphere_have_no_root_until_somebody_names_the_training_pairs(monkeypatch, capsys):
    monkeypatch.setattr(traverse, "open_published", lambda *arguments: encoder_of(Sphere()))
    weights = ["--checkpoint", "clip.pt", "--layout", "transformers", "--pictures", "2"]
    without_source = r"data\.root without data\.source; expected: data\.source=shards"
    refused(
        (r"'sphere' is the mean of training pairs, .* data\.source=shards", lambda: traverse.main(weights)),
        (without_source, lambda: traverse.main([*weights, "data.root=/data/flickr8k"])),
    )
    traverse.main([*weights, "data.source=scenes", "data.num_train=6", "data.image_size=16"])
    assert "root: normalised mean of image and text embeddings of scenes/train, all 6" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pictures", "0"], "--pictures 0; expected: at least 1"),
        (["--steps", "1"], "--steps 1; expected: at least 2"),
        (["--min-radius", "0.3", "-0.1"], "--min-radius -0.1; expected: at least 0"),
        (["--min-radius", "nan"], "--min-radius nan; expected: at least 0"),
        (["--noun-prompt", "a {}."], "--noun-prompt goes with --captions"),
        (["--geometry", "euclidean"], "--geometry goes with --layout open_clip"),
        (["--activation", "gelu"], "--activation goes with --layout"),
    ],
)
def test_arguments_that_would_fail_late_or_do_nothing_are_refused_before_anything_is_opened(arguments, message):
    with pytest.raises(ValueError, match=message):
        traverse.main(["--checkpoint", "nowhere", *arguments])
