"""Nets of other libraries in tiny random configurations, each with a few examples."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import pyro_structvi as ps

BATCH, LENGTH, WORDS, CLASSES = 6, 8, 40, 3
TOKENS = {"vocab_size": WORDS, "pad_token_id": 0}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 32}
TEXT = SIZES | TOKENS | ENDS | {"max_position_embeddings": 32}
DISTILBERT = TOKENS | {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}
DISTILBERT |= {"num_labels": CLASSES, "max_position_embeddings": 32}
GPT2 = TOKENS | ENDS | {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
T5 = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
T5 |= {"decoder_start_token_id": 0}
VIT = SIZES | {"image_size": 16, "patch_size": 4, "num_labels": CLASSES}
MIXTRAL = TEXT | {"num_key_value_heads": 2, "num_local_experts": 4}


@dataclass
class Case:
    """A net with examples to learn.

    Attributes:
        library: The package that must be installed.
        make: Returns the net.
        inputs: Returns its input.
        kind: The likelihood: "classes", "tokens" or "nodes".
        local: The least share of elements that are local under mean field.
        prior: What is random.
        can_trace: Whether steps can be traced.
        by_heart: The share of the examples that it learns at least.
    """

    library: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    kind: str = "classes"
    local: float = 0.9
    prior: Any = 0.3
    can_trace: bool = True
    by_heart: float = 0.99

    def model(self, net: nn.Module) -> Any:
        bayes_net = ps.bayesianize(net, prior=self.prior, normalization=False)
        if self.kind == "tokens":
            return ps.TokenClassifier(bayes_net, num_data=BATCH)
        return ps.Classifier(bayes_net, num_data=len(self.labels()))

    def labels(self) -> torch.Tensor:
        if self.kind == "tokens":
            labels = torch.randint(3, WORDS, (BATCH, LENGTH))
            labels[:, -2:] = -100
            return labels
        return torch.arange(NODES if self.kind == "nodes" else BATCH) % CLASSES


# ---- transformers --------------------------------------------------------------------------------


def words() -> dict[str, torch.Tensor]:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, -3:] = 0
    return {"input_ids": torch.randint(3, WORDS, (BATCH, LENGTH)), "attention_mask": mask}


def pixels(size: int = 16, name: str | None = "pixel_values") -> Any:
    x = torch.randn(BATCH, 3, size, size)
    return x if name is None else {name: x}


def of_transformers(kind: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        settings = getattr(transformers, config)(**options)
        return getattr(transformers, kind)(settings).eval()

    return make


def with_adapters(
    make: Callable[[], nn.Module], task: str, *targets: str
) -> Callable[[], nn.Module]:
    def adapted() -> nn.Module:
        import peft

        config = peft.LoraConfig(
            r=2, task_type=task, target_modules=list(targets), lora_dropout=0.1
        )
        return peft.get_peft_model(make(), config).eval()

    return adapted


bert = of_transformers("BertForSequenceClassification", "BertConfig", num_labels=CLASSES, **TEXT)
llama = of_transformers("LlamaForCausalLM", "LlamaConfig", **TEXT)
ADAPTERS = {"*lora_*": 0.3, "*": None}

CASES = {
    "BERT": Case("transformers", bert, words),
    "DistilBERT": Case(
        "transformers",
        of_transformers("DistilBertForSequenceClassification", "DistilBertConfig", **DISTILBERT),
        words,
    ),
    "GPT-2": Case(
        "transformers",
        of_transformers("GPT2LMHeadModel", "GPT2Config", **GPT2),
        words,
        kind="tokens",
        local=0.88,  # its table of words is the last layer too, and so used twice
    ),
    "Llama": Case("transformers", llama, words, kind="tokens"),
    "T5": Case(
        "transformers",
        of_transformers("T5ForConditionalGeneration", "T5Config", **T5),
        lambda: words() | {"decoder_input_ids": torch.randint(3, WORDS, (BATCH, LENGTH))},
        kind="tokens",
    ),
    "ViT": Case(
        "transformers", of_transformers("ViTForImageClassification", "ViTConfig", **VIT), pixels
    ),
    "Mixtral": Case(
        "transformers",
        of_transformers("MixtralForCausalLM", "MixtralConfig", **MIXTRAL),
        words,
        kind="tokens",
    ),
    "BERT with adapters": Case(
        "peft", with_adapters(bert, "SEQ_CLS", "query", "value"), words, prior=ADAPTERS
    ),
    "Llama with adapters": Case(
        "peft",
        with_adapters(llama, "CAUSAL_LM", "q_proj", "v_proj"),
        words,
        kind="tokens",
        prior=ADAPTERS,
    ),
}


# ---- timm ----------------------------------------------------------------------------------------


def of_timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=CLASSES, **options).eval()

    return make


def image() -> torch.Tensor:
    return pixels(32, None)


CASES |= {
    "ConvNeXt": Case(
        "timm", of_timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)), image
    ),
    "timm ViT": Case(
        "timm",
        of_timm(
            "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2
        ),
        image,
    ),
    # Running statistics of six examples are not those of the last steps.
    "MobileNet": Case("timm", of_timm("mobilenetv3_small_050"), image, by_heart=0.6),
}


# ---- graphs and segmentation ---------------------------------------------------------------------

NODES = 9


class OnGraph(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.net(x, edge_index)


def of_geometric(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import torch_geometric.nn as geometric

        return getattr(geometric, name)(4, 16, 2, CLASSES).eval()

    return make


def graph() -> dict[str, torch.Tensor]:
    ring = torch.arange(NODES)
    return {"x": torch.randn(NODES, 4), "edge_index": torch.stack([ring, ring.roll(1)])}


class Pooled(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).mean((2, 3))


def unet() -> nn.Module:
    import segmentation_models_pytorch as segmentation

    settings = {"encoder_weights": None, "classes": CLASSES, "encoder_depth": 3}
    net = segmentation.Unet("mobilenet_v2", decoder_channels=(16, 8, 8), **settings)
    return Pooled(net).eval()


CASES |= {
    # Biases are added after the messages, and those of attention multiply; self-loops are looked for,
    # and how many there are is a size. Nodes with the same neighbours are hard to tell apart.
    name: Case(
        "torch_geometric",
        of_geometric(name),
        graph,
        "nodes",
        local=0.0,  # nodes reach their neighbours: one draw for all
        can_trace=name not in ("GCN", "GAT"),
        by_heart=0.7,
    )
    for name in ("GCN", "GAT", "GraphSAGE", "GIN")
}
CASES["U-Net"] = Case("segmentation_models_pytorch", unet, image, by_heart=0.6)

# Those that differ most.
SAMPLE = ("BERT with adapters", "GPT-2", "Mixtral", "ConvNeXt", "GCN")
