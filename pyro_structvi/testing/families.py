"""The contract of families, checked on one site of a model."""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_structvi._torch import has_overlap
from pyro_structvi.nn.conversion import bayesianize
from pyro_structvi.nn.regressors import Regressor
from pyro_structvi.sites.family import Family
from pyro_structvi.sites.latent_site import LatentSite
from pyro_structvi.sites.sampled_net import has_members
from pyro_structvi.sites.site_posterior import couple, median_of
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.structures.points import PointEstimate
from pyro_structvi.testing.contracts import Contract, Leaf, fixed_seed, tensors_of
from pyro_structvi.testing.guides import check_state, differences, elbo_gradients
from pyro_structvi.testing.weights import MANY, check_density, linear
from pyro_structvi.weights.arguments import check_declared
from pyro_structvi.weights.weight_distribution import WeightDistribution

SCALE = 0.3  # standard deviations at the start
STARTS = 200
NEAR = 0.05  # relative error of a center
WEIGHT = "net.weight"


def check_family(
    family: Family,
    shape: Sequence[int] = (3, 4),
    *,
    start_tolerance: float = 0.15,
    points: Tensor | None = None,
    idle: Mapping[str, Tensor] = MappingProxyType({}),
    num_particles: int = 1,
) -> None:
    """Check that a family obeys the contract of ``Family`` on a weight of a linear layer.

    A family of vectors alone is checked as ``Subnetwork(posterior=family)``.

    The checks cover equality, ``repr`` and copies; refused options; the sites that ``fits`` accepts,
    such as filters and positive matrices; the starting values of ``init`` with memory, dtype, device,
    center and ``init_scale``; gradients of all parameters; and state dicts. The density is compared
    with draws where the distribution is no ``WeightDistribution``, which :func:`check_distribution`
    checks.

    Args:
        family: The family.
        shape: The shape ``(out, in)`` of the weight.
        start_tolerance: The relative tolerance of the average variance over random starts, compared
            with ``init_scale ** 2``. Other starts are compared exactly; a posterior without normal noise
            is left out.
        points: A mask of the elements of the weight without noise.
        idle: Masks of elements of parameters without an effect, by the name of the parameter.
        num_particles: The number of passes that reach all parameters, more than one if a pass uses a
            random part of them.

    Raises:
        AssertionError: If a rule is violated, with the rule, the expected value and the value got.

    Example:
        >>> from pyro_structvi.families import KTied
        >>> check_family(KTied(rank=2))
    """
    contract, size = Contract(repr(family)), torch.Size(shape)
    with fixed_seed():
        with contract.part("the object"):
            _check_object(contract, family)
        with contract.part("sites"):
            _check_sites(contract, family, size)
        with contract.part("starting values"):
            site = _guide(family, _model(size))[WEIGHT].site
            _check_start(contract, family, site)
            start = partial(_start_at, family, site)
            if _is_coupled(family):
                start = partial(_start_together, family, size, site)
            _check_scale(contract, site, start, start_tolerance, points)
            _check_dtypes(contract, family, size)
        with contract.part("gradients"):
            _check_moved(contract, family, site)
            _check_gradients(contract, family, size, idle, num_particles)
        with contract.part("state dicts"):
            random_start = lambda site: torch.randn(site["fn"].shape())  # noqa: E731
            check_state(contract, lambda: _guide(family, _model(size), init_loc_fn=random_start))


def _model(shape: torch.Size, dtype: torch.dtype | None = None) -> Regressor:
    net = nn.Linear(shape[1], shape[0], dtype=dtype)
    return Regressor(bayesianize(net, prior=1.0), num_data=20, noise_scale=0.5)


def _guide(family: Family, model: Regressor, **options: Any) -> StructuredGuide:
    """Return a guide with this family on the weight, and on the bias if they are joined."""
    return StructuredGuide(model, {WEIGHT: family, "*": PointEstimate()}, **options)


def _check_object(contract: Contract, family: Family) -> None:
    for twin in (copy.deepcopy(family), dataclasses.replace(family)):
        contract.equal("a family equals a copy with the same options", twin == family, True)
        contract.equal("a copy has the same `repr`", repr(twin), repr(family))
    is_frozen = type(family).__dataclass_params__.frozen  # type: ignore[attr-defined]
    contract.equal("a family is a frozen dataclass", is_frozen, True)
    for field in dataclasses.fields(family):
        contract.refuses(
            f"a bad value of the option `{field.name}` is refused by name",
            partial(dataclasses.replace, family, **{field.name: object()}),
            f"`{field.name}",
        )


