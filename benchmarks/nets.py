"""The nets that are measured, with the data of a step."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchvision.models import resnet18


class Net(NamedTuple):
    """A net, its inputs, and how long to measure it.

    Attributes:
        title: What it is, with the batch.
        make: Makes it.
        shape: The shape of a batch of inputs.
        rounds: How many rounds are timed unless asked for otherwise.
        words: How many words there are where inputs are integers, None where they are numbers.
        is_others: Whether the net is of another library, of the extra ``nets``.
    """

    title: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    rounds: int
    words: int | None = None
    is_others: bool = False

    def make_batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return inputs, and their classes."""
        if self.words is None:
            x = torch.randn(self.shape, device=device)
        else:
            x = torch.randint(1, self.words, self.shape, device=device)
        return x, torch.randint(10, self.shape[:1], device=device)


def make_mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size, out in pairwise(widths):
        layers += [nn.Linear(size, out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_lenet() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), make_mlp(400, 120, 84, 10)),
    )


def make_resnet18() -> nn.Module:
    net: Any = resnet18(num_classes=10)
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)  # for images of 32 x 32
    net.maxpool = nn.Identity()
    return net  # type: ignore[no-any-return]


class SequenceClassifier(nn.Module):
    """An LSTM, and classes from its last state."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        outputs, _ = self.lstm(x)
        return self.head(outputs[:, -1])  # type: ignore[no-any-return]


# ---- of other libraries --------------------------------------------------------------------------


class Logits(nn.Module):
    """A net that returns an object, with tensors in and logits out."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.net(x).logits  # type: ignore[no-any-return]


class OnGraph(nn.Module):
    """A net of a random graph, whose edges it keeps."""

    edges: Tensor

    def __init__(self, net: nn.Module, nodes: int, edges: int) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("edges", torch.randint(nodes, (2, edges)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the nodes."""
        return self.net(x, self.edges)  # type: ignore[no-any-return]


def make_bert() -> nn.Module:
    import transformers

    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = transformers.BertConfig(
        vocab_size=5_000, intermediate_size=512, num_labels=10, **sizes
    )
    return Logits(transformers.BertForSequenceClassification(config))


def make_llama() -> nn.Module:
    import peft
    import transformers

    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=5_000, intermediate_size=512, num_labels=10, pad_token_id=0, **sizes
    )
    adapters = peft.LoraConfig(r=8, task_type="SEQ_CLS", target_modules=["q_proj", "v_proj"])
    net = transformers.LlamaForSequenceClassification(config)
    return Logits(peft.get_peft_model(net, adapters))


def make_convnext() -> nn.Module:
    import timm

    return timm.create_model("convnext_atto", num_classes=10)  # type: ignore[no-any-return]


def make_gcn() -> nn.Module:
    import torch_geometric.nn as geometric

    return OnGraph(geometric.GCN(1_433, 64, 2, 10, cached=True), 2_708, 10_556)


NETS = {
    "small": Net("MLP 20-50-10, batch 128", lambda: make_mlp(20, 50, 10), (128, 20), 30),
    "mnist": Net(
        "MLP 784-400-400-10, batch 128", lambda: make_mlp(784, 400, 400, 10), (128, 784), 15
    ),
    "mnist2048": Net(
        "MLP 784-400-400-10, batch 2048", lambda: make_mlp(784, 400, 400, 10), (2048, 784), 9
    ),
    "wide": Net(
        "MLP 1024-2048-2048-10, batch 512", lambda: make_mlp(1024, 2048, 2048, 10), (512, 1024), 7
    ),
    "lenet": Net("LeNet, 28 x 28 images, batch 128", make_lenet, (128, 1, 28, 28), 15),
    "resnet18": Net("ResNet-18 (CIFAR stem), batch 32", make_resnet18, (32, 3, 32, 32), 3),
    "lstm": Net(
        "LSTM of size 128 on the 28 rows of 28 x 28 images, batch 128",
        lambda: SequenceClassifier(28, 128),
        (128, 28, 28),
        15,
    ),
    "huge": Net(
        "MLP 4096-4096-4096-10, batch 512", lambda: make_mlp(4096, 4096, 4096, 10), (512, 4096), 2
    ),
    "bert": Net(
        "BERT, 4 layers of size 128, 64 words, batch 32", make_bert, (32, 64), 7, 5_000, True
    ),
    "llama": Net(
        "Llama, 4 layers of size 256 with adapters of rank 8, 64 words, batch 32",
        *(make_llama, (32, 64), 7, 5_000, True),
    ),
    "convnext": Net(
        "ConvNeXt-atto, 64 x 64 images, batch 16", make_convnext, (16, 3, 64, 64), 5, None, True
    ),
    "gcn": Net(
        "GCN 1433-64-10, 2,708 nodes, 10,556 edges", make_gcn, (2_708, 1_433), 15, None, True
    ),
}
OWN_NETS = [name for name, net in NETS.items() if not net.is_others]
