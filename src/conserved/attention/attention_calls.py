"""Queries and keys of a running model, as its attention uses them, with its own attention left in place.

Models of transformers call their attention through the library's attention interface: what that interface hands out is
wrapped while the model runs, whichever backend it is. torch.nn.MultiheadAttention and this package's blocks are
listened to at their inputs. Everything else that calls PyTorch's scaled_dot_product_attention (timm among it) is heard
there. Nothing is left behind when the model has run, also if it fails.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from conserved.attention.band import Band


class Unheard(ValueError):
    """A model ran and no attention was heard in it; the message says what can be heard."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Capture:
    """One call of attention: (batch, heads, length, width) queries and keys, and who may see what.

    `mask` is True where a query sees a key, with axes that broadcast to (batch, heads, queries, keys); None leaves it
    to `causal` and `window`. `problem` says why the call cannot be described, if it cannot.
    """

    path: str
    q: Tensor
    k: Tensor
    scale: float
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    mask: Tensor | None = None
    problem: str = ""


Hear = Callable[[Capture], None]


def computes_own_attention(module: nn.Module) -> bool:
    """Whether a module computes attention by itself and says what its scores are made of, as blocks of this package do:
    `queries_and_keys(x)`, `scale`, `causal`, and `keys`, a module that keys pass through on their way to the scores."""
    return all(hasattr(module, name) for name in ("queries_and_keys", "keys", "scale", "causal"))


@contextmanager
def listening(model: nn.Module, hear: Hear) -> Iterator[None]:
    """While it lasts, `hear` is told of every call of attention inside `model`."""
    names = {module: name for name, module in model.named_modules()}
    ear = _Ear(names, hear)
    with ExitStack() as stack:
        for module in names:
            stack.callback(module.register_forward_pre_hook(ear.enter, with_kwargs=True, prepend=True).remove)
            stack.callback(module.register_forward_hook(ear.leave, always_call=True).remove)
        stack.enter_context(_attention_interface(ear))
        stack.enter_context(_Products(ear))
        yield


class _Ear:
    """Which modules are running, and what to tell."""

    def __init__(self, names: dict[nn.Module, str], hear: Hear) -> None:
        self.names, self.hear = names, hear
        self.running: list[nn.Module] = []
        self.inside = 0

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.running.append(module)
        if isinstance(module, nn.MultiheadAttention):
            self.tell(_multihead(self.names[module], module, args, kwargs))
        elif computes_own_attention(module):
            own: Any = module
            x = args[0] if args else kwargs["x"]
            with torch.no_grad():
                q, k = own.queries_and_keys(x)
            self.tell(_called(self.names[module], q, k, scale=own.scale, causal=own.causal))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if module in self.running:
            while self.running.pop() is not module:
                pass

    def tell(self, capture: Capture) -> None:
        if self.inside == 0:
            # What is computed about the call is no part of the model.
            self.inside += 1
            try:
                with torch.no_grad(), torch._C.DisableTorchFunction():
                    self.hear(capture)
            finally:
                self.inside -= 1

    @property
    def claimed(self) -> bool:
        """Whether a module that was heard at its inputs is running."""
        return any(isinstance(one, nn.MultiheadAttention) or computes_own_attention(one) for one in self.running)

    @property
    def path(self) -> str:
        return self.names[self.running[-1]] if self.running else ""


def _called(path: str, q: Tensor, k: Tensor, *, scale: float | None, mask: Any = None, **more: Any) -> Capture:
    """A call in (batch, heads, length, width), with its mask read."""
    while q.ndim < 4:
        q, k = q[None], k[None]
    q, k = q.detach().flatten(0, -4), k.detach().flatten(0, -4)
    allowed, problem = _allowed(mask)
    return Capture(
        path=path,
        q=q,
        k=k,
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        mask=allowed,
        problem=problem,
        **more,
    )


def _allowed(mask: Any) -> tuple[Tensor | None, str]:
    """A mask as booleans with four axes; a bias that is not one cannot be described."""
    if mask is None:
        return None, ""
    if not isinstance(mask, Tensor):
        return None, f"its mask is a {type(mask).__name__}"
    if mask.dtype == torch.bool:
        allowed = mask
    elif mask.is_floating_point():
        allowed = mask > torch.finfo(mask.dtype).min / 2
        if bool((mask[allowed] != 0).any()):
            return None, "a bias that is not a mask is added to its logits"
    else:
        allowed = mask != 0
    while allowed.ndim < 4:
        allowed = allowed[None]
    return allowed, ""


