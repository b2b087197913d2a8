"""``recurrent_draft`` gives what ``recurrent`` gives, from float32 states bit for bit; needs an sm_90 GPU."""

from __future__ import annotations

from dataclasses import replace

import installed
import pytest
import torch
from plan_runs import run_on_nvidia as run_plan
from torch import Tensor

installed.need_backend("nvidia")

from kda_core_nvidia.choose import choose_recurrent
from kda_core_nvidia.choose.recurrent import recurrent_config
from kda_core_nvidia.plans.recurrent import plan_recurrent
from kda_core_nvidia.run import chip

from kda_core import empty_records
from kda_core.request import Request
from kda_core.triton_lib.plan import metadata

pytestmark = pytest.mark.platform("nvidia_hopper")

DEVICE = "cuda"
H, HV, D = 2, 4, 128
KINDS = [(v_first, state) for v_first in (False, True) for state in (torch.float32, torch.bfloat16)]
OTHERS = (torch.float16, torch.float32)
GATES = {
    "given": {},
    "softplus": {"use_gate_in_kernel": True},
    "bounded": {"use_gate_in_kernel": True, "lower_bound": -5.0},
}


def draft(N: int, T: int, v_first: bool, state: torch.dtype, dtype: torch.dtype, gate: str, **more) -> dict:
    """A draft, rows of q, k, v, g and beta cut out of one projection, in a pool with gaps; padding behind it."""
    torch.manual_seed(N)
    widths = {"q": (H, D), "k": (H, D), "v": (HV, D), "g": (HV, D), "beta": (HV,)}
    sizes = [torch.Size(w).numel() for w in widths.values()]
    parts = torch.randn(N, T, sum(sizes) + 44, device=DEVICE).to(dtype)[..., 16:-28].split(sizes, dim=-1)
    call = {n: x.unflatten(-1, w) for (n, w), x in zip(widths.items(), parts, strict=True)}
    if gate == "given":
        call["g"] = -call["g"].abs()
    else:
        call |= GATES[gate] | {"A_log": torch.rand(HV, device=DEVICE), "dt_bias": torch.randn(HV, D, device=DEVICE)}
    call |= {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "state_v_first": v_first}
    slots = torch.randperm(N + 2, device=DEVICE)
    slots[1] = -1
    pool = torch.randn(N + 2, 2 * HV, D, D, device=DEVICE).to(state)[:, ::2]
    return call | {"initial_state": pool, "ssm_state_indices": slots[:N]} | more


def committed(N: int, C: int) -> dict:
    """Records of slow channels and of fast ones, of which 0, 1, ... tokens are accepted."""
    earlier = empty_records(N, C, HV, D, D, device=DEVICE).normal_()
    earlier[..., D : 2 * D] = torch.rand(N, C, HV, D, device=DEVICE) * 1.5 - 0.5
    return {"commit": earlier, "num_committed": torch.arange(N, device=DEVICE) % (C + 2)}


def both(call: dict, takes: bool = True) -> tuple[list[Tensor], list[Tensor]]:
    """All that a call gives and leaves behind, from ``recurrent`` and from the kernel that takes it."""
    found = []
    for drafting in (False, True):
        pool = call["initial_state"]
        own = torch.empty_strided(pool.shape, pool.stride(), dtype=pool.dtype, device=DEVICE).copy_(pool)
        records = torch.full_like(empty_records(*call["v"].shape[:3], D, D, device=DEVICE), 7.0)
        fields = {"scale": D**-0.5, "inplace_final_state": True, "update_state": False}
        fields |= {"initial_state": own, "records": records}
        made_of = Request(op="fused_recurrent_kda", **(call | fields))
        misaligned = frozenset(n for n, x in vars(made_of).items() if isinstance(x, Tensor) and x.data_ptr() & 15)
        r, on = metadata(made_of, misaligned), chip(made_of.device)
        choice = choose_recurrent(r, on)
        if not drafting:
            short = recurrent_config(r.N * r.HV, r.K, r.V, r.state_v_first, r.state_dtype)
            choice = replace(choice, draft=None, short=short)
        plan = plan_recurrent(r, choice)
        assert plan.kernels == ("recurrent_draft" if drafting and takes else "recurrent",)
        found.append([run_plan(plan, made_of)["o"], records, own])
    return found[0], found[1]


def same(call: dict, takes: bool = True) -> list[Tensor]:
    """Compare with ``recurrent``, bits or, from 16-bit states, numbers but for rounding; the draft's results."""
    plain, drafted = both(call, takes)
    exact = call["initial_state"].dtype == torch.float32 or not takes
    for a, b in zip(plain, drafted, strict=True):
        assert torch.isfinite(b).all()
        if exact:
            assert torch.equal(a, b)
        else:
            off = (a.double() - b.double()).abs()
            assert (off <= 2 * torch.finfo(a.dtype).eps * a.double().abs() + 4e-6 * a.double().abs().max()).all()
    # k and decays, and the committed states
    assert torch.equal(plain[1][..., : 2 * D], drafted[1][..., : 2 * D])
    assert torch.equal(plain[2], drafted[2])
    return drafted


@pytest.mark.parametrize(("v_first", "state"), KINDS)
@pytest.mark.parametrize(("gate", "dtype"), [*((x, torch.bfloat16) for x in GATES), *(("given", x) for x in OTHERS)])
def test_draft_gives_what_recurrent_gives(gate, dtype, v_first, state):
    call = draft(5, 4, v_first, state, dtype, gate)
    o, records, pool = same(call)
    assert not o[1].any()
    assert (records[1] == 7.0).all()
    assert torch.equal(pool, call["initial_state"])
    same(call | committed(5, 3))


