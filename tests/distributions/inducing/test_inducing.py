"""What InducingNormal has beyond the contract: its bound on the KL, other laws of inducing weights."""

import copy

import pytest
import torch
from torch import nn
from torch.distributions import (
    Categorical,
    Independent,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    kl_divergence,
)

import pyro_structvi as ps
from pyro_structvi.distributions import (
    Auxiliary,
    ConditionalNormal,
    InducingNormal,
    JoinedPrior,
    MeanFieldNormal,
)
from pyro_structvi.structures.inducing.outputs import InducingSide
from pyro_structvi.testing import check_distribution
from pyro_structvi.testing.contracts import Contract, with_leaves
from tests import dense_oracles as dense
from tests.distributions.cases import (
    CONVOLUTION,
    INDUCING,
    MATRIX,
    joint_covariance,
    make_full,
    make_joint,
    make_mean_field,
    prior_scale,
)
from tests.distributions.inducing.inducing_laws import (
    LAWS,
    MIXTURES,
    ORACLE,
    WITH_KL,
    choosing,
    make,
    member_of,
    nested,
    point_mixture,
)
from tests.distributions.subject import FLOAT64, named_arguments, rebuilt
from tests.unit_noise import assert_draws, close, exact_mean

SIZE = 12  # of a matrix
SETTINGS = [(MATRIX, (2,)), ((3, 2, 2), ())]
# The registry has all others.
FURTHER = {
    name: law for name, law in LAWS.items() if name not in {"diagonal", "matrix normal", "full"}
}


def kl_of_noise(scale):
    """Return the KL of N(0, scale^2) from N(0, 1), ``l^2 / 2 - log l - 1/2``."""
    scale = torch.as_tensor(scale)
    return scale.square() / 2 - scale.log() - 0.5


def own_prior(q):
    scale = prior_scale(q.joint).unsqueeze(-2).expand(q.mean.shape)
    return Normal(torch.zeros_like(scale), scale)


@pytest.mark.parametrize(
    "law", [*WITH_KL.values(), nested(make_mean_field)], ids=[*WITH_KL, "nested"]
)
def test_from_the_joints_own_prior_it_is_that_of_noise_and_of_inducing_weights(law):
    q = make(law, bias_scale=True)
    if law in WITH_KL.values():
        inducing = kl_divergence(q.inducing, Normal(torch.zeros(INDUCING), 1.0))
    else:
        inducing = ORACLE.kl(q.inducing, torch.zeros(INDUCING), torch.ones(INDUCING))
    close(kl_divergence(q, own_prior(q)), SIZE * kl_of_noise(q.conditional_scale) + inducing)


@pytest.mark.parametrize("count", [1, 3])
def test_points_have_no_divergence_of_their_own(count):
    """What is left is that of the noise, and how far the priors are apart under the posterior."""
    q = make(point_mixture(count), bias_scale=True)
    noise = SIZE * kl_of_noise(q.conditional_scale)
    close(kl_divergence(q, own_prior(q)), noise)
    mean, variance = ORACLE.mean(q), ORACLE.covariance(q).diagonal().reshape(MATRIX)

    def expected_log_density(prior):
        return (prior.log_prob(mean) - variance / prior.variance / 2).sum()

    prior = Normal(torch.randn(MATRIX), torch.rand(MATRIX) + 0.5)
    gap = expected_log_density(own_prior(q)) - expected_log_density(prior)
    close(kl_divergence(q, prior), noise + gap)


FORMS = [(), (4, 1, 1, 1), (1, 3, 1, 1), (3, 1, 1), (1, 1, 2, 2), (2,), (4, 1, 2, 1), CONVOLUTION]


def test_every_form_of_the_prior_of_filters_has_the_dense_kl():
    q = make(make_full, CONVOLUTION, bias_scale=True)
    for loc_form, scale_form in [*zip(FORMS, FORMS[::-1], strict=True), ((), ()), (FORMS[3],) * 2]:
        loc, scale = torch.randn(loc_form), torch.rand(scale_form) + 0.5
        loc, scale = loc.expand(CONVOLUTION), scale.expand(CONVOLUTION)
        close(kl_divergence(q, Independent(Normal(loc, scale), 4)), ORACLE.kl(q, loc, scale))


