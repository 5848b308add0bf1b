"""Every public callable says which argument is wrong: one at a time, by the table of valid ones."""

import itertools

import pyro
import pyro.poutine as poutine
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import pyro_structvi as ps
from pyro_structvi.families import MeanField
from tests.bad_input.cases import CALLABLES, VALID, case_of
from tests.bad_input.exceptions import EXCEPTIONS, FINE, is_listed
from tests.bad_input.judging import judge, prepared, wrong_calls
from tests.bad_input.public import ABSTRACT, METHODS_BETWEEN_PARTS, RECORDS
from tests.models import make_regressor, regression_data

NAMES = sorted(CALLABLES)


def owner_of(name):
    start = "families." if name.startswith("families.") else ""
    return start + name.removeprefix(start).partition(".")[0]


OWNED = {
    owner: [*names] for owner, names in itertools.groupby(sorted(NAMES, key=owner_of), owner_of)
}


def calls_to_judge(case):
    """Return the wrong calls by argument, without values that are fine or excepted."""
    calls = [
        (argument, label, value)
        for argument, label, value in wrong_calls(case)
        if not is_listed(FINE, case, argument, label)
        and not any(is_listed(listed, case, argument, label) for listed in EXCEPTIONS.values())
    ]
    return {name: [*group] for name, group in itertools.groupby(calls, lambda call: call[0])}


def assert_clear(case, calls):
    verdicts = [(*call[:2], *judge(case, call[0], call[2])) for call in calls]
    wrong = [
        f"{name} = {label}: {verdict} {text}"
        for name, label, verdict, text in verdicts
        if verdict != "clear"
    ]
    assert not wrong, "\n".join(wrong)


def test_names_that_need_no_entry_exist():
    """So that a name which is left out goes with what it was for."""
    modules = [ps, ps.families, ps.distributions, ps.guides, ps.nn, ps.infer, ps.posterior]
    modules += [ps.reference, ps.metrics, ps.pruning, ps.diagnostics, ps.moments]
    known = {name for module in modules for name in dir(module)}
    assert known >= RECORDS | ABSTRACT
    methods = {name for module in modules for value in vars(module).values() for name in dir(value)}
    assert methods >= METHODS_BETWEEN_PARTS
    assert set(VALID) <= set(CALLABLES)


@pytest.mark.parametrize("owner", OWNED)
def test_one_wrong_argument_is_named(owner):
    """A wrong value of each argument, another one for each callable; the slow tests have all of them."""
    for name in OWNED[owner]:
        case, number = case_of(name), NAMES.index(name)
        assert case.named_parameters <= set(prepared(case)), "a parameter has no valid argument"
        groups = calls_to_judge(case).values()
        assert_clear(case, [group[number % len(group)] for group in groups])


@pytest.mark.slow
@pytest.mark.parametrize("owner", OWNED)
def test_every_wrong_argument_is_named(owner):
    for case in map(case_of, OWNED[owner]):
        assert_clear(case, itertools.chain(*calls_to_judge(case).values()))


# ---- examples ------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


class Counted(Stream):
    def __len__(self):
        return 3


def predict(x):
    model = make_regressor()
    return ps.predict(model, ps.MeanFieldGuide(model), x, num_samples=2)


def fit(**options):
    model = make_regressor()
    options = {"data": regression_data(), "num_steps": 1, "progress": False} | options
    return ps.fit(model, ps.MeanFieldGuide(model), **options)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_examples():
    def none(parameters, lr):
        pass

    array, pyros = torch.zeros(5, 3).numpy(), pyro.optim.Adam({"lr": 0.1})
    rate = r"`lr` must be a number where `optimizer` has no rate of its own, but got None\. Write"
    keys, no_rows = {3: MeanField()}, nn.Linear(0, 3)
    for error, message, call in (
        (TypeError, r"`x` must be a tensor, or a tuple .* but got \(\)", lambda: predict(())),
        (ValueError, "`x` must hold at least one exa", lambda: predict(torch.zeros(0, 3))),
        (TypeError, r"`x` must be .* ndarray of shape \(5, 3\).*`torch.as", lambda: predict(array)),
        (TypeError, "`optimizer` must be `torch.optim.Adam` or", lambda: fit(optimizer=pyros)),
        (TypeError, "an Optimizer, but got None", lambda: fit(optimizer=none, lr=0.1)),
        (ValueError, rate, lambda: fit(optimizer=none, lr=None)),
        (TypeError, "`data` must know its length .* Stream does", lambda: fit(data=Stream())),
        (TypeError, "`data` must know its length .* Counted does", lambda: fit(data=Counted())),
        (TypeError, "in a DataLoader needs `__len__`", lambda: fit(data=DataLoader(Stream()))),
        (
            TypeError,
            r"`families.keys\(\)` must be a string, but got 3",
            lambda: ps.StructuredGuide(make_regressor(), keys),
        ),
        (
            ValueError,
            r"`net` must have values .*leave layers without elements out",
            lambda: ps.bayesianize(no_rows),
        ),
    ):
        with pytest.raises(error, match=message):
            call()


class Squeezed(nn.Linear):
    def forward(self, x):
        return super().forward(x).squeeze()


def test_a_net_that_takes_a_batch_of_one_apart():
    """And one that says itself that its input is of another shape."""
    message = r"`x` is a batch of one example, but .* Write `squeeze\(-1\)` there"
    scalar = r"`x` is a batch of one example, but the net's output has shape \(\)"
    for make, own in (
        (lambda: ps.Classifier(ps.bayesianize(Squeezed(3, 1)), 5), message),
        (lambda: ps.Regressor(ps.bayesianize(Squeezed(3, 2)), 5, 0.1), message),
        (lambda: ps.Regressor(ps.bayesianize(Squeezed(3, 1)), 5, 0.1), scalar),
    ):
        with pytest.raises(ValueError, match=own):
            poutine.block(make())(torch.zeros(1, 3))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        poutine.block(make_regressor())(torch.zeros(5, 2))
    notes = raised.value.__cause__ or raised.value
    assert notes.__notes__ == [
        "The argument `x` was a torch.Tensor of shape (5, 2) and dtype torch.float64."
    ]


def test_no_message_prints_what_a_tensor_holds():
    for wrong in (torch.full((4, 3), 77.125), torch.full((4, 3), 77.125).numpy()):
        with pytest.raises(ValueError, match="of shape") as raised:
            ps.KTiedGuide(make_regressor(), rank=wrong)
        assert "77" not in str(raised.value)
