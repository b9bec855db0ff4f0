"""Contact sheets of the embedded data set, and its ceilings.

python scripts/draw_scenes.py               # writes docs/scenes/*.png
python scripts/draw_scenes.py --ceiling     # best possible R@1 of an oracle, test and test_crowded, 1,000 pictures
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import itertools
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from common.base.arguments import Parser
from common.data.scenes import (
    CLASSIFICATION_TASKS,
    SPLITS,
    Scene,
    SceneDataset,
    SceneObject,
    annotation_task,
    caption_positives,
    classification_task,
    render,
)
from common.data.scenes.captions import NUM_CAPTIONS
from common.data.scenes.tasks.entailment import ENTAILMENT_LABELS
from common.data.scenes.world import COLOURS, RENDITIONS, SHAPES, TEXTURES

SIZE = 48  # pictures are drawn as they are trained on, then enlarged
ZOOM = 2
TILE = SIZE * ZOOM
FONT = ImageFont.load_default(size=12)
INK, PALE, FRAME, RIGHT, WRONG = (20, 20, 20), (120, 120, 120), (190, 190, 190), (0, 120, 40), (190, 30, 30)


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` pixels, broken between words."""
    lines, line = [], ""
    for word in text.split():
        longer = f"{line} {word}".strip()
        if line and FONT.getlength(longer) > width:
            lines.append(line)
            line = word
        else:
            line = longer
    return [*lines, line]


def cell(picture: np.ndarray, lines: list[tuple[str, tuple]], width: int, beside: bool) -> Image.Image:
    """A picture, enlarged, with wrapped coloured text beside or below it; as high as it needs to be."""
    enlarged = Image.fromarray(picture).resize((picture.shape[1] * ZOOM, picture.shape[0] * ZOOM), Image.NEAREST)
    room = width - enlarged.width - 14 if beside else width - 6
    texts = [(line, colour) for text, colour in lines for line in wrapped(text, room)]
    left, top = (enlarged.width + 8, 0) if beside else (2, enlarged.height + 2)
    sheet = Image.new("RGB", (width, max(enlarged.height, top + 15 * len(texts)) + 6), "white")
    sheet.paste(enlarged, (0, 2))
    draw = ImageDraw.Draw(sheet)
    draw.rectangle((0, 2, enlarged.width - 1, enlarged.height + 1), outline=FRAME)
    for k, (line, colour) in enumerate(texts):
        draw.text((left, top + 15 * k), line, fill=colour, font=FONT)
    return sheet


def arranged(cells: list[Image.Image], columns: int, gap: int = 8) -> Image.Image:
    """Cells row by row; every row as high as its highest cell."""
    rows = [cells[k : k + columns] for k in range(0, len(cells), columns)]
    heights = [max(c.height for c in row) for row in rows]
    width = max(sum(c.width + gap for c in row) for row in rows) + gap
    sheet = Image.new("RGB", (width, sum(heights) + gap * (len(rows) + 1)), "white")
    y = gap
    for row, height in zip(rows, heights):
        x = gap
        for item in row:
            sheet.paste(item, (x, y))
            x += item.width + gap
        y += height + gap
    return sheet


def heading(text: str, width: int) -> Image.Image:
    """A line of larger text as an image."""
    image = Image.new("RGB", (width, 20), "white")
    ImageDraw.Draw(image).text((0, 2), text, fill=INK, font=ImageFont.load_default(size=14))
    return image


def save(sheet: Image.Image, path: Path) -> None:
    """Palette PNG; the palette is spread over the colours that occur, rare ones too, not over the pixels."""
    levels = np.asarray(sheet) & 0xFC
    colours, counts = np.unique(levels.reshape(-1, 3), axis=0, return_counts=True)
    weights = np.ceil(counts**0.45).astype(int)  # frequent colours get finer steps, rare ones still an entry
    palette = Image.fromarray(np.repeat(colours, weights, 0)[None]).quantize(256, kmeans=2)
    flat = Image.fromarray(levels).quantize(palette=palette, dither=Image.Dither.NONE)
    entries, paper = flat.getpalette(), flat.getpixel((0, 0))
    entries[3 * paper : 3 * paper + 3] = (255, 255, 255)
    flat.putpalette(entries)
    flat.save(path, optimize=True)
    print(f"{path}  {sheet.width} x {sheet.height}  {path.stat().st_size / 1000:.0f} kB")


def split_sheet(split: str) -> Image.Image:
    """Ten pictures with their five captions, and one hard negative in red."""
    dataset = SceneDataset(split, image_size=SIZE)
    cells = []
    for i in range(10):
        item = dataset[i]
        lines = [(f"{k}  {caption}", INK if k < 4 else PALE) for k, caption in enumerate(item["captions"])]
        cells.append(
            cell(item["image"], [*lines, (f"false:  {dataset.hard_negatives(i)[0][1]}", WRONG)], 560, beside=True)
        )
    return arranged(cells, 2)