@pytest.mark.parametrize("bias_scale", [False, True], ids=["one scale", "a bias"])
@pytest.mark.parametrize("law", WITH_KL.values(), ids=WITH_KL)
def test_a_joined_prior_has_the_dense_kl_and_gradients(law, bias_scale):
    for weight_form, bias_form in (((1, 2), ()), ((4, 2), (4,))):
        q, leaves = with_leaves(make(law, bias_scale=bias_scale))
        weight, bias = torch.rand(weight_form) + 0.5, torch.rand(bias_form) + 0.5
        normals = Normal(0.3, weight.expand(4, 2)), Normal(-1.0, bias.expand(4))
        prior = JoinedPrior(Independent(normals[0], 2), Independent(normals[1], 1))
        scale = torch.cat([weight.expand(4, 2), bias.expand(4).unsqueeze(-1)], -1)
        loc = torch.tensor([0.3, 0.3, -1.0]).expand(MATRIX)
        divergence, oracle = kl_divergence(q, prior), ORACLE.kl(q, loc, scale)
        close(divergence, oracle)
        Contract("it", leaves).close("has the dense gradients", divergence, oracle)


@pytest.mark.parametrize("law", WITH_KL.values(), ids=WITH_KL)
def test_the_parts_of_drawn_inducing_weights_add_up_to_the_divergence_on_average(law):
    """With closed forms, and with the densities of draws, as the objectives of Pyro use them."""
    q, prior = make(law, bias_scale=True), Normal(torch.randn(MATRIX), torch.rand(MATRIX) + 0.5)
    auxiliary = Auxiliary(q.inducing, Independent(Normal(torch.zeros(INDUCING), 1.0), 2))

    def by_divergences():
        return kl_divergence(q.condition(auxiliary.rsample()), prior) + auxiliary.kl()

    def by_densities():
        whitened = auxiliary.rsample()
        given = q.condition(whitened)
        weight = given.rsample()
        log_ratio = given.log_prob(weight) - prior.log_prob(weight).sum()
        return log_ratio + auxiliary.log_prob(whitened)

    for parts in (by_divergences, by_densities):
        close(exact_mean(parts), kl_divergence(q, prior))


# Filters of one point show what filters of all laws do, beside those of the contract of full ones.
@pytest.mark.parametrize(
    ("law", "event_shape", "batch_shape"),
    [
        pytest.param(
            law,
            *shapes,
            id=f"{name}, {shapes}",
            marks=pytest.mark.slow if shapes != SETTINGS[0] and name != "one point" else (),
        )
        for name, law in FURTHER.items()
        for shapes in SETTINGS
    ],
)
def test_the_contract_holds_for_every_law_of_inducing_weights(law, event_shape, batch_shape):
    q = make(law, event_shape, batch_shape, bias_scale=True)
    check_distribution(
        q,
        covariance=ORACLE.covariance,
        mean=ORACLE.mean,
        kl=ORACLE.kl if law in WITH_KL.values() else lambda q, *p: kl_divergence(q, Normal(*p)),
        shared_covariance=ORACLE.shared_covariance,
    )


@pytest.mark.parametrize("law", MIXTURES.values(), ids=MIXTURES)
def test_a_mixture_has_draws_of_its_members_and_no_entropy_and_no_density_of_outputs(law):
    q = make(law, batch_shape=(2,))
    for number in (0, 2):
        member = member_of(q, number)
        with choosing(number):
            assert_draws(q.rsample, ORACLE.mean(member), ORACLE.covariance(member))
    with pytest.raises(NotImplementedError, match="no entropy in closed form"):
        q.entropy()
    with pytest.raises(NotImplementedError, match="draws and moments only"):
        make(law).image(torch.randn(7, 3)).log_prob(torch.zeros(7, 4))


def test_the_density_of_a_mixture_is_the_mean_of_densities():
    q, value = make(point_mixture(3), batch_shape=(2,)), torch.randn(5, 2, *MATRIX)
    gain, noise = dense.conditional_moments(joint_covariance(q.joint), SIZE)
    means = q.inducing.members.flatten(-2) @ gain.mT
    covariance = q.conditional_scale.square()[..., None, None] * noise
    members = MultivariateNormal(means, covariance.unsqueeze(-3))
    mixture = MixtureSameFamily(Categorical(torch.ones(2, 3)), members)
    close(q.log_prob(value), mixture.log_prob(value.flatten(-2)))
    with pytest.raises(NotImplementedError, match="mixture of normals as inducing weights"):
        make(nested(point_mixture(2))).log_prob(torch.zeros(MATRIX))


