"""State dicts of guides, with options of families, without the state of the model."""

import copy
import io
from dataclasses import dataclass
from enum import Enum

import pyro
import pyro.poutine as poutine
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard

import pyro_structvi as ps
from pyro_structvi.families import (
    Dropout,
    FullCovariance,
    InducingWeights,
    KTied,
    LowRank,
    MatrixNormalFamily,
    MeanField,
    Members,
    PointEstimate,
    Subnetwork,
)
from pyro_structvi.guides import ModelStateWarning, NewParametersWarning
from tests.guides.inducing_guides import randomize
from tests.infer.two_ranks import on_two_ranks
from tests.models import HandWritten, make_regressor, regression_data


def make(family):
    return ps.StructuredGuide(make_regressor(), {"*.weight": family, "*": MeanField()})


def snapshot(guide):
    return copy.deepcopy(guide.state_dict())


def assert_unchanged(guide, before):
    after = guide.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


# What an error says of the family that a state was made with and of that it is loaded into.
OTHER_OPTIONS = {
    "rank = 3 instead of 2": (KTied(3), KTied(2)),
    "max_scale = None instead of 0.5": (MeanField(), MeanField(0.5)),
    "alpha = 0.5 instead of 2": (LowRank(2, alpha=0.5), LowRank(2, alpha=2)),
    "posterior.max_scale = 0.5 instead of 0.1": (
        *(InducingWeights((2, 2), MeanField(most)) for most in (0.5, 0.1)),
    ),
    "posterior = FullCovariance instead of MeanField": (
        *(InducingWeights((2, 2), FullCovariance()), InducingWeights((2, 2))),
    ),
    r"shape = \[2, 3\] instead of \[2, 2\]": (InducingWeights((2, 3)), InducingWeights((2, 2))),
    "size = 3 instead of 2": (Members(3), Members(2)),
    "family = PointEstimate instead of Dropout": (PointEstimate(), Dropout()),
}


@pytest.mark.parametrize("message", OTHER_OPTIONS)
def test_other_options_are_named_and_nothing_changes(message):
    saved, own = OTHER_OPTIONS[message]
    state, guide = randomize(make(saved)).state_dict(), make(own)
    before = snapshot(guide)
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=rf"{message} at the site 'net\.0\.weight'"):
            guide.load_state_dict(state, strict)
    assert_unchanged(guide, before)


def test_what_changes_no_distribution_is_not_compared():
    for saved, own in (
        (LowRank(2, alpha=2), LowRank(2, alpha=2.0)),
        (FullCovariance(max_memory=1.0), FullCovariance()),
        (Subnetwork(), Subnetwork()),
    ):
        state, guide = randomize(make(saved)).state_dict(), make(own)
        guide.load_state_dict(state)
        assert all(torch.equal(own, state[name]) for name, own in guide.named_parameters())


def test_arithmetic_on_a_whole_state_leaves_the_options():
    guide = make(KTied(2))
    for change in (
        lambda value: value - 0.1,
        lambda value: 0.9 * value + 0.1 * value,
        lambda value: value.bfloat16(),
        lambda value: value.clone().requires_grad_(value.is_floating_point()),
    ):
        before = snapshot(guide)
        state = {name: change(value) for name, value in before.items()}
        guide.load_state_dict(state)
        kept = {name: value for name, value in before.items() if name.endswith("_extra_state")}
        loaded = {name: value.detach().to(before[name].dtype) for name, value in state.items()}
        assert_unchanged(guide, loaded | kept)


def test_options_that_cannot_be_read_or_are_not_there():
    guide = make(KTied(2))
    before = snapshot(guide)
    for broken in (torch.zeros(3, dtype=torch.uint8), "rank 3", torch.full((2,), 250)):
        state = snapshot(guide) | {"posteriors.net/0/weight._extra_state": broken}
        with pytest.raises(RuntimeError, match=r"weight._extra_state'\]` must be the options of a"):
            guide.load_state_dict(state)
    state = {name: value + 1.0 for name, value in before.items() if "extra" not in name}
    with pytest.raises(RuntimeError, match=r"Missing key.*net/0/weight\._extra_state"):
        guide.load_state_dict(state)
    assert_unchanged(guide, before)
    assert len(guide.load_state_dict(state, strict=False).missing_keys) == 2
    assert_unchanged(guide, before | state)


