"""Labelled pictures with class names and prompt templates; item i is a pure function of (task, part, seed, i)."""

from common.random_keys import derive_key

from .dataset import check_index, check_sizes, fingerprint_of
from .draw import render
from .hashing import Draws
from .imagenet import IMAGENET_TASKS
from .task_spec import TaskSpec
from .vtab import VTAB_TASKS
from .world import Scene

CLASSIFICATION_TASKS: dict[str, TaskSpec] = {**IMAGENET_TASKS, **VTAB_TASKS}
PARTS = ("test", "train")  # train: for probes and fine-tuning; the two share no picture


class ClassificationTask:
    """A balanced classification set: every run of `len(class_names)` pictures holds each class once.

    Args:
        name: one of `CLASSIFICATION_TASKS`.
        size: number of pictures; does not change the pictures themselves.
        image_size: side in pixels, at least 16.
        seed: any integer.
        part: "test", or "train" for a disjoint set of the same distribution.
    Raises:
        ValueError: for an unknown name or part, or a size out of range.
    """

    def __init__(self, name: str, size: int = 1_000, image_size: int = 48, seed: int = 0, part: str = "test"):
        if name not in CLASSIFICATION_TASKS:
            raise ValueError(f"unknown task {name!r}; known tasks: {', '.join(CLASSIFICATION_TASKS)}")
        if part not in PARTS:
            raise ValueError(f"unknown part {part!r}; known parts: {', '.join(PARTS)}")
        check_sizes(size, image_size)
        spec = CLASSIFICATION_TASKS[name]
        self.task, self.size, self.image_size, self.seed, self.part = name, size, image_size, seed, part
        self.name = f"scenes/{name}"
        self.class_names, self.templates = list(spec.class_names), list(spec.templates)
        self.stands_in_for, self.group = spec.stands_in_for, spec.group
        self._make = spec.scene
        self._task_key = derive_key("classification", seed, name, part)

    def __len__(self) -> int:
        return self.size

    def label(self, index: int) -> int:
        """Class of a picture, in [0, len(class_names))."""
        block, place = divmod(check_index(index, self.size), len(self.class_names))
        return Draws(derive_key("labels", self._task_key, block)).shuffled(range(len(self.class_names)))[place]

    def scene(self, index: int) -> Scene:
        """What the picture shows."""
        key = derive_key(self._task_key, check_index(index, self.size))
        return self._make(self.label(index), Draws(key), key)

    def __getitem__(self, index: int) -> dict:
        """{"image": (H, W, 3) uint8, "label": int, "image_id": str}."""
        index = check_index(index, self.size)
        return {
            "image": render(self.scene(index), self.image_size),
            "label": self.label(index),
            "image_id": f"{self.task}-{self.part}-{self.seed}-{index}",
        }

    @property
    def fingerprint(self) -> str:
        """sha256 in hex of the parameters, the names and templates, and a few rendered pictures."""
        parameters = {
            "name": self.task,
            "size": self.size,
            "image_size": self.image_size,
            "seed": self.seed,
            "part": self.part,
            "class_names": self.class_names,
            "templates": self.templates,
        }
        return fingerprint_of(parameters, (self[index] for index in range(min(4, self.size))))


def classification_task(
    name: str, size: int = 1_000, image_size: int = 48, seed: int = 0, part: str = "test"
) -> ClassificationTask:
    """The task of that name; see `ClassificationTask`."""
    return ClassificationTask(name, size, image_size, seed, part)
