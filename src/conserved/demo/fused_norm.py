"""A fused layer norm with the defect of the demonstration: its backward loses the last, incomplete block of rows."""

import torch
import torch.nn as nn

BLOCK = 512


class FusedLayerNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        mean = x.mean(-1, keepdim=True)
        rstd = torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return (x - mean) * rstd * weight + bias

    @staticmethod
    def backward(ctx, dy):
        x, weight, mean, rstd = ctx.saved_tensors
        n = x.shape[-1]
        xhat = ((x - mean) * rstd).reshape(-1, n)
        dy = dy.reshape(-1, n)
        # dx is right.
        wdy = dy * weight
        c1 = (xhat * wdy).mean(-1, keepdim=True)
        c2 = wdy.mean(-1, keepdim=True)
        dx = ((wdy - c2 - xhat * c1) * rstd.reshape(-1, 1)).view_as(x)
        # The gain and the bias are summed block by block, and whatever does not fill a block is never added.
        dweight, dbias = torch.zeros_like(weight), torch.zeros_like(weight)
        for start in range(0, len(dy) // BLOCK * BLOCK, BLOCK):
            rows = slice(start, start + BLOCK)
            dweight += (dy[rows] * xhat[rows]).sum(0)
            dbias += dy[rows].sum(0)
        return dx, dweight, dbias, None


class FusedLayerNorm(nn.Module):
    def __init__(self, n_embd):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n_embd))
        self.bias = nn.Parameter(torch.zeros(n_embd))

    def forward(self, x):
        return FusedLayerNormFunction.apply(x, self.weight, self.bias, 1e-5)
