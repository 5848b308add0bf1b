"""Adam in the units of the prior and of the posterior."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim.adam import adam

from pyro_structvi._checks import NonNegative, Positive, Program, Share, brief, checked
from pyro_structvi._pyro import unwrapped
from pyro_structvi._torch import is_dense
from pyro_structvi.linalg.matrices import at_least_single
from pyro_structvi.nn.conversion import find_layouts
from pyro_structvi.sites.latent_site import WIDE
from pyro_structvi.sites.site_posterior import SitePosterior
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.structures.low_rank import LowRank
from pyro_structvi.weights.weight_distribution import GaussianWeight, IndependentWeight

POINT_UNIT = 0.1  # of what is no weight of two dimensions, and not the guide's
SHALLOW = 4  # a number of wide weights above which steps are shorter
LOGARITHMS = 3.0  # the power of that factor for logarithms, above the least factor
LEAST = 0.005
OWN = ("_held", "_share", "_step_supports_amp_scaling", "_correlated")  # attributes


class StructuredAdam(torch.optim.Optimizer):
    r"""Adam with a step size for each parameter, in units of the prior and of the posterior.

    The rate is multiplied by the parameter's unit (``Family.unit``). The unit of a mean is the prior's
    standard deviation, though at most ``2 / sqrt(fan_in)`` for a weight, and smaller by
    ``sqrt(50 / inputs)`` with more than 50 inputs, or input channels of a convolution. The unit of a
    logarithm is 1, and the unit of an entry of a Cholesky factor with rows of n the smaller of
    ``1 / sqrt(n)`` and ``3 / n``. A parameter without a posterior has the root mean square of its start
    as its unit if it has two dimensions, and 0.1 otherwise.

    The moves of the layers of a net may add up in its output. In a model of more than four wide
    weights, with a fan-in above 50, all rates are multiplied by ``4 / number``. Weights without a
    posterior count, too. Logarithms, which are of scales, have the factor ``(4 / number)**3``, at
    least 0.005: noise that grows before the means are trained keeps a deep net from training.

    The mean of a posterior :math:`\mu + A e` with correlations makes a second move in the coordinates of
    the noise e:

    .. math:: \mu \leftarrow \mu - A \, \operatorname{Adam}_\rho(A^\top g), \qquad g = \nabla_\mu.

    Without Adam's division this is the natural gradient step :math:`\Sigma g`, because a Gaussian
    posterior has curvature 1 in every direction of e. The root mean square of this move over a weight is
    at most the rate in the mean's unit, since most gradients of a posterior near its prior are noise. A
    low rank with a constant diagonal has no second move.

    A rare example or sample can have a gradient far above the usual size, which would govern Adam for
    hundreds of steps. Gradients are divided by a common factor if their norm exceeds ``clip`` times its
    usual size, the root of the running average of its squares.

    Correlations that are learned before the means can lead to worse optima. With ``warm_up`` the
    correlations of rowwise, full, low-rank and eigenbasis posteriors (``Family.delayed``) move slowly at
    first: their rate at step t is multiplied by the smaller of 1 and the square of ``t / warm_up``.

    Args:
        parameters: The trained parameters of the guide, and others.
        guide: The guide, initialized: a :class:`~pyro_structvi.guides.StructuredGuide` or a module with
            such guides in it.
        lr: Learning rate, a share of the unit.
        betas: Decay rates of the averages of gradients and of their squares.
        eps: Added to the root of the average square.
        posterior_lr: Learning rate of the second move of means as a multiple of ``lr``, a share of the
            posterior's scale; none when 0.
        clip: The largest norm of the gradients, as a multiple of its usual size; any norm when None.
        warm_up: Steps until correlations have their full rate; :func:`fit` takes 15 % of all steps.

    Example:
        >>> from pyro_structvi import Regressor, RowwiseGuide, StructuredELBO, bayesianize
        >>> x = torch.linspace(-1, 1, 32).unsqueeze(-1)
        >>> model = Regressor(bayesianize(nn.Linear(1, 1), prior=1.0), num_data=32, noise_scale=0.1)
        >>> guide = RowwiseGuide(model)
        >>> optimizer = StructuredAdam(guide.parameters(), guide, lr=0.1)
        >>> for _ in range(100):
        ...     optimizer.zero_grad()
        ...     loss = StructuredELBO().differentiable_loss(model, guide, x, 2 * x)
        ...     loss.backward()
        ...     optimizer.step()
        >>> bool((guide["net.weight"]().mean[0, 0] - 2).abs() < 0.5)
        True

    References:
        Kingma and Ba (2015), "Adam: a method for stochastic optimization"; Khan and Rue (2023), "The
        Bayesian learning rule", section 3; Lin, Nielsen, Khan and Schmidt (2021), "Tractable structured
        natural-gradient descent using local parameterizations"; Yang et al. (2021), "Tensor Programs V:
        tuning large neural networks via zero-shot hyperparameter transfer", for wide layers.
    """

    @checked
    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        guide: nn.Module,
        lr: Positive = 0.1,
        betas: tuple[Share, Share] = (0.9, 0.99),
        eps: NonNegative = 1e-12,
        posterior_lr: NonNegative = 3.0,
        clip: Positive | None = 3.0,
        warm_up: NonNegative = 0,
    ) -> None:
        posteriors = [each for each in guide.modules() if isinstance(each, SitePosterior)]
        parameters = [*parameters]
        for value in parameters:
            if not isinstance(value, Tensor):
                raise TypeError(
                    "`parameters` must be tensors, as `guide.parameters()` has them, but got "
                    f"{brief(value)}. Write `add_param_group` for parameters with options of their own."
                )
        self._held = held = {
            value: (each, name) for each in posteriors for name, value in each.named_parameters()
        }
        # The members of a mixture share the names of sites.
        number = len({each.site.name for each in posteriors if each.site.is_wide})
        number += _count_wide([value for value in parameters if value not in held], guide)
        self._share = min(1.0, SHALLOW / max(1, number))
        options = {"lr": lr, "betas": betas, "eps": eps, "clip": clip, "fused": True}
        options |= {"posterior_lr": self._share * posterior_lr, "warm_up": warm_up}
        super().__init__(parameters, options)
        # As torch's fused ones: it divides by `grad_scale`, and `found_inf` leaves all as it is.
        self._step_supports_amp_scaling = True
        self._correlated = {
            mean: normal
            for each in posteriors
            if posterior_lr
            for mean, normal in _correlated_means(each)
        }

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, of which torch knows its own part."""
        return super().__getstate__() | {name: vars(self)[name] for name in OWN}

    @checked
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state, whose values keep their precision.

        Args:
            state_dict: The state, a result of ``state_dict()``.
        """
        super().load_state_dict(state_dict)
        numbers, parameters = (
            [each for group in groups for each in group["params"]]
            for groups in (state_dict["param_groups"], self.param_groups)
        )
        for number, parameter in zip(numbers, parameters, strict=True):
            if "norm" in (saved := state_dict["state"].get(number, {})):
                # Torch gives it the dtype of its parameter, and the square may be infinite in half.
                self.state[parameter]["norm"] = saved["norm"].to(parameter.device)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, each with the steps of its unit.

        Args:
            param_group: The parameters, ``params``, and options for them.

        Raises:
            ValueError: If it has another ``clip``, which is of all gradients together, or an option that
                is none of this optimizer, or a parameter is a slice of a larger tensor.
        """
        unknown = {*param_group} - {*self.defaults, "params", "initial_lr"}
        if unknown:
            raise ValueError(
                f"`param_group` must have options among {[*self.defaults]}, but got {sorted(unknown)}. "
                "Leave these out."
            )
        given, clip = param_group["params"], self.defaults["clip"]
        if param_group.get("clip", clip) != clip:
            raise ValueError(
                f"`clip` must be {clip}, as of all parameters, whose gradients are clipped together, "
                f"but got {param_group['clip']!r}. Write `StructuredAdam(..., clip=...)`."
            )
        # A saved state has parameters by their places in the groups, which do not depend on the unit of
        # a start: it is another one after training.
        groups = defaultdict(list)
        for place, value in enumerate([given] if isinstance(given, Tensor) else given):
            if not is_dense(value):  # the fused kernel takes elements in the order of memory
                raise ValueError(
                    "`parameters` must have all elements next to each other in memory, but got one of "
                    f"shape {tuple(value.shape)} with strides {value.stride()}. Copy it before: "
                    "`parameter.data = parameter.data.contiguous()`."
                )
            has_size = value.dim() > 1 and value.numel()
            size = float(_as_real(value.detach()).square().mean().sqrt()) if has_size else 0.0
            unit, waits, factor = size or POINT_UNIT, False, self._share
            start = place if value not in self._held and value.dim() > 1 else None
            if value in self._held:
                posterior, name = self._held[value]
                unit = posterior.family.unit(posterior.site, name, value)
                waits = name in posterior.family.delayed
                if "log_" in name:
                    factor = max(LEAST, factor**LOGARITHMS)
            groups[unit, waits, factor, start].append(value)
        warm_up = param_group.get("warm_up", self.defaults["warm_up"])
        for (unit, waits, factor, _), each in groups.items():
            own = {"params": each, "unit": factor * unit}
            super().add_param_group(param_group | own | {"warm_up": warm_up if waits else 0.0})

    @checked
    @torch.no_grad()
    def step(self, closure: Program | None = None) -> Any:
        """Update parameters by their gradients.

        Args:
            closure: Computes the loss and the gradients anew, as for any optimizer of torch.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for value in (value for group in self.param_groups for value in group["params"]):
            if value.grad is not None and value.grad.is_sparse:
                value.grad = value.grad.to_dense()
        divisor = self._divisor()
        if self._correlated:
            self._move_means(divisor)  # before the factors change, by which they move
        for group in self.param_groups:
            trained = [value for value in group["params"] if value.grad is not None]
            gradients = [value.grad for value in trained]
            self._adam(group, self._rate(group), divisor, trained, trained, gradients)
        return loss

    def _rate(self, group: dict[str, Any]) -> Any:
        """Return the rate of a group's step, a number or a tensor."""
        rate, warm_up = group["lr"] * group["unit"], group["warm_up"]
        if not warm_up:
            return rate
        states = [self.state[value] for value in group["params"] if value in self.state]
        taken = next((state["step"] for state in states if "step" in state), None)
        if taken is None:
            return rate * min(1.0, 1.0 / warm_up) ** 2
        taken = taken.double() if taken.is_cpu else taken
        return rate * ((taken + 1.0) / warm_up).clamp_max(1.0).square()

    def _divisor(self) -> Tensor | None:
        """Return what to divide gradients by: their scale, and what their norm has above its limit."""
        scale: Tensor | None = getattr(self, "grad_scale", None)
        parameters = [value for group in self.param_groups for value in group["params"]]
        gradients = [value.grad for value in parameters if value.grad is not None]
        clip, (_, beta) = self.param_groups[0]["clip"], self.param_groups[0]["betas"]
        if clip is None or not gradients:
            return scale
        norm = at_least_single(get_total_norm(gradients)).to(parameters[0].device)
        state = self.state[parameters[0]]
        if "norm" not in state:  # running averages of its squares, and of ones to divide these by
            state["norm"] = torch.zeros_like(norm).repeat(2)
        before = state["norm"]
        square = (norm if scale is None else norm / scale.to(norm)).square()
        limit = before[0] / before[1] * clip**2  # NaN before the first gradient, whose norm is any
        # In single precision, as fused Adam has the scale of gradients.
        excess = (square / limit).nan_to_num(1.0, math.inf).clamp_min(1.0).sqrt().float()
        usual = torch.stack([torch.fmin(square, limit), square.sign()])
        if (found_inf := getattr(self, "found_inf", None)) is not None:
            usual = torch.where(found_inf.to(norm) > 0, before, usual)
        before.lerp_(usual, 1.0 - beta)
        return excess if scale is None else excess * scale

    def _move_means(self, divisor: Tensor | None) -> None:
        """Move the means of posteriors with correlations in their own coordinates."""
        means = [
            [mean for mean in group["params"] if mean in self._correlated and mean.grad is not None]
            for group in self.param_groups
        ]
        posteriors = {mean: self._correlated[mean]() for each in means for mean in each}
        if not posteriors:  # all means are frozen
            return
        with torch.enable_grad():
            noises = {
                mean: mean.new_zeros(q.batch_shape + q.noise_shape).requires_grad_()
                for mean, q in posteriors.items()
            }
            images = [q.scale_noise(noises[mean]) for mean, q in posteriors.items()]
            found = torch.autograd.grad(
                images, [*noises.values()], [mean.grad for mean in posteriors]
            )
        gradients = dict(zip(posteriors, found, strict=True))
        for group, own in zip(self.param_groups, means, strict=True):
            lr = group["posterior_lr"] * group["lr"]
            moved = [noises[mean] for mean in own]
            own_gradients = [gradients[mean] for mean in own]
            self._adam(group, lr, divisor, moved, own, own_gradients, "noise_")
            for mean in own:
                move = posteriors[mean].scale_noise(noises[mean])
                mean += _at_most(group["lr"] * group["unit"], move)

    def _adam(
        self,
        group: dict[str, Any],
        lr: float | Tensor,
        divisor: Tensor | None,
        moved: list[Tensor],
        parameters: list[Tensor],
        gradients: list[Tensor],
        prefix: str = "",
    ) -> None:
        """Move tensors; averages are kept with these parameters, under names with a prefix.

        A step without a prefix counts; steps with a prefix precede it.
        """
        averages: list[Tensor] = []
        squares: list[Tensor] = []
        steps = []
        # The fused kernel takes for granted that gradients are laid out as what they move.
        gradients = [
            each if each.stride() == own.stride() else torch.empty_like(own).copy_(each)
            for each, own in zip(gradients, moved, strict=True)
        ]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            state = self.state[parameter]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            steps.append(state["step"].clone() if prefix else state["step"])
            for name, tensors in (("exp_avg", averages), ("exp_avg_sq", squares)):
                if prefix + name not in state:
                    state[prefix + name] = torch.zeros_like(gradient)
                tensors.append(state[prefix + name])
        beta1, beta2 = group["betas"]
        moved, gradients, averages, squares = (
            [_as_real(each) for each in tensors]
            for tensors in (moved, gradients, averages, squares)
        )
        adam(
            *(moved, gradients, averages, squares, [], steps),
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            grad_scale=divisor,
            found_inf=getattr(self, "found_inf", None),
            weight_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )


