"""Lazily sampled weights, and the handler that delays their sampling."""

from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_structvi._torch import inside_backward
from pyro_structvi.linalg.matrices import standard_normal
from pyro_structvi.maps.dense import BiasColumnMap
from pyro_structvi.maps.linear_map import FactoredDraw, LinearMap, shape_per_example
from pyro_structvi.maps.readings import Application, Arrangement, FactorApplication, Lookup
from pyro_structvi.weights.gaussian import GaussianWeight, IndependentWeight
from pyro_structvi.weights.outputs import autocasts
from pyro_structvi.weights.site_role import SiteRole, SiteUse
from pyro_structvi.weights.stand_in import WeightStandIn, as_drawn
from pyro_structvi.weights.weight_distribution import WeightDistribution


def flipout(
    q: GaussianWeight, linear_map: LinearMap, x: Tensor, bias: Tensor | None = None
) -> Tensor:
    r"""Draw the outputs of a map whose weight has independent elements, symmetric about their means.

    .. math:: y_n = M x_n + r_n \circ \Delta (s_n \circ x_n), \qquad \Delta = W - M

    with one draw of :math:`\Delta` and, for each example, signs r of the output channels and s of the
    input channels. The outputs of an example, at all positions, have the distribution that a drawn
    weight gives; those of different examples are uncorrelated given their inputs.

    Args:
        q: A distribution with ``has_independent_elements``.
        linear_map: A dense map or a convolution.
        x: Its input, the first dimension of which is the batch.
        bias: Nothing, or a tensor ``(out,)``.

    Returns:
        The outputs.

    Example:
        >>> from pyro_structvi.distributions import MeanFieldNormal
        >>> from pyro_structvi.maps import DenseMap
        >>> q = MeanFieldNormal(torch.zeros(2, 3), torch.tensor(1.0))
        >>> y = flipout(q, DenseMap(), torch.ones(4, 1, 3).expand(4, 2, 3))
        >>> bool((y[:, 0] == y[:, 1]).all()), bool((y[0] == y[1]).all())
        (True, False)

    References:
        Wen, Vicol, Ba, Tran and Grosse (2018), "Flipout: efficient pseudo-independent weight
        perturbations on mini-batches", Eq. 3.
    """
    channels = x.shape[linear_map.channel_dim]
    inputs = x * _signs(shape_per_example(linear_map, x, channels), x)
    perturbation = q.as_matrix(q.scale_noise(standard_normal(q.noise_shape, q.loc)))
    outputs = linear_map(inputs, perturbation)
    signs = _signs(shape_per_example(linear_map, x, q.event_shape[0]), outputs)
    return linear_map(x, q.as_matrix(q.loc), bias) + signs * outputs


def _signs(shape: list[int], like: Tensor) -> Tensor:
    return 2 * torch.randint(2, shape, dtype=like.dtype, device=like.device) - 1


class LazyWeight(WeightStandIn):
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

    def member(self, index: int) -> WeightStandIn | None:
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
                if exact or not self.use.asks_for_exact(application):
                    return self._draw_image(application, distribution, distribution.image_under)
                if self.use.local_reparam == "flipout" and distribution.has_independent_elements:
                    return self._draw_image(application, distribution, None)
            if way == "factors" and arrangement is None and not self._was_formed:
                return self._apply_factored(application)
        is_exact = self.use.asks_for_exact(application)
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

        The independent noise of a lazy bias adds its variance to that of the outputs. The rest of it,
        or all of it where an example has several positions, is drawn once for each example.
        """
        linear_map, x, _, bias, _ = application
        self._refuse_second_use()
        lazy_bias, shift = None, None
        if isinstance(bias, LazyWeight) and bias._may_give_outputs(x):
            bias._refuse_second_use()
            lazy_bias = bias
            if linear_map.has_positions(x):
                bias, shift = None, _draw_bias_per_example(lazy_bias, linear_map, x)
            else:
                bias, shift = lazy_bias.distribution.split_noise(x.shape[:-1])
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
        if self.use.asks_for_exact(lookup):
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
                self._factored = self.distribution.draw_factored()
        linear_map, x, _, bias, _ = application
        return self._factored.apply(linear_map, as_drawn(x), as_drawn(bias))

    def _may_give_outputs(self, x: Any) -> bool:
        """Whether this weight's part in the outputs for ``x`` may be drawn in its place."""
        return self.use.gives_outputs and not self.is_drawn and not isinstance(x, WeightStandIn)

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


