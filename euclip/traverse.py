"""Walks from pictures to the root of a model's space and lists the captions on the way (EuCLIP, Tables 2, 3, 6, 7).

python euclip/traverse.py --checkpoint outputs/runs/euclip/<run>/seed0 --min-radius 0.3 0.8
python euclip/traverse.py --checkpoint <folder> --images my_photos --captions my_captions.txt --output outputs/walks
python euclip/traverse.py --checkpoint <folder> --images '/data/coco-test-{000000..000003}.tar'
python euclip/traverse.py --checkpoint meru_vit_b.pth --layout meru --images <folder> --captions pexels_text.json

Scenes, and tar shards with a "hierarchy" in their json members, have captions of known order, so the report also scores
how well the walks run from specific to generic. Other images use the captions in photo_captions.json. Without
entailment cones the root is the mean of the training pairs: data.root=<folder> is their folder; published weights need
data.source=shards data.root=<folder>.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.base.arguments import Parser
from common.base.files import write_atomically
from common.encoders.transformer import Activation
from common.evaluation.embed import Encoder
from common.geometry import RootedGeometry
from common.run.checkpoint import named_checkpoint
from common.run.evaluation import this_device
from common.run.folder import provenance_of
from common.run.launch import run_or_explain
from euclip.evaluate import load_encoder
from euclip.published import LAYOUTS, open_published, published_config
from euclip.traversal import NUM_POINTS, SCORES, generic_nearer, mean_score, met, stays
from euclip.traversal_data import (
    NOUN_PROMPT,
    NUM_WALKS,
    Embedded,
    Walks,
    embed_task,
    model_root,
    open_task,
    read_pool,
    unknown_words,
    walk_all,
)

DECIDES = "evaluation"


# ---------------------------------------------------------------- the report as JSON and as Markdown


def report(embedded: Embedded, walks: Sequence[Walks], **facts: Any) -> dict[str, Any]:
    """The results of a traversal as JSON values.

    Args:
        walks: one per filter.
        facts: provenance.
    """
    task = embedded.task
    tags, known = task.pool.tags, embedded.hierarchy
    ids = [task.image_id(row) for row in embedded.rows]
    return {
        **facts,
        "pictures": task.name,
        "pool": task.pool.name,
        "num_captions": len(tags),
        "num_pictures": len(ids),
        "unreadable_pictures": len(task.pictures) - len(ids),
        "filters": [
            {
                "min_radius": group.min_radius,
                "means": {name: mean_score(values) for name, values in group.scores.items()},
                "pictures": [
                    {
                        "image_id": image_id,
                        "captions": [tags[place] for place in met(places, tags)],
                        "true_captions": [
                            tags[place] for place in met(places, tags) if known and known.holds[number, place]
                        ],
                        "walk": [[stay.caption, stay.first, stay.last] for stay in stays(places, tags)],
                        "scores": {name: values[number] for name, values in group.scores.items()},
                    }
                    for number, (image_id, places) in enumerate(zip(ids, group.places))
                ],
            }
            for group in walks
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
            "captions known to be true of the picture",
            "level of the first caption",
            "level of the last caption",
        ),
    )
)


def summary_rows(content: dict[str, Any]) -> list[list[str]]:
    """The means as a table of strings: a heading, then one row per score, one column per filter."""
    filters = content["filters"]
    rows = [["mean over pictures", *(filter_name(entry["min_radius"]) for entry in filters)]]
    for name in filters[0]["means"]:
        values = [entry["means"][name] for entry in filters]
        rows.append([_LABELS[name], *("-" if value is None else f"{value:.3f}" for value in values)])
    return rows


def without_texts(content: dict[str, Any]) -> dict[str, Any]:
    """Only the report's facts and means, for captions that may not be redistributed."""
    return {
        **content,
        "filters": [{key: entry[key] for key in ("min_radius", "means")} for entry in content["filters"]],
    }