@contextmanager
def _attention_interface(ear: _Ear) -> Iterator[None]:
    """Wrap whatever function transformers' attention interface hands out."""
    library: Any = sys.modules.get("transformers.modeling_utils")
    interface = getattr(library, "AttentionInterface", None)
    if interface is None or not hasattr(interface, "get_interface"):
        yield
        return
    original = interface.get_interface

    def get_interface(self: Any, implementation: Any, default: Any) -> Any:
        chosen = original(self, implementation, default)

        def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, *args: Any, **kwargs: Any) -> Any:
            if module in ear.names:
                ear.tell(_from_transformers(ear.names[module], module, q, k, mask, kwargs))
            ear.inside += 1
            try:
                return chosen(module, q, k, v, mask, *args, **kwargs)
            finally:
                ear.inside -= 1

        return attend

    interface.get_interface = get_interface
    try:
        yield
    finally:
        interface.get_interface = original


def _from_transformers(path: str, module: Any, q: Tensor, k: Tensor, mask: Any, options: dict[str, Any]) -> Capture:
    given = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if given is None else given) and q.shape[-2] > 1
    window = options.get("sliding_window")
    extra = [name for name in ("position_bias", "s_aux") if options.get(name) is not None]
    if isinstance(mask, Tensor) and mask.ndim == 2:
        # Backends without a mask of four axes take one of padding, and know the rest by themselves.
        mask = mask[:, None, None, :].bool()
        band = Band.of(q.shape[-2], k.shape[-2], causal=causal, window=window or None)
        mask = mask if band.whole else mask & band.visible(q.shape[-2], k.shape[-2], q.device)
    capture = _called(
        path,
        q,
        k,
        scale=options.get("scaling"),
        mask=mask,
        causal=causal and mask is None,
        window=window if causal and mask is None else None,
        softcap=options.get("softcap"),
    )
    return replace(capture, problem=f"it takes {extra[0]}") if extra else capture


_PRODUCT = torch._C._nn.scaled_dot_product_attention
"""PyTorch's own, which whatever stands in its place under `torch.nn.functional` ends in; audits put one there."""


class _Products(TorchFunctionMode):
    """Hears calls of scaled_dot_product_attention that nobody else speaks for."""

    def __init__(self, ear: _Ear) -> None:
        super().__init__()
        self._ear = ear

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        ear = self._ear
        if func is _PRODUCT and ear.inside == 0 and not ear.claimed:
            ear.tell(_product(ear.path, *args, **kwargs))
        return func(*args, **kwargs)


def _product(
    path: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Capture:
    if is_causal and query.shape[-2] != key.shape[-2]:
        # PyTorch's own triangle begins at the first query and key.
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        is_causal = False
    return _called(path, query, key, scale=scale, mask=attn_mask, causal=is_causal)


_MULTIHEAD = inspect.signature(nn.MultiheadAttention.forward)


def _multihead(path: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Capture:
    """Queries and keys of torch.nn.MultiheadAttention, projected again from what it is given."""
    given = _MULTIHEAD.bind(module, *args, **kwargs)
    given.apply_defaults()
    options = given.arguments
    x, y = options["query"], options["key"]
    if x.is_nested or y.is_nested:
        return Capture(path=path, q=x, k=y, scale=1.0, problem="its inputs are nested tensors")
    if x.ndim == 2:
        x, y = x[None], y[None]
    elif not module.batch_first:
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    width = module.embed_dim
    if module.in_proj_weight is not None:
        wq, wk, _ = module.in_proj_weight.chunk(3)
    else:
        wq, wk = module.q_proj_weight, module.k_proj_weight
    bq, bk = (None, None) if module.in_proj_bias is None else module.in_proj_bias.split([width, width, width])[:2]
    with torch.no_grad(), torch._C.DisableTorchFunction():
        q, k = F.linear(x, wq, bq), F.linear(y, wk, bk)
        extra = 0
        if module.bias_k is not None:
            k, extra = torch.cat((k, module.bias_k.expand(len(k), -1, -1)), 1), 1
        q, k = (t.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for t in (q, k))
        if module.add_zero_attn:
            k, extra = torch.cat((k, torch.zeros_like(k[:, :, :1])), 2), extra + 1
        mask, problem = _multihead_mask(options, len(q), module.num_heads, extra)
    capture = _called(path, q, k, scale=None, mask=mask)
    return replace(capture, problem=problem) if problem else capture


def _multihead_mask(options: dict[str, Any], batch: int, heads: int, extra: int) -> tuple[Tensor | None, str]:
    """Both masks of torch.nn.MultiheadAttention as one; True there hides a key."""
    total: Tensor | None = None
    for name in ("attn_mask", "key_padding_mask"):
        mask = options[name]
        if mask is None:
            continue
        if mask.dtype != torch.bool:
            if bool(((mask != 0) & (mask != -torch.inf)).any()):
                return None, f"{name} adds a bias to its logits"
            mask = mask == -torch.inf
        seen = F.pad(~mask, (0, extra), value=True)
        if name == "key_padding_mask":
            seen = (seen if seen.ndim == 2 else seen[None])[:, None, None, :]
        elif seen.ndim == 3:
            seen = seen.unflatten(0, (batch, heads))
        total = seen if total is None else total & seen
    return total, ""