class LazyPart(WeightStandIn):
    """A weight or its bias, as a part of a joint draw that has not been made yet.

    Where a linear map gets both parts of one draw, its outputs are drawn from the image of the joint
    distribution. Any other use takes the part out of an ordinary draw.

    Args:
        whole: The joint draw, ``(out, in + 1)``.
        shape: The shape of the part.
        take: Returns the part of a joint draw.
        use: The record of the part's own site.
    """

    whole: LazyWeight
    _take: Callable[[Tensor], Tensor]

    def __new__(
        cls, whole: LazyWeight, shape: torch.Size, take: Callable[[Tensor], Tensor], use: SiteUse
    ) -> Self:
        """Make the tensor that stands for the part."""
        part = cls._make(whole, shape, use)
        part.whole = whole
        part._take = take
        return part

    def draw(self) -> Tensor:
        """Return the part of the joint draw, which is made at the first call and kept."""
        return self._take(self.whole.draw())

    def _draw_outputs(self, application: Application) -> Tensor | None:
        bias, together = application.bias, application._replace(weight=self.whole, bias=None)
        linear_map, x = application.linear_map, application.x
        whole = bias.whole if isinstance(bias, LazyPart) else None
        is_other = whole is not self.whole or application.arrangement is not None
        if is_other or isinstance(x, WeightStandIn):
            return None
        if self.whole.distribution.takes_bias_column:
            linear_map = BiasColumnMap(linear_map)
        else:
            linear_map, x = linear_map.join_bias(x)
        return self.whole._draw_outputs(together._replace(linear_map=linear_map, x=x))


class Meeting:
    """What becomes of a weight, and of the bias that is drawn with it, at its first linear map.

    Args:
        name: The weight's site.
        draw: Returns the values of the sites, by name, for the call that applies the weight.
    """

    def __init__(self, name: str, draw: Callable[[Application], dict[str, Tensor]]) -> None:
        self.name, self._draw = name, draw
        self._values: dict[str, Tensor] | None = None
        self.has_failed = False

    def happen(self, application: Application) -> None:
        """Draw the weight, unless it was drawn before."""
        if self._values is None:
            self.has_failed = True
            self._values = self._draw(application)
            self.has_failed = False

    def value(self, name: str) -> Tensor:
        """Return the value of a site.

        Raises:
            RuntimeError: If the weight has met no input so far.
        """
        if self._values is None:
            self.has_failed = True
            raise RuntimeError(
                f"The weight at site '{self.name}' is drawn given the inputs of a linear layer or "
                f"convolution, but the net uses '{name}' in another way first. Give it another family, "
                f"as by `families={{'{self.name}': MeanField()}}`."
            )
        return self._values[name]


class MeetingWeight(WeightStandIn):
    """A weight or a bias that waits for the first input of the weight.

    Args:
        meeting: What happens then.
        name: The site that this stands for.
        value: A tensor of its shape, dtype and device.
    """

    meeting: Meeting
    _name: str

    def __new__(cls, meeting: Meeting, name: str, value: Tensor) -> Self:
        """Make the tensor that stands for a draw."""
        weight = cls._make(value, value.shape, SiteUse(name))
        weight.meeting, weight._name = meeting, name
        return weight

    def __repr__(self, **options: object) -> str:  # type: ignore[override]
        """Show the site and the shape."""
        return f"MeetingWeight(site='{self._name}', shape={tuple(self.shape)})"

    def draw(self) -> Tensor:
        """Return the ordinary tensor."""
        return self.meeting.value(self._name)

    def _draw_outputs(self, application: Application) -> Tensor | None:
        """Draw the weight, by which the call is then an ordinary one."""
        self.meeting.happen(application)
        return None


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
        can_wait = use.may_wait or getattr(distribution, "applies_in_factors", False)
        return can_wait and not use.drawn_first


class LeaveUndrawn(DelayDraws):
    """Delays all draws of weights, for a pass that reads their posteriors and uses no weight."""

    def _waits(self, distribution: Any, use: SiteUse) -> bool:
        return True
