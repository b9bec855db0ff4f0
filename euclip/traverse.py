"""Walks from pictures to the root of a model's space and lists the captions on the way (EuCLIP, Tables 2, 3, 6, 7).

python euclip/traverse.py --checkpoint outputs/runs/euclip/<run>/seed0/checkpoints/step-00000600 --min-radius 0.3 0.8
python euclip/traverse.py --checkpoint <folder> --images my_photos --captions my_captions.txt --output outputs/walks
python euclip/traverse.py --checkpoint <folder> --images '/data/coco-test-{000000..000003}.tar'
python euclip/traverse.py --checkpoint meru_vit_b.pth --layout meru --images <folder> --captions pexels_text.json

Scenes bring their own captions, and a report of how well the walks run from specific to generic; so do tar shards with
a "hierarchy" in their json members. Other pictures are walked past the captions in photo_captions.json. Where there are
no entailment cones the root is the mean of training pairs: data.root=<folder> says where photographs lie.
"""

import argparse
import base64
import io
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import jinja2
import numpy as np
import torch
from PIL import Image
from torch.utils.data import Subset

from common.data.labelled import PICTURE_EXTENSIONS
from common.data.pairs import Pairs
from common.data.picture_files import read_picture
from common.data.scenes import SceneDataset
from common.data.shards import ShardDataset
from common.evaluation.embed import Encoder
from common.evaluation.trained import this_device
from common.report.tables import write_atomically
from common.run.checkpoint import open_checkpoint
from common.run.config import load_config
from common.run.session import provenance_of, run_or_explain
from euclip.caption_pools import (
    NOUN_PROMPT,
    PHOTO_CAPTIONS,
    Pool,
    has_hierarchy,
    hierarchy_pool,
    read_pool,
    scenes_pool,
)
from euclip.config import Config
from euclip.distributions import training_sample
from euclip.evaluate import PAPER, load_encoder
from euclip.published import LAYOUTS, open_published
from euclip.traversal import (
    NUM_POINTS,
    ROOT,
    SCORES,
    Hierarchy,
    generic_nearer,
    has_cones,
    mean_score,
    met,
    nearest_on_walk,
    root_of,
    stays,
    walk_scores,
)

NUM_WALKS = 60  # pictures, as in the paper
_SIDE = 256  # pixels of a picture on the page, at most


@dataclass(frozen=True)
class Task:
    """Pictures to walk from and captions to meet.

    pictures: len, [index] -> {"image", "image_id"}. image_id: index -> the picture's name.
    may_show: whether a page may hold the pictures themselves.
    """

    pictures: Any
    image_id: Callable[[int], str]
    pool: Pool
    may_show: bool


class PictureFolder:
    """Picture files of a folder, sorted by name.

    Raises:
        ValueError: if it is no folder or holds no picture.
    """

    def __init__(self, folder: Path, size: int) -> None:
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such folder; accepted: scenes, a folder of pictures, tar shards")
        files = sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURE_EXTENSIONS)
        if not files:
            raise ValueError(f"{folder} holds no picture; accepted: {', '.join(PICTURE_EXTENSIONS)}")
        self.files = files[:size]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": read_picture(self.files[index]), "image_id": self.image_id(index)}

    def image_id(self, index: int) -> str:
        return self.files[index].name


def scenes_task(image_size: int, size: int, pool: Pool | None = None) -> Task:
    """The first test scenes and, unless there is another pool, all their captions."""
    scenes = SceneDataset("test", size=size, image_size=image_size)
    pool = scenes_pool(scenes) if pool is None else pool
    return Task(scenes, lambda index: f"scene {index}", pool, may_show=True)


def pairs_task(pairs: Pairs, size: int, pool: Pool | None = None) -> Task:
    """The first pictures of a set; the captions are those of its hierarchies, or else our own for photographs.

    A page does not show the pictures: their licences are not known.
    """
    indices = range(min(size, len(pairs)))
    if pool is None:
        pool = hierarchy_pool(pairs, indices) if has_hierarchy(pairs) else read_pool(PHOTO_CAPTIONS)
    return Task(Subset(pairs, indices), pairs.image_id, pool, may_show=False)


