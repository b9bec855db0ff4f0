"""Pictures to walk from, captions to meet, and the walks of a model past them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset

from common.data.decoding import read_picture
from common.data.labelled import PICTURE_EXTENSIONS
from common.data.pairs import Pairs, open_retrieval_sets
from common.data.scenes import SceneDataset, matches
from common.data.shards import ShardDataset
from common.data.text_files import read_text
from common.evaluation.embed import Encoder
from euclip.distributions import training_sample
from euclip.traversal import NUM_POINTS, Hierarchy, nearest_on_walk, root_of, walk_scores

# Captions that a walk to the root can meet: from a file, from scenes, from chains of captions, or our own for photos.
# A pool knows each caption by its tag, which is reported, and its text, which is encoded. Nouns and adjectives go into
# a prompt (EuCLIP, Sec. 4.4). `photo_captions.json` beside this file is the pool for photographs: written for this
# repository, in the layout of MERU's asset file.

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

    name: for reports. tags: as reported, repeats allowed. texts: as encoded, one per tag.
    hierarchy: of the pictures that are walked from, where it is known.
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
        raise ValueError(f"noun prompt {noun_prompt!r}; accepted: a text with one {{}}")
    text = read_text(path)
    if text.lstrip()[:1] not in ("{", "["):
        found = {"captions": [line.strip() for line in text.split("\n") if line.strip()]}
    else:
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from error
        found = content if isinstance(content, dict) else {"captions": content}
    unknown = sorted(found.keys() - set(_KEYS))
    if unknown:
        raise ValueError(f"{path}: unknown key {unknown[0]!r}; accepted: {_ACCEPTED}")
    captions, nouns, adjectives = (_texts(path, key, found.get(key, [])) for key in _KEYS)
    if not captions + nouns + adjectives:
        raise ValueError(f"{path} holds no caption; accepted: {_ACCEPTED}")
    return Pool(
        path.name,
        (*captions, *nouns, *adjectives),
        (*captions, *(noun_prompt.replace("{}", noun) for noun in nouns), *map(ADJECTIVE_PROMPT.format, adjectives)),
    )


def _texts(path: Path, key: str, values: Any) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{path}: {key} is a {type(values).__name__}; accepted: a list of captions")
    wrong = [value for value in values if not isinstance(value, str) or not value.strip()]
    if wrong:
        raise ValueError(f"{path}: {key} has {wrong[0]!r}; accepted: texts that are not empty")
    return tuple(values)


def scenes_pool(scenes: SceneDataset) -> Pool:
    """All captions of the scenes, each text once; the truth of every caption about every scene is known."""
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
    """Whether the samples of a set of pairs bring chains of captions, by the first one."""
    return isinstance(pairs, ShardDataset) and "hierarchy" in pairs.metadata(0)


def hierarchy_pool(shards: ShardDataset, indices: Sequence[int]) -> Pool:
    """The chains of captions of photographs: json member "hierarchy" of each sample, a list from general to specific.

    Args:
        shards: with such members, as HierarCaps has them for COCO.
        indices: of the pictures, in the order in which they are walked from.
    Returns:
        A pool in which a caption counts as true of the pictures in whose chain it stands; others may be true, too.
    Raises:
        ValueError: a sample without a chain; names it.
    """
    chains = []
    for index in indices:
        chain = shards.metadata(index).get("hierarchy")
        if not isinstance(chain, list) or not chain or not all(isinstance(text, str) and text for text in chain):
            raise ValueError(
                f"{shards.name}: sample {shards.image_id(index)} has hierarchy {chain!r}; accepted: a list of captions "
                "from general to specific"
            )
        chains.append(chain[::-1])
    return _pool_of_chains(f"hierarchies of {len(chains)} pictures of {shards.name}", chains, None)


def _pool_of_chains(name: str, chains: Sequence[Sequence[str]], holds: torch.Tensor | None) -> Pool:
    """Each text once; `holds` None: true of the pictures in whose chain it stands."""
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
    """Pictures to walk from and captions to meet.

    name: of the pictures' set. pictures: len, [index] -> {"image", "image_id"}. image_id: index -> the picture's name.
    may_show: whether a page may hold the pictures themselves.
    """

    name: str
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
    return Task(scenes.name, scenes, lambda index: f"scene {index}", pool, may_show=True)


def pairs_task(pairs: Pairs, size: int, pool: Pool | None = None) -> Task:
    """The first pictures of a set; the captions are those of its hierarchies, or else our own for photographs.

    A page does not show the pictures: their licences are not known.
    """
    indices = range(min(size, len(pairs)))
    if pool is None:
        pool = hierarchy_pool(pairs, indices) if has_hierarchy(pairs) else read_pool(PHOTO_CAPTIONS)
    return Task(pairs.name, Subset(pairs, indices), pairs.image_id, pool, may_show=False)


def walk_task(config: Any) -> Task:
    """Pictures and captions for a config's data: test scenes, or test photographs, those with a hierarchy first."""
    if config.data.source == "scenes":
        return hierarchy_task(config, NUM_WALKS)
    sets = open_retrieval_sets(config.data)
    return pairs_task(next(filter(has_hierarchy, sets.values()), sets["test"]), NUM_WALKS)


def hierarchy_task(config: Any, size: int) -> Task | None:
    """Pictures of a config's test sets whose captions' order is known, at most so many; None where there are none."""
    if config.data.source == "scenes":
        return scenes_task(config.data.image_size, min(size, config.data.num_test))
    known = next(filter(has_hierarchy, open_retrieval_sets(config.data).values()), None)
    return None if known is None else pairs_task(known, size)


def open_task(images: str, image_size: int, size: int, pool: Pool | None) -> Task:
    """Pictures by name, and the captions that go with them unless there is another pool.

    Args:
        images: "scenes", a folder of picture files, or tar shards.
        image_size: of scenes, pixels.
        size: at most so many pictures, the first ones.
        pool: None = those of the scenes or of the shards' hierarchies, else our own for photographs.
    Raises:
        ValueError: if it is none of these.
    """
    if images == "scenes":
        return scenes_task(image_size, size, pool)
    if images.endswith(".tar"):
        return pairs_task(ShardDataset(images, role="test"), size, pool)
    pictures, pool = PictureFolder(Path(images), size), read_pool(PHOTO_CAPTIONS) if pool is None else pool
    return Task(Path(images).name, pictures, pictures.image_id, pool, may_show=True)


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
