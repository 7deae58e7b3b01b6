"""The layers of torch.nn: multi-head attention, transformer layers, and chains of plain layers."""

from conserved.recognize.torch_nn import encoder, multihead, sequential

__all__ = ["encoder", "multihead", "sequential"]
