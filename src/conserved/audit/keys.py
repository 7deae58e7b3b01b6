"""The keys of a running model as its attention uses them: after norms and rotary positions.

Three ways in, all undone on leaving: the attention interface of transformers, whatever implementation it hands out;
torch's scaled_dot_product_attention, which torch.nn, timm and most others call; and the blocks of this package.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from conserved.blocks import Attention

See = Callable[[str, Tensor, str], Tensor]
"""Given where, keys (…, heads, length, width), and why a shift of them may be visible (empty if not): keys to use."""


@contextmanager
def keys_seen(model: nn.Module, see: See) -> Iterator[None]:
    """Within it, every attention of the model passes its keys through `see`."""
    names = {id(module): name for name, module in model.named_modules()}
    running: list[str] = []
    inside: list[bool] = []
    with ExitStack() as undo:
        for name, module in model.named_modules():
            if isinstance(module, Attention):
                undo.callback(module.keys.register_forward_hook(_through(name, see)).remove)
            elif not any(True for _ in module.children()):
                continue
            undo.callback(module.register_forward_pre_hook(_enter(name, running)).remove)
            undo.callback(module.register_forward_hook(_leave(running), always_call=True).remove)
        undo.enter_context(_transformers(names, see, inside))
        undo.enter_context(_scaled_dot_product(running, see, inside))
        yield


def _through(name: str, see: See) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    return lambda module, args, keys: see(name, keys, "")


def _enter(name: str, running: list[str]) -> Callable[[nn.Module, Any], None]:
    return lambda module, args: running.append(name)


def _leave(running: list[str]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if running:
            running.pop()

    return hook


@contextmanager
def _scaled_dot_product(running: list[str], see: See, inside: list[bool]) -> Iterator[None]:
    original: Any = F.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Tensor:
        if not inside:
            key = see(running[-1] if running else "", key, "")
        return original(query, key, *rest, **options)

    F.scaled_dot_product_attention = watched
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


@contextmanager
def _transformers(names: dict[int, str], see: See, inside: list[bool]) -> Iterator[None]:
    """The interface through which models of transformers find their attention function, if the package is in use."""
    library: Any = sys.modules.get("transformers.modeling_utils")
    functions = getattr(library, "ALL_ATTENTION_FUNCTIONS", None)
    if functions is None:
        yield
        return
    kind: Any = type(functions)
    original = kind.get_interface

    def watched(self: Any, *args: Any, **options: Any) -> Any:
        attend = original(self, *args, **options)

        def attending(module: nn.Module, query: Tensor, key: Tensor, *rest: Any, **more: Any) -> Any:
            key = see(names.get(id(module), ""), key, _visible(module, more))
            inside.append(True)
            try:
                return attend(module, query, key, *rest, **more)
            finally:
                inside.pop()

        return attending

    kind.get_interface = watched
    try:
        yield
    finally:
        kind.get_interface = original


def _visible(module: nn.Module, options: dict[str, Any]) -> str:
    """Why adding one vector to all keys may change what this attention computes; empty if it does not."""
    if options.get("s_aux") is not None or getattr(module, "sinks", None) is not None:
        return "learned sink logits take part in its softmax"
    cap = options.get("softcap") or getattr(module, "attn_logit_softcapping", None)
    return "its scores are capped" if cap else ""
