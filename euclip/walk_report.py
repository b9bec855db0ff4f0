"""What a traversal found as JSON, as Markdown, and as one HTML page."""

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from PIL import Image

from common.report.tables import write_atomically
from euclip.traversal import ROOT, SCORES, mean_score, met, stays
from euclip.walks import Embedded, Task, Walks

_SIDE = 256  # pixels of a picture on the page, at most


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
        "pictures": task.name,
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


def without_texts(content: dict[str, Any]) -> dict[str, Any]:
    """The report's facts and means alone: for captions that may not be passed on."""
    return {**content, "filters": [{key: each[key] for key in ("min_radius", "means")} for each in content["filters"]]}


def to_markdown(content: dict[str, Any]) -> str:
    """The report as text: how it was made, the means, and the captions of every picture."""
    lines = [f"# Captions on the way to the root: {content['geometry']}", ""]
    lines += [f"- {label}: {text}" for label, text in _facts(content)]
    lines += ["", *_table(summary_rows(content)), ""]
    if "pictures" not in content["filters"][0]:
        return "\n".join(lines)
    heading = ["picture", *(filter_name(each["min_radius"]) for each in content["filters"])]
    rows = [
        [views[0]["image_id"], *("; ".join(view["captions"]) or "only the root" for view in views)]
        for views in zip(*(each["pictures"] for each in content["filters"]))
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
    """Writes traversal.json, traversal.md and, with captions, traversal.html; arguments as in `to_page`."""
    texts = {
        "json": json.dumps(content, indent=1, ensure_ascii=False) + "\n",
        "md": to_markdown(content),
        **({"html": to_page(content, task, rows)} if "pictures" in content["filters"][0] else {}),
    }
    return [write_atomically(folder / f"traversal.{ending}", text) for ending, text in texts.items()]
