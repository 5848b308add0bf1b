"""Plain nets with weights of the posterior, and blocks of code with a fixed sample."""

from collections.abc import Mapping
from typing import Any

import pyro.poutine as poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from pyro_structvi._checks import brief, checked, shape_text
from pyro_structvi.nn.likelihood import Likelihood
from pyro_structvi.nn.plain_net import plain_net
from pyro_structvi.nn.random_module import RandomModule
from pyro_structvi.weights.site_role import SiteRole


@checked
def to_net(self: Any, draw: Mapping[str, Tensor] | None = None) -> nn.Module:
    """Return a copy of the net in its original class, with weights of the posterior.

    Layers of :class:`RankOne` and :class:`WalshHadamard` keep their class, with their factors as
    parameters.

    Args:
        self: The guide.
        draw: Values by site, as from :meth:`draw`; the result of :meth:`median` when None.

    Raises:
        TypeError: If the model has no single net that :func:`bayesianize` returned.
        ValueError: If a site of the net has no value, or one of another shape.

    Example:
        >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize
        >>> guide = MeanFieldGuide(Regressor(bayesianize(nn.Linear(3, 1)), 10, 0.1))
        >>> guide.to_net()
        Linear(in_features=3, out_features=1, bias=True)
    """
    model = poutine.unwrap(self.model)
    found = [model.net] if isinstance(model, Likelihood) else _outermost(model)
    if len(found) != 1:
        raise TypeError(
            "`to_net` needs a model with one net that `bayesianize` returned, but its model is "
            f"{brief(model)} with {len(found)} of them. Make the guide of a `Classifier`, a `Regressor` "
            "or a module around one net."
        )
    return plain_net(found[0], self.median() if draw is None else draw)


def _outermost(module: Any) -> list[nn.Module]:
    """Return the outermost Bayesian nets in a module."""
    if isinstance(module, RandomModule) or not isinstance(module, nn.Module):
        return [module] * isinstance(module, nn.Module)
    return [found for child in module.children() for found in _outermost(child)]


@checked
def sampled(self: Any, draw: Mapping[str, Tensor] | None = None) -> "FixedDraw":
    """Use one sample of the posterior in all calls of the model in a block.

    It is differentiable by the parameters of the guide. Guides and :func:`predict` sample as usual
    inside of the block.

    Args:
        self: The guide.
        draw: Values by site; the result of :meth:`draw` when None.

    Returns:
        A context manager that returns the values.

    Raises:
        ValueError: If a site has no value, or one of another shape than the model's.

    Example:
        >>> import torch
        >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize
        >>> model = Regressor(bayesianize(nn.Linear(3, 1)), 10, 0.1)
        >>> x = torch.ones(5, 3)
        >>> with MeanFieldGuide(model).sampled():
        ...     torch.equal(model.net(x), model.net(x))
        True
    """
    values = self.draw() if draw is None else draw
    missing = {*self.site_names} - {*self.local_site_names} - {*values}
    if missing:
        raise ValueError(
            f"`draw` must have a value for each site, but {sorted(missing)} are missing. Pass one draw, "
            "as `guide.draw()` returns it."
        )
    return FixedDraw(values)


class FixedDraw(Messenger):
    """A handler that gives values to the sites of a model, not of a guide, that have none."""

    fixes_draw = True

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values = values

    def __enter__(self) -> Mapping[str, Tensor]:
        """Begin the block, and return the values."""
        super().__enter__()
        return self.values

    def _pyro_sample(self, msg: Any) -> None:
        value, role = self.values.get(msg["name"]), SiteRole.of(msg)
        if value is None or msg["value"] is not None or role.use is not None or role.is_slice:
            return
        expected = msg["fn"].shape()
        if value.shape != expected:
            raise ValueError(
                f"`draw` must have a value of shape {shape_text(expected)} for the site "
                f"'{msg['name']}', but got {shape_text(value.shape)}. Pass one draw, as `guide.draw()` "
                "returns it."
            )
        msg["value"] = value
