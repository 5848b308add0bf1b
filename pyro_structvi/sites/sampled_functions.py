"""Functions of a net at fixed samples of its weights, as a module of torch."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyro.poutine as poutine
import torch
from torch import Tensor, nn
from torch.func import functional_call

from pyro_structvi._checks import Count, checked
from pyro_structvi.nn.likelihood import read_output
from pyro_structvi.sites.sampled_net import to_net
from pyro_structvi.sites.site_posterior import module_key


class SampledFunctions(nn.Module):
    """S functions of one net, each with a sample of all weights, in one pass of ``vmap``.

    The weights are buffers, so the module moves between devices and has a state dict. It is
    differentiable in its inputs, and ``torch.export`` takes it as one graph. The graph has any batch
    size if the net has no batch normalization. Frozen parameters and buffers are kept once, and layers
    before the first sampled weight run once for all functions.

    Args:
        nets: Plain nets of one class, with separate weights, and equal frozen parameters and buffers.
        output: From the return value of a net to a tensor, as of a likelihood.

    Example:
        >>> SampledFunctions([nn.Linear(3, 1), nn.Linear(3, 1)])(torch.zeros(5, 3)).shape
        torch.Size([2, 5, 1])
    """

    def __init__(
        self, nets: Iterable[nn.Module], output: Callable[[Any], Tensor] | None = None
    ) -> None:
        super().__init__()
        self._output = output
        rest = iter(nets)
        net = next(rest)
        self._net = (net,)  # in a tuple, so that its weights are no state of this module
        each = [_sampled_weights(net), *map(_sampled_weights, rest)]
        stacked = {name: torch.stack([own[name] for own in each]) for name in each[0]}
        others = (*net.named_parameters(), *net.named_buffers())
        shared = {name: value for name, value in others if name not in stacked}
        self._stacked, self._shared = [*stacked], [*shared]
        for name, value in {**stacked, **shared}.items():
            self.register_buffer(module_key(name), value.detach())

    def __len__(self) -> int:
        """The number S of functions."""
        return len(self.get_buffer(module_key(self._stacked[0])))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the outputs of each function, ``(S, *output)``.

        Args:
            *args: The arguments of the net.
            **kwargs: Its keyword arguments.

        Raises:
            RuntimeError: If ``torch.func.vmap`` cannot map over the net, as over an LSTM.
        """
        stacked, shared = (
            {name: self.get_buffer(module_key(name)) for name in names}
            for names in (self._stacked, self._shared)
        )

        def output(state: Mapping[str, Tensor]) -> Tensor:
            result = functional_call(self._net[0], {**shared, **state}, args, kwargs)
            return read_output(result, self._output)

        try:
            outputs: Tensor = torch.func.vmap(output, randomness="different")(stacked)
        except RuntimeError as error:
            raise RuntimeError(
                f"The net must run under `torch.func.vmap`, but it failed there: {error}. Call a net "
                "for each sample, `guide.to_net(guide.draw())`, unless the arguments are wrong."
            ) from error
        return outputs


def _sampled_weights(net: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a net that are not frozen, by name."""
    return {name: own.detach() for name, own in net.named_parameters() if own.requires_grad}


@checked
def sample_functions(self: Any, num_samples: Count) -> SampledFunctions:
    """Return functions of the net at samples of the posterior, as a module of torch.

    The functions are outputs of the net as by :meth:`to_net`, in evaluation mode: frozen samples for
    Thompson sampling, gradients by inputs, or deployment by ``torch.export`` and ONNX.

    Args:
        self: The guide.
        num_samples: The number S of functions.

    Returns:
        A module that returns outputs ``(S, *output)``.

    Raises:
        TypeError: If the model has no single net that :func:`bayesianize` returned.
        RuntimeError: If the guide knows no site yet.

    Example:
        >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize
        >>> guide = MeanFieldGuide(Regressor(bayesianize(nn.Linear(3, 1)), 10, 0.1))
        >>> functions = guide.sample_functions(4)
        >>> functions(torch.zeros(5, 3)).shape
        torch.Size([4, 5, 1])
    """
    draws = self.joint_posterior().draw_many(range(num_samples))
    each = ({name: draw[i] for name, draw in draws.items()} for i in range(num_samples))
    output = getattr(poutine.unwrap(self.model), "output", None)
    return SampledFunctions((to_net(self, draw).eval() for draw in each), output)
