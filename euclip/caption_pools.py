"""Captions that a walk to the root can meet: from a file, from scenes, from chains of captions, or our own for photos.

A pool knows each caption by its tag, which is reported, and its text, which is encoded. Nouns and adjectives go into a
prompt (papers/euclip.md, Sec. 12). `photo_captions.json` beside this file is the pool for photographs: written for this
repository, in the layout of MERU's asset file.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.data.scenes import SceneDataset, matches
from common.data.shards import ShardDataset
from common.data.text_files import read_text
from euclip.traversal import Hierarchy

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
