"""What grows, for whom, and what the growth should be by counts of multiplications."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pyro_structvi as ps


class Sizes(NamedTuple):
    """What may change: a method ignores what it does not have.

    Attributes:
        d: Inputs, and outputs.
        N: The batch.
        K: The rank.
        M: Rows, and columns, of the inducing weights.
        S: Draws of the weights in a step, in one pass.
        L: Layers, one after another. What a first layer does with the data, all draws may share.
    """

    d: int = 512
    N: int = 512
    K: int = 2
    M: int = 64
    S: int = 1
    L: int = 1


Count = Callable[[Sizes], float]


class Method(NamedTuple):
    """A guide, and counts of multiplications in a layer's forward pass with the KL.

    Attributes:
        make: Makes the guide; None for no posterior.
        paper: The count of the paper's Table 1, or None.
        ours: The count of this package's page on the guide.
        layers: What stands for the layer.
    """

    make: Callable[[ps.Regressor, Sizes], ps.StructuredGuide] | None
    paper: Count | None
    ours: Count
    layers: Any = None


METHODS = {
    "deterministic": Method(None, lambda s: s.N * s.d**2, lambda s: s.N * s.d**2),
    "mean field": Method(
        lambda model, s: ps.MeanFieldGuide(model),
        lambda s: s.S * s.N * s.d**2,
        lambda s: 2 * s.S * s.N * s.d**2,
    ),
    "k-tied": Method(
        lambda model, s: ps.KTiedGuide(model, rank=s.K, join_bias=False),
        lambda s: s.S * s.N * s.d**2,
        lambda s: s.S * s.N * (s.d**2 + s.K * (s.K + 1) * s.d) + s.K * s.d**2,
    ),
    "low rank": Method(
        lambda model, s: ps.AutoLowRankLRT(model, rank=s.K, diagonal="constant", join_bias=False),
        lambda s: s.K**3 + (s.K + 2) * s.S * s.N * s.d**2,
        lambda s: (s.K + 1) * s.S * s.N * s.d**2 + s.K**2 * s.d**2,
    ),
    "matrix normal": Method(
        lambda model, s: ps.MatrixNormalGuide(model, join_bias=False),
        lambda s: s.S * s.N * s.d**2,
        lambda s: 3 * s.S * s.N * s.d**2 + 4 * s.d**2,
    ),
    "inducing": Method(
        lambda model, s: ps.InducingWeightGuide(model, (s.M, s.M)),
        lambda s: s.S * s.N * s.d**2 + 4 * s.M**3 + s.S * (s.d * s.M**2 + s.M * s.d**2),
        lambda s: s.S * s.N * (3 * s.d * s.M + 2 * s.M**2) + 4 * s.d * s.M**2 + 2 * s.M**3,
    ),
    "Walsh-Hadamard": Method(
        lambda model, s: ps.MeanFieldGuide(model),
        None,
        lambda s: s.S * s.N * s.d * math.log2(s.d),
        ps.WalshHadamard(),
    ),
    "rank-1": Method(
        lambda model, s: ps.MeanFieldGuide(model),
        lambda s: s.S * s.N * s.d**2,
        lambda s: s.S * s.N * (s.d**2 + 2 * s.d),
        ps.RankOne(),
    ),
    "rowwise": Method(
        lambda model, s: ps.RowwiseGuide(model, join_bias=False),
        None,
        lambda s: s.S * s.N * (s.d**3 + s.d**2) + 2 * s.d**3,
    ),
    "full covariance": Method(
        lambda model, s: ps.FullCovarianceGuide(model),
        lambda s: s.d**6 + s.S * s.N * s.d**4,
        lambda s: s.S * s.N * (s.d**4 + 2 * s.d**2) + 2 * s.d**4,
    ),
}


class Sweep(NamedTuple):
    """One size that changes.

    Attributes:
        title: What it is, and what the others are.
        fixed: The other sizes.
        sizes: Its values.
        methods: Who is timed.
        other: Other values, for those who cannot have the same.
    """

    title: str
    fixed: Sizes
    sizes: tuple[int, ...]
    methods: tuple[str, ...] = tuple(METHODS)[:-2]
    other: dict[str, tuple[int, ...]] = {}  # noqa: RUF012, never changed


SWEEPS = {
    "d": Sweep(
        "width d; batch 512, K = 2, M = 64",
        Sizes(),
        (128, 256, 512, 1024, 2048, 4096),
        tuple(METHODS),
        {"rowwise": (16, 32, 64, 128, 256), "full covariance": (8, 16, 24, 32, 48, 64)},
    ),
    "N": Sweep(
        "batch N; d = 512, K = 2, M = 64", Sizes(), (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    ),
    "K": Sweep(
        "rank K; d = 512, batch 512",
        Sizes(),
        (1, 2, 4, 8, 16, 32, 64),
        ("deterministic", "k-tied", "low rank"),
    ),
    "M": Sweep(
        "inducing weights M x M; d = 1024, batch 512",
        Sizes(d=1024),
        (16, 32, 64, 128, 256, 512),
        ("deterministic", "inducing"),
    ),
    "S": Sweep(
        "draws S in one pass; two layers, d = 512, batch 128, K = 2, M = 64",
        Sizes(N=128, L=2),
        (1, 2, 4, 8, 16, 32),
    ),
}
