"""Lazily sampled weights: placeholders that ``__torch_function__`` replaces when they are used."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Self

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_structvi._torch import (
    METADATA,
    inside_backward,
    tree_map,
    without_overrides,
    without_storage,
)
from pyro_structvi.linalg.matrices import autocasts
from pyro_structvi.maps.calls import (
    Application,
    Arrangement,
    Call,
    FactorApplication,
    Lookup,
    parse_application,
    rewritten,
)
from pyro_structvi.maps.linear_map import BiasColumnMap, FactoredDraw, LinearMap, shape_per_example
from pyro_structvi.weights.outputs import NormalOutputs, flipout
from pyro_structvi.weights.site_role import SiteRole, SiteUse
from pyro_structvi.weights.weight_distribution import (
    FactoredWeight,
    IndependentWeight,
    WeightDistribution,
)


class WeightPlaceholder(Tensor):
    """A tensor with shape, dtype and device, but no storage, that is replaced when it is used.

    A call may be evaluated without the weight, by ``sample_outputs``, or receives ``draw()``.
    """

    use: SiteUse

    @classmethod
    def _make(cls, like: Tensor, shape: torch.Size, use: SiteUse, **attributes: Any) -> Self:
        placeholder = without_storage(cls, shape, like)
        vars(placeholder).update(attributes, use=use)
        return placeholder

    def draw(self) -> Tensor:
        """Return the ordinary tensor."""
        raise NotImplementedError

    def materialize(self) -> Tensor:
        """Return the ordinary tensor for a use that torch does not show, as by ``parameters()``."""
        return self.draw()

    def note_lookup(self) -> None:
        """Note that an embedding has looked up rows here, and has its row of padding elsewhere."""

    def sample_outputs(self, call: Call) -> Tensor | None:
        """Evaluate a call without the weight, or return None where it needs the weight."""
        return None

    def item_of_stack(self, index: int) -> "WeightPlaceholder | None":
        """Return the placeholder of one weight of a stack, or None where the stack is sampled."""
        return None

    def _check_input(self, call: Call) -> None:
        """Raise a ``ValueError`` for an input of another dtype or device, before the kernel does."""
        x = call.x
        attributes = ("device",) if isinstance(call, Lookup) else ("device", "dtype")
        for attribute in attributes:
            expected, got = getattr(self, attribute), getattr(x, attribute)
            if expected != got and not (attribute == "dtype" and autocasts(x)):
                target = repr(expected) if attribute == "dtype" else repr(str(expected))
                raise ValueError(
                    f"The input of the weight at site '{self.use.name}' must have "
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
        """Call ``func`` with ordinary tensors, unless its result is available without them."""
        kwargs = kwargs or {}
        if func in METADATA:
            with without_overrides():
                return func(*args, **kwargs)
        for rule in (_read_view, rewritten):
            found = rule(func, args, kwargs)
            if found is not None:
                return found
        call = parse_application(func, args, kwargs)
        if call is not None and isinstance(call.weight, WeightPlaceholder):
            call.weight._check_input(call)
            outputs = call.weight.sample_outputs(call)
            if outputs is not None:
                return outputs
        return func(*tree_map(as_drawn, args), **tree_map(as_drawn, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` with ordinary tensors where ``__torch_function__`` is disabled."""
        return func(*tree_map(as_drawn, args), **tree_map(as_drawn, kwargs or {}))


class ArrangedView(WeightPlaceholder):
    """A placeholder of a weight with its dimensions in another order, such as a transpose."""

    base: WeightPlaceholder
    _dims: tuple[int, ...]

    def __new__(cls, base: WeightPlaceholder, dims: tuple[int, ...]) -> Self:
        shape = torch.Size(base.shape[d] for d in dims)
        return cls._make(base, shape, base.use, base=base, _dims=dims)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"ArrangedView({self.base!r}, dims={self._dims})"

    def draw(self) -> Tensor:
        return self.base.draw().permute(self._dims)

    def item_of_stack(self, index: int) -> WeightPlaceholder | None:
        item = self.base.item_of_stack(index) if self._dims[0] == 0 else None
        return None if item is None else ArrangedView(item, tuple(d - 1 for d in self._dims[1:]))

    def sample_outputs(self, call: Call) -> Tensor | None:
        if not isinstance(call, Application):
            return None
        plain = Arrangement.of_dims(tuple(range(self.dim())), tuple(self.shape))
        arrangement = (call.arrangement or plain).after(self._dims)
        return self.base.sample_outputs(call._replace(weight=self.base, arrangement=arrangement))


