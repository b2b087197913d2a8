"""Load backend wheels, keep the ledger, choose a backend for a call and explain the choice.

Entry points of the group ``kda_core.backends.v1`` are loaded one by one at the first call that needs a
backend. A wheel that fails to import, has another contract, lacks hooks or claims a taken name goes
into the ledger with its reason; it never takes the others down and raises only when it is named.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import pluggy
import torch

from kda_core import _checks, _torch_private, hookspecs, platforms
from kda_core._autograd import Repeated
from kda_core._contract import found_entry_points, judge, mismatch
from kda_core._ledger import Explanation, LedgerEntry, State, Status, Verdict, said_by
from kda_core._loaded import Backend
from kda_core._signature import Same, signature
from kda_core._version import __version__
from kda_core.call_plan import CallPlan
from kda_core.capabilities import Unavailable
from kda_core.errors import BackendNotFound, BrokenBackend, ContractViolation, UnsupportedCall
from kda_core.reference import ReferenceBackend
from kda_core.request import AnyRequest

ENVIRONMENT_VARIABLE = "KDA_BACKEND"


class Registry:
    """The backends of this process.

    Args:
        entry_points: of the wheels to load; None: all that are installed.
        core: the version that wheels must fit.
    """

    def __init__(
        self, *, entry_points: Sequence[EntryPoint] | None = None, core: str = __version__, most_choices: int = 4096
    ) -> None:
        self._entry_points, self._core = entry_points, core
        # Packed training batches have many lengths, each with its own signature. The cache is cleared at this size.
        self._most_choices = most_choices
        self._lock = threading.RLock()
        self._loaded = False
        self._loading = False
        self.manager = pluggy.PluginManager(hookspecs.PROJECT)
        self.manager.add_hookspecs(hookspecs)
        self._backends: dict[str, Backend] = {}
        self._ledger: list[LedgerEntry] = []
        # By signature, the backend (or why none serves the call) and the calls' memo.
        self._choices: dict[tuple, tuple[Backend | str, dict]] = {}
        # By public function, its last calls that may be repeated.
        self.repeated: dict[str, tuple[Repeated, ...]] = {}
        # By ``_question``, a match with the last question, and the answer of ``supports``.
        self._asked: dict[tuple, tuple[Same, tuple[bool, str]]] = {}

    def load(self) -> None:
        """Load the oracle and every installed wheel, once."""
        if self._loaded:
            return
        with self._lock:
            if self._loaded:
                return
            if self._loading:
                raise ContractViolation("kda_core was asked for backends by one that is being loaded")
            before = dict(self._backends), list(self._ledger)
            self._loading = True
            try:
                self.register(ReferenceBackend(), entry_point="kda_core.reference:ReferenceBackend")
                for entry_point in found_entry_points(self._entry_points):
                    self._load_entry_point(entry_point)
            except BaseException:  # an interrupt: the next call loads again
                self._go_back(*before)
                raise
            finally:
                self._loading = False
            self._loaded = True

    def _go_back(self, backends: dict[str, Backend], ledger: list[LedgerEntry]) -> None:
        for name, backend in self._backends.items():
            if name not in backends:
                self.manager.unregister(backend.plugin)
        self._backends, self._ledger = backends, ledger
        self._forget_choices()

    def _load_entry_point(self, entry_point: EntryPoint) -> None:
        dist, name = entry_point.dist, entry_point.name
        distribution = f"{dist.name} {dist.version}" if dist else ""
        state: State = "incompatible"
        reason = mismatch(entry_point, self._core)
        try:
            plugin = None if reason else entry_point.load()
        except KeyboardInterrupt:
            raise
        # A wheel may fail to import in any way, and must not take the others down; the ledger keeps its reason.
        except BaseException as error:
            state, reason = "broken", f"import failed: {said_by(error)}"
        if reason is None:
            self.register(plugin, fallback_name=name, distribution=distribution, entry_point=entry_point.value)
        else:
            self._ledger.append(LedgerEntry(name, distribution, entry_point.value, state, reason))

    def register(
        self, plugin: object, *, fallback_name: str = "", distribution: str = "", entry_point: str = ""
    ) -> LedgerEntry:
        """Check a backend plugin against the contract and take it in, or record why not.

        Returns:
            The ledger's entry; look at its ``state``.
        """
        with self._lock:
            own = getattr(plugin, "__name__", type(plugin).__name__)
            name, entry_point = fallback_name or own, entry_point or own

            state, reason, info = judge(self.manager, plugin)
            if info is not None and state == "loaded":
                rivals = (e.state for e in self._ledger if e.info is not None and e.info.name == info.name)
                if not {"loaded", "conflict"}.isdisjoint(rivals):
                    self._withdraw(info.name, distribution)
                    state, reason = "conflict", f"another installed wheel claims the name {info.name!r} too"
                else:
                    self.manager.register(plugin)
                    self._backends[info.name] = Backend(info, plugin, self.manager)
                    self._forget_choices()
            entry = LedgerEntry(info.name if info else name, distribution, entry_point, state, reason, info)
            self._ledger.append(entry)
            return entry

    def unregister(self, name: str) -> None:
        """Take out a backend that was registered by hand."""
        with self._lock:
            backend = self._backends.pop(name)
            self.manager.unregister(backend.plugin)
            self._ledger = [e for e in self._ledger if e.name != name]
            self._forget_choices()

    def add_wrapper(self, plugin: object) -> None:
        """Add a plugin of hook wrappers (``@hookimpl(wrapper=True)``), for tracing; it sees every backend's calls."""
        self.load()
        with self._lock:
            self.manager.register(plugin)
            self._forget_choices()

    def remove_wrapper(self, plugin: object) -> None:
        """Take out a plugin that ``add_wrapper`` added."""
        with self._lock:
            self.manager.unregister(plugin)
            self._forget_choices()

    def _forget_choices(self) -> None:
        self.repeated.clear()
        self._choices.clear()
        self._asked.clear()
        for backend in self._backends.values():
            backend.forget_callers()

    def _withdraw(self, name: str, rival: str) -> None:
        """Remove a backend whose name a second wheel claims: neither serves, so installation order never decides."""
        backend = self._backends.pop(name, None)
        if backend is None:
            return
        self.manager.unregister(backend.plugin)
        self._forget_choices()
        reason = f"another installed wheel ({rival or 'registered by hand'}) claims the name {name!r} too"
        self._ledger = [
            replace(e, state="conflict", reason=reason) if (e.name, e.state) == (name, "loaded") else e
            for e in self._ledger
        ]

    @property
    def backends(self) -> tuple[Backend, ...]:
        """Loaded backends, best priority first; those that serve only when named come last."""
        self.load()
        cards = [(b.info.priority is None, -(b.info.priority or 0), b.info.name) for b in self._backends.values()]
        return tuple(self._backends[name] for *_, name in sorted(cards))

    @property
    def ledger(self) -> tuple[LedgerEntry, ...]:
        """The outcome of loading, for every entry point."""
        self.load()
        return tuple(self._ledger)

    def named(self, name: str) -> Backend:
        """The backend of that name; BrokenBackend or BackendNotFound where there is none."""
        self.load()
        backend = self._backends.get(name)
        if backend is not None:
            return backend
        for e in self._ledger:
            if e.name == name:
                raise BrokenBackend(f"backend {name!r} ({e.distribution or e.entry_point}) is {e.state}: {e.reason}")
        installed = ", ".join(b.info.name for b in self.backends)
        wheels = {b: w for w, b in platforms.BACKEND_OF_WHEEL.items()}
        hint = f"; install it: {platforms.install_command(wheels[name])}" if name in wheels else ""
        raise BackendNotFound(f"backend {name!r} is not installed (installed: {installed}){hint}")

    def plan(self, request: AnyRequest, name: str | None, chip: str | None) -> tuple[CallPlan, ...]:
        """The plan of the chosen or named backend, as of ``explain.plan``; with a ``chip`` it need not run here."""
        if chip is None:
            backend = self.choose(request, name)
        else:
            _checks.convert_scalars(request)
            _checks.check(request)
            if name is None:
                raise ValueError("chip: needs the name of a backend as well")
            backend = self.named(name)
            # Whether the backend can run here does not matter.
            refusal = backend.undeclared(request) or backend.rejection(request)
            if refusal is not None:
                raise UnsupportedCall(f"backend {name!r} refuses this call: {refusal}")
        plans = backend and backend.call("kda_core_plan", request=request, chip=chip)
        if not plans:
            raise UnsupportedCall(f"backend {backend.info.name if backend else 'meta'!r} makes no plans")
        return plans

    def choose(self, request: AnyRequest, name: str | None) -> Any:
        """The backend that serves a call; checks the call's arguments on the way.

        None for tensors on the meta device: fake kernels of the operators serve them, and no backend need be installed.

        Raises:
            ValueError, TypeError: the arguments are wrong.
            UnsupportedCall: no installed backend, or not the named one, can serve the call.
        """
        backend = self._backend_of(request, name)
        if _checks.has_values(request):
            _checks.check_values(request)  # type: ignore[arg-type]
        return backend

    def answered(self, op: str, values: dict[Any, Any], name: str | None) -> tuple[bool, str] | None:
        """The answer of ``supports`` to the arguments of a call, by place or name, if it was asked the same before."""
        try:
            same, answer = self._asked[_question(op, values, name)]
        except (AttributeError, KeyError, RuntimeError, TypeError):  # wrong arguments, or a nested tensor
            return None
        return answer if same(values) is not None else None

    def supports(self, request: AnyRequest, values: dict[Any, Any], name: str | None) -> tuple[bool, str]:
        """Whether ``choose`` finds a backend for the request of ``values``, and why not; keeps the answer.

        The values of index tensors are not read.
        """
        try:
            self._backend_of(request, name)
            answer = True, ""
        except UnsupportedCall as error:
            answer = False, str(error)
        same = Same(values, values)
        if same.can_match:
            self._asked[_question(request.op, values, name)] = same, answer
        return answer

    def _backend_of(self, request: AnyRequest, name: str | None) -> Backend | None:
        key = signature(request, name)
        try:
            found = None if key is None else self._choices.get(key)
        except TypeError:  # an option that has no hash
            key = found = None
        if found is None:
            return self._chosen_anew(request, name, key)
        backend, memo = found
        # A first call pays for nothing more.
        memo.setdefault(Repeated, [])
        if isinstance(backend, str):
            raise UnsupportedCall(backend)
        request.__dict__["memo"] = memo
        return backend

    def _chosen_anew(self, request: AnyRequest, name: str | None, key: tuple | None) -> Backend | None:
        """The backend of a call with a new signature, or without one (``key`` is None)."""
        if _checks.convert_scalars(request) | _checks.resolve_signs(request):
            return self._backend_of(request, name)
        self.load()
        _checks.check(request)
        memo: dict = {}
        try:
            backend = self._choose(request, name)
        except UnsupportedCall as error:
            self._keep(key, str(error), memo)
            raise
        if key is not None and backend is not None:
            self._keep(key, backend, memo)
            request.__dict__["memo"] = memo
        return backend

    def _keep(self, key: tuple | None, choice: Any, memo: dict) -> None:
        """Keep a choice, which is None where torch code of ``kda_core.nn`` serves a call of its functions."""
        if key is None:
            return
        if len(self._choices) >= self._most_choices:
            self._choices.clear()
            self._asked.clear()
        self._choices[key] = choice, memo

    def _choose(self, request: AnyRequest, name: str | None) -> Backend | None:
        verdicts = []
        for verdict, backend in self._verdicts(request, name, self.backends if name is None else (self.named(name),)):
            if verdict.status == "chosen":
                return backend
            if name is not None:
                raise UnsupportedCall(f"{request.op}: backend {name!r} cannot serve this call: {verdict.reason}")
            verdicts.append(verdict)
        raise UnsupportedCall(str(Explanation(request.op, None, tuple(verdicts))))

    def explain(self, request: AnyRequest, name: str | None) -> Explanation:
        """A verdict of every known backend on a checked call; runs nothing."""
        _checks.convert_scalars(request)
        self.load()
        _checks.check(request)
        if _checks.has_values(request):
            _checks.check_values(request)  # type: ignore[arg-type]
        verdicts = tuple(verdict for verdict, _ in self._verdicts(request, name, self.backends))
        chosen = next((v.backend for v in verdicts if v.status == "chosen"), None)
        return Explanation(request.op, chosen, verdicts)

    def _verdicts(
        self, request: AnyRequest, name: str | None, backends: tuple[Backend, ...]
    ) -> Iterator[tuple[Verdict, Backend | None]]:
        """The verdicts of ``backends`` on a checked call, each when its turn comes; then of those that cannot be asked.

        At most one is "chosen": of meta tensors, or of the first that accepts (the one of that name, if one is given).
        """
        chosen = _is_meta(request) and (name is None or self.named(name).undeclared(request) is None)
        if chosen:
            yield Verdict("meta", "chosen", "shapes, dtypes and strides; nothing is computed"), None
        seen = set()
        for backend in backends:
            own = backend.info.name
            asked = not chosen and (own == name if name is not None else backend.info.priority is not None)
            verdict = _verdict(backend, request, name, asked)
            chosen = chosen or verdict.status == "chosen"
            seen.add(own)
            yield verdict, backend
        for entry in self.ledger:
            if entry.state != "loaded":
                seen.add(entry.name)
                yield Verdict(entry.name, "broken", entry.reason), None
        for wheel, own in platforms.BACKEND_OF_WHEEL.items():
            if own not in seen:
                yield Verdict(own, "not installed", platforms.install_command(wheel)), None


