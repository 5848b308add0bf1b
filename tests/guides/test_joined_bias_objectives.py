"""Joined biases under objectives, saved and in predictions."""

import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO

import pyro_structvi as ps
from pyro_structvi.families import KTied
from tests import dense_oracles as dense
from tests.exact_means import exact_mean
from tests.guides.joined_guides import JOINED, layer_function, linear_model, make_guide
from tests.models import regression_data


@pytest.mark.parametrize(
    ("weight_scale", "bias_scale"),
    [(0.7, 1.5), (torch.rand(2, 3) + 0.5, 0.7), (0.7, torch.tensor([0.5, 2.0]))],
    ids=["one", "many weights", "many biases"],
)
def test_the_kl_is_the_dense_one(weight_scale, bias_scale):
    priors = {"weight": weight_scale, "bias": bias_scale}
    model, args = linear_model(**priors)
    guide = make_guide(model)
    terms = ps.StructuredELBO().terms(model, guide, *args)
    q = guide["net.weight"]()
    scale = torch.cat(
        [
            torch.as_tensor(weight_scale).expand(2, 3),
            torch.as_tensor(bias_scale).expand(2).unsqueeze(-1),
        ],
        -1,
    )
    exact = dense.kl_to_independent_normals(
        q.loc, q.covariance_matrix, torch.zeros(2, 4), scale, event_dim=2
    )
    torch.testing.assert_close(terms.kl, {"net.weight+bias": exact})
    assert terms.sampled == ()


@pytest.mark.parametrize(
    ("elbo_class", "family"),
    [
        (ps.StructuredELBO, JOINED),
        (ps.StructuredELBO, KTied(2, join_bias=True)),
        (TraceMeanField_ELBO, JOINED),
        (Trace_ELBO, JOINED),
    ],
)
def test_every_elbo_has_the_closed_forms_mean(elbo_class, family):
    model, (x, y) = linear_model()
    guide = make_guide(model, init_scale=0.3, family=family)
    guide.initialize(x, y)
    q = guide["net.weight"]()
    inputs = torch.cat([x, torch.ones(len(x), 1)], -1)
    image = q.image(inputs)
    likelihood = dist.Normal(image.mean, 0.5).log_prob(y).sum() - 2 * image.variance.sum()
    prior_scale = torch.tensor([0.7, 0.7, 0.7, 1.5]).expand(2, 4)
    kl = dense.kl_to_independent_normals(
        q.loc, q.covariance_matrix, torch.zeros(2, 4), prior_scale, event_dim=2
    )
    elbo = elbo_class()
    mean = exact_mean(lambda: torch.tensor(elbo.loss(model, guide, x, y)))
    torch.testing.assert_close(mean, (kl - likelihood).detach(), rtol=1e-9, atol=0)


@pytest.mark.filterwarnings("ignore:Found .*vars in:UserWarning")
@pytest.mark.parametrize(
    "change",
    [
        lambda model: poutine.block(model, hide=["net.bias"]),
        lambda model: poutine.block(model, hide=["net.weight"]),
        lambda model: poutine.condition(model, {"net.bias": torch.zeros(2)}),
    ],
    ids=["no bias", "no weight", "bias observed"],
)
def test_a_model_with_half_of_a_joint_site_is_an_error(change):
    model, args = linear_model()
    guide = make_guide(model)
    guide.initialize(*args)
    with pytest.raises(
        ValueError, match=r"'net.weight' and its bias 'net.bias', but the model does"
    ):
        ps.StructuredELBO().terms(change(model), guide, *args)


@pytest.mark.filterwarnings("ignore:Found .*vars in:UserWarning")
def test_what_has_no_closed_form_is_sampled_and_said():
    message = r"\['net.weight\+bias'\]"
    model, args = linear_model(bias=dist.StudentT(3.0, 0.0, 1.0))
    with pytest.warns(ps.infer.SampledKLWarning, match=message):
        ps.StructuredELBO().terms(model, make_guide(model), *args)
    model, args = linear_model()
    guide = make_guide(model)
    guide.initialize(*args)
    empty = poutine.block(model, hide=["net.weight", "net.bias"])  # a layer that a pass skips
    with pytest.warns(ps.infer.SampledKLWarning, match=message):
        assert ps.StructuredELBO().terms(empty, guide, *args).sampled == ("net.weight+bias",)


def test_scale_and_mask_of_weight_and_bias_must_be_one():
    model = layer_function(around=lambda: poutine.mask(mask=torch.tensor(True)))
    assert ps.StructuredELBO().terms(model, make_guide(model), *regression_data()).kl
    model = layer_function(around=lambda: poutine.scale(scale=2.0))
    message = r"sites 'weight' and 'bias' have one posterior, and so must have one scale"
    with pytest.raises(ValueError, match=message):
        ps.StructuredELBO().terms(model, make_guide(model), *regression_data())
