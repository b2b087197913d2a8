"""The recurrences for Hopper give what the plain ones give, bit for bit; needs an sm_90 GPU."""

from __future__ import annotations

import threading
from dataclasses import replace

import installed
import pytest
import torch
from plan_runs import run_on_nvidia as run_plan

import kda_core

installed.need_backend("nvidia")

from kda_core_nvidia.calls import plan_of
from kda_core_nvidia.choose import choose_backward, choose_forward
from kda_core_nvidia.choose.backward import backward_config
from kda_core_nvidia.choose.chunk import HopperConfig, hopper_config
from kda_core_nvidia.choose.forward import recurrence_config
from kda_core_nvidia.plans.backward import plan_backward
from kda_core_nvidia.plans.forward import plan_forward
from kda_core_nvidia.run import chip

from kda_core.request import Request
from kda_core.triton_lib.layout import padded, slots
from kda_core.triton_lib.plan import metadata

pytestmark = pytest.mark.platform("nvidia_hopper")

DEVICE = "cuda"

CALLS = {
    # name: (B, T, H, HV, K, V, boundaries, state V first)
    "one token": (1, 1, 2, 2, 128, 128, None, False),
    "less than a chunk": (1, 31, 2, 2, 128, 128, None, True),
    "batch": (2, 100, 3, 3, 128, 128, None, False),
    "grouped": (2, 256, 2, 6, 128, 128, None, True),
    "wide values": (1, 160, 2, 2, 128, 256, None, False),
    "narrow values": (3, 97, 2, 2, 128, 64, None, False),
    "padded keys": (1, 130, 2, 2, 100, 128, None, False),
    "packed": (1, 1000, 4, 4, 128, 128, [0, 0, 1, 33, 400, 400, 990], False),
    "many programs": (8, 320, 32, 32, 128, 128, None, True),
    "few programs": (1, 4064, 4, 4, 128, 128, None, False),
    "wide keys": (2, 330, 2, 2, 256, 256, None, False),
    "wide keys, narrow values, packed": (1, 1000, 2, 4, 200, 64, [0, 0, 1, 33, 400, 400, 990], True),
    "wide keys, many programs": (4, 200, 40, 40, 256, 128, None, True),
    "wide keys and values, many programs": (3, 90, 16, 16, 256, 256, None, False),
    "whole pieces": (1, 480, 2, 4, 128, 128, [0, 96, 144, 336, 384, 480], False),
    "wide keys, whole pieces": (1, 192, 2, 2, 256, 128, [0, 48, 192], True),
}


def arguments(name: str, dtype: torch.dtype) -> dict:
    B, T, H, HV, K, V, bounds, v_first = CALLS[name]
    torch.manual_seed(len(name))
    N = B if bounds is None else len(bounds) - 1

    def normal(*shape):
        return torch.randn(*shape, device=DEVICE)

    state = (N, HV, V, K) if v_first else (N, HV, K, V)
    return {
        "q": normal(B, T, H, K).to(dtype),
        "k": normal(B, T, H, K).to(dtype),
        # Slices of one projection, as models have them.
        "v": normal(B, T, HV * (V + 64))[..., : HV * V].to(dtype).view(B, T, HV, V),
        "g": -2 * torch.rand(B, T, HV, K, device=DEVICE),
        "beta": normal(B, T, HV).sigmoid().to(dtype),
        "initial_state": normal(*state),
        "cu_seqlens": None if bounds is None else torch.tensor(bounds, device=DEVICE),
        "state_v_first": v_first,
        "use_qk_l2norm_in_kernel": True,
        "output_final_state": True,
        "backend": "nvidia",
    }


NAMES = ("q", "k", "v", "g", "beta", "initial_state")


def request(call: dict, **options) -> Request:
    """The request that a call makes."""
    fields = {n: x for n, x in call.items() if n != "backend"}
    return Request(op="chunk_kda", scale=call["q"].shape[-1] ** -0.5, **(fields | options))


def facts(r: Request):
    """The call's metadata, the chip, padded head dimensions, and sequences times value heads."""
    crooked = frozenset(n for n, x in vars(r).items() if isinstance(x, torch.Tensor) and x.data_ptr() & 15)
    return metadata(r, crooked), chip(r.device), padded(r.K), padded(r.V), r.N * r.HV


