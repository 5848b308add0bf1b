"""Handlers of trial runs, which see all sites of a model."""

from collections.abc import Callable
from typing import Any

from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample

from pyro_structvi._pyro import under_innermost
from pyro_structvi.sites.latent_site import bijection_at
from pyro_structvi.weights.torch_distributions import feasible_point


class ValuesWithoutDraws(Messenger):
    """Gives values to sites that cannot be sampled, such as sites with an improper prior."""

    def _pyro_sample(self, msg: Any) -> None:
        if msg["value"] is None and not site_is_subsample(msg):
            try:
                msg["value"] = msg["fn"](*msg["args"], **msg["kwargs"])
            except NotImplementedError:
                bijection_at(msg["name"], msg["fn"].support)
                msg["value"] = feasible_point(msg["fn"])


class TrialHandler(ValuesWithoutDraws):
    """A handler that also notes the sites that handlers of the model hide, such as ``poutine.block``."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[str] = set()  # the names of the sites that are not hidden

    def run(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a model under this handler."""
        with self:
            under_innermost(model, _HiddenSites(self))(*args, **kwargs)

    def note_hidden(self, msg: Any) -> None:
        """Note a site that the model hides."""
        raise NotImplementedError

    def _pyro_sample(self, msg: Any) -> None:
        self.known.add(msg["name"])
        super()._pyro_sample(msg)


class _HiddenSites(Messenger):
    """Passes on what a handler outside of the model's own does not see."""

    def __init__(self, outside: TrialHandler) -> None:
        super().__init__()
        self._outside = outside

    def _pyro_post_sample(self, msg: Any) -> None:
        is_intervened = msg.get("_intervener_id") is not None  # by ``poutine.do``, past any density
        if not (msg["name"] in self._outside.known or is_intervened or site_is_subsample(msg)):
            self._outside.note_hidden(msg)
