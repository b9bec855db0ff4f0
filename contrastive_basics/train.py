"""Trains one of the chapter's vision-language models (pretrain.py trains those of its vision part).

    python contrastive_basics/train.py                                            main row, scenes, a CPU is enough
    python contrastive_basics/train.py --config contrastive_basics/configs/table1_late_interaction.yaml
    accelerate launch --config_file scripts/accelerate/multi_gpu.yaml contrastive_basics/train.py \\
        --config contrastive_basics/configs/table1_ours.yaml --scale paper data.root=/data/pairs
"""

import math
import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from accelerate import Accelerator

from common.data.pairs import Pairs
from common.run.folder import RunFiles
from common.run.launch import run_or_explain, train_main
from common.run.training import Setup, opened
from common.sharded import whole_weights
from contrastive_basics.config import Config
from contrastive_basics.evaluate import MODELS, PAPER
from contrastive_basics.groups import loss_within_groups
from contrastive_basics.model import LOSS_OF, build_model

DEFAULT_ROW = "table1_ours.yaml"


SETUP = Setup(PAPER, build_model=lambda config, training: build_model(config, training.tokenizer))


def train(
    config: Config, pairs: Pairs, files: RunFiles, resume: bool, accelerator: Accelerator, label: str = PAPER
) -> None:
    """Trains until config.optim.steps, then evaluates; arguments as in `common/run/training.py: opened`."""
    method, contrast = config.method, LOSS_OF[config.method.loss]
    # data, model, optimiser, as the last checkpoint left them if the run resumes
    with opened(SETUP, config, pairs, files, resume, accelerator, label) as run:
        model, memory = run.bare_model, run.bare_model.memory  # momentum encoder and queue of past pairs, or None
        if memory is not None and run.is_fresh:
            memory.start_(model)  # after model.init and backbones have filled the towers
        for step in run.steps():
            # Eq. 2 to 5: normalised vectors and their cosines; Eq. 6 to 8: softmax over rows, over columns, their mean
            images, texts, *scalars = step.embed(step.images, step.token_ids)
            if method.group_size:
                loss = loss_within_groups(images, texts, *scalars, method.group_size)
                chance = math.log(method.group_size)
            else:
                ids = {"ids": step.ids} if method.targets == "ids" else {}
                queue = {} if memory is None else {"queue": memory.pairs()}
                loss = contrast.of(images, texts, model.geometry, *scalars, **ids, **queue, **config.optim.tiles)
                chance = contrast.chance(len(images), **queue)
            step.backward(loss)
            step.diagnose(images, texts, chance)
            step.update()
            if memory is not None:  # after the loss: a pair must not meet its own key
                memory.update_(model, method.ema_momentum)
                with whole_weights(model):  # under FSDP2: unsharded, outside of the forward pass
                    memory.insert_batch(step.images, step.token_ids, step.ids)
        run.evaluate(MODELS)


def main() -> None:
    train_main(__doc__, Path(__file__), Config, DEFAULT_ROW, train)


if __name__ == "__main__":
    run_or_explain(main)
