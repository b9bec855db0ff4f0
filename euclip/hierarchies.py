"""Do trained rows know what is general and what is specific? On chains of captions, and on nouns and their hypernyms.

    make reproduce-hierarchies PAPER=euclip SEEDS=3
    make reproduce-hierarchies PAPER=euclip SCALE=photos DATA=/data/flickr8k \\
        SET="data.second_test=/data/coco_mini/coco-test*.tar hierarchies.nouns=/data/wordnet/nouns.tsv"

A chain runs from the most specific text to the most generic one. Two questions, neither of which the paper asks in
numbers:
    norm    of two texts of a chain, is the more generic one nearer to the root?
    cone    does the most specific text of a chain, or its picture, lie in the cones of the chain's other texts, and
            deeper than in those of texts that are not true of it?
Claims refer to these as experiment["hierarchies"]["<model>_<captions or nouns>_<number>"].
"""

import csv
import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from sklearn.metrics import roc_auc_score

from common.data.text_files import read_text
from common.distributed import is_main_process
from common.evaluation.embed import Encoder
from common.geometry import Geometry
from common.report.command import Command
from common.report.findings import Findings, write_findings
from common.report.schema import Table
from common.report.trained_rows import train_rows
from common.run.config import ConfigError, load_config, load_row
from common.run.reproduce import PaperCode
from euclip.caption_pools import NOUN_PROMPT
from euclip.rows import load_run
from euclip.traversal import generic_nearer, has_cones
from euclip.walks import embed_task, hierarchy_task, model_root

NUM_PICTURES = 1000  # of the test set, the first ones
NUM_CHAINS = 1000  # of nouns
NOUN_COLUMNS = ("synset", "lemmas", "hypernyms")


@dataclass(frozen=True)
class Model:
    """A row: label, config, and K of its cones where the config has none; None = no cones."""

    label: str
    config: str
    min_radius: float | None


MODELS = {
    "clip": Model("CLIP", "table4_clip.yaml", None),
    "euclip_lambda0": Model("EuCLIP, lambda=0", "table4_euclidean_squared.yaml", 0.3),
    "euclip": Model("EuCLIP", "table4_euclip.yaml", 0.3),
    "meru_lambda0": Model("MERU, lambda=0", "table4_hyperbolic.yaml", 0.1),
    "meru": Model("MERU", "table4_meru.yaml", 0.1),
}
KINDS = {"captions": "captions", "nouns": "nouns"}
COLUMNS = {
    "generic_nearer": ("more generic nearer to the root", "fraction", "higher"),
    "text_entailed": ("text in cones of its chain", "fraction", "higher"),
    "text_entailed_other": ("text in cones of others", "fraction", "lower"),
    "text_auc": ("AUC of text", "fraction", "higher"),
    "image_entailed": ("picture in cones of its chain", "fraction", "higher"),
    "image_entailed_other": ("picture in cones of others", "fraction", "lower"),
    "image_auc": ("AUC of pictures", "fraction", "higher"),
}
NOTES = (
    "Others: texts of the same level that are not known to be true. AUC: probability that a true text's cone is missed "
    "by less than another's, mean over levels. K is that of the row; without entailment, of its counterpart with it.",
)


@dataclass(frozen=True)
class HierarchyFiles:
    """What the part takes beside a row's settings."""

    nouns: str = ""  # table of nouns, see `noun_chains`; "" = captions alone


@dataclass(frozen=True)
class HierarchyConfig:
    """`make reproduce-hierarchies ... SET="hierarchies.nouns=<file>"`."""

    hierarchies: HierarchyFiles = field(default_factory=HierarchyFiles)


@dataclass(frozen=True)
class Chains:
    """Chains of texts.

    texts: each once. chains: places of texts from specific to generic, one chain per subject.
    holds: (num_chains, num_texts) bool, which texts are known to be true of a chain's subject.
    """

    texts: Sequence[str]
    chains: Sequence[Sequence[int]]
    holds: torch.Tensor


