"""One set of weights for a net: as a plain net of the user's class, or for a block of code."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyro.poutine as poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from pyro_structvi._checks import brief, checked, shape_text
from pyro_structvi.lazy.site_role import SiteRole
from pyro_structvi.nn.likelihoods.likelihood import Likelihood
from pyro_structvi.nn.plain_net import plain_net
from pyro_structvi.nn.random_module import RandomModule


@checked
def to_net(self: Any, draw: Mapping[str, Tensor] | None = None) -> nn.Module:
    """Return a plain net of the class that was made Bayesian, with weights of the posterior.

    It is a copy: it generates, merges adapters, and is trained, saved and exported as any net, and the
    nets it comes from stay as they are. A layer that :class:`RankOne` or :class:`WalshHadamard` made
    stays one, with its factors as parameters.

    Args:
        draw: Values by site, as :meth:`draw` returns them; those of :meth:`median` when None.

    Raises:
        TypeError: If the model has no single net that :func:`bayesianize` returned.
        ValueError: If a site of the net has no value, or one of another shape.

    Example:
        >>> import torch
        >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize
        >>> guide = MeanFieldGuide(Regressor(bayesianize(nn.Linear(3, 1)), 10, 0.1))
        >>> guide.to_net()
        Linear(in_features=3, out_features=1, bias=True)
        >>> guide.to_net(guide.draw())(torch.zeros(5, 3)).shape
        torch.Size([5, 1])
    """
    return plain_net(_net_of(poutine.unwrap(self.model)), self.median() if draw is None else draw)


@contextmanager
@checked
def sampled(self: Any, draw: Mapping[str, Tensor] | None = None) -> Iterator[Mapping[str, Tensor]]:
    """Let the model use one draw of the posterior in this block, in all its calls.

    The draw is differentiable in the guide's parameters where gradients are on. Guides and
    :func:`predict` draw inside of the block as they do elsewhere.

    Args:
        draw: Values by site; drawn by :meth:`draw` when None.

    Yields:
        The draw.

    Raises:
        ValueError: If a value has another shape than its site, where the model meets it.

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
    with OneDraw(values):
        yield values


class OneDraw(Messenger):
    """Gives the sites of a model values, wherever nothing else does; a guide's sites stay its own.

    Args:
        values: The values, by site.
    """

    is_one_draw = True

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values = values

    def _pyro_sample(self, msg: Any) -> None:
        value, role = self.values.get(msg["name"]), SiteRole.of(msg)
        is_guides = role.use is not None or role.is_part
        if value is None or msg["value"] is not None or is_guides:
            return
        if value.shape != msg["fn"].shape():
            raise ValueError(
                f"`draw` must have a value of shape {shape_text(msg['fn'].shape())} for the site "
                f"'{msg['name']}', but got {shape_text(value.shape)}. Pass one draw, as `guide.draw()` "
                "returns it."
            )
        msg["value"] = value


def _net_of(model: Any) -> nn.Module:
    """Return the net of a model: a likelihood's, or the one that was made Bayesian."""
    if isinstance(model, Likelihood):
        return model.net
    found = _outermost(model) if isinstance(model, nn.Module) else []
    if len(found) == 1:
        return found[0]
    raise TypeError(
        "`to_net` needs a model with one net that `bayesianize` returned, but its model is "
        f"{brief(model)} with {len(found)} of them. Make the guide of a `Classifier`, a `Regressor` or a "
        "module around one net."
    )


def _outermost(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, RandomModule):
        return [module]
    return [found for child in module.children() for found in _outermost(child)]
