"""Figures 5 and 7: Grad-CAM on patches and on words, for the whole score and for each pair of class tokens.

The score of an image and a caption is s = sum_k s_k, where s_k = u_k . v_k compares class token k of both. Heat of a
token for a score: its activation times the mean gradient over the tokens of its side, where that is positive. The layer
is the input of the last block: after its attention no patch and no word reaches a class token. Layer and mean are
inferred, as the paper names neither. Class tokens, end token and padding are left out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from common.base.settings import DataConfig
from common.data.broken import readable_items
from common.data.pairs import open_retrieval_sets
from common.data.scenes import annotation_task
from common.distributed import is_main_process
from common.encoders.two_towers import TwoTowers
from common.evaluation.embed import Encoder
from common.evaluation.grad_cam import gradients_of, recorded_input, share_in_box, signed_heat
from common.evaluation.protocol import data_text
from common.report.figures import HeatOnPicture, plot_heat_on_pictures
from common.report.table import Table
from common.reproduce.command import Command
from common.reproduce.findings import Findings, findings_table
from common.reproduce.rows import PaperCode
from common.reproduce.tables import train_rows
from oblique_topology.figures import HeatOnWords, plot_heat_on_words
from oblique_topology.loaded_rows import as_model_inputs, trained_model

DECIDES = "evaluation"

ROWS = {"clip": "table2_clip.yaml", "multi": "table2_multi.yaml"}
NUM_DRAWN, MAPS_DRAWN = 4, 8  # pictures, and pairs of class tokens of each
NUM_MEASURED = {"smoke": 12, "demo": 400}  # pictures with a box; other scales as demo
LABELS = {"clip": "CLIP", "multi": "Multi"}
MAPS = {
    "whole": "whole score",
    "whole_others": "whole score, words of another picture",
    "mean_pair": "average over pairs",
    "best_pair": "best pair",
    "best_pair_others": "best pair, words of another picture",
}
COLUMNS = {
    "share_in_box": ("heat in the box of the object", "fraction", "higher"),
    "likeness": ("cosine with the map of the whole score", "cosine", None),
}


@dataclass(frozen=True)
class TokenMaps:
    """Scores and signed heat; the first map is that of the whole score, map k + 1 that of pair k.

    scores: (batch, num_maps). pixels: (batch, num_maps, rows, columns).
    words: (batch, num_maps, context_length), 0 for no word. is_word: (batch, context_length).
    """

    scores: torch.Tensor
    pixels: torch.Tensor
    words: torch.Tensor
    is_word: torch.Tensor


def scores_of_pairs(
    model: TwoTowers, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The score of each image with its caption, and the contribution of each pair of class tokens.

    Args:
        image_embeddings, text_embeddings: (batch, num_spheres, sphere_dim), or (batch, dim) without spheres.
    Returns:
        (batch,) and (batch, num_spheres); the second has no columns if the score is no sum over spheres.
    """
    whole = model.geometry.paired_similarity(image_embeddings, text_embeddings)
    if image_embeddings.ndim == 3 and model.geometry.is_inner_product:
        return whole, (image_embeddings * text_embeddings).sum(dim=-1)
    return whole, whole.new_zeros(len(whole), 0)


