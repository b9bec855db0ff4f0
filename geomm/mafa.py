"""MAFA: ALBEF on batches of similar samples, where a frozen discriminator selects positives among the hardest others.

Source: Byun et al. 2024, after their code, which extends GRIT-VLP; batches: geomm/grouping.py. Keys come from momentum
encoders and stay in pools. MAFA has pools only in fine-tuning, but GeoMM's distance needs one (inferred).
"""

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from common.methods.albef import NOT_MASKED, Albef, FusedEncoders, Losses
from common.pool import Candidates, pool_info_nce

POSITIVE = 0.8  # match probability above which another sample of the batch is a positive
NEGATIVE = 0.5  # and below which it may be a negative


class Mined(NamedTuple):
    """Verdicts of one direction about each sample of a batch.

    hardest: (batch,) int64, the closest other sample. is_positive: (batch,) bool. in_doubt: (batch,) bool, whether it
    may be a positive, positives included.
    """

    hardest: torch.Tensor
    is_positive: torch.Tensor
    in_doubt: torch.Tensor


class Discriminator(nn.Module):
    """An ALBEF's encoders, fusion and matching head, frozen and always in evaluation mode.

    Args:
        encoders: are copied; the weights come later, from a fine-tuned ALBEF.
    """

    def __init__(self, encoders: FusedEncoders) -> None:
        super().__init__()
        self.encoders, self.matching_head = copy.deepcopy(encoders), nn.Linear(encoders.text_tower.width, 2)
        self.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> "Discriminator":
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: torch.Tensor, token_ids: torch.Tensor) -> Callable[..., torch.Tensor]:
        """A batch -> function: (images, texts) indices into it -> match probabilities of these pairs."""
        mask, encoders = self.encoders.text_mask(token_ids), self.encoders
        image_tokens, text_tokens = encoders.image_tokens(images), encoders.text_tokens(token_ids)

        @torch.no_grad()
        def probabilities(pictures: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
            fused = encoders.class_token(text_tokens[texts], mask[texts], image_tokens[pictures])
            return self.matching_head(fused).float().softmax(dim=1)[:, 1]

        return probabilities


class Mafa(Albef):
    """MAFA's pre-training model.

    What differs from ALBEF:
        1. a frozen discriminator judges each sample's hardest other in the batch, by the pool's similarity. If it is a
           positive, it is one in contrast, matching and masked words;
        2. the negative for matching is that sample if the discriminator is sure, else the second hardest. A pair that
           one direction calls a positive is no negative of the other (inferred);
        3. no distillation; from the second epoch on targets of the contrast are smoothed.

    Arguments as in `Albef`; only training sets `discriminator`.

    Attributes:
        hardest_negatives: as in 2; False draws from the candidates of 2, closer ones more often (as ALBEF).
    """

    discriminator: Discriminator
    hardest_negatives = True

    def forward(
        self,
        images: torch.Tensor,
        token_ids: torch.Tensor,
        masked_ids: torch.Tensor,
        word_targets: torch.Tensor,
        smoothing: float,
        ids: None = None,
        num_words: int | None = None,
    ) -> Losses:
        """
        Args:
            images, token_ids, masked_ids, word_targets: as in Albef.forward.
            smoothing: share of the targets' mass that is spread over all keys, see `smoothing_at`.
            ids: not used; an image occurs once in a batch.
            num_words: not used; mined pairs have masked words, too.
        Returns:
            Losses as in Albef.forward; logs `mined`, the share of samples whose hardest other is a positive, mean of
            both directions.
        """
        step = self.encode_step(images, images, token_ids, None)
        match, positions = self.discriminator(images, token_ids), torch.arange(len(images), device=images.device)
        of_images, texts = self.mine(
            step.image_embeddings, step.text_candidates, lambda others: match(positions, others)
        )
        of_texts, pictures = self.mine(
            step.text_embeddings, step.image_candidates, lambda others: match(others, positions)
        )
        losses = [
            pool_info_nce(
                candidates, queries, self.logit_scale(), smoothed_targets(candidates, mined_by, seen, smoothing)
            )
            for candidates, queries, mined_by, seen in (
                (step.text_candidates, step.image_embeddings, of_images, texts),
                (step.image_candidates, step.text_embeddings, of_texts, pictures),
            )
        ]
        # the numbers of mined pairs and of masked words in all pairs: the host waits for the device once
        words_of = (word_targets != NOT_MASKED).sum(dim=1)
        mined_words = of_images.is_positive * words_of[of_images.hardest] + of_texts.is_positive * words_of
        counts = of_images.is_positive.sum(), of_texts.is_positive.sum(), (words_of + mined_words).sum()
        num_images, num_texts, num_words = torch.stack(counts).tolist()
        # pairs that match: those of the batch, images with mined captions, captions with mined images
        new_images, new_texts = _places(of_images.is_positive, num_images), _places(of_texts.is_positive, num_texts)
        pair_images = torch.cat([positions, new_images, of_texts.hardest[new_texts]])
        pair_texts = torch.cat([positions, of_images.hardest[new_images], new_texts])
        drawn_by = None if self.hardest_negatives else self.logit_scale().detach()
        pictures, texts = pictures[:, step.image_candidates.columns], texts[:, step.text_candidates.columns]
        seen = torch.cat([pair_images, negatives(pictures, of_texts, of_images, drawn_by), positions])
        read = torch.cat([pair_texts, positions, negatives(texts, of_images, of_texts, drawn_by)])
        logits = self.match(*step.pairs(read, seen))
        labels = (torch.arange(len(seen), device=positions.device) < len(pair_images)).long()
        _, mask, image_tokens = step.pairs(pair_texts, pair_images)
        pairs = step._replace(text_mask=mask, image_tokens=image_tokens)
        return step.losses(
            {"mined": torch.cat([of_images.is_positive, of_texts.is_positive]).float().mean()},
            contrast=sum(loss for loss, _ in losses) / 2,
            matching=F.cross_entropy(logits, labels),
            words=self.word_loss(pairs, masked_ids[pair_texts], word_targets[pair_texts], 0.0, num_words),
        )

    @torch.no_grad()
    def mine(
        self, queries: torch.Tensor, candidates: Candidates, match: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[Mined, torch.Tensor]:
        """Verdicts of one direction within this process's batch; and its similarities with all candidates."""
        similarity = candidates.similarity(queries)
        return mined(similarity[:, candidates.columns], match), similarity


def _places(mask: torch.Tensor, count: int) -> torch.Tensor:
    return torch.nonzero_static(mask, size=count)[:, 0]


def mined(similarity: torch.Tensor, match: Callable[[torch.Tensor], torch.Tensor]) -> Mined:
    """Judges the hardest other of each sample.

    Args:
        similarity: (batch, batch), matched pairs on the diagonal.
        match: (batch,) int64, another sample for each -> (batch,) probabilities that it is a positive.
    Raises:
        ValueError: fewer than three samples, which have no second hardest.
    """
    batch = len(similarity)
    if batch < 3:
        raise ValueError(
            f"MAFA compares the two hardest others of a sample, got a batch of {batch}; expected: 3 or more"
        )
    hardest = similarity.clone().fill_diagonal_(-torch.inf).argmax(dim=1)
    probability = match(hardest)
    return Mined(hardest, probability > POSITIVE, probability >= NEGATIVE)


def negatives(
    similarity: torch.Tensor, verdicts: Mined, by_others: Mined, drawn_by: torch.Tensor | None = None
) -> torch.Tensor:
    """(batch,) int64: the hardest other of each sample that is not in doubt and that no direction calls a positive.

    Args:
        similarity: (batch, batch), as in `mined`.
        verdicts: of this direction. by_others: of the other one, ignored if no candidate would remain.
        drawn_by: a logit scale; draws one of the candidates from softmax(drawn_by * similarity).
    """
    positions = torch.arange(len(similarity), device=similarity.device)
    left = similarity.clone().fill_diagonal_(-torch.inf)
    is_doubted = verdicts.in_doubt[:, None] & (verdicts.hardest[:, None] == positions)
    left.masked_fill_(is_doubted, -torch.inf)
    is_theirs = by_others.is_positive & (by_others.hardest == positions[:, None])
    sure = left.masked_fill(is_theirs, -torch.inf)
    sure = torch.where((sure > -torch.inf).any(dim=1, keepdim=True), sure, left)
    if drawn_by is None:
        return sure.argmax(dim=1)
    return (drawn_by * sure).softmax(dim=1).multinomial(1)[:, 0]


def smoothed_targets(
    candidates: Candidates, verdicts: Mined, similarity: torch.Tensor, smoothing: float
) -> torch.Tensor:
    """Targets of a direction, (batch, num_columns), rows sum to 1; matched and mined keys have equal shares.

    MAFA smooths over the batch, which are all its candidates. With a pool these are few of the columns. Each would get
    more mass than equal logits give, which pulls a batch of similar samples together. Here smoothing is over all
    columns.

    Args:
        verdicts: of this process's batch.
        similarity: (batch, num_columns) with the candidates, for size and type.
        smoothing: share of the mass that is spread over all columns.
    """
    columns = candidates.columns
    is_mined = verdicts.is_positive[:, None].to(similarity)
    targets = torch.zeros_like(similarity).scatter_(1, columns[verdicts.hardest][:, None], is_mined)
    targets.scatter_(1, columns[:, None], 1.0)
    targets *= (1 - smoothing) / targets.sum(dim=1, keepdim=True)
    return targets.add_(smoothing / targets.shape[1])


def smoothing_at(step: int, steps_per_epoch: int, smoothing: float) -> float:
    """0 in the first epoch, then `smoothing`."""
    return smoothing if step >= steps_per_epoch else 0.0
