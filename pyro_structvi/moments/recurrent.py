"""Moments of recurrent layers, whose steps are functions with rules."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

State = tuple[Any, ...]
Step = Callable[..., State]


def _plain_step(
    activate: Callable[[Any], Any], of_input: Any, state: State, weight: Any, bias: Any
) -> State:
    return (activate(of_input + F.linear(state[0], weight, bias)),)


def _lstm_step(
    of_input: Any, state: State, weight: Any, bias: Any, projection: Any = None
) -> State:
    h, c = state
    i, f, g, o = (of_input + F.linear(h, weight, bias)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (h if projection is None else F.linear(h, projection)), c


def _gru_step(of_input: Any, state: State, weight: Any, bias: Any) -> State:
    (h,) = state
    r, z, n = of_input.chunk(3, -1)
    own_r, own_z, own_n = F.linear(h, weight, bias).chunk(3, -1)
    new = (n + (r + own_r).sigmoid() * own_n).tanh()
    return (torch.lerp(new, h, (z + own_z).sigmoid()),)


def _cell(step: Step, input: Any, hx: Any, weight: Any, own: Any, *biases: Any) -> Any:
    """Take one step; the arguments are those that torch's cells pass."""
    of_input, of_state = biases or (None, None)
    state = step(F.linear(input, weight, of_input), _as_state(hx), own, of_state)
    return state if len(state) > 1 else state[0]


def _layer(
    step: Step,
    input: Any,
    hx: Any,
    params: Any,
    has_biases: Any,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> tuple[Any, ...]:
    """Take all steps of all layers; the arguments are those that torch's layers pass."""
    if isinstance(has_biases, (list, tuple)):  # the second argument is the sizes of batches
        raise NotImplementedError(
            "A packed sequence has no moments. Pass a padded one, or predict with draws."
        )
    ways = 2 if bidirectional else 1
    size = len(params) // (num_layers * ways)
    sequence = input.transpose(0, 1) if batch_first else input
    ends: list[State] = []
    for layer in range(num_layers):
        if layer and train and dropout:
            sequence = F.dropout(sequence, dropout)
        found = []
        for way in range(ways):
            number = len(ends)
            weight, own, *rest = params[number * size : (number + 1) * size]
            of_input, of_state, *projection = rest if has_biases else (None, None, *rest)
            state = tuple(part[number] for part in _as_state(hx))
            inputs = F.linear(sequence, weight, of_input).unbind(0)
            outputs = []
            for each in reversed(inputs) if way else inputs:
                state = step(each, state, own, of_state, *projection)
                outputs.append(state[0])
            found.append(torch.stack(outputs[::-1] if way else outputs))
            ends.append(state)
        sequence = torch.cat(found, -1) if bidirectional else found[0]
    output = sequence.transpose(0, 1) if batch_first else sequence
    return output, *(torch.stack([*parts]) for parts in zip(*ends, strict=True))


def _as_state(hx: Any) -> State:
    return tuple(hx) if isinstance(hx, (list, tuple)) else (hx,)


_STEPS: dict[str, Step] = {
    "rnn_tanh": partial(_plain_step, torch.tanh),
    "rnn_relu": partial(_plain_step, torch.relu),
    "lstm": _lstm_step,
    "gru": _gru_step,
}

RECURRENT_RULES: dict[str, Callable[..., Any]] = {
    **{name: partial(_layer, step) for name, step in _STEPS.items()},
    **{f"{name}_cell": partial(_cell, step) for name, step in _STEPS.items()},
}