def _is_meta(request: AnyRequest) -> bool:
    """Whether the call's tensors have no values; fake tensors that stand for tensors of a device do not count."""
    return request.device.type == "meta"


def _verdict(backend: Backend, request: AnyRequest, name: str | None, asked: bool) -> Verdict:
    """The verdict of a backend, "chosen" where it accepts and it is ``asked`` to serve the call."""
    own = backend.info.name
    if own == name and _is_meta(request):
        undeclared = backend.undeclared(request)
        status: Status = "refused" if undeclared else "accepted"
        return Verdict(own, status, undeclared or "declares what the call needs; nothing runs here")
    available = backend.availability(request.device)
    if isinstance(available, Unavailable):
        return Verdict(own, "unavailable", available.reason)
    try:
        reason = backend.undeclared(request) or backend.rejection(request)
    except ContractViolation as error:
        if asked:  # the call itself fails
            raise
        return Verdict(own, "broken", str(error))
    if reason is not None:
        return Verdict(own, "refused", reason)
    if asked:
        return Verdict(own, "chosen")
    if name is None and backend.info.priority is None:
        return Verdict(own, "accepted", "only when named")
    return Verdict(own, "accepted", f"another backend was named: {name!r}" if name else "lower priority")


def _question(op: str, values: dict[Any, Any], name: str | None) -> tuple:
    """A key that tells questions apart well, and by all that ``Same`` does not see; g is an argument of each."""
    return op, (values[0] if 0 in values else values["g"]).shape, len(values), name, torch.is_grad_enabled()


