"""State dicts of guides: they hold the options of families, and load as a whole or not at all."""

import copy
from dataclasses import dataclass

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
from tests.guides.inducing_guides import randomize
from tests.infer.two_ranks import on_two_ranks
from tests.models import make_regressor, regression_data


def make(family):
    return ps.StructuredGuide(make_regressor(), {"*.weight": family, "*": MeanField()})


def snapshot(guide):
    return copy.deepcopy(guide.state_dict())


def assert_unchanged(guide, before):
    after = guide.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


# What a state was made with, what it is loaded into, and what the error says of the two.
OTHER_OPTIONS = {
    "rank": (KTied(3), KTied(2), "rank = 3 instead of 2"),
    "no cap": (MeanField(), MeanField(0.5), "max_scale = None instead of 0.5"),
    "alpha": (LowRank(2, alpha=0.5), LowRank(2, alpha=2), r"alpha = 0.5 instead of 2"),
    "nested": (
        InducingWeights((2, 2), MeanField(0.5)),
        InducingWeights((2, 2), MeanField(0.1)),
        "posterior.max_scale = 0.5 instead of 0.1",
    ),
    "nested family": (
        InducingWeights((2, 2), FullCovariance()),
        InducingWeights((2, 2)),
        "posterior = FullCovariance instead of MeanField",
    ),
    "shape": (
        InducingWeights((2, 3)),
        InducingWeights((2, 2)),
        r"shape = \[2, 3\] instead of \[2, 2\]",
    ),
    "members": (Members(3), Members(2), "size = 3 instead of 2"),
    "family": (PointEstimate(), Dropout(), "family = PointEstimate instead of Dropout"),
}


@pytest.mark.parametrize(("saved", "own", "message"), OTHER_OPTIONS.values(), ids=OTHER_OPTIONS)
def test_other_options_are_named_and_nothing_changes(saved, own, message):
    state, guide = randomize(make(saved)).state_dict(), make(own)
    before = snapshot(guide)
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=rf"{message} at the site 'net\.0\.weight'"):
            guide.load_state_dict(state, strict)
    assert_unchanged(guide, before)


SAME_OPTIONS = {
    "whole numbers and others": (LowRank(2, alpha=2), LowRank(2, alpha=2.0)),
    "memory": (FullCovariance(max_memory=1.0), FullCovariance()),
    "subnetwork": (Subnetwork(), Subnetwork()),
}


@pytest.mark.parametrize(("saved", "own"), SAME_OPTIONS.values(), ids=SAME_OPTIONS)
def test_what_changes_no_distribution_is_not_compared(saved, own):
    state, guide = randomize(make(saved)).state_dict(), make(own)
    guide.load_state_dict(state)
    assert all(torch.equal(own, state[name]) for name, own in guide.named_parameters())


def test_arithmetic_on_a_whole_state_leaves_the_options():
    guide = make(KTied(2))
    for change in (
        lambda value: value + 0.1,
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


@pytest.mark.parametrize("change", ["shape", "missing", "unknown"])
def test_a_state_that_does_not_fit_changes_nothing(change):
    guide = make(MeanField())
    state, before = snapshot(randomize(make(MeanField()))), snapshot(guide)
    last = list(state)[-3]
    if change == "shape":
        state[last] = torch.zeros(7)
    elif change == "missing":
        del state[last]
    else:
        state["other"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"size mismatch|Missing key|Unexpected key"):
        guide.load_state_dict(state)
    assert_unchanged(guide, before)
    if change != "shape":
        guide.load_state_dict(state, strict=False)
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


def test_options_of_a_family_of_the_users_own():
    options = {"table": torch.tensor([1.0, 2.0]), "names": ("a", (1, True)), "function": len}
    guide = make(Mine(**options))
    guide.load_state_dict(make(Mine(**options)).state_dict())
    for name, value in {"table": torch.zeros(2), "names": ("a", (2, True))}.items():
        with pytest.raises(RuntimeError, match=f"{name}.* = .* instead of"):
            guide.load_state_dict(make(Mine(**options | {name: value})).state_dict())


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