def as_drawn(value: Any) -> Any:
    """Return the ordinary tensor of a placeholder; any other value unchanged."""
    return value.draw() if isinstance(value, WeightPlaceholder) else value


_PERMUTATIONS = {
    *(getattr(Tensor, name).__get__ for name in ("T", "mT")),
    *(Tensor.t, torch.t, Tensor.permute, torch.permute),
    *(Tensor.transpose, torch.transpose, Tensor.swapaxes, torch.swapaxes),
}


def _read_view(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> WeightPlaceholder | None:
    """Return the placeholder of a view of a placeholder, or None for any other call."""
    base = args[0] if args else None
    if not isinstance(base, WeightPlaceholder):
        return None
    if func in _PERMUTATIONS and base.dim() > 1:
        # The sizes of this tensor differ, so that they show the order.
        permuted = func(torch.empty(*range(base.dim()), device="meta"), *args[1:], **kwargs)
        return ArrangedView(base, tuple(permuted.shape))
    if func is Tensor.__getitem__ and base.dim() > 2:
        index = args[1]
        is_scalar = isinstance(index, Tensor) and not index.dim() and not index.is_floating_point()
        if type(index) is int or (is_scalar and index.dtype != torch.bool):
            return base.item_of_stack(range(len(base))[int(index)])
    return None


class LazyWeight(WeightPlaceholder):
    """A weight at a sample site of a guide, sampled when it is used.

    ``F.linear``, convolutions and ``F.embedding`` receive samples of their *outputs*, independent for
    each example (local reparameterization). Any other function receives a sample of the weight, which
    is kept. A use after outputs were sampled raises an error, since it would see an independent weight.

    Attributes:
        sampled: The sampled quantity: "outputs", "rows", "factors", "weight", or "" for nothing.
        reason: Why the weight was sampled, if it was.

    Example:
        >>> from pyro_structvi.distributions import MeanFieldNormal
        >>> q = MeanFieldNormal(torch.zeros(2, 3), torch.tensor(1.0))
        >>> weight = LazyWeight(q, SiteUse("weight", count=1))
        >>> torch.nn.functional.linear(torch.ones(5, 3), weight).shape
        torch.Size([5, 2])
        >>> weight
        LazyWeight(site='weight', shape=(2, 3), its outputs were drawn)
    """

    distribution: WeightDistribution
    sampled: Literal["", "outputs", "rows", "factors", "weight"]
    reason: str
    _value: Tensor | None
    _factors: FactoredDraw | None
    _with_grad: bool
    _allows_outputs: bool
    _items: dict[int, "LazyWeight"]

    def __new__(cls, distribution: WeightDistribution, use: SiteUse) -> Self:
        weight = cls._make(distribution._first_parameter, distribution.event_shape, use)
        weight.distribution = distribution
        weight.sampled, weight.reason = "", "a call that is not read as a linear map"
        weight._value = weight._factors = None
        weight._with_grad = torch.is_grad_enabled()  # the first use may be under `no_grad`
        weight._allows_outputs = use.allows_outputs
        weight._items = {}
        return weight

    @property
    def is_drawn(self) -> bool:
        """Whether a weight was sampled, as a tensor or in factors."""
        return self._value is not None or self._factors is not None

    @property
    def used_items(self) -> list["LazyWeight"]:
        """The used weights of a stack."""
        return [item for item in self._items.values() if item.sampled]

    def item_of_stack(self, index: int) -> WeightPlaceholder | None:
        """Return one weight of a stack of matrices that are independent, else None."""
        if self._gave_outputs:
            self._refuse_second_use()
        if not self._may_sample_outputs(None):
            return None
        if index not in self._items:
            stack = Arrangement.of_dims(tuple(range(self.dim())), tuple(self.shape), stack=1)
            stacked = self.distribution.rearranged(stack)
            if not isinstance(stacked, IndependentWeight):
                return None
            self._items[index] = LazyWeight(stacked._item(index), self.use)
        return self._items[index]

    def draw(self) -> Tensor:
        """Return the weight, sampled at the first call and kept."""
        self._refuse_second_use()
        return self.draw_for_density()

    def draw_for_density(self) -> Tensor:
        """Return the weight, independent of outputs that were sampled in its place.

        For an objective that is linear in each log density, which needs no joint sample of both.
        """
        if self._value is None:
            with torch.set_grad_enabled(self._with_grad):
                factors = self._factors
                self._value = factors.weight() if factors else self.distribution.rsample()
            self.sampled = self.sampled or "weight"
        return self._value

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        if self._value is not None:
            return repr(self._value)
        state = f"its {self.sampled} were drawn" if self._gave_outputs else "not drawn yet"
        return f"LazyWeight(site='{self.use.name}', shape={tuple(self.shape)}, {state})"

    def __format__(self, format_spec: str) -> str:
        """Show the placeholder, unless a format asks for the number of a single element."""
        return format(self.draw(), format_spec) if format_spec else repr(self)

    def sample_outputs(self, call: Call) -> Tensor | None:
        if isinstance(call, Application):
            return self._apply(call)
        if not self._may_sample_outputs_of(call):
            return None
        if isinstance(call, FactorApplication):
            self._refuse_second_use()
            self.sampled = "outputs"
            return call.function(call.x, self.distribution.rsample(call.x.shape[:1]))
        rows = self.distribution.rows(call.indices)
        if rows is None:
            return None
        self._refuse_second_use()
        self.sampled = "rows"
        draws: Tensor = rows.rsample()
        if self._needs_exact(call):
            draws = call.share_draws(draws)
        return call.shape_outputs(draws)

    def _apply(self, application: Application) -> Tensor | None:
        """Apply the weight in the cheapest supported way, or return None if that needs the weight."""
        distribution, arrangement = self.distribution, application.arrangement
        if arrangement is not None:
            rearranged = distribution.rearranged(arrangement)
            if rearranged is None:
                self.reason = "another order of dimensions, which its structure does not survive"
                return None
            distribution = rearranged
        is_exact = self._needs_exact(application)
        for way in distribution.ways_to_apply(application.linear_map, application.x):
            if way == "outputs" and self._may_sample_outputs_of(application):
                if distribution.has_exact_positions or not is_exact:
                    return self._sample_image(application, distribution.image_under)
                is_independent = isinstance(distribution, IndependentWeight)
                if self.use.local_reparam == "flipout" and is_independent:
                    return self._sample_image(application, partial(flipout, distribution))
            if way == "factors" and arrangement is None and self.sampled in ("", "factors"):
                return self._apply_factors(application)
            if way == "weight":
                break
        reasons = {
            "several positions of an example": is_exact,
            "initialized without several observed examples": self._is_uncompared(application),
            "cheaper for its structure in this layer": True,
        }
        self.reason = next(reason for reason, holds in reasons.items() if holds)
        return None

    def _sample_image(
        self, application: Application, image_under: Callable[[LinearMap, Tensor, Any], Any]
    ) -> Tensor:
        """Sample outputs of a linear map with a bias, by their distribution or by flipout.

        A lazy bias with independent elements adds its variance to independent outputs of one position.
        Any other is sampled once for each example.
        """
        linear_map, x, _, bias, _ = application
        self._refuse_second_use()
        q = None
        if isinstance(bias, LazyWeight) and bias._may_sample_outputs(x):
            bias._refuse_second_use()
            bias.sampled, q = "outputs", bias.distribution
            bias = q.mean
        image, noise = image_under(linear_map, x, as_drawn(bias)), None
        is_one = isinstance(image, NormalOutputs) and not linear_map.has_positions(x)
        if is_one and isinstance(q, IndependentWeight):
            image = NormalOutputs(linear_map, image.loc, image.variance + q.variance)
        elif q is not None:
            noise = _sample_noise(q, linear_map, x)
        outputs = image if isinstance(image, Tensor) else image.rsample()
        self.sampled = "outputs"
        return _in_layer_dtype(outputs if noise is None else outputs + noise, x, self.dtype)

    def _apply_factors(self, application: Application) -> Tensor:
        """Apply a sample of the weight in factors, the same in each use."""
        self._refuse_second_use()
        if self._factors is None:
            assert isinstance(self.distribution, FactoredWeight)
            with torch.set_grad_enabled(self._with_grad):
                self._factors = self.distribution.draw_factored()
            self.sampled = "factors"
        linear_map, x, _, bias, _ = application
        return self._factors.apply(linear_map, as_drawn(x), as_drawn(bias))

    def _may_sample_outputs(self, x: Any) -> bool:
        return self._allows_outputs and not self.is_drawn and not isinstance(x, WeightPlaceholder)

    def _may_sample_outputs_of(self, call: Call) -> bool:
        return self._may_sample_outputs(call.x) and not self._is_uncompared(call)

    def _needs_exact(self, call: Application | Lookup) -> bool:
        """Whether sampled outputs would be approximate here although exact ones are required."""
        return self.use.local_reparam in {"exact", "flipout"} and call.has_positions

    def _is_uncompared(self, call: Call) -> bool:
        """Whether the observations of these examples may interact, as far as runs have shown."""
        return self.use.is_uncompared and call.num_examples > 1

    @property
    def _gave_outputs(self) -> bool:
        return self.sampled in ("outputs", "rows")

    def _refuse_second_use(self) -> None:
        if not (self._gave_outputs or self.used_items):
            return
        if inside_backward():
            raise RuntimeError(
                f"The backward pass computes a use of the weight at site '{self.use.name}' again, which "
                "the pass that counted its uses did not do, so that it was not drawn beforehand. Call "
                "`guide.initialize(...)` in the mode in which the net takes activation checkpoints."
            )
        raise RuntimeError(
            f"The model uses the weight at site '{self.use.name}' more often in this pass than "
            "in the pass in which its uses were counted, after its outputs were drawn. A "
            "weight that is used more than once must be drawn: call `guide.initialize(...)` "
            "with arguments that take this path, or, to replay one trace of the guide several "
            "times, pass `local_reparam=False` to the guide."
        )


class LazySlice(WeightPlaceholder):
    """A weight or its bias, as a slice of a lazily sampled joint weight ``(out, in + 1)``.

    A linear map with both samples outputs from the image of the joint distribution.
    """

    whole: LazyWeight
    _take: Callable[[Tensor], Tensor]

    def __new__(
        cls, whole: LazyWeight, shape: torch.Size, take: Callable[[Tensor], Tensor], use: SiteUse
    ) -> Self:
        return cls._make(whole, shape, use, whole=whole, _take=take)

    def draw(self) -> Tensor:
        return self._take(self.whole.draw())

    def sample_outputs(self, call: Call) -> Tensor | None:
        """Apply the joint weight if the bias of the call is the other slice."""
        if not isinstance(call, Application) or call.arrangement is not None:
            return None
        linear_map, x, _, bias, _ = call
        has_both = isinstance(bias, LazySlice) and bias.whole is self.whole
        if not has_both or isinstance(x, WeightPlaceholder):
            return None
        if isinstance(self.whole.distribution, FactoredWeight):
            linear_map = BiasColumnMap(linear_map)
        else:
            linear_map, x = linear_map.join_bias(x)
        return self.whole.sample_outputs(Application(linear_map, x, self.whole, None))


def _in_layer_dtype(outputs: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return outputs in the dtype of the layer; noise and biases may have a wider one."""
    if not autocasts(x):
        return outputs.to(dtype)
    if outputs.dtype == torch.float32:
        return outputs.to(torch.get_autocast_dtype(x.device.type))
    return outputs


def _sample_noise(q: WeightDistribution, linear_map: LinearMap, x: Tensor) -> Tensor:
    """Sample a bias around its mean for each example, in a shape that broadcasts over positions."""
    draw = q.rsample(x.shape[: x.dim() - linear_map.event_dim(x)]) - q.mean
    return draw.reshape(shape_per_example(linear_map, x, draw.shape[-1]))


class DelayDraws(Messenger):
    """A handler that delays the sampling of a guide's weights until the model uses them.

    The value of a site becomes a :class:`LazyWeight` if its distribution is a
    :class:`~pyro_structvi.distributions.WeightDistribution` and the model uses it once, or if its
    samples may be applied in factors. Sites in plates are sampled at once.

    For an objective that is linear in each log density, such as the ELBO: sampled outputs do not
    belong to a weight that is sampled later for a density, and importance weights combine the two.
    With ``always``, a pass uses none of the weights.

    Example:
        >>> import pyro
        >>> from pyro_structvi.distributions import MeanFieldNormal
        >>> q = MeanFieldNormal(torch.zeros(2, 3), torch.tensor(1.0))
        >>> infer = SiteRole(use=SiteUse("weight", count=1)).as_infer()
        >>> with DelayDraws():
        ...     type(pyro.sample("weight", q, infer=infer)).__name__
        'LazyWeight'
    """

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self._always = always

    def _pyro_sample(self, msg: Any) -> None:
        q, use = msg["fn"], SiteRole.of(msg).use
        if use is None or msg["value"] is not None:
            return
        if not isinstance(q, WeightDistribution) or q.batch_shape:
            return
        in_factors = isinstance(q, FactoredWeight) and not use.eager_reason
        if self._always or use.can_be_delayed or in_factors:
            msg["value"] = LazyWeight(q, use)
