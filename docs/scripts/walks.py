"""How many files of the package a value passes on its way, checks and bookkeeping included.

    python docs/scripts/walks.py         # the numbers of docs/develop/design.md
    python docs/scripts/walks.py --names # and the files

A file counts where a function of it is called with a tensor that depends on the one parameter that is
trained, or, on the walk of an input, where one runs at all.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import pyro_structvi as ps

PACKAGE = Path(ps.__file__).parent
Counts = Callable[[FrameType], bool]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", action="store_true", help="list the files too")
    options = parser.parse_args()
    for title, files in walks().items():
        print(f"{title}: {len(files)} files")
        if options.names:
            print("  " + "\n  ".join(files))


def walks() -> dict[str, list[str]]:
    """Return the files of each walk in the order in which they are met."""
    return {
        "a parameter of KTiedGuide": of_a_parameter(ps.KTiedGuide, "log_row_scale"),
        "an input": of_an_input(),
        "inducing weights": of_a_parameter(ps.InducingWeightGuide, "row_factor"),
    }


def make_model(net: nn.Module) -> ps.Classifier:
    return ps.Classifier(ps.bayesianize(net, prior=1.0), num_data=20)


def make_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def of_a_parameter(make_guide: Callable[[Any], Any], name: str) -> list[str]:
    """Return the files from a parameter of the first layer to the loss."""
    data = torch.randn(20, 4), torch.randint(3, (20,))
    model = make_model(make_net())
    guide, objective = make_guide(model), ps.StructuredELBO()
    guide.initialize(*data)
    for path, value in guide.named_parameters():
        value.requires_grad_("net/0" in path and path.endswith(name))
    objective.differentiable_loss(model, guide, *data)  # the run that counts uses
    with recorded(lambda frame: any(map(depends, frame.f_locals.values()))) as files:
        objective.differentiable_loss(model, guide, *data)
    return files


def of_an_input() -> list[str]:
    """Return the files from the call of a linear layer to its drawn outputs."""
    data = torch.randn(20, 4), torch.randint(3, (20,))
    net = make_net()
    model = make_model(net)
    guide, objective, files = ps.KTiedGuide(model), ps.StructuredELBO(), []
    guide.initialize(*data)
    objective.differentiable_loss(model, guide, *data)
    layer = model.net[0]
    forward = type(layer).forward

    def watched(self: nn.Module, x: Tensor) -> Tensor:
        if self is not layer:
            return forward(self, x)  # type: ignore[arg-type]
        with recorded(lambda _: True) as found:
            output = forward(self, x)  # type: ignore[arg-type]
        files.extend(found)
        return output

    type(layer).forward = watched  # type: ignore[method-assign]
    objective.differentiable_loss(model, guide, *data)
    return files


@contextmanager
def recorded(counts: Counts) -> Iterator[list[str]]:
    """Give the files of the package whose functions are called in the block."""
    files: dict[str, None] = {}

    def called(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents and counts(frame):
            files.setdefault(str(path.relative_to(PACKAGE)))

    names: list[str] = []
    sys.setprofile(called)
    try:
        yield names
    finally:
        sys.setprofile(None)
        names += files


def depends(value: Any, depth: int = 0) -> bool:
    """Whether a value holds a tensor with a gradient, itself or in what it is made of."""
    if type(value) in (Tensor, nn.Parameter):
        return bool(value.requires_grad)
    if depth > 3 or isinstance(value, nn.Module):
        return False
    if isinstance(value, list | tuple):
        return any(depends(item, depth + 1) for item in value)
    if isinstance(value, dict):
        return any(depends(item, depth + 1) for item in value.values())
    is_ours = type(value).__module__.startswith("pyro_structvi.")
    return is_ours and any(depends(item, depth + 1) for item in vars(value).values())


if __name__ == "__main__":
    main()