def open_task(images: str, image_size: int, size: int, pool: Pool | None) -> Task:
    """What --images names: "scenes", a folder of picture files, or tar shards.

    Raises:
        ValueError: if it is none of these.
    """
    if images == "scenes":
        return scenes_task(image_size, size, pool)
    if images.endswith(".tar"):
        return pairs_task(ShardDataset(images, role="test"), size, pool)
    pictures = PictureFolder(Path(images), size)
    return Task(pictures, pictures.image_id, read_pool(PHOTO_CAPTIONS) if pool is None else pool, may_show=True)


@dataclass(frozen=True)
class Embedded:
    """A task, embedded on the encoder's device; pictures that could not be read are left out.

    rows: (num_images,) of the pictures in the task. images: (num_images, dim). captions: (num_captions, dim).
    hierarchy: of these pictures.
    """

    task: Task
    rows: list[int]
    images: torch.Tensor
    captions: torch.Tensor
    hierarchy: Hierarchy | None


def embed_task(encoder: Encoder, task: Task) -> Embedded:
    """Embeds pictures and captions.

    Raises:
        ValueError: if no picture can be read.
    """
    images, readable = encoder.images(task.pictures)
    rows = readable.nonzero().squeeze(1).tolist()
    if not rows:
        raise ValueError(f"none of the {len(task.pictures)} pictures could be read")
    captions = encoder.texts(list(task.pool.texts)).to(encoder.device)
    hierarchy = None if task.pool.hierarchy is None else task.pool.hierarchy.of_pictures(rows)
    return Embedded(task, rows, images[rows].to(encoder.device), captions, hierarchy)


@dataclass(frozen=True)
class Walks:
    """The walks of all pictures under one filter.

    places: of each picture, see `nearest_on_walk`. scores: of each picture, see `walk_scores`.
    """

    min_radius: float | None
    places: list[list[int]]
    scores: dict[str, list[float | None]]


def walk_all(
    encoder: Encoder, embedded: Embedded, root: torch.Tensor, min_radius: float | None, num_points: int = NUM_POINTS
) -> Walks:
    """Walks from every picture to the root; arguments as in `nearest_on_walk`."""
    geometry = encoder.model.geometry
    places = [
        nearest_on_walk(geometry, image, embedded.captions, root, num_points, min_radius) for image in embedded.images
    ]
    return Walks(min_radius, places, walk_scores(places, embedded.task.pool.tags, embedded.hierarchy))


def model_root(
    encoder: Encoder, config: Any, captions: torch.Tensor, normalised: bool = True
) -> tuple[torch.Tensor, str]:
    """The root of a trained model and what it is; training pairs are opened only where there is no origin.

    Args:
        encoder, config: of the model.
        captions: any embeddings, (num, dim).
        normalised: see `root_of`.
    """
    geometry = encoder.model.geometry
    if has_cones(geometry):
        return root_of(geometry, captions, captions), "the origin"
    sample = training_sample(encoder, config)
    what = f"{'normalised ' if normalised else ''}mean of image and text embeddings of {sample.name}"
    return root_of(geometry, sample.images, sample.texts, normalised), what


def unknown_words(encoder: Encoder, pool: Pool) -> float:
    """Share of the words of a pool that the model's vocabulary lacks; 0 for tokenizers that know every text."""
    tokenizer = encoder.tokenizer
    if not hasattr(tokenizer, "unknown_id"):
        return 0.0
    ids = tokenizer.encode(list(pool.texts), encoder.context_length)
    num_words = (ids != tokenizer.pad_id).sum().item() - 2 * len(ids)  # without the tokens that open and end a text
    return (ids == tokenizer.unknown_id).sum().item() / max(num_words, 1)


def report(embedded: Embedded, walks: Sequence[Walks], **facts: Any) -> dict[str, Any]:
    """Everything that a traversal found, as JSON values.

    Args:
        embedded: what was walked past.
        walks: one per filter.
        facts: where the numbers come from.
    """
    task = embedded.task
    tags, known = task.pool.tags, embedded.hierarchy
    ids = [task.image_id(row) for row in embedded.rows]
    return {
        **facts,
        "pool": task.pool.name,
        "num_captions": len(tags),
        "num_pictures": len(ids),
        "unreadable_pictures": len(task.pictures) - len(ids),
        "filters": [
            {
                "min_radius": each.min_radius,
                "means": {name: mean_score(values) for name, values in each.scores.items()},
                "pictures": [
                    {
                        "image_id": image_id,
                        "captions": [tags[place] for place in met(places, tags)],
                        "true_captions": [
                            tags[place] for place in met(places, tags) if known and known.holds[number, place]
                        ],
                        "walk": [[stay.caption, stay.first, stay.last] for stay in stays(places, tags)],
                        "scores": {name: values[number] for name, values in each.scores.items()},
                    }
                    for number, (image_id, places) in enumerate(zip(ids, each.places))
                ],
            }
            for each in walks
        ],
    }


