"""The model of a finished run, and the configs of Table 1; the analyses of single models start here."""

from typing import Any

from common.evaluation.embed import Encoder
from common.reproduce.command import Command
from common.reproduce.rows import RowRun
from common.run.checkpoint import last_checkpoint
from common.run.evaluation import reading_features, this_device
from euclip.evaluate import load_encoder

DECIDES = "evaluation"

B16 = {"EuCLIP": "b16_euclip.yaml", "CLIP": "b16_clip.yaml", "MERU": "b16_meru.yaml"}  # Table 1, ViT-B/16


def load_run(run: RowRun, command: Command) -> tuple[Any, Encoder]:
    """Config and model of a run, with the command's data, as an earlier run may have had other test sets.

    If the backbone is frozen, its features come from the cache of the training.
    """
    data = [text for text in command.overrides if text.startswith("data.") and not text.startswith("data.vocabulary=")]
    config, encoder = load_encoder(last_checkpoint(run.files.checkpoints), this_device(), data)
    return config, reading_features(encoder, config)
