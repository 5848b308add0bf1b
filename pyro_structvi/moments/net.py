"""The moments of a net's output, in one pass."""

import traceback
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pyro_structvi._checks import brief, checked, naming
from pyro_structvi._pyro import site_values
from pyro_structvi.moments.linear import posteriors_of, random_values
from pyro_structvi.moments.own_draws import OwnDraws
from pyro_structvi.moments.random_tensor import RandomTensor, Settings
from pyro_structvi.nn.likelihood import Likelihood
from pyro_structvi.nn.random_module import transient_pass
from pyro_structvi.sites.site_posterior import Coupling
from pyro_structvi.sites.structured import StructuredGuide


def output_moments(
    model: Likelihood,
    values: Mapping[str, Tensor],
    x: Any,
    settings: Settings,
    draws: bool = False,
) -> RandomTensor:
    """Return the moments of the output of a model's net, for random or known values of its sites.

    If a function of the net has no rule, the message of the error names the module. With ``draws`` the
    moments are those given the draws of functions of known tensors, such as dropout of features.
    """
    with site_values(model) as cache:
        cache.update(values)
        try:
            own_draws = nullcontext() if draws else OwnDraws(settings)
            with transient_pass([*model.modules()]), own_draws:
                output, _ = model.run_net(x)
        except NotImplementedError as error:
            raise NotImplementedError(_explained(error, model, settings)) from None
    if isinstance(output, RandomTensor):
        return output
    return RandomTensor(output, torch.zeros_like(output), settings)  # no weight is random


def _explained(error: Exception, model: nn.Module, settings: Settings) -> str:
    """Return the message of an error with its module, and advice unless it has some."""
    text, place = str(error), _place(error, model)
    if text.endswith("."):
        return f"{text} This was met{place.removeprefix(',')}." if place else text
    tangent = "Pass `linearize=True` to take its tangent at the mean, or predict with draws."
    return f"{text}{place}. {'Predict with draws.' if settings.linearize else tangent}"


def _place(error: Exception, model: nn.Module) -> str:
    """Return the innermost module of a model that an error passed through."""
    names = {id(module): name for name, module in model.named_modules()}
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and names.get(id(module)):
            kind = type(module).__name__.removeprefix("Pyro")
            found = f", in the module '{names[id(module)]}' ({kind})"
    return found


def check_served(model: Any, guide: Any, name: str) -> None:
    """Raise unless moments can be propagated through a model with a guide, the argument ``name``."""
    if not isinstance(model, Likelihood):
        raise TypeError(
            "`model` must be a Classifier, Regressor or another likelihood around a net, whose output "
            f"has moments, but got {brief(model)}. Predict with draws."
        )
    if not isinstance(guide, StructuredGuide):
        raise TypeError(
            f"`{name}` must be a guide of this package, which has the moments of its weights, but got "
            f"{brief(guide)}. Predict with draws."
        )
    couplings = (part for part in guide.modules() if isinstance(part, Coupling))
    joint = [name for each in couplings for name in each.sites if len(each.sites) > 1]
    if joint:
        raise NotImplementedError(
            f"The sites {joint} are drawn jointly, and have no moments here, which would count them as "
            "independent. Predict with draws."
        )
    if guide.local_site_names:
        raise NotImplementedError(
            f"The latents of single examples, {[*guide.local_site_names]}, have no moments here. "
            "Predict with draws."
        )


def used_more_than_once(model: Likelihood, guide: StructuredGuide) -> list[str]:
    """Return the weights that a pass uses several times, as a recurrent layer does at each step."""
    recurrent = {name for name, part in model.named_modules() if isinstance(part, nn.RNNBase)}
    return [
        name
        for name, use in guide.uses.items()
        if (use.count or 0) > 1 or name.rpartition(".")[0] in recurrent
    ]


class NetMoments(nn.Module):
    r"""Mean and variance of a net's output under a posterior of its weights, in one pass.

    .. math:: m(x) = E_q[f(x, W)], \qquad v(x) = \operatorname{Var}_q[f(x, W)]

    The moments of each layer follow from the moments of its input. Linear layers are exact for any
    structure, and functions of single elements are exact for normal inputs. Covariances between units
    are ignored unless ``covariance="full"``; covariances between positions of a convolution, terms of
    a residual sum, factors of a gate, tensors that are joined and uses of one weight always are, and so
    are those of units that pass through another shape than ``(batch, units)``. For a model with
    ``standardize`` inputs are in their own units, and outputs in standard units.

    The module is deterministic: it can be differentiated, and exported by :func:`torch.export.export`
    (``strict=False``) without Pyro. :func:`torch.compile` compiles the exported module only. With
    ``covariance="full"`` slices and permutations of units depend on values, which cannot be exported.

    Args:
        model: A :class:`~pyro_structvi.Classifier`, :class:`~pyro_structvi.Regressor` or another
            likelihood around a net.
        guide: A guide of this package that is no mixture.
        covariance: "full" to keep the covariance between the units of dense layers, and return it.
        linearize: Whether a function without a rule is replaced by its tangent at the mean.

    Raises:
        ValueError: If the guide is a mixture, whose members have separate moments.
        NotImplementedError: In a call, if a function of the net has no rule.

    Example:
        >>> import torch
        >>> from pyro_structvi import KTiedGuide, Regressor, bayesianize
        >>> model = Regressor(bayesianize(nn.Linear(4, 2), prior=1.0), 10, noise_scale=0.1)
        >>> mean, variance = NetMoments(model, KTiedGuide(model))(torch.zeros(5, 4))
        >>> mean.shape, variance.shape
        (torch.Size([5, 2]), torch.Size([5, 2]))

    References:
        Frey and Hinton (1999), "Variational learning in nonlinear Gaussian belief networks". Wu,
        Nowozin, Meeds, Turner, Hernandez-Lobato and Gaunt (2019), "Deterministic variational inference
        for robust Bayesian neural networks".
    """

    @checked
    def __init__(
        self,
        model: Any,
        guide: Any,
        covariance: Literal["diagonal", "full"] = "diagonal",
        linearize: bool = False,
    ) -> None:
        super().__init__()
        check_served(model, guide, "guide")
        if guide.num_members > 1:
            raise ValueError(
                "`guide` must be no mixture, whose members have separate moments, but got "
                f"{type(guide).__name__}. Call `predict_moments(...)`, which mixes them."
            )
        self.model: Likelihood = model
        self.guide: StructuredGuide = guide
        self.settings = Settings(covariance == "full", linearize)

    def forward(self, x: Any) -> tuple[Tensor, Tensor]:
        """Return the output's mean ``(batch, ...)`` and variance, or covariance ``(batch, E, E)``."""
        values = random_values(posteriors_of(self.guide.joint_posterior()), self.settings)
        # Dynamo applies functions to tensors with moments without their rules. A decorator would import
        # torch's compiler with the package.
        moments = torch.compiler.disable(output_moments)
        with naming("x", x):
            output = moments(self.model, values, x, self.settings)
        return output.loc, output.variance if output.covariance is None else output.covariance
