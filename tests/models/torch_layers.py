"""Models made of torch's own transformer layers, as tutorials make them."""

import torch
import torch.nn as nn


class Classifier(nn.Module):
    def __init__(self, vocab, width, heads, hidden, classes, norm_first):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        layer = nn.TransformerEncoderLayer(width, heads, hidden, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens):
        return self.head(self.encoder(self.embed(tokens)).mean(1))


class Translator(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.transformer = nn.Transformer(
            width, heads, 1, 1, hidden, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, 2)

    def forward(self, src, tgt):
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1], dtype=tgt.dtype)
        return self.head(self.transformer(src, tgt, tgt_mask=mask))


class Decoder(nn.Module):
    """Attention by nn.MultiheadAttention with separate key and value widths, read by a convolution over time."""

    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, kdim=3, vdim=5, batch_first=True)
        self.conv = nn.Conv1d(width, 2, 2)

    def forward(self, q, k, v):
        y, _ = self.attention(q, k, v)
        return self.conv(y.transpose(1, 2))


def build(width=4, norm_first=True):
    return Classifier(5, width, 2, 3, 3, norm_first), (torch.arange(8).reshape(2, 4) % 5,), {}


def build_post(width=4):
    return build(width, False)


def build_translator(width=4):
    return Translator(width, 2, 3), (torch.randn(2, 3, width), torch.randn(2, 4, width)), {}


def build_cross(width=4):
    return Decoder(width), (torch.randn(2, 4, width), torch.randn(2, 3, 3), torch.randn(2, 3, 5)), {}
