"""The guide with global inducing points, which correlates layers."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from pyro_structvi._checks import Count, brief, checked, naming
from pyro_structvi.linalg.matrices import autocast_off
from pyro_structvi.sites.family import Family, GuideOptions
from pyro_structvi.sites.finding import check_runs_on_inputs, separate_randomness
from pyro_structvi.sites.site_posterior import (
    Coupling,
    SitePosterior,
    couple,
    median_of,
    module_key,
)
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.structures.global_inducing.family import GlobalInducing, Propagation, Run
from pyro_structvi.structures.matrix_normal import MatrixNormalFamily

# Numbers of outputs with separate precisions, since a mean and a noise scale determine their weights to
# different degrees. A covariance is factored for each output; with more outputs, all share one.
OWN_PRECISIONS = range(2, 5)


class GlobalInducingGuide(StructuredGuide):
    r"""A posterior that correlates layers, by a run of the net on inducing points.

    A draw runs the net on the inducing points. Each weight is drawn from the posterior of a Bayesian
    linear regression of learned pseudo-outputs V on its inputs X, the outputs of the drawn earlier
    layers:

    .. math:: W_{i \cdot} \mid X \sim N(S X^\top \Lambda V_{\cdot i}, S), \qquad
        S^{-1} = \operatorname{diag}(s)^{-2} + X^\top \Lambda X.

    Later layers compensate for the variation of earlier ones, which is not possible with independent
    layers. Layers whose inputs do not depend on other weights have ``first_layer`` as family.

    The model must run on inputs alone, as for :func:`~pyro_structvi.predict`. A step runs the net once
    more, on the inducing points. For each layer it factors a matrix in double precision, with the size
    of the points or of the inputs, whichever is smaller; for two to four outputs, a matrix with the size
    of the inputs for each output. There is no local reparameterization.

    Args:
        model: A ``PyroModule`` or any callable with latent sites.
        inputs: The inducing points, inputs of the model ``(M, *input)`` such as a part of the data; or
            the maximum number to take from the batch of the guide's initial call. More points give a
            better posterior and a slower step.
        families: Families of sites that do not depend on the points, by patterns as in
            :class:`StructuredGuide`. An embedding, a grouped convolution and a weight that the net
            splits need one. Vectors and scalars have mean field.
        first_layer: The family of layers with the net's inputs; a matrix normal when None.
        train_inputs: Whether to train the points, if they are real numbers.
        join_bias: Whether a layer's bias is a further column of its weight, as by default.
        **options: ``init_scale``, also the initial standard deviation of pseudo-outputs;
            ``init_loc_fn``; ``create_plates``; see :class:`StructuredGuide`.

    Raises:
        ValueError: If a family couples sites or a site belongs to single examples, or for
            ``local_reparam=True``.
        TypeError: If ``first_layer`` does not support a layer.
        RuntimeError: If the net uses a weight without a family other than in a linear layer or
            convolution.

    Example:
        >>> from pyro_structvi import Regressor, bayesianize
        >>> x, y = torch.randn(20, 3), torch.randn(20, 1)
        >>> net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> model = Regressor(bayesianize(net, prior=1.0), num_data=20, noise_scale=0.1)
        >>> guide = GlobalInducingGuide(model, x[:10])
        >>> {name: tuple(value.shape) for name, value in guide["net.2.weight"].named_parameters()}
        {'log_scale': (9,), 'target': (10, 1), 'log_precision': (10,)}
        >>> guide["net.0.weight"].family
        MatrixNormalFamily()
        >>> guide.draw()["net.2.weight"].shape
        torch.Size([1, 8])

    References:
        Ober and Aitchison (2021), "Global inducing point variational posteriors for Bayesian neural
        networks and deep Gaussian processes", ICML.
    """

    @checked
    def __init__(
        self,
        model: Callable[..., Any],
        inputs: Tensor | Count = 500,
        families: Mapping[str, Family] | None = None,
        *,
        first_layer: Family | None = None,
        train_inputs: bool = False,
        join_bias: bool = True,
        **options: Unpack[GuideOptions],
    ) -> None:
        if options.setdefault("local_reparam", False) is not False:
            raise ValueError(
                "`local_reparam` must be False for a guide that draws each layer given the ones before, "
                f"but got {brief(options['local_reparam'])}. Leave it out."
            )
        own = GlobalInducing(join_bias=join_bias)
        super().__init__(model, {**(families or {}), "*": own}, **options)
        self._given_inputs, self.train_inputs = inputs, train_inputs
        self.first_layer = MatrixNormalFamily() if first_layer is None else first_layer
        self.inducing_inputs: Tensor | None = None
        if isinstance(inputs, Tensor) and self._uses:
            self._place(inputs)

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """Initialize as :class:`StructuredGuide`, and take the inducing points once."""
        if self.master is not None:
            raise NotImplementedError(
                "A GlobalInducingGuide runs the whole net, and cannot be a part of an AutoGuideList, "
                "which hides sites. Pass `families=` for the other sites instead."
            )
        super().initialize(*args, **kwargs)
        if self.inducing_inputs is None:
            inputs = self._given_inputs
            points = inputs if isinstance(inputs, Tensor) else self._first_of_batch(inputs, args)
            with self.warning_of_new_parameters():
                self._place(points)

    def _lacks(self, state: Mapping[str, Any], prefix: str) -> bool:
        """Whether a state dict has inducing points and the guide none; an error if sizes differ."""
        points, own = state.get(f"{prefix}inducing_inputs"), self.inducing_inputs
        if not self._uses or not isinstance(points, Tensor):
            return False
        if own is not None and points.shape != own.shape:
            raise RuntimeError(
                f"`state_dict` must have inducing points of shape {tuple(own.shape)}, as the guide, but "
                f"has a size mismatch for inducing_inputs, {tuple(points.shape)}. Load it into a new "
                "`GlobalInducingGuide(model)` before its first call, which takes the points of the "
                "state dict. Nothing was loaded."
            )
        return own is None

    def _make_lacking(self, state: Mapping[str, Any], prefix: str) -> None:
        """Take the inducing points of a state dict."""
        points: Tensor = state[f"{prefix}inducing_inputs"]
        like = next(value for _, value in self.named_parameters())
        self._place(points.to(like if points.is_floating_point() else like.device))

    def options(self) -> dict[str, Any]:
        """Return the arguments of :meth:`from_options`; a ``ValueError`` without inducing points."""
        if self.inducing_inputs is None:
            raise ValueError(
                "`guide` must have its inducing points, but it takes them from the first batch. Fit the "
                "guide, or call `guide.initialize(...)` with the model's arguments, first."
            )
        options = super().options()
        families, changed = dict(options["families"]), options["changed"]
        own = families.pop("*")
        return options | {
            "families": families,
            "changed": {name: each for name, each in changed.items() if each != self.first_layer},
            "inputs": self.inducing_inputs,
            "first_layer": self.first_layer,
            "train_inputs": self.train_inputs,
            "join_bias": own.join_bias,
        }

    @staticmethod
    def _first_of_batch(count: int, args: tuple[Any, ...]) -> Tensor:
        if not (args and isinstance(args[0], Tensor) and args[0].dim()):
            got = brief(args[0]) if args else "no argument"
            raise ValueError(
                "`inputs` can be a number where the model's first argument is a tensor of examples, but "
                f"it is {got}. Pass the inducing points themselves."
            )
        return args[0][:count]

    def _place(self, inputs: Tensor) -> None:
        """Make the parameters that depend on the points; on an error make none."""
        if not (inputs.dim() and len(inputs)):
            raise ValueError(
                "`inputs` must hold at least one inducing point, as (M, *input), but got a tensor of "
                f"shape {tuple(inputs.shape)}. Pass some inputs of the data, such as `x[:100]`."
            )
        own, others = list[SitePosterior](), list[SitePosterior]()
        for each in self._own_posteriors():
            (own if isinstance(each.family, GlobalInducing) else others).append(each)
        with torch.no_grad():
            values = self._check_others(others)
        behind = self._rows_of_layers_behind_others(own, values, inputs)
        # All of them before one is put in place, since a family may refuse.
        made = [self._make_first(each) for each in own if each.site.name not in behind]
        for posterior in made:
            self.posteriors[module_key(posterior.site.name)] = posterior
        for name, rows in behind.items():
            posterior = self[name]
            start = posterior.release("loc").flatten(1)
            with autocast_off(start):
                posterior.put("target", rows.to(start) @ start.mT)
            outputs = [len(start)] if len(start) in OWN_PRECISIONS else []
            precision = start.new_full([len(rows), *outputs], -2 * math.log(self.init_scale))
            posterior.put("log_precision", precision)
        points = inputs.detach().clone()
        if self.train_inputs and points.is_floating_point():
            self.inducing_inputs = nn.Parameter(points)
        else:
            del self.inducing_inputs
            self.register_buffer("inducing_inputs", points)

    def _rows_of_layers_behind_others(
        self, own: list[SitePosterior], others: Mapping[str, Tensor], inputs: Tensor
    ) -> dict[str, Tensor]:
        """Return the inputs of weights that depend on other weights, in a run with initial weights."""
        starts = {each.site.name: each.value("loc").detach().requires_grad_() for each in own}
        values = {name: value.detach().requires_grad_() for name, value in others.items()}
        met: dict[str, Tensor] = {}

        def draw(name: str, rows: Tensor) -> Tensor:
            if torch.is_grad_enabled():  # not inside a custom autograd function
                met[name] = rows
            return starts[name]

        check_runs_on_inputs(self.needed_model, (inputs,))
        with naming("inputs", inputs), separate_randomness(), torch.enable_grad():
            Run(own, draw, values).run(self.needed_model, inputs)
        missing = [name for name in starts if name not in met]
        if missing:
            raise RuntimeError(
                f"The weights {missing} have no inputs when the model runs on the inducing points. "
                "Give these sites another family, as in `families={'name': MeanField()}`."
            )
        random = [*starts.values(), *values.values()]
        return {name: rows.detach() for name, rows in met.items() if _depends_on(rows, random)}

    def _check_others(self, others: Iterable[SitePosterior]) -> dict[str, Tensor]:
        """Return the initial values of sites with other families, or raise if these couple sites."""
        together = [name for each in super()._couplings() for name in each.sites]
        if together or self.local_site_names:
            wrong = together or self.local_site_names
            why = "are drawn jointly" if together else "belong to single examples"
            raise ValueError(
                f"The sites {wrong} {why}, which a GlobalInducingGuide does not support. Give them a "
                "family with independent sites, such as MeanField()."
            )
        medians = (each.site.split(median_of(each())) for each in others)
        return {name: value for values in medians for name, value in values.items()}

    def _make_first(self, posterior: SitePosterior) -> SitePosterior:
        family, site = self.first_layer, posterior.site
        if not family.fits(site) or couple(family, {}, self.init_scale) is not None:
            raise TypeError(
                "`first_layer` must be a family of one weight, such as MatrixNormalFamily(), but got "
                f"{family} for the site '{site.name}' of shape {tuple(site.shape)}."
            )
        start = family.init(site, posterior.value("loc").detach(), self._scale_at(site))
        return SitePosterior(family, site, start)

    def _couplings(self) -> Iterable[Coupling]:  # type: ignore[override]
        if self.inducing_inputs is None:
            return
        yield Propagation([*self._own_posteriors()], self.needed_model, self.inducing_inputs)


def _depends_on(rows: Tensor, values: list[Tensor]) -> bool:
    """Whether a graph of gradients leads to one of its leaves."""
    # It is walked and not run, since a backward pass would compute activation checkpoints again.
    leaves = {id(value) for value in values}
    if id(rows) in leaves:
        return True
    nodes, known = [rows.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in known:
            continue
        if id(getattr(node, "variable", None)) in leaves:
            return True
        known.add(node)
        nodes += [each for each, _ in node.next_functions]
    return False
