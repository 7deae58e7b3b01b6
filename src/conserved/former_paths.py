"""Paths that modules are found under beside their own: short ones that stay, and those of the first release, which go
with the next one. Under either it is the same module, not a copy."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

STANDING = {
    "conserved.blocks": "conserved.papers.blocks",
    "conserved.claims": "conserved.papers.claims",
    "conserved.lab": "conserved.papers.lab",
}
"""Short paths that stay, for these packages and everything in them."""

MOVED = {
    "conserved.kind": "conserved.symmetry",
    "conserved.kind.complex_scaling": "conserved.symmetry.kinds.complex_scaling",
    "conserved.kind.general_linear": "conserved.symmetry.kinds.general_linear",
    "conserved.kind.one_scale": "conserved.symmetry.kinds.one_scale",
    "conserved.kind.scaling": "conserved.symmetry.kinds.scaling",
    "conserved.kind.translation": "conserved.symmetry.kinds.translation",
    "conserved.recognize": "conserved.inference.retired",
    "conserved.view": "conserved.symmetry.view",
    "conserved.batch": "conserved.moment",
    "conserved.audit": "conserved.auditing",
    "conserved.track.sinks": "conserved.store",
    "conserved.track": "conserved.tracking",
    "conserved.certify": "conserved.certificates",
    "conserved.discover": "conserved.discovery",
    "conserved.impostors": "conserved.laws",
    "conserved.attention.alarm": "conserved.attention.departures",
    "conserved.attention.capture": "conserved.attention.queries_and_keys",
    "conserved.attention.low_rank": "conserved.attention.low_rank_heads",
    "conserved.attention.natural": "conserved.attention.natural_attention",
    "conserved.attention.probe": "conserved.attention.probing",
    "conserved.audit.agreement": "conserved.auditing.replica_agreement",
    "conserved.audit.auditing": "conserved.auditing.model_audit",
    "conserved.audit.every": "conserved.auditing.audit_hook",
    "conserved.audit.gauging": "conserved.auditing.softmax_gauge",
    "conserved.audit.keys": "conserved.auditing.attention_keys",
    "conserved.audit.landed": "conserved.auditing.landed_updates",
    "conserved.audit.report": "conserved.auditing.audit_result",
    "conserved.audit.trial": "conserved.auditing.random_trial",
    "conserved.backward": "conserved.laws.verification",
    "conserved.balance": "conserved.laws.identities",
    "conserved.certify.stops": "conserved.certificates.stopped_gradients",
    "conserved.certify.words": "conserved.certificates.chosen_brackets",
    "conserved.claims.claim": "conserved.papers.claims.claim_record",
    "conserved.claims.ledger": "conserved.papers.claims.registry",
    "conserved.claims.words": "conserved.papers.claims.matrix_words",
    "conserved.configured": "conserved.integrations.configured_models",
    "conserved.grain": "conserved.laws.identities",
    "conserved.html": "conserved.output.html",
    "conserved.independence": "conserved.laws.independence",
    "conserved.judging": "conserved.laws.identities",
    "conserved.table": "conserved.laws.law_table",
    "conserved.track.alarms": "conserved.tracking.alarm_rules",
    "conserved.track.expansion": "conserved.tracking.step_expansion",
    "conserved.track.record": "conserved.store.step_record",
    "conserved.track.rules": "conserved.tracking.optimizer_rules",
    "conserved.track.selection": "conserved.tracking.watched_laws",
    "conserved.track.shelf_account": "conserved.tracking.kept_account",
    "conserved.track.sinks.digest": "conserved.store.run_digest",
    "conserved.track.sinks.jsonl": "conserved.store.json_lines",
    "conserved.track.sinks.live": "conserved.store.live_table",
    "conserved.track.sinks.sqlite": "conserved.store.run_store",
    "conserved.track.transfer": "conserved.tracking.device_transfer",
    "conserved.track.watch": "conserved.tracking.optimizer_watch",
}
"""Where modules of the first release are now, and everything in them that is not listed itself."""


def present(path: str) -> str | None:
    """The path of a module now, if `path` is another one for it."""
    beginning, rest = path, ""
    while beginning.startswith("conserved."):
        now = MOVED.get(beginning) or STANDING.get(beginning)
        if now is not None:
            return now + rest
        beginning, _, last = beginning.rpartition(".")
        rest = f".{last}{rest}"
    return None


class _OtherPaths:
    """Finds a module under another path than its own. (The base classes in importlib.abc take longer than all else.)"""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Only for paths that lead elsewhere, where there is something."""
        now = present(fullname)
        own = None if now is None else importlib.util.find_spec(now)
        if own is None:
            return None
        itself: Any = self
        spec = ModuleSpec(fullname, itself, origin=own.origin, is_package=own.submodule_search_locations is not None)
        spec.submodule_search_locations = own.submodule_search_locations
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself, with a warning if the path is on its way out."""
        now = _now(spec.name)
        if not any(spec.name == path or spec.name.startswith(f"{path}.") for path in STANDING) or spec.name in MOVED:
            message = f"{spec.name} goes with the next release: import from {now}."
            warnings.warn(message, DeprecationWarning, stacklevel=2)
        parent = sys.modules[spec.name.rpartition(".")[0]]
        if type(parent) is ModuleType:
            parent.__class__ = Package
        module = importlib.import_module(now)
        # The import system is about to write `spec` into it.
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run already; it is given back its own specification."""
        other: Any = module.__spec__
        if other is not None and other.loader is self:
            module.__spec__ = other.loader_state

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python -m`."""
        own = importlib.util.find_spec(_now(fullname))
        loader: Any = None if own is None else own.loader
        return loader.get_code(_now(fullname)) if hasattr(loader, "get_code") else None

    def get_source(self, fullname: str) -> str | None:
        """For tracebacks of what `python -m` runs."""
        own = importlib.util.find_spec(_now(fullname))
        loader: Any = None if own is None else own.loader
        return loader.get_source(_now(fullname)) if hasattr(loader, "get_source") else None

    def is_package(self, fullname: str) -> bool:
        """Whether there are modules in it."""
        own = importlib.util.find_spec(_now(fullname))
        return own is not None and own.submodule_search_locations is not None


def _now(path: str) -> str:
    found = present(path)
    assert found is not None
    return found


_FORMER = {(present(path.rpartition(".")[0]) or path.rpartition(".")[0], path.rpartition(".")[2]) for path in MOVED}
"""Packages by the names they have now, and modules that were in them."""


class Package(ModuleType):
    """Some paths of the first release have the name of a function of their package (audit, certify, discover,
    attention.probe). The import system puts what it imports under such a path into the package, where the function is.
    """

    def __setattr__(self, name: str, value: object) -> None:
        former = isinstance(value, ModuleType) and (self.__name__, name) in _FORMER
        known = name in vars(self).get("_HOMES", ()) or not isinstance(vars(self).get(name, value), ModuleType)
        if not (former and known):
            super().__setattr__(name, value)


def install(package: str) -> None:
    """Let the other paths be imported.

    This finder comes first: one before it that looks for files would find those of the package a path leads to, and
    load them a second time. An import hook that is to change modules of this package is installed before the package
    is imported.
    """
    if not any(isinstance(finder, _OtherPaths) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OtherPaths())
    sys.modules[package].__class__ = Package
