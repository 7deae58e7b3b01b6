"""Run a backward pass again, to ask what rounding explains of it and whether it gives the same gradients twice.

A `Replay` gives gradients of chosen parameters, of the same pass, as often as wanted: as it was run, with the output
gradient multiplied by a number, or in another `PassForm`. Nothing of the run is changed: parameters keep their
gradients, random generators their state, buffers and attributes of modules their values.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from conserved._torch_compat import buffers_of, tree_flatten, tree_leaves, version_of
from conserved.auditing.reference_form import AS_RUN, PassForm
from conserved.boundary import Hook, guarded
from conserved.errors import ConservedError
from conserved.inference import being_followed
from conserved.inference.program.program_state import preserve_state
from conserved.rank_agreement import several_processes

SCALE = 1.37
"""Factor on the output gradient when rounding is sampled: not a power of two, so that every rounding differs."""


SCALES = (SCALE, 0.73, 1.19, 0.61, 1.61, 0.87, 1.83, 0.53)
"""Factors for several samples. Their ratios are not powers of two either, so that no two samples round alike."""


STAGE = "replay"
"""The part of a monitor that records passes."""


class ReplayError(ConservedError, RuntimeError):
    """Raised if a pass cannot be run again; the message says why."""


class Replay(ABC):
    """A pass that can be run again."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.runs = 0
        """The number of forward passes that replays have run."""

    def gradients(
        self, parameters: Mapping[str, Tensor], *, scale: float = 1.0, form: PassForm = AS_RUN
    ) -> dict[str, Tensor]:
        """Run the pass again and return the gradients of some parameters.

        Args:
            parameters: the parameters, by name.
            scale: a factor on the gradient of the outputs; gradients are divided by it again.
            form: the form to run it in.

        Returns:
            Gradients by name; zeros for a parameter that the pass does not reach.

        Raises:
            ReplayError: the pass cannot be run again.
        """
        wanted = [*parameters.values()]
        sharded = is_fully_sharded(self.model)
        if form.wide is not None and not self.widens:
            raise ReplayError("The pass cannot be replayed in higher precision: FSDP2 gathers parameters in their own.")
        # Before the forward pass: FSDP2 leaves whole parameters in the place of the outermost ones after it.
        held = [*self.model.parameters(), *wanted] if sharded else []
        with state_kept(self.model), torch.enable_grad(), _gradients_aside(held):
            outputs, cotangents = self._outputs(form)
            self.runs += 1
            scaled = [cotangent * scale for cotangent in cotangents]
            if sharded:
                torch.autograd.backward(outputs, scaled)
                gradients = [tensor.grad for tensor in wanted]
            else:
                gradients = [*torch.autograd.grad(outputs, wanted, scaled, allow_unused=True)]
        zeros = (torch.zeros_like(p) if g is None else g.detach() for p, g in zip(wanted, gradients, strict=True))
        with torch.no_grad():
            return {name: g if scale == 1 else g.div_(scale) for name, g in zip(parameters, zeros, strict=True)}

    @property
    def widens(self) -> bool:
        """Whether the pass can run in higher precision.

        FSDP2 resizes the memory of the tensors that it gathers into, which a wider copy of them does not survive.
        """
        return not is_fully_sharded(self.model)

    @abstractmethod
    def _outputs(self, form: PassForm) -> tuple[list[Tensor], list[Tensor]]:
        """Run the forward pass; its outputs, and the gradient of the loss with respect to each."""


class ClosureReplay(Replay):
    """The pass of a function that runs the model and returns the loss, without calling backward."""

    def __init__(self, model: nn.Module, closure: Callable[[], Tensor]) -> None:
        super().__init__(model)
        self._closure = closure

    def loss(self, form: PassForm) -> float:
        """Return the loss as a detached tensor, with the model in a given form."""
        with state_kept(self.model), torch.no_grad(), form.applied():
            return float(self._closure())

    def _outputs(self, form: PassForm) -> tuple[list[Tensor], list[Tensor]]:
        with form.applied():
            loss = self._closure()
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ReplayError(
                f"Expected closure() to return the loss as a scalar tensor with a graph, got {got}. "
                "Return loss_fn(model(x), y), and do not call backward() in it."
            )
        return [loss], [torch.ones_like(loss)]


