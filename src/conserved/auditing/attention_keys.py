"""The keys of a running model as its attention uses them: after norms and rotary positions.

Three ways in, all undone on leaving: the attention interface of transformers, whatever implementation it hands out;
torch's scaled_dot_product_attention, which torch.nn, timm and most others call; and the blocks of this package.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved.attention.attention_calls import computes_own_attention

See = Callable[[str, Tensor, str], Tensor]
"""Given where, keys (…, heads, length, width), and why a shift of them may be visible (empty if not): keys to use."""


class _Watcher:
    """Whose keys are looked at, by whom, and which of its modules is running."""

    def __init__(self, model: nn.Module, see: See) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.see = see
        self.running: list[str] = []
        self.inside = 0
        """Calls of transformers' attention functions that are under way, which may call torch's."""


_ACTIVE: WeakSet[_Watcher] = WeakSet()
"""Everyone who looks at keys now. A monitor that nobody closes takes its watcher with it."""


@contextmanager
def keys_seen(model: nn.Module, see: See) -> Iterator[None]:
    """Within it, every attention of the model passes its keys through `see`."""
    watcher = _Watcher(model, see)
    with ExitStack() as undo:
        for name, module in model.named_modules():
            if computes_own_attention(module):
                own: Any = module
                undo.callback(own.keys.register_forward_hook(_through(name, see)).remove)
            elif name and not any(True for _ in module.children()):
                continue
            undo.callback(module.register_forward_pre_hook(_enter(name, watcher.running)).remove)
            undo.callback(module.register_forward_hook(_leave(watcher.running), always_call=True).remove)
        _ACTIVE.add(watcher)
        undo.callback(_ACTIVE.discard, watcher)
        _listen()
        undo.callback(_stop_listening)
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


_ORIGINAL: dict[str, Any] = {}
"""torch's function and transformers' method while ours stand in their place; one layer, however many are looking."""


def _listen() -> None:
    """Put our functions in the place of torch's and transformers', if they are not there yet."""
    if "torch" not in _ORIGINAL:
        _ORIGINAL["torch"] = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = _scaled_dot_product
    kind = _interface()
    if kind is not None and "transformers" not in _ORIGINAL:
        _ORIGINAL["transformers"] = kind.get_interface
        kind.get_interface = _get_interface


def _stop_listening() -> None:
    """Undo it when nobody looks any more; what others have put there since stays."""
    if len(_ACTIVE):
        return
    kind = _interface()
    if F.scaled_dot_product_attention is _scaled_dot_product:
        F.scaled_dot_product_attention = _ORIGINAL.pop("torch")
    if kind is not None and kind.get_interface is _get_interface:
        kind.get_interface = _ORIGINAL.pop("transformers")


def _interface() -> Any:
    """The class through which models of transformers find their attention function, if the package is in use."""
    functions = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", None)
    return None if functions is None else type(functions)


def _scaled_dot_product(query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Any:
    original = _ORIGINAL["torch"]
    if torch.compiler.is_compiling():
        return original(query, key, *rest, **options)
    for watcher in list(_ACTIVE):
        if watcher.running and not watcher.inside:
            key = watcher.see(watcher.running[-1], key, "")
    return original(query, key, *rest, **options)


def _get_interface(self: Any, *args: Any, **options: Any) -> Any:
    attend = _ORIGINAL["transformers"](self, *args, **options)
    if torch.compiler.is_compiling():
        return attend

    def attending(module: nn.Module, query: Tensor, key: Tensor, *rest: Any, **more: Any) -> Any:
        mine = [watcher for watcher in _ACTIVE if id(module) in watcher.names]
        for watcher in mine:
            key = watcher.see(watcher.names[id(module)], key, _visible(module, more))
            watcher.inside += 1
        try:
            return attend(module, query, key, *rest, **more)
        finally:
            for watcher in mine:
                watcher.inside -= 1

    return attending


def _visible(module: nn.Module, options: dict[str, Any]) -> str:
    """Why adding one vector to all keys may change what this attention computes; empty if it does not."""
    if options.get("s_aux") is not None or getattr(module, "sinks", None) is not None:
        return "learned sink logits take part in its softmax"
    cap = options.get("softcap") or getattr(module, "attn_logit_softcapping", None)
    return "its scores are capped" if cap else ""
