"""Statement -> sentence. The same draws give the same synonyms and templates, whatever the attributes are.

So two statements of one form, worded with the same draws, differ only in the words that differ in meaning (and in "a" /
"an"): hard negatives are word-level.
"""

from common.base.random_keys import Draws
from common.data.scenes.statements import Mention, Statement
from common.data.scenes.world import INVERSE_RELATION

# how each attribute is said: for every value its wordings, the first one plain, the others synonyms
SHAPE_NOUNS = (
    ("circle", "disc"),
    ("square", "box"),
    ("triangle", "triangle"),
    ("diamond", "rhombus"),
    ("star", "star"),
    ("cross", "plus"),
    ("ring", "hoop"),
    ("heart", "heart"),
    ("moon", "crescent"),
    ("arrow", "arrow"),
)
ANY_NOUNS = ("shape", "thing", "object")
COLOUR_ADJECTIVES = (
    ("red", "crimson"),
    ("orange", "orange"),
    ("yellow", "golden"),
    ("green", "green"),
    ("cyan", "turquoise"),
    ("blue", "blue"),
    ("purple", "violet"),
    ("pink", "pink"),
    ("brown", "brown"),
)
SIZE_ADJECTIVES = (("small", "little", "tiny"), ("large", "big", "huge"))
TEXTURE_ADJECTIVES = (("solid", "plain"), ("striped", "stripy"), ("dotted", "spotted"), ("checkered", "checked"))
TEXTURE_PHRASES = ("of one colour", "with stripes", "with dots", "with checks")  # after the noun
ORIENTATION_PHRASES = ("pointing up", "pointing right", "pointing down", "pointing left")
PLACE_PHRASES = (
    ("in the top left", "in the upper left corner"),
    ("at the top", "in the upper middle"),
    ("in the top right", "in the upper right corner"),
    ("on the left", "at the left side"),
    ("in the middle", "in the centre"),
    ("on the right", "at the right side"),
    ("in the bottom left", "in the lower left corner"),
    ("at the bottom", "in the lower middle"),
    ("in the bottom right", "in the lower right corner"),
)
RELATION_PHRASES = (
    ("to the left of", "left of"),
    ("to the right of", "right of"),
    ("above", "over"),
    ("below", "under"),
)
BACKGROUND_PHRASES = (
    ("on a white background", "on white paper"),
    ("on a gray background", "on gray paper"),
    ("on a black background", "on black paper"),
    ("on a lined background", "on lined paper"),
    ("on sand", "on a beach"),
    ("on grass", "in a meadow"),
    ("in the sky", "in front of the sky"),
    ("at night", "in the night sky"),
)
NUMBERS = ("no", "one", "two", "three", "four")
MANY_NOUNS = ("shapes", "things", "objects")
SHAPE_PLURALS = (
    "circles", "squares", "triangles", "diamonds", "stars", "crosses", "rings", "hearts", "moons", "arrows",
)  # fmt: skip
PREFIXES = (
    "there is",
    "a picture of",
    "a drawing of",
    "an image of",
    "a photo of",
    "here we see",
    "this picture shows",
)


def with_article(phrase: str) -> str:
    """ "a" or "an" in front of a phrase, by its first letter."""
    return f"an {phrase}" if phrase[0] in "aeiou" else f"a {phrase}"


SYNONYM_PERCENT = 16  # chance that a word is replaced by a synonym
PREFIX_PERCENT = 25


def _word(wordings: tuple[str, ...], draw: int) -> str:
    # `draw` in [0, 100): the first wording unless it is below SYNONYM_PERCENT
    return wordings[0] if draw >= SYNONYM_PERCENT else wordings[1 + draw % (len(wordings) - 1)]


def noun_phrase(mention: Mention, draws: Draws | None = None) -> str:
    """Adjectives and noun without article, for example "small red striped circle in the top left".

    None for `draws` gives the plain words.
    """
    order = after = 0
    pick_noun = pick_colour = pick_size = pick_texture = pick_place = 99
    if draws is not None:
        below = draws.below
        order, after, pick_noun, pick_colour = below(100), below(100), below(100), below(100)
        pick_size, pick_texture, pick_place = below(100), below(100), below(100)
    shape, colour, size, texture, orientation, place = mention
    words = []
    if size >= 0:
        words.append(_word(SIZE_ADJECTIVES[size], pick_size))
    texture_last = draws is not None and after < 25
    if texture >= 0 and not texture_last and order < 50:
        words.append(_word(TEXTURE_ADJECTIVES[texture], pick_texture))
    if colour >= 0:
        words.append(_word(COLOUR_ADJECTIVES[colour], pick_colour))
    if texture >= 0 and not texture_last and order >= 50:
        words.append(_word(TEXTURE_ADJECTIVES[texture], pick_texture))
    words.append(_word(SHAPE_NOUNS[shape], pick_noun) if shape >= 0 else ANY_NOUNS[pick_noun % 3])
    if texture >= 0 and texture_last:
        words.append(TEXTURE_PHRASES[texture])
    if orientation >= 0:
        words.append(ORIENTATION_PHRASES[orientation])
    if place >= 0:
        words.append(_word(PLACE_PHRASES[place], pick_place))
    return " ".join(words)


