"""Targets made at random: short programs of views, scatters, pads, norms, reductions and casts.

Defects of compilers live in compositions: an operator alone is well tested, its fusion with a view is not. A program is
text, line by line, so that the smallest one that still shows a defect is a bug report.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from campaign.target import Target, evaluate

Shape = tuple[int, ...]
Production = Callable[[random.Random, str, Shape], str]
"""Returns an expression for the next line, given the variable it starts from and its shape."""


def _axis(rng: random.Random, shape: Shape) -> int:
    return rng.randrange(-len(shape), len(shape))


def _pointwise(rng: random.Random, v: str, shape: Shape) -> str:
    forms = (
        "torch.tanh({v})", "F.gelu({v})", "F.silu({v})", "torch.relu({v})", "torch.sigmoid({v})", "{v}.abs().sqrt()",
        "F.softplus({v})", "{v}.clamp(-0.7, 0.9)", "torch.sin({v})", "{v} * {v}", "torch.exp(-{v} * {v})",
        "F.leaky_relu({v}, 0.2)", "torch.where({v} > 0.1, {v} * 2, {v})", "F.hardswish({v})",
        "torch.atan2({v}, {v} + 3)",
        "F.elu({v})", "F.mish({v})", "torch.lerp({v}, {v} * {v}, 0.3)", "torch.logaddexp({v}, -{v})", "{v}.pow(3)",
    )  # fmt: skip
    return rng.choice(forms).format(v=v)


def _view(rng: random.Random, v: str, shape: Shape) -> str:
    axis, other = _axis(rng, shape), _axis(rng, shape)
    size = shape[axis]
    forms = [
        f"{v}.transpose({axis}, {other})",
        f"{v}.flip({axis})",
        f"torch.roll({v}, {rng.randint(1, 3)}, {axis})",
        f"{v}.movedim({axis}, {other}).contiguous()",
        f"{v}.repeat_interleave(2, {axis})",
        f"{v}.reshape(-1, {shape[-1]})" if shape else v,
        f"{v}.narrow({axis}, {rng.randrange(size)}, 1).expand({', '.join(map(str, shape))})",
        f"{v}.unfold({axis}, {min(2, size)}, 1)",
        f"torch.cat([{v}, {v}.flip({axis}) * 2], {axis})",
        f"torch.stack([{v}, -{v}], {axis}).sum({axis})",
        f"{v}.unsqueeze({axis}).expand(*{v}.unsqueeze({axis}).shape).squeeze({axis})",
        f"{v}.index_select({axis}, torch.tensor([{rng.randrange(size)}, {rng.randrange(size)}, 0], device={v}.device))",
        f"torch.take_along_dim({v}, {v}.argsort({axis}), {axis})",
        f"{v}[..., ::2]",
        f"{v}[..., [0, -1, 0]]",
        f"{v}.tril()" if len(shape) > 1 else v,
        f"torch.diff({v}, dim={axis}, prepend={v}.narrow({axis}, 0, 1))",
    ]
    return rng.choice(forms)


def _scatter(rng: random.Random, v: str, shape: Shape) -> str:
    axis = _axis(rng, shape)
    size = shape[axis]
    start = rng.randrange(size)
    index = f"torch.tensor([{', '.join(str(rng.randrange(size)) for _ in range(2))}], device={v}.device)"
    part = f"({v}.narrow({axis}, 0, 2) * 3)" if size > 1 else f"({v}.repeat_interleave(2, {axis}))"
    full = f"{v}.argsort({axis})"
    forms = [
        f"torch.slice_scatter({v} * 2, {v}.narrow({axis}, 0, {size - start}).tanh(), {axis}, {start}, {size})",
        f"torch.select_scatter({v}, {v}.select({axis}, 0) * 2, {axis}, {start})",
        f"torch.index_add({v}, {axis}, {index}, {part})",
        f"torch.index_copy({v}, {axis}, torch.tensor([{start}], device={v}.device), {v}.narrow({axis}, 0, 1) * 2)",
        f"torch.scatter_add({v}, {axis}, {full}, {v} * 2)",
        f"torch.scatter({v}, {axis}, {full}, {v}.tanh())",
        f"torch.scatter_reduce({v}, {axis}, {full} // 2, {v} * 2, '{rng.choice(('sum', 'mean', 'amax', 'prod'))}')",
        f"{v}.masked_fill(torch.arange({shape[-1]}, device={v}.device) % 2 == 0, 0.5)",
        f"torch.masked_scatter({v}, {v} > 0, {v}.flip(0).contiguous() * 2)",
    ]
    if len(shape) > 1:
        forms.append(f"torch.diagonal_scatter({v} * 2, {v}.diagonal(0, -2, -1).tanh(), 0, -2, -1)")
        forms.append(
            f"torch.slice_scatter({v} * 2, {v}[1:], 0, 1).slice_scatter({v}[..., :1].tanh(), {len(shape) - 1}, 0, 1)"
        )
    return rng.choice(forms)


def _pad(rng: random.Random, v: str, shape: Shape) -> str:
    before, after = rng.randint(0, 2), rng.randint(0, 2)
    if len(shape) in (2, 3) and min(before, after) >= 0 and shape[-1] > 2:
        mode = rng.choice(("reflect", "replicate", "circular", "constant"))
        return f"F.pad({v}, ({before}, {after}), mode={mode!r})"
    return f"F.pad({v}, ({before}, {after}, 1, 0), value=0.5)" if len(shape) > 1 else f"F.pad({v}, ({before}, {after}))"


def _norm(rng: random.Random, v: str, shape: Shape) -> str:
    axis, width = _axis(rng, shape), shape[-1]
    forms = [
        f"F.layer_norm({v}, ({width},))",
        f"F.rms_norm({v}, ({width},))",
        f"F.layer_norm({v}, ({width},), w[:1].expand({width}), w[1:2].expand({width}))",
        f"F.layer_norm({v}, ({width},)) * (1 + w[:1]) + w[1:2]",
        f"F.softmax({v}, {axis})",
        f"F.log_softmax({v}, {axis})",
        f"F.normalize({v}, dim={axis})",
        f"{v} - {v}.mean({axis}, keepdim=True)",
        f"{v} / (1 + {v}.abs().amax({axis}, keepdim=True))",
        f"{v} / ({v}.var({axis}, keepdim=True, correction=0) + 0.1).sqrt()",
    ]
    if len(shape) == 3:
        forms.append(f"F.group_norm({v}, 1)")
        forms.append(f"F.batch_norm({v}, None, None, training=True)")
    return rng.choice(forms)


def _reduce(rng: random.Random, v: str, shape: Shape) -> str:
    axis = _axis(rng, shape)
    forms = [
        f"{v}.cumsum({axis})", f"{v}.cumprod({axis})", f"torch.logcumsumexp({v}, {axis})",
        f"{v}.amax({axis}, keepdim=True) + {v}", f"{v}.logsumexp({axis}, keepdim=True) * {v}",
        f"{v}.sort({axis}).values", f"{v}.topk(1, {axis}).values * {v}", f"{v}.cummax({axis}).values",
        f"{v}.std({axis}, keepdim=True) + {v}", f"{v}.prod({axis}, keepdim=True) + {v}",
        f"{v}.median({axis}, keepdim=True).values + {v}",
        f"torch.linalg.vector_norm({v}, dim={axis}, keepdim=True) * {v}",
    ]  # fmt: skip
    if len(shape) == 3:
        forms += [f"F.max_pool1d({v}, 2, 1, 1)", f"F.avg_pool1d({v}, 2, 1, 1)", f"F.adaptive_avg_pool1d({v}, 3)"]
        forms += [f"F.interpolate({v}, scale_factor=2, mode='linear', align_corners=False)"]
    return rng.choice(forms)


def _product(rng: random.Random, v: str, shape: Shape) -> str:
    width = shape[-1]
    forms = [f"{v} @ w[:{width}, None] * {v}" if width <= 64 else v, f"{v} * w[:{width}]", f"{v} + w[:{width}].tanh()"]
    if len(shape) > 1:
        forms.append(f"{v} @ {v}.transpose(-1, -2)")
        forms.append(f"torch.einsum('...ij,...kj->...ik', {v}, {v} * 2)")
    return rng.choice(forms)


def _cast(rng: random.Random, v: str, shape: Shape) -> str:
    other = rng.choice(("torch.float32", "torch.bfloat16", "torch.float64"))
    return f"({v}.to({other}) * 2).to({v}.dtype)"


PRODUCTIONS: tuple[Production, ...] = (
    _pointwise, _view, _view, _scatter, _scatter, _pad, _norm, _norm, _reduce, _product, _cast
)  # fmt: skip


@dataclass(frozen=True)
class Program:
    """Lines of a program, each defining the next variable, and the shape of its input."""

    lines: tuple[str, ...]
    shape: Shape

    @property
    def source(self) -> str:
        """Return text that defines `f` and `make`."""
        body = "".join(f"    {line}\n" for line in self.lines)
        last = self.lines[-1].split(" = ")[0] if self.lines else "x"
        return (
            f"def f(x, w):\n{body}    return {last}\n\n"
            "def make(dtype, device):\n"
            "    g = torch.Generator().manual_seed(0)\n"
            f"    x = torch.randn({', '.join(map(str, self.shape))}, generator=g)\n"
            "    w = torch.randn(64, generator=g)\n"
            "    return [x.to(device, dtype), w.to(device, dtype)]\n"
        )

    def result(self) -> Tensor | None:
        """Return what the program computes in double precision; None if it does not run or is not smooth enough."""
        space = evaluate(self.source)
        x, w = (tensor.requires_grad_() for tensor in space["make"](torch.float64, "cpu"))
        try:
            result = space["f"](x, w)
            if not isinstance(result, Tensor) or result.dim() == 0 or not result.requires_grad:
                return None
            (gradient,) = torch.autograd.grad(result.square().sum(), x, allow_unused=True)
        except (RuntimeError, IndexError, ValueError, TypeError):
            return None
        fine = (
            gradient is not None and bool(torch.isfinite(gradient).all()) and float(result.detach().abs().max()) < 1e3
        )
        return result.detach() if fine and result.numel() < 4_000 else None


def random_program(seed: int, length: int) -> Program:
    """Return a random program of so many lines that runs forward and backward."""
    rng = random.Random(seed)
    program = Program((), rng.choice(((4, 6, 8), (3, 16, 8), (2, 5, 33), (8, 16), (4, 4, 4))))
    current: Shape = program.shape
    for _ in range(20 * length):
        if len(program.lines) == length:
            break
        variable = program.lines[-1].split(" = ")[0] if program.lines else "x"
        line = f"h{len(program.lines)} = {rng.choice(PRODUCTIONS)(rng, variable, current)}"
        longer = Program((*program.lines, line), program.shape)
        result = longer.result()
        if result is not None and result.dim() <= 4:
            program, current = longer, tuple(result.shape)
    return program


def target_of(seed: int, dtypes: tuple[torch.dtype, ...], mode: str) -> Target:
    """Return a random program of two to four lines, precisions in turn."""
    source = random_program(seed, 2 + seed % 3).source
    dtype = dtypes[seed % len(dtypes)]
    return Target(name=f"program {seed}", group="torch.compile", source=source, mode=mode, dtype=dtype)


def shrunk(program: Program, still_wrong: Callable[[Program], bool]) -> Program:
    """Return the smallest program that is still wrong: drop lines, then halve axes."""
    changed = True
    while changed:
        changed = False
        for index in range(len(program.lines)):
            shorter = _without(program, index)
            if shorter.lines and shorter.result() is not None and still_wrong(shorter):
                program, changed = shorter, True
                break
        for axis, size in enumerate(program.shape):
            smaller = Program(program.lines, (*program.shape[:axis], size // 2, *program.shape[axis + 1 :]))
            if size > 3 and smaller.result() is not None and still_wrong(smaller):
                program, changed = smaller, True
                break
    return program


def _without(program: Program, index: int) -> Program:
    """Return the program without one line; later lines read what that line read."""
    names = ["x", *(line.split(" = ")[0] for line in program.lines)]
    dropped = re.compile(rf"\b{names[index + 1]}\b")
    later = [dropped.sub(names[index], line) for line in program.lines[index + 1 :]]
    return Program((*program.lines[:index], *later), program.shape)
