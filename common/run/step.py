"""One step of a run: its batch on the device, gradients, update, and the logged values.

Values stay tensors until `update` averages them over processes and reads them at once, before the optimiser's step: a
value that is not finite never reaches the weights. Without a log line the host waits for the device only there.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from common.diagnosis import at_bound, diagnose
from common.distributed import mean_over_processes
from common.geometry import Scalar, clamp_scalars_
from common.run.guards import check_finite, check_finite_gradient, clip_gradient
from common.run.inputs import as_inputs

if TYPE_CHECKING:
    from common.run.training import Run


class Step:
    """Call `backward` and `update` once, in this order; `diagnose` between them.

    number: updates made before. batch: of this process.
    values: for the log, read by `update`; scalars as in the loss.
    """

    def __init__(self, run: "Run", number: int, batch: Any, learning_rate: float) -> None:
        self.run, self.number, self.batch, self.device = run, number, batch, run.accelerator.device
        self.values: dict[str, Any] = {"learning_rate": learning_rate}
        self._means: dict[str, torch.Tensor] = {}
        self._parts: tuple[str, ...] | None = None  # names of the parts that the loss is the sum of
        self._contrast: tuple[str, float] | None = None  # name of a logged loss, its value at chance level
        self._diagnosis: dict[str, float] = {}

    @cached_property
    def _inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        return as_inputs(self.batch, self.run.training.transform, self.device)

    @property
    def images(self) -> torch.Tensor:
        """(batch, 3, size, size) normalised pixels, or cached features in their place."""
        return self._inputs[0]

    @property
    def token_ids(self) -> torch.Tensor:
        """(batch, context_length), int64."""
        return self._inputs[1]

    @cached_property
    def ids(self) -> torch.Tensor:
        """(batch,) int64: equal for an image that is listed twice, negative if unknown."""
        return self.batch.image_index.to(self.device, non_blocking=True)

    @property
    def is_logged(self) -> bool:
        return self.run.journal.logs_at(self.number + 1)

    def embed(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The model's outputs, in micro-batches where the config asks for them."""
        return self.run.micro_batches.embed(*inputs)

    def backward(
        self, loss: torch.Tensor | None, parts: Mapping[str, torch.Tensor] | None = None, **logged: torch.Tensor
    ) -> None:
        """Gradients of the loss of this process (None = the sum of its parts); parts and further scalars are logged."""
        parts = dict(parts or {})
        total = sum(parts.values()) if loss is None else loss
        self._parts = tuple(parts) if loss is None else None
        self._means = {"loss": total.detach(), **parts, **logged}
        self.run.micro_batches.backward(total)

    def diagnose(
        self, image_embeddings: torch.Tensor, text_embeddings: torch.Tensor, chance: float, loss: str = "loss"
    ) -> None:
        """Logs signs of a model that learns nothing, see common/diagnosis.py. Call on every process.

        Args:
            image_embeddings, text_embeddings: (local_batch, ...) of this process.
            chance: loss at chance level, above 0.
        """
        self._contrast = loss, chance
        if self.run.journal.diagnoses_at(self.number + 1):  # before the gradient is clipped
            model, batch = self.run.bare_model, self.batch
            scalars, logit_scale = model.scalars(), model.logit_scale().item()
            embeddings = image_embeddings, text_embeddings
            self._diagnosis = diagnose(
                model.geometry, scalars, *embeddings, logit_scale, batch.token_ids, batch.image_index
            )

    def update(self) -> None:
        """Clips the gradient, takes the optimiser's step, and moves scalars back into their bounds.

        Raises:
            NonFiniteLoss: the loss or the gradient is not finite; the weights are as before.
        """
        run, model = self.run, self.run.bare_model
        # measured and clipped before any value is read, so that the host waits once
        norms, gradient_norm = clip_gradient(run.accelerator, run.model, run.config.optim)
        self._read(gradient_norm, _scalars(model))
        # before the optimiser: the weights stay those of the last good step
        check_finite(step=self.number + 1, model=model, **self.values)
        check_finite_gradient(self.values["gradient_norm"], self.number + 1, norms)
        if self._contrast is not None:
            name, chance = self._contrast
            loss, is_at_bound = self.values[name], at_bound(model.logit_scale, self.values["logit_scale"])
            self.values |= run.journal.diagnosed(self.number + 1, loss, loss / chance, is_at_bound, self._diagnosis)
        run.optimizer.step()
        run.optimizer.zero_grad()
        # after the step: a clamp in the forward pass would stop the gradient
        self.log(bound_hits=clamp_scalars_(_scalars(model)))

    def log(self, values: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Further values of this step; tensors are read only for a line of the log."""
        self.values |= {**(values or {}), **more}

    def _read(self, gradient_norm: torch.Tensor, scalars: Iterable[Scalar]) -> None:
        # Reads all values of the step by one all-reduce and one wait of the host.
        means = mean_over_processes(torch.stack([value.detach().float() for value in self._means.values()]))
        # the same on all processes, so they need no all-reduce
        equal = {scalar.name: scalar.value() for scalar in scalars} | {"gradient_norm": gradient_norm}
        numbers = torch.cat([means, torch.stack([value.detach().float() for value in equal.values()])]).tolist()
        self.values |= dict(zip((*self._means, *equal), numbers))
        if self._parts is not None:
            self.values["loss"] = sum(self.values[name] for name in self._parts)


def _scalars(model: torch.nn.Module) -> list[Scalar]:
    return model.scalars() if hasattr(model, "scalars") else []
