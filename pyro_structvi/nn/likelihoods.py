"""Likelihoods: a net becomes a model of classes or of real targets."""

from collections.abc import Callable
from typing import Annotated, Any

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_structvi._checks import (
    NO_CLASS,
    Count,
    check_broadcastable,
    check_positive,
    check_same_kind,
    check_shape,
    checked,
    naming,
    shape_text,
)
from pyro_structvi._pyro import declared_samples, make_pyro_module, was_called
from pyro_structvi.linalg.precision import at_least_single
from pyro_structvi.nn.calling import call_net, read_output
from pyro_structvi.nn.plates import run_in_plates
from pyro_structvi.nn.prior_sites import sample_from
from pyro_structvi.nn.priors import resolve_prior

Output = Annotated[Callable[[Any], Tensor], NO_CLASS]


class Likelihood(PyroModule):
    """A net as a model of its observations.

    A plain net that has PyroModules among its parts becomes one itself, in place, so that the names of
    their sites say where they are.

    Args:
        net: A module with sample sites.
        num_data: Number of training examples, or None where ``fit`` is to set it.
        output: What takes a tensor from what the net returns; None for a tensor, or the ``logits`` of an
            object.

    Attributes:
        num_data: That number; None as long as it is not known.
        is_num_data_given: Whether the user gave it, and not ``fit``.
    """

    def __init__(self, net: nn.Module, num_data: int | None, output: Output | None = None) -> None:
        super().__init__()
        self.net = _check_net(net)
        self._output = output
        self.is_num_data_given = num_data is not None
        self.num_data = num_data

    def _run_net(self, x: Any) -> tuple[Tensor, int]:
        """Return the output, in single precision at least, and how many of its dimensions are plates."""
        net, output = self.net, self._output
        found, plates = run_in_plates(net, lambda: read_output(call_net(net, x), output))
        _check_batch_of_one(x, found.shape[plates:])
        if found.dim() <= plates or found.shape[plates] == 0:
            raise ValueError(
                "`x` must hold at least one example, but the net's output has shape "
                f"{tuple(found.shape)}."
            )
        return at_least_single(found), plates

    def _run_classes(self, x: Any, y: Tensor | None, *dims: str) -> tuple[Tensor, int]:
        """Return logits ``(*dims, classes)`` as :meth:`_run_net` does, and check the observations."""
        logits, plates = self._run_net(x)
        if logits.dim() != plates + len(dims) + 1:
            kind = type(self).__name__
            raise ValueError(
                f"A {kind}'s net must return logits of shape ({', '.join(dims)}, classes), but got "
                f"{tuple(logits.shape)}."
            )
        if y is not None:
            shape = logits.shape[plates:-1]
            check_shape("y", y, shape, f"({', '.join(dims)}{',' if len(dims) == 1 else ''})")
            if y.is_floating_point() or y.is_complex():
                raise ValueError(
                    f"`y` must hold classes as integers, but got {y.dtype}. Pass `y.long()`."
                )
        return logits, plates

    def _observe(self, likelihood: Any, y: Tensor | None) -> None:
        """Observe a batch, scaled up to the data set; without ``y`` the site is still no latent site."""
        size = likelihood.batch_shape[-1]
        if y is not None and self.num_data is None:
            raise ValueError(
                "`num_data`, the number of training examples, must be known before observations are "
                f"scored. Pass it to {type(self).__name__}, or train by `fit`, which sets it."
            )
        scale = (self.num_data or size) / size
        with poutine.scale(scale=scale), pyro.plate("data", size, dim=-1):
            pyro.sample("obs", likelihood, obs=y, infer={"is_observation": True})


class Classifier(Likelihood):
    """A net as a model of classes: ``y_n ~ Categorical(softmax(net(x_n)))``.

    Args:
        net: A module from ``(batch, ...)`` to logits ``(batch, classes)``, with sample sites; it may
            return an object with ``logits``.
        num_data: Number of training examples; the log likelihood of a batch counts
            ``num_data / batch`` times. :func:`~pyro_structvi.fit` sets it where it is left out.
        output: What takes the logits from what the net returns; a tensor is taken as it is, and of
            anything else its ``logits``.

    Raises:
        ValueError: If ``num_data`` is not a whole number of at least 1.
        TypeError: If ``net`` is not a module.

    Example:
        >>> from pyro_structvi import bayesianize
        >>> model = Classifier(bayesianize(nn.Linear(4, 3), prior=1.0), num_data=100)
        >>> model(torch.zeros(5, 4)).shape
        torch.Size([5, 3])
    """

    @checked
    def __init__(
        self,
        net: nn.Module,
        num_data: Count | None = None,
        output: Output | None = None,
    ) -> None:
        super().__init__(net, num_data, output)

    def forward(self, x: Any, y: Tensor | None = None) -> Tensor:
        """Sample the classes at site ``obs``, or observe them.

        Args:
            x: The net's input, first dimension the batch; a mapping, such as a ``BatchEncoding``, gives
                keyword arguments where the net's ``forward`` has their names.
            y: Classes ``(batch,)`` as integers, or None.

        Returns:
            The logits ``(batch, classes)``, in float32 where the net's output has half precision.

        Raises:
            ValueError: If the net's output or ``y`` has another shape, or ``y`` is not integer.
        """
        with naming("x", x):
            logits, _ = self._run_classes(x, y, "batch")
            self._observe(finite_likelihood(lambda: dist.Categorical(logits=logits)), y)
        return logits


