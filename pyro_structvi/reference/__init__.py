"""Reference posteriors: the same net and priors in NumPyro, sampled by NUTS in float64."""

try:
    import jax  # noqa: F401
    import numpyro  # noqa: F401
except ImportError as error:
    raise ImportError(
        "The reference sampler needs NumPyro and JAX, and one of them cannot be imported. Install "
        'them with `pip install "pyro-structvi[reference]"`.'
    ) from error

from pyro_structvi.reference.numpyro_model import to_numpyro
from pyro_structvi.reference.sampling import DivergenceWarning, NUTSDraws, nuts

__all__ = ["DivergenceWarning", "NUTSDraws", "nuts", "to_numpyro"]
