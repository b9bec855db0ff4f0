"""Walks from pictures to the root of a model's space and lists the captions on the way (EuCLIP, Tables 2, 3, 6, 7).

python euclip/traverse.py --checkpoint outputs/runs/euclip/<run>/seed0 --min-radius 0.3 0.8
python euclip/traverse.py --checkpoint <folder> --images my_photos --captions my_captions.txt --output outputs/walks
python euclip/traverse.py --checkpoint <folder> --images '/data/coco-test-{000000..000003}.tar'
python euclip/traverse.py --checkpoint meru_vit_b.pth --layout meru --images <folder> --captions pexels_text.json

Scenes bring their own captions, and a report of how well the walks run from specific to generic; so do tar shards with
a "hierarchy" in their json members. Other pictures are walked past the captions in photo_captions.json. Where there are
no entailment cones the root is the mean of training pairs: data.root=<folder> says where photographs lie, for published
weights data.source=shards data.root=<folder> which ones they are.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.encoders.transformer import Activation
from common.evaluation.embed import Encoder
from common.evaluation.trained import this_device
from common.geometry import Geometry
from common.run.checkpoint import named_checkpoint
from common.run.session import provenance_of, run_or_explain
from euclip.caption_pools import NOUN_PROMPT, read_pool
from euclip.evaluate import PAPER, load_encoder
from euclip.published import LAYOUTS, open_published, published_config
from euclip.traversal import NUM_POINTS, generic_nearer, has_cones
from euclip.walk_report import report, to_markdown, without_texts, write_report
from euclip.walks import NUM_WALKS, embed_task, model_root, open_task, unknown_words, walk_all


def open_model(
    checkpoint: Path, layout: str | None, geometry: str, activation: Activation | None, overrides: Sequence[str]
) -> tuple[Any, Encoder, dict[str, Any]]:
    """Config, model and where its weights come from: a checkpoint of ours, or published weights.

    Args:
        checkpoint: folder of a run's step; with a layout what `open_published` takes.
        layout: of published weights, None = ours.
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


def _check(given: argparse.Namespace) -> None:
    """Refuses arguments that would fail late or do nothing."""
    if given.pictures < 1:
        raise ValueError(f"--pictures {given.pictures}; accepted: at least 1")
    if given.steps < 2:
        raise ValueError(f"--steps {given.steps}; accepted: at least 2, the picture and the root")
    wrong = [radius for radius in given.min_radius if not radius >= 0]
    if wrong:
        raise ValueError(f"--min-radius {wrong[0]:g}; accepted: at least 0")
    if given.noun_prompt is not None and given.captions is None:
        raise ValueError("--noun-prompt goes with --captions; without it there are no nouns to put into a prompt")
    if given.geometry is not None and given.layout is None:
        raise ValueError("--geometry goes with --layout open_clip; a checkpoint of ours knows its own")
    if given.activation is not None and given.layout is None:
        raise ValueError("--activation goes with --layout; a checkpoint of ours knows its own")


def _check_root(given: argparse.Namespace, geometry: Geometry) -> None:
    """Refuses what the geometry's root has no use for, and training pairs that nobody named."""
    if has_cones(geometry):
        if given.plain_mean:
            raise ValueError(f"--plain-mean: the root of geometry {geometry.name!r} is the origin")
        return
    if given.min_radius:
        raise ValueError(f"--min-radius: geometry {geometry.name!r} has no entailment cones; accepted: no filter")
    if given.layout is not None and not any(text.startswith("data.source=") for text in given.overrides):
        raise ValueError(
            f"the root of geometry {geometry.name!r} is the mean of training pairs, and published weights do not bring "
            "them; accepted: data.source=shards data.root=<folder>, or data.source=scenes"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; `arguments` replaces sys.argv."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--checkpoint", required=True, type=Path, help="folder of a run, or step-XXXXXXXX in it; with --layout a file"
    )
    parser.add_argument("--layout", help="published weights, as in published.py: " + ", ".join(LAYOUTS))
    parser.add_argument("--geometry", help="layout open_clip: that it was trained with, default sphere")
    parser.add_argument("--activation", choices=("gelu", "quick_gelu"), help="of a bare file of published weights")
    parser.add_argument("--images", default="scenes", help="scenes, a folder of pictures, or tar shards")
    parser.add_argument(
        "--captions", type=Path, help="file: a caption a line, or JSON with captions, nouns, adjectives"
    )
    parser.add_argument("--pictures", type=int, default=NUM_WALKS, help="walk from so many, default %(default)s")
    parser.add_argument("--steps", type=int, default=NUM_POINTS, help="points of a walk, default %(default)s")
    parser.add_argument("--min-radius", type=float, nargs="+", default=[], help="K of the entailment filter; several")
    parser.add_argument(
        "--noun-prompt", help=f"of the nouns in --captions, default {NOUN_PROMPT!r}; the paper: 'a photo of {{}}.'"
    )
    parser.add_argument("--plain-mean", action="store_true", help="sphere: the mean as root is not normalised")
    parser.add_argument(
        "--scores-only", action="store_true", help="means alone, no captions: where these may not be shared"
    )
    parser.add_argument("--output", type=Path, help="folder for JSON, Markdown and a page; default: print the table")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. data.root=/data/flickr8k")
    given = parser.parse_intermixed_args(arguments)
    _check(given)

    noun_prompt = NOUN_PROMPT if given.noun_prompt is None else given.noun_prompt
    pool = None if given.captions is None else read_pool(given.captions, noun_prompt)
    of_weights = "sphere" if given.geometry is None else given.geometry
    config, encoder, facts = open_model(given.checkpoint, given.layout, of_weights, given.activation, given.overrides)
    geometry = encoder.model.geometry
    _check_root(given, geometry)
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
    if given.scores_only:
        content = without_texts(content)
    if given.output is None:
        print(to_markdown(content))
        return
    for path in write_report(content, task, embedded.rows, given.output):
        print(path)


if __name__ == "__main__":
    run_or_explain(main)
