"""For every claim, its subject changed on purpose so that the verdict must change: a wrong formula, another model."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import flint
import torch
from torch import nn

from conserved.blocks import Attention, FeedForward, TransformerBlock
from conserved.inference import recognize
from conserved.laws import LawSet
from conserved_papers.blocks.transformer import SinusoidalPositions
from conserved_papers.claims import (
    blog,
    paper_depth,
    paper_experiments,
    paper_framework,
    paper_global,
    paper_gradients,
    paper_laws,
    paper_lemmas,
    paper_proofs,
    paper_rates,
    paper_sigmoid,
    paper_slips,
    summary,
    summary_adam,
)
from conserved_papers.claims import paper_blocks as block
from conserved_papers.claims.balls import scalar_attention
from conserved_papers.claims.polynomials import arranged, fractions

MUTATIONS: dict[str, dict[str, Any]] = {}
"""By code, the keyword arguments of the check that make it come out the other way."""


def _normalised(x: Any) -> Any:
    """Attention that divides its tokens by the first one: scale does not matter to it."""
    return scalar_attention([Fraction(e) / Fraction(x[0]) for e in x])


def _hard(n: Any) -> list[Fraction]:
    """All weight on the largest."""
    return [Fraction(int(e == max(n))) for e in n]


def _identity(size: int) -> Any:
    return fractions([[int(i == j) for j in range(size)] for i in range(size)])


def _roomy(length: int) -> Any:
    """A bound that no channel of the check comes near."""
    return flint.arb(50)


NOTE: dict[str, dict[str, Any]] = {
    "note.D1": {"weights": torch.sigmoid},
    "note.D1.output": {"values": lambda x: x / 2},
    "note.L10.index": {"axis": 1},
    "note.L2": {"form": lambda x, q, k: x @ q @ k @ x.T},
    "note.T3": {"bound": lambda d, size: d * size**2 / 4},
    "note.T3.sharper": {"bound": lambda layer, x: 0.5 * layer.energy_bound(x)},
    "note.T3.title": {"quantity": lambda q, k: q**2 - k**2},
    "note.T4": {"attention": _normalised},
    "note.T4.softmax": {"weights": _hard},
    "note.T4.corrected": {"power": 1},
    "note.T7": {"bound": _roomy},
    "note.T7.corrected": {"bound": lambda inputs: flint.arb(inputs).log() / 2},
    "note.C8": {"bound": _roomy},
    "note.T14": {"bound": _roomy},
    "note.T14.penalty": {"rest": Fraction(0)},
    "note.T14.penalty.corrected": {"sign": -1},
    "note.T14.lambda": {"rates": (Fraction(1, 2), Fraction(1))},
    "note.L13": {"bound": lambda a: flint.arb(len(a)) * 2},
    "note.L13.logs": {"logs": 3},
    "note.L13.corrected": {"least": lambda row: 5},
    "note.R9": {"measure": lambda a: -sum(e * e for e in a.ravel())},
    "note.C5": {"allowed": lambda eta, curvature: eta * curvature <= 1},
    "note.C5.corrected": {"rate": lambda eta, mu: 1 - 2 * eta * mu},
    "note.R6": {"rate": lambda eta: Fraction(9)},
    "note.L10": {"gram": lambda a: a @ a.T + 1 * _identity(len(a))},
    "note.L10.corrected": {"least": lambda length: Fraction(2, length)},
    "note.L11": {"values": (1, 2)},
    "note.L11.combined": {"weights": fractions([[0, 1], [1, 0]])},
    "note.T3.start": {"variance": lambda d: Fraction(1, d)},
    "note.T12.norm": {"power": -1},
    "note.T12.lemmas": {"cited": (10, 11)},
    "note.metric": {"length": 12, "dim": 2},
    "note.L11.corrected": {"metric": lambda x, a: x.T @ x},
    "note.T12": {"metric": lambda x: x * x},
    "note.T12.convexity": {"curvature": lambda x: 1 + x * x},
    "note.T12.square": {"power": -1},
    "note.T12.last": {"power": 3},
    "note.T12.corrected": {"metric": "tokens"},
    "note.rigorous": {"results": ("note.T3", "note.L2")},
}


def _changed(case: paper_laws.Case, **changes: Any) -> dict[str, Any]:
    return {"cases": (replace(case, **changes),)}


ONE_ROTARY, ROTARY = paper_laws.ROTARY[1], paper_laws.ROTARY[0]

PAPER_LAWS: dict[str, dict[str, Any]] = {
    "paper.T4.1.gelu": _changed(paper_laws.GELU, build=lambda: FeedForward(3, 4, "relu")),
    "paper.T4.1.silu": _changed(paper_laws.SILU, build=block.swiglu_network),
    "paper.T4.2": _changed(paper_laws.SWIGLU, quantities=partial(block.neuron_differences, sign=1.0)),
    "paper.T4.2.complete": _changed(paper_laws.SWIGLU, quantities=lambda theta: block.neuron_differences(theta)[1:]),
    "paper.T4.2.pde": _changed(paper_laws.SWIGLU, constraints=partial(block.swiglu_constraints, sign=-1.0)),
    "paper.T4.3": _changed(paper_laws.ATTENTION, quantities=partial(block.gram_differences, sign=1.0)),
    "paper.T4.3.complete": _changed(paper_laws.ATTENTION, build=lambda: Attention(4, 2, rotary=True, scale=1.0)),
    "paper.T4.3.pde": _changed(paper_laws.ATTENTION, constraints=partial(block.attention_constraints, sign=-1.0)),
    "paper.PE": _changed(
        paper_laws.SINUSOIDAL, build=lambda: nn.Sequential(SinusoidalPositions(), Attention(4, 2, rotary=True))
    ),
    "paper.T4.4": _changed(ROTARY, quantities=partial(block.plane_differences, count=2, sign=1.0)),
    "paper.T4.4.complete": _changed(ONE_ROTARY, build=lambda: Attention(4, 1, scale=1.0)),
    "paper.T4.4.pde": _changed(ROTARY, constraints=partial(block.rotary_constraints, count=2, turned=False)),
    "paper.T4.4.change": {"quantities": block.plane_differences},
    "paper.T4.5": _changed(paper_laws.MIXTURE, build=block.sigmoid_mixture),
    "paper.T4.5.complete": _changed(paper_laws.MIXTURE, build=block.switch_mixture),
    "paper.T4.5.pde": _changed(paper_laws.MIXTURE, build=block.sigmoid_mixture),
    "paper.T4.6": _changed(paper_laws.SPARSE, build=block.switch_mixture),
    "paper.T4.6.pde": _changed(paper_laws.SPARSE, build=block.switch_mixture),
    "paper.T4.6.k": _changed(paper_laws.SWITCH, build=block.sparse_mixture),
    "paper.S5.assumptions": {"dim": 4, "experts": 3},
    "paper.T4.6.narrow": {"after": ((0, 1), (2, 3))},
    "paper.T4.7": _changed(paper_laws.SIGMOID_AS_STATED, build=block.mixture),
    "paper.T4.7.pde": _changed(paper_laws.SIGMOID_AS_STATED, build=block.mixture),
    "paper.T4.7.corrected": _changed(paper_laws.SIGMOID, quantities=block.mixture_invariants),
    "paper.T4.7.pde.corrected": _changed(paper_laws.SIGMOID, constraints=block.mixture_constraints),
    "paper.T4.7.sparse": _changed(paper_laws.SPARSE_SIGMOID, build=block.sparse_mixture),
}


def _projected(z: Any, y: Any) -> Any:
    """z − y without its mean, as cross-entropy has it."""
    gaps = list(z - y)
    return arranged([[gap - sum(gaps) / len(gaps) for gap in gaps]])[0]


FRAMEWORK: dict[str, dict[str, Any]] = {
    "paper.eq2": {"outputs": (0,)},
    "paper.toy": {"quantity": lambda a, b: a * a + b * b},
    "paper.R3.1": {"power": 1},
    "paper.R2.1": {"exponential": False},
    "paper.R2.1.corrected": {"factor": 1},
    "paper.loss": {"gradient": _projected},
    "paper.loss.crossentropy": {"loss": "regression"},
    "paper.S5.singular": {"root": 1},
    "paper.S5.meromorphic": {"gelu": abs},
    "paper.eq173.zeros": {"gate": paper_sigmoid.softmax_gate},
    "paper.T4.7.all": {"second": lambda w: w * 0},
    "paper.open.norm": {"build": lambda: TransformerBlock(Attention(4, 2, rotary=True), FeedForward(4, 3), bias=False)},
    "paper.open.depth": {"gains": False, "networks": paper_depth.NETWORKS[:1]},
    "paper.open.stack.all": {"carried": False},
    "paper.open.stack": {"quantities": lambda theta: paper_framework.stack_invariants(theta)[:6]},
}

LEMMAS: dict[str, dict[str, Any]] = {
    "paper.LA.1": {"nodes": lambda letters: [letters[0]] * len(letters)},
    "paper.LA.2": {"coefficient": lambda n: paper_lemmas.bernoulli_coefficient(n) * (2**n - 1)},
    "paper.LB.1": {"second": lambda a: (0 * a, 2 * a)},
    "paper.LB.2": {"second": lambda a, b: (a * a * b, 0 * a)},
    "paper.LB.3": {"exponent": lambda i, m: Fraction(0)},
    "paper.LC.1": {"multiple": lambda k: 2 * k},
    "paper.eq155": {"share": lambda a, b: a == b},
    "paper.eq155.corrected": {"near": lambda n: 2 + Fraction(1, 2**n)},
    "paper.eq29": {"difference": lambda b, c: b * c - c * b},
    "paper.eq79": {"tied": True},
    "paper.eq81": {"form": lambda x, y, m: x @ m @ (y - y)},
    "paper.eq84": {"outputs": 0},
    "paper.eq101": {"shown": lambda m: m},
    "paper.eq122": {"shown": lambda m: m - m.T},
    "paper.eq160": {"multiple": lambda k: 2 * k},
    "paper.eq164": {"width": Fraction(2, 3)},
    "paper.identity": {"zeros": (1, 2, 3, 4, 5, 5)},
    "paper.scalar": {"sign": -1},
}


def _swapped(t: Any, x: Any) -> Any:
    """∇_Q and ∇_K with the roles of x and x − y exchanged."""
    right = paper_gradients.first_weight_gradients(t, x)
    return {"Q": right["K"], "K": right["Q"]}


GRADIENTS: dict[str, dict[str, Any]] = {
    "paper.eq14": {"formula": partial(paper_gradients.gelu_gradients, grad=torch.sigmoid)},
    "paper.eq40": {"formula": partial(paper_gradients.swiglu_gradients, grad=torch.sigmoid)},
    "paper.eq58": {"formula": partial(paper_gradients.head_gradients, mean=0.0)},
    "paper.eq64": {"formula": _swapped},
    "paper.eq105": {"formula": partial(paper_gradients.rotary_weight_gradients, turn=-3)},
    "paper.eq142": {"formula": paper_gradients.sigmoid_gate_formula},
    "paper.eq173": {"formula": paper_gradients.softmax_gate_formula},
    "paper.eq63": {"printed": lambda: paper_gradients.two_heads(3, 1, heads=(0, 1))},
    "paper.eq70": {"printed": lambda: paper_gradients.law_pairing("V")},
    "paper.eq90": {"printed": lambda: paper_gradients.two_heads(1, 0, heads=(0, 1))},
    "paper.eq94": {"printed": lambda: paper_gradients.output_slope(lambda x, e, v: e @ x @ v)},
    "paper.eq116": {"printed": lambda: paper_gradients.score(-1)},
    "paper.eq118": {"printed": lambda: paper_gradients.rational_form(-1)},
    "paper.eq132": {"printed": lambda: paper_gradients.stacked_rows(transposed=False)},
    "paper.eq153": {"printed": lambda: paper_gradients.entries_named(exchanged=False)},
    "paper.C2.zeros": {"printed": lambda: paper_gradients.gate_points("poles")},
}

DISCRETE: dict[str, dict[str, Any]] = {
    "paper.eq9": {"momentum": 0.9},
    "paper.eq9.exact": {"power": 1},
    "paper.S6.decaying": {"falls": lambda k: (k + 1) ** -0.5},
    "paper.eq10.balanced": {"measure": lambda laws, start: sum(laws.errors(start, relative_to="scale").values())},
    "paper.S6.schedule": {"schedule": lambda i, k: Fraction(1, i + 1)},
    "paper.S6.schedule.corrected": {"total": lambda k: Fraction(k, 3)},
}


def _spoiled(model: nn.Module) -> LawSet:
    """The laws of a model with a sign or a pairing spoiled."""
    return recognize(model).baselines()


RATES: dict[str, dict[str, Any]] = {
    "paper.S6.constant": {"power": 1},
    "paper.S6.constant.rate": {"counts": (2, 4, 8), "size": 0.0002},
    "paper.S6.early": {"watch": partial(block.gram_differences, sign=1.0)},
    "paper.S6.proportional": {"power": 1},
    "paper.E1.proportional": {"build": block.mixture},
    "paper.S6.unbounded": {"factor": 0.01},
    "paper.S6.ensures": {"grad": lambda theta: theta / 2},
    "paper.S6.linear": {"end": 0.5},
    "paper.D.fullbatch": {"words": 884_736},
    "paper.E1.activation": {"activations": ("gelu", "silu")},
    **{code: {"laws_of": _spoiled} for code in paper_rates.PANELS},
    **{f"{code}.rate": {"exponents": lambda recipe, law: [1.0, 1.0, 0.9]} for code in paper_rates.PANELS},
    "paper.Fig3c.rate": {"exponents": lambda recipe, law: [1.0, 0.7, 0.4]},
}

GLOBAL: dict[str, dict[str, Any]] = {
    "paper.C1": {"sign": -1},
    "paper.components": {"points": ((1, 1), (2, 2))},
    "paper.global": {"generators": lambda d: paper_global.boosts(d)[:1]},
    "paper.global.rotary": {"generators": lambda d: paper_global.complex_boosts(d)[::2]},
    "paper.T4.3.length": {"tokens": 1},
    "paper.T4.6.all": {"active": 1},
    **{code: {"parts": ("paper.T4.7",)} for code in paper_global.ALL_SIZES_ARGUMENTS},
    **{code: {"chosen": paper_proofs.PROOFS["paper.T4.1.proof"]} for code in paper_proofs.PROOFS},
    "paper.T4.1.proof": {"chosen": paper_proofs.PROOFS["paper.T4.7.proof"]},
}

TEXT_SLIPS: dict[str, dict[str, Any]] = {code: {"printed": slip.meant} for code, slip in paper_slips.TEXT_SLIPS.items()}

EXPERIMENTS: dict[str, dict[str, Any]] = {
    "paper.S6.qwen3": {"build": block.rotary_attention},
    "paper.S6.qwen3.complete": {"quantities": lambda theta: paper_experiments.normed_invariants(theta)[1:]},
    "paper.Fig2d": {"watch": block.expert_differences},
    "paper.Fig3d": {"watch": block.expert_differences},
    "paper.Fig2d.corrected": {"build": block.sigmoid_mixture},
    "paper.E1": {"build": block.mixture},
    "paper.E1.rates": {"sigmoid": ("5e-5",)},
    "paper.E2.attention": {"quantities": block.gram_differences},
    "paper.E2.rotary": {"quantities": paper_experiments.query_key_planes},
    "paper.E2.swiglu": {"quantities": block.neuron_differences},
    "paper.E2.gating": {"quantities": paper_experiments.router_sum},
    "paper.E2.linear": {"sign": -1},
    "paper.E2.rowsums": {"quantities": paper_experiments.router_sum},
    "paper.Fig5": {"expected": 1.0},
    "paper.Fig5d": {"law": lambda theta: theta["router.weight"].sum(1)},
}

SUMMARY: dict[str, dict[str, Any]] = {
    "summary.gating": {"gated": lambda: summary.Gated(torch.square)},
    "summary.gating.other": {"activation": "gelu"},
    "summary.gating.corrected": {"builds": (summary.square_gated,)},
    "summary.gating.homogeneous": {"degrees": (1, 1)},
    "summary.adam": {"entries": summary_adam.softmax_pair_entries},
    "summary.gating.more": {"counts": (8, 8, 8)},
    "summary.moe": {"builds": (block.mixture, block.sparse_mixture)},
    "summary.deep": {"build": lambda: summary.deep(nn.Identity)},
    "summary.rope": {"laws_of": lambda planes: 2 * planes},
    "summary.discrete": {"build": block.sigmoid_mixture},
    "summary.untrained": {"seeds": 0},
    "summary.optimizers": {"adaptive": torch.optim.SGD},
}


def _turned(w: Fraction, v: Fraction) -> tuple[Fraction, Fraction]:
    """A step along the hyperbola that the flow follows."""
    return (5 * w - 3 * v) / 4, (5 * v - 3 * w) / 4


BLOG: dict[str, dict[str, Any]] = {
    "blog.T1": {"quantities": partial(blog.norm_difference, sign=1.0)},
    "blog.T1.only": {"build": blog.SoftmaxAttention},
    "blog.T1.wide": {"quantities": partial(blog.norm_difference, sign=-2.0)},
    "blog.T1.wording": {"advance": _turned},
    "blog.gradQK": {"formula": lambda x, v, error, mask: x.T @ (error * mask.T * (x @ v).T) @ x},
    "blog.gradV": {"formula": lambda x, active, error: x.T @ active.T @ error},
    "blog.gradV.corrected": {"formula": lambda x, active, error: x.T @ active @ error},
    "blog.inner": {"factor": -1},
    "blog.shared": {"pattern": blog.inactive_pattern},
    "blog.coupling": {"relu": lambda z: max(z, Fraction(0)) ** 2},
    "blog.init": {"build": blog.SoftmaxAttention},
    "blog.regularisation": {"penalty": 0.0},
    "blog.regularisation.mechanism": {"both": True},
    "blog.factored": {"quantities": partial(blog.factored_law, sign=1.0)},
    "blog.Q1": {"plus": ("v", "o")},
    "blog.Q2": {"build": blog.relu_attention},
    "blog.Q3": {"quantities": lambda theta: blog.head_norm_differences(theta).sum()[None]},
    "blog.Q4": {"attention": lambda w, v, x: max(x * w * x, Fraction(0)) + x * v},
}

SOFTMAX: dict[str, dict[str, Any]] = {
    "softmax.rows": {"centre": False},
    "softmax.rank": {"logits": lambda q, k: (q @ k.T) * (q @ k.T) + q @ k.T},
    "softmax.compression": {"size_kept": 4},
    "softmax.causal": {"allowed": lambda width: width},
    "softmax.shift": {"centre": lambda z: z - z.mean(-2, keepdim=True)},
    "softmax.spectrum": {"factor": 1.001},
    "softmax.delocalised.free": {"keys": lambda length: fractions([(-1) ** j for j in range(length)])},
    "softmax.delocalised": {"spike": 100.0},
    "softmax.lengths": {"spike": 100.0},
    "softmax.incoherence": {"factor": 30.0},
    "softmax.monitor": {"growth": 1.0},
    "softmax.softcap": {"cap": lambda z: 2 * z},
}

MUTATIONS |= NOTE | PAPER_LAWS | FRAMEWORK | LEMMAS | GRADIENTS | DISCRETE | EXPERIMENTS | SUMMARY | BLOG | SOFTMAX
MUTATIONS |= RATES | GLOBAL | TEXT_SLIPS
