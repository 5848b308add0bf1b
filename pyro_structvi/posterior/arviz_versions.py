"""ArviZ as it is installed: what differs between 0.23 and 1.x."""

import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from inspect import signature
from typing import Any

import numpy as np
from numpy.typing import NDArray


def import_arviz() -> Any:
    """Return ArviZ, imported without its announcement of the next version.

    ArviZ 0.23 makes it at the first import of each day. Other warnings of the import are shown.

    Raises:
        ImportError: If ArviZ, or what it needs, is not installed.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing", FutureWarning)
        try:
            import arviz
        except ModuleNotFoundError as error:
            raise ImportError(
                'ArviZ is needed: `pip install "pyro-structvi[diagnostics]"`.'
            ) from error
    return arviz


def from_groups(
    arviz: Any,
    groups: Mapping[str, Mapping[str, Any]],
    dims: Mapping[str, Sequence[str]],
    coords: Mapping[str, Any],
) -> Any:
    """Return what ArviZ keeps inference data in, made of arrays.

    ArviZ 0.23 takes each group as a keyword and makes an ``InferenceData``; 1.x takes a mapping of
    groups and makes an ``xarray.DataTree``. Both give a variable of the group ``log_likelihood`` the
    first of its dimensions where it has fewer.

    Args:
        arviz: The module.
        groups: Arrays by group and name; of draws ``(chain, draw, *shape)``. Empty groups are left out.
        dims: Names of the dimensions of each variable, without those of the draws.
        coords: Coordinates by dimension; whole numbers where there are none.
    """
    given = {name: dict(group) for name, group in groups.items() if group}
    names = {"dims": {name: [*own] for name, own in dims.items()}, "coords": dict(coords)}
    if "posterior" in signature(arviz.from_dict).parameters:
        return arviz.from_dict(**given, **names)
    return arviz.from_dict(given, **names)


def pareto_smoothed(log_weights: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Return log weights smoothed by a generalized Pareto distribution, and the shape of their tail.

    ArviZ 1.x has the function in its part ``arviz_stats``, and takes minus the log weights.

    Args:
        log_weights: Logs of importance weights, ``(draws,)``.

    Raises:
        ImportError: If ArviZ is not installed.
    """
    arviz = import_arviz()
    if hasattr(arviz, "psislw"):
        smoothed, k_hat = arviz.psislw(log_weights)
    else:
        array_stats = import_module("arviz_stats.base").array_stats
        smoothed, k_hat = array_stats.psislw(-log_weights)
    return np.asarray(smoothed), float(k_hat)
