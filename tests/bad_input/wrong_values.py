"""Wrong values for an argument, chosen by the kind of a valid one."""

import inspect
import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor

HUGE = 10**12


class Unknown:
    """Of a type that nothing expects."""


USUAL = {"text": "abc", "none": None, "number": 3.5, "unknown": Unknown()}


def of_any(valid):
    return USUAL | {"class": type(valid), "nested": {"abc": [1]}}


def of_number(valid, is_float):
    of_int = {} if is_float else {"fraction": 1.5, "huge": HUGE}
    return of_int | {
        "text": "abc",
        "none": None,
        "unknown": Unknown(),
        "class": type(valid),
        "list": [valid],
        "tensor": torch.tensor([1.0, 2.0]),
        "zero": 0,
        "negative": -1,
        "nan": math.nan,
        "infinity": math.inf,
        "true": True,
    }


def of_flag(valid):
    return {"text": "abc", "none": None, "unknown": Unknown(), "two": 2, "tensor": torch.ones(2)}


def of_text(valid):
    return USUAL | {"empty": ""}


def of_tensor(valid, is_positive):
    values = USUAL | {
        "class": Tensor,
        "list": valid.tolist(),
        "numpy": valid.numpy(),
        "scalar": valid.new_ones(()),
        "empty": valid.new_empty(0),
        "deeper": valid.unsqueeze(0).unsqueeze(0).repeat(1, 2, *(1 for _ in valid.shape)),
        "complex": valid.to(torch.complex128),
        "meta": valid.to("meta"),
    }
    if valid.dim():
        values["longer"] = torch.cat([valid, valid[:1]])
        values["wider"] = torch.cat([valid, valid[..., :1]], -1)
    if valid.is_floating_point():
        values |= {
            "whole": valid.to(torch.long),
            "float32": valid.to(torch.float32),
            "nan": valid * math.nan,
            "infinity": torch.full_like(valid, math.inf),
        }
    if is_positive:
        values |= {"negative": -1 - valid.abs(), "zero": torch.zeros_like(valid)}
    if not valid.is_floating_point():
        values |= {"real": valid + 0.5}
    if valid.dtype == torch.long:
        values |= {"negative": -1 - valid, "too large": valid + 10**6, "true": valid.bool()}
    return values


def of_shape(valid):
    kind = type(valid)
    return USUAL | {
        "negative": kind([-1 for _ in valid or (1,)]),
        "fractions": tuple(1.5 for _ in valid or (1,)),
        "texts": tuple("a" for _ in valid or (1,)),
        "huge": kind([HUGE for _ in valid or (1,)]),
    }


def of_mapping(valid):
    name, entry = next(iter(valid.items()))
    return USUAL | {
        "class": dict,
        "list": [entry],
        "empty": {},
        "number as key": {3: entry},
        "unknown key": {"nothing": entry},
        "text as entry": {name: "abc"},
        "none as entry": {name: None},
        "class as entry": {name: type(entry)},
    }


def of_tuple(valid):
    return USUAL | {
        "nested": {"abc": [1]},
        "empty": (),
        "text as entry": ("abc", *valid[1:]),
        "none as entry": (None, *valid[1:]),
        "numpy as entry": (valid[0].numpy(), *valid[1:]),
        "longer entry": (torch.cat([valid[0], valid[0][:1]]), *valid[1:]),
        "no rows": tuple(value[:0] for value in valid),
        "nan as entry": (valid[0] * math.nan, *valid[1:]),
    }


def wrong_values(name, valid, parameter):
    """Return wrong values by label; None is left out where the signature allows it."""
    annotation = "" if parameter is None else inspect.formatannotation(parameter.annotation)
    is_positive = bool(re.search("scale|diagonal|variance|prob|tril", name)) and "log" not in name
    if isinstance(valid, bool):
        values = of_flag(valid)
    elif isinstance(valid, (int, float)):
        values = of_number(valid, re.search("float|number|Share", annotation))
    elif isinstance(valid, Tensor):
        values = of_tensor(valid, is_positive)
    elif isinstance(valid, tuple):
        values = (of_tuple if valid and isinstance(valid[0], Tensor) else of_shape)(valid)
    else:
        kinds = {str: of_text, Mapping: of_mapping, object: of_any}
        values = next(make(valid) for kind, make in kinds.items() if isinstance(valid, kind))
    if parameter is not None and (
        parameter.default is None or re.search("None|Optional", annotation)
    ):
        values.pop("none", None)
    return values