def noun_chains(path: str | Path, known: Callable[[list[str]], list[bool]], size: int = NUM_CHAINS) -> Chains:
    """Nouns and their hypernyms, as far as a model knows the words.

    Args:
        path: table separated by tabs, plain or gzip, with a header and the columns synset (its id), lemmas and
            hypernyms (ids), the last two joined by "|"; other columns are not read.
        known: words -> whether the model's vocabulary has them.
        size: at most so many chains, evenly spread over the table.
    Returns:
        A chain for every synset with a known word that has no other meaning, unless another chain passes it: that word,
        then the first known one of the first hypernym, of its first hypernym, and so on, without repeats. Chains of
        one word are left out. All ancestors hold, whatever the path to them.
    Raises:
        ValueError: an unreadable file, missing columns, or no chain; names the file.
    """
    path = Path(path)
    rows = list(csv.DictReader(io.StringIO(read_text(path)), delimiter="\t", quoting=csv.QUOTE_NONE))
    missing = [name for name in NOUN_COLUMNS if not rows or name not in rows[0]]
    if missing:
        raise ValueError(f"{path} has no column {missing[0]!r}; accepted: a header with {', '.join(NOUN_COLUMNS)}")
    lemmas = {row["synset"]: [text for text in (row["lemmas"] or "").split("|") if text] for row in rows}
    parents = {row["synset"]: [each for each in (row["hypernyms"] or "").split("|") if each in lemmas] for row in rows}
    meanings = Counter(text for each in lemmas.values() for text in each)
    is_known = dict(zip(meanings, known(list(meanings))))
    word = {synset: next((text for text in each if is_known[text]), None) for synset, each in lemmas.items()}

    chains = {synset: _chain(synset, parents, word) for synset in lemmas if meanings[word[synset]] == 1}
    passed = {each for chain in chains.values() for each in chain[1:]}
    chains = {synset: chain for synset, chain in chains.items() if synset not in passed and len(chain) > 1}
    if not chains:
        raise ValueError(f"{path}: the model's vocabulary has no noun together with one of its hypernyms")
    kept = list(chains)[:: -(-len(chains) // size)]
    chains = {synset: chains[synset] for synset in kept}
    texts = list(dict.fromkeys(word[each] for chain in chains.values() for each in chain))
    place = {text: number for number, text in enumerate(texts)}
    holds = torch.zeros(len(chains), len(texts), dtype=torch.bool)
    for row, synset in zip(holds, chains):
        row[[place[word[each]] for each in _ancestors(synset, parents) if word[each] in place]] = True
    return Chains(texts, [[place[word[each]] for each in chain] for chain in chains.values()], holds)


def _chain(synset: str, parents: Mapping[str, Sequence[str]], word: Mapping[str, str | None]) -> list[str]:
    """The synset and its line of first hypernyms, of each word the first synset; of a circle one round."""
    line, met, passed = [], set(), set()
    while synset is not None and synset not in passed:
        passed.add(synset)
        if word[synset] and word[synset] not in met:
            met.add(word[synset])
            line.append(synset)
        synset = next(iter(parents[synset]), None)
    return line


def _ancestors(synset: str, parents: Mapping[str, Sequence[str]]) -> set[str]:
    """The synset and all above it."""
    found, waiting = set(), [synset]
    while waiting:
        each = waiting.pop()
        if each not in found:
            found.add(each)
            waiting += parents[each]
    return found


@torch.no_grad()
def cone_scores(
    geometry: Geometry, points: torch.Tensor, texts: torch.Tensor, chains: Chains, min_radius: float, start: int = 0
) -> dict[str, float]:
    """How the cones of true texts differ from those of others.

    Args:
        geometry: with cones.
        points: (num_chains, dim) embeddings, the subject of each chain, taken as images.
        texts: (num_texts, dim) embeddings.
        chains: of these texts.
        min_radius: K >= 0.
        start: first level that is asked for, 0 = the most specific texts.
    Returns:
        entailed: share of pairs of a subject and a text of its chain where the subject lies in the text's cone.
        entailed_other: the same with texts that other chains have at that level and that do not hold.
        auc: probability that a subject misses a text of its chain by a smaller angle than another one, ties half.
        Each the mean over the levels that have pairs of both kinds; empty where none has.
    """
    residuals = torch.stack([geometry.entailment_residual(texts, point[None], min_radius) for point in points]).cpu()
    scores = []
    for level in range(start, max(map(len, chains.chains))):
        has_level = [number for number, chain in enumerate(chains.chains) if len(chain) > level]
        own = [chains.chains[number][level] for number in has_level]
        true = residuals[has_level, own]
        here = torch.zeros(residuals.shape[1], dtype=torch.bool)
        here[own] = True
        other = residuals[has_level][here & ~chains.holds[has_level]]
        if len(true) and len(other):
            missed = torch.cat([true, other])
            is_true = torch.arange(len(missed)) < len(true)
            auc = roc_auc_score(is_true.numpy(), -missed.numpy())
            scores.append((float((true <= 0).double().mean()), float((other <= 0).double().mean()), float(auc)))
    means = [sum(each) / len(each) for each in zip(*scores)]
    return dict(zip(("entailed", "entailed_other", "auc"), means))


def known_words(encoder: Encoder) -> Callable[[list[str]], list[bool]]:
    """Which texts the model's tokenizer has no unknown word for; a tokenizer of pieces knows all."""
    tokenizer = encoder.tokenizer
    if not hasattr(tokenizer, "unknown_id"):
        return lambda texts: [True] * len(texts)
    return lambda texts: (tokenizer.encode(texts, encoder.context_length) != tokenizer.unknown_id).all(dim=1).tolist()


def hierarchies(command: Command, code: PaperCode) -> list[Table]:
    """Norms and cones of texts along chains, for Table 4's CLIP, EuCLIP and MERU, with entailment and without."""
    mine = [text for text in command.overrides if text.startswith("hierarchies.")]
    files = load_config(HierarchyConfig, [], mine).hierarchies
    trained = replace(command, overrides=tuple(text for text in command.overrides if text not in mine))
    row = code.folder / "configs" / MODELS["clip"].config
    config = load_row(code.config_class, code.folder, row, command.scale, list(trained.overrides))
    if files.nouns:
        noun_chains(files.nouns, lambda words: [True] * len(words))  # says now what is wrong with it
    elif hierarchy_task(config, 1) is None:
        raise ConfigError(
            "no test set brings hierarchies of captions and there is no table of nouns; accepted: "
            "data.second_test=<shards with hierarchies>, hierarchies.nouns=<file>"
        )
    runs = train_rows(trained, code, {key: model.config for key, model in MODELS.items()})
    values: dict[tuple[str, str], list[float]] = {}
    measured_on: dict[str, str] = {}
    for key, seeds in runs.items():
        for run in seeds:
            config, encoder = load_run(run, trained)
            found, measured_on = measure(encoder, config, MODELS[key].min_radius, files.nouns)
            for kind, scores in found.items():
                for name, value in scores.items():
                    values.setdefault((f"{key}_{kind}", name), []).append(value)
    if not is_main_process():
        return []
    findings = Findings(
        name="hierarchies",
        caption="General and specific texts: distance from the root, and entailment cones.",
        data="; ".join(measured_on.values()),
        protocol="all chains",
        settings={"num_pictures": NUM_PICTURES, "noun_prompt": NOUN_PROMPT},
        rows={
            f"{key}_{kind}": f"{model.label}, {label}"
            for kind, label in KINDS.items()
            if kind in measured_on
            for key, model in MODELS.items()
        },
        columns=COLUMNS,
        values=values,
        chance={"generic_nearer": 0.5, "text_auc": 0.5, "image_auc": 0.5},
        notes=NOTES,
    )
    return [write_findings(command, code.name, findings)]


def measure(
    encoder: Encoder, config: Any, min_radius: float | None, nouns: str
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """One model's scores on captions and on nouns, where there are such, and what they were measured on.

    Args:
        encoder, config: of the model.
        min_radius: K where the config has none.
        nouns: file of `noun_chains`, "" = none.
    """
    geometry, found, measured_on = encoder.model.geometry, {}, {}
    min_radius = min_radius if config.method.min_radius is None else config.method.min_radius
    root, _ = model_root(encoder, config, encoder.texts([""]).to(encoder.device))
    task = hierarchy_task(config, NUM_PICTURES)
    if task is not None:
        embedded = embed_task(encoder, task)
        chains = Chains(task.pool.texts, embedded.hierarchy.chains, embedded.hierarchy.holds)
        found["captions"] = text_scores(geometry, embedded.captions, root, chains, min_radius)
        if has_cones(geometry):
            cones = cone_scores(geometry, embedded.images, embedded.captions, chains, min_radius)
            found["captions"] |= {f"image_{name}": value for name, value in cones.items()}
        measured_on["captions"] = f"{len(embedded.rows)} pictures of {task.name}"
    if nouns:
        chains = noun_chains(nouns, known_words(encoder))
        texts = encoder.texts([NOUN_PROMPT.format(noun) for noun in chains.texts]).to(encoder.device)
        found["nouns"] = text_scores(geometry, texts, root, chains, min_radius)
        measured_on["nouns"] = f"{len(chains.chains)} chains of {len(chains.texts)} nouns"
    return found, measured_on


def text_scores(
    geometry: Geometry, texts: torch.Tensor, root: torch.Tensor, chains: Chains, min_radius: float | None
) -> dict[str, float]:
    """`generic_nearer`, and where there are cones `text_entailed`, `text_entailed_other` and `text_auc`.

    Args:
        geometry, chains: of the texts.
        texts: (num_texts, dim) embeddings.
        root: (dim,).
        min_radius: K, None without cones.
    """
    with torch.no_grad():
        found = {"generic_nearer": generic_nearer(geometry.distance_to(texts, root).cpu(), chains.chains)}
    if has_cones(geometry):
        specific = texts[[chain[0] for chain in chains.chains]]
        cones = cone_scores(geometry, specific, texts, chains, min_radius, start=1)
        found |= {f"text_{name}": value for name, value in cones.items()}
    return {name: value for name, value in found.items() if value is not None}
