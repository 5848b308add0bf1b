"""The row of padding in an embedding, which has no gradient in torch and so no posterior here."""

from collections import Counter
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pyro_structvi._torch import remove_hooks
from pyro_structvi.weights.lazy import WeightPlaceholder

ROW = "padding_row"


def keep_padding_rows(net: nn.Module, sampled: Container[int]) -> None:
    """Let embeddings of a net look up padding as it is, before their weights are sampled.

    Draws would be noise of the prior, because a lookup of padding has no gradient. A weight of several
    modules is left out: another use of it informs the row. A net of ``to_net`` may have its row already.
    """
    modules = [*net.modules()]
    owners = Counter(id(own) for each in modules for own in each.parameters(recurse=False))
    for module in modules:
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            weight = module.weight
            is_own = id(weight) in sampled and owners[id(weight)] == 1
            if is_own and not has_padding_row(module):
                module.register_buffer(ROW, weight.detach()[module.padding_idx].clone())
                module.register_forward_hook(put_padding, with_kwargs=True)


def put_padding(module: Any, args: Any, kwargs: Any, outputs: Tensor) -> Tensor:
    """Put the row of padding into the outputs of an embedding: a hook."""
    if isinstance(module.weight, WeightPlaceholder):
        module.weight.note_lookup()
    index = args[0] if args else kwargs["input"]
    is_padding = (index == module.padding_idx).unsqueeze(-1)
    return torch.where(is_padding, getattr(module, ROW), outputs)


def has_padding_row(module: nn.Module) -> bool:
    """Whether the padding of a module is looked up as it is."""
    return ROW in dict(module.named_buffers(recurse=False))


@torch.no_grad()
def write_padding_row(module: Any, parameters: Mapping[str, Tensor]) -> None:
    """Write the row of padding into a plain embedding's own weight, and look it up there."""
    parameters["weight"][module.padding_idx] = module.get_buffer(ROW)
    remove_hooks(module, (put_padding,))
    delattr(module, ROW)
