"""Images in which every thing has a referring expression: RefCOCO+ as captions, and with boxes."""

import numpy as np

from common.base.random_keys import Draws, derive_key
from common.data.decoding import row_of
from common.data.scenes.dataset import PARTS, DrawnSet, check_drawn
from common.data.scenes.draw import render
from common.data.scenes.sampling import draw_scene
from common.data.scenes.tasks.grounding import STATISTICS, appearance_statement, proposals
from common.data.scenes.wording import say_reference
from common.data.scenes.world import LARGE, Scene


class ReferringScenes(DrawnSet):
    """Two to four things, often alike; the captions of an image are expressions that fit one of them each."""

    def __init__(
        self, part: str, size: int = 1_000, image_size: int = 48, seed: int = 0, num_captions: int = 5
    ) -> None:
        check_drawn("part", part, PARTS, size, image_size)
        self.part, self.size, self.image_size, self.seed, self.num_captions = part, size, image_size, seed, num_captions
        self.name = f"scenes/referring_{part}"
        self._key = derive_key("referring", seed, part)

    def __getitem__(self, index: int) -> dict:
        """{"image": (H, W, 3) uint8, "captions": expressions, "image_id": str}."""
        image = render(self.scene(index), self.image_size)
        return {"image": image, "captions": self.captions(index), "image_id": self.image_id(index)}

    def image_id(self, index: int) -> str:
        return f"referring-{self.part}-{self.seed}-{row_of(index, self)}"

    def scene(self, index: int) -> Scene:
        return draw_scene(derive_key(self._key, row_of(index, self)), STATISTICS)

    def captions(self, index: int) -> list[str]:
        return [expression["text"] for expression in self.expressions(index)]

    def expressions(self, index: int) -> list[dict]:
        """One for each of the scene's things in order, without things that none distinguishes.

        Returns:
            {"text": str, "box": (left, top, right, bottom) as fractions, "large": whether the thing is} each.
        """
        scene, expressions = self.scene(index), []
        for place, item in enumerate(scene.objects):
            draws = Draws(derive_key("referring", scene.key, place))
            statement = appearance_statement(scene, place, draws)
            if statement is not None:
                text = say_reference(statement, draws)
                expressions.append({"text": text, "box": item.box, "large": item.size == LARGE})
        return expressions[: self.num_captions]

    def proposals(self, index: int) -> np.ndarray:
        """(8, 4) boxes to choose from, those of all things among them, in random order."""
        scene = self.scene(index)
        draws = Draws(derive_key("proposals", scene.key))
        return np.array(draws.shuffled(proposals(scene, draws)), dtype=np.float64)

    @property
    def parameters(self) -> dict:
        names = ("part", "size", "image_size", "seed", "num_captions")
        return {"set": "referring"} | {name: getattr(self, name) for name in names}
