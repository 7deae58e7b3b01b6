"""Modules of the structure of timm's vision transformer, under timm's names, for where timm cannot be imported.

timm imports torchvision, whose wheels do not load beside every build of torch. Attribute names and computations are
those of timm 1.0 (`timm.models.vision_transformer`, `timm.layers`); the classes are found by their qualified names.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def under(index: str) -> Any:
    """Give a class the qualified name it has in timm."""

    def rename(cls: type) -> type:
        cls.__module__, cls.__qualname__ = f"timm.{index}", cls.__name__
        return cls

    return rename


@under("layers.attention")
class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int, *, qkv_bias: bool, qk_norm: bool) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.q_norm = nn.RMSNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(0.0)
        self.norm = nn.Identity()
        self.gate = None
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.proj_drop(self.proj(self.norm(x.transpose(1, 2).reshape(batch, length, dim))))


@under("layers.mlp")
class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int, act: nn.Module) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = act
        self.drop1 = nn.Dropout(0.0)
        self.norm = nn.Identity()
        self.fc2 = nn.Linear(hidden, dim)
        self.drop2 = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop2(self.fc2(self.norm(self.drop1(self.act(self.fc1(x))))))


@under("layers.layer_scale")
class LayerScale(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


@under("models.vision_transformer")
class Block(nn.Module):
    def __init__(
        self, dim: int, heads: int, hidden: int, act: nn.Module, *, scaled: bool, qkv_bias: bool, qk_norm: bool
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads, qkv_bias=qkv_bias, qk_norm=qk_norm)
        self.ls1 = LayerScale(dim) if scaled else nn.Identity()
        self.drop_path1 = nn.Identity()
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, hidden, act)
        self.ls2 = LayerScale(dim) if scaled else nn.Identity()
        self.drop_path2 = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


@under("layers.patch_embed")
class PatchEmbed(nn.Module):
    def __init__(self, image: int, patch: int, dim: int) -> None:
        super().__init__()
        self.num_patches = (image // patch) ** 2
        self.proj = nn.Conv2d(1, dim, patch, patch)
        self.norm = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x).flatten(2).transpose(1, 2))


@under("models.vision_transformer")
class VisionTransformer(nn.Module):
    def __init__(
        self,
        image: int = 4,
        patch: int = 2,
        dim: int = 4,
        depth: int = 1,
        heads: int = 2,
        hidden: int = 3,
        classes: int = 3,
        *,
        class_token: bool = False,
        scaled: bool = False,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        pooled_norm: bool = False,
        act: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.no_embed_class = self.dynamic_img_size = False
        self.patch_embed = PatchEmbed(image, patch, dim)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim)) if class_token else None
        self.reg_token = None
        self.pos_embed = nn.Parameter(torch.randn(1, self.patch_embed.num_patches + class_token, dim))
        self.pos_drop = nn.Dropout(0.0)
        self.patch_drop = nn.Identity()
        self.norm_pre = nn.Identity()
        options = {"scaled": scaled, "qkv_bias": qkv_bias, "qk_norm": qk_norm}
        self.blocks = nn.Sequential(*(Block(dim, heads, hidden, act or nn.GELU(), **options) for _ in range(depth)))
        self.norm = nn.Identity() if pooled_norm else nn.LayerNorm(dim)
        self.attn_pool = None
        self.fc_norm = nn.LayerNorm(dim) if pooled_norm else nn.Identity()
        self.head_drop = nn.Dropout(0.0)
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images)
        if self.cls_token is not None:
            x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), 1)
        x = self.norm(self.blocks(self.norm_pre(self.patch_drop(self.pos_drop(x + self.pos_embed)))))
        x = x[:, 0] if self.cls_token is not None and not isinstance(self.norm, nn.Identity) else x.mean(1)
        return self.head(self.head_drop(self.fc_norm(x)))
