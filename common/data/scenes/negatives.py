"""Hard negatives: false captions that differ from true ones by swapped words, often the same bag of words.

"a red circle above a blue square" gives "a blue circle above a red square" (colours swapped) and "a red circle below a
blue square" (relation reversed), for example. Each is checked to be false of the scene.
"""

from common.base.random_keys import Draws, derive_key
from common.data.scenes.captions import caption_statements, wording_draws
from common.data.scenes.statements import ATTRIBUTE_NAMES, Mention, Statement, describes
from common.data.scenes.wording import say
from common.data.scenes.world import INVERSE_RELATION, Scene

_SWAPS = ((1,), (0,), (2,), (3,), (0, 1))  # fields of Mention to exchange: colours, shapes, sizes, textures, both


def _exchange(a: Mention, b: Mention, fields: tuple[int, ...]) -> tuple[Mention, Mention] | None:
    # both mentions with the fields exchanged; None if a field is unspecified in one of them or nothing changes
    if any(a[f] < 0 or b[f] < 0 for f in fields) or all(a[f] == b[f] for f in fields):
        return None
    first, second = list(a), list(b)
    for f in fields:
        first[f], second[f] = second[f], first[f]
    return Mention(*first), Mention(*second)


def swapped_statements(statement: Statement) -> list[Statement]:
    """Statements of the same form with words exchanged between two mentions, or the first relation reversed."""
    variants = []
    mentions = statement.mentions
    for i in range(len(mentions)):
        for j in range(i + 1, len(mentions)):
            for fields in _SWAPS:
                pair = _exchange(mentions[i], mentions[j], fields)
                if pair is not None:
                    changed = list(mentions)
                    changed[i], changed[j] = pair
                    variants.append(statement._replace(mentions=tuple(changed)))
    if statement.relations:
        a, relation, b = statement.relations[0]
        reversed_first = ((a, INVERSE_RELATION[relation], b), *statement.relations[1:])
        variants.append(statement._replace(relations=reversed_first))
    return variants


def replaced_statements(statement: Statement, draws: Draws) -> list[Statement]:
    """Statements with one named attribute of one mention replaced by another value."""
    variants = []
    for i, mention in enumerate(statement.mentions):
        for field, value in enumerate(mention):
            if value >= 0:
                other = (value + 1 + draws.below(len(ATTRIBUTE_NAMES[field]) - 1)) % len(ATTRIBUTE_NAMES[field])
                changed = list(statement.mentions)
                changed[i] = Mention(*mention[:field], other, *mention[field + 1 :])
                variants.append(statement._replace(mentions=tuple(changed)))
    return variants


def hard_negative_pairs(scene: Scene, detail: int = 0) -> list[tuple[str, str]]:
    """(true caption, false caption) pairs of the scene's levels 0 to 2, without repetition.

    A scene without a false swap (one object, say) gives captions with one word replaced.
    """
    statements = caption_statements(scene, detail)[:3]
    for variants in (
        swapped_statements,
        lambda s: replaced_statements(s, Draws(derive_key("replaced", scene.key))),
    ):
        pairs = []
        for level in (2, 1, 0):
            true = say(statements[level], wording_draws(scene, level))
            for statement in variants(statements[level]):
                if not describes(statement, scene):
                    pairs.append((true, say(statement, wording_draws(scene, level))))
        if pairs:
            return list(dict.fromkeys(pairs))
    return []