@dataclass(slots=True, eq=False)
class _Call:
    """One call of a model: arguments, the state it started from, and the gradients its outputs received."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: list[int]
    generators: RandomState
    autocast: dict[str, torch.dtype]
    cotangents: dict[int, Tensor] = field(default_factory=dict)
    """The gradient of each output, by its position among the tensors that the model returned."""
    external: dict[int, Tensor] | None = None
    """The same gradients without the part that one output passes on to another."""


class RecordedPass(Replay):
    """The last forward pass of a model while recording, with the gradient of its outputs.

    References to the arguments are kept, not copies. Recording costs two hooks and, if the loss is computed outside the
    model, the memory of the gradient of its outputs until `clear`.
    """

    def __init__(self, model: nn.Module, *, refused: str = "") -> None:
        """Prepare to record passes of a model.

        Args:
            model: the model whose calls are recorded.
            refused: why its calls must not be run again, for instance because one process cannot do so alone.
        """
        super().__init__(model)
        self._refused = refused
        self._call: _Call | None = None
        self._handles: list[Any] = []
        self._replaying = False

    def record(self) -> None:
        """Start recording calls of the model; `stop` ends it. Nothing is recorded that could not be run again."""
        if not self._handles and not self._unsuitable:
            self._handles = [
                self.model.register_forward_pre_hook(
                    guarded(self._before, stage=STAGE), with_kwargs=True, prepend=True
                ),
                self.model.register_forward_hook(guarded(self._after, stage=STAGE), with_kwargs=True),
            ]

    def stop(self) -> None:
        """Stop recording; the last call stays available."""
        while self._handles:
            self._handles.pop().remove()

    def clear(self) -> None:
        """Forget the recorded call and everything it holds."""
        self._call = None

    @property
    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments of the recorded call, if there is one."""
        return None if self._call is None else (self._call.args, self._call.kwargs)

    def restore_random(self) -> None:
        """Set all random generators to where they were before the recorded call."""
        if self._call is not None:
            self._call.generators.restore()

    @property
    def obstacle(self) -> str:
        """Why the recorded call cannot be run again; empty if it can."""
        call = self._call
        if call is None:
            return "no forward pass of the model was recorded"
        if not call.cotangents:
            return "no gradient reached the outputs of the model"
        if call.versions != _versions(call.args, call.kwargs):
            return "an argument of the model was changed in place"
        return self._unsuitable

    @property
    def _unsuitable(self) -> str:
        """Why no call of this model can be run again by one process."""
        if self._refused:
            return self._refused
        if any(isinstance(module, nn.SyncBatchNorm) for module in self.model.modules()):
            return "batch norms synchronise over processes"
        if any(_own_hooks(parameter) for parameter in self.model.parameters()) and is_fully_sharded(self.model):
            return "hooks that run after gradients are accumulated would run again"
        return ""

    @property
    def together(self) -> bool:
        """Whether all processes have to replay the pass together, because parameters are sharded over them."""
        return any(hasattr(parameter, "full_tensor") for parameter in self.model.parameters())

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._replaying and torch.is_grad_enabled() and not being_followed():
            self.begin(args, kwargs)

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a call that begins now with these arguments."""
        devices = {parameter.device.type for parameter in self.model.parameters()}
        autocast = {kind: torch.get_autocast_dtype(kind) for kind in devices if torch.is_autocast_enabled(kind)}
        self._call = _Call(args, kwargs, _versions(args, kwargs), RandomState.now(), autocast)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self._call
        if call is None or self._replaying or not torch.is_grad_enabled() or being_followed():
            return
        for position, tensor in enumerate(_tensors(output)):
            if tensor.requires_grad:
                tensor.register_hook(guarded(_keep(call, position), stage=STAGE))

    def _outputs(self, form: PassForm) -> tuple[list[Tensor], list[Tensor]]:
        if self.obstacle:
            raise ReplayError(f"The pass cannot be replayed: {self.obstacle}.")
        call = self._call
        assert call is not None
        if call.external is None:
            call.external = call.cotangents if len(call.cotangents) == 1 else self._separate(call)
        outputs = self._forward(call, form)
        used = {position: cotangent for position, cotangent in call.external.items() if bool(cotangent.any())}
        used = used or call.external
        return [outputs[position] for position in used], [
            cotangent.to(outputs[position].dtype) for position, cotangent in used.items()
        ]

    def _forward(self, call: _Call, form: PassForm) -> list[Tensor]:
        call.generators.restore()
        self._replaying = True
        try:
            with ExitStack() as undo:
                for device, dtype in call.autocast.items():
                    undo.enter_context(torch.autocast(device, dtype=dtype))
                undo.enter_context(form.applied())
                return _tensors(self.model(*call.args, **call.kwargs))
        finally:
            self._replaying = False

    def _separate(self, call: _Call) -> dict[int, Tensor]:
        """Subtract from the gradient of each output what other outputs pass on to it.

        A model that returns its loss and its logits passes the gradient of the loss through the logits: their hook sees
        it, and counting it twice would be wrong. Outputs are taken latest first, because they depend on earlier ones.
        """
        outputs = self._forward(call, AS_RUN)
        order = sorted(call.cotangents, key=lambda position: -_sequence(outputs[position]))
        external: dict[int, Tensor] = {}
        for position in order:
            inner = None
            if external:
                later = [outputs[index] for index in external]
                (inner,) = torch.autograd.grad(
                    later, [outputs[position]], [*external.values()], retain_graph=True, allow_unused=True
                )
            total = call.cotangents[position]
            external[position] = total if inner is None else total - inner.to(total.dtype)
        return external


@dataclass(frozen=True, slots=True, eq=False)
class RandomState:
    """The state of every random generator that a model may draw from."""

    host: Tensor
    devices: Sequence[Tensor]
    python: Any
    numpy: Any

    @staticmethod
    def now() -> RandomState:
        """Read the present state."""
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return RandomState(torch.get_rng_state(), devices, random.getstate(), np.random.get_state())

    def same_as(self, other: RandomState) -> bool:
        """Return whether all generators are in the same state in both."""
        pairs = zip((self.host, *self.devices), (other.host, *other.devices), strict=True)
        equal = all(torch.equal(a, b) for a, b in pairs) and self.python == other.python
        return equal and all(np.array_equal(a, b) for a, b in zip(self.numpy, other.numpy, strict=True))

    def restore(self) -> None:
        """Set every generator back."""
        torch.set_rng_state(self.host)
        if self.devices:
            torch.cuda.set_rng_state_all([*self.devices])
        random.setstate(self.python)
        np.random.set_state(self.numpy)


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Put back random generators at the end: those of PyTorch, of Python and of NumPy."""
    drawn = RandomState.now()
    try:
        yield
    finally:
        drawn.restore()


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Restore random generators, buffers and other module state when the block ends."""
    drawn = RandomState.now()
    buffers = [
        (buffer, buffer.detach().clone())
        for buffer in model.buffers()
        if not buffer.is_meta and not hasattr(buffer, "full_tensor")
    ]
    buffers_before = [(module, dict(buffers_of(module))) for module in model.modules()]
    try:
        with preserve_state(model):
            yield
    finally:
        drawn.restore()
        for module, own in buffers_before:
            buffers_of(module).update(own)
        with torch.no_grad():
            for buffer, value in buffers:
                # Batch norms write to their statistics without counting a version.
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def alone() -> bool:
    """Whether this is the only process: gradients of several may be averages, which the pass of one does not give."""
    return not several_processes()


def is_fully_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 gathers parameters for the pass, so that gradients arrive in `.grad` and nowhere else."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def _own_hooks(parameter: Tensor) -> bool:
    """Return whether a program does something with gradients as they arrive, such as stepping an optimizer."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(not isinstance(hook, Hook) for hook in hooks.values())


@contextmanager
def _gradients_aside(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Clear the gradients of parameters within the block, and put them back at its end."""
    saved = [(parameter, parameter.grad) for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in saved:
            parameter.grad = gradient


def _keep(call: _Call, position: int) -> Callable[[Tensor], None]:
    def keep(gradient: Tensor | None) -> None:
        # Compiled backward passes call hooks of outputs that nothing depends on with None.
        if gradient is None:
            return
        known = call.cotangents.get(position)
        call.cotangents[position] = gradient.detach() if known is None else known + gradient.detach()

    return keep


def _tensors(output: Any) -> list[Tensor]:
    """Return the floating-point tensors a model returned, each once, in order."""
    leaves = tree_flatten(dict(output) if hasattr(output, "keys") else output)[0]
    by_id = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()}
    return [*by_id.values()]


def _versions(args: Any, kwargs: Any) -> list[int]:
    leaves = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    return [version_of(leaf) for leaf in leaves]


def _sequence(tensor: Tensor) -> int:
    """Return the position at which autograd recorded a tensor; later outputs may depend on earlier ones."""
    node: Any = tensor.grad_fn
    return -1 if node is None else int(node._sequence_nr())
