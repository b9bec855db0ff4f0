"""One data set class for all annotation tasks; item i is a pure function of (task, part, seed, i)."""

from collections.abc import Callable
from typing import NamedTuple

from common.base.random_keys import Draws, derive_key
from common.data.decoding import row_of
from common.data.scenes.dataset import DrawnSet, check_drawn
from common.data.scenes.tasks.associations import association_item
from common.data.scenes.tasks.entailment import ENTAILMENT_LABELS, entailment_item
from common.data.scenes.tasks.grounding import grounding_item
from common.data.scenes.tasks.image_pairs import pair_item
from common.data.scenes.tasks.questions import QUESTION_TURNS, question_item


class AnnotationSpec(NamedTuple):
    """`item(key, turn, image_size)` makes an item; in every run of `turns` items each turn comes once."""

    item: Callable[[int, int, int], dict]
    turns: int


ANNOTATION_TASKS: dict[str, AnnotationSpec] = {
    "grounding": AnnotationSpec(grounding_item, 1),  # RefCOCO+
    "vqa": AnnotationSpec(question_item, QUESTION_TURNS),  # VQA v2
    "nlvr2": AnnotationSpec(pair_item, 2),  # NLVR2
    "visual_entailment": AnnotationSpec(entailment_item, len(ENTAILMENT_LABELS)),  # SNLI-VE
    "winogavil": AnnotationSpec(association_item, 4),  # WinoGAViL
}


class AnnotationTask(DrawnSet):
    """Images with boxes, questions, statements or cues; each task's file documents its items.

    size, image_size, seed and part are those of `ClassificationTask`.
    """

    def __init__(self, name: str, size: int = 1_000, image_size: int = 48, seed: int = 0, part: str = "test"):
        check_drawn("task", name, ANNOTATION_TASKS, size, image_size, part)
        self.name, self.size, self.image_size, self.seed, self.part = name, size, image_size, seed, part
        self._make, self._turns = ANNOTATION_TASKS[name]
        self._task_key = derive_key("annotation", seed, name, part)

    def __getitem__(self, index: int) -> dict:
        index = row_of(index, self)
        block, place = divmod(index, self._turns)
        turn = Draws(derive_key("turns", self._task_key, block)).shuffled(range(self._turns))[place]
        item = self._make(derive_key(self._task_key, index), turn, self.image_size)
        item["image_id"] = f"{self.name}-{self.part}-{self.seed}-{index}"
        return item

    @property
    def parameters(self) -> dict:
        return {name: getattr(self, name) for name in ("name", "size", "image_size", "seed", "part")}


annotation_task = AnnotationTask