@pytest.mark.parametrize(("v_first", "state"), KINDS)
def test_drafts_of_any_length(v_first, state):
    for T in (1, 2, 3, 5, 7, 8):
        same(draft(3, T, v_first, state, torch.bfloat16, "bounded"))
    for C in (1, 8):
        same(draft(9, 3, v_first, state, torch.bfloat16, "bounded") | committed(9, C))


@pytest.mark.parametrize(("v_first", "state"), KINDS)
def test_drafts_of_many_states(v_first, state):
    call = draft(130, 4, v_first, state, torch.bfloat16, "bounded") | committed(130, 4)
    o, records, _ = same(call)
    # Whatever the company, a sequence has the same bits.
    alone = {n: x[7:8] if n not in ("initial_state", "A_log", "dt_bias") else x for n, x in tensors(call).items()}
    o_alone, records_alone, _ = both(call | alone)[1]
    assert torch.equal(o[7:8], o_alone)
    assert torch.equal(records[7:8], records_alone)


def tensors(call: dict) -> dict[str, Tensor]:
    return {n: x for n, x in call.items() if isinstance(x, Tensor)}


@pytest.mark.parametrize(("v_first", "state"), KINDS)
def test_draft_without_norms_and_with_negative_eigenvalues(v_first, state):
    call = draft(3, 4, v_first, state, torch.bfloat16, "given", allow_neg_eigval=True, use_qk_l2norm_in_kernel=False)
    call["q"], call["k"] = call["q"] / 16, call["k"] / 16
    same(call | committed(3, 4))
    same(call | {"use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": False})


FORKED = ((-1, 0, 0, 1, 1, 2, 4), (-1, -1, 0, 0, 1, 3, -7), (9, 0, 1, 2, 3, 4, 5))
"""Two trees and a chain, whose first number is no earlier token."""


def path_to(parents: tuple[int, ...], token: int) -> list[int]:
    path: list[int] = []
    while token >= 0:
        path.insert(0, token)
        token = min(max(parents[token], -1), token - 1)
    return path


@pytest.mark.parametrize("v_first", [False, True])
def test_trees_from_bfloat16_states(v_first):
    """A token has the bits of a draft of its ancestors; NaN in other branches leaves no trace."""
    call = draft(3, 7, v_first, torch.bfloat16, torch.bfloat16, "bounded")
    call["ssm_state_indices"] = torch.tensor([4, 0, 2], device=DEVICE)
    tree = call | {"parents": torch.tensor(FORKED, device=DEVICE)}
    o, records, _ = same(tree)
    chain = call | {"parents": torch.arange(-1, 6, device=DEVICE).expand(3, 7)}
    assert all(torch.equal(a, b) for a, b in zip(both(chain)[1], both(call)[1], strict=True))
    for token in range(7):
        paths = [path_to(parents, token) for parents in FORKED]
        longest = max(map(len, paths))
        rows = torch.tensor([path + path[-1:] * (longest - len(path)) for path in paths], device=DEVICE)
        own = {n: torch.stack([x[i] for x, i in zip(call[n], rows, strict=True)]) for n in ("q", "k", "v", "g", "beta")}
        # Rows begin where triton sees that 16 bytes are aligned, as those of the draft.
        o_path, records_path, _ = both(call | own)[1]
        other = {n: x.clone() for n, x in tree.items() if n in own}
        for n, path in enumerate(paths):
            assert torch.equal(o[n, path], o_path[n, : len(path)])
            assert torch.equal(records[n, path], records_path[n, : len(path)])
            for x in other.values():
                x[n, [t for t in range(7) if t not in path]] = float("nan")
        o_other, records_other, _ = both(tree | other)[1]
        for n, path in enumerate(paths):
            assert torch.equal(o[n, path], o_other[n, path])
            assert torch.equal(records[n, path], records_other[n, path])


@pytest.mark.parametrize("v_first", [False, True])
def test_a_path_is_committed_first(v_first):
    call = draft(3, 7, v_first, torch.bfloat16, torch.bfloat16, "bounded")
    call["ssm_state_indices"] = torch.tensor([4, 0, 2], device=DEVICE)
    path = torch.tensor([[0, 1, 4, 6], [0, 3, 5, 0], [0, 2**30, 2, -3]], device=DEVICE)
    call |= committed(3, 7) | {"num_committed": torch.tensor([4, 0, 2**20], device=DEVICE), "commit_path": path}
    same(call | {"parents": torch.tensor(FORKED, device=DEVICE)})


@pytest.mark.parametrize("v_first", [False, True])
def test_drafts_from_bfloat16_states_have_the_same_bits_however_tensors_lie(v_first):
    call = draft(3, 4, v_first, torch.bfloat16, torch.bfloat16, "bounded")
    crooked = {n: call[n].new_empty(3, 4, call[n][0, 0].numel() + 1)[..., 1:] for n in ("q", "k", "v", "g")}
    crooked = {n: x.unflatten(-1, (-1, D)).copy_(call[n]) for n, x in crooked.items()}
    for more in ({}, committed(3, 4)):
        found = zip(both(call | more)[1], both(call | crooked | more)[1], strict=True)
        assert all(torch.equal(a, b) for a, b in found)


def test_calls_that_draft_leaves_to_recurrent():
    call = draft(3, 4, False, torch.float32, torch.bfloat16, "bounded")
    crooked = call["q"].new_empty(3, 4, H * D + 1)[..., 1:].unflatten(-1, (H, D)).copy_(call["q"])
    same(call | {"q": crooked}, takes=False)
    same(call | {"initial_state": call["initial_state"].half()}, takes=False)
    same(call | {"parents": torch.tensor([[-1, 0, 0, 2]] * 3, device=DEVICE)}, takes=False)
    same(draft(3, 9, False, torch.float32, torch.bfloat16, "bounded"), takes=False)