def _check_sites(contract: Contract, family: Family, shape: torch.Size) -> None:
    fits = family.fits(LatentSite(WEIGHT, shape, len(shape), constraints.real, prior_scale=1.0))
    shown = f"a weight of shape {tuple(shape)}"
    rule = f"`fits` accepts {shown}; a family of vectors is checked as `Subnetwork(posterior=...)`"
    contract.equal(rule, fits, True)
    contract.equal("`needs` says in words which sites fit", isinstance(family.needs, str), True)
    counts = LatentSite("counts", torch.Size([3, 4]), 2, constraints.nonnegative_integer)
    contract.equal("`fits` refuses a discrete site", family.fits(counts), False)
    make = partial(LatentSite, prior_scale=1.0)
    for site in (
        make("a vector", shape[:1], 1, constraints.real),
        make("filters", torch.Size([*shape, 2]), 3, constraints.real),
        make("a batch of numbers", shape, 0, constraints.real),
        make("a batch of rows", shape, 1, constraints.real),
        make("a positive matrix", shape, 2, constraints.positive),
    ):
        accepted = family.fits(site)
        contract.equal(f"`fits` is True or False for {site.name}", type(accepted), bool)
        if accepted:
            with contract.part(f"{site.name}, which `fits` accepts"):
                _check_other_site(contract, family, site)


def _check_other_site(contract: Contract, family: Family, site: LatentSite) -> None:
    """Check shapes, support and starting values at a site that a family accepts."""
    q = family.distribution(site, **family.init(site, torch.rand(site.shape) + 0.5, SCALE))
    rule = f"`fits` accepts {site.name}, so `distribution` has its"
    contract.equal(f"{rule} shape", q.batch_shape + q.event_shape, site.shape)
    if _is_coupled(family):
        return  # a distribution given a value of the coupling
    contract.equal(f"{rule} event dimensions", len(q.event_shape), site.event_dim)
    inside = bool(site.support.check(q.sample(torch.Size([STARTS]))).all())
    contract.equal(f"`fits` accepts {site.name}, so draws are in its support", inside, True)
    _check_scale(contract, site, partial(_start_at, family, site))


def _check_start(contract: Contract, family: Family, site: LatentSite) -> None:
    loc = torch.randn(site.shape)
    before = loc.clone()
    here = family.init(site, loc, SCALE)
    contract.equal("`init` leaves `loc` as it is", torch.equal(loc, before), True)
    names = (*family.constants, *family.delayed)
    contract.equal("`constants` and `delayed` name tensors of `init`", {*names} - {*here}, set())
    for name, value in here.items():
        rule = f"elements of `{name}` share no memory, as after `expand`"
        contract.equal(rule, has_overlap(value), False)
    storages = [value.untyped_storage().data_ptr() for value in (loc, *here.values())]
    rule = "tensors of `init` share no memory with `loc` or each other"
    contract.equal(rule, len(set(storages)), len(storages))
    there = family.init(site, loc.to("meta"), SCALE)
    kinds, on_meta = (
        {name: (value.shape, value.dtype) for name, value in start.items()}
        for start in (here, there)
    )
    contract.equal("`init` has the same shapes on the device meta", on_meta, kinds)
    devices = {value.device.type for value in there.values()}
    contract.equal("`init` stays on the device of `loc`", devices, {"meta"})
    for name, value in here.items():
        if value.is_floating_point():
            unit = family.unit(site, name, value)
            is_unit = isinstance(unit, float | int) and math.isfinite(unit) and unit > 0
            contract.equal(f"`unit` of `{name}` is a positive number", is_unit, True)
    q = family.distribution(site, **here)
    contract.equal("`distribution` is over the site", q.batch_shape + q.event_shape, site.shape)
    if isinstance(q, WeightDistribution) and q._arguments:
        with contract.part("the arguments of the distribution"):
            check_declared(q, q._arguments)


def _is_coupled(family: Family) -> bool:
    return couple.dispatch(type(family)) is not couple.dispatch(Family)


@dataclasses.dataclass
class _Start:
    """A posterior at its starting values."""

    draw: Callable[[], Tensor]
    center: Tensor
    variance: Callable[[], Tensor]
    parameters: Mapping[str, Any]
    is_mixture: bool = False


def _start_at(family: Family, site: LatentSite, loc: Tensor, scale: float) -> _Start:
    """Return the start of a site's own posterior."""
    parameters = family.init(site, loc, scale)
    q: Any = family.distribution(site, **parameters)
    is_mixture = getattr(q, "is_mixture", False)
    return _Start(q.rsample, median_of(q), lambda: q.variance, parameters, is_mixture)


