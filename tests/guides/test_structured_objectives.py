"""Structured guides under Pyro's objectives and ours, and what models may do with their sites."""

import copy
import gc
import weakref

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro.infer import SVI

import pyro_structvi as ps
from pyro_structvi.weights.lazy import LazyWeight
from tests.guide_cases import GUIDES, POINTS
from tests.guides.test_structured import make_svi
from tests.models import make_classifier, make_image_classifier, make_regressor, regression_data


def test_two_guides_of_one_class_train_with_parameters_of_their_modules():
    with pyro.settings.context(module_local_params=True):
        for _ in range(2):
            model = make_regressor()
            guide = ps.KTiedGuide(model)
            before = copy.deepcopy(dict(guide.named_parameters()))
            svi = make_svi(model, guide)
            for _ in range(2):
                svi.step(*regression_data())
            assert all(not torch.equal(before[k], v) for k, v in guide.named_parameters())


def test_guides_of_one_class_have_separate_names_and_leave_the_store_when_they_go():
    model, (x, y) = make_regressor(), regression_data()
    guides = [ps.KTiedGuide(model) for _ in range(2)]
    optim = pyro.optim.Adam({"lr": 0.01})
    for guide in guides:
        before = copy.deepcopy(dict(guide.named_parameters()))
        for _ in range(2):
            SVI(model, guide, optim, ps.StructuredELBO()).step(x, y)
        assert all(not torch.equal(before[k], v) for k, v in guide.named_parameters())
    names = [name for guide in guides for name, _ in guide.named_parameters()]
    assert len(optim.get_state()) == len(names) == 12  # none shares another's state
    store = pyro.get_param_store()
    for guide, prefix in zip(guides, ("KTiedGuide", "KTiedGuide_2"), strict=True):
        assert store[f"{prefix}.posteriors.net/0/weight.loc"] is guide["net.0.weight"].loc
    del guides[1], guide, optim
    gc.collect()
    assert {name.partition(".")[0] for name in store} == {"KTiedGuide"}
    ps.fit(model, guides[0], (x, y), num_steps=1, progress=False)
    kept = weakref.ref(guides[0]["net.0.weight"].loc)
    guides.clear()
    gc.collect()
    assert kept() is None
    assert not [*store]


@pytest.mark.parametrize("name", GUIDES | POINTS)
def test_no_weight_of_a_linear_map_is_drawn_in_a_training_step(name, monkeypatch):
    model, data = make_image_classifier()
    if name.startswith(("full", "inducing")):  # which draw small filters
        model, data = make_classifier(), (torch.randn(12, 3), torch.randint(4, (12,)))
    guide, drawn, draw = (GUIDES | POINTS)[name](model), [], LazyWeight.draw
    guide.initialize(*data)
    monkeypatch.setattr(LazyWeight, "draw", lambda w: (drawn.append(w.use.name), draw(w))[1])
    make_svi(model, guide).step(*data)
    assert set(drawn) <= {"net.4.weight", "net.4.bias"}  # of the normalization


def test_one_use_more_than_was_counted_is_an_error():
    def model(x, times):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(3, 3), 1.0).to_event(2))
        for _ in range(times):
            x = F.linear(x, weight)
        return x

    guide = ps.MeanFieldGuide(model)
    svi = make_svi(model, guide)
    svi.step(torch.ones(2, 3), 1)
    with pytest.raises(RuntimeError, match=r"'weight' more often in this pass.*guide.initialize"):
        svi.step(torch.ones(2, 3), 2)
    guide.initialize(torch.ones(2, 3), 2)
    svi.step(torch.ones(2, 3), 2)


def test_data_of_another_dtype_is_an_error_that_names_the_site():
    model = make_regressor()
    x, y = regression_data()
    svi = make_svi(model, ps.MeanFieldGuide(model))
    for _ in range(2):  # in the run that counts uses, and in a step
        with pytest.raises(ValueError, match=r"site 'net.0.weight' must have dtype torch.float64"):
            svi.step(x.float(), y)
        svi.step(x, y)
