"""Placeholders of weights, lazily sampled weights, and the handler that delays sampling."""

from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_structvi._torch import METADATA, inside_backward, tree_map, without_storage
from pyro_structvi.maps.calls import (
    Application,
    Arrangement,
    FactorApplication,
    Lookup,
    Rewrite,
    parse_application,
)
from pyro_structvi.maps.linear_map import FactoredDraw, LinearMap, shape_per_example
from pyro_structvi.weights.outputs import autocasts, flipout
from pyro_structvi.weights.site_role import SiteRole, SiteUse
from pyro_structvi.weights.weight_distribution import (
    FactoredWeight,
    GaussianWeight,
    IndependentWeight,
    WeightDistribution,
)


class WeightPlaceholder(Tensor):
    """A tensor without storage that has shape, dtype and device; a value replaces it when it is used."""

    use: SiteUse

    @classmethod
    def _make(cls, like: Tensor, shape: torch.Size, use: SiteUse) -> Self:
        stand_in = without_storage(cls, shape, like)
        stand_in.use = use
        return stand_in

    def draw(self) -> Tensor:
        """Return the ordinary tensor that this one stands for."""
        raise NotImplementedError

    def materialize(self) -> Tensor:
        """Return the ordinary tensor to code that torch does not tell what it is used for."""
        return self.draw()

    def _draw_outputs(self, application: Application) -> Tensor | None:
        """Draw the outputs of a linear map without drawing the weight, where that is allowed."""
        return None

    def _draw_rows(self, lookup: Lookup) -> Tensor | None:
        """Draw the rows that are looked up without drawing the weight, where that is allowed."""
        return None

    def _draw_per_example(self, application: FactorApplication) -> Tensor | None:
        """Draw a factor for each example, where that is allowed."""
        return None

    def member(self, index: int) -> "WeightPlaceholder | None":
        """Return the stand-in for one weight of a stack, or None where the stack is drawn."""
        return None

    def _check_input(self, application: Application | Lookup | FactorApplication) -> None:
        """Explain an input that does not fit the weight, in place of an error from the kernel."""
        x = application.x
        attributes = ("device",) if isinstance(application, Lookup) else ("device", "dtype")
        for attribute in attributes:
            expected, got = getattr(self, attribute), getattr(x, attribute)
            if expected != got and not (attribute == "dtype" and autocasts(x)):
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
        if func in METADATA:
            return super().__torch_function__(func, types, args, kwargs)
        view = _read_view(func, args, kwargs)
        if view is not None:
            return view
        application = parse_application(func, args, kwargs)
        if isinstance(application, Rewrite):
            return application.compute()
        if application is not None and isinstance(application.weight, WeightPlaceholder):
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
        return func(*tree_map(as_drawn, args), **tree_map(as_drawn, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Reached where ``__torch_function__`` is switched off; the same without the exception."""
        return func(*tree_map(as_drawn, args), **tree_map(as_drawn, kwargs or {}))


class ArrangedView(WeightPlaceholder):
    """A weight with its dimensions in another order, such as a transpose, that is not drawn by that.

    Args:
        base: The weight.
        dims: Its dimensions in the order of the view.
    """

    base: WeightPlaceholder
    _dims: tuple[int, ...]

    def __new__(cls, base: WeightPlaceholder, dims: tuple[int, ...]) -> Self:
        """Make the tensor that stands for the view."""
        view = cls._make(base, torch.Size(base.shape[d] for d in dims), base.use)
        view.base, view._dims = base, dims
        return view

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        """Show the weight, which is not drawn for it, and the order."""
        return f"ArrangedView({self.base!r}, dims={self._dims})"

    def draw(self) -> Tensor:
        """Return the weight in this order."""
        return self.base.draw().permute(self._dims)

    def member(self, index: int) -> WeightPlaceholder | None:
        """Return a view of one weight of a stack."""
        member = self.base.member(index) if self._dims[0] == 0 else None
        if member is None:
            return None
        return ArrangedView(member, tuple(d - 1 for d in self._dims[1:]))

    def _draw_outputs(self, application: Application) -> Tensor | None:
        plain = Arrangement.of_dims(tuple(range(self.dim())), tuple(self.shape))
        arrangement = (application.arrangement or plain).after(self._dims)
        return self.base._draw_outputs(
            application._replace(weight=self.base, arrangement=arrangement)
        )


def as_drawn(value: Any) -> Any:
    """Return the ordinary tensor for a stand-in; any other value unchanged."""
    return value.draw() if isinstance(value, WeightPlaceholder) else value


def _read_view(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> WeightPlaceholder | None:
    """Return the stand-in for a view of a stand-in, or None for any other call."""
    base = args[0] if args else None
    if not isinstance(base, WeightPlaceholder):
        return None
    if func in _REORDERINGS and base.dim() > 1:
        # Seen by a tensor whose sizes all differ.
        seen = func(torch.empty(*range(base.dim()), device="meta"), *args[1:], **kwargs)
        return ArrangedView(base, tuple(seen.shape))
    if func is Tensor.__getitem__ and base.dim() > 2:
        index = args[1]
        is_scalar = isinstance(index, Tensor) and not index.dim() and not index.is_floating_point()
        if type(index) is int or (is_scalar and index.dtype != torch.bool):
            return base.member(range(len(base))[int(index)])
    return None


_REORDERINGS = {
    *(getattr(Tensor, name).__get__ for name in ("T", "mT")),
    *(Tensor.t, torch.t, Tensor.permute, torch.permute),
    *(Tensor.transpose, torch.transpose, Tensor.swapaxes, torch.swapaxes),
}


class LazyWeight(WeightPlaceholder):
    """A weight at a guide's sample site that is drawn when, and as what, it is needed.

    ``F.linear``, the convolutions and ``F.embedding`` hand themselves to it by torch's
    ``__torch_function__`` protocol; it answers with a draw of the *outputs*, independent for each
    example (local reparameterization). Anything else that touches it gets one ordinary draw of the
    weight, made once and kept. Its shape, dtype and device are known without a draw. After its outputs
    were drawn, any further use raises an error: it would be a second, independent weight.

    Args:
        distribution: The distribution of the weight.
        use: The record of the site it is at.

    Example:
        >>> from pyro_structvi.distributions import MeanFieldNormal
        >>> q = MeanFieldNormal(torch.zeros(2, 3), torch.tensor(1.0))
        >>> weight = LazyWeight(q, SiteUse("weight", count=1))
        >>> weight.is_drawn, float((weight - weight).abs().sum()), weight.is_drawn
        (False, 0.0, True)
        >>> weight = LazyWeight(q, SiteUse("weight", count=1))
        >>> torch.nn.functional.linear(torch.ones(5, 3), weight).shape, weight.is_drawn
        (torch.Size([5, 2]), False)
        >>> weight
        LazyWeight(site='weight', shape=(2, 3), its outputs were drawn)
    """

    distribution: WeightDistribution
    _drawn: Tensor | None
    _factored: FactoredDraw | None
    _given: Literal["outputs", "rows"] | None
    _why_drawn: str
    _with_grad: bool
    _members: dict[int, "LazyWeight"]

    def __new__(cls, distribution: WeightDistribution, use: SiteUse) -> Self:
        """Make the tensor that stands for a draw."""
        weight = cls._make(distribution._first_parameter, distribution.event_shape, use)
        weight.distribution = distribution
        weight._drawn = None
        weight._factored = None
        weight._given = None
        weight._why_drawn = "a call that is not read as a linear map"
        weight._with_grad = torch.is_grad_enabled()
        weight._members = {}
        return weight

    @property
    def is_drawn(self) -> bool:
        """Whether a weight has been drawn, as a tensor or in factors."""
        return self._drawn is not None or self._factored is not None

    @property
    def way(self) -> tuple[str, str]:
        """How it was used, as "outputs", "rows", "factors", "weight" or "nothing"; and why, if drawn."""
        if self._members_in_use:
            return self._members_in_use[0].way
        if self._given:
            return self._given, ""
        if self._was_formed:
            return "weight", self._why_drawn
        return ("factors" if self._factored is not None else "nothing"), ""

    @property
    def _members_in_use(self) -> list["LazyWeight"]:
        """The weights of a stack that have been used, and not only looked at."""
        return [each for each in self._members.values() if each._given or each.is_drawn]

    @property
    def _was_formed(self) -> bool:
        """Whether a weight has been drawn as a tensor from the start."""
        return self._drawn is not None and self._factored is None

    def member(self, index: int) -> WeightPlaceholder | None:
        """Return the weight at an index of the first dimension, undrawn, of a stack of matrices.

        Each has its own draw: they are used apart, so the distribution must let them be independent.
        """
        if self._given:
            self._refuse_second_use()
        if not self._may_give_outputs(None):
            return None
        if index not in self._members:
            dims = tuple(range(self.dim()))
            stack = Arrangement.of_dims(dims, tuple(self.shape), stack=1)
            stacked = self.distribution.rearranged(stack)
            if not isinstance(stacked, IndependentWeight):
                return None
            self._members[index] = LazyWeight(stacked._member(index), self.use)
        return self._members[index]

    def draw(self) -> Tensor:
        """Return the ordinary weight, drawn at the first call and kept.

        Raises:
            RuntimeError: If outputs were drawn in the weight's place before.
        """
        self._refuse_second_use()
        return self.draw_for_density()

    def draw_for_density(self) -> Tensor:
        """Return the ordinary weight, independent of outputs that were drawn in its place before.

        For an objective that is linear in each log density, and so needs no joint draw of the two.
        """
        if self._drawn is None:
            with torch.set_grad_enabled(self._with_grad):  # wherever it is first looked at
                factored = self._factored
                self._drawn = factored.weight() if factored else self.distribution.rsample()
        return self._drawn

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        """Show the weight if it has been drawn, without drawing it."""
        if self._drawn is not None:
            return repr(self._drawn)
        state = f"its {self._given} were drawn" if self._given else "not drawn yet"
        return f"LazyWeight(site='{self.use.name}', shape={tuple(self.shape)}, {state})"

    def __format__(self, format_spec: str) -> str:
        """Show what ``repr`` does, unless a format asks for the number of a single element."""
        return format(self.draw(), format_spec) if format_spec else repr(self)

    def _draw_outputs(self, application: Application) -> Tensor | None:
        """Apply the weight in the first way of its distribution that is allowed here.

        Returns None where only an ordinary weight will do.
        """
        distribution, arrangement = self.distribution, application.arrangement
        if arrangement is not None:
            rearranged = distribution.rearranged(arrangement)
            if rearranged is None:
                self._why_drawn = (
                    "another order of dimensions, which its structure does not survive"
                )
                return None
            distribution = rearranged
        for way in distribution.ways_to_apply(application.linear_map, application.x):
            if way == "outputs" and self._may_give_outputs(application.x):
                exact = distribution.has_exact_positions
                if exact or not self.use.requires_exact(application):
                    return self._draw_image(application, distribution, distribution.image_under)
                if self.use.local_reparam == "flipout" and isinstance(
                    distribution, IndependentWeight
                ):
                    return self._draw_image(application, distribution, None)
            if way == "factors" and arrangement is None and not self._was_formed:
                return self._apply_factored(application)
            if way == "weight":
                break
        is_exact = self.use.requires_exact(application)
        self._why_drawn = (
            "several positions of an example"
            if is_exact
            else "cheaper for its structure in this layer"
        )
        return None

    def _draw_image(
        self,
        application: Application,
        distribution: WeightDistribution,
        image_under: Callable[..., Any] | None,
    ) -> Tensor:
        """Draw outputs from the image of a distribution, or by flipout if that is None.

        A lazy bias with independent elements adds its variance to that of the outputs. A correlated one,
        and any where an example has several positions, is drawn once for each example.
        """
        linear_map, x, _, bias, _ = application
        self._refuse_second_use()
        lazy_bias, shift = None, None
        if isinstance(bias, LazyWeight) and bias._may_give_outputs(x):
            bias._refuse_second_use()
            lazy_bias = bias
            bias = lazy_bias.distribution
            if linear_map.has_positions(x) or not isinstance(bias, IndependentWeight):
                bias, shift = None, _draw_bias_per_example(lazy_bias, linear_map, x)
        if image_under is None:
            assert isinstance(distribution, GaussianWeight)
            outputs = flipout(distribution, linear_map, x, as_drawn(bias))
        else:
            outputs = image_under(linear_map, x, as_drawn(bias)).rsample()
        self._given = "outputs"
        if lazy_bias is not None:
            lazy_bias._given = "outputs"
        outputs = outputs if shift is None else outputs + shift
        return _in_layer_dtype(outputs, x, self.dtype)

    def _draw_rows(self, lookup: Lookup) -> Tensor | None:
        """Draw the rows that are looked up, or return None where only an ordinary weight will do."""
        image = self.distribution.rows(lookup.indices) if self._may_give_outputs(lookup.x) else None
        if image is None:
            return None
        self._refuse_second_use()
        rows: Tensor = image.rsample()
        if self.use.requires_exact(lookup):
            rows = lookup.share_draws(rows)
        self._given = "rows"
        return lookup.shape_outputs(rows)

    def _draw_per_example(self, application: FactorApplication) -> Tensor | None:
        """Apply a factor that is drawn for each example, or return None to apply one to all."""
        x = application.x
        if not self._may_give_outputs(x):
            return None
        self._refuse_second_use()
        self._given = "outputs"
        return application.function(x, self.distribution.rsample(x.shape[:1]))

    def _apply_factored(self, application: Application) -> Tensor:
        """Apply one draw of the weight in factors, the same at each use."""
        self._refuse_second_use()
        if self._factored is None:
            with torch.set_grad_enabled(self._with_grad):
                assert isinstance(self.distribution, FactoredWeight)
                self._factored = self.distribution.draw_factored()
        linear_map, x, _, bias, _ = application
        return self._factored.apply(linear_map, as_drawn(x), as_drawn(bias))

    def _may_give_outputs(self, x: Any) -> bool:
        """Whether this weight's part in the outputs for ``x`` may be drawn in its place."""
        return (
            self.use.allows_outputs and not self.is_drawn and not isinstance(x, WeightPlaceholder)
        )

    def _refuse_second_use(self) -> None:
        if inside_backward():
            raise RuntimeError(
                f"The backward pass computes a use of the weight at site '{self.use.name}' again, which "
                "the pass that counted its uses did not do, so that it was not drawn beforehand. Call "
                "`guide.initialize(...)` in the mode in which the net takes activation checkpoints."
            )
        if self._given or self._members_in_use:
            raise RuntimeError(
                f"The model uses the weight at site '{self.use.name}' more often in this pass than "
                "in the pass in which its uses were counted, after its outputs were drawn. A "
                "weight that is used more than once must be drawn: call `guide.initialize(...)` "
                "with arguments that take this path, or, to replay one trace of the guide several "
                "times, pass `local_reparam=False` to the guide."
            )


def _in_layer_dtype(outputs: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return outputs in the dtype that a layer's have; noise and biases may be in a wider one."""
    if not autocasts(x):
        return outputs.to(dtype)
    if outputs.dtype == torch.float32:
        return outputs.to(torch.get_autocast_dtype(x.device.type))
    return outputs


def _draw_bias_per_example(bias: LazyWeight, linear_map: LinearMap, x: Tensor) -> Tensor:
    """Draw one bias for each example, shaped to meet the outputs at every position."""
    draw = bias.distribution.rsample(x.shape[: x.dim() - linear_map.event_dim(x)])
    return draw.reshape(shape_per_example(linear_map, x, draw.shape[-1]))


class DelayDraws(Messenger):
    """Delays the draws of a guide's weights until the model uses them.

    The value of a sample site becomes a :class:`~pyro_structvi.weights.lazy.LazyWeight` if its
    distribution is a :class:`~pyro_structvi.distributions.WeightDistribution` and its role says that the
    model uses it once, or if a draw of it may be applied in factors. Sites in plates are drawn at once.

    For an objective that is linear in each log density, such as the ELBO: outputs drawn for the
    likelihood do not belong to a weight that is drawn later for a density. Importance weights combine
    the two, so they need drawn weights.

    Example:
        >>> import pyro
        >>> import torch
        >>> from pyro_structvi.distributions import MeanFieldNormal
        >>> from pyro_structvi.weights.site_role import SiteUse
        >>> q = MeanFieldNormal(torch.zeros(2, 3), torch.tensor(1.0))
        >>> infer = SiteRole(use=SiteUse("weight", count=1)).as_infer()
        >>> with DelayDraws():
        ...     type(pyro.sample("weight", q, infer=infer)).__name__
        'LazyWeight'
        >>> type(pyro.sample("weight", q, infer=infer)).__name__
        'Tensor'
    """

    def _pyro_sample(self, msg: Any) -> None:
        distribution, use = msg["fn"], SiteRole.of(msg).use
        if use is None or msg["value"] is not None or not self._waits(distribution, use):
            return
        if isinstance(distribution, WeightDistribution) and not distribution.batch_shape:
            msg["value"] = LazyWeight(distribution, use)

    def _waits(self, distribution: Any, use: SiteUse) -> bool:
        """Whether a weight may be drawn when it is used, or not at all."""
        can_wait = use.can_be_delayed or isinstance(distribution, FactoredWeight)
        return can_wait and not use.eager_reason


class LeaveUndrawn(DelayDraws):
    """Delays all draws of weights, for a pass that reads their posteriors and uses no weight."""

    def _waits(self, distribution: Any, use: SiteUse) -> bool:
        return True
