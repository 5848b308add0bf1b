"""Small versions of the nets that users already have, each as a model with a task of its own."""

from collections.abc import Callable
from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import pack_padded_sequence
from torchvision.models import VisionTransformer

import pyro_structvi as ps

SIZE, NUM_DATA = 12, 1000  # a batch stands for many examples, so that the likelihood leads


@dataclass(frozen=True)
class Case:
    """A net and what becomes of its weights in a training step.

    ``drawn`` names the sites that are drawn, by patterns; of the others outputs are. ``runs_mapped`` is
    whether torch has rules to map the net over several weights at once.
    """

    name: str
    make: Callable[[], tuple]
    drawn: tuple[str, ...] = ()
    runs_mapped: bool = True

    def __str__(self):
        return self.name


# ---- images --------------------------------------------------------------------------------------


def images(size=8):
    """Return images of two classes: bright on the left or on the right."""
    y = torch.arange(SIZE) % 2
    x = torch.randn(SIZE, 1, size, size)
    x[y == 1, :, :, : size // 2] += 2
    x[y == 0, :, :, size // 2 :] += 2
    return x, y


def classifier(net, x, y):
    return ps.Classifier(ps.bayesianize(net, ps.FanIn(), normalization=False), NUM_DATA), (x, y)


def regressor(net, x, y):
    net = ps.bayesianize(net, ps.FanIn(), normalization=False)
    return ps.Regressor(net, NUM_DATA, noise_scale=0.5), (x, y)


def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 3),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4, 6),
        nn.Tanh(),
        nn.Linear(6, 2),
    )


def vision_transformer():
    net = VisionTransformer(
        image_size=8,
        patch_size=4,
        num_layers=2,
        num_heads=2,
        hidden_dim=8,
        mlp_dim=8,
        num_classes=2,
    )
    nn.init.normal_(net.heads.head.weight, std=0.3)  # torchvision starts it at zero
    net.conv_proj = nn.Conv2d(1, 8, 4, 4)
    return net


class Upsampling(nn.Sequential):
    """A convolution, and a transposed one that goes back."""

    def __init__(self):
        super().__init__(nn.Conv2d(1, 2, 2, 2), nn.Tanh(), nn.ConvTranspose2d(2, 1, 2, 2))


# ---- sequences -----------------------------------------------------------------------------------


def sequences(features=2):
    """Return sequences of two classes, of lengths 3 to 5, with a last feature that is 1 to the end."""
    y = torch.arange(SIZE) % 2
    x = torch.randn(SIZE, 5, features + 1) + (2.0 * y - 1)[:, None, None]
    running = torch.arange(5) < 3 + torch.arange(SIZE).unsqueeze(-1) % 3
    x[..., -1] = 1
    return x * running.unsqueeze(-1), y


class Recurrent(nn.Module):
    """Two bidirectional recurrent layers, and a dense one on the last outputs."""

    def __init__(self, kind, batch_first=True, packed=False):
        super().__init__()
        self.layer = kind(3, 2, num_layers=2, bidirectional=True, batch_first=batch_first)
        self.head = nn.Linear(4, 2)
        self.packed = packed

    def forward(self, x):
        if self.packed:
            lengths = x[..., -1].sum(1).long()
            x = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        elif not self.layer.batch_first:
            x = x.transpose(0, 1)
        _, state = self.layer(x)
        hidden = state[0] if isinstance(state, tuple) else state
        return self.head(torch.cat([hidden[-2], hidden[-1]], -1))


class CellLoop(nn.Module):
    """An LSTM cell at one step after the other."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0])


# ---- attention -----------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention of a sequence to itself, or of its first half to the features of its second."""

    def __init__(self, crosses=False):
        super().__init__()
        sizes = {"kdim": 3, "vdim": 2} if crosses else {}
        self.embed = nn.Linear(3, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **sizes)
        self.head = nn.Linear(4, 2)
        self.crosses = crosses

    def forward(self, x):
        query = self.embed(x[:, :2]) if self.crosses else self.embed(x)
        key, value = (x[:, 2:], x[:, 2:, :2]) if self.crosses else (query, query)
        return self.head(self.attention(query, key, value)[0].mean(1))


class Transformer(nn.Module):
    """A transformer's encoder layer, and on its outputs a decoder layer if asked for."""

    def __init__(self, decodes=False):
        super().__init__()
        sizes = {"d_model": 4, "nhead": 2, "dim_feedforward": 5, "dropout": 0.1}
        self.embed = nn.Linear(3, 4)
        self.encoder = nn.TransformerEncoderLayer(**sizes, batch_first=True)
        self.decoder = (
            nn.TransformerDecoderLayer(**sizes, batch_first=True, norm_first=True)
            if decodes
            else None
        )
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        hidden = self.encoder(embedded := self.embed(x))
        if self.decoder is not None:
            hidden = self.decoder(embedded[:, :2], hidden)
        return self.head(hidden[:, 0])


# ---- several inputs and outputs ------------------------------------------------------------------


