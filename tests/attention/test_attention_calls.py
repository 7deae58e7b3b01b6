"""Calls of attention: each is told once, wherever it is made, and nothing stays behind."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, CausalVariant, causal_lower_right, causal_upper_left
from torch.utils.checkpoint import checkpoint

from conserved import blocks
from conserved.attention.attention_calls import AttentionCall, observe_attention
from conserved.attention.queries_and_keys import Capture, listening
from conserved.auditing.attention_keys import keys_seen
from tolerances import AGREE

Interface: Any = transformers.modeling_utils.AttentionInterface
PLACES = (F, "scaled_dot_product_attention"), (Interface, "get_interface")


@pytest.fixture(autouse=True)
def nothing_is_left_behind(nobody_else_listens: None) -> Iterator[None]:
    before = [getattr(*place) for place in PLACES]
    yield
    assert [getattr(*place) for place in PLACES] == before


class Calling(nn.Module):
    """Heads of width 4 that attend by whatever function they are given."""

    def __init__(self, attend: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).movedim(-3, 0).transpose(-2, -3).unbind()
        return F.scaled_dot_product_attention(q, k, v) if self.attend is None else self.attend(q, k, v)


class Nested(nn.Module):
    """Two layers, the second recomputed in the backward pass."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first, self.second = Calling(), Calling()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x).transpose(-2, -3).flatten(-2)
        return self.second(x) if self.reentrant is None else checkpoint(self.second, x, use_reentrant=self.reentrant)


class Interfaced(nn.Module):
    """Asks transformers' interface for a function, and hands it its mask by name."""

    def __init__(self, implementation: str) -> None:
        super().__init__()
        self.implementation = implementation
        self.is_causal = False

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        attend = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.get_interface(self.implementation, eager)
        return attend(self, x, x, x, attention_mask=mask)[0]


def eager(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **_: Any) -> tuple[Tensor, None]:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return ((scores if attention_mask is None else scores + attention_mask).softmax(-1) @ v).transpose(1, 2), None


def heads(**options: Any) -> Tensor:
    return torch.randn(1, 2, 5, 4, **options)


def heard(model: nn.Module, *args: Any) -> list[AttentionCall]:
    result: list[AttentionCall] = []
    with observe_attention(model, result.append):
        model(*args)
    return result


def test_a_product_is_told_with_the_innermost_module() -> None:
    calls = heard(nn.Sequential(Nested()), torch.randn(5, 8))
    assert [(call.at, call.path) for call in calls] == [("product", "0.first"), ("product", "0.second")]


