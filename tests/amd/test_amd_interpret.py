"""The AMD backend's kernels in Triton's interpreter, in processes of their own: triton reads its switch once.

The conformance kit tests every promise (``pytest tests/kit/test_kda.py --backend=amd --interpret``). Here is what
depends on the device and the kit cannot ask for: other architectures' configurations, long sequences cut into
segments, where the backend is (not) available. One child for each architecture (this file, run as a script) makes all
calls and prints what went wrong, for importing torch takes longer than a small call.
"""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import replace
from functools import partial

import installed
import interpreted
import pytest
import torch

from kda_core.testing.cases import FP16, FP32, Case

pytestmark = pytest.mark.end_to_end

installed.need_backend("amd")
installed.need_package("triton")


def _other(dtype: torch.dtype) -> Case:
    """Paths that the stand-in does not take: a state in blocks of key channels, levels in a loop, two tiles."""
    return Case(
        name="amd other", T=37, lengths=(35, 2), HV=2, H=1, K=40, V=20, dtype=dtype, state=FP32, gate="softplus",
        l2norm=True, beta="sigmoid", backward=True, options={"state_v_first": True},
    )  # fmt: skip


STAND_IN = "gfx942"
"""The architecture that the kit's interpreted calls take."""

KERNELS = {("gfx1100", "float16"): FP16, ("gfx1100", "float32"): FP32, ("foreign", "float16"): FP16}
"""Calls as they are, by architecture and name."""

# With states in blocks of key channels, that are joined in turn.
_OTHER = Case(name="amd other segments", T=200, H=1, K=72, V=20, dtype=FP16, decay="slow", state=FP32, backward=True)
_STRIDED = ("q", "k", "v", "g", "beta", "initial_state", "grad_o", "grad_final_state")
SEGMENTS = {
    (STAND_IN, "grouped values, odd dimensions"): Case(
        name="amd segments", T=172, HV=2, H=1, K=24, V=40, decay="slow", state=FP32, backward=True
    ),
    # Four segments, two blocks of key channels.
    (STAND_IN, "V first, no decay, everything in kernel"): Case(
        name="amd segments V first", T=200, H=1, K=40, V=16, decay="none", beta="sigmoid", l2norm=True, state=FP32,
        backward=True, options={"state_v_first": True},
    ),
    (STAND_IN, "isolated decays, no states"): Case(
        name="amd segments isolated", T=160, H=1, K=16, decay="isolated", final_state=False, backward=True
    ),
    (STAND_IN, "float16, strided"): Case(
        name="amd segments half", T=200, H=1, K=32, V=16, dtype=FP16, decay="slow", state=FP32, backward=True,
        strided=frozenset(_STRIDED),
    ),
    ("gfx1100", "blocks of key channels"): _OTHER,
    ("foreign", "blocks of key channels"): _OTHER,
}  # fmt: skip
"""Calls of one sequence, to be cut into segments of 64 rows, the last one shorter; by architecture and name."""

APART = {"isolated decays, no states": 1e-5, "float16, strided": 2e-3}
"""Calls that are also made whole, and how far their results may be from those; the rest are held to budgets alone."""


def check_kernels(subject, case: Case) -> None:
    """Within the kit's budgets."""
    subject.check(case.call())


DRAFTS = "drafts longer than their row of the table"


def check_drafts() -> None:
    """A sequence with more tokens than its row has slots: on devices, where nobody looks, no other slot is written."""
    from kda_core._plugins import registry
    from kda_core.request import Request

    T, H, K = 5, 1, 16
    q, k, v, g = torch.randn(4, 1, T, H, K)
    memory = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3], dtype=torch.int32)
    pool = torch.zeros(4, H, K, K)
    request = Request(
        op="fused_recurrent_kda", q=q, k=k, v=v, g=-g.abs(), beta=torch.rand(1, T, H), scale=1.0, initial_state=pool,
        cu_seqlens=torch.tensor([0, 1, 5], dtype=torch.int32), ssm_state_indices=memory[:4].view(2, 2),
        inplace_final_state=True,
    )  # fmt: skip
    registry.named("amd").result("kda_core_recurrent_forward", request)
    assert pool.flatten(1).any(1).tolist() == [True, False, True, True]
    # Only the first token of the first sequence has written there.
    expected = k[0, 0, 0, :, None] * (request.beta[0, 0, 0] * v[0, 0, 0])
    torch.testing.assert_close(pool[0, 0], expected)