def filter_name(min_radius: float | None) -> str:
    """ "no filter" or "K = 0.8"."""
    return "no filter" if min_radius is None else f"K = {min_radius:g}"


_LABELS = dict(
    zip(
        SCORES,
        (
            "captions met",
            "never back to a more specific one",
            "the same by chance",
            "Kendall's tau of step and level",
            "captions true of the picture",
            "level of the first caption",
            "level of the last caption",
        ),
    )
)


def summary_rows(content: dict[str, Any]) -> list[list[str]]:
    """The means as a table of texts: a heading, then one row per score, one column per filter."""
    filters = content["filters"]
    rows = [["mean over pictures", *(filter_name(each["min_radius"]) for each in filters)]]
    for name in filters[0]["means"]:
        values = [each["means"][name] for each in filters]
        rows.append([_LABELS[name], *("-" if value is None else f"{value:.3f}" for value in values)])
    return rows


def to_markdown(content: dict[str, Any]) -> str:
    """The report as text: how it was made, the means, and the captions of every picture."""
    lines = [f"# Captions on the way to the root: {content['geometry']}", ""]
    lines += [f"- {label}: {text}" for label, text in _facts(content)]
    lines += ["", *_table(summary_rows(content)), ""]
    heading = ["picture", *(filter_name(each["min_radius"]) for each in content["filters"])]
    rows = [
        [views[0]["image_id"], *("; ".join(view["captions"]) or "only the root" for view in views)]
        for views in zip(*(each["pictures"] for each in content["filters"]))
    ]
    return "\n".join([*lines, *_table([heading, *rows]), ""])


def _facts(content: dict[str, Any]) -> list[tuple[str, str]]:
    step = content["step"]
    facts = [
        ("model", f"{content['geometry']}, {'' if step is None else f'step {step} on '}{content['training_data']}"),
        ("root", content["root"]),
        ("points", f"{content['num_points']} from each picture to the root, both included"),
        ("captions", f"{content['num_captions']}: {content['pool']}"),
        ("pictures", f"{content['num_pictures']}, {content['unreadable_pictures']} could not be read"),
    ]
    if content["unknown_words"]:
        facts.append(("words of the captions that the model does not know", f"{content['unknown_words']:.1%}"))
    if content["generic_nearer"] is not None:
        share = f"{content['generic_nearer']:.1%} of the pairs of captions of one picture (chance 50%)"
        facts.append(("more generic caption nearer to the root", share))
    return facts


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]]


