"""The methods that are measured: how each steps, and how it predicts.

A further way to step is a function like ``step_eagerly``, and a line that makes methods with it.
"""

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import pyro
import torch
import torch.nn.functional as F
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from torch import Tensor, nn

import pyro_structvi as ps
from benchmarks.choices import CHOICES
from pyro_structvi.infer.steps.compiled import CompiledStep
from pyro_structvi.infer.steps.eager import Loss
from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.posterior.prediction import Prediction
from pyro_structvi.testing import guides_for, layered_for, points_for


class Method(NamedTuple):
    """What is done to a net.

    Attributes:
        step: A training step on a batch.
        predict: Predicts at its inputs with so many draws; None where another method does the same.
        warm_up: How many steps are unlike those after them.
    """

    step: Callable[[], Any]
    predict: Callable[[int], Any] | None
    warm_up: int = 1  # makes the optimizer's state


MakeGuide = Callable[[ps.Classifier], Any]
MakeStep = Callable[[ps.Classifier, Any, Tensor, Tensor], Callable[[], Any]]
MakeMethod = Callable[[nn.Module, Tensor, Tensor], Method]

# An engine takes an ordinary step, traces, and compiles; on a GPU it warms up in three steps instead,
# and captures in the next, which allocates all that the later ones use.
COMPILING_STEPS = 6 if torch.cuda.is_available() else 4


# ---- ways to step --------------------------------------------------------------------------------


def make_deterministic(net: nn.Module, x: Tensor, y: Tensor) -> Method:
    @torch.no_grad()
    def predict(count: int) -> Tensor:
        net.eval()
        probabilities = torch.stack([net(x).softmax(-1) for _ in range(count)]).mean(0)
        net.train()
        return probabilities

    loss = lambda: F.cross_entropy(net(x), y)  # noqa: E731
    return Method(step_with_adam(loss, net.parameters()), predict)


def step_with_adam(
    loss: Callable[[], Tensor], parameters: Any, capturable: bool = False
) -> Callable[[], None]:
    optimizer = torch.optim.Adam(parameters, lr=1e-4, fused=True, capturable=capturable)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def step_eagerly(
    model: ps.Classifier, guide: ps.StructuredGuide, x: Tensor, y: Tensor
) -> Callable[[], None]:
    loss = ps.StructuredELBO()(model, guide)
    loss(x, y)  # the run that counts uses
    return step_with_adam(lambda: loss(x, y), [*guide.parameters(), *model.parameters()])


def step_by_moments(
    model: ps.Classifier, guide: ps.StructuredGuide, x: Tensor, y: Tensor
) -> Callable[[], None]:
    loss = ps.StructuredELBO(estimator="moments")(model, guide)
    loss(x, y)
    return step_with_adam(lambda: loss(x, y), [*guide.parameters(), *model.parameters()])


def step_by_pyro(model: ps.Classifier, guide: Any, x: Tensor, y: Tensor) -> Callable[[], float]:
    """Under ``Trace_ELBO``: autoguides have deltas at the model's sites, and no KL in closed form."""
    guide(x, y)  # its parameters are made in the first run
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 1e-4}), Trace_ELBO())
    return lambda: svi.step(x, y)


def step_of_fit(
    model: ps.Classifier, guide: ps.StructuredGuide, x: Tensor, y: Tensor, backend: str | None
) -> Callable[[], float]:
    """As ``fit`` does it, with its optimizer, once it has traced a step or compiled it by a backend."""
    guide.initialize(x, y)
    loss = Loss(model, guide, ps.StructuredELBO())
    optimizer = OneOptimizer(ps.StructuredAdam([*loss.trained.values()], guide, lr=1e-4))
    step = CompiledStep(loss, optimizer, backend=backend, watches=False)
    return lambda: step(x, y).loss


step_traced = partial(step_of_fit, backend=None)
step_compiled = partial(step_of_fit, backend="auto")


