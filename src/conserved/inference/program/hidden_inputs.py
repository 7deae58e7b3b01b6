"""Inputs and outputs of a program besides its tensors: the clock, files, chance, and state that calls leave behind.

No operation on tensors shows these, and a second call with the same inputs may compute the same by luck. So two things
are observed while the program runs. A profiler sees every call of a function written in C, such as those that read the
time, random bytes, files or the environment. And state that outlives the call is compared before and after: attributes
of modules, globals that running code names, closures, default arguments, iterators, caches.

Not seen: functions of C extensions that ask for such things themselves, values of `id` and `hash`, whether a weak
reference is alive, the number of threads or devices, and settings that the program only reads.
"""

from __future__ import annotations

import collections
import contextvars
import enum
import gc
import itertools
import random
import sys
import sysconfig
import types
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from conserved.laws.shared_memory import tensors_of

_ASKS = {
    "time": "the clock",
    "posix": "the operating system",
    "nt": "the operating system",
    "_io": "a file",
    "io": "a file",
    "_socket": "the network",
    "select": "the network",
    "_random": "random numbers of Python",
    "gc": "the garbage collector",
    "resource": "the operating system",
    "_sqlite3": "a database",
    "sqlite3": "a database",
    "_dbm": "a database",
    "_gdbm": "a database",
    "_uuid": "the operating system",
    "pwd": "the operating system",
    "_posixsubprocess": "another process",
    "_multiprocessing": "another process",
}
"""Modules of C functions that ask for something outside of the program, and for what."""

_DOES_NOT_ASK = {"fspath", "sleep", "_path_normpath", "_path_splitroot", "mktime", "collect", "StringIO", "BytesIO"}
"""Functions of these modules that answer the same to the same arguments."""

_METHODS: dict[Any, tuple[frozenset[str] | None, str]] = {
    "datetime": (frozenset({"now", "today", "utcnow"}), "the clock"),
    "date": (frozenset({"today"}), "the clock"),
    "Random": (None, "random numbers of Python"),
    "Connection": (None, "a database"),
    "Cursor": (None, "a database"),
}
"""Methods of classes of the standard library written in C that ask, by the name of the class; None for all."""

_FUNCTIONS = {
    ("os", "_Environ.__getitem__"): "the environment",
    ("os", "_Environ.__iter__"): "the environment",
    ("os", "_Environ.__len__"): "the environment",
    ("os", "_Environ.__setitem__"): "the environment",
    ("threading", "active_count"): "the number of threads",
    ("threading", "enumerate"): "the number of threads",
    ("torch.random", "initial_seed"): "the seed of random numbers",
    ("torch.random", "seed"): "the seed of random numbers",
}
"""Python functions that ask without a function in C, by module and name."""

_STANDARD = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_THIRD_PARTY = ("site-packages", "dist-packages")

_NOT_THE_PROGRAMS = (
    "/torch/",
    "/conserved/inference/",
    "/conserved/discovery/",
    "/conserved/certificates/",
    "/conserved/_torch_compat.py",
    "/numpy/",
    "/jaxtyping/",
    "/beartype/",
    "<@beartype",
    "/typeguard/",
    "/_pytest/",
)
"""Parts of the paths of code whose own reads are not the program's."""

_ASIDE = ("importlib", "linecache", "warnings", "logging", "traceback", "inspect", "tokenize", "typing", "unittest")
"""Modules of the standard library that read files or the clock for reasons of their own: importing, reporting."""

MOST_OBJECTS = 100_000
"""Objects beyond which the rest of what outlives a call is not compared."""

MOST_ITEMS = 1000
"""Items of one container that are compared; of longer ones the length and the last items are."""

_PLAIN = (int, float, complex, str, bytes, type(None), type(...), range, slice)
_REDUCED = ("builtins", "itertools", "collections", "random", "_random", "array", "datetime", "decimal", "fractions")
"""Modules of classes written in C whose state `__reduce_ex__` tells without changing it: iterators, generators."""


class _Kind(enum.Enum):
    """The owner of a function's code."""

    PROGRAM = enum.auto()
    STANDARD = enum.auto()
    ASIDE = enum.auto()
    OTHER = enum.auto()


def _kind(path: str, module: str) -> _Kind:
    own = module.startswith("conserved.") and not module.startswith("conserved.blocks")
    # What has no module was written by a decorator, such as one that checks types.
    if own or not module or any(part in path for part in _NOT_THE_PROGRAMS):
        return _Kind.OTHER
    if path.startswith("<frozen") or (path.startswith(_STANDARD) and not any(part in path for part in _THIRD_PARTY)):
        return _Kind.ASIDE if module.partition(".")[0].lstrip("_").startswith(_ASIDE) else _Kind.STANDARD
    return _Kind.PROGRAM


