"""A batch larger than memory, in micro-batches, with the gradient of the whole batch (cached embeddings).

InfoNCE does not split: each pair needs all others as negatives, so the mean loss of micro-batches is another, easier
task. For one step instead:
    1. embed the micro-batches one after the other without a graph, and keep only the embeddings;
    2. take the loss of all embeddings, and its gradient with respect to them and to the scalars;
    3. embed each micro-batch again, with the same random draws, and back-propagate its part.
Loss and gradients are those of one pass over the whole batch, for one more forward pass (Gao et al. 2021, GradCache).
"""

from contextlib import nullcontext
from functools import partial

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class MicroBatches:
    """Takes the place of the model and of `accelerator.backward` in a training loop.

    Args:
        accelerator: that prepared the model. DDP and FSDP2 exchange gradients once, with the last part.
        model: (batch, ...) tensors -> tuple of tensors. Those with a batch axis are concatenated over micro-batches;
            those without an axis (the logit scale) are the same for all.
        size: rows of one micro-batch on this process; None = all at once.
    Raises:
        ValueError: if the model normalises over the batch in training: statistics of a micro-batch are not those of the
            batch. If Accelerate averages the gradients of several batches.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, size: int | None) -> None:
        if accelerator.gradient_accumulation_steps != 1:
            raise ValueError(
                f"gradient_accumulation_steps = {accelerator.gradient_accumulation_steps} averages losses of small "
                "batches, whose pairs do not meet; expected: 1, with optim.micro_batch_size for a batch in parts"
            )
        if size is not None:
            normalising = [  # a frozen network normalises by what it has learnt
                name
                for name, module in model.named_modules()
                if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
            ]
            if normalising:
                raise ValueError(
                    f"optim.micro_batch_size = {size} does not give the gradient of one batch with batch "
                    f"normalisation ({normalising[0]}); expected: null, or a model without it"
                )
        self.accelerator, self.model, self.size = accelerator, model, size
        self._parts: list[tuple[torch.Tensor, ...]] = []
        self._seeds: list[int] = []
        self._outputs: list[torch.Tensor] = []

    def embed(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The model's outputs for a whole batch.

        Args:
            inputs: (batch, ...) each; the last micro-batch may be smaller.
        Returns:
            In micro-batches, leaves of the graph: only `backward` reaches the weights.
        Raises:
            ValueError: inputs of unlike lengths, which have no parts in common.
        """
        self._parts = []
        if len({len(tensor) for tensor in inputs}) > 1:
            raise ValueError(f"inputs of {[len(tensor) for tensor in inputs]} rows; expected: as many of each")
        if self.size is None or self.size >= len(inputs[0]):
            return self.model(*inputs)
        self._parts = list(zip(*(tensor.split(self.size) for tensor in inputs)))
        self._seeds = torch.randint(2**62, (len(self._parts),)).tolist()
        outputs = []
        with torch.no_grad():
            for part, seed in zip(self._parts, self._seeds):
                torch.manual_seed(seed)
                outputs.append(self.model(*part))
        # without an axis: perhaps a parameter itself
        outputs = [torch.cat(pieces) if pieces[0].ndim else pieces[0].detach().clone() for pieces in zip(*outputs)]
        self._outputs = [output.requires_grad_() for output in outputs]
        return tuple(self._outputs)

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradient of the loss to the parameters; call once after each `embed`.

        A parameter that the loss also uses directly (a geometry's scalar in the similarity) gets both gradients.

        Args:
            loss: scalar, from the outputs of `embed`.
        """
        if not self._parts:
            self.accelerator.backward(loss)
            return
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(loss, [*self._outputs, *parameters], allow_unused=True)
        cached, direct = gradients[: len(self._outputs)], gradients[len(self._outputs) :]
        per_part = [
            gradient.split(self.size) if gradient is not None and gradient.ndim else None for gradient in cached
        ]
        from torch.distributed.tensor import DTensor  # half a second, which an optimiser has spent already

        # FSDP2: of shards, averaged over processes already (`whole`); all others take part in the last exchange below
        of_shards = [(weight, part) for weight, part in zip(parameters, direct) if isinstance(part, DTensor)]
        direct = [None if isinstance(part, DTensor) else part for part in direct]
        last = len(self._parts) - 1
        is_ddp = isinstance(self.model, DistributedDataParallel)  # of one process, too, which Accelerate forgets
        hold = self.model.no_sync if is_ddp else partial(self.accelerator.no_sync, self.model)
        for number, (part, seed) in enumerate(zip(self._parts, self._seeds)):
            torch.manual_seed(seed)
            # the gradients of all parts are exchanged with those of the last one
            with nullcontext() if number == last else hold():
                outputs = self.model(*part)
                pieces = [None if pieces is None else pieces[number] for pieces in per_part]
                if number == last:  # what all parts share counts once
                    pieces = [gradient if piece is None else piece for piece, gradient in zip(pieces, cached)]
                    outputs, pieces = [*outputs, *parameters], [*pieces, *direct]
                # the derivative of sum(output * gradient) with respect to output is that gradient
                terms = [
                    (output * piece).sum()
                    for output, piece in zip(outputs, pieces)
                    if piece is not None and output.requires_grad
                ]
                if terms:
                    self.accelerator.backward(torch.stack(terms).sum())
        for weight, part in of_shards:
            weight.grad = part if weight.grad is None else weight.grad + part
        self._parts, self._seeds, self._outputs = [], [], []
