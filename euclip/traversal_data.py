"""Images where walks start, pools of captions, and the walks of a model."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset

from common.data.broken import BrokenSample
from common.data.decoding import read_picture
from common.data.pairs import Pairs, open_retrieval_sets
from common.data.pictures import Pictures
from common.data.scenes import SceneDataset, matches
from common.data.shard_paths import PICTURE_EXTENSIONS
from common.data.shards import open_shards
from common.data.text_files import read_text
from common.evaluation.embed import Encoder
from euclip.distributions import training_sample
from euclip.traversal import NUM_POINTS, Hierarchy, nearest_on_walk, root_of, walk_scores

DECIDES = "evaluation"

# A pool comes from a file, from scenes, or from chains of captions; photographs without chains use photo_captions.json,
# which was written for this repository in the layout of MERU's asset file. A caption has a tag, which is reported, and
# a text, which is encoded. Nouns and adjectives go into a prompt (EuCLIP, Sec. 4.4).

PHOTO_CAPTIONS = Path(__file__).with_name("photo_captions.json")
NOUN_PROMPT = "a photo of a {}."  # the authors' code; the paper prints it without "a"
ADJECTIVE_PROMPT = "this photo is {}."
_KEYS = ("captions", "nouns", "adjectives")
_ACCEPTED = (
    f"one caption a line, a JSON list of captions, or a JSON object of lists with any of the keys {', '.join(_KEYS)}"
)


@dataclass(frozen=True)
class Pool:
    """Captions of a walk.

    tags: as reported, repeats allowed. texts: as encoded, one per tag. hierarchy: of the images, where it is known.
    """

    name: str
    tags: tuple[str, ...]
    texts: tuple[str, ...]
    hierarchy: Hierarchy | None = None


def read_pool(path: str | Path, noun_prompt: str = NOUN_PROMPT) -> Pool:
    """A pool from a file: lines of text, a JSON list, or MERU's JSON object of captions, nouns and adjectives.

    Args:
        path: plain or gzip. Lines are stripped and empty ones skipped; JSON texts stay as they are.
        noun_prompt: with one "{}".
    Raises:
        ValueError: an unreadable or empty file, another layout, an empty caption, or a prompt without a place; names
            the file.
    """
    path = Path(path)
    if noun_prompt.count("{}") != 1:
        raise ValueError(f"noun prompt {noun_prompt!r}; expected: a text with one {{}}")
    text = read_text(path)
    if text.lstrip()[:1] not in ("{", "["):
        lists = {"captions": [line.strip() for line in text.split("\n") if line.strip()]}
    else:
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from error
        lists = content if isinstance(content, dict) else {"captions": content}
    unknown = sorted(lists.keys() - set(_KEYS))
    if unknown:
        raise ValueError(f"{path}: unknown key {unknown[0]!r}; expected: {_ACCEPTED}")
    captions, nouns, adjectives = (_texts(path, key, lists.get(key, [])) for key in _KEYS)
    if not captions + nouns + adjectives:
        raise ValueError(f"{path} holds no caption; expected: {_ACCEPTED}")
    return Pool(
        path.name,
        (*captions, *nouns, *adjectives),
        (*captions, *(noun_prompt.replace("{}", noun) for noun in nouns), *map(ADJECTIVE_PROMPT.format, adjectives)),
    )


def _texts(path: Path, key: str, values: Any) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{path}: {key} is a {type(values).__name__}; expected: a list of captions")
    wrong = [value for value in values if not isinstance(value, str) or not value.strip()]
    if wrong:
        raise ValueError(f"{path}: {key} has {wrong[0]!r}; expected: texts that are not empty")
    return tuple(values)


def scenes_pool(scenes: SceneDataset) -> Pool:
    """All captions of the scenes without repeats, with the truth of every caption about every scene."""
    indices = range(len(scenes))
    statements = {
        caption: statement
        for index in indices
        for caption, statement in zip(scenes.captions(index), scenes.statements(index))
    }
    holds = torch.zeros(len(scenes), len(statements), dtype=torch.bool)
    for place, true_of in enumerate(matches(list(statements.values()), [scenes.scene(index) for index in indices])):
        holds[torch.as_tensor(true_of, dtype=torch.long), place] = True
    return _pool_of_chains(f"captions of {len(scenes)} scenes", [scenes.captions(i) for i in indices], holds)


def has_hierarchy(pairs: Any) -> bool:
    """Whether a readable sample of a set of pairs has a chain of captions."""
    for index in range(len(pairs)) if isinstance(pairs, Pictures) else ():
        with suppress(BrokenSample):
            if "hierarchy" in pairs.metadata(index):
                return True
    return False


def hierarchy_pool(shards: Pictures, indices: Sequence[int]) -> Pool:
    """Chains of captions of photographs: the json member "hierarchy" of each sample, from general to specific.

    Args:
        shards: with such members, as HierarCaps has them for COCO.
        indices: of the images, in the order of the walks.
    Returns:
        A pool in which a caption counts as true of the images in whose chain it stands. It may be true of others, too.
        The chain of an unreadable sample, from whose image no walk starts, is empty.
    Raises:
        ValueError: a sample without a chain; names it.
    """
    chains = []
    for index in indices:
        try:
            chain = shards.metadata(index).get("hierarchy")
        except BrokenSample:
            chains.append([])
            continue
        if not isinstance(chain, list) or not chain or not all(isinstance(text, str) and text for text in chain):
            raise ValueError(
                f"{shards.name}: sample {shards.image_id(index)} has hierarchy {chain!r}; expected: a list of captions "
                "from general to specific"
            )
        chains.append(chain[::-1])
    return _pool_of_chains(f"hierarchies of {len(chains)} pictures of {shards.name}", chains, None)


def captions_pool(pairs: Pairs, indices: Sequence[int]) -> Pool:
    """The captions of images without a hierarchy, in file order; each counts as true of its images only."""
    chains: list[list[str]] = [[] for _ in indices]
    for index, chain in zip(indices, chains):
        with suppress(BrokenSample):
            chain += pairs.captions(index)
    return _pool_of_chains(f"captions of {len(indices)} pictures of {pairs.name}", chains, None)


def _pool_of_chains(name: str, chains: Sequence[Sequence[str]], holds: torch.Tensor | None) -> Pool:
    """A pool without repeats; `holds` None: a text is true of the images in whose chain it stands."""
    places = {text: place for place, text in enumerate(dict.fromkeys(text for chain in chains for text in chain))}
    placed = [[places[text] for text in chain] for chain in chains]
    if holds is None:
        holds = torch.zeros(len(chains), len(places), dtype=torch.bool)
        for row, chain in zip(holds, placed):
            row[chain] = True
    return Pool(name, tuple(places), tuple(places), Hierarchy.of_chains(placed, holds))


NUM_WALKS = 60  # pictures, as in the paper


@dataclass(frozen=True)
class Task:
    """Images where walks start, and a pool of captions.

    pictures: len, [index] -> {"image", "image_id"}. image_id: index -> the image's name.
    """

    name: str
    pictures: Any
    image_id: Callable[[int], str]
    pool: Pool


class PictureFolder:
    """Image files of a folder, sorted by name.

    Raises:
        ValueError: the folder does not exist or holds no image.
    """

    def __init__(self, folder: Path, size: int) -> None:
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such folder; expected: scenes, a folder of pictures, tar shards")
        visible = (path for path in folder.iterdir() if not path.name.startswith("."))
        files = sorted(path for path in visible if path.suffix.lower() in PICTURE_EXTENSIONS)
        if not files:
            raise ValueError(f"{folder} holds no picture; expected: {', '.join(PICTURE_EXTENSIONS)}")
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
    return Task(scenes.name, scenes, lambda index: f"scene {index}", pool)


def pairs_task(pairs: Pairs, size: int, pool: Pool | None = None) -> Task:
    """The first images of a set, with the captions of its hierarchies, or else of photo_captions.json."""
    indices = range(min(size, len(pairs)))
    if pool is None:
        pool = hierarchy_pool(pairs, indices) if has_hierarchy(pairs) else read_pool(PHOTO_CAPTIONS)
    return Task(pairs.name, Subset(pairs, indices), pairs.image_id, pool)


def walk_task(config: Any) -> Task:
    """Images and captions for a config's data: test scenes, or a photo test set, preferably one with a hierarchy."""
    if config.data.source == "scenes":
        return hierarchy_task(config, NUM_WALKS)
    sets = open_retrieval_sets(config.data)
    return pairs_task(next(filter(has_hierarchy, sets.values()), sets["test"]), NUM_WALKS)


