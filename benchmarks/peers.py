"""Posteriors of other packages, measured as the league's guides are: the same nets, data and draws.

    pip install laplace-torch
    make league BENCH="--peers --output benchmarks/results/league.csv"

The committed rows are of one seed for Pyro's guides and of two for laplace-torch.
What is done with a package is said where it is done, in ``pyro_peers.py`` and ``laplace_peers.py``. A
maker is called with a problem and the league's options, and returns a model, a posterior of it (a guide,
or draws by site), and what was measured of the fit.

TyXe has no rows: version 0.0.2 on PyPI calls ``pyro.util.deep_getattr``, which Pyro 1.9 does not have,
so its own guide raises an ``AttributeError`` at the first step. That guide, independent normals
with local reparameterization, is the posterior of ``MeanFieldGuide``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from pyro.infer.autoguide import AutoLowRankMultivariateNormal, AutoNormal

from benchmarks.laplace_peers import laplace
from benchmarks.pyro_peers import autoguide

Maker = Callable[[Any, Any], tuple[Any, Any, dict[str, float]]]

PEERS: dict[str, Maker] = {
    "Pyro: AutoNormal": partial(autoguide, AutoNormal),
    "Pyro: AutoLowRankMultivariateNormal": partial(autoguide, AutoLowRankMultivariateNormal),
    "laplace-torch: full, linearized": partial(laplace, "all", "full", "glm"),
    "laplace-torch: Kronecker, linearized": partial(laplace, "all", "kron", "glm"),
    "laplace-torch: last layer, linearized": partial(laplace, "last_layer", "full", "glm"),
    "laplace-torch: full, sampled weights": partial(laplace, "all", "full", "nn"),
}
