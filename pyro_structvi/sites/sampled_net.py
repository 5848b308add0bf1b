"""Nets and functions with weights of the posterior, and blocks of code with one sample."""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Size, Tensor, nn
from torch.func import functional_call

from pyro_structvi._checks import Count, brief, checked, shape_text
from pyro_structvi._pyro import declared_name, declared_samples, make_plain_module, unwrapped
from pyro_structvi._torch import compute_by_hooks, map_draws, own_tensors, remove_hooks
from pyro_structvi.nn.likelihood import Likelihood, read_output
from pyro_structvi.nn.padding import has_padding_row, write_padding_row
from pyro_structvi.nn.priors import ScaledPrior, TiedPrior
from pyro_structvi.nn.random_module import (
    PASS_HOOKS,
    frozen_names,
    keep_priors_only,
    prior_buffers,
    random_modules,
)
from pyro_structvi.sites.finding import in_evaluation
from pyro_structvi.sites.site_posterior import module_key, stack_draws
from pyro_structvi.weights.site_role import SiteRole, SiteUse


@checked
def to_net(self: Any, draw: Mapping[str, Tensor] | None = None) -> nn.Module:
    """Return a copy of the net in its original class, with weights of the posterior.

    They are values by site, as from :meth:`draw`; medians when None. Layers of :class:`RankOne` and
    :class:`WalshHadamard` keep their class, with their factors as parameters. The net of a model with
    ``standardize`` has inputs and outputs in standard units. An embedding has its row for padding in its
    weight; in a buffer ``padding_row`` if the net reads that weight itself, too, or has not run yet.

    Raises:
        TypeError: If the model has no single net that :func:`bayesianize` returned.
        ValueError: If a site of the net has no value, or one of another shape; if ``draw`` is None for a
            mixture or an ensemble.

    Example:
        >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize
        >>> guide = MeanFieldGuide(Regressor(bayesianize(nn.Linear(3, 1)), 10, 0.1))
        >>> guide.to_net()
        Linear(in_features=3, out_features=1, bias=True)
    """
    model = unwrapped(self.needed_model)
    found = [model.net] if isinstance(model, Likelihood) else [*random_modules(model)]
    if len(found) != 1:
        raise TypeError(
            "`to_net` needs a model with one net that `bayesianize` returned, but its model is "
            f"{brief(model)} with {len(found)} of them. Make the guide of a `Classifier`, a `Regressor` "
            "or a module around one net."
        )
    if draw is None and (self.num_members > 1 or has_members(self)):
        raise ValueError(
            "`draw` must be given for a mixture or an ensemble: the average of its members' weights is "
            "no net of the posterior. Write `guide.to_net(guide.draw())`, or for a mixture "
            "`guide.best.to_net()`."
        )
    values = self.median() if draw is None else draw
    memo: dict[int, Any] = {}  # values that need no copy
    for module in found[0].modules():
        starts = vars(module).get("initial_values", {}).values()
        buffers = dict(prior_buffers(module)).values()
        memo |= {id(value): value for value in (*starts, *buffers)}
    copied: nn.Module = copy.deepcopy(found[0], memo)
    made: dict[Any, nn.Parameter] = {}
    parameters = [(module, _parameters_of(module, made, values)) for module in copied.modules()]
    for module, own in parameters:
        if has_padding_row(module) and _is_only_looked_up(self.uses, module):
            write_padding_row(module, own)
        _make_plain(module, own)
    return copied


def has_members(guide: Any) -> bool:
    """Whether the posterior of a site is an ensemble."""
    return any(getattr(each(), "is_mixture", False) for each in guide.all_posteriors())