@pytest.mark.parametrize("name", ["scaled_dot_product_attention", "attend"])
def test_a_product_is_told_where_it_was_imported_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under another name, in a module that defines a class of the model."""
    user = ModuleType("someone_elses_layers")
    monkeypatch.setitem(sys.modules, "someone_elses_layers", user)
    source = f"from torch.nn.functional import scaled_dot_product_attention as {name}\ndef f(*a): return {name}(*a)\n"
    exec(source, vars(user))
    kind = type("Own", (Calling,), {"__module__": "someone_elses_layers" if name == "attend" else __name__})
    assert len(heard(kind(user.f), torch.randn(5, 8))) == 1
    assert vars(user)[name] is F.scaled_dot_product_attention


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "registered"])
def test_an_implementation_of_transformers_is_told_once_whatever_it_calls(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def registered(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **_: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2), None

    monkeypatch.setitem(Interface._global_mapping, "registered", registered)
    config = transformers.LlamaConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8
    )
    model = transformers.LlamaForCausalLM(config)
    model.set_attn_implementation(implementation)
    calls = heard(model, torch.randint(9, (1, 4)))
    assert [(call.at, call.path) for call in calls] == [("interface", f"model.layers.{i}.self_attn") for i in (0, 1)]


@pytest.mark.parametrize("dtype", AGREE)
def test_a_mask_that_is_given_by_name_is_read(dtype: torch.dtype) -> None:
    result: list[Capture] = []
    model, x = Interfaced("eager"), heads(dtype=dtype)
    mask = torch.zeros(5, 5, dtype=dtype).masked_fill(torch.ones(5, 5).triu(1).bool(), torch.finfo(dtype).min)
    with listening(model, result.append):
        out = model(x, mask[None, None])
    (one,) = result
    assert one.mask is not None
    scores = (one.q @ one.k.mT * one.scale).masked_fill(~one.mask, -torch.inf)
    torch.testing.assert_close((scores.softmax(-1) @ x).transpose(1, 2), out, rtol=AGREE[dtype], atol=AGREE[dtype])


@pytest.mark.parametrize("mask", [causal_upper_left(6, 9), causal_lower_right(6, 9)], ids=["upper left", "lower right"])
@pytest.mark.parametrize("by_name", [True, False])
def test_a_mask_without_entries_is_what_it_stands_for_while_someone_listens(mask: CausalBias, by_name: bool) -> None:
    """Masks of this type look up the function themselves; their storage, read as a mask, is what memory held before."""
    torch.manual_seed(0)
    # Two heads: the storage would broadcast over them, so a wrong mask would not even raise.
    q, k, v = (torch.randn(1, 2, length, 4) for length in (6, 9, 9))
    hidden = ~torch.ones(6, 9, dtype=torch.bool).tril(3 if mask.variant == CausalVariant.LOWER_RIGHT else 0)
    expected = (q @ k.mT / 2).masked_fill(hidden, -torch.inf).softmax(-1) @ v

    def attend(*_: Tensor) -> Tensor:
        if by_name:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return F.scaled_dot_product_attention(q, k, v, mask)

    model, calls = nn.Sequential(Calling(attend)), list[AttentionCall]()
    with observe_attention(model, calls.append):
        output = model(torch.randn(5, 8))
    assert len(calls) == 1
    assert calls[0].keys is k
    torch.testing.assert_close(output, expected)


def test_multihead_attention_is_told_at_its_inputs_and_its_product_as_part_of_that() -> None:
    model, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 5, 8)
    calls = heard(model, x, x, x)
    assert [(call.at, call.part) for call in calls] == [("inputs", False)]
    result: list[AttentionCall] = []
    with observe_attention(model, result.append):
        model(x, x, x, need_weights=False)
    assert [(call.at, call.part) for call in result] == [("inputs", False), ("product", True)]


def test_a_block_is_told_where_its_keys_pass_and_its_own_product_is_not() -> None:
    class Fused(blocks.Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k = self.queries_and_keys(x)
            return F.scaled_dot_product_attention(q, self.keys(k), k)

    (call,) = heard(Fused(8, 2), torch.randn(1, 5, 8))
    assert call.at == "block"
    assert call.keys is not None
    assert call.keys.requires_grad


def fourfold(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, 4 * k, v)


def rescaled(block: blocks.Attention, by: float) -> blocks.Attention:
    block.scale *= by
    return block


KEYS_USED: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor]]] = {
    "product": (Calling, lambda model, x: Calling.forward(SimpleNamespace(qkv=model.qkv, attend=fourfold), x)),  # type: ignore[arg-type]
    "interface": (lambda: Interfaced("sdpa"), lambda model, x: eager(model, x, 4 * x, x, None)[0]),
    "block": (lambda: blocks.Attention(8, 2), lambda model, x: rescaled(model, 4)(x)),
}
"""Models, and what they compute of an input if all keys are four times as large."""


@pytest.mark.parametrize("dtype", AGREE)
@pytest.mark.parametrize("place", KEYS_USED)
def test_keys_that_are_answered_are_those_that_are_used(place: str, dtype: torch.dtype) -> None:
    build, expected = KEYS_USED[place]
    model = build().to(dtype)
    x = heads(dtype=dtype) if place == "interface" else torch.randn(1, 5, 8, dtype=dtype)
    seen: list[Tensor] = []

    def doubled(where: str, keys: Tensor, visible: str) -> Tensor:
        seen.append(keys)
        return 2 * keys

    with keys_seen(model, doubled), keys_seen(model, doubled):
        out = model(x)
    assert torch.equal(seen[1], 2 * seen[0])
    torch.testing.assert_close(out, expected(model, x), rtol=AGREE[dtype], atol=AGREE[dtype])


def test_the_same_queries_and_keys_reach_both_kinds_of_listener() -> None:
    model, captured, seen = Nested(), list[Capture](), list[Tensor]()

    def see(where: str, keys: Tensor, visible: str) -> Tensor:
        seen.append(keys.detach())
        return keys

    with listening(model, captured.append), keys_seen(model, see):
        model(torch.randn(1, 5, 8))
    assert len(seen) == 2
    assert all(torch.equal(one.k, keys) for one, keys in zip(captured, seen, strict=True))


@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
def test_a_call_that_is_computed_again_is_told_again(reentrant: bool) -> None:
    model, result = Nested(reentrant), list[AttentionCall]()
    with observe_attention(model, result.append):
        model(torch.randn(5, 8)).sum().backward()
    assert [call.path for call in result] == ["first", "second", "second"]
    assert result[-1].keys is not None
    assert result[-1].keys.requires_grad


def test_what_is_compiled_runs_as_it_would_and_is_not_heard() -> None:
    torch.compiler.reset()
    model, x, result = Nested(), torch.randn(5, 8), list[AttentionCall]()
    with observe_attention(model, result.append):
        out = torch.compile(model, backend="eager", fullgraph=True)(x)
        assert not result
        torch.testing.assert_close(model(x), out)
    assert len(result) == 2


def test_listeners_stop_in_any_order() -> None:
    model, x = Calling(), torch.randn(5, 8)
    counts = [list[AttentionCall](), list[AttentionCall]()]
    first, second = ExitStack(), ExitStack()
    first.enter_context(observe_attention(model, counts[0].append))
    second.enter_context(observe_attention(model, counts[1].append))
    model(x)
    first.close()
    model(x)
    second.close()
    model(x)
    assert [len(calls) for calls in counts] == [1, 2]
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_listener_that_nobody_stops_goes_with_whoever_held_it() -> None:
    model, result, before = Calling(), list[AttentionCall](), F.scaled_dot_product_attention
    held = ExitStack()
    held.enter_context(observe_attention(model, result.append))
    assert F.scaled_dot_product_attention is not before
    del held
    gc.collect()
    assert F.scaled_dot_product_attention is before
    model(torch.randn(5, 8))
    assert not result


def test_what_others_put_in_the_place_meanwhile_stays_and_no_call_is_told_twice() -> None:
    model, x, before = Calling(), torch.randn(5, 8), F.scaled_dot_product_attention
    ran: list[int] = []
    with observe_attention(model, lambda call: None):
        inner = F.scaled_dot_product_attention

        def theirs(*args: Any, **options: Any) -> Tensor:
            ran.append(1)
            return inner(*args, **options)

        F.scaled_dot_product_attention = theirs
        assert len(heard(model, x)) == 1
    assert F.scaled_dot_product_attention is theirs
    assert len(heard(model, x)) == 1
    assert len(ran) == 2
    F.scaled_dot_product_attention = before
    assert len(heard(model, x)) == 1, "also when they have taken it away again"


def test_other_models_and_other_threads_are_not_heard() -> None:
    model, other, result = Calling(), Calling(), list[AttentionCall]()

    def attend(*args: Tensor) -> Tensor:
        beside = threading.Thread(target=F.scaled_dot_product_attention, args=args)
        beside.start()
        beside.join()
        return args[2]

    model.attend = attend
    with observe_attention(model, result.append):
        model(torch.randn(5, 8))
        other(torch.randn(5, 8))
        F.scaled_dot_product_attention(heads(), heads(), heads())
    assert not result


def test_a_pass_that_fails_leaves_no_module_running() -> None:
    def fail(*_: Tensor) -> Tensor:
        raise RuntimeError("on purpose")

    model, result = nn.Sequential(Calling(fail)), list[AttentionCall]()
    with observe_attention(model, result.append):
        with pytest.raises(RuntimeError, match="on purpose"):
            model(torch.randn(5, 8))
        F.scaled_dot_product_attention(heads(), heads(), heads())
    assert not result


def test_a_module_that_was_interrupted_does_not_outlive_the_one_around_it() -> None:
    """PyTorch calls no hooks of a module that an interrupt leaves."""

    def interrupt(*_: Tensor) -> Tensor:
        raise KeyboardInterrupt

    class Forgiving(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with suppress(KeyboardInterrupt):
                super().forward(x)
            return x

    model, result = Forgiving(Calling(interrupt)), list[AttentionCall]()
    with observe_attention(model, result.append):
        model(torch.randn(5, 8))
        F.scaled_dot_product_attention(heads(), heads(), heads())
    assert not result
