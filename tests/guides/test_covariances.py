"""Constant diagonals of low rank, memory that layers save, limits of large covariances."""

import math

import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pyro_structvi as ps
from pyro_structvi.distributions import LowRankNormal
from pyro_structvi.families import FullCovariance, MeanField, Rowwise
from pyro_structvi.sites.parameterization import parameters_of_rows
from tests.guides.test_optima import NUM_DATA, SIZE, low_rank_guide
from tests.lazy_weights import lazy
from tests.models import local_latent_function

# ---- constant diagonals --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "variance"),
    [({"diagonal_variance": math.exp(-10)}, math.exp(-10)), ({}, 0.1**2 / SIZE)],
)
def test_a_constant_diagonal_has_no_parameter_and_stays(options, variance):
    guide = low_rank_guide(2, diagonal="constant", **options)
    posterior, data = guide["net.weight"], (torch.randn(NUM_DATA, SIZE), torch.randn(NUM_DATA, 1))
    before = posterior().scale.clone()
    assert {name for name, _ in posterior.named_parameters()} == {"loc", "factors"}
    ps.fit(guide.model, guide, data, num_steps=20, lr=0.1, progress=False)
    assert torch.equal(posterior().scale, before)
    assert before.square().item() == pytest.approx(variance, rel=1e-15)


def classifier(*layers, prior=1.0):
    return ps.Classifier(ps.bayesianize(nn.Sequential(*layers), prior=prior), num_data=50)


def test_a_constant_diagonal_follows_fan_in_and_prior_of_each_site():
    prior = {"0.weight": 3.0, "0.bias": 0.2, "2.weight": dist.Cauchy(0.0, 1.0), "*": 5.0}
    model = classifier(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2), prior=prior)
    guide = ps.AutoLowRankLRT(model, diagonal="constant", join_bias=False)
    expected = {"0.weight": 0.05, "0.bias": 0.02, "2.weight": 0.1 / 3**0.5, "2.bias": 0.1}
    for name, scale in expected.items():
        assert guide[f"net.{name}"]().scale.item() == pytest.approx(scale)
    wide, narrow = (
        ps.AutoLowRankLRT(classifier(nn.Linear(4, 3), prior=prior), diagonal="constant")
        for prior in (0.4, 0.1)
    )
    narrow.load_state_dict(wide.state_dict())
    assert narrow["net.0.weight"]().scale.item() == pytest.approx(0.04)
    with pytest.raises(ValueError, match='constant"; with "full" it is learned'):
        ps.AutoLowRankLRT(model, diagonal_variance=0.1)


# ---- memory --------------------------------------------------------------------------------------


def numbers_saved(compute, known):
    """Return how many numbers autograd saves for the backward pass in storages that are not known."""
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = compute()
    kept = storages.keys() - {tensor.untyped_storage().data_ptr() for tensor in known}
    return sum(storages[address].nbytes() for address in kept) // output.element_size()


@pytest.mark.parametrize("diagonal", ["isotropic", "full"])
@pytest.mark.parametrize(("rank", "inputs", "out"), [(1, 16, 256), (5, 256, 16)])
def test_a_layer_saves_at_most_what_the_paper_states(rank, inputs, out, diagonal):
    """Table 1: (K + 2) numbers for each example and output; a full diagonal takes one more.

    Parameters and inputs do not count. Norms, scales and coefficients of an example may be added, and
    for a full diagonal the squares of inputs and scales. A weight for each example exceeds the bound.
    """
    full, batch = diagonal == "full", 256
    shapes = (out, inputs), (rank, out, inputs), (out, inputs) if full else (), (batch, inputs)
    known = *parameters, x = [torch.rand(shape).requires_grad_() for shape in shapes]
    q = LowRankNormal(*parameters)
    bound = (rank + 2 + full) * out * batch + (rank + 4) * batch
    bound += (inputs * batch + inputs * out) * full
    assert numbers_saved(lambda: F.linear(x, lazy(q)), known) <= bound
    naive = numbers_saved(lambda: (q.rsample((batch,)) @ x.unsqueeze(-1)).squeeze(-1), known)
    assert naive >= inputs * out * batch > bound


def test_a_layer_with_an_isotropic_diagonal_saves_the_noise_of_its_outputs_alone():
    """Besides coefficients and norms, of which there is one for all outputs of an example."""
    known = *parameters, x = [
        torch.rand(shape).requires_grad_() for shape in ((64, 8), (3, 64, 8), (), (16, 8))
    ]
    saved = numbers_saved(lambda: F.linear(x, lazy(LowRankNormal(*parameters))), known)
    assert 16 * 64 <= saved <= 16 * (64 + 3 + 5)


@pytest.mark.parametrize(
    ("family", "sizes", "message", "size"),
    [
        (FullCovariance, (784, 400), r"314,000 elements of .* 1\.43 TiB", 15),
        (Rowwise, (30_000, 400), r"30,001 elements in each of the 400 rows of .* 5\.24 TiB", 5),
    ],
)
def test_a_layer_that_takes_too_much_is_refused_before_anything_large_is_allocated(
    family, sizes, message, size
):
    """Parameters, gradients and two moments are 4 (D + D (D + 1) / 2) numbers, factors 2 D^2."""

    def make(*sizes, **options):
        net = ps.bayesianize(nn.Linear(*sizes), prior=1.0)
        model = ps.Classifier(net, num_data=10).float()
        ps.StructuredGuide(model, {"*": family(join_bias=True, **options)})

    with pytest.raises(MemoryError, match=rf"{message}.* 8 GiB\. Use AutoLowRankLRT, or .* larger"):
        make(*sizes)
    numbers = 15 // size * (4 * (size + size * (size + 1) / 2) + 2 * size**2)
    gibibytes = numbers * 4 / 2**30
    make(4, 3, max_memory=gibibytes * 1.001)
    with pytest.raises(MemoryError, match=rf"{size} elements .* GiB"):
        make(4, 3, max_memory=gibibytes * 0.999)


# ---- full covariances ----------------------------------------------------------------------------


def test_parameters_of_a_factor_give_it_back():
    factor, loc = torch.randn(12, 12).tril(-1) + torch.rand(12).add(0.5).diag(), torch.zeros(4, 3)
    found = FullCovariance().distribution(None, loc=loc, **parameters_of_rows(factor, loc))
    torch.testing.assert_close(found.scale_tril, factor)


def test_a_site_in_a_plate_gets_the_default():
    guide = ps.FullCovarianceGuide(local_latent_function)
    guide.initialize(torch.randn(6, 3), torch.randn(6))
    assert isinstance(guide["weight"].family, FullCovariance)
    assert guide["shift"].family == MeanField()