def check_segments(subject, case: Case, whole, forward: bool, apart: float | None) -> None:
    """Forward and gradients within the kit's budgets.

    Args:
        subject: cuts every call into segments.
        whole: cuts none.
        forward: also make a forward alone, into a given buffer: the same bits.
        apart: also make the call again (the same bits) and whole, and compare the results.
    """
    call = case.call()
    found = subject.check(call)
    if apart is not None:
        again = subject.run(call)
        assert all(torch.equal(x, again[name]) for name, x in found.items())
    if forward:
        plain = replace(call, grads={}, given_out=True)
        assert all(torch.equal(x, found[name]) for name, x in subject.run(plain).items())
    if apart is not None:
        uncut = whole.run(call)
        assert found.keys() == uncut.keys()
        for name, x in uncut.items():
            distance = (found[name].double() - x.double()).norm() / x.double().norm().clamp_min(1e-30)
            assert distance < apart, (name, distance)


def checks(architecture: str) -> None:
    """Print what went wrong with every call of an architecture, by name; "" where nothing did."""
    from kda_core_amd.calls import plan_of
    from kda_core_amd.choose import ARCHITECTURES
    from kda_core_amd.plans.forward import saved_specs
    from kda_core_amd.plugin import BACKEND
    from planned_backend import PlannedBackend

    from kda_core._plugins import registry
    from kda_core.testing.subject import Subject
    from kda_core.testing.targets import find_target
    from kda_core.triton_lib.calls import Calls

    def subject(name: str, rows: int) -> Subject:
        """The backend as on this architecture, with segments of so many rows."""
        calls = Calls(partial(plan_of, rows=rows), lambda device: ARCHITECTURES[architecture], saved_specs=saved_specs)
        assert registry.register(PlannedBackend(BACKEND, calls, name=name)).state == "loaded"
        return Subject(find_target(name, interpret=True))

    torch.set_num_threads(1)
    whole, cut = subject("amd_whole", 0), subject("amd_cut", 64)
    work = {name: (check_kernels, whole, _other(x)) for (a, name), x in KERNELS.items() if a == architecture}
    segments = {name: case for (a, name), case in SEGMENTS.items() if a == architecture}
    forward = architecture == STAND_IN
    if forward:
        work[DRAFTS] = (check_drafts,)
    work |= {name: (check_segments, cut, case, whole, forward, APART.get(name)) for name, case in segments.items()}
    failures = {}
    for name, (function, *arguments) in work.items():
        try:
            function(*arguments)
            failures[name] = ""
        except Exception:  # reported, call by call, to the process that asked
            failures[name] = traceback.format_exc()
    print(json.dumps(failures))


@pytest.fixture(scope="module")
def failures():
    """The errors, by name of the call, for an architecture."""
    found: dict[str, dict[str, str]] = {}

    def of(architecture: str) -> dict[str, str]:
        if architecture not in found:
            found[architecture] = interpreted.printed(__file__, architecture)
        return found[architecture]

    return of


@pytest.mark.parametrize(("architecture", "name"), KERNELS)
def test_other_architectures_kernels_are_right(failures, architecture: str, name: str):
    """Every kernel of a chunk call, within the kit's budgets."""
    assert not failures(architecture)[name], failures(architecture)[name]


def test_drafts_stay_in_their_row(failures):
    assert not failures(STAND_IN)[DRAFTS], failures(STAND_IN)[DRAFTS]


@pytest.mark.parametrize(("architecture", "name"), SEGMENTS)
def test_segments_are_right(failures, architecture: str, name: str):
    """A sequence cut into segments, forward and gradients, also where states are in blocks of key channels."""
    assert not failures(architecture)[name], failures(architecture)[name]


