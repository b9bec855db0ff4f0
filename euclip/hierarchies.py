"""Do trained models order texts from generic to specific? Chains of captions, and nouns with their hypernyms.

    make reproduce-hierarchies PAPER=euclip SEEDS=3
    make reproduce-hierarchies PAPER=euclip SCALE=photos DATA=/data/flickr8k WEIGHTS=/data/weights \\
        SET="data.second_test=/data/coco_mini/coco-test*.tar hierarchies.nouns=/data/wordnet/nouns.tsv"

A chain runs from the most specific text about a subject to the most generic one. Two questions, for which the paper has
no numbers:
    norm    of two texts of a chain, is the more generic one nearer to the root?
    cone    do subjects of which a text is true lie nearer to the axis of its cone (the ray away from the origin) than
            other subjects? Subjects are images, and the most specific texts.
The second compares subjects under the same text, so a model gains nothing by placing all generic texts near the root.
Whether EuCLIP is in the paper's regime is measured on the same runs (`regime`).
Beside them stand walks from the images to the root without a filter, as the paper counts their captions (Table 6).
Claims refer to these as experiment["hierarchies"]["<model>_<captions, nouns or regime>_<number>"].
"""

import csv
import io
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from common.base.config import ConfigError
from common.base.fields import path_setting
from common.base.provenance import hash_of
from common.data.text_files import read_text
from common.distributed import is_main_process
from common.evaluation.embed import Encoder
from common.geometry import RootedGeometry
from common.report.table import Table
from common.reproduce.command import Command
from common.reproduce.findings import Findings, findings_table
from common.reproduce.rows import PaperCode
from common.reproduce.tables import train_rows
from euclip import regime
from euclip.loaded_rows import load_run
from euclip.traversal import Hierarchy, entailed, generic_nearer, mean_score
from euclip.traversal_data import NOUN_PROMPT, Pool, embed_task, hierarchy_task, model_root, walk_all

DECIDES = "evaluation"

NUM_PICTURES = 1000  # of the test set, the first ones
NUM_CHAINS = 1000  # of nouns
NOUN_COLUMNS = ("synset", "lemmas", "hypernyms")


MODELS = {  # key in claims -> label, config
    "clip": ("CLIP", "table4_clip.yaml"),
    "euclip_lambda0": ("EuCLIP, lambda=0", "table4_euclidean_squared.yaml"),
    "euclip": ("EuCLIP", "table4_euclip.yaml"),
    "meru_lambda0": ("MERU, lambda=0", "table4_hyperbolic.yaml"),
    "meru": ("MERU", "table4_meru.yaml"),
}
REGIME_ROWS = {"euclidean_squared": "euclip_lambda0", "euclip": "euclip"}  # of `regime_of_rows` -> ours
KINDS = ("captions", "nouns")
WALK_SCORES = {"captions": "captions", "tau": "kendall_tau"}  # ours -> of `walk_scores`
COLUMNS = {
    "generic_nearer": ("more generic nearer to the root", "fraction", "higher"),
    "text_auc": ("specific texts, AUC", "fraction", "higher"),
    "text_inside": ("in cones of true texts", "fraction", "higher"),
    "text_inside_other": ("in cones of others", "fraction", "lower"),
    "image_auc": ("pictures, AUC", "fraction", "higher"),
    "image_inside": ("in cones of true texts, pictures", "fraction", "higher"),
    "image_inside_other": ("in cones of others, pictures", "fraction", "lower"),
    "walk_captions": ("captions on a walk, no filter", "captions", "higher"),
    "walk_tau": ("Kendall's tau of point and level on a walk", "tau", "higher"),
}
CHANCE = {"generic_nearer": 0.5, "text_auc": 0.5, "image_auc": 0.5}
NOTES = (
    "More generic nearer: share of the different pairs of texts in a chain. AUC: probability that a subject in whose "
    "chain a text stands has a smaller exterior angle to it than one of which it is not known to be true; mean over "
    "texts, each weighted by its chains. Inside: share of either kind that lies in the text's cone at the K of the "
    "row's training, weighted likewise; rows without entailment have no K. A walk passes the captions of all chains.",
)


@dataclass(frozen=True)
class HierarchyFiles:
    """Settings of this part, beside those of a row."""

    nouns: str = path_setting()  # table of nouns, see `noun_pool`; "" = only captions


