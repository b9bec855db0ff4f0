"""The code of rows that train on images only."""

from collections.abc import Callable

from common.reproduce.rows import PaperCode
from common.run.pictures import SCALE_FILES, open_test_sets, open_training_set, open_validation_sets


def image_rows(
    paper: str, config_class: type, pretrain: Callable[..., None], reevaluate: Callable[..., None]
) -> PaperCode:
    """`PaperCode` of a folder's pretrain.py."""
    return PaperCode(
        paper,
        config_class,
        pretrain,
        reevaluate,
        open_training_set,
        open_test_sets,
        SCALE_FILES,
        open_validation=open_validation_sets,
    )
