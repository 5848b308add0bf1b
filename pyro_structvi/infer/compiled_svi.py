"""Stochastic variational inference with compiled steps."""

from typing import Any

import torch
from pyro.optim import PyroOptim

from pyro_structvi._checks import Program, checked
from pyro_structvi.infer.elbo import StructuredELBO
from pyro_structvi.infer.steps.compiled import CompiledStep
from pyro_structvi.infer.steps.eager import Loss
from pyro_structvi.infer.steps.optimizer import OneOptimizer


class CompiledSVI:
    """``SVI`` with compiled steps, without Pyro's handlers.

    The first four steps with inputs of new shapes are ordinary ones. The third is recorded: model,
    guide, ELBO, gradients and update become a list of tensor operations. The record and, in the fourth
    step, its replay must have the ordinary step's loss up to rounding, and draw as many random numbers.
    Later steps replay the record: on the CPU compiled by inductor, which takes some seconds; on a GPU as
    a CUDA graph. All steps are real ones and draw the noise of ``SVI``, so the losses are the same up to
    rounding. A fused optimizer is part of the record, others run in Python.

    Python's decisions are made once for each combination of shapes, dtypes, other arguments, modules
    with their parameters, buffers, hooks and attributes, autocast, and Pyro's handlers around the step.
    Changes inside of attributes are seen in containers of up to 100 values and in 100 objects. A step
    that changes other values than buffers, such as a counter, is not compiled. Values of parameters and
    buffers, learning rates and the weight of the KL are read in each step; plates draw new subsamples.

    Args:
        model: The model.
        guide: The guide.
        optim: A Pyro optimizer such as ``pyro.optim.Adam({"lr": 1e-3})``, which becomes one fused torch
            optimizer; or a torch optimizer with its parameters.
        loss: A :class:`StructuredELBO`.
        backend: A backend of ``torch.compile``, or None to run the recorded operations one by one, which
            needs no compiler. "auto" is "inductor" on the CPU, which needs a C++ compiler; it is None on
            a GPU and for LSTM layers, which inductor does not take.
        fallback: Whether a step that cannot be compiled runs as in ``SVI``, with a
            :class:`CompileFallbackWarning`, instead of raising.

    Raises:
        TypeError: If ``optim`` or ``loss`` is of the wrong kind.
        ValueError: If ``optim`` has the state of single parameters.

    Example:
        >>> import pyro
        >>> from torch import nn
        >>> from pyro_structvi import Classifier, KTiedGuide, bayesianize
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> model = Classifier(bayesianize(net, prior=1.0), num_data=20)
        >>> optim = pyro.optim.Adam({"lr": 1e-2})
        >>> svi = CompiledSVI(model, KTiedGuide(model), optim, StructuredELBO(), backend=None)
        >>> x, y = torch.randn(20, 4), torch.zeros(20, dtype=torch.long)
        >>> losses = [svi.step(x, y) for _ in range(50)]
        >>> losses[-1] < losses[0]
        True
    """

    @checked
    def __init__(
        self,
        model: Program,
        guide: Program,
        optim: PyroOptim | torch.optim.Optimizer,
        loss: StructuredELBO,
        *,
        backend: str | None = "auto",
        fallback: bool = False,
    ) -> None:
        self.model, self.guide, self.loss = model, guide, loss
        own = Loss(model, guide, loss)
        self._step = CompiledStep(own, OneOptimizer(optim), backend=backend, fallback=fallback)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer; None before the first step, where one of Pyro's was given."""
        return self._step.optimizer.torch

    def step(self, *args: Any, **kwargs: Any) -> float:
        """Take a step of optimization.

        Args:
            *args: Arguments of model and guide. Tensors may hold other values at each step.
            **kwargs: Keyword arguments, likewise.

        Returns:
            The loss before the step.

        Raises:
            RuntimeError: If the step cannot be compiled; the message names the line at fault.
                Parameters, buffers and torch's random generators are then those before the step.
            FloatingPointError: If the loss or a gradient is not finite; parameters and buffers are then
                those before the step.
            TypeError: If an argument is neither a tensor nor hashable, without ``fallback``.
            ValueError: If there is no parameter to train, if a torch optimizer has parameters of neither
                model nor guide, or if a learning rate is negative or not finite.
        """
        with torch.inference_mode(False), torch.enable_grad():
            return self._step(*args, **kwargs).loss

    def evaluate_loss(self, *args: Any, **kwargs: Any) -> float:
        """Return an estimate of the loss, without gradients and without a step."""
        return self.loss.loss(self.model, self.guide, *args, **kwargs)