def test_inducing_weights_that_do_not_fit_are_refused():
    joint, wrong = make_joint((2,), MATRIX, FLOAT64), torch.zeros(2, 2, 3)
    inducing = MeanFieldNormal(wrong, torch.tensor(1.0), 2)
    message = r"must have shape \(\*batch, M_out, M_in\) = \(2, 3, 2\), but got \(2, 2, 3\)"
    for name, make_wrong in (
        ("inducing_loc", lambda: InducingNormal(joint, wrong, 1.0, 1.0)),
        ("whitened", lambda: ConditionalNormal(joint, wrong, 1.0)),
        ("inducing", lambda: InducingNormal.from_inducing(joint, inducing, 1.0)),
    ):
        with pytest.raises(ValueError, match=f"`{name}` {message}"):
            make_wrong()


def test_inducing_weights_that_are_drawn_elsewhere_leave_no_law():
    q = InducingNormal.from_inducing(make_joint((2,), MATRIX, FLOAT64), None, 0.5)
    for ask in (lambda: q.mean, q.rsample, lambda: q.image(torch.zeros(3))):
        with pytest.raises(RuntimeError, match=r"one joint posterior.*guide\.draw"):
            ask()
    whitened = torch.randn(2, *INDUCING)
    expected = ConditionalNormal(q.joint, whitened, 0.5)
    close(q.condition(whitened).covariance_matrix, expected.covariance_matrix)
    close(q.condition(whitened).mean, expected.mean)


def as_prior(scales, loc, is_learned, joined):
    """Return a prior of one weight; where its scales are learned they may become other numbers."""
    scales = [scale.detach().clone().requires_grad_(is_learned) for scale in scales]
    if not joined:
        return Independent(Normal(loc, scales[0]).expand(MATRIX), 2)
    weight, bias = (Normal(loc, scale) for scale in scales)
    return JoinedPrior(
        Independent(weight.expand((MATRIX[0], MATRIX[1] - 1)), 2),
        Independent(bias.expand(MATRIX[:1]), 1),
    )


@pytest.mark.parametrize(("joined", "bias_scale"), [(False, False), (True, False), (True, True)])
def test_the_divergence_is_the_same_whether_the_prior_is_known(joined, bias_scale, monkeypatch):
    q = make(make_mean_field, bias_scale=bias_scale)
    scales = [q.joint.scale, q.joint.bias_scale if bias_scale else q.joint.scale]
    loc = torch.zeros(())
    expected = kl_divergence(q, as_prior(scales, loc, True, joined))
    others = [
        as_prior(scales, loc + 0.1, False, joined),
        *(
            as_prior([s * f for s, f in zip(scales, factors, strict=True)], loc, False, joined)
            for factors in ([(1.1, 1.0), (1.0, 1.1)] if joined else [(1.1, 1.1)])
        ),
    ]
    for other in others:
        assert abs(kl_divergence(q, other) - expected) > 1e-3
    fresh = rebuilt(q, named_arguments(q))

    def refuse(*_):
        raise AssertionError("the factors are not needed")

    monkeypatch.setattr(InducingSide, "of", refuse)
    found = kl_divergence(fresh, as_prior(scales, loc, False, joined))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_the_density_in_single_precision_is_that_of_double_precision():
    """With more inducing weights than weights, where the factors of the density nearly cancel."""
    layer = nn.Linear(10, 8, bias=False)
    net = ps.bayesianize(layer.float(), prior=1.0)
    guide = ps.InducingWeightGuide(ps.Regressor(net, num_data=50, noise_scale=1.0))
    single, double = guide["net.weight"](), copy.deepcopy(guide).double()["net.weight"]()
    weights = single.sample((5,)).detach()
    expected = MultivariateNormal(double.mean.flatten(), double.covariance_matrix)
    found = single.log_prob(weights)
    assert found.dtype == torch.float32
    close(found.double(), expected.log_prob(weights.double().flatten(1)), rtol=1e-5, atol=1e-3)