@checked
def sampled(self: Any, draw: Mapping[str, Tensor] | None = None) -> "FixedDraw":
    """Use one sample of the posterior in all calls of the model in a block.

    The sample has values by site; None for a new one of :meth:`draw`. It is differentiable by the
    parameters of the guide. Guides and :func:`predict` sample as usual inside of the block.

    Returns:
        A context manager that returns the values.

    Raises:
        ValueError: If a site has no value, or one of another shape than the model's.

    Example:
        >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize
        >>> model = Regressor(bayesianize(nn.Linear(3, 1)), 10, 0.1)
        >>> x = torch.ones(5, 3)
        >>> with MeanFieldGuide(model).sampled():
        ...     torch.equal(model.net(x), model.net(x))
        True
    """
    values = self.draw() if draw is None else draw
    missing = {*self.site_names} - {*self.local_site_names} - {*values}
    if missing:
        raise ValueError(
            f"`draw` must have a value for each site, but {sorted(missing)} are missing. Pass one draw, "
            "as `guide.draw()` returns it."
        )
    return FixedDraw(values)


class FixedDraw(Messenger):
    """A handler that gives values to the sites of a model, not of a guide, that have none."""

    fixes_draw = True

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values = values

    def __enter__(self) -> Mapping[str, Tensor]:
        super().__enter__()
        return self.values

    def _pyro_sample(self, msg: Any) -> None:
        value, role = self.values.get(msg["name"]), SiteRole.of(msg)
        if value is None or msg["value"] is not None or role.use is not None or role.is_slice:
            return
        _check_value(msg["name"], value, msg["fn"].shape())
        msg["value"] = value