def _resume(profiler: Any) -> None:
    """Install a former profiler again. One written in C, as cProfile's, is an object that is enabled, not called."""
    if profiler is None or callable(profiler):
        sys.setprofile(profiler)
        return
    sys.setprofile(None)
    enable = getattr(profiler, "enable", None)
    if callable(enable):
        enable()


def tensors_held(model: nn.Module) -> dict[str, Tensor]:
    """Return every tensor that a model's modules hold on to, once; also those in lists and arrays of NumPy."""
    result = tensors_of(model)
    known = {id(tensor) for tensor in result.values()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            state = _State()
            state.of(value if name not in _OF_TORCH else None)
            others = [tensor for tensor in state.tensors if id(tensor) not in known]
            known.update(map(id, others))
            result |= {f"{path}.{name}[{index}]".lstrip("."): tensor for index, tensor in enumerate(others)}
    return result


class HiddenInputs:
    """Notes within a block what the program reads from outside, and which state of Python's it changes.

    `names` says what, after the block.
    """

    def __init__(self, run: Callable[..., Any], model: Any = None) -> None:
        """Prepare to watch.

        Args:
            run: the function that will be called; what it holds on to is compared.
            model: the module it calls, if it does.
        """
        self.names: list[str] = []
        self._roots: dict[str, Callable[[], Any]] = {"what the function holds on to": lambda: _held_by(run)}
        self._model = model
        self._asked: dict[str, str] = {}
        self._codes: dict[int, tuple[types.CodeType, _Kind, str | None]] = {}
        """Code that was called, its owner and what it asks for, by its identity: hashing code takes its whole text."""
        self._before: dict[str, Any] = {}
        self._former: Any = None
        numpy: Any = sys.modules.get("numpy.random")
        if numpy is not None:
            self._roots["random numbers of NumPy"] = lambda: numpy.mtrand._rand

    def __enter__(self) -> HiddenInputs:
        self._before = self._states(self._roots) | self._of_model()
        self._former = sys.getprofile()
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: Any) -> None:
        _resume(self._former)
        after = self._states(self._roots) | self._of_model()
        changed = [name for name, state in self._before.items() if after.get(name, _GONE) != state]
        changed += [name for name in after if name not in self._before]
        self.names = [f"{what}, in {where}" for what, where in self._asked.items()]
        self.names += [f"{name}, which a call changes" for name in changed]

    def _states(self, roots: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        return {name: _State().of(root()) for name, root in roots.items()}

    def _of_model(self) -> dict[str, Any]:
        """Return the state of every attribute of every module, by its path."""
        if not isinstance(self._model, nn.Module):
            return {}
        state = _State()
        result: dict[str, Any] = {}
        classes: dict[type, None] = {}
        for path, module in self._model.named_modules():
            classes.update(dict.fromkeys(type(module).__mro__))
            for name, value in vars(module).items():
                if name not in _OF_TORCH or value:
                    result[f"{path}.{name}".lstrip(".")] = state.of(value)
        for owner in classes:
            result[owner.__name__] = state.of(owner)
        return result

    def _look(self, frame: Any, event: str, called: Any) -> None:
        if event not in ("call", "c_call"):
            return
        known = self._codes.get(id(frame.f_code)) or self._meet(frame)
        if known is None:
            return
        _, kind, what = known
        if event == "call":
            if what is not None:
                self._note(what, frame.f_back)
        elif (kind is _Kind.PROGRAM or kind is _Kind.STANDARD) and (what := _asks(called)) is not None:
            self._note(what, frame)

    def _meet(self, frame: Any) -> tuple[types.CodeType, _Kind, str | None] | None:
        """Keep the owner of code that is called for the first time, and what it reads by name if that is the program.

        The code is kept as well, so that no other takes its identity. Return None for code of modules that are imported
        meanwhile: PyTorch imports whole packages once it needs them, and what those run is not the program's.
        """
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        kind = _kind(code.co_filename, module)
        if kind is _Kind.PROGRAM and _is_importing(frame):
            return None
        self._codes[id(code)] = code, kind, _FUNCTIONS.get((module, code.co_qualname))
        if kind is _Kind.PROGRAM:
            self._name_globals(code, frame.f_globals)
        return self._codes[id(code)]

    def _note(self, what: str, frame: Any) -> None:
        """Note that something was asked for, if the program's own code asked."""
        while frame is not None:
            code = frame.f_code
            known = self._codes.get(id(code))
            kind = known[1] if known else _kind(code.co_filename, frame.f_globals.get("__name__", ""))
            if kind is _Kind.PROGRAM:
                where = f"{code.co_name} ({code.co_filename.rpartition('/')[2]}:{frame.f_lineno})"
                self._asked.setdefault(what, where)
            if kind is not _Kind.STANDARD:
                return
            frame = frame.f_back

    def _name_globals(self, code: types.CodeType, namespace: dict[str, Any]) -> None:
        """Keep the state of what code reads by name before it runs for the first time."""
        former = sys.getprofile()
        sys.setprofile(None)
        try:
            for name in _names(code):
                if name not in namespace:
                    continue
                value = namespace[name]
                label = f"{name} in {code.co_filename.rpartition('/')[2]}"
                if label not in self._before:
                    self._roots[label] = _reader(namespace, name)
                    self._before[label] = _State().of(value)
                if isinstance(value, types.ModuleType):
                    for attribute in (*code.co_names, *filter(_is_name, code.co_consts)):
                        read = self._roots.setdefault(f"{name}.{attribute}", _reader(vars(value), attribute))
                        self._before.setdefault(f"{name}.{attribute}", _State().of(read()))
        finally:
            _resume(former)


def _is_importing(frame: Any) -> bool:
    """Return whether code runs because a module is being imported, by an import inside the program's call."""
    while frame is not None and "/conserved/inference/" not in frame.f_code.co_filename:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _held_by(run: Callable[..., Any]) -> list[Any]:
    """Return what a function holds on to, also where the function itself is this package's."""
    if isinstance(run, partial):
        return [run.func, run.args, run.keywords]
    return [cell.cell_contents for cell in getattr(run, "__closure__", None) or ()]


def _is_own(value: Any) -> bool:
    """Return whether an object is this package's: what a monitor keeps on a model is none of the program's state."""
    module = getattr(value if isinstance(value, types.FunctionType) else type(value), "__module__", None)
    return str(module).partition(".")[0] == "conserved" and not isinstance(value, nn.Module)


_GONE = object()
_OF_TORCH = frozenset(vars(nn.Module()))


def _is_name(constant: Any) -> bool:
    return isinstance(constant, str) and constant.isidentifier()


def _reader(namespace: Mapping[str, Any], name: str) -> Callable[[], Any]:
    return lambda: namespace.get(name, _GONE)


def _names(code: types.CodeType) -> list[str]:
    """Return the names that code and the functions written inside it read."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return [*code.co_names, *itertools.chain.from_iterable(map(_names, inner))]


def _asks(called: Any) -> str | None:
    """Return what a function written in C asks for; None if it asks for nothing outside."""
    name = getattr(called, "__name__", "")
    if name in _DOES_NOT_ASK:
        return None
    owner = getattr(called, "__self__", None)
    if owner is None or isinstance(owner, types.ModuleType):
        return _ASKS.get(str(getattr(called, "__module__", None) or getattr(owner, "__name__", "")))
    class_ = owner if isinstance(owner, type) else type(owner)
    for base in class_.__mro__:
        if base.__module__ in ("datetime", "random", "sqlite3", "_random") and base.__name__ in _METHODS:
            names, what = _METHODS[base.__name__]
            return what if names is None or name in names else None
    if class_.__module__ in ("_io", "io") and name.startswith(("read", "__next__")):
        return None if class_.__name__ in _DOES_NOT_ASK else "a file"
    return None


class _State:
    """The state of objects as plain values that can be compared, each object once."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._keep: list[Any] = []
        self.tensors: list[Tensor] = []
        """Tensors and arrays of NumPy that were met."""

    def of(self, value: Any) -> Any:
        """Return what of an object and what it holds may be distinguished; tensors are values of the program."""
        if isinstance(value, enum.Enum):
            return (type(value).__name__, value.name)
        if isinstance(value, _PLAIN):
            return value if value == value else "nan"
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return (id(value), value.requires_grad) if isinstance(value, nn.Parameter) else "tensor"
        if _is_own(value):
            return type(value).__name__
        number = self._seen.get(id(value))
        if number is not None:
            return ("again", number)
        if len(self._seen) > MOST_OBJECTS:
            return "not compared"
        self._seen[id(value)] = len(self._seen)
        self._keep.append(value)
        return self._inside(value)

    def _inside(self, value: Any) -> Any:
        name = type(value).__name__
        if isinstance(value, np.ndarray):
            with suppress(TypeError, ValueError):
                # Torch has no tensors of text, and none with negative strides.
                self.tensors.append(torch.as_tensor(value))
            return (name, value.shape, value.tobytes() if value.nbytes <= MOST_OBJECTS else None)
        if isinstance(value, (list, tuple, collections.deque)):
            items = value if len(value) <= MOST_ITEMS else list(itertools.islice(reversed(value), MOST_ITEMS))
            return (name, len(value), tuple(self.of(item) for item in items), self._attributes(value))
        if isinstance(value, (set, frozenset)):
            return (name, len(value), frozenset(item for item in value if isinstance(item, _PLAIN)))
        if isinstance(value, Mapping):
            pairs = itertools.islice(dict.items(value) if isinstance(value, dict) else (), MOST_ITEMS)
            return (name, len(value), tuple((self.of(k), self.of(v)) for k, v in pairs), self._attributes(value))
        if isinstance(value, types.FunctionType):
            return self._of_function(value)
        if isinstance(value, type):
            return self._of_class(value)
        if isinstance(value, types.ModuleType | types.CodeType | types.FrameType | torch.dtype | torch.device):
            return id(value)
        if isinstance(value, types.GeneratorType):
            frame = value.gi_frame
            inner = self.of(value.gi_yieldfrom)
            return None if frame is None else (frame.f_lasti, self.of(dict(frame.f_locals)), inner)
        if isinstance(value, contextvars.ContextVar):
            return self.of(value.get(None))
        return (id(type(value)), self._of_other(value))

    def _of_function(self, value: types.FunctionType) -> Any:
        if _kind(value.__code__.co_filename, value.__module__ or "") is not _Kind.PROGRAM:
            return (id(value.__code__), self._cells(value)) if value.__closure__ else id(value.__code__)
        parts = (value.__defaults__, value.__kwdefaults__, value.__dict__)
        return (id(value.__code__), self._cells(value), *(self.of(part) for part in parts if part))

    def _cells(self, value: types.FunctionType) -> tuple[Any, ...]:
        result = []
        for cell in value.__closure__ or ():
            with suppress(ValueError):
                # An empty cell raises.
                result.append(self.of(cell.cell_contents))
        return tuple(result)

    def _of_class(self, value: type) -> Any:
        own = vars(sys.modules.get(value.__module__, types)).get("__file__") or ""
        if value.__module__ == "builtins" or _kind(own or "<frozen", value.__module__) is not _Kind.PROGRAM:
            return id(value)
        return (id(value), tuple((k, self.of(v)) for k, v in vars(value).items() if not k.startswith("__")))

    def _of_other(self, value: Any) -> Any:
        owner = type(value)
        if owner.__module__.partition(".")[0] in (*_REDUCED, "numpy") and not hasattr(value, "__dict__"):
            with suppress(Exception), warnings.catch_warnings():
                # Any class may refuse; itertools warns that later versions will.
                warnings.simplefilter("ignore")
                return self.of(value.__reduce_ex__(4)[1:])
        if isinstance(value, random.Random):
            # Numbers of the operating system have no state; asking for one is seen as a call.
            return "SystemRandom" if isinstance(value, random.SystemRandom) else value.getstate()
        if hasattr(value, "getvalue"):
            with suppress(Exception):
                # A stream that is closed, or another's function of that name.
                return (value.getvalue(), value.tell())
        if owner.__module__ in ("_ctypes", "ctypes", "array", "builtins", "mmap"):
            with suppress(TypeError, ValueError, BufferError):
                return bytes(memoryview(value))
        attributes = self._attributes(value)
        if (attributes is None or owner.__module__ == "functools") and gc.is_tracked(value):
            referents = (item for item in gc.get_referents(value) if not isinstance(item, type | types.ModuleType))
            return tuple(self.of(item) for item in itertools.islice(referents, MOST_ITEMS))
        return attributes

    def _attributes(self, value: Any) -> Any:
        """Return the state of an object's attributes, in its dictionary and its slots; None if it has none."""
        try:
            own: dict[str, Any] = dict(object.__getattribute__(value, "__dict__"))
        except (AttributeError, TypeError):
            own = {}
        for base in type(value).__mro__:
            for name in getattr(base, "__slots__", ()):
                with suppress(Exception):
                    # A slot may be empty, or its name another's descriptor.
                    own[name] = object.__getattribute__(value, name)
        return tuple((name, self.of(item)) for name, item in own.items()) if own else None
