"""Nets and data of the deep nets' benchmark: images, and texts."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.nets import make_lenet, make_mlp

VOCABULARY = {"LSTM": 5000, "GPT": 1000}
LENGTH = {"LSTM": 100, "GPT": 33}
UNKNOWN = 2  # the token of rare words
Data = tuple[Tensor, Tensor]
Normalization = Callable[[int], nn.Module]  # of a number of channels


class Batches:
    """Mini-batches in random order; images of three channels are shifted and flipped."""

    def __init__(self, x: Tensor, y: Tensor, batch_size: int) -> None:
        self.x, self.y, self.batch_size = x, y, batch_size

    def __len__(self) -> int:
        """The number of mini-batches of an epoch."""
        return len(self.x) // self.batch_size

    def __iter__(self) -> Iterator[Data]:
        """Yield the mini-batches of an epoch."""
        order = torch.randperm(len(self.x), device=self.x.device)
        for index in order.split(self.batch_size)[: len(self)]:
            x = self.x[index]
            is_color = x.dim() == 4 and x.shape[1] == 3
            yield (augment(x) if is_color else x), self.y[index]


def augment(x: Tensor) -> Tensor:
    """Return images shifted by at most an eighth of their size, every other one mirrored."""
    number, _, _, size = x.shape
    shift = size // 8
    padded = F.pad(x, (shift,) * 4).movedim(1, -1)
    first = torch.randint(2 * shift + 1, (2, number, 1), device=x.device)
    rows, columns = first + torch.arange(size, device=x.device)
    is_mirrored = torch.rand(number, 1, device=x.device) < 0.5
    columns = torch.where(is_mirrored, columns.flip(-1), columns)
    images = torch.arange(number, device=x.device)[:, None, None]
    return padded[images, rows.unsqueeze(-1), columns.unsqueeze(-2)].movedim(-1, 1).contiguous()


class Block(nn.Module):
    """Two convolutions around which the input is added; a shortcut without parameters."""

    def __init__(self, inputs: int, outputs: int, normalization: Normalization) -> None:
        super().__init__()
        self.stride = outputs // inputs
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, self.stride, 1, bias=False), normalization(outputs)),
            nn.ReLU(),
            *(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), normalization(outputs)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        if self.stride == 1:
            return F.relu(self.body(x) + x)
        channels = x.shape[1]
        shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, channels // 2, channels // 2))
        return F.relu(self.body(x) + shortcut)


def make_resnet20(normalization: Normalization) -> nn.Sequential:
    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    blocks = [Block(*pair, normalization) for pair in pairwise(widths)]
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), normalization(16), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class LSTM(nn.Module):
    """The sentiment of a text, from the last hidden state."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY["LSTM"], size)
        self.lstm = nn.LSTM(size, size, batch_first=True)
        self.head = nn.Linear(size, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of two classes."""
        return self.head(self.lstm(self.words(tokens))[0][:, -1])


class GPT(nn.Module):
    """The next token of a text, by two layers of causal attention."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY["GPT"], size)
        self.places = nn.Embedding(LENGTH["GPT"], size)
        layer = nn.TransformerEncoderLayer(
            *(size, 4, 4 * size), dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, 2, nn.LayerNorm(size), enable_nested_tensor=False
        )
        self.head = nn.Linear(size, VOCABULARY["GPT"])

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the tokens behind each token."""
        length = tokens.shape[1]
        places = self.places(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        return self.head(self.layers(self.words(tokens) + places, mask=mask, is_causal=True))


NETS: dict[str, Callable[[], nn.Module]] = {
    "MLP": lambda: nn.Sequential(nn.Flatten(), make_mlp(784, 400, 400, 10)),
    "LeNet": make_lenet,
    "ResNet-20": partial(make_resnet20, partial(nn.GroupNorm, 8)),
    "ResNet-20, BatchNorm": partial(make_resnet20, nn.BatchNorm2d),
    "LSTM": LSTM,
    "GPT": GPT,
}
BATCH_SIZES = {
    "MLP": 200,
    "LeNet": 200,
    "ResNet-20": 50,
    "ResNet-20, BatchNorm": 50,
    "LSTM": 50,
    "GPT": 100,
}


def load(
    path: Path, net: str, num_train: int | None, size: int | None, foreign: Path | None
) -> tuple[Data, Data, Tensor | None]:
    """Return the data for training and test, and foreign images; standardized by those for training."""
    with np.load(path) as file:
        if net in VOCABULARY:
            train, test = (_load_texts(file, net, name) for name in ("train", "test"))
            return (train[0][:num_train], train[1][:num_train]), test, None
        images = [file["x_train"][:num_train], file["x_test"]]
        classes = [torch.tensor(file[name]).long() for name in ("y_train", "y_test")]
    if foreign is not None:
        with np.load(foreign) as file:
            images.append(file["x_test"])
    x = [torch.tensor(each).float() / 255 for each in images]
    x = [each.movedim(-1, 1) if each.dim() == 4 else each.unsqueeze(1) for each in x]
    if size is not None:
        x = [F.avg_pool2d(each, each.shape[-1] // size) for each in x]
    std, mean = torch.std_mean(x[0], (0, 2, 3), keepdim=True)
    train, test, *others = ((each - mean) / std for each in x)
    return (train, classes[0][:num_train]), (test, classes[1]), others[0] if others else None


def _load_texts(file: Any, net: str, name: str) -> Data:
    """Return the ends of texts with their classes, or parts of all texts with their next tokens."""
    generator = np.random.default_rng(0)
    tokens, offsets, length = file[f"tokens_{name}"], file[f"offsets_{name}"], LENGTH[net]
    tokens = np.where(tokens < VOCABULARY[net], tokens, UNKNOWN).astype(np.int64)
    if net == "GPT":
        parts = tokens[: len(tokens) // length * length].reshape(-1, length)
        x = torch.tensor(parts[generator.permutation(len(parts))[:25_000]])
        return x[:, :-1], x[:, 1:]
    texts = np.zeros((len(offsets) - 1, length), np.int64)
    for text, (begin, end) in zip(texts, pairwise(offsets), strict=True):
        last = tokens[max(begin, end - length) : end]
        text[length - len(last) :] = last
    order = generator.permutation(len(texts))
    return torch.tensor(texts[order]), torch.tensor(file[f"y_{name}"][order]).long()