class SampledFunctions(nn.Module):
    """S functions of one net, each with a sample of all weights, in one pass of ``vmap``.

    The weights are buffers, so the module moves between devices and has a state dict. It is
    differentiable in its inputs, and ``torch.export`` takes it as one graph: of one batch size for nets
    with embeddings, pooling or normalization, and of any size for others. Frozen parameters and
    buffers are kept once, and layers before the first sampled weight run once for all functions.

    Args:
        nets: Plain nets of one class, with separate weights, and equal frozen parameters and buffers.
        output: From the return value of a net to a tensor, as of a likelihood.
    """

    def __init__(
        self, nets: Iterable[nn.Module], output: Callable[[Any], Tensor] | None = None
    ) -> None:
        super().__init__()
        self._output = output
        each: list[dict[str, Tensor]] = []
        for net in nets:  # one at a time, each freed before the next is made
            if not each:
                self._net = (net,)  # in a tuple, so that its weights are no state of this module
            weights = (pair for pair in net.named_parameters() if pair[1].requires_grad)
            each.append({name: weight.detach() for name, weight in weights})
        net, stacked = self._net[0], stack_draws(each)
        others = (*net.named_parameters(), *net.named_buffers())
        shared = {name: value for name, value in others if name not in stacked}
        self._stacked, self._shared = [*stacked], [*shared]
        # Each place of a tied tensor. Torch's own search names shared modules several times, and then
        # leaves the tensors of a call in them.
        names = {id(value): name for name, value in others}
        self._places = {
            f"{path}.{attribute}".removeprefix("."): names[id(value)]
            for path, module in net.named_modules()
            for attribute, value in own_tensors(module).items()
        }
        for name, value in {**stacked, **shared}.items():
            self.register_buffer(module_key(name), value.detach())
        self.eval()  # as the nets are

    def __len__(self) -> int:
        return len(self.get_buffer(module_key(self._stacked[0])))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the outputs of each function, ``(S, *output)``, given the arguments of the net.

        Raises:
            RuntimeError: If ``torch.func.vmap`` cannot map over the net, as over an LSTM.
        """
        stacked, shared = (
            {name: self.get_buffer(module_key(name)) for name in names}
            for names in (self._stacked, self._shared)
        )

        def output(state: Mapping[str, Tensor]) -> Tensor:
            values = {**shared, **state}
            own = {place: values[name] for place, name in self._places.items()}
            result = functional_call(self._net[0], own, args, kwargs, tie_weights=False)
            return read_output(result, self._output)

        try:
            return map_draws(output, stacked, self._net[0].modules())
        except (KeyError, RuntimeError) as error:  # also of a net that changes its parts
            found = str(error).rstrip(".")
            raise RuntimeError(
                f"The net must run under `torch.func.vmap`, but it failed there: {found}. Call a net "
                "for each sample, `guide.to_net(guide.draw())`, unless the arguments are wrong."
            ) from error


@checked
def sample_functions(self: Any, num_samples: Count) -> SampledFunctions:
    """Return S functions of the net at samples of the posterior, a module with outputs ``(S, *output)``.

    They are the outputs of :meth:`to_net` in evaluation mode, for Thompson sampling, gradients by
    inputs, or deployment by ``torch.export`` and ONNX.

    Raises:
        TypeError: If the model has no single net that :func:`bayesianize` returned.
        RuntimeError: If the guide has no site yet.

    Example:
        >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize
        >>> guide = MeanFieldGuide(Regressor(bayesianize(nn.Linear(3, 1)), 10, 0.1))
        >>> functions = guide.sample_functions(4)
        >>> functions(torch.zeros(5, 3)).shape
        torch.Size([4, 5, 1])
    """
    draws = self.joint_posterior().draw_many(range(num_samples))
    each = ({name: draw[i] for name, draw in draws.items()} for i in range(num_samples))
    output = getattr(unwrapped(self.needed_model), "output", None)
    return SampledFunctions((to_net(self, draw).eval() for draw in each), output)


_ADDED = ("initial_values", "parameter_names", "frozen_parameters")


def _parameters_of(
    module: Any, made: dict[Any, nn.Parameter], values: Mapping[str, Tensor]
) -> dict[str, nn.Parameter]:
    """Return the parameters of a plain module in the order of the net; tied sites share a parameter."""
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    samples = declared_samples(module)
    scales = {prior.scale for prior in samples.values() if isinstance(prior, ScaledPrior)}
    for attribute in (name for name in samples if name not in scales):
        prior, site = samples[attribute], (module, attribute)
        if isinstance(prior, TiedPrior):
            site = prior.owner, prior.attribute
        name = declared_name(*site)
        if name not in made:
            start = vars(site[0]).get("initial_values", {}).get(site[1])
            value = _check_value(name, values.get(name), None if start is None else start.shape)
            made[name] = nn.Parameter(value.detach().clone())
        own[attribute] = made[name]
    for name in frozen_names(module):
        buffer = module.get_buffer(name)
        frozen = nn.Parameter(buffer, requires_grad=False)
        own[name] = made.setdefault((buffer.data_ptr(), buffer.shape, buffer.stride()), frozen)
    order = vars(module).get("parameter_names", ())
    return {name: own[name] for name in dict.fromkeys([*order, *own])}


def _is_only_looked_up(uses: Mapping[str, SiteUse], embedding: Any) -> bool:
    """Whether a run has shown that only lookups of an embedding use its weight."""
    use = uses.get(declared_name(embedding, "weight"))
    return use is not None and use.count is not None and not use.is_read


def _check_value(name: str, value: Tensor | None, shape: Size | None) -> Tensor:
    if value is None or (shape is not None and value.shape != shape):
        expected = "" if shape is None else f" of shape {shape_text(shape)}"
        got = "none" if value is None else shape_text(value.shape)
        raise ValueError(
            f"`draw` must have a value{expected} for the site '{name}', but got {got}. Pass one draw, "
            "as `guide.draw()` returns it."
        )
    return value


def _make_plain(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Restore the original class of a module, with parameters in place of sites and buffers."""
    removed = [*dict(prior_buffers(module)), *frozen_names(module)]
    samples, is_plain = [*declared_samples(module)], "parameter_names" in vars(module)
    remove_hooks(module, (*PASS_HOOKS, keep_priors_only))
    for name in _ADDED:
        vars(module).pop(name, None)
    make_plain_module(module)
    present = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    # A factor layer stays a PyroModule, which deletes a removed parameter from the param store.
    for name in (*removed, *(present if is_plain else samples)):
        delattr(module, name)
    for name, parameter in parameters.items():
        if is_plain or name not in present:
            setattr(module, name, parameter)
    with torch.no_grad(), in_evaluation([module]):
        compute_by_hooks(module)
