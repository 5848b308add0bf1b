"""The weight that has not been drawn yet."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from pyro.poutine.condition_messenger import ConditionMessenger
from pyro.poutine.replay_messenger import ReplayMessenger
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.substitute_messenger import SubstituteMessenger
from torch import Tensor
from torch.utils._pytree import tree_map

from pyro_structvi._torch import inside_transform
from pyro_structvi.lazy.flipout import flipout
from pyro_structvi.maps.attention import is_attention, self_attention
from pyro_structvi.maps.calls import Application, FactorApplication, Lookup, parse_application
from pyro_structvi.maps.linear_maps import LinearMap, shape_per_example

if TYPE_CHECKING:
    from pyro_structvi.distributions.weight_distribution import FactoredDraw, WeightDistribution

LocalReparam = bool | Literal["exact", "flipout"]

_WAITING: ContextVar[bool] = ContextVar("weights_wait", default=False)


@contextmanager
def weights_wait() -> Iterator[None]:
    """Let weights sampled in this block wait for their use; outside it they are drawn at once.

    For an objective whose value is linear in each log density, such as the ELBO: outputs drawn for
    the likelihood do not belong to a weight drawn later for a density. Importance weights, which
    join the two, need drawn weights.

    Example:
        >>> from pyro_structvi.distributions import MeanFieldNormal
        >>> q = MeanFieldNormal(torch.zeros(2, 3), torch.tensor(1.0))
        >>> q.site_use = SiteUse("weight", count=1)
        >>> with weights_wait():
        ...     type(q()).__name__
        'LazyWeight'
        >>> type(q()).__name__
        'Tensor'
    """
    token = _WAITING.set(True)
    try:
        yield
    finally:
        _WAITING.reset(token)


def weights_wait_now() -> bool:
    """Return whether this code runs inside :func:`weights_wait`."""
    return _WAITING.get()


@dataclass
class SiteUse:
    """How a guide's site is used by the model, and how its draws may therefore be put off.

    Attributes:
        name: The site.
        local_reparam: True for the local rule wherever there is one, "exact" for the local rule
            only where it gives the exact joint law (one position for each example), "flipout" for
            the same with flipout elsewhere, False for weights that are always drawn.
        count: How often one pass of the model uses the site, or None before that is known. A weight
            used more than once must be the same weight each time, so it is drawn.
    """

    name: str
    local_reparam: LocalReparam = True
    count: int | None = None

    @property
    def may_wait(self) -> bool:
        """Whether the site is used once, and so that outputs may be drawn in the weight's place."""
        return bool(self.local_reparam) and self.count == 1

    @property
    def waits_now(self) -> bool:
        """Whether a draw at this site is to be put off here and now; see :func:`weights_wait`."""
        return self.may_wait and weights_wait_now()

    def asks_for_exact(self, application: Application | Lookup) -> bool:
        """Whether this use is one where an image's law may be approximate, and that is not wanted."""
        return self.local_reparam in {"exact", "flipout"} and application.has_positions