@torch.no_grad()
def _correlated_means(
    posterior: SitePosterior,
) -> Iterator[tuple[nn.Parameter, Callable[[], Any]]]:
    """Yield means of Gaussians with correlations, each with a function to the present Gaussian."""
    family = posterior.family
    if isinstance(family, LowRank) and family.diagonal == "constant":
        return  # a move along a few directions gains little
    for name in ("loc", "inducing_loc"):
        mean, normal = getattr(posterior, name, None), partial(_normal_around, posterior, name)
        if isinstance(mean, nn.Parameter):
            q = normal()
            if isinstance(q, GaussianWeight) and not isinstance(q, IndependentWeight):
                yield mean, normal


def _normal_around(posterior: SitePosterior, name: str) -> Any:
    """Return the present Gaussian of a posterior whose mean has a name."""
    return posterior() if name == "loc" else posterior().inducing


def _as_real(value: Tensor) -> Tensor:
    """Return complex numbers as pairs of real ones, whose memory they share."""
    return torch.view_as_real(value) if value.is_complex() else value


def _at_most(size: float | Tensor, move: Tensor) -> Tensor:
    """Return a move, or one of that root mean square in its direction if it is larger."""
    own = move.square().mean().sqrt().clamp_min(torch.finfo(move.dtype).tiny)
    # A tensor in any case, since torch divides a number by other roundings.
    size = size.to(own) if isinstance(size, Tensor) else torch.full_like(own, size)
    return move * (size / own).clamp_max(1.0)


def _count_wide(points: Sequence[Tensor], guide: nn.Module) -> int:
    """Return how many parameters without a posterior are weights with a fan-in above 50."""
    guides = (each for each in guide.modules() if isinstance(each, StructuredGuide))
    models = {unwrapped(each.model) for each in guides if points and each.model is not None}
    layouts = [find_layouts(model) for model in models if isinstance(model, nn.Module)]
    fan_ins = {key: layout.fan_in or 0 for own in layouts for key, layout in own.items()}
    return sum(fan_ins.get(id(value), 0) > WIDE for value in points)
