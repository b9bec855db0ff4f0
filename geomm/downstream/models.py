"""Task heads on a pre-trained ALBEF's towers and fusion (ALBEF, Sec. 3.4 and 4, after its code; GeoMM, Sec. 4.1).

    vqa                 a decoder writes the answer and attends to the fused question (14.2)
    visual_entailment   an MLP on the fused class token classifies the hypothesis, three classes
    text_assignment     to which of two images does a caption belong, or to neither: before NLVR2
    nlvr2               a doubled fusion attends to two images in turn, an MLP classifies the statement
Losses are means over this process's items, in nats. All but text assignment are distilled: share alpha of the target
comes from a momentum copy of all trained parameters. ALBEF takes that softmax over the vocabulary; TCL's code takes it
over the positions, by mistake.
"""

import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from common.caption_lengths import tokens_by_length, up_to_first
from common.encoders.fusion import FusionTransformer, MaskedLanguageHead
from common.encoders.text import BidirectionalTextTransformer
from common.encoders.vision import VisionTransformer
from common.geometry import Scalar, Sphere
from common.methods.albef import HoldsEncoders
from common.momentum import MomentumEncoder
from common.vectors import inner_product_similarity

NUM_ASSIGNMENTS = 3  # the first picture, the second, neither
ASSIGNMENT_TEMPERATURE = 0.07  # of the similarities in the draw of a second image
SEQUENCES_AT_ONCE = 1_024  # that the decoder scores in evaluation


class FusedReader(nn.Module):
    """The trained part of a task's model, with the parameter names of an ALBEF's encoders, whose weights it takes.

    Args:
        fusion: on the text tower's tokens; `FusionTransformer.doubled` for two images.
        head: on the fused tokens.
    """

    def __init__(
        self,
        image_tower: VisionTransformer,
        text_tower: BidirectionalTextTransformer,
        fusion: FusionTransformer,
        head: nn.Module,
    ) -> None:
        super().__init__()
        self.image_tower, self.text_tower, self.fusion, self.head = image_tower, text_tower, fusion, head

    def image_tokens(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(batch, images, 3, size, size) -> for each image of an item (batch, tokens, width)."""
        tokens = self.image_tower.forward_tokens(images.flatten(0, 1))
        return tokens.unflatten(0, images.shape[:2]).unbind(1)

    def fused(
        self, image_tokens: tuple[torch.Tensor, ...], token_ids: torch.Tensor, first: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, first or length, width) word tokens after the fusion; and (batch, length), True at words."""

        def compute(ids: torch.Tensor, mask: torch.Tensor, *pictures: torch.Tensor) -> torch.Tensor:
            return self.fusion(self.text_tower.forward_tokens(ids, mask), mask, pictures, first=first)

        mask = self.text_tower.word_mask(token_ids)
        return tokens_by_length(compute, token_ids, mask, *image_tokens), mask

    def forward(self, images: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """(batch, num_classes) logits of a head on the class token."""
        return self.head(self.fused(self.image_tokens(images), token_ids, first=1)[0][:, 0])


def classifier(width: int, num_classes: int) -> nn.Sequential:
    """ALBEF's head of a task: dense, ReLU, classes."""
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, num_classes))


class TaskModel(HoldsEncoders):
    """The common part of the task models; `distils`: has a momentum copy of the encoders."""

    def __init__(self, encoders: FusedReader, distils: bool = True) -> None:
        super().__init__()
        self.encoders, self.momentum_encoders = encoders, MomentumEncoder(encoders) if distils else None
        self.geometry = Sphere()  # of the towers; no task compares embeddings

    def scalars(self) -> list[Scalar]:
        """None: the temperature acts in no task's loss."""
        return []

    def start_momentum_(self) -> None:
        """Copies the encoders into the momentum copy."""
        if self.momentum_encoders is not None:
            self.momentum_encoders.encoder.load_state_dict(self.encoders.state_dict())

    def update_momentum_encoders(self, ema_momentum: float) -> None:
        """theta_m <- m theta_m + (1 - m) theta over parameters."""
        if self.momentum_encoders is not None:
            self.momentum_encoders.update_(self.encoders, ema_momentum)


class TaskLoss(NamedTuple):
    """Loss of a step in nats, with gradient; right: (items,) bool, or None if that is not known."""

    loss: torch.Tensor
    right: torch.Tensor | None