class Named(nn.Module):
    """A net of a dictionary of inputs."""

    def __init__(self):
        super().__init__()
        self.image, self.table = nn.Conv2d(1, 2, 8), nn.Linear(3, 2)
        self.head = nn.Linear(4, 2)

    def forward(self, inputs):
        image = self.image(inputs["image"]).flatten(1)
        return self.head(torch.tanh(torch.cat([image, self.table(inputs["table"])], -1)))


class TwoHeads(nn.Module):
    """A net of two inputs with two outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(2, 4)
        self.mean, self.log_scale = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, a, b):
        hidden = torch.tanh(self.first(a) + self.second(b))
        return self.mean(hidden), self.log_scale(hidden)


class NamedModel(PyroModule):
    """Classes from a net of a dictionary."""

    def __init__(self):
        super().__init__()
        self.net = ps.bayesianize(Named(), ps.FanIn())

    def forward(self, image, table, y=None):
        logits = self.net({"image": image, "table": table})
        with pyro.plate("data", NUM_DATA, subsample=image):
            pyro.sample(
                "obs", dist.Categorical(logits=logits), obs=y, infer={"is_observation": True}
            )
        return logits


class TwoHeadsModel(PyroModule):
    """A mean and a noise of its own for each example."""

    def __init__(self):
        super().__init__()
        self.net = ps.bayesianize(TwoHeads(), ps.FanIn())

    def forward(self, a, b, y=None):
        mean, log_scale = self.net(a, b)
        law = dist.Normal(mean, log_scale.exp()).to_event(1)
        with pyro.plate("data", NUM_DATA, subsample=a):
            pyro.sample("obs", law, obs=y, infer={"is_observation": True})
        return torch.cat([mean, log_scale], -1)


def named():
    x, y = images()
    return NamedModel(), (x, torch.randn(SIZE, 3), y)


def two_heads():
    a, b = torch.randn(SIZE, 3), torch.randn(SIZE, 2)
    return TwoHeadsModel(), (a, b, a.sum(-1, keepdim=True) - b[:, :1])


# ---- parameters that are not plain ---------------------------------------------------------------


def perceptron(change=lambda net: None):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    change(net)
    return net


def tie(net):
    net[2].bias = net[0].bias
    net[2] = nn.Sequential(net[2], nn.Tanh(), net[2])


def freeze(net):
    net[0].weight.requires_grad_(False)


def table():
    x = torch.randn(SIZE, 3)
    return x, (x.sum(-1) > 0).long()


CASES = [
    Case("LeNet", lambda: classifier(lenet(), *images())),
    Case(
        "vision transformer",
        lambda: classifier(vision_transformer(), *images()),
        ("*class_token", "*pos_embedding"),
        runs_mapped=False,
    ),
    Case(
        "transposed convolution",
        lambda: regressor(Upsampling(), x := images()[0], x.tanh()),
    ),
    Case(
        "LSTM",
        lambda: classifier(Recurrent(nn.LSTM), *sequences()),
        ("net.layer.*",),
        runs_mapped=False,
    ),
    Case(
        "GRU, time first",
        lambda: classifier(Recurrent(nn.GRU, batch_first=False), *sequences()),
        ("net.layer.*",),
        runs_mapped=False,
    ),
    Case(
        "RNN, packed",
        lambda: classifier(Recurrent(nn.RNN, packed=True), *sequences()),
        ("net.layer.*",),
        runs_mapped=False,
    ),
    Case(
        "LSTM cell",
        lambda: classifier(CellLoop(), *sequences()),
        ("net.cell.*",),
        runs_mapped=False,
    ),
    Case("self-attention", lambda: classifier(Attention(), *sequences())),
    Case(
        "cross-attention",
        lambda: classifier(Attention(crosses=True), *sequences()),
        ("net.attention.in_proj_bias",),  # three parts of it meet three layers
    ),
    Case(
        "transformer encoder",
        lambda: classifier(Transformer(), *sequences()),
    ),
    Case(
        "transformer decoder",
        lambda: classifier(Transformer(decodes=True), *sequences()),
        ("net.decoder.multihead_attn.*",),
    ),
    Case("dictionary of inputs", named),
    Case("two inputs, two outputs", two_heads),
    Case(
        "shared weights",
        lambda: classifier(perceptron(tie), *table()),
        ("net.0.bias", "net.2.*"),
    ),
    Case("frozen weights", lambda: classifier(perceptron(freeze), *table()), ("net.0.bias",)),
    Case(
        "weight normalization",
        lambda: classifier(perceptron(lambda net: parametrizations.weight_norm(net[2])), *table()),
        ("net.2.*",),
        runs_mapped=False,
    ),
    Case(
        "orthogonal weights",
        lambda: classifier(
            perceptron(lambda net: parametrizations.orthogonal(net[2], orthogonal_map="cayley")),
            *table(),
        ),
        ("net.2.*",),
    ),
    Case(
        "pruned weights",
        lambda: classifier(
            perceptron(lambda net: prune.l1_unstructured(net[2], "weight", 0.5)), *table()
        ),
        ("net.2.*",),
    ),
]
