"""Fixed phrases outside captions: glue words of sentences, questions and answers, statements on pairs, cues."""

from common.data.scenes.world import COLOURS, PLACES, SHAPES, SIZES, TEXTURES

SENTENCE_GLUE = (
    "a an and with together is there are the only nothing else one namely including exactly single some something",
    "at least",
)
DIGIT_WORDS = ("zero", "one", "two", "three", "four")
ANSWERS = ("yes", "no", *DIGIT_WORDS, *COLOURS, *SHAPES, *TEXTURES, *SIZES, *PLACES)
QUESTIONS = {
    "exists": ("is there {}", "does this picture show {}", "can you see {}"),
    "related": ("is there {}", "does this picture show {}"),
    "count": ("how many {} are there", "how many {} can you see", "what is the number of {}"),
    "colour": ("what colour is {}", "what is the colour of {}"),
    "shape": ("what shape is {}", "what is the shape of {}"),
    "texture": ("what texture is {}", "what is the texture of {}", "what is the pattern of {}"),
    "size": ("what size is {}", "what is the size of {}", "how large is {}"),
    "place": ("where is {}", "in what place is {}"),
}
PAIR_STATEMENTS = {
    "both": ("both pictures show {thing}", "there is {thing} in each picture"),
    "neither": ("neither picture shows {thing}", "no picture shows {thing}"),
    "one": ("exactly one of the pictures shows {thing}", "only one picture shows {thing}"),
    "left": ("only the left picture shows {thing}", "there is {thing} in the left picture but not in the right one"),
    "total": ("in total {counted}", "{counted} in the two pictures"),
    "more": (
        "there are more shapes in the left picture than in the right one",
        "the left picture shows more things than the right picture",
    ),
    "each": ("the left picture shows {thing} and the right picture shows {other}",),
    "equal": (
        "both pictures show the same number of things",
        "there are as many shapes in the left picture as in the right one",
    ),
}
CUES = {  # one word per value; shapes, colours and textures are cued by their own wordings
    "count": {1: ("one", "single"), 2: ("two", "pair"), 3: ("three",), 4: ("four",)},
    "background": {0: ("white",), 1: ("gray",), 2: ("black",), 3: ("lined",)},
}