def _pair(first: str, second: str, relation: int, whole_sentence: bool, draws: Draws) -> str:
    # two noun phrases in one relation, in one of five orders; only two of them can follow an opening
    template, pick = draws.below(100 if whole_sentence else 68), draws.below(100)
    forward, backward = RELATION_PHRASES[relation], RELATION_PHRASES[INVERSE_RELATION[relation]]
    if template < 50:
        return f"{first} {_word(forward, pick)} {second}"
    if template < 68:
        return f"{second} {_word(backward, pick)} {first}"
    if template < 80:
        return f"{first} is {_word(forward, pick)} {second}"
    if template < 90:
        return f"{_word(forward, pick)} {second} there is {first}"
    return f"{_word(backward, pick)} {first} is {second}"


def _reference(mention: Mention) -> str:
    # short way to point back at something mentioned before, for example "the blue square"
    colour = f"{COLOUR_ADJECTIVES[mention.colour][0]} " if mention.colour >= 0 else ""
    return f"the {colour}{SHAPE_NOUNS[mention.shape][0] if mention.shape >= 0 else ANY_NOUNS[0]}"


def say(statement: Statement, draws: Draws) -> str:
    """A lower-case sentence for a statement of up to four mentions.

    Args:
        statement: at most one relation per later mention: (0, r, 1) between the first two, then (k, r, j) with j < k.
        draws: their number depends only on the statement's form.
    """
    # what is drawn, and in which order, follows from the form alone: else hard negatives would differ in more words
    mentions, count = statement.mentions, statement.count
    opening, prefix = draws.below(100), draws.below(len(PREFIXES))
    if not any(max(mention) >= 0 for mention in mentions) and statement.background < 0:
        return _say_number(len(mentions), count, opening, PREFIXES[prefix], draws)
    # the first two mentions, in relation where there is one
    phrases = [with_article(noun_phrase(mention, draws)) for mention in mentions]
    relations = {max(a, b): (a, relation, b) for a, relation, b in statement.relations}
    sentence = phrases[0] if phrases else ""
    if len(phrases) > 1:
        if 1 in relations:
            a, relation, b = relations[1]
            whole_sentence = count < 0 and opening >= PREFIX_PERCENT
            sentence = _pair(phrases[a], phrases[b], relation, whole_sentence, draws)
        else:
            sentence = f"{phrases[0]} {draws.pick(('and', 'and', 'with', 'together with'))} {phrases[1]}"
    # the later ones, each pointing back
    for index in range(2, len(phrases)):
        link, pick = draws.below(3), draws.below(100)
        sentence += f" {('and', 'with', 'and')[link]} {phrases[index]}"
        if index in relations:
            _, relation, b = relations[index]
            sentence += f" {_word(RELATION_PHRASES[relation], pick)} {_reference(mentions[b])}"
    # background, exact number and opening go around all that
    pick_background, fronted = draws.below(100), draws.chance(25)
    if statement.background >= 0 and not fronted:
        sentence = f"{sentence} {_word(BACKGROUND_PHRASES[statement.background], pick_background)}".strip()
    if count >= 0:
        sentence = _with_count(sentence, count, len(mentions), draws)
    elif opening < PREFIX_PERCENT:
        sentence = f"{PREFIXES[prefix]} {sentence}"
    if statement.background >= 0 and fronted:
        sentence = f"{_word(BACKGROUND_PHRASES[statement.background], pick_background)} {sentence}"
    return sentence


def _with_count(sentence: str, count: int, mentioned: int, draws: Draws) -> str:
    form, noun = draws.below(100), draws.below(100)
    many = MANY_NOUNS[noun % 3]
    if mentioned == count and form < 35:
        return f"only {sentence}"
    if mentioned == count and form < 60:
        return f"{sentence} and nothing else"
    if count == 1:
        return f"one {ANY_NOUNS[noun % 3]} namely {sentence}"
    return f"{NUMBERS[count]} {many} {'namely' if mentioned == count else 'including'} {sentence}"


def _say_number(mentioned: int, count: int, opening: int, prefix: str, draws: Draws) -> str:
    # a statement about the number of things only: exactly `count`, or else at least `mentioned`
    noun, form = draws.below(100), draws.below(100)
    if count == 1:
        sentence = f"{('one', 'a single', 'only one')[form % 3]} {ANY_NOUNS[noun % 3]}"
    elif count >= 0:
        sentence = f"{('', 'exactly ')[form < 30]}{NUMBERS[count]} {MANY_NOUNS[noun % 3]}"
    elif mentioned == 1:
        sentence = with_article(ANY_NOUNS[noun % 3]) if form < 70 else "something"
    elif mentioned == 2:
        sentence = f"some {MANY_NOUNS[noun % 3]}"
    else:
        sentence = f"at least {NUMBERS[mentioned]} {MANY_NOUNS[noun % 3]}"
    if opening < PREFIX_PERCENT:
        sentence = f"{prefix.replace('there is', 'there are' if count > 1 or mentioned > 1 else 'there is')} {sentence}"
    return sentence


def say_reference(statement: Statement, draws: Draws) -> str:
    """Noun phrase with "the" for a statement's first mention, by its relation to the second if there is one."""
    sentence = f"the {noun_phrase(statement.mentions[0], draws)}"
    if statement.relations:
        _, relation, _ = statement.relations[0]
        linked = _word(RELATION_PHRASES[relation], draws.below(100))
        sentence = f"{sentence} {linked} the {noun_phrase(statement.mentions[1], draws)}"
    return sentence