def test_differences_of_couplings_of_pruned_sites_and_of_many_sites_are_named():
    shared, other = (
        make(InducingWeights((2, 2), family, shared=True))
        for family in (FullCovariance(), MatrixNormalFamily())
    )
    with pytest.raises(RuntimeError, match=r"at the site 'inducing_weights of net\.0\.weight'"):
        shared.load_state_dict(other.state_dict())
    guide, fresh = (ps.MeanFieldGuide(make_regressor()) for _ in range(2))
    ps.pruning.prune_mean_field(guide, 0.5)
    with pytest.raises(RuntimeError, match="family = PrunedMeanField instead of MeanField"):
        fresh.load_state_dict(guide.state_dict())
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)))
    model = ps.Regressor(ps.bayesianize(net, prior=1.0), 12, 0.3)
    with pytest.raises(RuntimeError, match=r"'net\.4\.weight', and 4 more\. Make"):
        ps.KTiedGuide(model, 1).load_state_dict(ps.KTiedGuide(model, 2).state_dict())


def test_a_state_that_does_not_fit_changes_nothing():
    guide, state = make(MeanField()), randomize(make(MeanField())).state_dict()
    before, last = snapshot(guide), list(state)[-3]
    missing = {name: value for name, value in state.items() if name != last}
    for wrong in (state | {last: torch.zeros(7)}, missing, state | {"other": torch.zeros(3)}):
        with pytest.raises(RuntimeError, match=r"size mismatch|Missing key|Unexpected key"):
            guide.load_state_dict(wrong)
        assert_unchanged(guide, before)
    for names in (missing, state | {"other": torch.zeros(3)}):
        guide.load_state_dict(before)
        guide.load_state_dict(names, strict=False)
        assert not torch.equal(guide["net.0.weight"].loc, before["posteriors.net/0/weight.loc"])


def test_the_options_are_checked_in_a_parent_and_in_a_part():
    guide, state = make(KTied(2)), make(MeanField(0.5)).state_dict()
    before = snapshot(guide)
    parent = nn.ModuleDict({"guide": guide})
    first = "posteriors.net/0/"  # of the same family, so that torch would load it before the other
    state |= {key: value + 1 for key, value in before.items() if first in key and "_s" not in key}
    state[f"{first}weight._extra_state"] = before[f"{first}weight._extra_state"]
    with pytest.raises(RuntimeError, match="family = MeanField instead of KTied"):
        parent.load_state_dict({f"guide.{name}": value for name, value in state.items()})
    part = "posteriors.net/2/weight."
    own = {name.removeprefix(part): value for name, value in state.items() if part in name}
    with pytest.raises(RuntimeError, match="family = MeanField instead of KTied"):
        guide["net.2.weight"].load_state_dict(own)
    assert_unchanged(guide, before)


def test_a_loaded_tensor_can_be_assigned():
    guide, state = make(KTied(2)), randomize(make(KTied(2))).state_dict()
    guide.load_state_dict(state, assign=True)
    assert guide["net.0.weight"].loc.data_ptr() == state["posteriors.net/0/weight.loc"].data_ptr()
    kept = guide["net.0.weight"].loc
    with pytest.raises(RuntimeError, match="Missing key"):
        guide.load_state_dict(dict([*snapshot(guide).items()][:-1]), assign=True)
    assert guide["net.0.weight"].loc is kept


@dataclass(frozen=True)
class Mine(MeanField):
    table: Tensor | None = None
    names: tuple = ()
    function: object = None


class Link(Enum):
    EXP = 1
    SOFTPLUS = 2


def test_options_of_a_family_of_the_users_own():
    nan = float("nan")
    options = {"table": torch.tensor([1.0, nan]), "names": ("a", (1, True), nan), "function": len}
    guide = make(Mine(**options))
    guide.load_state_dict(make(Mine(**options)).state_dict())
    for name, value in {"table": torch.zeros(2), "names": ("a", (1, True), 0.0)}.items():
        with pytest.raises(RuntimeError, match=f"{name}.* = .* instead of"):
            guide.load_state_dict(make(Mine(**options | {name: value})).state_dict())


@pytest.mark.parametrize(
    ("option", "other"),
    [
        (Link.EXP, Link.SOFTPLUS),
        (len, abs),
        (torch.exp, torch.nn.functional.softplus),
        (nn.Tanh, nn.ReLU),
        (torch.float32, torch.float64),
        (frozenset("ab"), frozenset("abc")),
        (frozenset([Link.EXP, len]), frozenset([Link.EXP, abs])),
        (nn.Softplus(2.0), nn.Softplus(1.0)),
    ],
)
def test_options_that_json_does_not_hold_are_compared(option, other):
    guide, state = make(Mine(function=option)), make(Mine(function=copy.copy(option))).state_dict()
    guide.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"function = .* instead of"):
        make(Mine(function=other)).load_state_dict(state)


@pytest.mark.parametrize("option", [lambda: 1, object(), (object(),)])
def test_an_option_without_an_identity_is_named(option, tmp_path):
    for use in (lambda g: g.state_dict(), lambda g: ps.save(tmp_path / "file", g.model, g)):
        with pytest.raises(TypeError, match=r"`function` of Mine must be told from other values"):
            use(make(Mine(function=option)))


