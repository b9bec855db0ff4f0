"""Searches your folder of photographs by words, after training on those with captions.

    python -m examples.search_my_photos ~/photos "two dogs on a beach" "birthday cake" --weights /data/weights
    python -m examples.search_my_photos ~/photos/captions.tsv "a red boat" --weights /data/weights

A folder has NAME.txt beside NAME.jpg, one caption per line; a table (TSV or CSV) has a path and a caption per row. The
search covers all images, also those without a caption. Every tenth captioned image is a test image, for the reported
recall. A few hundred captions are enough to be useful. An EfficientNet and a BERT compute features once, and a
projection is trained on each; --set model.image.layers=2 model.text.layers=2 trains transformers instead. Without a
BERT in --weights words are learned from scratch. The next call with the same images only searches. The page contains
the images. All files stay in outputs/; nothing is uploaded.
"""

import base64
import io
import json
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import jinja2
import torch

from common.base.arguments import Parser
from common.base.config import load_row
from common.base.files import printable, shown, write_atomically
from common.base.places import ROOT, outputs
from common.data.decoding import read_picture
from common.data.folder import captions_beside
from common.data.pairs import open_training_pairs
from common.data.shard_paths import PICTURE_EXTENSIONS, visible_below
from common.data.tsv import open_tsv
from common.reproduce.rows import is_current
from common.run.folder import only_run_in, run_files
from common.run.inputs import feature_cache
from common.run.launch import run_or_explain, start_accelerator
from common.run.named_models import open_model
from contrastive_basics.config import Config
from contrastive_basics.reproduce import CODE
from contrastive_basics.train import train

PAPER = ROOT / "contrastive_basics"
BERT = "all-MiniLM-L6-v2"
FEWEST = 20  # captioned pictures
NOT_READ = (".heic", ".heif", ".avif", ".jxl", ".dng", ".cr2", ".cr3", ".nef", ".arw")  # photographs


def captioned(source: Path) -> dict[Path, list[str]]:
    """All images of a folder, or of a table's folder, with their captions, which may be empty."""
    folder, captions = source, {}
    if not source.is_dir():
        pairs = open_tsv(source, role="test", max_broken_share=1.0)  # named below
        if pairs.broken_at_open:
            print(f"rows that cannot be used: {len(pairs.broken_at_open)}; the first: {pairs.broken_at_open[0]}")
        folder, captions = pairs.images, {pairs.path(row).resolve(): pairs.captions(row) for row in range(len(pairs))}
    files = visible_below(folder.resolve())
    left_out = Counter(suffix for path in files if (suffix := path.suffix.lower()) in NOT_READ)
    if left_out:
        counts = ", ".join(f"{count} {suffix}" for suffix, count in left_out.items())
        print(f"not searched: {counts}; expected: JPEG, PNG, WebP, ...")
    for path in (path for path in files if path.suffix.lower() in PICTURE_EXTENSIONS):
        with suppress(FileNotFoundError):
            captions.setdefault(path, captions_beside(path))
        captions.setdefault(path, [])
    captions = {path: [" ".join(text.split()) for text in texts] for path, texts in captions.items()}
    return {path: [text for text in texts if text] for path, texts in captions.items()}


def write_tables(pictures: dict[Path, list[str]], folder: Path) -> dict[str, Path]:
    """Writes tables of training images, test images and images without a caption; skips empty ones."""
    known = [path for path, captions in pictures.items() if captions]
    parts = {"test": known[::10], "train": [path for row, path in enumerate(known) if row % 10]}
    parts["others"] = [path for path, captions in pictures.items() if not captions]
    folder.mkdir(parents=True, exist_ok=True)
    for name, paths in parts.items():
        rows = [f"{path}\t{caption}\n" for path in paths for caption in pictures[path] or [""]]
        (folder / f"{name}.tsv").write_bytes("".join(["path\tcaption\n", *rows]).encode("utf-8", "surrogateescape"))
    return {name: folder / f"{name}.tsv" for name, paths in parts.items() if paths}


