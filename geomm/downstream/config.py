"""Configuration of a fine-tuning for a task: that of a pre-training, with the task and its files."""

from dataclasses import dataclass, field
from typing import Literal

from common.base.fields import path_setting
from common.base.settings import DataConfig
from geomm.config import Config, MethodConfig

NUM_PICTURES = {"nlvr2": 2, "text_assignment": 2}  # that an item of a task has; else 1


@dataclass(frozen=True)
class TaskData(DataConfig):
    """Annotated images: drawn scenes, or photographs with files of annotations in data.train, val and test.

    `common/data/annotated.py` has their format, with data.source = karpathy. VQA v2 has two files,
    "questions.json+annotations.json". Text assignment takes captioned images from any source.
    """

    task: Literal["vqa", "visual_entailment", "text_assignment", "nlvr2"] = "vqa"
    blank: bool = False  # all images are black, in training and test: a control that has only words
    answers: str = path_setting()  # vqa: JSON list of the answers that are ranked, below data.root; "" = the scenes'

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task == "text_assignment":
            if self.blank:
                raise ValueError("data.blank = true with data.task = text_assignment; expected: false")
            return
        if self.partner_noise:
            raise ValueError(
                f"data.partner_noise = {self.partner_noise} with data.task = {self.task}, which has no captions; "
                "expected: 0"
            )
        if self.source not in ("scenes", "karpathy") or self.mixture:
            raise ValueError(
                f"data.source = {self.source} with data.task = {self.task}; expected: scenes, or karpathy, whose files "
                "hold annotations; no data.mixture"
            )
        if self.source == "scenes" and self.train:
            raise ValueError(f"data.train = {self.train} with data.task = {self.task} on scenes; expected: empty")
        if bool(self.answers) != (self.task == "vqa" and self.source != "scenes"):
            raise ValueError(
                f"data.answers = {self.answers!r} with data.task = {self.task} and data.source = {self.source}; "
                "expected: a file for vqa on photographs, else empty"
            )


@dataclass(frozen=True)
class TaskConfig(Config):
    """A row of a task's table at a scale.

    Distance, queue and temperature of `method` and optim.logit_scale_rate have no effect, as there is no contrast.
    """

    data: TaskData = field(default_factory=TaskData)
    method: MethodConfig = field(default_factory=lambda: MethodConfig(base="albef"))
    has_pools = False

    def __post_init__(self) -> None:
        super().__post_init__()
        task, model = self.data.task, self.model
        if self.method.base == "clip":
            raise ValueError("method.base = clip with a task; expected: one with a fusion: albef, tcl, mafa")
        if self.start.bert and not (self.start.row or self.start.run):
            raise ValueError(f"only start.bert = {self.start.bert} with a task; expected: start.row, an ALBEF's")
        if self.method.two_views:
            raise ValueError(
                "method.two_views = true with a task, whose momentum encoders see the same images; expected: false"
            )
        batch = self.optim.global_batch_size
        if task == "text_assignment" and batch < 3:
            raise ValueError(
                f"optim.global_batch_size = {batch} with data.task = text_assignment; expected: at least 3 in each "
                "process, a caption and two other pictures"
            )
        if task == "vqa" and (model.image.width != model.text.width or model.text.stem.weights):
            raise ValueError(
                f"data.task = vqa with model.image.width = {model.image.width}, model.text.width = {model.text.width} "
                f"and model.text.stem.weights = {model.text.stem.weights!r}: the decoder of answers starts from the "
                "fusion layers and writes words; expected: equal widths, no stem of words"
            )
        if self.run.evaluate_every and task == "text_assignment":
            raise ValueError(
                f"run.evaluate_every = {self.run.evaluate_every} with data.task = text_assignment; expected: 0, its "
                "log has the accuracy in training"
            )
