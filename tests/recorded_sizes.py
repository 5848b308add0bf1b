"""The sizes of the tensors that a computation forms."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class RecordsSizes(TorchDispatchMode):
    """Records the number of elements of every tensor that is computed, views of ``known`` excepted.

    ``sizes`` has that of each tensor, ``stored`` that of the memory it lies in; meta tensors have none.
    """

    def __init__(self, *known):
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.sizes, self.stored = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.known:
                self.sizes.append(tensor.numel())
                self.stored.append(storage.nbytes() // tensor.element_size())
        return result