@dataclass(frozen=True)
class HierarchyConfig:
    """`make reproduce-hierarchies ... SET="hierarchies.nouns=<file>"`."""

    hierarchies: HierarchyFiles = field(default_factory=HierarchyFiles)


def noun_pool(path: str | Path, known: Callable[[list[str]], list[bool]], size: int = NUM_CHAINS) -> Pool | None:
    """Chains of nouns and their hypernyms, restricted to the model's vocabulary.

    A chain starts at a synset with a known word that has no other meaning, and follows the first hypernym upwards. Of
    every synset it has the first such word, else the first known word, without repeats. A synset inside another chain
    starts none.

    Args:
        path: table separated by tabs, plain or gzip, with a header and the columns synset (its id), lemmas and
            hypernyms (ids), the last two joined by "|"; other columns are not read.
        known: words -> whether the model's vocabulary has them.
        size: maximum number of chains, evenly spread over the table.
    Returns:
        Chains of two words or more; None if none is left. All words of all ancestors hold, also those outside the
        chain. Words are compared in lower case.
    Raises:
        ValueError: an unreadable file, missing columns or repeated synsets; names the file.
    """
    path = Path(path)
    try:
        rows = list(csv.DictReader(io.StringIO(read_text(path)), delimiter="\t", quoting=csv.QUOTE_NONE))
    except csv.Error as error:
        raise ValueError(f"{path} cannot be read: {error}; expected: a table separated by tabs") from None
    missing = [name for name in NOUN_COLUMNS if not rows or name not in rows[0]]
    if missing:
        raise ValueError(f"{path} has no column {missing[0]!r}; expected: a header with {', '.join(NOUN_COLUMNS)}")
    lemmas = {row["synset"]: (row["lemmas"] or "").lower().split("|") for row in rows}
    repeated = [synset for synset, count in Counter(row["synset"] for row in rows).items() if count > 1]
    if repeated:
        raise ValueError(f"{path}: {len(repeated)} synsets occur twice, such as {repeated[0]!r}; expected: each once")
    named = {row["synset"]: [name.strip() for name in (row["hypernyms"] or "").split("|")] for row in rows}
    parents = {synset: [name for name in names if name in lemmas] for synset, names in named.items()}
    unknown = [name for names in named.values() for name in names if name and name not in lemmas]
    if unknown:
        warnings.warn(
            f"{path}: {len(unknown)} hypernyms are no synset of the table and end their chains, such as "
            f'{unknown[0]!r}; expected: ids of its rows, joined by "|"',
            stacklevel=2,
        )
    meanings = Counter(text for names in lemmas.values() for text in set(names))
    is_known = dict(zip(meanings, known(list(meanings)))) | {"": False}
    word, starts = {}, []
    for synset, names in lemmas.items():
        words = [text for text in names if is_known[text]]
        unambiguous = [text for text in words if meanings[text] == 1]
        word[synset] = next(iter(unambiguous + words), None)
        if unambiguous:
            starts.append(synset)

    # only the longest chains: a synset that another one passes would repeat its end
    lines = {synset: _line(synset, parents, word) for synset in starts}
    passed = {hypernym for line in lines.values() for hypernym in line[1:]}
    lines = {synset: line for synset, line in lines.items() if synset not in passed and len(line) > 1}
    if not lines:
        return None
    chosen = list(lines)[:: -(-len(lines) // size)]
    nouns = list(dict.fromkeys(word[entry] for synset in chosen for entry in lines[synset]))
    place = {noun: number for number, noun in enumerate(nouns)}
    holds = torch.zeros(len(chosen), len(nouns), dtype=torch.bool)
    for row, synset in zip(holds, chosen):
        held = (text for ancestor in _ancestors(synset, parents) for text in lemmas[ancestor])
        row[[place[text] for text in held if text in place]] = True
    chains = [[place[word[entry]] for entry in lines[synset]] for synset in chosen]
    content = hash_of([nouns, chains, holds.nonzero().tolist()])
    name = f"{len(chosen)} chains of {len(nouns)} nouns, {path.name} ({content})"
    return Pool(name, tuple(nouns), tuple(map(NOUN_PROMPT.format, nouns)), Hierarchy.of_chains(chains, holds))


def _line(synset: str, parents: Mapping[str, Sequence[str]], word: Mapping[str, str | None]) -> list[str]:
    """The synset, its first hypernym, and so on; only the first synset of a word; a circle ends after one round."""
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
    ancestors, waiting = set(), [synset]
    while waiting:
        node = waiting.pop()
        if node not in ancestors:
            ancestors.add(node)
            waiting += parents[node]
    return ancestors


@torch.no_grad()
def cone_scores(
    geometry: RootedGeometry, subjects: torch.Tensor, texts: torch.Tensor, known: Hierarchy, min_radius: float | None
) -> dict[str, float]:
    """Whether a text's cone separates the subjects of which the text is true from the others.

    Args:
        geometry: with cones.
        subjects: (num_chains, dim) embeddings of the chains' subjects, taken as images.
        texts: (num_texts, dim) embeddings.
        known: chains of these texts, without texts that are subjects themselves.
        min_radius: K >= 0, None = only angles.
    Returns:
        auc, and with K inside and inside_other, see NOTES; empty where no text has subjects of both kinds.
    """
    inputs = ({"images": subject[None], "texts": texts} for subject in subjects)
    angles = torch.stack([geometry.entailment_residual(**arguments, min_radius=0.0) for arguments in inputs])
    other = ~known.holds.numpy()
    true = np.zeros_like(other)
    for subject, chain in enumerate(known.chains):
        true[subject, list(chain)] = True
    counted = true.any(axis=0) & other.any(axis=0)
    if not counted.any():
        return {}
    true, other = true[:, counted], other[:, counted]
    num_true, num_other = true.sum(axis=0), other.sum(axis=0)

    # by ranks among these subjects, equal ones shared; a subject that is neither has none
    closeness = np.where(true | other, -angles.cpu().double().numpy()[:, counted], np.nan)
    ranks = stats.rankdata(closeness, axis=0, nan_policy="omit")
    above = np.where(true, ranks, 0.0).sum(axis=0) - num_true * (num_true + 1) / 2
    scores = {"auc": above / (num_true * num_other)}
    if min_radius is not None:
        inside = entailed(geometry, subjects, texts, min_radius).cpu().numpy()[:, counted]
        scores["inside"] = (inside & true).sum(axis=0) / num_true
        scores["inside_other"] = (inside & other).sum(axis=0) / num_other
    return {name: float(np.average(values, weights=num_true)) for name, values in scores.items()}


def text_scores(
    geometry: RootedGeometry, texts: torch.Tensor, root: torch.Tensor, known: Hierarchy, min_radius: float | None
) -> dict[str, float]:
    """`generic_nearer`; with cones also `cone_scores` (as text_*), whose subjects are the chains' most specific texts.

    Args:
        texts: (num_texts, dim) embeddings.
        root: (dim,).
        known: chains of these texts.
        min_radius: as in `cone_scores`.
    """
    pairs = sorted({pair for chain in known.chains for pair in itertools.combinations(dict.fromkeys(chain), 2)})
    with torch.no_grad():
        scores = {"generic_nearer": generic_nearer(geometry.distance_to(texts, root).cpu(), pairs)}
    if geometry.has_cones:
        above = replace(known, chains=[[place for place in chain if place != chain[0]] for chain in known.chains])
        cones = cone_scores(geometry, texts[[chain[0] for chain in known.chains]], texts, above, min_radius)
        scores |= {f"text_{name}": value for name, value in cones.items()}
    return {name: value for name, value in scores.items() if value is not None}


def known_words(encoder: Encoder) -> Callable[[list[str]], list[bool]]:
    """Function: texts -> whether the tokenizer knows all their words. A tokenizer of word pieces knows every text."""
    tokenizer = encoder.tokenizer
    if not hasattr(tokenizer, "unknown_id"):
        return lambda texts: [True] * len(texts)
    return lambda texts: (tokenizer.encode(texts, encoder.context_length) != tokenizer.unknown_id).all(dim=1).tolist()


def hierarchies(command: Command, code: PaperCode) -> list[Table]:
    """Norms and cones of texts along chains, for Table 4's CLIP, EuCLIP and MERU, with and without entailment."""
    options, command = command.split(HierarchyConfig)
    files, config = options.hierarchies, code.config(MODELS["clip"][1], command.scale, command.overrides)
    if files.nouns:
        # an unreadable file fails before training
        if noun_pool(files.nouns, lambda words: [True] * len(words)) is None:
            raise ConfigError(
                f"hierarchies.nouns = {files.nouns}: none of its synsets leads to another one with a word; expected: "
                'hypernyms that are ids of its rows, joined by "|", without a circle'
            )
    elif hierarchy_task(config, 1) is None:
        raise ConfigError(
            "no test set has hierarchies of captions, and no table of nouns is named; expected one of: "
            "data.second_test=<shards with hierarchies>, hierarchies.nouns=<file>"
        )
    runs = train_rows(command, code, {key: config for key, (_, config) in MODELS.items()})
    # on every process, as embedding gathers; only the main process writes
    values: dict[tuple[str, str], list[float]] = {}
    measured_on: dict[str, str] = {}
    for key, seeds in runs.items():
        for run in seeds:
            config, encoder = load_run(run)
            for kind, (what, scores) in measure(encoder, config, files.nouns).items():
                measured_on[kind] = what
                for name, value in scores.items():
                    values.setdefault((f"{key}_{kind}", name), []).append(value)
    of_regime, regime_notes = regime.regime_of_rows({role: runs[key] for role, key in REGIME_ROWS.items()})
    if not is_main_process():
        return []
    complete = {place: of_seeds for place, of_seeds in values.items() if len(of_seeds) == len(command.seeds)}
    texts_of, sample = "; ".join(measured_on.values()), f"at most {regime.NUM_PICTURES:,} training images, and the log"
    findings = Findings(
        name="hierarchies",
        caption="General and specific texts: distance from the root, and entailment cones.",
        protocol="all chains",
        settings={"num_pictures": NUM_PICTURES, "num_chains": NUM_CHAINS, "noun_prompt": NOUN_PROMPT},
        rows={
            f"{key}_{kind}": f"{label}, {kind}"
            for kind in [*measured_on, "regime"]
            for key, (label, _) in MODELS.items()
        },
        columns=COLUMNS | {name: regime.COLUMNS[name] for _, name in of_regime},
        values=complete | {(f"{REGIME_ROWS[row]}_regime", name): numbers for (row, name), numbers in of_regime.items()},
        chance=CHANCE,
        notes=(*NOTES, *regime_notes),
        measured_on=dict.fromkeys(COLUMNS, texts_of) | {name: sample for _, name in of_regime},
    )
    return [findings_table(command, code.name, findings, runs)]


def measure(encoder: Encoder, config: Any, nouns: str) -> dict[str, tuple[str, dict[str, float]]]:
    """One model's scores, "captions" and "nouns" as far as the data exist: kind -> (test set, scores).

    Args:
        nouns: file of `noun_pool`, "" = none.
    """
    geometry, min_radius, results = encoder.model.geometry, config.method.min_radius, {}
    task = hierarchy_task(config, NUM_PICTURES)
    if task is not None:
        embedded = embed_task(encoder, task)
        texts, known = embedded.captions, embedded.hierarchy
        root, _ = model_root(encoder, config, texts)
        scores = text_scores(geometry, texts, root, known, min_radius)
        if geometry.has_cones:
            cones = cone_scores(geometry, embedded.images, texts, known, min_radius)
            scores |= {f"image_{name}": value for name, value in cones.items()}
        walks = walk_all(encoder, embedded, root, None).scores
        means = {f"walk_{name}": mean_score(walks[score]) for name, score in WALK_SCORES.items()}
        scores |= {name: mean for name, mean in means.items() if mean is not None}
        results["captions"] = f"{len(embedded.rows)} pictures of {task.name}", scores
    pool = noun_pool(nouns, known_words(encoder)) if nouns else None
    if nouns and pool is None:
        warnings.warn(f"{nouns}: no chain of nouns consists of words that the model knows; left out", stacklevel=2)
    if pool is not None:
        texts = encoder.texts(list(pool.texts)).to(encoder.device)
        root, _ = model_root(encoder, config, texts)
        results["nouns"] = pool.name, text_scores(geometry, texts, root, pool.hierarchy, min_radius)
    return results