def results(call: dict, hopper: bool, many: int | None = None) -> dict[str, torch.Tensor]:
    """Outputs and gradients of a call, by the kernels for Hopper wherever they can serve it, or by the plain ones."""
    r = request(call, save_for_backward=True)
    meta, on, kp, vp, heads = facts(r)
    recurrence = (
        hopper_config("recurrence", on, kp, r.V, heads) if hopper else recurrence_config(on, r.q.dtype, r.K, r.V, heads)
    )
    plan = plan_forward(meta, replace(choose_forward(meta, on), recurrence=recurrence))
    # Many heads are prepared by the kernel for Hopper, whichever recurrence follows.
    assert plan.kernels[0] in ("prepare", "prepare_hopper")
    assert plan.kernels[1:] == ("recurrence_hopper" if hopper else "recurrence",)
    made = run_plan(plan, r)
    saved = tuple(x for n, x in made.items() if n not in ("o", "final_state", "h") and x is not None)
    torch.manual_seed(1)
    upstream = {"grad_o": torch.randn_like(made["o"]), "grad_final_state": torch.randn_like(made["final_state"])}
    r = replace(r, saved=saved, needs_grad=frozenset(NAMES), **upstream)
    meta, on, kp, vp, heads = facts(r)
    choice = choose_backward(meta, on) if many is None else choose_backward(meta, on, many=many)
    plain = backward_config(on, r.q.dtype, kp, vp, heads)
    # Where it gains nothing, too.
    states, reverse = (
        (hopper_config(n, on, kp, r.V, heads) for n in ("states", "reverse"))
        if hopper
        else (plain.recurrences, plain.recurrences)
    )
    plan = plan_backward(meta, replace(choice, states=states, reverse=reverse, halves=()))
    kind = "hopper" if hopper else "kernel"
    assert f"recurrences_{kind}" in plan.kernels
    grads = run_plan(plan, r)
    return {"o": made["o"], "final_state": made["final_state"], **{f"d{n}": grads[n] for n in NAMES}}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_hopper_gives_what_the_plain_kernels_give(name, dtype):
    call = arguments(name, dtype)
    plain, hopper = results(call, False), results(call, True)
    for n in plain:
        assert torch.equal(plain[n], hopper[n]), n


def kept(r: Request, hopper: bool) -> dict[str, torch.Tensor]:
    """Outputs and pools, copies of the call's, with checkpoints from the kernel for Hopper or from the plain one."""
    r = replace(r, initial_state=r.initial_state.clone(), checkpoint_pool=r.checkpoint_pool.clone())
    meta, on, _, _, heads = facts(r)
    choice = choose_forward(meta, on)
    assert isinstance(choice.recurrence, HopperConfig)
    if not hopper:
        # True: states are stored at chunks.
        choice = replace(choice, recurrence=recurrence_config(on, r.q.dtype, r.K, r.V, heads, True))
    plan = plan_forward(meta, choice)
    assert plan.kernels[-1] == ("recurrence_hopper" if hopper else "recurrence")
    return {"o": run_plan(plan, r)["o"], "states": r.initial_state, "checkpoints": r.checkpoint_pool}


def keeping(name: str, dtype: torch.dtype, every: int) -> Request:
    """A call with checkpoints in a pool of their own, at first full of NaN. Its first sequence begins from zero."""
    call = arguments(name, dtype)
    r = request(call | {"output_final_state": False, "inplace_final_state": True})
    numbers = torch.arange(r.N, device=DEVICE)
    table = numbers[:, None] * 32 + torch.arange(32, device=DEVICE)
    pool = call["initial_state"].new_full((32 * r.N, *call["initial_state"].shape[1:]), float("nan"))
    return replace(
        r, ssm_state_indices=numbers, has_initial_state=numbers > 0, checkpoint_indices=table, checkpoint_every=every,
        checkpoint_pool=pool,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("every", [16, 48, 112])
@pytest.mark.parametrize("name", CALLS)
def test_checkpoints_within_chunks_are_those_of_the_plain_kernel(name, every, dtype):
    """Bit for bit, and again."""
    r = keeping(name, dtype, every)
    plain = kept(r, False)
    for _ in range(3):
        for n, x in kept(r, True).items():
            torch.testing.assert_close(x, plain[n], rtol=0, atol=0, equal_nan=True, msg=n)


@pytest.mark.parametrize("every", [16, 48])
@pytest.mark.parametrize("name", ["whole pieces", "wide keys, whole pieces"])
def test_no_row_is_written_behind_a_last_checkpoint(name, every):
    """A sequence may end with a piece whose last chunk is short; behind the call's rows of ``out`` lie others."""
    r = keeping(name, torch.bfloat16, every)
    rows = torch.full((1, r.T + 32, r.HV, r.V), float("nan"), dtype=r.v.dtype, device=DEVICE)
    kept(replace(r, out=rows[:, : r.T]), True)
    assert torch.equal(rows[:, : r.T], kept(r, False)["o"])
    assert rows[:, r.T :].isnan().all()


@pytest.mark.parametrize("name", ["packed", "many programs", "wide keys", "wide keys and values, many programs"])
def test_hopper_repeats_bitwise(name):
    call = arguments(name, torch.bfloat16)
    first = results(call, True)
    for _ in range(10):
        again = results(call, True)
        for n, x in first.items():
            assert torch.equal(x, again[n]), n


@pytest.mark.parametrize("name", ["batch", "grouped", "packed", "few programs", "wide keys, many programs"])
def test_gradients_are_the_same_through_descriptors(name):
    """Blocks that the chunk-parallel kernel reads through descriptors where a call is large."""
    call = arguments(name, torch.bfloat16)
    with_descriptors, with_pointers = (results(call, True, many) for many in (0, 2**31))
    for n, x in with_descriptors.items():
        assert torch.equal(x, with_pointers[n]), n


@pytest.mark.parametrize("name", ["less than a chunk", "grouped", "packed", "few programs", "wide keys"])
def test_gradients_are_the_same_from_all_that_the_forward_made(name):
    """A training step keeps some of its forward, or everything: the factors come out the same."""
    call = arguments(name, torch.bfloat16)
    names = ("q", "k", "v", "g", "beta", "initial_state")
    leaves = {n: call[n].detach().requires_grad_() for n in names}
    found = []
    for everything in (False, True):
        o, state = kda_core.chunk_kda(**(call | leaves), disable_recompute=everything)
        found.append(torch.autograd.grad([o, state], list(leaves.values()), [torch.ones_like(o), state.detach()]))
    for n, made_again, kept in zip(names, *found, strict=True):
        assert torch.equal(made_again, kept), n


def test_a_new_thread_s_first_call_may_encode_descriptors():
    """All is compiled and memory lies ready: nothing else of that thread has called CUDA's runtime before."""
    options = arguments("packed", torch.bfloat16)
    again = {n: x.clone() if n in ("q", "k", "v", "g") else x for n, x in options.items()}
    expected, _ = kda_core.chunk_kda(**options)
    kda_core.chunk_kda(**options)
    found = []
    thread = threading.Thread(target=lambda: found.append(kda_core.chunk_kda(**again)[0]))
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected)


