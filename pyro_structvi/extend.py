"""Names for authors of distributions, families and guides; see "Write your own family"."""

from pyro_structvi._checks import Count, Positive, Share, Whole, checked
from pyro_structvi.linalg.matrices import solve_lower
from pyro_structvi.maps.linear_map import DenseMap, LinearMap
from pyro_structvi.sites.family import (
    FactoredFamily,
    Family,
    GuideOptions,
    MatrixFamily,
    MemoryLimitedFamily,
)
from pyro_structvi.sites.latent_site import (
    JoinedBias,
    LatentSite,
    Plate,
    bijection_at,
    bijection_onto,
)
from pyro_structvi.sites.parameterization import (
    capped,
    capped_log,
    cholesky_factor,
    initial_factor,
    uncapped,
)
from pyro_structvi.sites.site_posterior import Coupling, SitePosterior, couple
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.weights.arguments import Argument
from pyro_structvi.weights.outputs import GaussianOutputs, NormalOutputs, OutputDistribution
from pyro_structvi.weights.site_distributions import quantiles
from pyro_structvi.weights.weight_distribution import (
    FactoredWeight,
    GaussianWeight,
    IndependentWeight,
    Way,
    WeightDistribution,
)

__all__ = [
    # distributions
    "Argument",
    "DenseMap",
    "FactoredWeight",
    "GaussianOutputs",
    "GaussianWeight",
    "IndependentWeight",
    "LinearMap",
    "NormalOutputs",
    "OutputDistribution",
    "Way",
    "WeightDistribution",
    "quantiles",
    "solve_lower",
    # families
    "Count",
    "FactoredFamily",
    "Family",
    "JoinedBias",
    "LatentSite",
    "MatrixFamily",
    "MemoryLimitedFamily",
    "Plate",
    "Positive",
    "Share",
    "SitePosterior",
    "Whole",
    "bijection_at",
    "bijection_onto",
    "capped",
    "capped_log",
    "checked",
    "cholesky_factor",
    "initial_factor",
    "uncapped",
    # guides
    "Coupling",
    "GuideOptions",
    "StructuredGuide",
    "couple",
]
