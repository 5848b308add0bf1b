"""Nets inside vectorized plates, as Pyro's objectives and ``Predictive`` put them around a model."""

from collections.abc import Callable

import pyro
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_structvi._pyro import declared_samples, plates_around, site_name, site_values


def run_in_plates(net: nn.Module, call: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """Run a net, once for each draw of its weights where plates around the model vectorize them.

    Inside such plates a site's value is ``(*plates, 1, *shape)``, the 1 for the plate of the data, or
    ``(*plates, *shape)`` as ``Predictive`` has it, which no layer could take. The net is then run by
    :func:`torch.func.vmap`.

    Args:
        net: The net; its sample sites are those its modules declare.
        call: Runs it once, on the same input for all draws.

    Returns:
        The outputs ``(*plates, batch, ...)``, and how many dimensions the plates are.

    Raises:
        RuntimeError: If the net has operations for which vmap has no rule, such as updates of running
            statistics.
    """
    plates = plates_around()
    if not plates or not isinstance(net, PyroModule):
        return call(), 0
    with site_values(net) as cache:
        values, flat = {}, {}
        for module in net.modules():
            for attribute, prior in declared_samples(module).items():
                name, value = site_name(module, attribute), getattr(module, attribute)
                is_fixed = isinstance(prior, torch.distributions.Distribution)
                distribution = prior if is_fixed else prior(module)
                shape = distribution.event_shape or distribution.shape()
                values[name], flat[name] = value, value.reshape(plates.numel(), *shape)

        def run(own: dict[str, Tensor]) -> Tensor:
            cache.update(own)
            return call()

        try:
            with pyro.validation_enabled(False):  # it reads values, which vmap does not allow
                outputs: Tensor = torch.func.vmap(run, randomness="different")(flat)
        finally:
            cache.update(values)
    return outputs.reshape(*plates, *outputs.shape[1:]), len(plates)