registry = Registry()
"""The backends of this process, loaded at the first use."""

if hasattr(os, "register_at_fork"):
    # Otherwise a child that is forked while another thread loads backends would wait for ever for the lock.
    os.register_at_fork(
        before=registry._lock.acquire, after_in_parent=registry._lock.release, after_in_child=registry._lock.release
    )

_override: ContextVar[str | None] = ContextVar("kda_core_backend", default=None)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the block, every call without ``backend=`` goes to this backend, and never to another.

    Args:
        name: a backend's name, e.g. "cpu" or "reference".

    Raises:
        BackendNotFound, BrokenBackend: it cannot be used at all.
        TypeError: the name is no string.
    """
    if not isinstance(name, str):
        raise TypeError(f"name: expected the name of a backend, got {type(name).__name__}")
    registry.named(name)
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


def requested_name(backend: str | None) -> str | None:
    """The backend that the caller asked for: argument, else ``use_backend``, else ``KDA_BACKEND``, else None."""
    if backend is not None:
        if not isinstance(backend, str):
            raise TypeError(f"backend: expected the name of a backend or None, got {type(backend).__name__}")
        if not backend:
            raise ValueError("backend: expected the name of a backend or None, got an empty string")
        return backend
    # Two looks into dictionaries, because every call passes by here.
    return _override.get() or (os.environ[ENVIRONMENT_VARIABLE] if _variable in _environment else None) or None


_environment, _variable = _torch_private.environment(ENVIRONMENT_VARIABLE)


TRACED = "@"
"""Stands between a backend's name and the versions in the name that a compiled graph holds."""


@_torch_private.constant_in_graphs
def traced_name(backend: str | None) -> str:
    """The name of a backend as a constant of a compiled graph: with the versions of all that could serve the call.

    After a change of ``use_backend`` or ``KDA_BACKEND``, compile again.

    Compilers cache graphs on disk by their content, which does not include the tensors that a backend saves. Without
    the versions, a graph made with an earlier wheel would be reused.
    """
    versions = [f"{b.info.name} {b.info.version}" for b in registry.backends]
    return f"{requested_name(backend) or ''}{TRACED}{', '.join(versions)}"
