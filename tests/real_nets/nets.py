"""Small versions of the nets that users already have, each as a model with a task of its own."""

from collections.abc import Callable
from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule
from torch import nn
from torch.nn.utils import parametrizations, prune
from torchvision.models import VisionTransformer

import pyro_structvi as ps
from tests.real_nets.sequence_nets import (
    SIZE,
    CellLoop,
    CrossAttention,
    Recurrent,
    Transformer,
    sequences,
)

NUM_DATA = 1000  # a batch stands for many examples, so that the likelihood leads


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
    sizes = {"image_size": 8, "patch_size": 4, "hidden_dim": 8, "mlp_dim": 8}
    net = VisionTransformer(**sizes, num_layers=2, num_heads=2, num_classes=2)
    nn.init.normal_(net.heads.head.weight, std=0.3)  # torchvision starts it at zero
    net.conv_proj = nn.Conv2d(1, 8, 4, 4)
    return net


def upsampling():
    return nn.Sequential(nn.Conv2d(1, 2, 2, 2), nn.Tanh(), nn.ConvTranspose2d(2, 1, 2, 2))


# ---- several inputs and outputs ------------------------------------------------------------------


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.table = nn.Conv2d(1, 2, 8), nn.Linear(3, 2)
        self.head = nn.Linear(4, 2)

    def forward(self, inputs):
        image = self.image(inputs["image"]).flatten(1)
        return self.head(torch.tanh(torch.cat([image, self.table(inputs["table"])], -1)))


class NamedModel(PyroModule):
    def __init__(self):
        super().__init__()
        self.net = ps.bayesianize(Named(), ps.FanIn())

    def forward(self, image, table, y=None):
        logits = self.net({"image": image, "table": table})
        with pyro.plate("data", NUM_DATA, subsample=image):
            law, infer = dist.Categorical(logits=logits), {"is_observation": True}
            pyro.sample("obs", law, obs=y, infer=infer)
        return logits


def named():
    x, y = images()
    return NamedModel(), (x, torch.randn(SIZE, 3), y)


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


def normalize(net):
    parametrizations.weight_norm(net[2])


def halve(net):
    prune.l1_unstructured(net[2], "weight", 0.5)


def table():
    x = torch.randn(SIZE, 3)
    return x, (x.sum(-1) > 0).long()


def of(make, data):
    return lambda: classifier(make(), *data())


CASES = [
    Case("LeNet", of(lenet, images)),
    Case(
        *("vision transformer", of(vision_transformer, images)),
        *(("*class_token", "*pos_embedding"), False),
    ),
    Case("transposed convolution", lambda: regressor(upsampling(), x := images()[0], x.tanh())),
    Case("LSTM", of(lambda: Recurrent(nn.LSTM), sequences), ("net.layer.*",), False),
    Case("RNN, packed", of(lambda: Recurrent(nn.RNN, True), sequences), ("net.layer.*",), False),
    Case("LSTM cell", of(CellLoop, sequences), ("net.cell.*",), False),
    # three parts of the bias meet three layers
    Case("cross-attention", of(CrossAttention, sequences), ("net.attention.in_proj_bias",)),
    Case("transformer encoder", of(Transformer, sequences)),
    Case(
        *("transformer decoder", of(lambda: Transformer(decodes=True), sequences)),
        ("net.decoder.multihead_attn.in_proj*",),
    ),
    Case("dictionary of inputs", named),
    Case("shared weights", of(lambda: perceptron(tie), table), ("net.0.bias", "net.2.*")),
    Case("frozen weights", of(lambda: perceptron(freeze), table), ("net.0.bias",)),
    Case("weight normalization", of(lambda: perceptron(normalize), table), ("net.2.*",), False),
    Case("pruned weights", of(lambda: perceptron(halve), table), ("net.2.*",)),
]
