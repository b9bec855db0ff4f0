"""What the commands that evaluate published weights share: the preprocessing of CLIP around a model, and the answer."""

from pathlib import Path

import torch

from common.data.tokenizer import Tokenizer
from common.data.transforms import CLIP_MEAN, CLIP_STD, ImageTransform
from common.encoders.two_towers import TwoTowers
from common.evaluation.embed import Encoder
from common.evaluation.protocol import Evaluation, as_json
from common.evaluation.trained import print_or_write
from common.run.config import RunConfig
from common.run.session import provenance_of


def check_layout(checkpoint: str, layout: str, of_files: tuple[str, ...], of_folders: tuple[str, ...]) -> None:
    """Whether a layout is known and, where it takes a file, the file is there.

    Args:
        checkpoint: file, folder or hub name.
        layout: the user's.
        of_files: layouts that take a file.
        of_folders: layouts that also take a folder or a hub name.
    Raises:
        ValueError, FileNotFoundError.
    """
    accepted = (*of_folders, *of_files)
    if layout not in accepted:
        raise ValueError(f"layout {layout!r}; accepted: {', '.join(accepted)}")
    if layout in of_files and not Path(checkpoint).is_file():
        raise FileNotFoundError(f"{checkpoint} does not exist; layout {layout} takes a file of weights")


def published_encoder(
    model: TwoTowers,
    tokenizer: Tokenizer,
    run: RunConfig,
    device: torch.device,
    mean: tuple[float, ...] = CLIP_MEAN,
    std: tuple[float, ...] = CLIP_STD,
) -> Encoder:
    """The model in evaluation mode; pictures are scaled by their shorter side and cropped, as CLIP's.

    Args:
        model: of both towers.
        tokenizer: with the ids that it was trained with.
        run: batch size and loader processes.
        device: where the model goes.
        mean, std: of the colours.
    Raises:
        ValueError: a vocabulary of another size.
    """
    ids, rows = tokenizer.vocabulary_size, model.text_tower.token_embedding.num_embeddings
    if ids != rows:
        raise ValueError(f"data.vocabulary has {ids} ids, the text tower of these weights {rows}; accepted: as many")
    return Encoder(
        model=model.to(device).eval(),
        transform=ImageTransform(model.image_tower.image_size, "crop", mean=mean, std=std),
        tokenizer=tokenizer,
        context_length=model.text_tower.context_length,
        batch_size=run.evaluation_batch_size,
        device=device,
        num_workers=run.num_workers,
    )


def answer_of_published(
    paper: str, checkpoint: str, layout: str, encoder: Encoder, results: dict[str, Evaluation], output: Path | None
) -> None:
    """Prints or writes evaluations of published weights; of a path its name alone.

    Args:
        paper: the folder.
        checkpoint, layout: where the weights come from.
        encoder: that was evaluated.
        results: by role.
        output: JSON file; None = print.
    """
    name = Path(checkpoint).name if Path(checkpoint).exists() else checkpoint
    weights = {"training_data": f"{name}, published", "training_revision": "published weights"}
    facts = {"layout": layout, "geometry": encoder.model.geometry.name}
    print_or_write({**facts, **as_json(paper, results, 0, weights, provenance_of(paper))}, output)
