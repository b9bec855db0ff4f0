"""The model of a finished run, and the configs of Table 1; the analyses of single models start here."""

from common.evaluation.embed import Encoder
from common.reproduce.rows import RowRun
from euclip.config import Config
from euclip.evaluate import MODELS

DECIDES = "evaluation"

B16 = {"EuCLIP": "b16_euclip.yaml", "CLIP": "b16_clip.yaml", "MERU": "b16_meru.yaml"}  # Table 1, ViT-B/16


def load_run(run: RowRun) -> tuple[Config, Encoder]:
    """Config of the command, and model of a run, which may have been trained beside other test sets.

    If the backbone is frozen, its features come from the cache of the training.
    """
    return run.config, MODELS.encoder_of(run.files, run.config)