@torch.enable_grad()
def token_maps(model: TwoTowers, images: torch.Tensor, token_ids: torch.Tensor) -> TokenMaps:
    """Grad-CAM of every score and every side.

    Args:
        model: in evaluation mode, with a ViT and a bidirectional text tower.
        images: (batch, 3, size, size), normalised.
        token_ids: (batch, context_length); row k is compared with image k.
    """
    image_tower, text_tower = model.image_tower, model.text_tower
    with (
        recorded_input(image_tower.transformer.blocks[-1]) as patches,
        recorded_input(text_tower.transformer.blocks[-1]) as words,
    ):
        text_embeddings = model.geometry.embed_text(text_tower(token_ids))  # in one part, which is recorded
        whole, pairs = scores_of_pairs(model, model.encode_image(images), text_embeddings)
    recorded = [patches[0], words[0]]

    is_patch = torch.ones(recorded[0].shape[:2], dtype=torch.bool, device=images.device)
    is_patch[:, : image_tower.num_class_tokens] = False
    is_word = _is_word(text_tower.word_mask(token_ids))
    in_front = text_tower.num_class_tokens - 1  # further class tokens stand before the caption
    kept_words = nn.functional.pad(is_word, (in_front, 0), value=False)

    scores = torch.cat([whole[:, None], pairs], dim=1)
    pixel_heat, word_heat = [], []
    for score in scores.unbind(dim=1):
        of_patches, of_words = gradients_of(score, recorded, keep_graph=True)
        heat = signed_heat(recorded[0], of_patches, is_patch)[:, image_tower.num_class_tokens :]
        pixel_heat.append(heat.unflatten(1, (image_tower.image_size // image_tower.patch_size, -1)))
        word_heat.append(signed_heat(recorded[1], of_words, kept_words)[:, in_front:])
    return TokenMaps(scores.detach(), torch.stack(pixel_heat, dim=1), torch.stack(word_heat, dim=1), is_word)


def _is_word(mask: torch.Tensor) -> torch.Tensor:
    """Words without class and end token: True from the second to the last but one of each row's leading Trues."""
    place = torch.arange(mask.shape[1], device=mask.device)
    return (place > 0) & (place < mask.sum(dim=1, keepdim=True) - 1)


def measured_maps(encoder: Encoder, items: Sequence[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The share of each map in the box of the object that a text names, and the cosines of the maps.

    Args:
        items: with "image", "text" and, if there is one, "box".
    Returns:
        (num_items, num_maps) shares, the box's area if a map has no heat; (num_items, num_maps) cosines of each map
        with the first; (num_items,) the boxes' areas as shares of the image. NaN without a box.
    """
    shares, likeness, areas = [], [], []
    for start in range(0, len(items), encoder.batch_size):
        batch = [items[index] for index in range(start, min(start + encoder.batch_size, len(items)))]
        inputs = as_model_inputs(encoder, [item["image"] for item in batch], [item["text"] for item in batch])
        for item, maps in zip(batch, token_maps(encoder.model, *inputs).pixels.clamp(min=0).cpu().double().numpy()):
            box = item.get("box")
            areas.append(math.nan if box is None else float((box[2] - box[0]) * (box[3] - box[1])))
            shares_in_box = [None if box is None else share_in_box(heat, box) for heat in maps]
            shares.append([areas[-1] if share is None else share for share in shares_in_box])
            flat = maps.reshape(len(maps), -1)
            norms = np.linalg.norm(flat, axis=1)
            likeness.append(flat @ flat[0] / np.maximum(norms * norms[0], 1e-12))
    return np.array(shares), np.array(likeness), np.array(areas)


def with_words_of_others(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every image and box with the text of the next item (cyclic) whose text differs.

    Heat that depends on the words leaves the box; other heat stays.

    Raises:
        ValueError: if all texts are equal.
    """
    items = list(items)
    texts = [item["text"] for item in items]
    if len(set(texts)) < 2:
        raise ValueError(f"{len(items)} items with one text; words of others need two different texts")
    return [
        {**item, "text": next(text for text in texts[index + 1 :] + texts[:index] if text != item["text"])}
        for index, item in enumerate(items)
    ]


def statistics_of(
    shares: np.ndarray, likeness: np.ndarray, areas: np.ndarray, shares_of_others: np.ndarray
) -> dict[tuple[str, str], float]:
    """Averages over items; the best pair is chosen on one half and measured on the other, so that the choice gains
    nothing.

    Args:
        shares, likeness, areas: from `measured_maps`.
        shares_of_others: from `measured_maps` with the words of other items.
    Returns:
        (row, column) -> value. Rows: "whole", "mean_pair", "best_pair", "box" and, with the words of others,
        "whole_others" and "best_pair_others"; no shares without boxes, no rows of pairs without pairs.
    """
    statistics = {}
    boxes, pairs = not np.isnan(areas).any(), shares.shape[1] > 1
    if boxes:
        statistics = {("box", "share_in_box"): areas[1::2].mean(), ("whole", "share_in_box"): shares[1::2, 0].mean()}
        statistics["whole_others", "share_in_box"] = shares_of_others[1::2, 0].mean()
    if pairs:
        statistics["mean_pair", "likeness"] = likeness[1::2, 1:].mean()
    if boxes and pairs:
        best = 1 + int(shares[0::2, 1:].mean(axis=0).argmax())
        statistics["mean_pair", "share_in_box"] = shares[1::2, 1:].mean()
        statistics["best_pair", "share_in_box"] = shares[1::2, best].mean()
        statistics["best_pair_others", "share_in_box"] = shares_of_others[1::2, best].mean()
        statistics["best_pair", "likeness"] = likeness[1::2, best].mean()
    return {key: float(value) for key, value in statistics.items()}


def figure5(command: Command, code: PaperCode) -> list[Table]:
    """Maps of a few test images, and the share of the heat in the right box on scenes.

    Photographs may not be published: their images and captions go to <output>/photographs, not to the results.
    """
    runs = train_rows(command, code, ROWS)
    if not is_main_process():
        return []
    count = NUM_MEASURED.get(command.scale, NUM_MEASURED["demo"])
    values: dict[tuple[str, str], list[float]] = {}
    for row, seeds in runs.items():
        for number, run in enumerate(seeds):
            config, encoder = trained_model(run)
            # the figure shows one model: Multi of the first seed
            if row == "multi" and number == 0:
                _draw(encoder, config.data, _folder(command, code, config.data))
            # once with the right words and once with another image's: heat of a box that any words light up is no match
            measured_on, items = _items(config.data, count)
            shares_of_others = measured_maps(encoder, with_words_of_others(items))[0]
            statistics = statistics_of(*measured_maps(encoder, items), shares_of_others)
            for (name, column), value in statistics.items():
                values.setdefault(("box" if name == "box" else f"{row}_{name}", column), []).append(value)
    values = {key: numbers[: len(command.seeds)] for key, numbers in values.items()}  # both rows have the same boxes
    rows = {f"{row}_{key}": f"{label}, {name}" for row, label in LABELS.items() for key, name in MAPS.items()}
    findings = Findings(
        name="token_pair_grad_cam",
        caption="Grad-CAM of the whole score and of pairs of class tokens: heat in the named object's box (Figure 5).",
        measured_on=measured_on,
        protocol="every other picture",
        settings={"num_items": count},
        rows={**rows, "box": "even heat: the box's share of the picture"},
        columns=COLUMNS,
        values=values,
        notes=[
            "The best pair is chosen on every other picture and measured on the rest.",
            "A map without heat counts as even heat. Photographs come without boxes.",
            "With the words of another picture heat that follows the words leaves the box.",
        ],
    )
    return [findings_table(command, code.name, findings, runs)]


def _items(data: DataConfig, count: int) -> tuple[str, Sequence[dict[str, Any]]]:
    """Name and items of the test set: scenes with the box of the named object, or captioned photographs."""
    if data.source == "scenes":
        task = annotation_task("grounding", count, data.image_size)
        return f"scenes/grounding ({task.fingerprint[:8]})", task
    pairs = open_retrieval_sets(data)["test"]
    items = readable_items(pairs, count)
    return data_text({"data": pairs.name, "fingerprint": pairs.fingerprint}), [
        {"image": item["image"], "text": item["captions"][0]} for item in items
    ]


def _folder(command: Command, code: PaperCode, data: DataConfig) -> Path:
    if data.source == "scenes":
        return command.folder(code.name)
    folder = command.output / "photographs" / code.name / command.part / command.scale
    print(f"photographs with heat: {folder} (not among the results, which may be published)")
    return folder


def _draw(encoder: Encoder, data: DataConfig, folder: Path) -> None:
    """Draws the first test images with the map of the whole score, then of the pairs that contribute most to it."""
    items = readable_items(open_retrieval_sets(data)["test"], NUM_DRAWN)
    captions = [item["captions"][min(1, len(item["captions"]) - 1)] for item in items]
    images, token_ids = as_model_inputs(encoder, [item["image"] for item in items], captions)
    maps = token_maps(encoder.model, images, token_ids)
    on_pictures, on_words = [], []
    for number, item in enumerate(items):
        # as the model takes it, so that patches and heat lie on each other
        picture = encoder.transform.eval(item["image"]).permute(1, 2, 0).numpy()
        scores, kept = maps.scores[number], maps.is_word[number]
        chosen = [0, *(1 + scores[1:].argsort(descending=True)[:MAPS_DRAWN]).tolist()]
        titles = [
            f"whole, s = {scores[0]:.2f}" if place == 0 else f"pair {place}, s = {scores[place]:.2f}"
            for place in chosen
        ]
        pixels, words = maps.pixels[number].clamp(min=0).cpu(), maps.words[number].clamp(min=0).cpu()
        on_pictures.append(
            HeatOnPicture(captions[number], picture, {t: pixels[place].numpy() for t, place in zip(titles, chosen)})
        )
        on_words.append(
            HeatOnWords(
                encoder.tokenizer.decode(token_ids[number][kept].tolist()),
                {title: words[place][kept.cpu()].tolist() for title, place in zip(titles, chosen)},
            )
        )
    plot_heat_on_pictures(on_pictures, folder / "token_pair_grad_cam_pictures.png")
    plot_heat_on_words(on_words, folder / "token_pair_grad_cam_words.png")