def to_markdown(content: dict[str, Any]) -> str:
    """The report as Markdown: settings, means, and the captions of every image."""
    lines = [f"# Captions on the way to the root: {content['geometry']}", ""]
    lines += [f"- {label}: {text}" for label, text in _facts(content)]
    lines += ["", *_table(summary_rows(content)), ""]
    if "pictures" not in content["filters"][0]:
        return "\n".join(lines)
    heading = ["picture", *(filter_name(entry["min_radius"]) for entry in content["filters"])]
    rows = [
        [views[0]["image_id"], *("; ".join(view["captions"]) or "only the root" for view in views)]
        for views in zip(*(entry["pictures"] for entry in content["filters"]))
    ]
    return "\n".join([*lines, *_table([heading, *rows]), ""])


def _facts(content: dict[str, Any]) -> list[tuple[str, str]]:
    step, unreadable = content["step"], content["unreadable_pictures"]
    facts = [
        ("model", f"{content['geometry']}, {'' if step is None else f'step {step} on '}{content['training_data']}"),
        ("root", content["root"]),
        ("points", f"{content['num_points']} from each picture to the root, both included"),
        ("captions", f"{content['num_captions']}: {content['pool']}"),
        ("pictures", f"{content['num_pictures']} of {content['pictures']}, {unreadable} could not be read"),
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


def write_report(content: dict[str, Any], folder: Path) -> list[Path]:
    """Writes traversal.json and traversal.md."""
    texts = {"json": json.dumps(content, indent=1, ensure_ascii=False) + "\n", "md": to_markdown(content)}
    return [write_atomically(folder / f"traversal.{ending}", text) for ending, text in texts.items()]


# ---------------------------------------------------------------- the command


def open_model(
    checkpoint: Path, layout: str | None, geometry: str, activation: Activation | None, overrides: Sequence[str]
) -> tuple[Any, Encoder, dict[str, Any]]:
    """Config, model and provenance of a checkpoint of this repository, or of published weights.

    Args:
        checkpoint: folder of a run or step; with a layout as in `open_published`.
        layout: of published weights, None = a checkpoint of this repository.
        geometry, activation: see `open_published`.
        overrides: "section.key=value".
    """
    if layout is None:
        opened = named_checkpoint(checkpoint)
        config, encoder = load_encoder(opened, this_device(), overrides)
        return config, encoder, {name: opened.state[name] for name in ("step", "training_data")}
    config = published_config(overrides, geometry)
    encoder = open_published(str(checkpoint), layout, geometry, activation, config, this_device())
    return config, encoder, {"step": None, "training_data": f"published weights {checkpoint.name}"}


def _check(options: argparse.Namespace) -> None:
    """Rejects arguments that would fail late or have no effect."""
    if options.pictures < 1:
        raise ValueError(f"--pictures {options.pictures}; expected: at least 1")
    if options.steps < 2:
        raise ValueError(f"--steps {options.steps}; expected: at least 2, the picture and the root")
    wrong = [radius for radius in options.min_radius if not radius >= 0]
    if wrong:
        raise ValueError(f"--min-radius {wrong[0]:g}; expected: at least 0")
    if options.noun_prompt is not None and options.captions is None:
        raise ValueError("--noun-prompt goes with --captions; without it there are no nouns to put into a prompt")
    if options.geometry is not None and options.layout is None:
        raise ValueError("--geometry goes with --layout open_clip; a checkpoint of ours knows its own")
    if options.activation is not None and options.layout is None:
        raise ValueError("--activation goes with --layout; a checkpoint of ours knows its own")


def _check_root(options: argparse.Namespace, geometry: RootedGeometry) -> None:
    """Rejects arguments that do not apply to the geometry's root, and a root whose training pairs are not named."""
    if geometry.has_cones:
        if options.plain_mean:
            raise ValueError(f"--plain-mean: the root of geometry {geometry.name!r} is the origin")
        unread = [text for text in options.overrides if text.startswith(("data.source=", "data.root=", "data.train="))]
        if unread:
            raise ValueError(
                f"{unread[0]}: the root of geometry {geometry.name!r} is the origin, no training pairs are read; "
                "expected: no such setting. Images and captions come from --images and --captions"
            )
        return
    if options.min_radius:
        raise ValueError(f"--min-radius: geometry {geometry.name!r} has no entailment cones; expected: no filter")
    if options.layout is not None and not any(text.startswith("data.source=") for text in options.overrides):
        raise ValueError(
            f"the root of geometry {geometry.name!r} is the mean of training pairs, which published weights do not "
            "name; expected: data.source=shards data.root=<folder>, or data.source=scenes"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; `arguments` replaces sys.argv."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--checkpoint", required=True, type=Path, help="folder of a run, or step-XXXXXXXX in it; with --layout a file"
    )
    parser.add_argument("--layout", help="published weights, as in published.py: " + ", ".join(LAYOUTS))
    parser.add_argument("--geometry", help="layout open_clip: the geometry of its training, default sphere")
    parser.add_argument("--activation", choices=("gelu", "quick_gelu"), help="of a bare file of published weights")
    parser.add_argument("--images", default="scenes", help="scenes, a folder of pictures, or tar shards")
    parser.add_argument(
        "--captions", type=Path, help="file: a caption a line, or JSON with captions, nouns, adjectives"
    )
    parser.add_argument("--pictures", type=int, default=NUM_WALKS, help="number of images, default %(default)s")
    parser.add_argument("--steps", type=int, default=NUM_POINTS, help="points of a walk, default %(default)s")
    parser.add_argument("--min-radius", type=float, nargs="+", default=[], help="K of the entailment filter; several")
    parser.add_argument(
        "--noun-prompt", help=f"of the nouns in --captions, default {NOUN_PROMPT!r}; the paper: 'a photo of {{}}.'"
    )
    parser.add_argument("--plain-mean", action="store_true", help="sphere: the mean as root is not normalised")
    parser.add_argument(
        "--scores-only", action="store_true", help="only means, for captions that may not be redistributed"
    )
    parser.add_argument("--output", type=Path, help="folder for JSON and Markdown; default: print the table")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. data.root=/data/flickr8k")
    options = parser.parse_intermixed_args(arguments)
    _check(options)

    # the pool first: a wrong file of captions fails before a model is loaded
    noun_prompt = NOUN_PROMPT if options.noun_prompt is None else options.noun_prompt
    pool = None if options.captions is None else read_pool(options.captions, noun_prompt)
    of_weights = "sphere" if options.geometry is None else options.geometry
    config, encoder, facts = open_model(
        options.checkpoint, options.layout, of_weights, options.activation, options.overrides
    )
    geometry = encoder.model.geometry
    _check_root(options, geometry)
    # images, captions and root in one space
    task = open_task(options.images, encoder.transform.size, options.pictures, pool)
    embedded = embed_task(encoder, task)
    root, what = model_root(encoder, config, embedded.captions, not options.plain_mean)
    walks = [walk_all(encoder, embedded, root, radius, options.steps) for radius in (None, *options.min_radius)]
    # scores of order exist only where the captions' hierarchy is known
    known = embedded.hierarchy
    content = report(
        embedded,
        walks,
        **facts,
        geometry=geometry.name,
        root=what,
        num_points=options.steps,
        unknown_words=unknown_words(encoder, task.pool),
        generic_nearer=known and generic_nearer(geometry.distance_to(embedded.captions, root).cpu(), known.chains),
        **provenance_of(),
    )
    if options.scores_only:
        content = without_texts(content)
    if options.output is None:
        print(to_markdown(content))
        return
    for path in write_report(content, options.output):
        print(path)


if __name__ == "__main__":
    run_or_explain(main)
