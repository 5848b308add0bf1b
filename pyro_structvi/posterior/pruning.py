"""Pruning of a trained guide: elements become exactly zero, and stay zero in further fits."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn.utils import prune

from pyro_structvi._checks import Share, checked
from pyro_structvi.sites.site_posterior import SitePosterior
from pyro_structvi.sites.structured import StructuredGuide, check_one_posterior
from pyro_structvi.structures.inducing.family import InducingWeights
from pyro_structvi.structures.mean_field import MeanField, PrunedMeanField

_FACTORS = ("row_factor", "column_factor")


@dataclass(frozen=True)
class PruningReport:
    """Result of pruning a guide.

    Attributes:
        totals: Number of prunable elements, by site: entries of the factors of inducing weights, or
            weights, which have a mean and a standard deviation.
        left: Number of remaining elements, by site.
        num_parameters: Number of remaining parameters of the whole guide.
    """

    totals: Mapping[str, int]
    left: Mapping[str, int]
    num_parameters: int

    @property
    def total(self) -> int:
        """Number of prunable elements over all sites."""
        return sum(self.totals.values())

    @property
    def total_left(self) -> int:
        """Number of remaining elements over all sites."""
        return sum(self.left.values())


@torch.no_grad()
@checked
def prune_inducing_factors(guide: StructuredGuide, amount: Share) -> PruningReport:
    """Set the smallest entries of the factors Z of all inducing weights to zero, and return counts.

    The prior of the weights does not change. The masks are from :mod:`torch.nn.utils.prune`, such as
    ``row_factor_mask``. Prune a new guide by ``amount=0`` before loading a state with them.

    Args:
        guide: A trained guide with inducing weights, changed in place.
        amount: The fraction of zeros over all sites, including earlier calls, at least 0 and below 1.

    Raises:
        ValueError: If ``amount`` is out of range or smaller than before, or the guide has no inducing
            weights.

    Example:
        >>> from pyro_structvi import Classifier, InducingWeightGuide, bayesianize
        >>> net = torch.nn.Linear(400, 400, bias=False)
        >>> model = Classifier(bayesianize(net, prior=0.1), num_data=10)
        >>> guide = InducingWeightGuide(model, inducing_shape=(16, 16))
        >>> prune_inducing_factors(guide, amount=0.5)
        PruningReport(totals={'net.weight': 12800}, left={'net.weight': 6400}, num_parameters=6945)

    References:
        Ritter, Kukla, Zhang and Li (2021), "Sparse uncertainty representation in deep learning with
        inducing weights", section 4.3.
    """
    posteriors = _posteriors_of(guide, InducingWeights)
    for posterior in posteriors:
        posterior()  # applies earlier masks to the current factors
    totals = {
        posterior.site.name: sum(posterior.value(name).numel() for name in _FACTORS)
        for posterior in posteriors
    }
    done = sum(map(_count_pruned, posteriors))
    further = _target(amount, sum(totals.values()), done) - done
    factors = [(posterior, name) for posterior in posteriors for name in _FACTORS]
    prune.global_unstructured(factors, prune.L1Unstructured, amount=further)
    return _report(guide, totals)


@torch.no_grad()
@checked
def prune_mean_field(guide: StructuredGuide, amount: Share) -> PruningReport:
    r"""Remove the weights with the smallest ``|mean| / standard deviation``, and return counts.

    The ratios of all weights and vectors with a :class:`~pyro_structvi.families.MeanField` posterior are
    ranked together. Pruned elements have mean and standard deviation zero and no KL, so the bound is a
    bound on the evidence of the smaller model. (A prior without a KL in closed form adds its density at
    zero, a constant.) The sites' family becomes :class:`~pyro_structvi.families.PrunedMeanField`. Prune
    a new guide by ``amount=0`` before loading its state.

    Args:
        guide: A trained guide with mean-field sites, changed in place.
        amount: As for :func:`prune_inducing_factors`.

    Raises:
        ValueError: If ``amount`` is out of range or smaller than before, or the guide has no mean-field
            weight or vector.

    Example:
        >>> from pyro_structvi import Classifier, MeanFieldGuide, bayesianize
        >>> net = torch.nn.Linear(400, 400, bias=False)
        >>> guide = MeanFieldGuide(Classifier(bayesianize(net, prior=0.1), num_data=10))
        >>> prune_mean_field(guide, amount=0.9)
        PruningReport(totals={'net.weight': 160000}, left={'net.weight': 16000}, num_parameters=32000)

    References:
        Graves (2011), "Practical variational inference for neural networks"; for FFG-W in Ritter,
        Kukla, Zhang and Li (2021), section 4.3.
    """
    posteriors = _posteriors_of(guide, MeanField)
    ratios, totals = [], {}
    for posterior in posteriors:
        normal = posterior()
        ratio = normal.mean.abs() / normal.scale
        ratios.append(ratio.nan_to_num(nan=-1.0).flatten())  # 0 / 0 for pruned elements
        totals[posterior.site.name] = ratio.numel()
    ranked = torch.cat(ratios)
    target = _target(amount, len(ranked), sum(map(_count_pruned, posteriors)))
    kept = torch.ones_like(ranked, dtype=torch.bool)
    kept[ranked.topk(target, largest=False).indices] = False
    for posterior, own in zip(posteriors, kept.split(list(totals.values())), strict=True):
        assert isinstance(posterior.family, MeanField)
        family = PrunedMeanField(posterior.family.max_scale)
        posterior.replace_family(family, kept=own.reshape(posterior.site.shape).clone())
    return _report(guide, totals)


def _posteriors_of(
    guide: StructuredGuide, kind: type[InducingWeights] | type[MeanField]
) -> list[SitePosterior]:
    """Return the posteriors of weights and vectors with a kind of family."""
    check_one_posterior(guide)
    every = list(guide._own_posteriors())
    found = [
        posterior
        for posterior in every
        if isinstance(posterior.family, kind) and posterior.site.shape and not posterior.site.plates
    ]
    if not found:
        raise ValueError(
            f"`guide` must have {kind.__name__} at a weight or a vector, but its families are "
            f"{list(dict.fromkeys(str(posterior.family) for posterior in every))}. Factors of inducing "
            "weights are pruned by `prune_inducing_factors`, mean field by `prune_mean_field`."
        )
    return found


def _target(amount: float, total: int, pruned: int) -> int:
    """Return the number of zeros among ``total`` elements; ``pruned`` are zero already."""
    target = round(amount * total)
    if target < pruned:
        raise ValueError(
            f"`amount` must be at least the {pruned / total:.3g} that is pruned already, but got "
            f"{amount!r}. Pruning is not undone; prune a copy, `copy.deepcopy(guide)`, to compare."
        )
    return target


def _count_pruned(posterior: SitePosterior) -> int:
    masks = [
        mask for name, mask in posterior.named_buffers() if name == "kept" or name.endswith("_mask")
    ]
    return sum(mask.numel() - int(mask.count_nonzero()) for mask in masks)


def _report(guide: StructuredGuide, totals: dict[str, int]) -> PruningReport:
    left = {name: total - _count_pruned(guide[name]) for name, total in totals.items()}
    num_parameters = sum(parameter.numel() for parameter in guide.parameters())
    for posterior in guide._own_posteriors():
        each = 2 if isinstance(posterior.family, PrunedMeanField) else 1
        num_parameters -= each * _count_pruned(posterior)
    return PruningReport(totals, left, num_parameters)
