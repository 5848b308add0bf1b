"""One torch optimizer for all parameters, where Pyro has an optimizer for each."""

import inspect
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, SupportsFloat

import torch
from pyro.optim import PyroOptim
from torch import Tensor, nn

from pyro_structvi._pyro import gradient_clip, has_stepped, optimizer_options
from pyro_structvi._torch import can_be_recorded


class OneOptimizer:
    """Updates all parameters in one call, with the arguments that a Pyro optimizer gives each.

    Args:
        optim: A Pyro optimizer that has taken no step, which becomes one torch optimizer, fused if
            possible; or a torch optimizer with its parameters.

    Attributes:
        torch: The torch optimizer; None before the first step, where one of Pyro's was given.
        pyro: The Pyro optimizer, if one was given.
    """

    def __init__(self, optim: PyroOptim | torch.optim.Optimizer) -> None:
        if not isinstance(optim, (PyroOptim, torch.optim.Optimizer)) or hasattr(
            optim, "pt_scheduler_constructor"
        ):
            raise TypeError(
                "`optim` must be an optimizer such as `pyro.optim.Adam({'lr': 1e-3})`, or one of torch's"
                f" over the guide's parameters, but got {type(optim).__name__}. To schedule the "
                "learning rate, give one of torch's and step a scheduler of torch's."
            )
        self.torch = optim if isinstance(optim, torch.optim.Optimizer) else None
        if self.torch is not None and _needs_closure(self.torch):
            raise TypeError(
                "`optim` must update by the gradients of one pass, but "
                f"{type(optim).__name__} computes the loss several times in a step. Take one that does "
                "not, such as `torch.optim.Adam`."
            )
        self.pyro = optim if isinstance(optim, PyroOptim) else None
        if self.pyro is not None and has_stepped(self.pyro):
            raise ValueError(
                "`optim` has the state of single parameters, which one optimizer of all cannot take "
                "over. Pass a new one."
            )
        self.forget_gradients()
        self._clips: list[tuple[nn.Parameter, Callable[[nn.Parameter], None]]] = []
        self.check_rates()
        self._first_rates = [group["lr"] for group in self.groups]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups of parameters, with their options."""
        return [] if self.torch is None else self.torch.param_groups

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters, in the order of the groups."""
        return [parameter for group in self.groups for parameter in group["params"]]

    @property
    def options(self) -> list[dict[str, Any]]:
        """The options of each group, without its rate."""
        return [
            {name: value for name, value in group.items() if name not in ("params", "lr")}
            for group in self.groups
        ]

    @property
    def can_be_recorded(self) -> bool:
        """Whether a replay can update, and leave all as it is by a number on the device."""
        return self.torch is not None and can_be_recorded(self.torch)

    def state(self) -> list[Hashable]:
        """Return what an update depends on, apart from rates, with tensors by ``id``."""
        tensors = [*self.parameters]
        if self.torch is not None and self.can_be_recorded:  # by a record, which keeps them alive
            tensors += [value for own in self.torch.state.values() for value in own.values()]
        values = [value for group in self.options for value in group.values()]
        constants = [tuple(value) if isinstance(value, list) else value for value in values]
        return [self.can_be_recorded, *map(id, tensors), *constants]

    # ---- learning rates --------------------------------------------------------------------------

    @property
    def rate(self) -> float:
        """The learning rate of the first group."""
        return float(self.groups[0]["lr"])

    def check_rates(self) -> None:
        """Raise unless each group has a learning rate, a finite number of at least 0."""
        for group in self.groups:
            if "lr" not in group:
                raise TypeError(
                    f"`optim` must have a learning rate `lr`, but {type(self.torch).__name__} has the "
                    f"options {[*group][1:]}. Take one such as `pyro.optim.Adam({{'lr': 1e-3}})`."
                )
            rate = group["lr"]
            if not isinstance(rate, Tensor) and not 0 <= rate < math.inf:
                raise ValueError(
                    f"The learning rate `lr` must be a finite number of at least 0, but got {rate}."
                )

    def scale_rates(self, factor: Any) -> None:
        """Set the learning rates to a multiple of those that a torch optimizer had at the start."""
        number = float(factor) if isinstance(factor, SupportsFloat) else math.nan
        if not 0 <= number < math.inf:
            raise ValueError(f"`lr` must return a finite number of at least 0, but got {factor}.")
        self._set_rates([rate * number for rate in self._first_rates])

    def _set_rates(self, rates: Sequence[Any]) -> None:
        for group, rate in zip(self.groups, rates, strict=True):
            group["lr"] = rate

    # ---- steps -----------------------------------------------------------------------------------

    def adopt(self, parameters: Iterable[nn.Parameter]) -> None:
        """Train further parameters with the options of a Pyro optimizer."""
        assert self.pyro is not None
        known = set(self.parameters)
        new = [parameter for parameter in parameters if parameter not in known]
        groups, make = _groups(self.pyro, new), self.pyro.pt_optim_constructor
        if self.torch is None and groups:
            self.torch = make(groups, **_fast_options(make, groups))
        elif self.torch is not None:
            for group in groups:
                self.torch.add_param_group(group)
        clips = [(parameter, gradient_clip(self.pyro, parameter)) for parameter in new]
        self._clips += [(parameter, clip) for parameter, clip in clips if clip is not None]
        self.check_rates()
        if not any(parameter.requires_grad for parameter in self.parameters):
            raise ValueError("Model and guide must have a parameter to train, but got none.")

    def step(self) -> None:
        """Update parameters by their gradients, and drop these."""
        assert self.torch is not None
        for parameter, clip in self._clips:
            if parameter.grad is not None:
                clip(parameter)
        self.torch.step()
        self.forget_gradients()

    def step_unless(self, skip: Tensor, rates: Sequence[Tensor]) -> None:
        """Take a step by these rates, or leave parameters and state as they are if ``skip`` is 1."""
        own = [group["lr"] for group in self.groups]
        vars(self.torch).update(grad_scale=None, found_inf=skip)  # as torch's GradScaler does
        try:
            self._set_rates(rates)
            self.step()
        finally:
            del vars(self.torch)["grad_scale"], vars(self.torch)["found_inf"]
            self._set_rates(own)

    def forget_gradients(self) -> None:
        """Drop the gradients, so that the next step does not add to them."""
        for parameter in self.parameters:
            parameter.grad = None

    def saved(self) -> Callable[[], None]:
        """Return a function that puts the state's tensors back, but not their values."""
        assert self.torch is not None
        state = self.torch.state
        before = {parameter: dict(values) for parameter, values in state.items()}

        def restore() -> None:
            state.clear()
            state.update(before)

        return restore


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of an optimizer computes losses, as with L-BFGS."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _groups(optim: PyroOptim, parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Return groups of parameters that Pyro's optimizer gives the same arguments."""
    groups: list[dict[str, Any]] = []
    for parameter in parameters:
        options = optimizer_options(optim, parameter)
        equal = [group for group in groups if group == {**options, "params": group["params"]}]
        if not equal:
            groups += (equal := [{**options, "params": []}])
        equal[0]["params"].append(parameter)
    return groups


def _fast_options(make: Callable[..., Any], groups: list[dict[str, Any]]) -> dict[str, bool]:
    """Return the option that fuses the kernels of torch's own optimizers, unless one was chosen."""
    chosen = {name for group in groups for name in group} & {"fused", "foreach", "differentiable"}
    return {"fused": True} if "fused" in inspect.signature(make).parameters and not chosen else {}