class Regressor(Likelihood):
    """A net as a model of real targets: ``y_n ~ N(net(x_n), noise_scale^2)``.

    Args:
        net: A module from ``(batch, ...)`` to means ``(batch, *target)``, with sample sites.
        num_data: Number of training examples; the log likelihood of a batch counts
            ``num_data / batch`` times. :func:`~pyro_structvi.fit` sets it where it is None.
        noise_scale: Standard deviation of the noise, in the targets' units: a number, a tensor that
            broadcasts to a target, or a distribution over positive numbers, which becomes the
            latent site ``noise_scale``.
        output: What takes the means from what the net returns; a tensor is taken as it is, and of
            anything else its ``logits``.

    Raises:
        ValueError: If ``num_data`` or ``noise_scale`` is not positive.
        TypeError: If ``net`` is not a module.

    Example:
        >>> from pyro_structvi import bayesianize
        >>> net = bayesianize(nn.Linear(4, 1), prior=1.0)
        >>> model = Regressor(net, num_data=100, noise_scale=dist.HalfNormal(1.0))
        >>> model(torch.zeros(5, 4)).shape
        torch.Size([5, 1])
    """

    @checked
    def __init__(
        self,
        net: nn.Module,
        num_data: Count | None = None,
        noise_scale: float | Tensor | torch.distributions.Distribution | None = None,
        output: Output | None = None,
    ) -> None:
        super().__init__(net, num_data, output)
        if noise_scale is None:
            raise ValueError(
                "`noise_scale` must be given: a positive number, a tensor, or a distribution over "
                "positive numbers such as `dist.HalfNormal(1.0)`, for a noise that is learned."
            )
        tensors = [*net.parameters(), *net.buffers()]
        example = next((t for t in tensors if t.is_floating_point()), torch.zeros(()))
        example = at_least_single(example.detach().new_zeros(()))
        if isinstance(noise_scale, torch.distributions.Distribution):
            like = example.new_zeros(noise_scale.batch_shape + noise_scale.event_shape)
            prior = resolve_prior(noise_scale, "noise_scale", like)
            sample_from(self, "noise_scale", prior, like.shape)
        else:
            scale = torch.as_tensor(noise_scale, dtype=example.dtype, device=example.device)
            check_positive("noise_scale", scale)
            self.register_buffer("noise_scale", scale)

    def forward(self, x: Any, y: Tensor | None = None) -> Tensor:
        """Sample the targets at site ``obs``, or observe them.

        Args:
            x: The net's input, first dimension the batch; a mapping gives keyword arguments where the
                net's ``forward`` has their names.
            y: Targets of the shape of the net's output, or None.

        Returns:
            The means ``(batch, *target)``, in float32 where the net's output has half precision.

        Raises:
            ValueError: If ``y`` has not the shape and device of the net's output, or another dtype, of
                which half precision counts as float32.
        """
        with naming("x", x):
            mean, plates = self._run_net(x)
            target = mean.shape[plates + 1 :]
            if y is not None:
                check_shape("y", y, mean.shape[plates:], "that of the net's output")
                y = at_least_single(y)
                check_same_kind("y", y, "net(x)", mean)
            scale = self.noise_scale
            if plates and "noise_scale" in declared_samples(self):  # (*plates, 1, *shape)
                ones = [1 for _ in range(mean.dim() - scale.dim())]
                scale = scale.reshape(*scale.shape[: plates + 1], *ones, *scale.shape[plates + 1 :])
            else:
                check_broadcastable("noise_scale", scale, target, "the shape of a target")
            self._observe(
                finite_likelihood(lambda: dist.Normal(mean, scale).to_event(len(target))), y
            )
        return mean


def _check_net(net: nn.Module) -> nn.Module:
    is_plain = not isinstance(net, PyroModule)
    parts = [part for part in net.modules() if isinstance(part, PyroModule)] if is_plain else [net]
    if any(was_called(part) for part in parts):
        raise ValueError(
            "`net` was called before it became part of this model, and Pyro names sites at the "
            "first call. Make a new one with `bayesianize` and wrap it before calling it."
        )
    if is_plain and parts:
        make_pyro_module(net)
    return net


def finite_likelihood(make: Callable[[], Any]) -> Any:
    """Make a likelihood; torch's error about its parameters would print them."""
    try:
        return make()
    except ValueError:
        raise ValueError("The net's output for `x` must be finite, but holds a NaN.") from None


def _check_batch_of_one(x: Any, shape: torch.Size) -> None:
    """Raise a ``ValueError`` if a net has dropped the dimension of a batch that has one example."""
    is_one = isinstance(x, Tensor) and x.dim() > 1 and len(x) == 1
    if is_one and len(shape) < 2 and shape != (1,):
        raise ValueError(
            f"`x` is a batch of one example, but the net's output has shape {shape_text(shape)}: a "
            "`squeeze()` in the net drops every dimension of size 1. Write `squeeze(-1)` there, or "
            "leave a last batch of one out, with `DataLoader(..., drop_last=True)`."
        )