def imperfect_sheet() -> Image.Image:
    """The same pictures with their own captions, with shuffled ones (noise), and with vague ones (ambiguity)."""
    cells = []
    for title, options in (
        ("caption_noise=1: the captions of another picture", {"caption_noise": 1.0}),
        ("ambiguity=1: captions that hold of many pictures", {"ambiguity": 1.0}),
    ):
        dataset = SceneDataset("train", size=50_000, image_size=SIZE, **options)  # noise draws its captions among all
        cells += [heading(title, 560), heading("", 560)]
        for i in range(4):
            item = dataset[i]
            cells.append(cell(item["image"], [(c, INK) for c in item["captions"]], 560, beside=True))
    return arranged(cells, 2)


def looks_sheet() -> Image.Image:
    """Every shape in every texture, large and small, in domains A and B, and in every rendition."""
    rows = []
    for domain, background, rendition in ((0, 0, 0), (0, 2, 0), (1, 4, 0), (1, 7, 0), (0, 0, 1), (0, 2, 2), (0, 1, 3)):
        for texture in range(len(TEXTURES) if rendition == 0 else 1):
            row = []
            for shape in range(len(SHAPES)):
                colour = (shape + 2 * texture + domain) % len(COLOURS)
                objects = (
                    SceneObject(shape, colour, 1, texture, 0, 280, 300, 195),
                    SceneObject(shape, (colour + 4) % len(COLOURS), 0, texture, 0, 720, 690, 115),
                )
                scene = Scene(objects, domain, rendition, background, 5)
                row.append(np.pad(render(scene, SIZE), ((1, 1), (1, 1), (0, 0)), constant_values=190))
            picture = Image.fromarray(np.concatenate(row, 1)).resize((1000, 100), Image.NEAREST)
            sheet = Image.new("RGB", (1100, 100), "white")
            sheet.paste(picture, (100, 0))
            label = f"domain {'AB'[domain]}\n{RENDITIONS[rendition] if rendition else TEXTURES[texture]}"
            ImageDraw.Draw(sheet).multiline_text((0, 34), label, fill=INK, font=FONT)
            rows.append(sheet)
    return arranged(rows, 1, gap=2)


def class_sheet(names: list[str], columns: int) -> Image.Image:
    """A row of labelled pictures per task."""
    cells = []
    for name in names:
        task = classification_task(name, image_size=SIZE)
        cells += [heading(f"{name}  ({len(task.class_names)} classes; {task.stands_in_for})", TILE * 5)]
        cells += [heading("", 1)] * (columns - 1)
        for item in itertools.islice(task, columns):
            cells.append(cell(item["image"], [(task.class_names[item["label"]], INK)], TILE, beside=False))
    return arranged(cells, columns)


def with_boxes(picture: np.ndarray, boxes: np.ndarray, right: int) -> Image.Image:
    """The picture, enlarged, with every box in grey and the right one in green."""
    image = Image.fromarray(picture).resize((TILE * 2, TILE * 2), Image.NEAREST)
    draw = ImageDraw.Draw(image)
    for k in [*(k for k in range(len(boxes)) if k != right), right]:
        corners = [float(value) * (TILE * 2 - 1) for value in boxes[k]]
        draw.rectangle(corners, outline=(0, 190, 60) if k == right else (150, 150, 150), width=3 if k == right else 1)
    return image


def grounding_sheet() -> Image.Image:
    """Expressions with their boxes."""
    cells = []
    for item in itertools.islice(annotation_task("grounding", image_size=SIZE), 15):
        cells.append(below(with_boxes(item["image"], item["proposals"], item["label"]), item["text"], 200))
    return arranged(cells, 5)


def below(picture: Image.Image, text: str, width: int) -> Image.Image:
    """A picture at its own size with wrapped text below it."""
    lines = wrapped(text, width - 4)
    sheet = Image.new("RGB", (width, picture.height + 6 + 15 * len(lines)), "white")
    sheet.paste(picture, (0, 0))
    for k, line in enumerate(lines):
        ImageDraw.Draw(sheet).text((2, picture.height + 2 + 15 * k), line, fill=INK, font=FONT)
    return sheet


def annotation_sheet(
    task: str,
    count: int,
    columns: int,
    width: int,
    lines_of: Callable[[dict], list[tuple[str, tuple]]],
    picture_of: Callable[[dict], np.ndarray] = lambda item: item["image"],
) -> Image.Image:
    """Items of a task, each with its lines of text beside its picture."""
    items = itertools.islice(annotation_task(task, image_size=SIZE), count)
    return arranged([cell(picture_of(item), lines_of(item), width, beside=True) for item in items], columns)