def load_sharded():
    guides = []
    for rank in (2, 2, 3):
        guide = make(KTied(rank))
        guide.initialize(*regression_data())
        for posterior in guide.all_posteriors():
            fully_shard(posterior)
        fully_shard(guide)
        guides.append(guide)
    whole = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(guides[0], options=whole)
    set_model_state_dict(guides[1], state, options=whole)
    equal = [
        torch.equal(value.full_tensor(), own.full_tensor())
        for value, own in zip(guides[0].parameters(), guides[1].parameters(), strict=True)
    ]
    try:
        set_model_state_dict(guides[2], state, options=whole)
    except RuntimeError as error:
        return all(equal), str(error)


@pytest.mark.slow
def test_sharded_guides_load_and_check(tmp_path):
    for equal, message in on_two_ranks(load_sharded, tmp_path):
        assert equal
        assert "rank = 2 instead of 3" in message


# ---- the state of the model, and parameters that are made after the optimizer --------------------


def normalized():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return ps.Regressor(ps.bayesianize(net, normalization=False), 20, 0.1)


def point_features():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return ps.Regressor(ps.bayesianize(net, {"2.*": 1.0, "*": None}), 20, 0.1)


def saved(module):
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("make_of", [normalized, point_features])
def test_predictions_without_the_models_own_state(make_of):
    x = torch.randn(20, 3)
    model = make_of()
    guide = ps.MeanFieldGuide(model)
    ps.fit(model, guide, (x, 1 + x[:, :1]), num_steps=5, progress=False)
    states = saved(guide), saved(model)
    ps.predict(model, guide, x, num_samples=2)  # warnings are errors
    new_model = make_of()
    new = ps.MeanFieldGuide(new_model)
    new.load_state_dict(states[0])
    with pytest.warns(ModelStateWarning, match=r"Load them too, `model.load_state_dict\(...\)`"):
        ps.predict(new_model, new, x, num_samples=2)
    again = ps.MeanFieldGuide(make_of())
    again.load_state_dict(new.state_dict())
    new_model.load_state_dict(states[1])
    torch.manual_seed(0)
    found = ps.predict(new_model, new, x, num_samples=2).mean
    torch.manual_seed(0)
    torch.testing.assert_close(found, ps.predict(model, guide, x, num_samples=2).mean)


def test_a_model_that_is_loaded_before_its_guide_or_trained_after_it_is_as_it_should_be():
    x, model = torch.randn(20, 3), normalized()
    data, guide = (x, 1 + x[:, :1]), ps.MeanFieldGuide(model)
    ps.fit(model, guide, data, num_steps=5, progress=False)
    for is_loaded in (True, False):
        other = normalized()
        if is_loaded:
            other.load_state_dict(saved(model))
        new = ps.MeanFieldGuide(other)
        new.load_state_dict(saved(guide))
        if not is_loaded:
            ps.fit(other, new, data, num_steps=5, progress=False)
        ps.predict(other, new, x, num_samples=2)  # warnings are errors
    guide = ps.MeanFieldGuide(ps.Regressor(ps.bayesianize(nn.Linear(3, 1)), 20, 0.1))
    assert not [name for name in guide.state_dict() if name.endswith("model_sums")]  # sites alone


