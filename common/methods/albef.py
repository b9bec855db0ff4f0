"""ALBEF: align by contrast against pools of momentum keys, then fuse (Li et al. 2021, after their code).

One step of training, as the loop writes it:
    model.update_momentum_encoders(ema_momentum)
    masked_ids, word_targets = mask_words(token_ids, words, ...)        # words = replaceable_words(...), once
    losses = model(images, token_ids, masked_ids, word_targets, alpha)
    sum(losses.parts.values()).backward(); optimizer.step(); clamp_scalars_(model.scalars())
    model.insert(losses.image_keys, losses.text_keys, ids)
Unlike in ALBEF's code, the keys of all processes are candidates, so that the contrastive loss does not depend on the
number of processes. Negatives for matching come from the process's own batch, as there. The momentum encoders are in
train mode, as there: with dropout they draw masks of their own.
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from common.caption_lengths import tokens_by_length
from common.encoders.fusion import FusionTransformer, MaskedLanguageHead
from common.encoders.text import BidirectionalTextTransformer
from common.encoders.vision import VisionTransformer
from common.geometry import Geometry, Scalar, at_least_float32
from common.info_nce import positives_from_ids
from common.logit_scale import LogitScale
from common.momentum import MomentumEncoder
from common.pool import Candidates, Pool, pool_info_nce

NOT_MASKED = -100  # word target of a position that is not to be filled in: what F.cross_entropy ignores


class ProjectedTowers(nn.Module):
    """Two towers whose class tokens are projected outside of them, so that all their tokens stay available.

    Args:
        image_tower, text_tower: without projection; the text tower has one class token.
        bias: of both projections; ALBEF has it, CLIP and FLIP do not.
    """

    def __init__(
        self,
        image_tower: VisionTransformer,
        text_tower: BidirectionalTextTransformer,
        embedding_dim: int,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.image_tower, self.text_tower = image_tower, text_tower
        self.image_projection = nn.Linear(image_tower.width, embedding_dim, bias)
        self.text_projection = nn.Linear(text_tower.width, embedding_dim, bias)

    def text_mask(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(batch, length), True at words and False at padding."""
        return self.text_tower.word_mask(token_ids)

    def image_tokens(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, 1 or more, image width): the tokens that a training step uses, the class token first."""
        return self.image_tower.class_tokens(images)

    def text_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(batch, 1 or length, text width), as `image_tokens`."""
        return tokens_by_length(self.text_tower.class_tokens, token_ids, self.text_mask(token_ids))