def _start_together(
    family: Family, shape: torch.Size, site: LatentSite, loc: Tensor, scale: float
) -> _Start:
    """Return the start of a posterior that several sites share."""
    parts = site.split(loc)
    start = lambda own: parts.get(own["name"])  # noqa: E731
    guide = _guide(family, _model(shape), init_scale=scale, init_loc_fn=start)

    def joined(values: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([values[name].reshape(len(loc), -1) for name in parts], -1)

    def variance() -> Tensor:
        marginals = guide.joint_posterior().conditionals("marginals")
        return next(q.variance for each, q in marginals if each.name == WEIGHT)

    draw, center = (lambda: joined(guide.draw())), joined(guide.median())
    return _Start(draw, center, variance, guide[WEIGHT].state_dict(), has_members(guide))


def _check_scale(
    contract: Contract,
    site: LatentSite,
    start: Callable[[Tensor, float], _Start],
    tolerance: float = 0.15,
    points: Tensor | None = None,
) -> None:
    """Compare the posterior at the start with its center, and variances with ``init_scale ** 2``."""
    is_random, loc = torch.ones(site.shape), torch.rand(site.shape) + 0.5
    if points is not None:
        is_random[:, : points.shape[1]] -= points.double()
    if start(loc, SCALE).is_mixture:
        return

    def center_at(loc: Tensor) -> Tensor:
        torch.manual_seed(1)
        return start(loc, SCALE).center

    # Inducing weights reach the nearest center of their own.
    center = center_at(loc)
    error = float((center_at(center) - center).norm() / center.norm())
    if (center - loc).norm() >= loc.norm() or not error < NEAR:
        rule = f"`init` centers the posterior of {site.name} at `loc`, as far as it can be there"
        contract.fail(rule, loc, center)
    for scale in (0.02, SCALE):
        own = start(loc, scale)
        found = linear(own.draw)
        if found is None or not found.matrix.numel():
            return  # a draw that is not linear in normal noise has no scale at the start
        expected, at = torch.diag(is_random.flatten()), f"at the start of {site.name}"
        covariance = found.covariance.detach() / scale**2
        error = float((covariance - expected).abs().max())
        if error < 1e-9 or not differences(own.parameters, start(loc, scale).parameters):
            rule = f"{at} elements are independent with the variance `init_scale` ** 2"
            contract.close(rule, covariance, expected)
            continue
        if scale < SCALE:
            continue  # a constant diagonal may have more
        variances = torch.stack([start(loc, scale).variance() for _ in range(STARTS)])
        ratio = variances.mean().item() / scale**2
        if abs(ratio - 1) > tolerance:
            rule = f"{at} the variance of an element is `init_scale` ** 2 on average"
            contract.fail(rule, f"{scale**2:.4g}", f"{ratio * scale**2:.4g}")


def _check_moved(contract: Contract, family: Family, site: LatentSite) -> None:
    """Check gradients at changed parameters, and the density of a distribution without a contract."""
    start = family.init(site, SCALE * torch.randn(site.shape), SCALE)
    moved = {
        n: v + SCALE * torch.randn_like(v) for n, v in start.items() if n not in family.constants
    }
    leaves = tuple(Leaf(name, value.requires_grad_(), None) for name, value in moved.items())
    ways = {name: torch.randn_like(value) for name, value in moved.items()}
    own = Contract(contract.owner, leaves)

    def tensors(size: float) -> dict[str, Tensor]:
        steps = {name: value + size * ways[name] for name, value in moved.items()}
        q = family.distribution(site, **start | steps)
        return {name: value for name, (value, _, _) in tensors_of(q).items()}

    if leaves:
        own.slopes(tensors, [*ways.values()])
    q = family.distribution(site, **start | moved)
    if not isinstance(q, WeightDistribution):
        pilot = q.sample(torch.Size([MANY])).flatten(1)
        check_density(own, q, pilot.mean(0), pilot.mT.cov())


def _check_dtypes(contract: Contract, family: Family, shape: torch.Size) -> None:
    for default, own in ((torch.float64, torch.float32), (torch.float32, torch.float64)):
        model = _model(shape, own)
        with fixed_seed(default):
            guide = _guide(family, model)
            values = *guide.parameters(), *guide.draw().values(), *guide.median().values()
        kinds = {value.dtype for value in values}
        contract.equal(f"parameters, draws and medians keep the dtype {own}", kinds, {own})


def _check_gradients(
    contract: Contract, family: Family, shape: torch.Size, idle: Any, num_particles: int
) -> None:
    model = _model(shape)
    guide = _guide(family, model, init_scale=SCALE)
    data = torch.randn(20, shape[1]), torch.randn(20, shape[0])
    gradients = elbo_gradients(contract, guide, model, data, num_particles)
    for name, gradient in gradients.items():
        name = name.rpartition(".")[-1]
        mask = idle.get(name, torch.zeros(gradient.shape, dtype=torch.bool))
        rule = f"the gradient reaches every element of `{name}` that has an effect"
        contract.equal(rule, torch.equal(gradient == 0, mask), True)
