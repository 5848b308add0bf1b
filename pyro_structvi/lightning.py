"""Training by Lightning's ``Trainer``: several devices, mixed precision, accumulation of gradients."""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim.lr_scheduler import LambdaLR

try:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.callbacks import GradientAccumulationScheduler
except ImportError as error:
    raise ImportError('Lightning is needed: `pip install "pyro-structvi[lightning]"`.') from error

from pyro_structvi._checks import Count, Program, checked
from pyro_structvi.guides import StructuredGuide
from pyro_structvi.infer.batches import Arguments, arguments_of, num_examples
from pyro_structvi.infer.checkpoint import random_states, set_random_states
from pyro_structvi.infer.data_warnings import set_num_data, warn_of_first_batch
from pyro_structvi.infer.elbo import CosineDecay, StructuredELBO
from pyro_structvi.infer.steps.eager import Loss, error_of
from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.infer.steps.state import Modules
from pyro_structvi.infer.terms import ELBOTerms
from pyro_structvi.infer.training import (
    Rate,
    TrainedGuide,
    Weight,
    check_in_modules,
    check_local_sites,
    check_parts_of_fit,
    is_annealed,
    make_optimizer,
    objective_of,
)
from pyro_structvi.infer.validation import NUM_DRAWS, same_randomness
from pyro_structvi.posterior import predict
from pyro_structvi.posterior.prediction import observed_densities

__all__ = ["StructuredModule"]

# Of a prediction; Lightning moves these to the host, and no others.
TENSORS = ("mean", "variance", "function_variance", "entropy", "mutual_information", "functions")


class _Rates(LambdaLR):
    """The rates of this run, also where it goes on from a checkpoint of a shorter one."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at the step of a state, by the rates of this run."""
        super().load_state_dict(state_dict | {"lr_lambdas": [None] * len(self.lr_lambdas)})
        self._last_lr = [
            rate * own(self.last_epoch)
            for rate, own in zip(self.base_lrs, self.lr_lambdas, strict=True)
        ]
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr


class StructuredModule(LightningModule):
    """A model and its guide for Lightning's ``Trainer``.

    A mini-batch is a tuple of the model's arguments, the observations last, or a dict of its keyword
    arguments. Training logs ``elbo``, ``log_likelihood``, ``kl`` (in nats) and ``kl_weight``; validation
    logs ``val_log_density``, the mean log predictive density of an observed example, by the same noise
    each time and without a change of the training, and Lightning adds ``/dataloader_idx_0`` and so on
    for several loaders. A prediction, for each batch of inputs or of ``(*inputs, y)``, is a dict of the
    tensors that a :class:`~pyro_structvi.posterior.prediction.Prediction` has, such as ``mean`` and
    ``functions``, at the same draws for all batches.

    On several devices each process has its share of the data, and separate noise. It scales its
    likelihood by ``num_data`` over its own batch, so the mean of the processes' gradients is unbiased. A
    step of the schedules is a step of the optimizer, also where gradients are accumulated. The last
    step of an epoch has the mean gradient of its mini-batches, also where these are fewer. A loss or a
    gradient that is not finite stops the training before the parameters change, as in
    :func:`~pyro_structvi.fit`; a scaler of half precision leaves out such steps.

    Args:
        model: The model.
        guide: The guide, with its parameters: call ``guide.initialize(*batch)`` where it is a
            :class:`~pyro_structvi.StructuredGuide`. Lightning makes the optimizer before it has data.
        elbo: The objective; ``StructuredELBO()`` when None. It is not changed.
        kl_weight: Weight of the KL, as in :func:`~pyro_structvi.fit`: "annealed" rises to 1 over the
            first half of the trainer's steps.
        optimizer: Called with ``(parameters, lr=lr)``, as in :func:`~pyro_structvi.fit`.
        lr: Learning rate at the first step, which falls to zero along a cosine over the trainer's steps,
            or a function of the step that returns the rate, as in :func:`~pyro_structvi.fit`.
        num_samples: Draws of the posterior in a prediction, as in :func:`~pyro_structvi.predict`: each
            member of an ensemble of points, or 100 draws, when None.

    Raises:
        ValueError: If the guide is not initialized.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from pyro_structvi import KTiedGuide, Regressor, bayesianize
        >>> x = torch.linspace(-1, 1, 32).unsqueeze(-1)
        >>> model = Regressor(bayesianize(torch.nn.Linear(1, 1), prior=1.0), 32, noise_scale=0.1)
        >>> guide = KTiedGuide(model)
        >>> guide.initialize(x, 2 * x)
        >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
        >>> trainer = Trainer(accelerator="cpu", max_epochs=5, enable_progress_bar=False, **quiet)
        >>> loader = DataLoader(TensorDataset(x, 2 * x), batch_size=8)
        >>> trainer.fit(StructuredModule(model, guide), loader)
        >>> trainer.global_step
        20
    """

    @checked
    def __init__(
        self,
        model: Program,
        guide: TrainedGuide,
        elbo: StructuredELBO | None = None,
        *,
        kl_weight: Weight = "annealed",
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        lr: Rate | None = None,
        num_samples: Count | None = None,
    ) -> None:
        super().__init__()
        check_parts_of_fit(model, guide, optimizer, lr)
        is_structured = isinstance(guide, StructuredGuide)
        if not (guide.is_initialized if is_structured else [*guide.parameters()]):
            raise ValueError(
                "`guide` must have its parameters before Lightning makes the optimizer, but is not "
                "initialized. Call "
                f"`{'guide.initialize' if is_structured else 'guide'}(*batch)` with a mini-batch."
            )
        self.model, self.guide, self.num_samples = model, guide, num_samples
        self._given = elbo, kl_weight, optimizer, lr
        self._elbo: StructuredELBO = objective_of(elbo, kl_weight, 1)
        self._is_checked = False
        self._random_states: dict[str, Any] | None = None
        self._batch: Arguments = (), {}
        self._restore: dict[int, Callable[[], None]] = {}  # of the buffers before a step

    @property
    def _loss(self) -> Loss:
        return Loss(self.model, self.guide, self._elbo)

    @property
    def _num_batches(self) -> float:
        """The number of mini-batches that all processes take in an epoch."""
        return self.trainer.num_training_batches * self.trainer.world_size

    @property
    def _num_examples(self) -> int | None:
        return num_examples(self.trainer.train_dataloader, self.trainer.num_training_batches)

    def configure_optimizers(self) -> Any:
        """Return the optimizer and, for each of its steps, the schedule of its rate."""
        *_, optimizer, lr = self._given
        total = self._num_steps()
        trained = [value for value in self.parameters() if value.requires_grad]
        made = make_optimizer(optimizer, self.guide, trained, lr, total)
        OneOptimizer(made)  # which refuses one of several losses in a step, as L-BFGS
        rate = lr if callable(lr) else CosineDecay(total)
        for group in made.param_groups:
            group["initial_lr"] = group["lr"]
        begun = self.trainer.global_step  # where `fit` is called again with a later `max_epochs`
        schedule = {"scheduler": _Rates(made, rate, begun - 1), "interval": "step"}
        return {"optimizer": made, "lr_scheduler": schedule}

    def _num_steps(self) -> int:
        """Return the number of steps of the run, or raise a ``ValueError`` if it is not known."""
        total = self.trainer.estimated_stepping_batches
        if not 0 <= total < float("inf"):  # -1 for epochs of data without a length
            raise ValueError(
                "The trainer must have a number of steps, over which the schedules run, but got "
                f"{'infinitely many' if total > 0 else 'epochs of data without a length'}. Write "
                "`Trainer(max_steps=...)`, or `Trainer(max_epochs=...)` for data with a length."
            )
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        accumulations = [
            each for each in callbacks if isinstance(each, GradientAccumulationScheduler)
        ]
        factors = {factor for each in accumulations for factor in each.scheduling.values()}
        if len(factors) > 1:  # whose first one alone Lightning counts
            raise ValueError(
                "The trainer must accumulate as many mini-batches in each epoch, since schedules run "
                f"over its steps, but its GradientAccumulationScheduler has {sorted(factors)}. Write "
                "`Trainer(accumulate_grad_batches=...)`."
            )
        return max(1, int(total))

    def on_train_start(self) -> None:
        """Give each process separate noise, the model the number of examples, and the KL its rise."""
        self._restore = {}
        elbo, kl_weight, *_ = self._given
        if is_annealed(elbo, kl_weight):  # not where the optimizer is made, which may be the user's
            self._elbo = objective_of(elbo, kl_weight, self._num_steps())
        # No epoch starts where a run goes on in the middle of one.
        set_num_data(self.model, self.guide, self._num_examples)
        check_local_sites(self.guide, self.trainer.train_dataloader, self._num_batches)
        if self.trainer.world_size > 1:  # whose generators have one seed
            place = self.global_rank + self.trainer.world_size * (1 + self.global_step)
            torch.manual_seed(torch.initial_seed() + place)

    def on_train_epoch_start(self) -> None:
        """Tell the model how many examples there are, since a data module may have others."""
        set_num_data(self.model, self.guide, self._num_examples)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a mini-batch, or raise a ``FloatingPointError`` unless it is finite.

        Raises:
            ValueError: At the first step, if the model reads a parameter by ``pyro.param``.
        """
        args, kwargs = self._batch = arguments_of(batch, None)
        if not self._is_checked:
            parts, number = (self.model, self.guide), self._num_batches
            check_in_modules(parts, args, kwargs)
            warn_of_first_batch(parts, args, kwargs, number, self._num_examples)
            self._is_checked = True
        if self.global_step not in self._restore:
            self._restore = {self.global_step: Modules((self.model, self.guide)).saved()}
        self._elbo.step = self.global_step
        try:
            terms = self._loss.terms(*args, **kwargs)
            weight = self._elbo.current_kl_weight
            loss = -terms.weighted(weight)
            if not bool(torch.isfinite(loss)):
                raise error_of(self._loss, [], self._batch, terms)
        except BaseException:
            self._restore.pop(self.global_step)()
            raise
        likelihood, elbo = terms.weighted(0.0).detach(), terms.elbo.detach()
        self.log("elbo", elbo, prog_bar=True)
        self.log_dict({"log_likelihood": likelihood, "kl": likelihood - elbo, "kl_weight": weight})
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise a ``FloatingPointError`` unless all gradients are finite, before parameters change.

        A scaler of gradients leaves out such steps itself. An incomplete accumulation at the end of an
        epoch becomes a mean, since Lightning divides by the number of a complete one.
        """
        given = {value: value.grad for value in self.parameters() if value.grad is not None}
        complete = self.trainer.accumulate_grad_batches
        rest = (self.trainer.fit_loop.batch_idx + 1) % complete
        if rest and not self.trainer.strategy.handles_gradient_accumulation:
            for gradient in given.values():
                gradient.mul_(complete / rest)
        if getattr(self.trainer.precision_plugin, "scaler", None) is not None:
            return
        if given and not bool(get_total_norm([*given.values()]).isfinite()):
            self._restore.pop(self.global_step)()
            raise error_of(self._loss, [*given], self._batch, ELBOTerms({}, {}))

    def on_train_end(self) -> None:
        """Forget what only a step needs."""
        self._batch, self._restore = ((), {}), {}

    def on_train_batch_end(self, *args: Any) -> None:
        """Keep the states of random numbers, since validation data and their loaders draw some."""
        self._random_states = random_states(self.device)

    def on_validation_end(self) -> None:
        """Put the random numbers of training back, so that validation does not change it."""
        is_of_training = self.trainer.state.fn == "fit" and not self.trainer.sanity_checking
        if is_of_training and self._random_states is not None:
            set_random_states(self._random_states, self.device)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log the mean log predictive density of the examples of a mini-batch."""
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            raise TypeError(
                "A mini-batch of validation data must be a tuple `(*inputs, y)`, but got a "
                f"{type(batch).__name__}. Write a `collate_fn` that returns one."
            )
        *inputs, y = batch
        number = getattr(self.guide, "num_points", 0) or NUM_DRAWS
        with same_randomness(self.device):
            prediction = predict(
                self.model, self.guide, *inputs, num_samples=number, y=y, stream=True
            )
        densities = observed_densities(prediction)
        # A batch that the model masks as a whole has no weight in the mean over batches.
        mean, size = densities.sum() / max(1, len(densities)), len(densities)
        self.log("val_log_density", mean, batch_size=size, sync_dist=True, prog_bar=True)

    def predict_step(
        self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0
    ) -> dict[str, Any]:
        """Predict for a mini-batch of inputs, or of ``(*inputs, y)``, whose ``y`` is not used.

        A dict is one input, whose keys are arguments of the net, or has the model's first argument.
        """
        names = [*signature(getattr(self.model, "forward", self.model)).parameters]
        if isinstance(batch, Mapping) and {*batch} <= {*names}:
            if [*batch] != names[:1]:
                raise TypeError(
                    "A mini-batch to predict must be inputs or a tuple `(*inputs, y)`, but got a dict "
                    f"with the model's arguments {[*batch]}. Write a `collate_fn` that returns a tuple."
                )
            batch = batch[names[0]]
        inputs = [batch] if isinstance(batch, (Tensor, Mapping)) else [*batch]
        inputs = inputs[:-1] or inputs
        with same_randomness(self.device):  # so that mini-batches have the same functions
            found = vars(predict(self.model, self.guide, *inputs, num_samples=self.num_samples))
        return {name: found[name] for name in TENSORS if found[name] is not None}
