"""Every public callable with valid arguments, each stated once."""

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pyro.poutine as poutine
import torch

from pyro_structvi import reference
from pyro_structvi.guides import StructuredGuide
from pyro_structvi.maps import Arrangement
from pyro_structvi.nn.rank_one import FactorLayer
from pyro_structvi.reference import sampling
from pyro_structvi.testing import GUIDES, LAYERED, POINTS
from pyro_structvi.weights.weight_distribution import GaussianWeight
from tests.bad_input.public import public_callables
from tests.bad_input.valid import (
    OF_DISTRIBUTIONS,
    OF_FIGURES,
    OF_FITS,
    OF_GUIDES,
    OF_MODELS,
    OPTIONS,
    SIZE,
    USUAL,
    USUAL_GUIDES,
    inputs,
    passes,
    positive,
    regressor,
    targets,
)
from tests.distributions.cases import CASES

VALID = OF_MODELS | OF_GUIDES | OF_FITS | OF_FIGURES | OF_DISTRIBUTIONS

# Options of guides by their names, the last variant's.
OF_REGISTRY = {
    key: value for guide in (*GUIDES, *POINTS, *LAYERED) for key, value in guide.options.items()
}
OF_STRUCTURES = {type(case.make((), (4, 3), torch.float64)): case.make for case in CASES}

# ---- methods -------------------------------------------------------------------------------------

# Of methods of guides and of distributions: their arguments, for what owns them.
OF_METHODS: dict[str, Callable[[Any], dict[str, Any]]] = {
    **dict.fromkeys(("initialize", "report"), lambda guide: {"x": inputs(), "y": targets()}),
    "forward": lambda own: (
        {"x": torch.randn(5, own.channels, *[4] * (-1 - own.channel_dim))}
        if isinstance(own, FactorLayer)
        else {"x": inputs(), "y": targets()}
    ),
    "weight": lambda layer: {"coefficients": torch.randn(layer.row_scale.shape)},
    "__call__": lambda schedule: {"step": 3},
    "draw": lambda guide: {"local": False, "number": 0},
    "quantiles": lambda guide: {"quantiles": [0.1, 0.5]},
    **dict.fromkeys(("to_net", "sampled"), lambda guide: {"draw": make("MeanFieldGuide").draw()}),
    "sample_functions": lambda guide: {"num_samples": 2},
    "load_state_dict": lambda guide: {
        "state_dict": guide.state_dict(),
        "strict": True,
        "assign": False,
    },
    "log_prob": lambda q: {"value": q.rsample() if q.has_rsample else q.sample()},
    **dict.fromkeys(("rsample", "sample"), lambda q: {"sample_shape": (2,)}),
    "expand": lambda q: {"batch_shape": torch.Size([2])},
    "image": lambda q: {"x": torch.randn(5, q.event_shape[1:].numel())},
    "rows": lambda q: {"index": torch.tensor([[0, 1], [2, 3]])},
    "rearranged": lambda q: {
        "arrangement": Arrangement.of_dims(tuple(range(len(q.event_shape))), tuple(q.event_shape))
    },
    "condition": lambda q: (
        {"whitened": torch.randn(3, 2)}
        if isinstance(q, GaussianWeight)
        else {"u": torch.randn(2, 2), "conditional_scale": positive()}
    ),
}


def examples(y):
    return {"x": inputs(), "y": y, "weights": torch.ones(SIZE)}


OF_OTHERS: dict[str, Callable[[], dict[str, Any]]] = {
    "JoinedPrior.log_prob": lambda: {"value": torch.randn(4, 4)},
    "Classifier.forward": lambda: examples(torch.tensor([0, 1, 0, 1, 0, 1])),
    "TokenClassifier.forward": lambda: {
        **examples(torch.randint(2, (SIZE, 4))),
        "x": torch.randn(SIZE, 4, 3),
    },
    "LastLayer.forward": lambda: {"x": inputs()},
    "NetMoments.forward": lambda: {"x": inputs()},
    "Regressor.forward": lambda: examples(targets()),
    "BinaryClassifier.forward": lambda: examples(torch.ones(SIZE, 1)),
    "PoissonRegressor.forward": lambda: examples(torch.ones(SIZE, 1)),
    "FanIn.standard_deviation": lambda: {"parameter": torch.randn(4, 3), "fan_in": None},
    "StructuredAdam.step": lambda: {"closure": lambda: None},
    "StructuredAdam.load_state_dict": lambda: {"state_dict": make("StructuredAdam").state_dict()},
    "CompiledSVI.step": lambda: {"x": inputs(), "y": targets()},
    "CompiledSVI.evaluate_loss": lambda: {"x": inputs(), "y": targets()},
    **{
        f"StructuredELBO.{name}": passes
        for name in ("differentiable_loss", "loss", "loss_and_grads", "terms")
    },
}

