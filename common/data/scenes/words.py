"""How each attribute is said: for every value its wordings, the first one plain, the others synonyms."""

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
