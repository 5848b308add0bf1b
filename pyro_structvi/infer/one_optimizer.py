"""One torch optimizer for all parameters, of which Pyro's optimizers make one each."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from pyro.optim import PyroOptim
from torch import Tensor, nn


class OneOptimizer:
    """Updates all parameters in one call, with the arguments that a Pyro optimizer gives each.

    Args:
        optim: A Pyro optimizer that has taken no step, of which one torch optimizer is made that is
            fused where torch has it so; or a torch optimizer, which trains what it was made of.

    Raises:
        TypeError: If it is neither, or a learning rate schedule of Pyro's.
        ValueError: If the Pyro optimizer has the state of single parameters.
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
        self._pyro = None
        self.torch: torch.optim.Optimizer | None = None
        if isinstance(optim, torch.optim.Optimizer):
            self.torch = _silenced(optim)
        elif optim.optim_objs or optim._state_waiting_to_be_consumed:
            raise ValueError(
                "`optim` has the state of single parameters, which one optimizer of all cannot take "
                "over. Pass a new one."
            )
        else:
            self._pyro = optim
        self._clips: list[tuple[nn.Parameter, Callable[[nn.Parameter], None]]] = []
        self._rates: dict[int, Tensor] = {}
        self._groups: list[dict[str, Any]] | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is trained, in the order of the optimizer's groups."""
        groups = [] if self.torch is None else self.torch.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    def adopt(self, parameters: Iterable[nn.Parameter]) -> None:
        """Train further parameters, where a Pyro optimizer says how."""
        known = set(self.parameters)
        new = [parameter for parameter in parameters if parameter not in known]
        if self._pyro is None or not new:
            return
        groups = _groups(self._pyro, new)
        if self.torch is None:
            make = self._pyro.pt_optim_constructor
            self.torch = _silenced(make(groups, **_fast_options(make, groups)))
        else:
            for group in groups:
                self.torch.add_param_group(group)
        clips = [(parameter, self._pyro._get_grad_clip(parameter)) for parameter in new]
        self._clips += [(parameter, clip) for parameter, clip in clips if clip is not None]

    def step(self, gradients: Iterable[tuple[nn.Parameter, Tensor | None]]) -> None:
        """Update parameters by their gradients; None leaves one as it is."""
        assert self.torch is not None
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for parameter, clip in self._clips:
            if parameter.grad is not None:
                clip(parameter)
        self.torch.step()
        self.torch.zero_grad(set_to_none=True)

    def was_loaded(self) -> bool:
        """Whether groups and states were replaced since the last call, as by ``load_state_dict``."""
        groups = None if self.torch is None else self.torch.param_groups
        loaded = self._groups is not None and groups is not self._groups
        self._groups = groups  # kept, so that no other list can take its place in memory
        if loaded:
            self._rates.clear()
        return loaded

    @property
    def options(self) -> list[dict[str, Any]]:
        """The options of each group that a captured step cannot read when it runs."""
        assert self.torch is not None
        return [
            {name: value for name, value in group.items() if name not in ("params", "lr")}
            for group in self.torch.param_groups
        ]

    def use_tensor_rates(self, device: torch.device) -> None:
        """Have learning rates in tensors, which a step captured on a GPU reads whenever it runs.

        Numbers that were written into a group since then are taken over.

        Raises:
            RuntimeError: If the optimizer cannot be captured.
        """
        assert self.torch is not None
        for number, group in enumerate(self.torch.param_groups):
            _check_can_be_captured(self.torch, group)
            rate = self._rates.get(number)
            if rate is None:
                rate = torch.zeros((), dtype=torch.float32, device=device)
                self._rates[number] = rate
            if group["lr"] is not rate:
                rate.fill_(group["lr"])
                group["lr"] = rate


def _check_can_be_captured(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    if "capturable" in group and group.get("fused"):
        group["capturable"] = True
    if not group.get("capturable", group.get("fused")):
        raise RuntimeError(
            f"{type(optimizer).__name__} cannot be captured in a CUDA graph, since it is neither "
            "`capturable` nor `fused`. Use Adam, AdamW or SGD with `fused=True`."
        )


def _groups(optim: PyroOptim, parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Return groups of parameters that Pyro's optimizer gives the same arguments."""
    groups: list[dict[str, Any]] = []
    for parameter in parameters:
        arguments = optim._get_optim_args(parameter)
        for group in groups:
            if {**group, "params": None} == {**arguments, "params": None}:
                group["params"].append(parameter)
                break
        else:
            groups.append({**arguments, "params": [parameter]})
    return groups


def _fast_options(constructor: Callable[..., Any], groups: list[dict[str, Any]]) -> dict[str, bool]:
    """Return the option that fuses the kernels of torch's own optimizers, unless one was chosen."""
    chosen = {name for group in groups for name in group} & {"fused", "foreach", "differentiable"}
    can = "fused" in inspect.signature(constructor).parameters
    return {"fused": True} if can and not chosen else {}


def _silenced(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Keep an optimizer that may be captured from warning of the steps before it is."""
    optimizer._warned_capturable_if_run_uncaptured = True
    return optimizer
