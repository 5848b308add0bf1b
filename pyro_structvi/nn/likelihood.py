"""Likelihoods around a net: their base, and likelihoods of classes and labels."""

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Annotated, Any, Literal

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from pyro.nn import PyroModule
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from pyro_structvi._checks import (
    NO_CLASS,
    Count,
    brief,
    check_finite,
    check_no_nan,
    check_positive,
    check_same_kind,
    check_shape,
    check_support,
    checked,
    naming,
    shape_text,
    validates,
)
from pyro_structvi._pyro import (
    declared_samples,
    make_pyro_module,
    plates_around,
    site_name,
    site_values,
    was_called,
)
from pyro_structvi._torch import inside_transform, is_recording, map_draws, without_compiler
from pyro_structvi.linalg.matrices import at_least_single
from pyro_structvi.nn.random_module import RandomModule
from pyro_structvi.weights.site_role import SiteRole

Output = Annotated[Callable[[Any], Tensor], NO_CLASS]
Terms = Literal["elements", "pairs", "last dimension"]


class Likelihood(RandomModule):
    """Base of the likelihoods: a net as a model of its observations.

    A plain net with PyroModules among its parts becomes a PyroModule in place, so that the names of
    their sites are paths in the net. The result of ``torch.compile`` is unwrapped.

    Args:
        net: A module with sample sites.
        num_data: As for :class:`Classifier`.
        output: As for :class:`Classifier`.
        standardize: Training inputs ``(N, ...)``; the net has inputs less their means over N, divided by
            their standard deviations, which are buffers ``input_mean`` and ``input_scale``.

    Raises:
        ValueError: If ``num_data`` is not at least 1.
        TypeError: If ``net`` is not a module.

    Attributes:
        terms: The outputs in each term of an example's log likelihood, for expectations by quadrature:
            single outputs, "elements"; "pairs" of an output in the first half of the last dimension and
            an output in the second half; or the whole "last dimension", which always holds.
    """

    terms: Terms = "last dimension"

    @checked
    def __init__(
        self,
        net: nn.Module,
        num_data: Count | None = None,
        output: Output | None = None,
        standardize: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.net = _check_net(net)
        self._register_standard("input", standardize)
        self.output = output
        self.is_num_data_given = num_data is not None
        self.num_data = num_data

    def forward(self, x: Any, y: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Run the net, sample or observe the site ``obs``, and return the result of :meth:`observe`.

        Args:
            x: The net's input, first dimension the batch; a mapping, such as a ``BatchEncoding``, gives
                keyword arguments if the net's ``forward`` has their names.
            y: Observations, or None.
            weights: Weights of the examples' log likelihoods ``(batch,)``, not negative; 1 when None. An
                example of weight 2 counts twice.

        Raises:
            ValueError: If the net's output or ``y`` has a wrong shape or dtype.
        """
        with naming("x", x):
            output, plates = self.run_net(x)
            size = output.shape[plates]
            with nullcontext() if weights is None else _Weighed(weights, output, size):
                return self.observe(output, plates, y)

    def lower_bound(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        """Return a lower bound of each example's expected log likelihood, in closed form.

        ``mean`` and ``variance`` describe normal outputs, ``(batch, ...)``.

        Raises:
            NotImplementedError: If this likelihood has no such bound.
        """
        raise NotImplementedError(
            f'A {type(self).__name__} has no lower bound in closed form. Pass `estimator="moments"`, '
            "which takes expectations by quadrature."
        )

    def observe(self, output: Tensor, plates: int, y: Tensor | None) -> Tensor:
        """Sample or observe the observations given a net's output; defined by subclasses.

        Args:
            output: The output, ``(*plates, batch, ...)``.
            plates: Number of leading dimensions from vectorized plates around the model.
            y: Observations without those dimensions, or None.
        """
        raise NotImplementedError

    def run_net(self, x: Any) -> tuple[Tensor, int]:
        """Return the output in at least single precision, and its number of plate dimensions."""
        net, output = self.net, self.output
        x = self._standardized(x)
        found, plates = run_in_plates(net, lambda: read_output(call_net(net, x), output))
        shape = found.shape[plates:]
        is_one = isinstance(x, Tensor) and x.dim() > 1 and x.shape[0] == 1
        if is_one and len(shape) < 2 and shape != (1,):
            raise ValueError(
                f"`x` is a batch of one example, but the net's output has shape {shape_text(shape)}: a "
                "`squeeze()` in the net drops every dimension of size 1. Write `squeeze(-1)` there, or "
                "leave a last batch of one out, with `DataLoader(..., drop_last=True)`."
            )
        if not shape or shape[0] == 0:
            raise ValueError(
                "`x` must hold at least one example, but the net's output has shape "
                f"{tuple(found.shape)}."
            )
        return at_least_single(found), plates

    def _register_standard(self, name: str, values: Tensor | None) -> None:
        """Register the means and standard deviations of data ``(N, ...)`` as buffers."""
        mean = scale = None
        if values is not None:
            if not values.is_floating_point() or not values.dim() or len(values) < 2:
                raise ValueError(
                    "`standardize` must hold training data, floating-point tensors of at least two "
                    f"examples, but got {brief(values)}."
                )
            check_no_nan("standardize", values)
            check_finite("standardize", values)
            mean, scale = values.mean(0), values.std(0, correction=0)
            is_constant = values.amax(0) == values.amin(0)  # the scale of such a column is rounding
            scale = torch.where(is_constant, 1.0, scale)
        self.register_buffer(f"{name}_mean", mean)
        self.register_buffer(f"{name}_scale", scale)

    def _standardized(self, x: Any) -> Any:
        if self.input_mean is None:
            return x
        if not isinstance(x, Tensor):
            raise TypeError(
                "`x` must be a tensor for a model with `standardize`, but got "
                f"{brief(x)}. Standardize the inputs yourself."
            )
        shape = [*x.shape[:1], *self.input_mean.shape]
        check_shape("x", x, shape, "(batch, ...) as in `standardize`")
        check_same_kind("x", x, "standardize", self.input_mean)
        return (x - self.input_mean) / self.input_scale

    def _check_classes(self, logits: Tensor, plates: int, y: Tensor | None, *dims: str) -> None:
        """Raise a ``ValueError`` unless there are logits ``(*dims, classes)``, and classes ``dims``."""
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

    def _observe_numbers(
        self, make: Callable[[Tensor], Any], output: Tensor, plates: int, y: Tensor | None
    ) -> Tensor:
        """Observe numbers of any dtype and of the shape of the output, and return the output."""
        if y is not None:
            check_shape("y", y, output.shape[plates:], "that of the net's output")
            if y.is_complex():
                raise ValueError(f"`y` must hold real numbers, but got {y.dtype}. Pass `y.real`.")
            y = y.to(output.dtype)
            check_same_kind("y", y, "net(x)", output)
        event = output.dim() - plates - 1
        self._observe(lambda: make(output).to_event(event), y)
        return output

    def _observe(
        self, make: Callable[[], Any], y: Tensor | None, weights: Tensor | None = None
    ) -> None:
        """Observe a batch, scaled to the data set; without ``y`` the site is still no latent site."""
        try:
            likelihood = make()
        except ValueError:  # the error of torch prints all parameters
            raise ValueError("The net's output for `x` must be finite, but holds a NaN.") from None
        size = likelihood.batch_shape[-1]
        if y is not None and _is_seen(y) and validates(None):
            check_support("y", y, likelihood.support)
        if y is not None and self.num_data is None:
            raise ValueError(
                "`num_data`, the number of training examples, must be known before observations are "
                f"scored. Pass it to {type(self).__name__}, or train by `fit`, which sets it."
            )
        scale = (self.num_data or size) / size * (1.0 if weights is None else weights)
        with poutine.scale(scale=scale), pyro.plate("data", size, dim=-1):
            pyro.sample("obs", likelihood, obs=y, infer={"is_observation": True})


def _is_seen(tensor: Tensor) -> bool:
    """Whether the values of data may steer Python here."""
    return not (tensor.is_meta or inside_transform() or is_recording())


class _Weighed(Messenger):
    """Multiplies the log likelihoods of the examples in a batch by weights."""

    def __init__(self, weights: Tensor, output: Tensor, size: int) -> None:
        super().__init__()
        check_shape("weights", weights, [size], "(batch,)")
        check_same_kind("weights", weights, "net(x)", output)
        is_valid = (weights >= 0) & weights.isfinite()
        if not _is_seen(weights):
            # The step is not finite, and Python repeats it with an error.
            weights = torch.where(is_valid, weights, math.nan)
        elif not bool(is_valid.all()):
            raise ValueError(
                "`weights` must not be negative or infinite. Leave these examples out."
            )
        self._weights = weights

    def _pyro_sample(self, msg: Any) -> None:
        if SiteRole.of(msg).is_observation:
            msg["scale"] = msg["scale"] * self._weights


def _check_net(net: nn.Module) -> nn.Module:
    net = without_compiler(net)
    is_plain = not isinstance(net, PyroModule)
    parts = [part for part in net.modules() if isinstance(part, PyroModule)] if is_plain else [net]
    if any(was_called(part) for part in parts):
        raise ValueError(
            "`net` was called before it became part of this model, and Pyro names sites at the "
            "first call. Make a new one with `bayesianize` and wrap it before calling it."
        )
    if is_plain and parts:
        make_pyro_module(net, RandomModule)
    return net


def run_in_plates(net: nn.Module, call: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """Return outputs ``(*plates, batch, ...)`` of a net and the number of plates around the model.

    A site in such plates has the value ``(*plates, 1, *shape)``, with a 1 for the plate of the data, or
    ``(*plates, *shape)`` in ``Predictive``, or ``shape`` by a handler.
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
                rows = value.reshape(-1, *shape)  # one if a handler gave the value, as `condition`
                values[name], flat[name] = value, rows.expand(plates.numel(), *shape)

        def run(own: dict[str, Tensor]) -> Tensor:
            cache.update(own)
            return call()

        try:
            with pyro.validation_enabled(False):  # vmap has no values to validate
                outputs = map_draws(run, flat, net.modules())
        finally:
            cache.update(values)
    return outputs.reshape(*plates, *outputs.shape[1:]), len(plates)


def call_net(net: nn.Module, x: Any) -> Any:
    """Call a net with an input; a mapping gives keyword arguments if ``forward`` has their names."""
    if not isinstance(x, Mapping):
        return net(x)
    parameters = inspect.signature(net.forward).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    fits = all(isinstance(key, str) for key in x) if takes_any else set(x) <= set(parameters)
    return net(**x) if fits else net(x)


def read_output(result: Any, output: Callable[[Any], Tensor] | None) -> Tensor:
    """Return the tensor in a net's return value."""
    found = output(result) if output is not None else getattr(result, "logits", result)
    if isinstance(found, Tensor):
        return found
    source = "`output`" if output is not None else "The net"
    raise TypeError(
        f"{source} must return a tensor, or an object with `logits`, but got {brief(found)}. Pass "
        "`output=lambda result: ...`, a function from the return value of the net to the tensor."
    )


# ---- classes -------------------------------------------------------------------------------------


class Classifier(Likelihood):
    """A net as a model of classes: ``y_n ~ Categorical(softmax(net(x_n)))``.

    Args:
        net: A module with sample sites, from ``(batch, ...)`` to logits ``(batch, classes)``.
        num_data: Number of training examples; the log likelihood of a batch is multiplied by
            ``num_data / batch``. When None, :func:`~pyro_structvi.fit` sets it.
        output: From the net's return value to the logits; by default a tensor, or its ``logits``.
        class_weights: Weights of the log likelihoods of each class, ``(classes,)``, as ``weight`` of
            ``torch.nn.CrossEntropyLoss``: ``N / (classes * counts)`` balances classes. Predictive
            densities have no weights.
        standardize: Training inputs; the net has standardized ones, see :class:`Likelihood`.

    Raises:
        ValueError: If a weight is not positive.

    Example:
        >>> from pyro.infer import Predictive
        >>> from pyro_structvi import bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=100)
        >>> Predictive(model, num_samples=3)(torch.zeros(5, 4))["obs"].shape
        torch.Size([3, 5])
    """

    @checked
    def __init__(
        self,
        net: nn.Module,
        num_data: Count | None = None,
        output: Output | None = None,
        *,
        class_weights: Tensor | None = None,
        standardize: Tensor | None = None,
    ) -> None:
        super().__init__(net, num_data, output, standardize)
        if class_weights is not None:
            check_positive("class_weights", class_weights)
            check_shape("class_weights", class_weights, [class_weights.numel()], "(classes,)")
        self.register_buffer("class_weights", class_weights)

    def lower_bound(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        r"""Return Jensen's bound, :math:`m_y - \log \sum_c \exp(m_c + v_c / 2)`, ``(batch,)``.

        The logits are normal with means m and variances v.

        References:
            Harrison, Willes and Snoek (2024), "Variational Bayesian last layers", Sec. 3.2.
        """
        chosen = mean.gather(-1, y.long().unsqueeze(-1)).squeeze(-1)
        return chosen - (mean + 0.5 * variance).logsumexp(-1)

    def observe(self, output: Tensor, plates: int, y: Tensor | None) -> Tensor:
        """Sample or observe classes ``(batch,)``, integers, and return the logits."""
        self._check_classes(output, plates, y, "batch")
        weights = self.class_weights
        if weights is not None:
            check_shape("class_weights", weights, output.shape[-1:], "(classes,)")
            # The likelihood refuses classes out of range; bytes would be a mask.
            weights = None if y is None else weights[y.long().clamp(0, len(weights) - 1)]
        self._observe(lambda: dist.Categorical(logits=output), y, weights)
        return output


class BinaryClassifier(Likelihood):
    """A net as a model of binary targets: ``y_n ~ Bernoulli(sigmoid(net(x_n)))``.

    Several outputs are labels, independent given the weights (multi-label classification).

    Args:
        net: A module with sample sites, from ``(batch, ...)`` to logits ``(batch,)`` or
            ``(batch, labels)``.
        num_data: As for :class:`Classifier`.
        output: As for :class:`Classifier`.
        standardize: As for :class:`Classifier`.

    Example:
        >>> from pyro.infer import Predictive
        >>> from pyro_structvi import bayesianize
        >>> model = BinaryClassifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=100)
        >>> Predictive(model, num_samples=3)(torch.zeros(5, 4))["obs"].shape
        torch.Size([3, 5, 3])
    """

    terms: Terms = "elements"

    def observe(self, output: Tensor, plates: int, y: Tensor | None) -> Tensor:
        """Sample or observe zeros and ones in any dtype, and return the logits."""
        return self._observe_numbers(
            lambda logits: dist.Bernoulli(logits=logits), output, plates, y
        )