class FusedEncoders(ProjectedTowers):
    """The modules of which ALBEF has a momentum copy: towers, projections, fusion, masked-word head.

    `image_tokens` and `text_tokens` give all tokens, for the fusion.

    Args:
        word_head: scores words by the embeddings of the text tower, or of its stem.
    """

    def __init__(
        self,
        image_tower: VisionTransformer,
        text_tower: BidirectionalTextTransformer,
        fusion: FusionTransformer,
        word_head: MaskedLanguageHead,
        embedding_dim: int,
    ) -> None:
        super().__init__(image_tower, text_tower, embedding_dim)
        self.fusion, self.word_head = fusion, word_head

    def image_tokens(self, images: torch.Tensor) -> torch.Tensor:
        return self.image_tower.forward_tokens(images)

    def text_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        return tokens_by_length(self.text_tower.forward_tokens, token_ids, self.text_mask(token_ids))

    def class_token(
        self, text_tokens: torch.Tensor, text_mask: torch.Tensor, image_tokens: torch.Tensor
    ) -> torch.Tensor:
        """(batch, width): the class token after the fusion, which decides whether text and image match."""
        return tokens_by_length(partial(self.fusion, first=1), text_tokens, text_mask, image_tokens)[:, 0]

    def word_logits(
        self,
        masked_ids: torch.Tensor,
        text_mask: torch.Tensor,
        image_tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Scores of all words at masked positions, given the image.

        Args:
            masked_ids: (batch, length).
            text_mask: of the caption before words were masked, as its end token may be masked too.
            positions: (num_positions,) int64, row * length + place of those to score; None = all.
        Returns:
            (num_positions, vocabulary_size), or (batch, length, vocabulary_size).
        """

        def fused(ids: torch.Tensor, mask: torch.Tensor, pictures: torch.Tensor) -> torch.Tensor:
            return self.fusion(self.text_tower.forward_tokens(ids, mask), mask, pictures)

        tokens = tokens_by_length(fused, masked_ids, text_mask, image_tokens)
        words = self.text_tower if self.text_tower.stem is None else self.text_tower.stem.network
        tokens = tokens if positions is None else tokens.flatten(0, 1)[positions]
        return self.word_head(tokens, words.token_embedding.weight)


class Losses(NamedTuple):
    """Losses and keys of one step.

    parts: name -> loss in nats; their sum trains. image_keys, text_keys: for `insert`.
    image_embeddings, text_embeddings: without gradient. logged: name -> value to log beside the losses.
    """

    parts: dict[str, torch.Tensor]
    image_keys: torch.Tensor
    text_keys: torch.Tensor
    image_embeddings: torch.Tensor
    text_embeddings: torch.Tensor
    logged: Mapping[str, torch.Tensor]


class HoldsEncoders(nn.Module):
    """A model whose towers are those of its `encoders`; a run loads them under their names."""

    @property
    def image_tower(self) -> nn.Module:
        return self.encoders.image_tower

    @property
    def text_tower(self) -> nn.Module:
        return self.encoders.text_tower


class QueueClip(HoldsEncoders):
    """CLIP against pools of momentum keys: ALBEF without fusion.

    Keys come from momentum copies of the encoders and stay in pools. Part of the target mass follows the similarities
    of these copies (distillation weight alpha).

    Args:
        geometry: ALBEF: sphere.
        logit_scale: ALBEF's 1/tau: start 1/0.07, bounds [2, 1000].
        image_pool, text_pool: the keys of each modality, and how queries of the other are compared with them; ALBEF:
            queues of 65,536, see `image_and_text_pools`.
    """

    def __init__(
        self,
        encoders: ProjectedTowers,
        geometry: Geometry,
        logit_scale: LogitScale,
        image_pool: Pool,
        text_pool: Pool,
    ) -> None:
        super().__init__()
        self.encoders, self.geometry, self.logit_scale = encoders, geometry, logit_scale
        self.momentum_encoders = MomentumEncoder(encoders)
        self.image_pool, self.text_pool = image_pool, text_pool

    def start_momentum_(self) -> None:
        self.momentum_encoders.encoder.load_state_dict(self.encoders.state_dict())

    def scalars(self) -> list[Scalar]:
        return [*self.logit_scale.scalars(), *self.geometry.scalars()]

    def encode_image(self, images: torch.Tensor) -> torch.Tensor:
        """As `TwoTowers.encode_image`."""
        return self._image_embeddings(self.encoders, self.encoders.image_tower.class_tokens(images))

    def encode_text(self, token_ids: torch.Tensor) -> torch.Tensor:
        """As `TwoTowers.encode_text`."""
        return self._text_embeddings(self.encoders, self.encoders.text_tower.class_tokens(token_ids))

    def forward(
        self, images: torch.Tensor, token_ids: torch.Tensor, alpha: float, ids: torch.Tensor | None = None
    ) -> Losses:
        """As `Albef.forward`, without matching and words."""
        step = self.encode_step(images, images, token_ids, ids)
        return step.losses(contrast=self.cross_modal_contrast(step, alpha)[2])

    def encode_step(
        self,
        images: torch.Tensor,
        momentum_images: torch.Tensor | None,
        token_ids: torch.Tensor,
        ids: torch.Tensor | None,
    ) -> "EncodedStep":
        """Both encoders on one batch, and the candidates that its queries meet; momentum_images None = images."""
        encoders, momentum = self.encoders, self.momentum_encoders.encoder
        image_tokens = encoders.image_tokens(images)
        text_tokens = encoders.text_tokens(token_ids)
        with torch.no_grad():
            momentum_image_tokens = momentum.image_tokens(images if momentum_images is None else momentum_images)
            momentum_text_tokens = momentum.text_tokens(token_ids)
            image_keys = self._image_embeddings(momentum, momentum_image_tokens)
            text_keys = self._text_embeddings(momentum, momentum_text_tokens)
        return EncodedStep(
            image_tokens,
            text_tokens,
            encoders.text_mask(token_ids),
            self._image_embeddings(encoders, image_tokens),
            self._text_embeddings(encoders, text_tokens),
            momentum_image_tokens,
            momentum_text_tokens,
            image_keys,
            text_keys,
            self.image_pool.open(image_keys, ids),
            self.text_pool.open(text_keys, ids),
            ids,
        )

    def cross_modal_contrast(
        self, step: "EncodedStep", alpha: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Image-to-text and text-to-image logits of the batch itself, (batch, batch) without gradient, and the loss.

        The loss is the mean of both directions, against all candidates (GeoMM, Alg. 1).
        """
        logits, losses = [], []
        for embeddings, keys, candidates in (
            (step.image_embeddings, step.image_keys, step.text_candidates),
            (step.text_embeddings, step.text_keys, step.image_candidates),
        ):
            targets = step.hard_targets(candidates)
            loss, batch_logits = pool_info_nce(candidates, embeddings, self.logit_scale(), targets, keys, alpha)
            losses.append(loss)
            logits.append(batch_logits)
        return logits[0], logits[1], sum(losses) / 2

    def update_momentum_encoders(self, ema_momentum: float) -> None:
        """theta_m <- m theta_m + (1 - m) theta over parameters; ALBEF: 0.995, at the start of each step."""
        self.momentum_encoders.update_(self.encoders, ema_momentum)

    def insert(
        self, image_keys: torch.Tensor, text_keys: torch.Tensor, ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Puts the keys of all processes into both pools, after the step that had them as positives.

        Returns:
            (world_size * batch,) slots in the image pool, and in the text pool.
        """
        return self.image_pool.insert(image_keys, ids), self.text_pool.insert(text_keys, ids)

    def _image_embeddings(self, encoders: ProjectedTowers, tokens: torch.Tensor) -> torch.Tensor:
        return self.geometry.embed_image(encoders.image_projection(tokens[:, 0]))

    def _text_embeddings(self, encoders: ProjectedTowers, tokens: torch.Tensor) -> torch.Tensor:
        return self.geometry.embed_text(encoders.text_projection(tokens[:, 0]))


class Albef(QueueClip):
    """ALBEF's pre-training model; with ids and without masked words, its fine-tuning model for retrieval.

    To `QueueClip` it adds a fusion transformer, which judges whether image and caption belong together, on hard
    negatives of the batch, and fills in masked words.
    """

    def __init__(
        self,
        encoders: FusedEncoders,
        geometry: Geometry,
        logit_scale: LogitScale,
        image_pool: Pool,
        text_pool: Pool,
    ) -> None:
        super().__init__(encoders, geometry, logit_scale, image_pool, text_pool)
        self.matching_head = nn.Linear(encoders.text_tower.width, 2)

    def match(
        self,
        text_tokens: torch.Tensor,
        text_mask: torch.Tensor,
        image_tokens: torch.Tensor,
        recorded: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """(batch, 2) logits of no and yes for pairs of text and image, row by row; re-ranking sorts by the second.

        Args:
            recorded: receives the cross-attention weights of each fusion layer, for Grad-CAM.
        """
        pairs, encoders = (text_tokens, text_mask, image_tokens), self.encoders
        fused = encoders.class_token(*pairs) if recorded is None else encoders.fusion(*pairs, recorded)[:, 0]
        return self.matching_head(fused)

    def forward(
        self,
        images: torch.Tensor,
        token_ids: torch.Tensor,
        masked_ids: torch.Tensor | None,
        word_targets: torch.Tensor | None,
        alpha: float,
        ids: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
        num_words: int | None = None,
        momentum_images: torch.Tensor | None = None,
    ) -> Losses:
        """
        Args:
            images: (batch, 3, size, size), the view of the trained encoders.
            token_ids: (batch, length).
            masked_ids, word_targets: of `mask_words`; None = no loss on words (fine-tuning for retrieval).
            alpha: distillation weight in [0, 1], see `distillation_weight`.
            ids: (batch,) int64; all candidates with the same id are positives. None = only the key of the same sample.
            generator: draws hard negatives, on the images' device; None = the global one.
            num_words: masked ones of the batch; None = counted, for which the host waits for the device.
            momentum_images: another view of the images, for the momentum encoders; None = the same (ALBEF's code).
        Returns:
            Losses: contrast (see `contrast`), matching and words, the last 0 without masked words.
        """
        step = self.encode_step(images, momentum_images, token_ids, ids)
        *logits, contrast = self.contrast(step, alpha)
        matching = self.matching_loss(step, *logits, generator)
        words = self.word_loss(step, masked_ids, word_targets, alpha, num_words)
        return step.losses(contrast=contrast, matching=matching, words=words)

    def contrast(self, step: "EncodedStep", alpha: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The contrastive loss that trains, behind the logits of `cross_modal_contrast`."""
        return self.cross_modal_contrast(step, alpha)

    def matching_loss(
        self,
        step: "EncodedStep",
        image_to_text: torch.Tensor,
        text_to_image: torch.Tensor,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Cross-entropy over the true pairs, each text with a hard image and each image with a hard text (3 batch)."""
        # 3 batch pairs: the true ones, texts with hard images, hard texts with images
        image_of_text = hard_negatives(text_to_image, step.ids, generator)
        text_of_image = hard_negatives(image_to_text, step.ids, generator)
        rows = torch.arange(len(image_of_text), device=image_of_text.device)
        texts, images = torch.cat([rows, rows, text_of_image]), torch.cat([rows, image_of_text, rows])
        logits = self.match(*step.pairs(texts, images))
        labels = torch.cat([torch.ones_like(rows), torch.zeros_like(rows), torch.zeros_like(rows)])
        return F.cross_entropy(logits, labels)

    def word_loss(
        self,
        step: "EncodedStep",
        masked_ids: torch.Tensor | None,
        word_targets: torch.Tensor | None,
        alpha: float,
        num_words: int | None = None,
    ) -> torch.Tensor:
        """Masked words, (1 - alpha) against the true ones and alpha against the momentum model's distribution.

        Without masked words it is 0, with gradients of 0: DDP waits for every parameter's gradient in every step.
        """
        if masked_ids is None:
            return 0.0 * sum(parameter.sum() for parameter in self.encoders.word_head.parameters())
        # the vocabulary is wide: only drawn positions are scored
        targets, is_drawn = word_targets.flatten(), (word_targets != NOT_MASKED).flatten()
        positions = torch.nonzero_static(is_drawn, size=num_words if num_words is not None else int(is_drawn.sum()))[
            :, 0
        ]
        logits = self.encoders.word_logits(masked_ids, step.text_mask, step.image_tokens, positions)
        count = max(len(logits), 1)  # no word was drawn: a loss of 0, not the mean of nothing
        loss = F.cross_entropy(logits, targets[positions], reduction="sum") / count
        if alpha == 0:
            return loss
        with torch.no_grad():
            momentum = self.momentum_encoders.encoder
            seen = step.text_mask, step.momentum_image_tokens
            soft = momentum.word_logits(masked_ids, *seen, positions).softmax(dim=1)
        return (1 - alpha) * loss + alpha * F.cross_entropy(logits, soft, reduction="sum") / count


class EncodedStep(NamedTuple):
    """What both encoders made of a batch: tokens before any projection, embeddings and keys after the geometry."""

    image_tokens: torch.Tensor
    text_tokens: torch.Tensor
    text_mask: torch.Tensor
    image_embeddings: torch.Tensor
    text_embeddings: torch.Tensor
    momentum_image_tokens: torch.Tensor
    momentum_text_tokens: torch.Tensor
    image_keys: torch.Tensor
    text_keys: torch.Tensor
    image_candidates: Candidates
    text_candidates: Candidates
    ids: torch.Tensor | None

    def losses(self, logged: Mapping[str, torch.Tensor] = {}, **parts: torch.Tensor) -> Losses:
        embeddings = self.image_embeddings.detach(), self.text_embeddings.detach()
        return Losses(parts, self.image_keys, self.text_keys, *embeddings, logged)

    def pairs(self, texts: torch.Tensor, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Text tokens, their mask and image tokens of these rows, which may repeat."""
        # the gradient of tokens[rows] adds up rows that repeat in any order, if there are several threads
        text_tokens, image_tokens = self.text_tokens.index_select(0, texts), self.image_tokens.index_select(0, images)
        return text_tokens, self.text_mask[texts], image_tokens

    def hard_targets(self, candidates: Candidates) -> torch.Tensor:
        """Column of the matching key; with ids, equal mass on all columns of the same id (ALBEF's fine-tuning)."""
        if self.ids is None:
            return candidates.columns
        dtype = at_least_float32(self.image_embeddings).dtype
        return positives_from_ids(self.ids, candidates.ids, candidates.columns, dtype)


def distillation_weight(step: int, steps_per_epoch: int, alpha: float = 0.4) -> float:
    """alpha; in the first epoch, times the share of it that is done (ALBEF's code)."""
    return alpha * min(1.0, step / steps_per_epoch)


def hard_negatives(
    logits: torch.Tensor, ids: torch.Tensor | None = None, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Draws one negative of the batch for each query, the likelier the closer (ALBEF's ITM).

    The weights are softmax(logits) + 1e-4, and 0 for the partner and candidates of its id. If all candidates share the
    query's id, any but the partner is drawn.

    Args:
        logits: (batch, batch), partners on the diagonal; no gradient is taken.
        ids: (batch,), or None; a negative id is not known and equals no other.
        generator: on the logits' device; None = the global one.
    Returns:
        (batch,) int64.
    Raises:
        ValueError: fewer than two samples.
    """
    batch = len(logits)
    if batch < 2 or logits.shape != (batch, batch):
        raise ValueError(f"hard negatives need a square matrix of at least 2 samples, got {tuple(logits.shape)}")
    # 1e-4 after the softmax: a row whose mass sits on the partner can still be drawn from
    weights = logits.detach().float().softmax(dim=1) + 1e-4
    partners = torch.eye(batch, dtype=torch.bool, device=logits.device)
    not_negative = partners if ids is None else partners | ((ids[:, None] == ids[None, :]) & (ids[:, None] >= 0))
    no_negative = not_negative.all(dim=1, keepdim=True)
    weights = weights.masked_fill(torch.where(no_negative, partners, not_negative), 0.0)
    return torch.multinomial(weights, 1, generator=generator).squeeze(1)


def replaceable_words(vocabulary_size: int, no_words: tuple[int, ...], device: torch.device | str) -> torch.Tensor:
    """The words that `mask_words` draws from; made once, because its size depends on values on the device.

    Args:
        no_words: ids that are never drawn: padding, class, end and mask token.
    Returns:
        (num_words,) int64, ascending.
    """
    left_out = set(no_words)  # BERT's code draws them, too, and a caption seems to end early
    return torch.tensor([word for word in range(vocabulary_size) if word not in left_out], device=device)


def mask_words(
    token_ids: torch.Tensor,
    words: torch.Tensor,
    mask_id: int,
    never_masked: tuple[int, ...],
    probability: float = 0.15,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """BERT's masking: of the drawn positions 80 % become the mask, 10 % a random word, 10 % stay (BERT; ALBEF).

    Args:
        token_ids: (batch, length).
        words: (num_words,) of `replaceable_words`, on the ids' device.
        never_masked: ids that are never drawn; ALBEF: padding and class token.
        generator: on the ids' device; None = the global one.
    Returns:
        (masked_ids, word_targets); word_targets holds the true id at drawn positions and NOT_MASKED elsewhere.
    """
    device = token_ids.device
    draws = torch.rand(2, *token_ids.shape, generator=generator, device=device)
    drawn = draws[0] < probability
    for spared_id in never_masked:  # no tensor of them, whose copy the device would wait for
        drawn &= token_ids != spared_id
    random_words = words[torch.randint(len(words), token_ids.shape, generator=generator, device=device)]
    masked_ids = torch.where(drawn & (draws[1] < 0.8), mask_id, token_ids)
    masked_ids = torch.where(drawn & (draws[1] >= 0.9), random_words, masked_ids)
    return masked_ids, torch.where(drawn, token_ids, NOT_MASKED)