def thumbnail(path: Path) -> str:
    """A small JPEG as a data URI, rotated as the camera recorded."""
    stream = io.BytesIO()
    small = read_picture(path)
    small.thumbnail((320, 320))
    small.save(stream, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"


PAGE = jinja2.Template(
    """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>My photographs</title>
<style>
:root { color-scheme: light dark }
body { font: 1rem/1.4 system-ui, sans-serif; max-width: 80rem; margin: 0 auto; padding: 1rem }
div { display: grid; grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); gap: 1rem }
figure { margin: 0 }
img { width: 100%; aspect-ratio: 1; object-fit: cover; border-radius: .4rem }
figcaption { font-size: .85rem; overflow-wrap: anywhere }
</style>
<h1>My photographs</h1>
<p>{{ about }}</p>
{% for query, rows in matches.items() %}<h2>{{ query }}</h2>
<div>{% for path, score in rows %}
<figure><img src="{{ thumbnail(path) }}" alt="{{ (pictures[path] or [path.name])[0] }}"><figcaption>
<b>{{ "%.2f" % score }}</b> {{ path.name }}{% for text in pictures[path] or ["no caption"] %}<br>{{ text }}{% endfor %}
</figcaption></figure>{% endfor %}
</div>
{% endfor %}""",
    autoescape=True,
)


def main(arguments: list[str] | None = None) -> Path:
    parser = Parser(__doc__)
    parser.add_argument("photos", type=Path, help="folder of pictures, or table of paths and captions")
    parser.add_argument("queries", nargs="+", help="texts to search for")
    parser.add_argument("--weights", default="", help="folder with weights by name, default: timm's from the hub")
    parser.add_argument("--best", type=int, default=8, help="pictures shown for each query, default %(default)s")
    parser.add_argument("--output", type=Path, default=outputs() / "my_photos", help="default %(default)s")
    parser.add_argument("--set", nargs="+", default=[], metavar="section.key=value", help="any setting of a run")
    options = parser.parse_args(arguments)

    pictures = captioned(options.photos)
    captions = sum(map(bool, pictures.values()))
    if captions < FEWEST:
        raise ValueError(
            f"{options.photos}: {captions} of {len(pictures)} pictures have a caption; expected: a table of path and "
            f"caption, or NAME.txt beside NAME.jpg, for at least {FEWEST}"
        )
    tables = write_tables(pictures, options.output.resolve())
    settings = [
        "data.source=tsv", f"data.train={tables['train']}", f"data.test={tables['test']}", "model.image.layers=0",
        f"model.weights={options.weights}", f"optim.global_batch_size={min(256, captions * 8 // 10)}",
        "optim.steps=200", "optim.warmup_steps=20", "run.evaluate_every=0", "model.image.stem.dropout=0.5",
    ]  # fmt: skip
    if (Path(options.weights).expanduser() / BERT).is_dir():  # else words from scratch, through two layers
        settings += ["model.text.layers=0", f"model.text.stem.weights={BERT}"]
        settings += ["data.tokenizer=bert_wordpiece", f"data.vocabulary={BERT}"]
    config = load_row(Config, PAPER, PAPER / "configs" / "table1_ours.yaml", "photos", [*settings, *options.set])

    # the ordinary training of a paper's folder, unless it has finished already; other test images are only evaluated
    pairs = open_training_pairs(config.data, config.run.seed)
    files = run_files(PAPER.name, "my_photos", "photos", config, pairs.fingerprint, options.output / "runs")
    if not is_current(files, CODE.open_tests(config.data)):
        with only_run_in(files):
            train(config, pairs, files, True, start_accelerator(config.run, files.folder), "my photographs")
    evaluation = json.loads(files.evaluation.read_text(encoding="utf-8"))["evaluations"]["test"]
    _, encoder = open_model(str(files.folder))
    encoder = replace(encoder, cache=feature_cache(encoder.model, config, encoder.device))

    # all pictures against the queries
    paths, embeddings, unreadable = [], [], []
    for table in tables.values():
        part = open_tsv(table, role="test", max_broken_share=1.0)  # "cannot be read" names them
        images, readable = encoder.images(part)
        paths += [part.path(row) for row in readable.nonzero().squeeze(1).tolist()]
        unreadable += [part.path(row) for row in (~readable).nonzero().squeeze(1).tolist()] + part.broken_at_open
        embeddings.append(images[readable])
    scores = encoder.model.geometry.similarity(torch.cat(embeddings), encoder.texts(options.queries))
    matches = {}
    for query, column in zip(options.queries, scores.T):
        best, rows = column.topk(min(options.best, len(paths)))
        matches[query] = [(paths[row], score) for row, score in zip(rows.tolist(), best.tolist())]
        print(f"{query}: {', '.join(printable(path.name) for path, _ in matches[query])}")
    if unreadable:
        print(f"cannot be read ({len(unreadable)}): {', '.join(printable(str(picture)) for picture in unreadable)}")
    protocol, metrics = evaluation["protocol"], evaluation["metrics"]
    about = (
        f"{len(paths)} pictures searched. Of {protocol['num_texts']} captions that were not in training "
        f"{100 * metrics['t2i_recall_at_1']:.0f} % find their picture first among {protocol['num_images']}"
    )
    if protocol["num_images"] >= 2 * FEWEST:  # among twenty, ten are half of all
        about += f", {100 * metrics['t2i_recall_at_10']:.0f} % among the first ten"
    about += "."
    file = options.output / "search.html"
    write_atomically(file, PAGE.render(matches=matches, pictures=pictures, thumbnail=thumbnail, about=about))
    print(f"{about}\n{shown(file)}")
    return file


if __name__ == "__main__":
    run_or_explain(main)
