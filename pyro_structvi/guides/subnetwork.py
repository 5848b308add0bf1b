"""The guide of a posterior over a part of a net."""

from collections.abc import Callable, Mapping
from typing import Any, Unpack

from torch import Tensor

from pyro_structvi._checks import checked
from pyro_structvi.families import Family, FullCovariance, Subnetwork
from pyro_structvi.guides.options import GuideOptions
from pyro_structvi.guides.structured import StructuredGuide


class SubnetworkGuide(StructuredGuide):
    """A full covariance over chosen elements of all layers together, points for the others.

    Sites on part of the real line, such as a noise scale, and sites in plates get mean field.

    Fit a :class:`MAPGuide` first, choose elements with :mod:`pyro_structvi.subnetwork`, and fit this
    guide around it. To choose whole layers, write :class:`StructuredGuide` with the family
    :class:`~pyro_structvi.families.Subnetwork` for their pattern.

    Args:
        model: A ``PyroModule`` or any callable with latent sites.
        chosen: Which elements of each site, masks of booleans by site; all of none that is missing.
        center: The guide whose medians this one starts at, and keeps for what is not chosen.
        posterior: The family of the vector of chosen elements; a :class:`FullCovariance` when None.
        train_rest: Whether the other elements are trained along, as point estimates.
        **options: ``init_scale``, ``init_loc_fn``, ``local_reparam``; see :class:`StructuredGuide`.

    Raises:
        TypeError: If a mask is not a tensor of booleans.
        ValueError: If a mask has not its site's shape or, at the first call, fits no site; if nothing
            is chosen; or if both ``center`` and ``init_loc_fn`` are given.
        MemoryError: If the full covariance would take too much.

    Example:
        >>> import torch
        >>> from pyro_structvi import Classifier, MAPGuide, bayesianize, subnetwork
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=10)
        >>> center = MAPGuide(model)  # to be fitted
        >>> x = torch.randn(10, 4)
        >>> chosen = subnetwork.largest(subnetwork.laplace_variances(model, center, x), size=6)
        >>> guide = SubnetworkGuide(model, chosen, center)
        >>> sum(parameter.numel() for parameter in guide.parameters())
        27

    References:
        Daxberger, Nalisnick, Allingham, Antoran and Hernandez-Lobato (2021), "Bayesian deep learning
        via subnetwork inference", ICML.
    """

    @checked
    def __init__(
        self,
        model: Callable[..., Any],
        chosen: Mapping[str, Tensor],
        center: StructuredGuide | None = None,
        *,
        posterior: Family | None = None,
        train_rest: bool = False,
        **options: Unpack[GuideOptions],
    ) -> None:
        if center is not None:
            if options.get("init_loc_fn") is not None:
                raise ValueError("Give one of `center` and `init_loc_fn`, but got both.")
            values = center.median()
            if not chosen.keys() <= values.keys():
                raise ValueError(
                    f"`center` must be a guide of the same model, but of the sites of `chosen`, "
                    f"{list(chosen)}, it has only {[name for name in chosen if name in values]}."
                )
            options["init_loc_fn"] = lambda site: values.get(site["name"])
        family = Subnetwork(
            chosen, FullCovariance() if posterior is None else posterior, train_rest
        )
        super().__init__(model, {"*": family}, **options)

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """Do as :meth:`StructuredGuide.initialize` does, and check that every mask has a site."""
        super().initialize(*args, **kwargs)
        family = self.families["*"]
        assert isinstance(family, Subnetwork)
        chosen = family.chosen or {}
        served = [
            name for name in chosen if name in self and isinstance(self[name].family, Subnetwork)
        ]
        missing = [name for name in chosen if name not in served]
        if missing:
            raise ValueError(
                f"`chosen` has masks for {missing}, but of the model's sites {self.site_names} only "
                "those with real values, in no plate, can be chosen from."
            )