class Positions(nn.Module):
    """A net with point estimates, beside a buffer of large numbers and tensors of other kinds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("position_ids", torch.arange(512))
        self.register_buffer("used", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("shift", torch.full((), -torch.inf))
        self.register_buffer("empty", torch.empty(0, 3))
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(4, 1)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        return self.out(self.norm(x))


def with_positions():
    net = ps.bayesianize(Positions(), {"out.*": 1.0, "*": None}, normalization=False)
    return ps.Regressor(net, 20, noise_scale=0.1)


SIGNS = torch.tensor([1.0, -1.0, -1.0, 1.0])
CHANGES = {
    "weights by both signs": lambda net: net.norm.weight.add_(0.1 * SIGNS),
    "one weight by little": lambda net: net.norm.weight[2].add_(0.01),
    "biases of both signs": lambda net: net.norm.bias.copy_(1e-8 * SIGNS),
    "indices in another order": lambda net: net.position_ids.copy_(net.position_ids.flip(0)),
    "a mask": lambda net: net.used[1].fill_(True),
    "an infinite number": lambda net: net.shift.fill_(0.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_one_tensor_is_seen_beside_others(change):
    """Of the model beside which the state was saved, whose own state is not loaded."""
    model, other = with_positions(), with_positions()
    with torch.no_grad():
        change(model.net)
    state, new = ps.MeanFieldGuide(model).state_dict(), ps.MeanFieldGuide(other)
    new.load_state_dict(state)
    for dtype in (torch.float64, torch.float32):  # moved after the guide was loaded
        other.to(dtype)
        with pytest.warns(ModelStateWarning):
            new.warn_of_other_model()
    other.to(torch.float64).load_state_dict(model.state_dict())
    new.warn_of_other_model()  # warnings are errors
    with torch.no_grad():
        other.net.norm.bias.add_(1.0)  # as in training
    new.warn_of_other_model()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_model_that_was_moved_to_another_dtype_is_the_same(dtype):
    models = [with_positions() for _ in range(2)]
    for tensor in (*models[0].net.norm.parameters(), models[0].net.frozen):
        nn.init.normal_(tensor)
    for model in models:
        model.net.register_buffer("equal", torch.full((1000,), 0.1))
    state = ps.MeanFieldGuide(models[0]).state_dict()
    models[1].to(dtype).load_state_dict(models[0].state_dict())
    new = ps.MeanFieldGuide(models[1])
    new.load_state_dict(state)
    new.warn_of_other_model()  # warnings are errors


def half_declared():
    """Return a model of whose sites the first call finds one more, the noise."""
    x, y = regression_data()
    return HandWritten(), (x, y.expand(-1, 2))


def step(model, guide, data, optimizer):
    ps.StructuredELBO().differentiable_loss(model, guide, *data).backward()
    optimizer.step()


def optimizer_of(guide):
    return torch.optim.SGD(guide.parameters(), lr=1e-3)


def test_parameters_that_an_optimizer_cannot_have_are_named():
    model, data = half_declared()
    guide = ps.MeanFieldGuide(model)
    optimizer = optimizer_of(guide)
    with pytest.warns(NewParametersWarning, match=r"\['posteriors\.noise\.\w+'") as said:
        step(model, guide, data, optimizer)
    assert len(said) == 1
    assert "initialize" in str(said[0].message)
    step(model, guide, data, optimizer)  # it is said once
    guide.initialize(*data)
    model, data = make_regressor(), regression_data()
    guide = ps.GlobalInducingGuide(model, 4)  # of the first batch
    optimizer = optimizer_of(guide)
    with pytest.warns(NewParametersWarning, match=r"target"):
        step(model, guide, data, optimizer)


def test_nothing_is_said_where_all_are_trained():
    """Warnings are errors."""
    (model, data), elbo = half_declared(), ps.StructuredELBO()
    guide = ps.MeanFieldGuide(model)
    guide.initialize(*data)
    step(model, guide, data, optimizer_of(guide))
    guide = ps.MeanFieldGuide(model)
    assert sum(1 for _ in guide.parameters()) > 0
    ps.fit(model, guide, data, num_steps=1, progress=False)  # whose optimizer has them all
    regressor, given = make_regressor(), regression_data()
    guide = ps.MixtureGuide(regressor, lambda model: ps.GlobalInducingGuide(model, 4), 2)
    assert sum(1 for _ in guide.members[0].parameters()) > 0
    ps.fit(regressor, guide, given, num_steps=1, compiled=False, progress=False)
    optim = pyro.optim.Adam({"lr": 0.01})
    pyro.infer.SVI(model, ps.MeanFieldGuide(model), optim, elbo).step(*data)
    guide = ps.MeanFieldGuide(model)
    guide.__deepcopy__({})
    guide.initialize(*data)


def test_a_loaded_param_store_is_no_state_of_a_guide():
    model, data, store = make_regressor(), regression_data(), pyro.get_param_store()
    guide, elbo = ps.MeanFieldGuide(model), ps.StructuredELBO()
    poutine.trace(guide).get_trace(*data)
    saved = copy.deepcopy(store.get_state())
    assert saved["params"]
    store.set_state(copy.deepcopy(saved))
    poutine.trace(guide).get_trace(*data)  # equal values
    randomize(guide)
    before = snapshot(guide)
    store.set_state(saved)
    for run in (poutine.trace(guide).get_trace, lambda *args: elbo.loss(model, guide, *args)):
        with pytest.raises(RuntimeError, match=r"'MeanFieldGuide\.posteriors\..*load_state_dict"):
            run(*data)
    assert_unchanged(guide, before)
    values = {name.partition(".")[2]: value for name, value in saved["params"].items()}
    guide.load_state_dict(values, strict=False)
    elbo.loss(model, guide, *data)
    del guide, run
    pyro.clear_param_store()
    store.set_state(saved)  # as in another process
    guide = randomize(ps.MeanFieldGuide(model))
    with pytest.raises(RuntimeError, match="param store"):
        pyro.infer.Predictive(model, guide=guide, num_samples=2)(*data)
    pyro.clear_param_store()
    poutine.trace(guide).get_trace(*data)
    guide.load_state_dict(guide.state_dict(), assign=True)  # other parameters, which it may have
    randomize(guide)
    poutine.trace(guide).get_trace(*data)