class WeightStandIn(Tensor):
    """A tensor without storage that knows its shape, dtype and device, and gives way to a value."""

    use: SiteUse

    @classmethod
    def _make(cls, like: Tensor, shape: torch.Size, use: SiteUse) -> Self:
        stand_in: Self = Tensor._make_wrapper_subclass(
            cls, shape, dtype=like.dtype, device=like.device
        )
        stand_in.use = use
        return stand_in

    def draw(self) -> Tensor:
        """Return the ordinary tensor that this one stands for."""
        raise NotImplementedError

    def _draw_outputs(self, application: Application) -> Tensor | None:
        """Draw the outputs of a linear map without drawing the weight, where that may be done."""
        return None

    def _draw_rows(self, lookup: Lookup) -> Tensor | None:
        """Draw the rows that are looked up without drawing the weight, where that may be done."""
        return None

    def _draw_per_example(self, application: FactorApplication) -> Tensor | None:
        """Draw a factor for each example, where that may be done."""
        return None

    def _check_input(self, application: Application | Lookup | FactorApplication) -> None:
        """Explain an input that does not fit the weight, in place of an error from the kernel."""
        x = application.x
        attributes = ("device",) if isinstance(application, Lookup) else ("device", "dtype")
        for attribute in attributes:
            expected, got = getattr(self, attribute), getattr(x, attribute)
            if expected != got and not (attribute == "dtype" and _autocasts(x)):
                target = repr(expected) if attribute == "dtype" else repr(str(expected))
                raise ValueError(
                    f"The input that meets the weight at site '{self.use.name}' must have "
                    f"{attribute} {expected}, but got {got}. Convert the data with "
                    f"`x.to({target})`, or move model and guide with `.to(...)` alike."
                )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` with ordinary tensors, unless there is a better answer.

        Shape, dtype and the like are known; the outputs of a linear map, and rows that are looked
        up, may be drawn directly.
        """
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        attended = self_attention(args, kwargs) if is_attention(func) else None
        if attended is not None:
            return attended
        application = parse_application(func, args, kwargs)
        if application is not None and isinstance(application.weight, WeightStandIn):
            weight = application.weight
            weight._check_input(application)
            if isinstance(application, Lookup):
                outputs = weight._draw_rows(application)
            elif isinstance(application, FactorApplication):
                outputs = weight._draw_per_example(application)
            else:
                outputs = weight._draw_outputs(application)
            if outputs is not None:
                return outputs
        return func(*tree_map(_value, args), **tree_map(_value, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Reached where ``__torch_function__`` is switched off; the same without the exception."""
        return func(*tree_map(_value, args), **tree_map(_value, kwargs or {}))


class CountedWeight(WeightStandIn):
    """A value that counts how many calls it takes part in.

    Args:
        value: The value.
        use: The record that keeps the count, set to zero here.
    """

    _counted: Tensor

    def __new__(cls, value: Tensor, use: SiteUse) -> Self:
        """Make the tensor that stands for the value."""
        weight = cls._make(value, value.shape, use)
        weight._counted = value
        use.count = 0
        return weight

    def draw(self) -> Tensor:
        """Return the value, and count; a use that may be repeated or differentiated counts twice."""
        self.use.count = (self.use.count or 0) + (2 if _may_be_repeated() else 1)
        return self._counted


class LazyWeight(WeightStandIn):
    """A weight at a guide's sample site that is drawn when, and as what, it is needed.

    ``F.linear``, the convolutions and ``F.embedding`` hand themselves to it by torch's
    ``__torch_function__`` protocol; it answers with a draw of the *outputs*, independent for each
    example (local reparameterization). Anything else that touches it gets one ordinary draw of the
    weight, made once and kept. Its shape, dtype and device are known without a draw.

    Args:
        distribution: The law of the weight.
        use: The record of the site it stands at.

    Example:
        >>> from pyro_structvi.distributions import MeanFieldNormal
        >>> q = MeanFieldNormal(torch.zeros(2, 3), torch.tensor(1.0))
        >>> weight = LazyWeight(q, SiteUse("weight", count=1))
        >>> torch.nn.functional.linear(torch.ones(5, 3), weight).shape, weight.is_drawn
        (torch.Size([5, 2]), False)
        >>> float((weight - weight).abs().sum()), weight.is_drawn
        (0.0, True)
    """

    distribution: "WeightDistribution"
    _drawn: Tensor | None
    _factored: "FactoredDraw | None"
    _gave_outputs: bool
    _with_grad: bool

    def __new__(cls, distribution: "WeightDistribution", use: SiteUse) -> Self:
        """Make the tensor that stands for a draw."""
        weight = cls._make(distribution._first_parameter, distribution.event_shape, use)
        weight.distribution = distribution
        weight._drawn = None
        weight._factored = None
        weight._gave_outputs = False
        weight._with_grad = torch.is_grad_enabled()
        return weight

    @property
    def is_drawn(self) -> bool:
        """Whether a weight has been drawn, as a tensor or in factors."""
        return self._drawn is not None or self._factored is not None

    def draw(self) -> Tensor:
        """Return the ordinary weight, drawn at the first call and kept.

        Raises:
            RuntimeError: If the model uses the weight again after its outputs were drawn.
        """
        self._refuse_second_use()
        if self._drawn is None:
            with torch.set_grad_enabled(self._with_grad):  # wherever it is first looked at
                factored = self._factored
                self._drawn = factored.weight() if factored else self.distribution.rsample()
        return self._drawn

    def _draw_outputs(self, application: Application) -> Tensor | None:
        """Draw the outputs of the map, or return None where only an ordinary weight will do.

        What a lazy bias has of independent noise adds its variance to that of the outputs. The rest
        of it, or all of it where an example has several positions, is drawn once for each example.
        """
        linear_map, x, _, bias = application
        exact = self.distribution.has_exact_positions or not self.use.asks_for_exact(application)
        independent = self.distribution.has_independent_elements
        flips = not exact and independent and self.use.local_reparam == "flipout"
        prefers_draw = self.distribution.prefers_drawn_weight(linear_map, x)
        if prefers_draw or not (exact or flips) or not self._may_give_outputs(x):
            return self._apply_factored(application)
        self._refuse_second_use()
        lazy_bias, shift = None, None
        if isinstance(bias, LazyWeight) and bias._may_give_outputs(x):
            bias._refuse_second_use()
            lazy_bias = bias
            if linear_map.has_positions(x):
                bias, shift = None, _draw_bias_per_example(lazy_bias, linear_map, x)
            else:
                bias, shift = lazy_bias.distribution.split_noise(x.shape[:-1])
        if flips:
            outputs = flipout(self.distribution, linear_map, x, _value(bias))
        else:
            image = self.distribution.image_under(linear_map, x, _value(bias))
            if image is None:
                return None
            outputs = image.rsample()
        self._gave_outputs = True
        if lazy_bias is not None:
            lazy_bias._gave_outputs = True
        outputs = outputs if shift is None else outputs + shift
        return _as_layers_have_it(outputs, x, self.dtype)

    def _draw_rows(self, lookup: Lookup) -> Tensor | None:
        """Draw the rows that are looked up, or return None where only an ordinary weight will do."""
        law = self.distribution.rows(lookup.indices) if self._may_give_outputs(lookup.x) else None
        if law is None:
            return None
        self._refuse_second_use()
        rows: Tensor = law.rsample()
        if self.use.asks_for_exact(lookup):
            rows = lookup.share_draws(rows)
        self._gave_outputs = True
        return lookup.shape_outputs(rows)

    def _draw_per_example(self, application: FactorApplication) -> Tensor | None:
        """Apply a factor that is drawn for each example, or return None to apply one to all."""
        x = application.x
        if not self._may_give_outputs(x):
            return None
        self._refuse_second_use()
        self._gave_outputs = True
        return application.function(x, self.distribution.rsample(x.shape[:1]))

    def _apply_factored(self, application: Application) -> Tensor | None:
        """Apply one draw of the weight in factors, where that costs less than forming it."""
        linear_map, x, _, bias = application
        formed = self._drawn is not None and self._factored is None
        if formed or not self.distribution.draws_in_factors(linear_map):
            return None
        self._refuse_second_use()
        if self._factored is None:
            with torch.set_grad_enabled(self._with_grad):
                self._factored = self.distribution.rsample_in_factors()
        return self._factored.apply(linear_map, _value(x), _value(bias))

    def _may_give_outputs(self, x: Any) -> bool:
        """Whether this weight's part in the outputs for ``x`` may be drawn in its place."""
        return self.use.may_wait and not self.is_drawn and not isinstance(x, WeightStandIn)

    def _refuse_second_use(self) -> None:
        if self._gave_outputs and _inside_model():
            raise RuntimeError(
                f"The model uses the weight at site '{self.use.name}' more often in this pass than "
                "in the pass in which its uses were counted, after its outputs were drawn. A "
                "weight that is used more than once must be drawn: call `guide.initialize(...)` "
                "with arguments that take this path, or, to replay one trace of the guide several "
                "times, pass `local_reparam=False` to the guide."
            )


def _autocasts(x: Tensor) -> bool:
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _as_layers_have_it(outputs: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return outputs in the dtype that a layer's have; noise and biases may be in a wider one."""
    if not _autocasts(x):
        return outputs.to(dtype)
    if outputs.dtype == torch.float32:
        return outputs.to(torch.get_autocast_dtype(x.device.type))
    return outputs


def _value(value: Any) -> Any:
    return value.draw() if isinstance(value, WeightStandIn) else value


def _draw_bias_per_example(bias: LazyWeight, linear_map: LinearMap, x: Tensor) -> Tensor:
    """Draw one bias for each example, shaped to meet the outputs at every position."""
    draw = bias.distribution.rsample(x.shape[: x.dim() - linear_map.event_dim(x)])
    return draw.reshape(shape_per_example(linear_map, x, draw.shape[-1]))


def _may_be_repeated() -> bool:
    """Whether the model differentiates or maps its own net; the counting run has gradients off."""
    return torch.is_grad_enabled() or inside_transform()


def _inside_model() -> bool:
    """Whether the code that is running is a model that a guide's values were handed to."""
    handlers = (ReplayMessenger, ConditionMessenger, SubstituteMessenger)
    return any(isinstance(handler, handlers) for handler in _PYRO_STACK)


_PROPERTIES = ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_sparse", "is_quantized")

_METADATA = {getattr(Tensor, name).__get__ for name in _PROPERTIES} | {
    Tensor.dim,
    Tensor.size,
    Tensor.numel,
    Tensor.nelement,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.__len__,
}