def test_a_sequence_does_not_see_what_follows_it():
    """NaN and infinities behind a sequence's last row, inside the block of rows that a copy would take."""
    call = arguments("packed", torch.bfloat16)
    clean = results(call, True)
    dirty = call | {n: call[n].clone() for n in ("q", "k", "v", "g", "beta")}
    for n in ("q", "k", "v", "beta"):
        dirty[n][:, 400:] = float("nan")
    seen = results(dirty, True)
    for n in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(clean[n][:, :400], seen[n][:, :400]), n


def test_rows_that_are_not_aligned_take_the_plain_kernels():
    call = arguments("batch", torch.bfloat16)
    B, T, HV, V = call["v"].shape
    call["v"] = torch.randn(B, T, HV, V + 1, device=DEVICE).bfloat16()[..., 1:]
    aligned = call | {"v": call["v"].contiguous()}
    kernels = [plan_of(request(x), chip(x["q"].device)).kernels[-1] for x in (call, aligned)]
    assert kernels == ["recurrence", "recurrence_hopper"]
    assert torch.equal(kda_core.chunk_kda(**call)[0], kda_core.chunk_kda(**aligned)[0])


def test_an_output_that_is_not_aligned():
    call = arguments("packed", torch.bfloat16)
    B, T, HV, V = call["v"].shape
    out = torch.full((B, T, HV, V + 1), 7.0, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        o, _ = kda_core.chunk_kda(**call)
        kda_core.chunk_kda(**call, out=out[..., 1:])
    assert torch.equal(o, out[..., 1:])
    assert bool((out[..., 0] == 7).all())


@pytest.mark.parametrize("gate", ["given", "softplus", "bounded"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("B", "T", "H", "HV"), [(1, 2048, 16, 16), (5, 1000, 2, 4), (1, 1056, 24, 24), (1, 4100, 32, 32)]
)
def test_a_recurrence_that_follows_prepare_has_the_same_bits(B, T, H, HV, training, gate):
    torch.manual_seed(T)
    sizes = {"q": (B, T, H, 128), "k": (B, T, H, 128), "v": (B, T, HV, 128), "g": (B, T, HV, 128), "beta": (B, T, HV)}
    call = {n: torch.randn(size, device=DEVICE).bfloat16() for n, size in sizes.items()}
    call |= {"initial_state": torch.randn(B, HV, 128, 128, device=DEVICE), "output_final_state": True}
    call |= {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    if gate == "given":
        call["g"] = -call["g"].abs()
    else:
        call |= {"use_gate_in_kernel": True, "A_log": torch.rand(HV, device=DEVICE)}
        call |= {"dt_bias": torch.randn(HV * 128, device=DEVICE), "safe_gate": gate == "bounded"}
        call |= {"lower_bound": -5.0} if gate == "bounded" else {}
    r = request(call, save_for_backward=training)
    meta, on, *_ = facts(r)
    choice = choose_forward(meta, on)
    assert choice.follows
    expected = run_plan(plan_forward(meta, replace(choice, prepare=replace(choice.prepare, programs=0))), r)
    own, few = choice.prepare.programs, on.multiprocessors
    for programs, stay in ((own, 0), (own, 1), (few, 0), (few, 1), (5, 0), (1, 0), *[(own, choice.prepare.stay)] * 5):
        prepare = replace(choice.prepare, programs=programs, stay=stay)
        found = run_plan(plan_forward(meta, replace(choice, prepare=prepare)), r)
        for name, x in expected.items():
            # Saved tensors have room for the slots of segments.
            rows = slice(None) if name in ("o", "final_state") else slice(slots(meta))
            assert x is None or torch.equal(x[rows], found[name][rows]), (name, programs, stay)
