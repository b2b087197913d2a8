"""``kda_core._torch_private``: the installed versions have every interface, and each has something in its place."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad, profiler

import kda_core
from kda_core import _ops, _torch_private

CORE = Path(kda_core.__file__).parent


@pytest.fixture
def loaded_anew():
    """Load the module again, as an installed torch of now makes it."""

    def load():
        spec = importlib.util.spec_from_file_location("torch_private_anew", _torch_private.__file__)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def test_the_installed_versions_have_every_interface():
    assert _torch_private.tensor_guards() is not None
    assert _torch_private.environment("PATH")[1] in _torch_private.environment("PATH")[0]
    assert _torch_private.empty_strided_on("cuda")
    assert _torch_private.MISSING == []


def test_what_is_no_public_interface_stands_in_one_file():
    private = re.compile(
        r"torch\._[a-zC]|\b_functorch\b|_current_level|_dynamo|environ\._|_is_profiler_enabled|_subclasses"
    )
    allowed = {"_torch_private.py": None, "_loaded.py": {"_is_profiler_enabled"}}
    for path in CORE.glob("*.py"):
        found = set(private.findall(path.read_text(encoding="utf-8")))
        known = allowed.get(path.name, set())
        assert known is None or found <= known, f"{path.name}: {found}"


def test_modes_are_seen():
    assert not _torch_private.needs_operator()
    with _torch_private.fake_tensors():
        assert _torch_private.needs_operator()
    seen = []
    torch.func.vmap(lambda x: seen.append(_torch_private.needs_operator()) or x)(torch.ones(2))
    torch.jit.trace(lambda x: seen.append(_torch_private.needs_operator()) or x + 1, torch.ones(2), check_trace=False)
    assert seen == [True, True]
    assert not _torch_private.needs_operator()


def test_forward_mode_is_seen():
    assert not _torch_private.in_forward_mode()
    with forward_ad.dual_level():
        assert _torch_private.in_forward_mode()


def test_wrapped_tensors_are_seen():
    plain = torch.ones(2)
    assert not any(
        f(plain) for f in (_torch_private.is_wrapped, _torch_private.is_batched, _torch_private.is_legacy_batched)
    )
    seen = []

    def look(x):
        flags = _torch_private.is_wrapped(x), _torch_private.is_batched(x), _torch_private.is_tracking_gradient(x)
        seen.append((*flags, _torch_private.unwrapped(x).shape))
        return x.sum()

    torch.func.vmap(look)(torch.ones(3, 2))
    torch.func.grad(look)(plain)
    assert seen == [(True, True, False, (3, 2)), (True, False, True, (2,))]


def test_transforms_ask_for_kernels_of_their_own():
    for schema in ("chunk_kda", "chunk_kda_", "chunk_kda_backward", "kda_gate"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(
            f"{_ops.NAMESPACE}::{schema}", _torch_private.TRANSFORMS_KEY
        )


def test_functionalize_is_told_from_other_transforms():
    seen = []

    def look(x):
        done, result = _torch_private.in_functionalize(torch.neg, (x,))
        seen.append(done)
        return result if done else -x

    assert torch.equal(torch.func.functionalize(look)(torch.ones(2)), -torch.ones(2))
    torch.func.grad(lambda x: look(x).sum())(torch.ones(2))
    assert seen == [True, False]


def test_no_transform_is_seen_outside_of_transforms():
    def look(x):
        with _torch_private.outside_of_transforms():
            assert not _torch_private.needs_operator()
        assert _torch_private.needs_operator()
        return x.sum()

    torch.func.grad(look)(torch.ones(2))


def test_the_mark_of_a_constant_is_that_of_the_compiler():
    ours, theirs = _torch_private.constant_in_graphs(lambda: 1), torch.compiler.assume_constant_result(lambda: 1)
    assert vars(ours) == vars(theirs) != {}


def test_a_running_profiler_is_seen():
    assert not _torch_private.profiling._is_profiler_enabled
    with profiler.profile(use_kineto=False):
        assert _torch_private.profiling._is_profiler_enabled
    assert not _torch_private.profiling._is_profiler_enabled


def test_the_environment_is_read_as_it_changes(monkeypatch):
    mapping, key = _torch_private.environment("KDA_A_VARIABLE")
    assert key not in mapping
    monkeypatch.setenv("KDA_A_VARIABLE", "x")
    assert key in mapping


FUNCTORCH, NONE = torch._C._functorch, torch.ones(2)


@pytest.mark.parametrize(
    ("owner", "name", "instead"),
    [
        (FUNCTORCH, "maybe_current_level", lambda module: module.needs_operator() is True),
        (torch._C, "_get_tracing_state", lambda module: module.needs_operator() is True),
        *(
            (torch.nn.modules.module, f"_global_{when}_hooks", lambda module: module.has_global_hooks() is True)
            for when in ("forward_pre", "forward", "backward_pre", "backward")
        ),
        (torch.utils._python_dispatch, "is_in_torch_dispatch_mode", lambda module: module.needs_operator() is True),
        (forward_ad, "_current_level", lambda module: module.in_forward_mode() is True),
        (profiler, "_is_profiler_enabled", lambda module: module.profiling._is_profiler_enabled is False),
        (FUNCTORCH, "is_batchedtensor", lambda module: module.is_batched(NONE) is False),
        (FUNCTORCH, "is_legacy_batchedtensor", lambda module: module.is_legacy_batched(NONE) is False),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_missing_interface_has_something_in_its_place(monkeypatch, loaded_anew, owner, name, instead):
    monkeypatch.delattr(owner, name)
    module = loaded_anew()
    assert [entry.rpartition(".")[2] for entry in module.MISSING] == [name]
    assert instead(module)


@pytest.mark.parametrize("name", ["is_functorch_wrapped_tensor", "is_gradtrackingtensor", "get_unwrapped"])
def test_transforms_are_refused_where_torch_lacks_their_interface(monkeypatch, loaded_anew, name):
    monkeypatch.delattr(FUNCTORCH, name)
    module = loaded_anew()
    functions = {
        "is_functorch_wrapped_tensor": module.is_wrapped,
        "is_gradtrackingtensor": module.is_tracking_gradient,
        "get_unwrapped": module.unwrapped,
    }
    with pytest.raises(RuntimeError, match=r"lacks what kda_core needs for torch\.func"):
        functions[name](torch.ones(2))


def test_tensor_guards_that_answer_wrongly_are_not_used(monkeypatch, loaded_anew):
    from torch._C._dynamo import guards

    class Wrong:
        def __init__(self, *args, **kwargs):
            pass

        def check(self, *tensors):
            return True

    monkeypatch.setattr(guards, "TensorGuards", Wrong)
    module = loaded_anew()
    assert module.tensor_guards() is None
    assert module.MISSING == ["_C._dynamo.guards.TensorGuards"]


@pytest.mark.parametrize("missing", [False, True])
def test_memory_is_allocated_with_or_without_the_private_function(monkeypatch, loaded_anew, missing: bool):
    if missing:
        monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cpu")
    module = loaded_anew()
    with torch.inference_mode():
        x = module.empty_strided_on("cpu")((2, 3), (1, 2), torch.float64)
    assert (x.shape, x.stride(), x.dtype, x.device.type) == ((2, 3), (1, 2), torch.float64, "cpu")
    assert x.is_inference()
    assert module.MISSING == (["_dynamo.guards._empty_strided_cpu"] if missing else [])


def test_the_environment_is_read_without_its_private_parts(monkeypatch, loaded_anew):
    module = loaded_anew()
    monkeypatch.setattr(module.os, "environ", dict(os.environ, KDA_A_VARIABLE="y"))
    mapping, key = module.environment("KDA_A_VARIABLE")
    assert mapping[key] == "y"
    assert module.MISSING == ["os.environ._data"]


def test_an_unknown_dispatch_key_is_left_out(loaded_anew):
    class Library(torch.library.Library):
        """One of a torch that has another name for the key."""

        def impl(self, name, kernel, key):
            super().impl(name, kernel, f"No{key}")

    module, library = loaded_anew(), Library("kda_core_test", "DEF")
    library.define("f(Tensor x) -> Tensor")
    module.implement_under_transforms(library, "f", torch.neg)
    assert module.MISSING == [module.TRANSFORMS_KEY]