def to_page(content: dict[str, Any], task: Task, rows: Sequence[int]) -> str:
    """The report as one HTML page without requests to anywhere, with the pictures where they may be shown.

    Args:
        content: as `report` gives it.
        task: of the walks.
        rows: of the pictures in the task.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    pictures = [
        {
            "image_id": views[0]["image_id"],
            "data": _embedded_picture(task.pictures[row]["image"]) if task.may_show else "",
            "walks": [
                {"filter": filter_name(each["min_radius"]), "stays": view["walk"], "true": view["true_captions"]}
                for each, view in zip(content["filters"], views)
            ],
        }
        for row, views in zip(rows, zip(*(each["pictures"] for each in content["filters"])))
    ]
    return environment.get_template("traversal.html.jinja").render(
        geometry=content["geometry"],
        facts=_facts(content),
        summary=summary_rows(content),
        pictures=pictures,
        num_points=content["num_points"],
        root=ROOT,
        marked=task.pool.hierarchy is not None,
    )


def _embedded_picture(image: Image.Image | np.ndarray) -> str:
    """A small copy as the address of an inline image."""
    picture = Image.fromarray(image) if isinstance(image, np.ndarray) else image.convert("RGB")
    kind = "PNG" if max(picture.size) <= _SIDE else "JPEG"  # drawn pictures are small and must stay sharp
    picture.thumbnail((_SIDE, _SIDE))
    stream = io.BytesIO()
    picture.save(stream, kind, quality=85)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(stream.getvalue()).decode('ascii')}"


def write_report(content: dict[str, Any], task: Task, rows: Sequence[int], folder: Path) -> list[Path]:
    """Writes traversal.json, traversal.md and traversal.html; arguments as in `to_page`."""
    texts = {
        "json": json.dumps(content, indent=1, ensure_ascii=False) + "\n",
        "md": to_markdown(content),
        "html": to_page(content, task, rows),
    }
    return [write_atomically(folder / f"traversal.{ending}", text) for ending, text in texts.items()]


def open_model(
    checkpoint: Path, layout: str | None, geometry: str, overrides: Sequence[str]
) -> tuple[Any, Encoder, dict[str, Any]]:
    """Config, model and where its weights come from: a checkpoint of ours, or published weights.

    Args:
        checkpoint: folder of a run's step; with a layout what `open_published` takes.
        layout: of published weights, None = ours.
        geometry: see `open_published`.
        overrides: "section.key=value".
    """
    if layout is None:
        opened = open_checkpoint(checkpoint)
        config, encoder = load_encoder(opened, this_device(), overrides)
        return config, encoder, {name: opened.state[name] for name in ("step", "training_data")}
    config = load_config(Config, [], [*overrides, f"method.geometry={geometry}"])
    encoder = open_published(str(checkpoint), layout, geometry, None, config, this_device())
    return config, encoder, {"step": None, "training_data": f"published weights {checkpoint.name}"}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; `arguments` replaces sys.argv."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--checkpoint", required=True, type=Path, help="folder step-XXXXXXXX of a run; with --layout a file"
    )
    parser.add_argument("--layout", help="published weights, as in published.py: " + ", ".join(LAYOUTS))
    parser.add_argument("--geometry", default="sphere", help="layout open_clip: that it was trained with")
    parser.add_argument("--images", default="scenes", help="scenes, a folder of pictures, or tar shards")
    parser.add_argument(
        "--captions", type=Path, help="file: a caption a line, or JSON with captions, nouns, adjectives"
    )
    parser.add_argument("--pictures", type=int, default=NUM_WALKS, help="walk from so many, default %(default)s")
    parser.add_argument("--steps", type=int, default=NUM_POINTS, help="points of a walk, default %(default)s")
    parser.add_argument("--min-radius", type=float, nargs="+", default=[], help="K of the entailment filter; several")
    parser.add_argument("--noun-prompt", default=NOUN_PROMPT, help="default %(default)r; the paper: 'a photo of {}.'")
    parser.add_argument("--plain-mean", action="store_true", help="sphere: the mean as root is not normalised")
    parser.add_argument("--output", type=Path, help="folder for JSON, Markdown and a page; default: print the table")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. data.root=/data/flickr8k")
    given = parser.parse_intermixed_args(arguments)
    if given.pictures < 1:
        raise ValueError(f"--pictures {given.pictures}; accepted: at least 1")

    pool = None if given.captions is None else read_pool(given.captions, given.noun_prompt)
    config, encoder, facts = open_model(given.checkpoint, given.layout, given.geometry, given.overrides)
    geometry = encoder.model.geometry
    task = open_task(given.images, encoder.transform.size, given.pictures, pool)
    embedded = embed_task(encoder, task)
    root, what = model_root(encoder, config, embedded.captions, not given.plain_mean)
    walks = [walk_all(encoder, embedded, root, radius, given.steps) for radius in (None, *given.min_radius)]
    known = embedded.hierarchy
    content = report(
        embedded,
        walks,
        **facts,
        geometry=geometry.name,
        root=what,
        num_points=given.steps,
        unknown_words=unknown_words(encoder, task.pool),
        generic_nearer=known and generic_nearer(geometry.distance_to(embedded.captions, root).cpu(), known.chains),
        **provenance_of(PAPER),
    )
    if given.output is None:
        print(to_markdown(content))
        return
    for path in write_report(content, task, embedded.rows, given.output):
        print(path)


if __name__ == "__main__":
    run_or_explain(main)