def make_deterministic_compiled(net: nn.Module, x: Tensor, y: Tensor) -> Method:
    """By inductor on a CPU, as one graph with the update on a GPU."""
    loss = lambda: F.cross_entropy(net(x), y)  # noqa: E731
    if x.is_cuda:
        return Method(capture(step_with_adam(loss, net.parameters(), capturable=True)), None)
    return Method(step_with_adam(torch.compile(loss, dynamic=False), net.parameters()), None)


def capture(step: Callable[[], None]) -> Callable[[], None]:
    """Return a step that is a CUDA graph once it has warmed up."""
    own, graph, calls = torch.cuda.Stream(), torch.cuda.CUDAGraph(), count()

    def take_step() -> None:
        number = next(calls)
        if number < COMPILING_STEPS:
            own.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(own):
                step()
            torch.cuda.current_stream().wait_stream(own)
            return
        if number == COMPILING_STEPS:
            with torch.cuda.graph(graph):
                step()
        graph.replay()

    return take_step


def compiled(make_method: MakeMethod) -> MakeMethod:
    return lambda net, x, y: make_method(net, x, y)._replace(predict=None, warm_up=COMPILING_STEPS)


def make_methods(
    guides: dict[str, MakeGuide], make_step: MakeStep, in_one_pass: bool = False
) -> dict[str, MakeMethod]:
    return {
        title: make_guided(title, make, make_step, in_one_pass) for title, make in guides.items()
    }


def make_guided(
    title: str, make_guide: MakeGuide, make_step: MakeStep, in_one_pass: bool
) -> MakeMethod:
    layers = {"*": LAYERS[title]} if title in LAYERS else None

    def make(net: nn.Module, x: Tensor, y: Tensor) -> Method:
        own: Any = {"params": {}, "constraints": {}}
        in_own_store = pyro.get_param_store().scope  # nets have the same names for parameters
        with in_own_store(own):
            model = ps.Classifier(ps.bayesianize(net, prior=0.3, layers=layers), num_data=60_000)
            guide = make_guide(model)
            take_step = make_step(model, guide, x, y)

        def step() -> None:
            with in_own_store(own):
                take_step()

        def predict(count: int) -> Prediction:
            with in_own_store(own):
                if in_one_pass:
                    return ps.predict_moments(model, guide, x)
                return ps.predict(model, guide, x, num_samples=count)

        return Method(step, predict)

    return make


# ---- the guides ----------------------------------------------------------------------------------


def make_subnetwork(model: ps.Classifier) -> ps.StructuredGuide:
    center = ps.MAPGuide(model)
    scores = {name: value.abs() for name, value in center.draw().items()}
    return ps.SubnetworkGuide(model, ps.element_scores.largest(scores, 200), center)


GUIDES: dict[str, MakeGuide] = {
    **points_for("benchmarks"),
    **guides_for("benchmarks"),
    **layered_for("benchmarks"),
    "subnetwork of 200": make_subnetwork,
    "Walsh-Hadamard": lambda model: ps.MeanFieldGuide(model),
    "Walsh-Hadamard, full": lambda model: ps.FullCovarianceGuide(model),
    "rank-1": lambda model: ps.MeanFieldGuide(model),
}

LAYERS: dict[str, Any] = {
    "Walsh-Hadamard": ps.WalshHadamard(),
    "Walsh-Hadamard, full": ps.WalshHadamard(),
    "rank-1": ps.RankOne(),
}

PYRO_GUIDES: dict[str, MakeGuide] = {
    "Pyro AutoNormal": lambda model: AutoNormal(model),
    "Pyro AutoLowRank, rank 2": lambda model: AutoLowRankMultivariateNormal(model, rank=2),
    "Pyro AutoMultivariate": lambda model: AutoMultivariateNormal(model),
}

COMPILED = ["mean field", "k-tied, k = 1", "k-tied, k = 2", "low rank, K = 2", "inducing 64"]

TRACED = ["rowwise", "matrix normal", "global inducing"]