RULE = """
import torch
from kda_core.request import Request
from kda_core_amd import choose

def rows(B=1, T=65536, H=8, K=128, dtype=torch.bfloat16, units=132, **options):
    x = torch.empty(1, dtype=dtype).expand(B, T, H, K)
    call = Request(op="chunk_kda", q=x, k=x, v=x, g=x, beta=x[..., 0], scale=1.0, **options)
    return choose.segment_rows(call, choose.ARCHITECTURES["gfx942"].having(units))

found = rows()
assert choose.LEAST_ROWS <= found < 65536 // choose.LEAST_SEGMENTS + 32 and found % 32 == 0
assert rows(output_final_state=True) == rows(save_for_backward=True) == found, "a sequence's bits"
assert rows(units=304) < found, "more compute units take more segments"
assert rows(T=1_000_000, H=1) >= 1_000_000 // choose.MOST_SEGMENTS, "states pass on one after another"
pool = dict(ssm_state_indices=torch.zeros(1, dtype=torch.int32), inplace_final_state=True)
bounds = torch.tensor([0, 65536])
whole = [
    dict(B=2),
    dict(H=128),
    dict(T=2048),
    dict(dtype=torch.float32),
    dict(K=256),
    dict(cu_seqlens=bounds),
    dict(cu_seqlens=bounds, cu_seqlens_cpu=bounds),
    dict(return_intermediate_states=True),
    dict(batch_invariant=True),
    pool,
]
for call in whole:
    assert rows(**call) == 0, call
"""


def test_only_one_long_sequence_of_few_heads_is_cut():
    """By lengths that the host knows: nothing batched or packed, whose bits must not depend on what is beside it."""
    done = interpreted.python("-c", RULE, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr


INFO = """
import json, torch, kda_core
from kda_core._plugins import registry
amd = registry.named("amd")
x = torch.zeros(1, 1, 1, 16)
call = dict(q=x, k=x, v=x, g=x, beta=x[..., 0])
print(json.dumps({
    "priority": amd.info.priority,
    "devices": amd.info.device_types,
    "cuda": str(amd.availability(torch.device("cuda", 0))),
    "chosen": kda_core.explain(**call).chosen,
}))
"""


def _info(**environment: str) -> dict:
    done = interpreted.python("-c", INFO, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.platform("cpu", "nvidia")
def test_other_builds_are_refused_with_the_reason():
    """Without ROCm the backend says what is missing."""
    info = _info()
    assert "not built for ROCm" in info["cuda"]


def test_interpreted_calls_must_name_the_backend():
    """The interpreter is thousands of times slower than the CPU backend: it never serves by itself."""
    info = _info(TRITON_INTERPRET="1")
    assert info["priority"] is None
    assert "cpu" in info["devices"]
    assert info["chosen"] != "amd"


def test_foreign_device_is_an_explicit_choice():
    """The switch is for tests: it takes the backend out of the automatic choice, and needs a GPU."""
    info = _info(KDA_FOREIGN_DEVICE="nvidia,amd")
    assert info["priority"] is None
    assert "not built for ROCm" not in info["cuda"]


KIT = (
    "import sys, pytest; sys.exit(pytest.main(['-p', 'kda_core.testing.plugin', '--pyargs', 'kda_core.testing.suite', "
    "'--backend=amd', {options}'-q', '-p', 'no:cacheprovider']))"
)


@pytest.mark.platform("cpu")
def test_kit_without_a_device_is_a_usage_error():
    """``--backend=amd`` without ROCm ends at once, says so, and names the two other ways."""
    done = interpreted.python("-c", KIT.format(options=""))
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    for words in ("not built for ROCm", "--interpret", "--foreign-device"):
        assert words in done.stdout + done.stderr


@pytest.mark.platform("cpu")
def test_foreign_device_needs_a_device():
    """``--foreign-device`` lifts the demand for ROCm and not that for a GPU."""
    done = interpreted.python("-c", KIT.format(options="'--foreign-device', "))
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "torch sees no GPU" in done.stdout + done.stderr


if __name__ == "__main__":
    checks(sys.argv[1])
