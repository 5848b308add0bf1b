"""Dropout and other random functions of known inputs."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyro_structvi.moments.random_tensor import RandomTensor, Settings, random_among
from pyro_structvi.moments.rules import moments_of_call, name_of


class OwnDraws(TorchFunctionMode):
    """Gives functions that draw the moments of their results for known inputs, too, in this block.

    Torch itself would return a draw.

    Example:
        >>> x = torch.tensor([1.0, 2.0])
        >>> with OwnDraws(Settings()):
        ...     y = F.dropout(x, 0.5)
        >>> y.loc, y.variance
        (tensor([1., 2.]), tensor([1., 4.]))
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _DRAWING or not _DRAWING[func](*args, **kwargs):
            return func(*args, **kwargs)
        if func in _OF_ONE_INPUT and not [*random_among((args, kwargs))]:
            return self._of_known(func, *args, **kwargs)
        with self:  # of functions that call dropout
            return moments_of_call(func, args, kwargs)

    def _of_known(
        self, function: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        known = RandomTensor(input, torch.zeros_like(input), self.settings)
        found = moments_of_call(function, (known, *args), kwargs)
        if found is known:
            raise NotImplementedError(
                f"`{name_of(function)}` would make a known tensor random in place. Take a function that "
                "returns another tensor, as with `inplace=False`."
            )
        return found


# ---- from the arguments of a call to whether it draws ---------------------------------------------


def _drops(
    input: Any, p: float, training: bool = False, inplace: bool = False, *, train: bool = False
) -> bool:
    return p > 0 and (training or train)


def _draws_slopes(
    input: Any, lower: Any = 0, upper: Any = 0, training: bool = False, *_: Any, **__: Any
) -> bool:
    return training


def _drops_weights(
    query: Any, key: Any, value: Any, mask: Any = None, dropout_p: float = 0.0, *_: Any, **__: Any
) -> bool:
    return dropout_p > 0


def _drops_weights_of_heads(*args: Any, training: bool = True, **kwargs: Any) -> bool:
    dropout_p = args[10] if len(args) > 10 else kwargs["dropout_p"]
    return dropout_p > 0 and (args[13] if len(args) > 13 else training)


def _drops_between_layers(*args: Any) -> bool:
    is_packed = isinstance(args[3], (list, tuple))  # the second argument is the sizes of batches
    num_layers, dropout, training = args[5:8] if is_packed else args[4:7]
    return bool(num_layers > 1 and dropout > 0 and training)


_OF_ONE_INPUT: dict[Callable[..., Any], Callable[..., bool]] = {
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d), _drops),
    **dict.fromkeys((torch.dropout, torch.dropout_), _drops),
    **dict.fromkeys((torch.feature_dropout, torch.feature_dropout_), _drops),
    **dict.fromkeys((F.alpha_dropout, torch.alpha_dropout, torch.alpha_dropout_), _drops),
    **dict.fromkeys((F.feature_alpha_dropout, torch.feature_alpha_dropout), _drops),
    torch.feature_alpha_dropout_: _drops,
    **dict.fromkeys((F.rrelu, torch.rrelu, torch.rrelu_), _draws_slopes),
}
_DRAWING: dict[Callable[..., Any], Callable[..., bool]] = {
    **_OF_ONE_INPUT,
    F.scaled_dot_product_attention: _drops_weights,
    F.multi_head_attention_forward: _drops_weights_of_heads,
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _drops_between_layers),
}
