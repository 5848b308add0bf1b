"""The reviews of ``lora.py``, and the language model that its adapters belong to."""

import argparse
import time
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyro
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM

from pyro_structvi.infer import CosineDecay

PAD, UNKNOWN, FIRST_WORD = 0, 2, 3


@dataclass(frozen=True)
class Reviews:
    """Reviews as words ``(n, length)``, padded on the right, and whether they are positive ``(n,)``."""

    tokens: Tensor
    y: Tensor

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What the net takes."""
        return {"input_ids": self.tokens, "attention_mask": (self.tokens != PAD).long()}

    def __getitem__(self, index: Tensor) -> "Reviews":
        """Return some of the reviews."""
        return Reviews(self.tokens[index], self.y[index])


@dataclass(frozen=True)
class Data:
    """The words of all training reviews, the training reviews, and those to test on.

    ``strange`` are the test reviews with other words.
    """

    text: Tensor
    train: Reviews
    test: Reviews
    strange: Reviews


def load(options: argparse.Namespace, device: torch.device) -> Data:
    arrays = dict(np.load(options.data))
    known = options.vocabulary + FIRST_WORD

    def text(part: str) -> Tensor:
        tokens = torch.from_numpy(arrays[f"tokens_{part}"]).long()
        return tokens.where(tokens < known, UNKNOWN)

    def reviews(part: str) -> Reviews:
        offsets = arrays[f"offsets_{part}"].tolist()
        words = text(part)
        kept = [words[max(start, end - options.length) : end] for start, end in pairwise(offsets)]
        tokens = nn.utils.rnn.pad_sequence(kept, batch_first=True, padding_value=PAD)
        return Reviews(tokens.to(device), torch.from_numpy(arrays[f"y_{part}"]).long().to(device))

    noise = torch.Generator().manual_seed(0)
    every = reviews("test")
    test = every[torch.randperm(len(every.y), generator=noise)[: options.test].to(device)]
    words = text("train")
    drawn = words[torch.randint(len(words), test.tokens.shape, generator=noise)].to(device)
    strange = Reviews(drawn.where(test.tokens != PAD, PAD), test.y)
    return Data(words.to(device), reviews("train"), test, strange)


def pretrained(text: Tensor, options: argparse.Namespace, device: torch.device) -> LlamaForCausalLM:
    """Return the net that predicts the next word, trained here or before."""
    config = LlamaConfig(
        vocab_size=options.vocabulary + FIRST_WORD,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        max_position_embeddings=options.length,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="eager",  # torch maps it over the members of an ensemble
    )
    pyro.set_rng_seed(0)
    net = LlamaForCausalLM(config).to(device)
    if options.base and options.base.exists():
        net.load_state_dict(torch.load(options.base, map_location=device))
        return net
    start = time.perf_counter()
    nats = predict_next_words(net, text, options)
    seconds = time.perf_counter() - start
    print(
        f"pretraining: {nats:.2f} nats a word after {options.pretrain_steps} steps, {seconds:.0f} s\n"
    )
    if options.base:
        torch.save(net.state_dict(), options.base)
    return net


def predict_next_words(net: nn.Module, text: Tensor, options: argparse.Namespace) -> float:
    """Train on windows of the text; return the mean loss of the last tenth of the steps."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    decay = LambdaLR(optimizer, CosineDecay(options.pretrain_steps))
    window = torch.arange(options.length, device=text.device)
    losses = []
    for _ in range(options.pretrain_steps):
        starts = torch.randint(len(text) - options.length, (64, 1), device=text.device)
        words = text[starts + window]
        loss = net(input_ids=words, labels=words).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
        losses.append(loss.detach())
    return float(torch.stack(losses[-max(1, len(losses) // 10) :]).mean())
