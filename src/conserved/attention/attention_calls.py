"""Report every call of attention in a running model to listeners, without changing the model's own attention.

Calls are observed at the attention interface of transformers, whichever implementation it hands out; at PyTorch's
scaled_dot_product_attention, which torch.nn, timm and most others call; where the keys of this package's blocks pass;
and at the inputs of torch.nn.MultiheadAttention, which may compute its scores by itself. All of it is undone when
nobody listens any more. Compiled calls are not observed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conserved._torch_compat import SCALED_DOT_PRODUCT
from conserved.boundary import guarded
from conserved.function_listeners import Listeners


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionCall:
    """One call of attention, while it happens.

    It was observed at the "interface" of transformers, at PyTorch's "product", at the keys of a "block" that computes
    attention by itself, or at the "inputs" of torch.nn.MultiheadAttention. `queries` and `keys` have axes (…, heads,
    length, width) and are those the scores are made of, with their graph; None where they are not known: both for
    inputs, queries for a block. `args` and `kwargs` are what follows them in the call; for a block or inputs, what the
    module was called with.
    """

    at: Literal["interface", "product", "block", "inputs"]
    path: str
    module: nn.Module
    queries: Tensor | None
    keys: Tensor | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    part: bool = False
    """Whether it belongs to a call that was reported already."""
    output_listeners: list[Callable[[Tensor, bool], None]] = field(default_factory=list)
    """Functions that a listener adds to get the output with its graph, and whether tokens come before heads in it. A
    block and inputs have no output."""

    def finish(self, output: Any, *, tokens_first: bool = False) -> None:
        """Give the output of the call to those who asked for it."""
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor):
            for listener in self.output_listeners:
                listener(first, tokens_first)


Listener = Callable[[AttentionCall], Tensor | None]
"""Receives a call; may return keys that are used in place of its own."""


def computes_own_attention(module: nn.Module) -> bool:
    """Return whether a module computes attention by itself and exposes what its scores are made of.

    Blocks of this package do: `queries_and_keys(x)`, `scale`, `causal`, and `keys`, a module that keys pass through on
    their way to the scores.
    """
    return all(hasattr(module, name) for name in ("queries_and_keys", "keys", "scale", "causal"))


@contextmanager
def observe_attention(model: nn.Module, on_call: Listener) -> Iterator[None]:
    """Report every call of attention inside `model` to `on_call` within the context.

    Several may listen at a time, to the same model or others, and stop in any order.
    """
    listener = _Listener(model, guarded(on_call))
    with ExitStack() as undo:
        for name, module in model.named_modules():
            if name and _calls_no_attention(module):
                continue
            own: Any = module if computes_own_attention(module) else None
            if own is not None:
                undo.callback(own.keys.register_forward_hook(guarded(_through_block(listener, name, own))).remove)
            if own is not None or isinstance(module, nn.MultiheadAttention):
                enter = guarded(_enter_with_inputs(listener, name))
                undo.callback(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True).remove)
            else:
                undo.callback(module.register_forward_pre_hook(guarded(_enter(listener, name)), prepend=True).remove)
            undo.callback(module.register_forward_hook(guarded(_leave(listener)), always_call=True).remove)
        _LISTENERS.begin(listener)
        undo.callback(_LISTENERS.end, listener)
        for holder, attribute in _products(model):
            _LISTENERS.replace(holder, attribute, _through_product, reach=_with_causal_biases)
        interface = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
        if hasattr(interface, "get_interface"):
            _LISTENERS.replace(interface, "get_interface", _through_interface)
        yield


def _calls_no_attention(module: nn.Module) -> bool:
    """Return whether a module needs no hooks: PyTorch's own modules without others inside, and norms, which
    have vectors alone. If one of these attends after all, the call is reported with the module around it."""
    if any(True for _ in module.children()):
        return False
    shapes = [p.ndim for p in module.parameters(recurse=False)]
    return type(module).__module__.startswith("torch.nn.modules.") or (bool(shapes) and max(shapes) < 2)


class _Running(NamedTuple):
    """A module whose forward pass is under way, and the inputs of one that may compute attention by itself."""

    path: str
    module: nn.Module
    inputs: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})


class _Stack(threading.local):
    """Modules that are running, the innermost last. Threads that recompute or hold replicas have their own."""

    def __init__(self) -> None:
        self.modules: list[_Running] = []


class _Listener:
    """A model whose attention is observed, its listener, and the modules that are running."""

    def __init__(self, model: nn.Module, on_call: Listener) -> None:
        self.paths = {id(module): name for name, module in model.named_modules()}
        self.on_call = on_call
        self.running = _Stack()


_LISTENERS = Listeners[_Listener]()


class _Within(threading.local):
    """The number of calls that are running or being described: calls inside them are not reported again."""

    def __init__(self) -> None:
        self.calls = 0


_WITHIN = _Within()


@contextmanager
def unheard() -> Iterator[None]:
    """Report no calls of attention to listeners within the context."""
    _WITHIN.calls += 1
    try:
        yield
    finally:
        _WITHIN.calls -= 1


def _enter(listener: _Listener, path: str) -> Callable[[nn.Module, Any], None]:
    def hook(module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            listener.running.modules.append(_Running(path, module))

    return hook


def _enter_with_inputs(listener: _Listener, path: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        listener.running.modules.append(_Running(path, module, (args, kwargs)))
        if isinstance(module, nn.MultiheadAttention) and not _WITHIN.calls:
            call = AttentionCall(
                at="inputs", path=path, module=module, queries=None, keys=None, args=args, kwargs=kwargs
            )
            with unheard():
                listener.on_call(call)

    return hook


def _leave(listener: _Listener) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        running = listener.running.modules
        if running and running[-1].module is module:
            running.pop()
        elif any(entry.module is module for entry in running):
            while running.pop().module is not module:
                pass

    return hook


def _through_block(listener: _Listener, path: str, block: nn.Module) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    """Return a hook on the module that the keys of a block pass through."""

    def hook(module: nn.Module, args: Any, keys: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or _WITHIN.calls:
            return keys
        given = next((entry for entry in reversed(listener.running.modules) if entry.module is block), None)
        call = AttentionCall(
            at="block",
            path=path,
            module=block,
            queries=None,
            keys=keys,
            args=() if given is None else given.inputs[0],
            kwargs={} if given is None else given.inputs[1],
            # Only a pass that is computed again for the backward gets here without the block itself.
            part=given is None,
        )
        with unheard():
            answer = listener.on_call(call)
        return keys if answer is None else answer

    return hook


def _through_product(original: Callable[..., Any]) -> Callable[..., Any]:
    def scaled_dot_product_attention(query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or _WITHIN.calls:
            return original(query, key, *rest, **options)
        calls = []
        with unheard():
            for listener in _LISTENERS.now():
                running = listener.running.modules
                if running and not any(computes_own_attention(entry.module) for entry in running):
                    call = AttentionCall(
                        at="product",
                        path=running[-1].path,
                        module=running[-1].module,
                        queries=query,
                        keys=key,
                        args=rest,
                        kwargs=options,
                        part=any(isinstance(entry.module, nn.MultiheadAttention) for entry in running),
                    )
                    calls.append(call)
                    answer = listener.on_call(call)
                    key = key if answer is None else answer
            output = original(query, key, *rest, **options)
            for call in calls:
                call.finish(output)
            return output

    return scaled_dot_product_attention


def _with_causal_biases(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return PyTorch's function, for masks of type CausalBias as well while another function stands in its place.

    Such a mask has no entries: its storage is not initialised. It computes attention by itself if the function that
    is called is the one found in torch.nn.functional, and is read as a mask of these entries if it is not.
    A function that others have put there is left to do as it does.
    """
    if original is not SCALED_DOT_PRODUCT:
        return original

    @wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        kind: Any = type(args[3] if len(args) > 3 else options.get("attn_mask"))
        # By name: to import the class takes longer than all of this package.
        if (kind.__module__, kind.__name__) == ("torch.nn.attention.bias", "CausalBias"):
            return kind.__torch_function__(F.scaled_dot_product_attention, (kind,), args, options)
        return original(*args, **options)

    return call


