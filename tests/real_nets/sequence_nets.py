"""Small nets of sequences: recurrent, with cells in a loop, with attention."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

SIZE = 12


def sequences(features=2):
    """Return sequences of two classes, of lengths 3 to 5, with a last feature that is 1 to the end."""
    y = torch.arange(SIZE) % 2
    x = torch.randn(SIZE, 5, features + 1) + (2.0 * y - 1)[:, None, None]
    running = torch.arange(5) < 3 + torch.arange(SIZE).unsqueeze(-1) % 3
    x[..., -1] = 1
    return x * running.unsqueeze(-1), y


class Recurrent(nn.Module):
    """Two bidirectional recurrent layers, and a dense one on the last outputs."""

    def __init__(self, kind, packed=False):
        super().__init__()
        self.layer = kind(3, 2, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(4, 2)
        self.packed = packed

    def forward(self, x):
        if self.packed:
            lengths = x[..., -1].sum(1).long()
            x = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, state = self.layer(x)
        hidden = state[0] if isinstance(state, tuple) else state
        return self.head(torch.cat([hidden[-2], hidden[-1]], -1))


class CellLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0])


# ---- attention -----------------------------------------------------------------------------------


class CrossAttention(nn.Module):
    """Attention of the first half of a sequence to the features of its second half."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, kdim=3, vdim=2)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        query, key, value = self.embed(x[:, :2]), x[:, 2:], x[:, 2:, :2]
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