class Classification(TaskModel):
    """Visual entailment and NLVR2: classifies the fused class token."""

    def forward(self, images: torch.Tensor, token_ids: torch.Tensor, labels: torch.Tensor, alpha: float) -> TaskLoss:
        """
        Args:
            images: (batch, pictures, 3, size, size).
            token_ids: (batch, length).
            labels: (batch,) int64.
            alpha: distillation weight in [0, 1].
        """
        logits = self.encoders(images, token_ids)
        soft = self.momentum_encoders(images, token_ids).softmax(dim=1) if alpha else None
        return TaskLoss(distilled(logits, labels, soft, alpha).mean(), logits.argmax(dim=1) == labels)

    def predict(self, images: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """(batch,) int64, the likeliest class; ties go to the lower one."""
        return self.encoders(images, token_ids).argmax(dim=1)


class TextAssignment(TaskModel):
    """Pre-training of a doubled fusion: to which of two images does a caption belong (ALBEF, Sec. 3.4).

    The image projection, which gives the similarities of the draw, is frozen.

    Args:
        encoders: doubled, with a head of three classes.
        embedding_dim: of the projection.
    """

    def __init__(self, encoders: FusedReader, embedding_dim: int) -> None:
        super().__init__(encoders, distils=False)
        encoders.image_projection = nn.Linear(encoders.image_tower.width, embedding_dim).requires_grad_(False)

    def forward(
        self,
        images: torch.Tensor,
        token_ids: torch.Tensor,
        alpha: float,
        drawn: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> TaskLoss:
        """
        Args:
            images: (batch, 1, 3, size, size).
            token_ids: (batch, length) of their captions.
            alpha: not used.
            drawn: from `drawn_pictures`; None = drawn here, with torch's global generator.
        """
        (tokens,) = self.encoders.image_tokens(images)
        if drawn is None:
            with torch.no_grad():
                features = F.normalize(self.encoders.image_projection(tokens[:, 0]).float(), dim=1)
            drawn = drawn_pictures(inner_product_similarity(features, features) / ASSIGNMENT_TEMPERATURE)
        first, second, labels = drawn
        pictures = tokens.index_select(0, first), tokens.index_select(0, second)  # as EncodedStep.pairs
        logits = self.encoders.head(self.encoders.fused(pictures, token_ids, first=1)[0][:, 0])
        return TaskLoss(F.cross_entropy(logits, labels), logits.argmax(dim=1) == labels)


def drawn_pictures(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two images for each caption of a batch: with probability 2/3 its image and another one, in either order.

    Otherwise two others. Others are drawn from softmax(logits), similar ones more often. The image beside a caption's
    is the first draw, on either side; of two others the first draw comes first (ALBEF's code).

    Args:
        logits: (batch, batch), of images with images, at least three.
    Returns:
        (batch,) int64 each: first and second image, and the caption's: 0, 1, or 2 for neither.
    Raises:
        ValueError: fewer than three images.
    """
    batch, device = len(logits), logits.device
    if batch < 3:
        raise ValueError(
            f"{batch} captions in a process; accepted for text assignment: at least 3, so an optim.global_batch_size "
            "of three times the processes or more"
        )
    weights = logits.float().softmax(dim=1) + 1.0e-6  # a row with all its mass on the diagonal can still be drawn from
    others = torch.multinomial(weights.masked_fill(torch.eye(batch, dtype=torch.bool, device=device), 0.0), 2)
    labels = torch.randint(NUM_ASSIGNMENTS, (batch,), device=device)
    captions = torch.arange(batch, device=device)
    # of two draws without replacement only the first follows the softmax
    drawn, second = others.unbind(1)
    second = torch.where(labels == 0, drawn, torch.where(labels == 1, captions, second))
    return torch.where(labels == 0, captions, drawn), second, labels


class AnswerDecoder(nn.Module):
    """Writes an answer word by word: causal copies of the fusion's layers, which attend to the fused question.

    It copies the fusion, the text tower's embeddings and the head of masked words, dropout included, and shares nothing
    with them. The width of images must be that of words, as the fusion's cross-attention was trained on images.
    """

    def __init__(
        self, text_tower: BidirectionalTextTransformer, fusion: FusionTransformer, word_head: MaskedLanguageHead
    ) -> None:
        super().__init__()
        self.end_id = text_tower.end_id
        self.token_embedding = copy.deepcopy(text_tower.token_embedding)
        self.position_embedding = nn.Parameter(text_tower.position_embedding.detach().clone())
        self.input_norm, self.dropout = copy.deepcopy(text_tower.input_norm), copy.deepcopy(text_tower.dropout)
        self.transformer = copy.deepcopy(fusion.transformer)
        self.transformer.causal = True
        self.word_head = copy.deepcopy(word_head)

    def forward(self, answer_ids: torch.Tensor, question: torch.Tensor, question_mask: torch.Tensor) -> torch.Tensor:
        """
        Args:
            answer_ids: (batch, length), the class token first.
            question: (batch, question_length, width), fused.
            question_mask: (batch, question_length), True at words.
        Returns:
            (batch, length, vocabulary_size) logits of the next tokens.
        """
        tokens = self.token_embedding(answer_ids)
        tokens = self.input_norm(tokens + self.position_embedding[: tokens.shape[1]].to(tokens.dtype))
        tokens = self.transformer(self.dropout(tokens), memory=question, memory_mask=question_mask)
        return self.word_head(tokens, self.token_embedding.weight)

    def targets(self, answer_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, length - 1) next tokens, and bool: True up to and with the end token."""
        return answer_ids[:, 1:], up_to_first(answer_ids, self.end_id)[:, 1:]


class Answering(TaskModel):
    """VQA: writes an answer; evaluation ranks a closed list."""

    def forward(
        self,
        images: torch.Tensor,
        token_ids: torch.Tensor,
        answer_ids: torch.Tensor,
        answer_weights: torch.Tensor,
        question_of: torch.Tensor,
        alpha: float,
    ) -> TaskLoss:
        """Sum over answers of weight times the sum over their tokens, over the number of questions.

        Args:
            images: (batch, 1, 3, size, size).
            token_ids: (batch, length) of the questions.
            answer_ids: (num_answers, answer_length), the distinct answers of all questions.
            answer_weights: (num_answers,) shares of the annotators; they sum to 1 per question.
            question_of: (num_answers,) row of each answer's question.
            alpha: distillation weight in [0, 1].
        """
        inputs = images, token_ids, answer_ids[:, :-1], question_of
        logits, soft = self._written(self.encoders, *inputs), None
        if alpha:
            with torch.no_grad():
                soft = self._written(self.momentum_encoders.encoder, *inputs).softmax(dim=1)  # over the vocabulary
        targets, written = self.encoders.head.targets(answer_ids)
        per_token = distilled(logits, targets.flatten(), soft, alpha)
        per_answer = (per_token.view_as(written) * written).sum(dim=1)
        return TaskLoss((answer_weights * per_answer).sum() / len(token_ids), None)

    @staticmethod
    def _written(
        encoders: FusedReader,
        images: torch.Tensor,
        token_ids: torch.Tensor,
        answer_ids: torch.Tensor,
        question_of: torch.Tensor,
    ) -> torch.Tensor:
        """(num_answers * answer_length, vocabulary_size) logits."""
        question, mask = encoders.fused(encoders.image_tokens(images), token_ids)
        return encoders.head(answer_ids, question.index_select(0, question_of), mask[question_of]).flatten(0, 1)

    def predict(
        self, images: torch.Tensor, token_ids: torch.Tensor, listed_ids: torch.Tensor, k_test: int
    ) -> torch.Tensor:
        """(batch,) int64, index of the answer in the closed list, by `ranked`."""
        question, mask = self.encoders.fused(self.encoders.image_tokens(images), token_ids)
        return ranked(self.encoders.head, question, mask, listed_ids, k_test)


def ranked(
    decoder: AnswerDecoder, question: torch.Tensor, question_mask: torch.Tensor, listed_ids: torch.Tensor, k_test: int
) -> torch.Tensor:
    """The best of a closed list of answers (ALBEF's code; GeoMM: k = 128 of 3,192).

    Of the k answers with the likeliest first token, the one with the greatest log p(first token) + log p(whole answer)
    wins. The first token counts twice, as in ALBEF's code. Ties go to the lower index.

    Args:
        decoder: in evaluation mode.
        question, question_mask: fused, as in `AnswerDecoder.forward`.
        listed_ids: (num_answers, answer_length) of the list, in its order.
        k_test: k, at most num_answers.
    Returns:
        (batch,) int64, indices in the list.
    """
    first = decoder(listed_ids[:1, :1].expand(len(question), 1), question, question_mask)[:, 0]
    of_first = first.float().log_softmax(dim=1)[:, listed_ids[:, 1]]  # (batch, num_answers)
    kept = of_first.argsort(dim=1, descending=True, stable=True)[:, :k_test].sort(dim=1).values
    targets, written = decoder.targets(listed_ids)
    places, best = torch.arange(len(question), device=question.device).repeat_interleave(k_test), []
    for rows, answers in zip(places.split(SEQUENCES_AT_ONCE), kept.flatten().split(SEQUENCES_AT_ONCE)):
        logits = decoder(listed_ids[answers, :-1], question[rows], question_mask[rows])
        per_token = -F.cross_entropy(logits.float().transpose(1, 2), targets[answers], reduction="none")
        best.append((per_token * written[answers]).sum(dim=1))
    scores = of_first.gather(1, kept) + torch.cat(best).view_as(kept)
    return kept.gather(1, scores.argmax(dim=1, keepdim=True)).squeeze(1)


def distilled(logits: torch.Tensor, targets: torch.Tensor, soft: torch.Tensor | None, alpha: float) -> torch.Tensor:
    """(1 - alpha) times the cross-entropy of the targets and alpha times that of soft ones, (rows,) in nats.

    Args:
        logits: (rows, classes).
        targets: (rows,) int64.
        soft: (rows, classes), rows sum to 1; None = alpha is 0.
        alpha: share of the soft targets.
    """
    hard = F.cross_entropy(logits, targets, reduction="none")
    return hard if soft is None else (1 - alpha) * hard + alpha * F.cross_entropy(logits, soft, reduction="none")