def _through_interface(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_interface(self: Any, *args: Any, **options: Any) -> Any:
        attend = original(self, *args, **options)
        # An implementation that changes keys on their way to PyTorch's function is observed there.
        through_product = getattr(attend, "calls_product", False)
        if torch.compiler.is_compiling() or through_product:
            return attend
        return _LISTENERS.guarded(attend, _through_implementation(attend))

    return get_interface


def _through_implementation(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Return whatever function the interface of transformers hands out."""

    def attending(module: nn.Module, query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or _WITHIN.calls:
            return attend(module, query, key, *rest, **options)
        calls = []
        with unheard():
            for listener in _LISTENERS.now():
                path = listener.paths.get(id(module))
                if path is None and listener.running.modules:
                    path = listener.running.modules[-1].path
                if path is not None:
                    call = AttentionCall(
                        at="interface",
                        path=path,
                        module=module,
                        queries=query,
                        keys=key,
                        args=rest,
                        kwargs=options,
                    )
                    calls.append(call)
                    answer = listener.on_call(call)
                    key = key if answer is None else answer
            output = attend(module, query, key, *rest, **options)
            for call in calls:
                call.finish(output, tokens_first=True)
            return output

    return attending


_NAME = "scaled_dot_product_attention"


def _products(model: nn.Module) -> Iterator[tuple[ModuleType, str]]:
    """Yield where PyTorch's function is looked up when it is called.

    In its own module and in those that imported it from
    there; under another name in those that define the model's classes."""
    product = SCALED_DOT_PRODUCT
    yield F, _NAME
    for module in _importers(len(sys.modules)):
        if vars(module).get(_NAME) is product:
            yield module, _NAME
    for path in {"__main__", *(kind.__module__ for cls in set(map(type, model.modules())) for kind in cls.__mro__)}:
        home = sys.modules.get(path)
        if home is not None and path.partition(".")[0] != "torch":
            yield from [(home, name) for name, value in vars(home).items() if value is product]


@lru_cache(maxsize=1)
def _importers(count: int) -> list[ModuleType]:
    """Return modules outside PyTorch that hold something of this name; `count` of modules invalidates the cache."""
    # Not vars(module): to ask a module that is imported lazily for anything imports it.
    modules = ((path, module) for path, module in sys.modules.copy().items() if isinstance(module, ModuleType))
    return [
        module
        for path, module in modules
        if path.partition(".")[0] != "torch" and _NAME in object.__getattribute__(module, "__dict__")
    ]
