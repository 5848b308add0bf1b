"""Reference posteriors: NUTS in NumPyro, and microcanonical Langevin sampling in torch."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pyro_structvi.reference.draws import ChainDraws, NotMixedWarning
from pyro_structvi.reference.mclmc import StuckChainWarning, mclmc

if TYPE_CHECKING or (find_spec("jax") and find_spec("numpyro")):
    from pyro_structvi.reference.numpyro_model import to_numpyro
    from pyro_structvi.reference.sampling import DivergenceWarning, NUTSDraws, nuts

__all__ = [
    "ChainDraws",
    "DivergenceWarning",
    "NUTSDraws",
    "NotMixedWarning",
    "StuckChainWarning",
    "mclmc",
    "nuts",
    "to_numpyro",
]


def __getattr__(name: str) -> Any:
    """Raise an ``ImportError`` for the names that need NumPyro."""
    if name in __all__:
        raise ImportError(
            f"`{name}` needs NumPyro and JAX, and one of them cannot be imported. Install them with "
            '`pip install "pyro-structvi[reference]"`.'
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