# ---- cases ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A public callable with a function that makes valid arguments, new ones at each call."""

    name: str
    function: Callable[..., Any]
    arguments: Callable[[], dict[str, Any]]

    @property
    def parameters(self):
        return inspect.signature(self.function).parameters

    @property
    def unnamed_parameters(self):
        """Return the names of parameters that are positional alone."""
        own = self.parameters.items()
        return [name for name, each in own if each.kind == inspect.Parameter.POSITIONAL_ONLY]

    @property
    def named_parameters(self):
        """Return the parameters that a caller can name."""
        loose = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        named = {name for name, each in self.parameters.items() if each.kind not in loose}
        return named - {"self", "_instance"}


def valid(name):
    """Return valid arguments of a function or a class, in the order of its signature.

    They are those of the tables or of the structures, the usual ones by their names, defaults, and
    options in the registry of guides; what else may be None has to be given.
    """
    function = CALLABLES[name]
    own = inspect.signature(function).parameters
    defaults = {key: each.default for key, each in own.items() if each.default is not each.empty}
    given = {key: OF_REGISTRY[key] for key in own if key in OF_REGISTRY}
    given |= {key: value for key, value in defaults.items() if value is not None}
    given |= {key: make() for key, make in USUAL.items() if key in own}
    if own.keys() & {"model", "guide"}:
        model = regressor()
        given |= {key: make(model) for key, make in USUAL_GUIDES.items() if key in own}
        given |= {"model": model} if "model" in own else {}
    if isinstance(function, type) and issubclass(function, StructuredGuide):
        given |= OPTIONS if own.keys() & {"options", "create_plates"} else {}
    if name in VALID:
        given |= VALID[name]()
    elif function in OF_STRUCTURES:
        given |= of_structure(function)
    return {key: given[key] for key in (*own, *given) if key in given}


def make(name):
    return CALLABLES[name](**valid(name))


class _Unsampled:
    """In the place of NumPyro's MCMC: the arguments have passed, and sampling would take seconds."""

    def __init__(self, *args, **kwargs):
        pass

    def run(self, *args):
        raise StopIteration


@functools.wraps(reference.nuts)
def nuts_without_sampling(**arguments):
    with mock.patch.object(sampling, "MCMC", _Unsampled), suppress(StopIteration):
        reference.nuts(**arguments)


def with_one_input(function):
    """Return a function of any number of inputs as one of a single input, ``x``."""

    @functools.wraps(function)
    def call(*, x, **arguments):
        first = [arguments.pop(name) for name in [*arguments][:2]]
        return function(*first, x, **arguments)

    return call


def of_structure(cls):
    q = OF_STRUCTURES[cls]((), (4, 3), torch.get_default_dtype())
    return {name: getattr(q, name) for name in q.argument_names}


def case_of(name):
    """Return the case of a public callable, or raise a KeyError."""
    function = CALLABLES[name]
    if name in VALID or "." not in name.removeprefix("families."):
        if name == "nuts":
            function = nuts_without_sampling
        elif name in ("predict", "predict_moments"):
            function = with_one_input(function)
        return Case(name, function, functools.partial(valid, name))
    owner, method = name.rsplit(".", 1)
    own = OF_OTHERS.get(name) or (lambda: OF_METHODS[method](make(owner)))

    def call(**given):
        with poutine.block():  # under which random parameters may be read
            return getattr(make(owner), method)(**given)

    call.__signature__ = inspect.signature(function)
    return Case(name, call, own)


CALLABLES = public_callables()