def pair_of(item: dict) -> np.ndarray:
    """Both pictures of an item, with a gap between them."""
    return np.concatenate(list(np.pad(item["images"], ((0, 0), (0, 0), (0, 2), (0, 0)), constant_values=255)), 1)


def question_lines(item: dict) -> list[tuple[str, tuple]]:
    """Question and answer."""
    return [(item["question"], INK), (f"{item['answer']}  ({item['answer_type']})", RIGHT)]


def statement_lines(item: dict) -> list[tuple[str, tuple]]:
    """Statement and verdict."""
    return [(item["statement"], INK), ("true", RIGHT) if item["label"] else ("false", WRONG)]


def hypothesis_lines(item: dict) -> list[tuple[str, tuple]]:
    """Hypothesis and label."""
    label = ENTAILMENT_LABELS[item["label"]]
    colour = {"entailment": RIGHT, "contradiction": WRONG}.get(label, PALE)
    return [(item["hypothesis"], INK), (label, colour)]


def association_sheet() -> Image.Image:
    """Cues with candidates, the gold ones framed."""
    rows = []
    for item in itertools.islice(annotation_task("winogavil", image_size=SIZE), 8):
        title = Image.new("RGB", (70, TILE), "white")
        label = f"{item['cue']}\n{item['k']} of {len(item['images'])}"
        ImageDraw.Draw(title).multiline_text((0, 30), label, fill=INK, font=FONT)
        pictures = [title]
        for k, picture in enumerate(item["images"]):
            framed = Image.new("RGB", (TILE + 8, TILE + 8), (0, 190, 60) if k in item["gold"] else FRAME)
            rim = 4 if k in item["gold"] else 1
            framed.paste(Image.fromarray(picture).resize((TILE + 8 - 2 * rim,) * 2, Image.NEAREST), (rim, rim))
            pictures.append(framed.resize((76, 76), Image.LANCZOS))
        rows.append(arranged(pictures, len(pictures), gap=3))
    return arranged(rows, 1, gap=0)


def draw_sheets(folder: Path) -> None:
    """Write every sheet."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        save(split_sheet(split), folder / f"split_{split}.png")
    save(looks_sheet(), folder / "looks.png")
    save(imperfect_sheet(), folder / "noise_and_ambiguity.png")
    names = list(CLASSIFICATION_TASKS)
    save(class_sheet([name for name in names if name.startswith("imagenet")], 12), folder / "imagenet.png")
    save(class_sheet([name for name in names if name.startswith("vtab")], 12), folder / "vtab.png")
    save(grounding_sheet(), folder / "grounding.png")
    save(annotation_sheet("vqa", 16, 4, 270, question_lines), folder / "vqa.png")
    save(annotation_sheet("nlvr2", 12, 3, 360, statement_lines, pair_of), folder / "nlvr2.png")
    save(annotation_sheet("visual_entailment", 16, 4, 270, hypothesis_lines), folder / "visual_entailment.png")
    save(association_sheet(), folder / "winogavil.png")


def text_to_image_ceilings(dataset: SceneDataset) -> np.ndarray:
    """Expected t2i R@1 by caption level of an oracle that guesses among the pictures which a caption describes.

    The mean of 1 / number of matching pictures; a caption that is false of its own picture (noise) counts 0.
    """
    images_of = caption_positives(dataset)[1]
    hits = [1 / len(images) if caption // NUM_CAPTIONS in images else 0.0 for caption, images in images_of.items()]
    return np.reshape(hits, (-1, NUM_CAPTIONS)).mean(axis=0)


def print_ceilings() -> None:
    """Best possible t2i R@1, in percent, by caption level."""
    print("t2i R@1 ceiling in %, 1,000 pictures   all   by level, specific to generic")
    for split in ("test", "test_crowded"):
        levels = 100 * text_to_image_ceilings(SceneDataset(split, size=1_000))
        print(f"{split:36s} {levels.mean():5.1f}  {' '.join(f'{level:5.1f}' for level in levels)}")


def main() -> None:
    """Draw, or print what was asked for."""
    parser = Parser(__doc__)
    parser.add_argument("--ceiling", action="store_true", help="print the oracle's R@1 instead of drawing")
    parser.add_argument("--output-dir", type=Path, default=Path("docs/scenes"), help="where the sheets go")
    arguments = parser.parse_args()
    if arguments.ceiling:
        print_ceilings()
    else:
        draw_sheets(arguments.output_dir)


if __name__ == "__main__":
    main()
