"""The family of global inducing points, and their propagation."""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import pyro.poutine as poutine
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_structvi._pyro import outside_plates
from pyro_structvi.maps.calls import Application, Call
from pyro_structvi.sites.family import MatrixFamily
from pyro_structvi.sites.finding import buffers_kept
from pyro_structvi.sites.latent_site import LatentSite
from pyro_structvi.sites.site_posterior import Coupling, How, SitePosterior, median_of
from pyro_structvi.structures.global_inducing.distribution import NormalGivenInputs, already_drawn
from pyro_structvi.weights.lazy import WeightPlaceholder, as_drawn
from pyro_structvi.weights.site_role import SiteUse


@dataclass(frozen=True)
class GlobalInducing(MatrixFamily):
    """A Bayesian linear regression of learned pseudo-outputs on a layer's inputs at inducing points.

    Parameters are ``target (rows, out)`` and ``log_precision (rows,)``, with a row for each inducing
    point and position, and ``log_scale (in,)``, the standard deviations without any row. Layers of
    two to four outputs, such as a mean and a noise scale, have ``log_precision (rows, out)``.
    """

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        """Return the initial weight, which determines the targets, and the prior's scales."""
        if loc.is_meta:
            raise NotImplementedError(
                "The number of parameters of a GlobalInducingGuide depends on its points. Make the "
                "guide with its points, and count `guide.parameters()`."
            )
        log_scale = loc.new_full((loc[0].numel(),), math.log(_scale(site.prior_scale)))
        if site.bias is not None:
            log_scale[-1] = math.log(_scale(site.bias.prior_scale))
        return {"loc": loc.clone(), "log_scale": log_scale}

    def distribution(self, site: LatentSite, **parameters: Tensor) -> NormalGivenInputs:
        if "target" not in parameters:
            raise RuntimeError(
                f"The weight at site '{site.name}' has no posterior before the inducing points are "
                "known. Train the guide, or call `guide.initialize(...)` with the model's arguments."
            )
        return NormalGivenInputs(site.shape, **parameters)

    def unit(self, site: LatentSite, name: str, value: Tensor) -> float:
        """Return the unit of steps: 1 for pseudo-outputs, which is about their scale in the prior."""
        return 1.0 if name == "target" else super().unit(site, name, value)


def _scale(prior_scale: float | None) -> float:
    return 1.0 if prior_scale is None else prior_scale


class DeferredSample:
    """A joint sample of a weight and its bias that depends on the first inputs of the weight."""

    def __init__(self, name: str, draw: Callable[[Application], dict[str, Tensor]]) -> None:
        self.name, self._draw = name, draw
        self._values: dict[str, Tensor] | None = None

    def sample(self, application: Application) -> None:
        if self._values is None:
            self._values = self._draw(application)

    def value(self, name: str) -> Tensor:
        """Return the value of a site, or raise if the weight was not applied to an input before."""
        if self._values is None:
            raise RuntimeError(
                f"The weight at site '{self.name}' is drawn given the inputs of a linear layer or "
                f"convolution, but the net uses '{name}' in another way first. Give it another family, "
                f"as by `families={{'{self.name}': MeanField()}}`."
            )
        return self._values[name]


class DeferredWeight(WeightPlaceholder):
    """A weight or bias of a :class:`DeferredSample`, like a tensor of its shape, dtype and device."""

    sample: DeferredSample
    _name: str

    def __new__(cls, sample: DeferredSample, name: str, like: Tensor) -> Self:
        return cls._make(like, like.shape, SiteUse(name), sample=sample, _name=name)

    def __repr__(self, **options: object) -> str:  # type: ignore[override]
        return f"DeferredWeight(site='{self._name}', shape={tuple(self.shape)})"

    def draw(self) -> Tensor:
        return self.sample.value(self._name)

    def sample_outputs(self, call: Call) -> None:
        """Sample the weight given the inputs; the call is then an ordinary one."""
        if isinstance(call, Application):
            self.sample.sample(call)


class Propagation(Coupling):
    """A run of the net on the inducing points, which draws each weight given its inputs."""

    def __init__(
        self, posteriors: Iterable[SitePosterior], model: Callable[..., Any] | None, inputs: Tensor
    ) -> None:
        self._posteriors = {each.site.name: each for each in posteriors}
        super().__init__(self._posteriors)
        self._run_on = model, inputs

    def condition(
        self, how: How, at: Mapping[str, Any], number: Tensor | int | None
    ) -> dict[str, Any]:
        if how == "marginals":
            raise NotImplementedError(
                f"The weights {list(self.sites)} depend on each other, and have no quantiles or moments "
                "in closed form. Take those of draws: `guide.draw()`."
            )
        model, inputs = self._run_on
        if model is None:
            raise RuntimeError(
                "This guide was unpickled without its model, which its draws run. Make a new guide from "
                "the model and call `new.load_state_dict(old.state_dict())`."
            )
        found: dict[str, Any] = {}

        def note(name: str, distribution: Any) -> Tensor:
            value = median_of(distribution) if how == "mean" else distribution.rsample()
            found[name] = already_drawn(distribution, value)
            return value

        own, others = list[SitePosterior](), dict[str, Tensor]()
        for name, each in self._posteriors.items():
            if isinstance(each.family, GlobalInducing):
                own.append(each)
            else:
                others |= each.site.split(note(name, at[name]))
        Run(own, lambda name, rows: note(name, at[name].condition(rows)), others).run(model, inputs)
        return found


class Run(Messenger):
    """Runs a model and draws each weight, by its site's name and its inputs, when these are known."""

    def __init__(
        self,
        own: Iterable[SitePosterior],
        draw: Callable[[str, Tensor], Tensor],
        others: Mapping[str, Tensor],
    ) -> None:
        super().__init__()
        self._draw = draw
        self._values: dict[str, Tensor] = dict(others)
        for posterior in own:
            site = posterior.site
            sample = DeferredSample(site.name, partial(self._meet, site))
            like = posterior.value("log_scale")
            for name, part in site.split(like.new_empty(site.shape)).items():
                self._values[name] = DeferredWeight(sample, name, part)

    def run(self, model: Callable[..., Any], inputs: Tensor) -> None:
        self._like = inputs
        with ExitStack() as stack:
            for context in (buffers_kept(model), outside_plates(), poutine.block(), self):
                stack.enter_context(context)
            model(inputs)

    def _pyro_sample(self, msg: Any) -> None:
        if msg["value"] is not None or site_is_subsample(msg):
            return
        value = self._values.get(msg["name"])
        # A site without a value is an observation, which is not used.
        msg["value"] = self._like.new_zeros(msg["fn"].shape()) if value is None else value

    def _meet(self, site: LatentSite, application: Application) -> dict[str, Tensor]:
        linear_map, x = application.linear_map, as_drawn(application.x)
        arrangement = application.arrangement
        if linear_map.groups > 1 or not (arrangement is None or arrangement.is_plain):
            raise RuntimeError(
                f"The weight at site '{site.name}' is transposed, stacked or in groups in the call that "
                "applies it, for which there is no regression here. Give it another family, as by "
                f"`families={{'{site.name}': MeanField()}}`."
            )
        if site.bias is not None:
            linear_map, x = linear_map.join_bias(x)
        size = site.shape[1:].numel()
        patches = linear_map.bank(x, torch.eye(size, dtype=x.dtype, device=x.device))
        rows = patches.movedim(linear_map.channel_dim, -1).reshape(-1, size)
        return site.split(self._draw(site.name, rows))
