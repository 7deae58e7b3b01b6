"""Recurrent language models: torch's LSTM and GRU, an LSTM cell written out, and a vanilla ReLU recurrence."""

import torch
from torch import nn


class RNNModel(nn.Module):
    def __init__(self, rnn_type, ntoken, ninp, nhid, nlayers=1, tie_weights=False):
        super().__init__()
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = getattr(nn, rnn_type)(ninp, nhid, nlayers, batch_first=True)
        self.decoder = nn.Linear(nhid, ntoken)
        if tie_weights:
            self.decoder.weight = self.encoder.weight

    def forward(self, input):
        output, _ = self.rnn(self.encoder(input))
        return self.decoder(output)


class LSTMCell(nn.Module):
    def __init__(self, inputs, hidden):
        super().__init__()
        self.i2h = nn.Linear(inputs, 4 * hidden)
        self.h2h = nn.Linear(hidden, 4 * hidden)

    def forward(self, x, h, c):
        gates = self.i2h(x) + self.h2h(h)
        i, f, g, o = gates.chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class HandLSTM(nn.Module):
    def __init__(self, ntoken, ninp, nhid):
        super().__init__()
        self.embed = nn.Embedding(ntoken, ninp)
        self.cell = LSTMCell(ninp, nhid)
        self.out = nn.Linear(nhid, ntoken)
        self.nhid = nhid

    def forward(self, tokens):
        x = self.embed(tokens)
        h = x.new_zeros(x.shape[0], self.nhid)
        c = x.new_zeros(x.shape[0], self.nhid)
        outputs = []
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], h, c)
            outputs.append(h)
        return self.out(torch.stack(outputs, dim=1))


class ReluRNN(nn.Module):
    def __init__(self, inputs, hidden, outputs):
        super().__init__()
        self.wx = nn.Linear(inputs, hidden)
        self.wh = nn.Linear(hidden, hidden, bias=False)
        self.wy = nn.Linear(hidden, outputs)
        self.hidden = hidden

    def forward(self, x):
        h = torch.zeros(x.shape[0], self.hidden, dtype=x.dtype)
        for t in range(x.shape[1]):
            h = torch.relu(self.wx(x[:, t]) + self.wh(h))
        return self.wy(h)


TOKENS = torch.arange(6).reshape(2, 3) % 5


def build(width=3, rnn_type="LSTM", tie_weights=False):
    return RNNModel(rnn_type, 5, width, width, tie_weights=tie_weights), (TOKENS,), {}


def build_gru(width=3):
    return build(width, "GRU")


def build_hand(width=3):
    return HandLSTM(5, width, width), (TOKENS,), {}


def build_relu(width=4):
    return ReluRNN(3, width, 2), (torch.randn(2, 4, 3),), {}
