"""The posteriors that the tables of ELRG-VI compare."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import pyro_structvi as ps

PAPER_VARIANCE = math.exp(-10)  # of the constant diagonal, in the authors' code
RANKS = (1, 2, 5)


def constant_noise(model: Any) -> nn.Module:
    """Return a posterior of which only the means are learned: ELRG-VI without directions."""
    guide = ps.MeanFieldGuide(model, init_scale=math.sqrt(PAPER_VARIANCE))
    for posterior in (guide[name] for name in guide.site_names):
        if posterior.site.is_real:  # not the scales of a prior, which are positive
            posterior.log_scale.requires_grad_(False)
    return guide


def low_rank(rank: int, diagonal: str, **options: Any) -> Callable[[Any], nn.Module]:
    return partial(ps.AutoLowRankLRT, rank=rank, diagonal=diagonal, join_bias=True, **options)


GUIDES: dict[str, Callable[[Any], nn.Module]] = {
    "MAP": ps.MAPGuide,
    "mean field, drawn weights": partial(ps.MeanFieldGuide, local_reparam=False),
    "mean field, local (ELRG-D, K = 0)": ps.MeanFieldGuide,
    **{f"ELRG-D, K = {rank}": low_rank(rank, "full") for rank in RANKS},
    "isotropic diagonal, K = 2": low_rank(2, "isotropic"),
    "ELRG, K = 0": constant_noise,
    **{
        f"ELRG, K = {rank}": low_rank(rank, "constant", diagonal_variance=PAPER_VARIANCE)
        for rank in RANKS
    },
    "constant diagonal of this library, K = 2": low_rank(2, "constant"),
}


def expected_bound(
    model: Any, guide: nn.Module, data: tuple[Tensor, Tensor], batch_size: int, passes: int = 1
) -> tuple[float, float]:
    """Return the ELBO and its KL, in nats: of one draw for each mini-batch, averaged over the data."""
    objective = ps.StructuredELBO()
    bound = divergence = 0.0
    with torch.no_grad():
        for _ in range(passes):
            for x, y in zip(*(part.split(batch_size) for part in data), strict=True):
                terms = objective.terms(model, guide, x, y)
                share = len(x) / len(data[0]) / passes
                bound += share * float(terms.elbo)
                divergence += share * float(sum(terms.kl.values()))
    return bound, divergence
