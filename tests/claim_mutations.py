"""For every claim, its subject changed on purpose so that the verdict must change: a wrong formula, another model."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from typing import Any

import flint
import numpy as np
import torch
from torch import nn

from conserved.blocks import Attention, FeedForward, MixtureOfExperts, TransformerBlock
from conserved.blocks.transformer import SinusoidalPositions
from conserved.claims import (
    blog,
    blog_questions,
    paper_experiments,
    paper_framework,
    paper_gradients,
    paper_lemmas,
    summary,
)
from conserved.claims import paper_blocks as block
from conserved.claims.balls import scalar_attention
from conserved.claims.polynomials import arranged, fractions

MUTATIONS: dict[str, dict[str, Any]] = {}
"""By code, the keyword arguments of the check that make it come out the other way."""


def _normalised(x: Any) -> Any:
    """Attention that divides its tokens by the first one: scale does not matter to it."""
    return scalar_attention([Fraction(e) / Fraction(x[0]) for e in x])


def _hard(n: Any) -> list[Fraction]:
    """All weight on the largest."""
    return [Fraction(int(e == max(n))) for e in n]


NOTE: dict[str, dict[str, Any]] = {
    "note.D1": {"weights": torch.sigmoid},
    "note.D1.output": {"output": lambda x: Fraction(1)},
    "note.L2": {"form": lambda x, q, k: x @ q @ k @ x.T},
    "note.T3": {"bound": lambda d, size: Fraction(d, 4) * size**2},
    "note.T3.sharper": {"bound": lambda layer, x: 0.5 * layer.energy_bound(x)},
    "note.T3.conserved": {"quantity": lambda q, k: q**2 - k**2},
    "note.T4": {"attention": _normalised},
    "note.T4.softmax": {"weights": _hard},
    "note.T4.corrected": {"power": 1},
    "note.T7": {"bound": lambda channel: channel.information},
    "note.T7.corrected": {"bound": lambda channel: channel.information / 2},
    "note.C8": {"bound": lambda channel: 4 * channel.frobenius},
    "note.T14": {"bound": lambda channel: 4 * channel.frobenius},
    "note.L13": {"bound": lambda a: sum(1 for _ in a) * 2},
    "note.L13.corrected": {"least": lambda row: 5},
    "note.R9": {"measure": lambda a: -sum(e * e for e in a.ravel())},
    "note.C5": {"allowed": lambda eta, curvature: eta * curvature <= 1},
    "note.C5.corrected": {"rate": lambda eta, mu: 1 - 2 * eta * mu},
    "note.R6": {"rate": lambda eta: Fraction(9)},
    "note.L10": {"gram": lambda a: a @ a.T + 1 * _identity(len(a))},
    "note.L10.corrected": {"least": lambda length: Fraction(2, length)},
    "note.L11": {"constant": lambda length, x: x * x},
    "note.L11.corrected": {"metric": lambda x, weights: x.mT @ x},
    "note.T12": {"metric": lambda x: x * x},
    "note.T12.corrected": {"metric": "tokens"},
}


def _identity(size: int) -> Any:
    return fractions([[int(i == j) for j in range(size)] for i in range(size)])


PAPER_LAWS: dict[str, dict[str, Any]] = {
    "paper.T4.1.gelu": {"build": lambda: FeedForward(3, 4, "relu")},
    "paper.T4.1.silu": {"build": block.swiglu_network},
    "paper.T4.2": {"quantities": partial(block.neuron_differences, sign=1.0)},
    "paper.T4.2.complete": {"quantities": lambda theta: block.neuron_differences(theta)[1:]},
    "paper.T4.2.pde": {"constraints": partial(block.swiglu_constraints, sign=-1.0)},
    "paper.T4.3": {"quantities": partial(block.gram_differences, sign=1.0)},
    "paper.T4.3.complete": {"build": lambda: Attention(4, 2, rotary=True, scale=1.0)},
    "paper.T4.3.pde": {"constraints": partial(block.attention_constraints, sign=-1.0)},
    "paper.PE": {"build": lambda: nn.Sequential(SinusoidalPositions(), Attention(4, 2, rotary=True))},
    "paper.T4.4": {"quantities": partial(block.plane_differences, sign=1.0)},
    "paper.T4.4.complete": {"build": lambda: Attention(4, 1, scale=1.0)},
    "paper.T4.4.pde": {"constraints": partial(block.rotary_constraints, turned=False)},
    "paper.T4.4.change": {"quantities": block.plane_differences},
    "paper.T4.5": {"build": block.sigmoid_mixture},
    "paper.T4.5.complete": {"build": block.switch_mixture},
    "paper.T4.5.pde": {"build": block.sigmoid_mixture},
    "paper.T4.6": {"build": block.switch_mixture},
    "paper.T4.6.pde": {"build": block.switch_mixture},
    "paper.T4.6.k": {"build": block.sparse_mixture},
    "paper.T4.6.width": {
        "build": lambda: MixtureOfExperts(3, 1, 3, top_k=2),
        "shape": (6, 3),
        "quantities": block.mixture_invariants,
    },
    "paper.T4.7": {"build": block.mixture},
    "paper.T4.7.pde": {"build": block.mixture},
    "paper.T4.7.corrected": {"quantities": block.mixture_invariants},
    "paper.T4.7.pde.corrected": {"constraints": block.mixture_constraints},
    "paper.T4.7.sparse": {"build": block.sparse_mixture},
}


def _projected(z: Any, y: Any) -> Any:
    """z − y without its mean, as cross-entropy has it."""
    gaps = list(z - y)
    return arranged([[gap - sum(gaps) / len(gaps) for gap in gaps]])[0]


FRAMEWORK: dict[str, dict[str, Any]] = {
    "paper.eq2": {"outputs": (0,)},
    "paper.toy": {"quantity": lambda a, b: a * a + b * b},
    "paper.R3.1": {"power": 1},
    "paper.R2.1": {"factor": 1},
    "paper.loss": {"gradient": _projected},
    "paper.loss.experiments": {"slope": paper_framework.squared_error},
    "paper.loss.corrected": {"loss": "regression"},
    "paper.open.norm": {"build": lambda: TransformerBlock(Attention(4, 2, rotary=True), FeedForward(4, 3), bias=False)},
    "paper.open.stack": {"quantities": lambda theta: paper_framework.stack_invariants(theta)[:6]},
}

LEMMAS: dict[str, dict[str, Any]] = {
    "paper.LA.1": {"nodes": lambda letters: [letters[0]] * len(letters)},
    "paper.LA.2": {"coefficient": lambda n: paper_lemmas.bernoulli_coefficient(n) * (2**n - 1)},
    "paper.LB.1": {"nodes": lambda letters: [letters[0]] * len(letters)},
    "paper.LB.2": {"second": lambda a, b: [a * a * b, b * a * 0]},
    "paper.LB.3": {"frequencies": lambda planes: [flint.arb(1)] * planes},
    "paper.LC.1": {"exceptions": lambda y, most: []},
}


def _without_mean(t: Any, x: Any) -> Any:
    return paper_gradients.head_gradients(t, x, mean=0.0)


def _swapped(t: Any, x: Any) -> Any:
    """∇_Q and ∇_K with the roles of x and x − y exchanged."""
    right = paper_gradients.two_value_formula(t, x)
    return {"Q": right["K"], "K": right["Q"]}


GRADIENTS: dict[str, dict[str, Any]] = {
    "paper.eq14": {"slope": torch.sigmoid},
    "paper.eq40": {"slope": torch.sigmoid},
    "paper.eq58": {"formula": _without_mean},
    "paper.eq64": {"formula": _swapped},
    "paper.eq94": {"formula": lambda x, e, v: e @ x @ v},
    "paper.eq142": {"formula": paper_gradients.sigmoid_gate_formula},
    "paper.eq173": {"formula": paper_gradients.softmax_gate_formula},
}

DISCRETE: dict[str, dict[str, Any]] = {
    "paper.eq9": {"momentum": 0.9},
    "paper.eq9.exact": {"power": 1},
    "paper.S6.constant": {"order": 1.0},
    "paper.S6.decaying": {"falls": lambda k: 1.0},
    "paper.eq10": {"ratio": lambda change, value, terms: abs(change) / terms},
    "paper.eq10.corrected": {"measure": lambda laws, start: sum(laws.errors(start, relative_to="scale").values())},
    "paper.S6.schedule": {"schedule": lambda i, k: Fraction(1, i + 1)},
    "paper.S6.schedule.corrected": {"total": lambda k: Fraction(k, 3)},
}

EXPERIMENTS: dict[str, dict[str, Any]] = {
    "paper.S6.qwen3": {"build": block.rotary_attention},
    "paper.S6.qwen3.corrected": {"quantities": lambda theta: paper_experiments.normed_invariants(theta)[1:]},
    "paper.Fig2d": {"watch": block.expert_differences},
    "paper.Fig2d.corrected": {"build": block.sigmoid_mixture},
    "paper.E1": {"build": block.mixture},
    "paper.E2.attention": {"quantities": block.gram_differences},
    "paper.E2.rotary": {"quantities": paper_experiments.query_key_planes},
    "paper.E2.swiglu": {"quantities": block.neuron_differences},
    "paper.E2.gating": {"quantities": paper_experiments.router_sum},
    "paper.E2.rowsums": {"quantities": paper_experiments.router_sum},
    "paper.Fig5": {"expected": 1.0},
}

SUMMARY: dict[str, dict[str, Any]] = {
    "summary.gating": {"ungated": block.gelu_network},
    "summary.gating.corrected": {"builds": (lambda: summary.Gated(lambda z: z),)},
    "summary.moe": {"builds": (block.mixture, block.sparse_mixture)},
    "summary.deep": {"build": lambda: summary.Deep(torch.relu)},
    "summary.rope": {"kept": lambda planes: 2 * planes},
    "summary.discrete": {"build": block.sigmoid_mixture},
    "summary.optimizers": {"make": (lambda p: torch.optim.SGD(p, lr=0.02),)},
}


def _turned(w: Fraction, v: Fraction) -> tuple[Fraction, Fraction]:
    """A step along the hyperbola that the flow follows."""
    return (5 * w - 3 * v) / 4, (5 * v - 3 * w) / 4


BLOG: dict[str, dict[str, Any]] = {
    "blog.T1": {"quantities": partial(blog.norm_difference, sign=1.0)},
    "blog.T1.only": {"build": blog_questions.SoftmaxAttention},
    "blog.T1.wide": {"quantities": partial(blog.norm_difference, sign=-2.0)},
    "blog.T1.descent": {"advance": _turned},
    "blog.gradQK": {"formula": lambda x, v, error, mask: x.T @ (error * mask.T * (x @ v).T) @ x},
    "blog.gradV": {"formula": lambda x, active, error: x.T @ active.T @ error},
    "blog.gradV.corrected": {"formula": lambda x, active, error: x.T @ active @ error},
    "blog.inner": {"factor": -1},
    "blog.init": {"build": blog_questions.SoftmaxAttention},
    "blog.regularisation": {"penalty": (1, 1)},
    "blog.Q1": {"plus": ("v", "o")},
    "blog.Q2": {"build": blog.relu_attention},
    "blog.Q3": {"quantities": lambda theta: blog_questions.head_norm_differences(theta).sum()[None]},
    "blog.Q4": {"attention": lambda w, v, x: max(x * w * x, Fraction(0)) + x * v},
}

SOFTMAX: dict[str, dict[str, Any]] = {
    "softmax.rows": {"centre": lambda field: field},
    "softmax.rank": {"logits": lambda q, k: (q @ k.T) * (q @ k.T) + q @ k.T},
    "softmax.causal": {"field": lambda keys: np.outer(keys, keys)},
    "softmax.causal.corrected": {"allowed": lambda width: width},
    "softmax.shift": {"centre": lambda z: z - z.mean(-2, keepdim=True)},
    "softmax.spectrum": {"factor": 1.001},
    "softmax.delocalised.free": {"keys": lambda length: fractions([(-1) ** j for j in range(length)])},
    "softmax.delocalised": {"spike": 100.0},
    "softmax.incoherence": {"factor": 30.0},
    "softmax.monitor": {"growth": 1.0},
    "softmax.softcap": {"cap": lambda z: 2 * z},
}

MUTATIONS |= NOTE | PAPER_LAWS | FRAMEWORK | LEMMAS | GRADIENTS | DISCRETE | EXPERIMENTS | SUMMARY | BLOG | SOFTMAX