def hierarchy_task(config: Any, size: int) -> Task | None:
    """At most `size` images of a config's test set with a hierarchy of captions; None if there is no such set."""
    if config.data.source == "scenes":
        return scenes_task(config.data.image_size, min(size, config.data.num_test))
    known = next(filter(has_hierarchy, open_retrieval_sets(config.data).values()), None)
    return None if known is None else pairs_task(known, size)


def open_task(images: str, image_size: int, size: int, pool: Pool | None) -> Task:
    """Images and their captions.

    Args:
        images: "scenes", a folder of image files, or tar shards.
        image_size: of scenes, pixels.
        size: maximum number of images, the first ones.
        pool: None = captions of the scenes or of the shards' hierarchies, else of photo_captions.json.
    Raises:
        ValueError: if `images` is none of these.
    """
    if images == "scenes":
        return scenes_task(image_size, size, pool)
    if images.endswith(".tar"):
        return pairs_task(open_shards(images, role="test"), size, pool)
    pictures, pool = PictureFolder(Path(images), size), read_pool(PHOTO_CAPTIONS) if pool is None else pool
    return Task(Path(images).name, pictures, pictures.image_id, pool)


@dataclass(frozen=True)
class Embedded:
    """A task, embedded on the encoder's device, without the images that could not be read.

    rows: (num_images,), indices in the task. images: (num_images, dim). captions: (num_captions, dim).
    hierarchy: of these images.
    """

    task: Task
    rows: list[int]
    images: torch.Tensor
    captions: torch.Tensor
    hierarchy: Hierarchy | None


def embed_task(encoder: Encoder, task: Task) -> Embedded:
    """Embeds images and captions; ValueError if no image can be read."""
    images, readable = encoder.images(task.pictures)
    rows = readable.nonzero().squeeze(1).tolist()
    if not rows:
        raise ValueError(f"none of the {len(task.pictures)} pictures could be read")
    captions = encoder.texts(list(task.pool.texts)).to(encoder.device)
    hierarchy = None if task.pool.hierarchy is None else task.pool.hierarchy.of_pictures(rows)
    return Embedded(task, rows, images[rows].to(encoder.device), captions, hierarchy)


@dataclass(frozen=True)
class Walks:
    """The walks of all images under one filter: places of `nearest_on_walk` and scores of `walk_scores` per image."""

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
    """The root of a trained model, and its description; opens training pairs only where there is no origin.

    Args:
        captions: any embeddings, (num, dim).
        normalised: see `root_of`.
    """
    geometry = encoder.model.geometry
    if geometry.has_cones:
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