ONE_PASS = ["mean field", "k-tied, k = 2", "matrix normal", "low rank, K = 2", "inducing 64"]

DENSE = {"small", "mnist", "mnist2048", "wide", "huge"}
ALL = DENSE | {"lenet", "resnet18", "lstm"}

ONLY = {
    "ensemble of 5": DENSE | {"lenet"},  # torch cannot vectorize batch norms, nor an LSTM
    "ensemble of 5, in turn": {"resnet18", "lstm"},  # elsewhere members run in one pass
    "mixture of 5, k-tied": DENSE - {"huge"} | {"lenet"},  # likewise
    "mean field, flipout": {"lenet", "resnet18"},  # for dense layers it is the local rule
    "rowwise": {"small", "lenet", "lstm"},  # elsewhere too much memory; mnist: 20 s a step
    "global inducing": {"small", "mnist", "lenet"},  # wide: matrices of 2048 x 2048 in each draw
    "full covariance": {"small"},  # elsewhere refused: at least 34 GiB
    "matrix normal": ALL - {"resnet18", "huge"},  # there 22 s a round, a third of all others' 60 s
    "eigenbasis": ALL - {"resnet18", "huge"},  # likewise
    "Walsh-Hadamard, full": DENSE - {"huge"} | {"lenet"},  # resnet18: 17 s a round; not for LSTMs
    "Pyro AutoNormal": ALL - {"huge"},  # 4 GiB, beside the many of the others
    "Pyro AutoLowRank, rank 2": ALL - {"huge"},  # likewise
    "Pyro AutoMultivariate": {"small"},  # elsewhere at least 14 GiB, four times
}

# A batch norm in training has no moments; an LSTM's step by moments takes seconds.
ONLY |= {f"{title}, one pass": DENSE - {"huge"} | {"lenet"} for title in ONE_PASS}
ONLY["mean field, one pass"] |= {"lstm"}

DETERMINISTIC = "deterministic"
METHODS = {DETERMINISTIC: make_deterministic} | make_methods(GUIDES, step_eagerly)
METHODS |= {
    f"{title}, one pass": make
    for title, make in make_methods(
        {title: GUIDES[title] for title in ONE_PASS}, step_by_moments, in_one_pass=True
    ).items()
}
PYRO_METHODS = make_methods(PYRO_GUIDES, step_by_pyro)
COMPILED_METHODS = {
    f"{title}, compiled": compiled(make)
    for title, make in {
        DETERMINISTIC: make_deterministic_compiled,
        **make_methods({title: GUIDES[title] for title in COMPILED}, step_compiled),
    }.items()
}
TRACED_METHODS = {
    f"{title}, traced": compiled(make)
    for title, make in make_methods(
        {title: GUIDES[title] for title in [*COMPILED, *TRACED]}, step_traced
    ).items()
}
ONLY |= {f"{title}, traced": ONLY[title] for title in TRACED}
# The guides of the front page with their options, as ``fit`` trains them unless a run is so long that
# compiling pays.
CHOSEN_METHODS = {
    title: compiled(make)
    for title, make in make_methods(
        {choice.code: choice.make for choice in CHOICES}, step_traced
    ).items()
}
TOO_LARGE_FOR_WIDE = ("RowwiseGuide", "FullCovarianceGuide")  # at least 32 GiB of parameters
ONLY |= {
    title: {"small"} if title.startswith(TOO_LARGE_FOR_WIDE) else {"small", "wide"}
    for title in CHOSEN_METHODS
}
# Compiling takes 15 to 30 s a method and net, and one to two minutes on ResNet-18 and the ConvNeXt.
# Beside the methods of huge there is no memory.
OTHERS = {"bert", "llama", "convnext", "gcn"}
ONLY |= {title: {"small", "mnist", "wide"} | OTHERS for title in COMPILED_METHODS}
for title in ("mean field", "k-tied, k = 1", "k-tied, k = 2", "low rank, K = 2"):
    ONLY[f"{title}, compiled"] |= {"lenet", "lstm", "resnet18"}
