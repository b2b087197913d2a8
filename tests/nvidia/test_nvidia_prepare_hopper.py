"""``prepare_hopper`` beside the plain kernel and the oracle; needs an sm_90 GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import installed
import pytest
import torch

import kda_core

installed.need_backend("nvidia")

from kda_core_nvidia.calls import CALLS
from kda_core_nvidia.choose import backward, chunk, forward

pytestmark = pytest.mark.platform("nvidia_hopper")

DEVICE = "cuda"
HV = 20

BOUNDED = {"use_gate_in_kernel": True, "lower_bound": -5.0}
SOFTPLUS = {"use_gate_in_kernel": True}

GATES = {
    # name: (options, scale of g, dtype of g)
    "bounded": (BOUNDED, 1.0, torch.bfloat16),
    "bounded, strongest": (BOUNDED, 30.0, torch.bfloat16),
    "bounded far below": ({"use_gate_in_kernel": True, "lower_bound": -300.0}, 1.0, torch.bfloat16),
    "softplus": (SOFTPLUS, 1.0, torch.bfloat16),
    "softplus, strong": (SOFTPLUS, 30.0, torch.bfloat16),
    "given": ({}, -1.0, torch.float32),
    "given, promised": ({"safe_gate": True}, -1.0, torch.bfloat16),
    "given, resets": ({}, -400.0, torch.float32),
}


def call(gate: str = "bounded", B: int = 2, T: int = 200, H: int = HV, **more: Any) -> dict[str, Any]:
    options, scale, dtype = GATES[gate]
    torch.manual_seed(len(gate) + T)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE)

    g = normal(B, T, HV, 128)
    found = {
        "q": normal(B, T, H, 128).bfloat16(),
        "k": normal(B, T, H, 128).bfloat16(),
        "v": normal(B, T, HV, 128).bfloat16(),
        "g": (g * scale if options.get("use_gate_in_kernel") else g.abs() * scale).to(dtype),
        "beta": normal(B, T, HV).bfloat16(),
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "output_final_state": True,
        **options,
    }
    if options.get("use_gate_in_kernel"):
        found |= {"A_log": torch.rand(HV, device=DEVICE), "dt_bias": normal(HV, 128)}
    return found | more


@contextmanager
def prepared_by(hopper: bool, monkeypatch) -> Iterator[None]:
    """The kernel for Hopper serves every call in here, and takes it where it is meant to."""
    chosen, made = chunk.choose_prepare, CALLS.run

    def choose_prepare(*facts: Any, again: bool = False) -> Any:
        config = chosen(*facts, again=again)
        assert isinstance(config, chunk.PrepareHopperConfig)
        return config if hopper else chunk.prepare_config(128, torch.bfloat16, again)

    with monkeypatch.context() as patch:
        for module in (forward, backward):
            patch.setattr(module, "choose_prepare", choose_prepare)
        # Plans of one signature share a memo.
        patch.setattr(CALLS, "run", lambda request, key, *rest: made(request, (key, hopper), *rest))
        yield


def run(arguments: dict[str, Any], monkeypatch, hopper: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and final state."""
    with prepared_by(hopper, monkeypatch), torch.no_grad():
        return kda_core.chunk_kda(**arguments, backend="nvidia")


def upstream(x: torch.Tensor) -> torch.Tensor:
    """A gradient of ``x`` that every dtype and device holds the same."""
    return torch.arange(x.numel(), dtype=torch.float64).cos().bfloat16().view(x.shape).to(x)


def trained(arguments: dict[str, Any], monkeypatch, hopper: bool = True, **more: Any) -> dict[str, torch.Tensor]:
    """Output, final state and all gradients."""
    names = [n for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias") if n in arguments]
    leaves = {n: arguments[n].detach().requires_grad_() for n in names}
    with prepared_by(hopper, monkeypatch):
        o, state = kda_core.chunk_kda(**(arguments | leaves | {"backend": "nvidia"} | more))
        grads = torch.autograd.grad([o, state], list(leaves.values()), [upstream(o), upstream(state)])
    return {"o": o.detach(), "final_state": state.detach()} | {f"d{n}": x for n, x in zip(names, grads, strict=True)}


def error(x: torch.Tensor, exact: torch.Tensor) -> float:
    return float((x.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("more", [{}, {"H": 4, "T": 97}, {"B": 1, "T": 31, "use_qk_l2norm_in_kernel": False}], ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_as_exact_as_the_plain_kernel(gate, more, monkeypatch):
    """5%: operands are rounded to 16 bits in either, but not the same ones. The kit holds both to its budgets."""
    arguments = call(gate, **more)
    if not arguments["use_qk_l2norm_in_kernel"]:
        arguments |= {n: arguments[n] / 11 for n in ("q", "k")}
    plain, ours = run(arguments, monkeypatch, hopper=False), run(arguments, monkeypatch)
    cpu = {n: x.cpu() if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    exact = kda_core.chunk_kda(**cpu, backend="reference")
    for name, x, before, right in zip(("o", "final_state"), ours, plain, exact, strict=True):
        right = right.to(DEVICE)
        assert error(x, right) <= 1.05 * error(before, right) + 1e-6, name


@pytest.mark.parametrize("gate", GATES)
def test_gradients_as_exact_as_the_plain_kernels(gate, monkeypatch):
    """In the root mean square of four draws (a length is a seed): dA_log has 20 numbers, and one draw says little."""
    squares: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for T in (97, 98, 99, 100):
        arguments = call(gate, B=1, T=T)
        both = trained(arguments, monkeypatch, hopper=False), trained(arguments, monkeypatch)
        exact = {n: x.cpu() if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
        names = [n for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias") if n in exact]
        leaves = {n: exact[n].double().requires_grad_() for n in names}
        o, state = kda_core.chunk_kda(**(exact | leaves | {"backend": "reference"}))
        grads = torch.autograd.grad([o, state], list(leaves.values()), [upstream(o), upstream(state)])
        for name, right in zip(names, grads, strict=True):
            for i, found in enumerate(both):
                squares[name][i] += error(found[f"d{name}"], right.to(DEVICE)) ** 2 / 4
    for name, (before, after) in squares.items():
        assert after**0.5 <= 1.05 * before**0.5 + 1e-5, name


@pytest.mark.parametrize("more", [{}, {"H": 4, "T": 97}, {"B": 1, "T": 31, "use_qk_l2norm_in_kernel": False}], ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_the_second_run_of_a_step_gives_the_first_one_s_bits(gate, more, monkeypatch):
    """What a training step keeps of its forward, or everything: the factors come out the same."""
    arguments = call(gate, **more)
    again = trained(arguments, monkeypatch)
    for name, x in trained(arguments, monkeypatch, disable_recompute=True).items():
        assert torch.equal(again[name], x), name


@pytest.mark.parametrize("gate", ["bounded", "softplus, strong", "given"])
def test_repeats_bitwise(gate, monkeypatch):
    arguments = call(gate, B=8, T=1000)
    first = trained(arguments, monkeypatch)
    for _ in range(5):
        for name, x in trained(arguments, monkeypatch).items():
            assert torch.equal(first[name], x), name


@pytest.mark.parametrize("gate", GATES)
def test_a_sequence_is_its_own(gate, monkeypatch):
    """Packed with others, which hold NaN, its bits are those that it has alone; rows behind the last one are zero."""
    arguments = call(gate, B=1, T=500)
    rows = ("q", "k", "v", "g", "beta")
    bounds = [0, 33, 33, 97, 161, 400]
    for n in rows:
        arguments[n][:, :97] = arguments[n][:, 161:] = float("nan")
    o, state = run(arguments | {"cu_seqlens": torch.tensor(bounds, device=DEVICE)}, monkeypatch)
    alone, last = run(arguments | {n: arguments[n][:, 97:161].contiguous() for n in rows}, monkeypatch)
    assert torch.equal(o[:, 97:161], alone)
    assert torch.equal(state[3:4], last)
    assert bool((o[:, 400:] == 0).all())
    # A batch gives every sequence the bits that it has alone, too.
    pair = {n: torch.cat([arguments[n][:, 97:161], torch.flip(arguments[n][:, 97:161], [1])]) for n in rows}
    assert torch.equal(run(arguments | pair, monkeypatch)[0][:1], alone)


@pytest.mark.parametrize("gate", GATES)
def test_a_chunk_does_not_see_the_next_one(gate, monkeypatch):
    """Both chunks of a program, the second with decays of another kind."""
    arguments = call(gate, B=1, T=64)
    rows = ("q", "k", "v", "g", "beta")
    for strength in (0.0, 1.0, 1000.0):
        whole = arguments | {"g": arguments["g"].clone()}
        whole["g"][:, 32:] *= strength
        half, _ = run(arguments | {n: arguments[n][:, :32].contiguous() for n in rows}, monkeypatch)
        assert torch.equal(run(whole, monkeypatch)[0][:, :32], half)


@pytest.mark.parametrize("name", ["q", "k", "g", "beta"])
def test_bits_do_not_depend_on_strides(name, monkeypatch):
    """Rows that bulk copies cannot take are copied: of wider tensors, between others of a batch, heads first."""
    arguments = call()
    x = arguments[name]
    right, _ = run(arguments, monkeypatch)
    wider = torch.zeros(*x.shape[:-1], x.shape[-1] + 1, device=DEVICE, dtype=x.dtype)[..., 1:].copy_(x)
    longer = torch.full((x.shape[0], x.shape[1] + 3, *x.shape[2:]), float("nan"), device=DEVICE, dtype=x.dtype)
    longer = longer[:, : x.shape[1]].copy_(x)
    heads_first = x.transpose(1, 2).contiguous().transpose(1, 2)
    for strided in (wider, longer, heads_first):
        assert torch.equal(run(arguments | {name: strided}, monkeypatch)[0], right)


@pytest.mark.parametrize("size", [1e-8, 1e-3, 1e6, 1e12])
@pytest.mark.parametrize("gate", ["bounded, strongest", "softplus"])
def test_rows_of_any_size(gate, size, monkeypatch):
    """Shifts by powers of two leave norms and operands in range."""
    arguments = call(gate)
    for n in ("q", "k"):
        arguments[n] = arguments[n] * size
    plain, ours = run(arguments, monkeypatch, hopper=False), run(arguments, monkeypatch)
    cpu = {n: x.cpu() if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    exact = kda_core.chunk_kda(**cpu, backend="reference")
    for x, before, right in zip(ours, plain, exact, strict=True):
        right = right.to(DEVICE)
        assert error(x, right) <= 1.05 * error(before, right) + 1e-6


def test_padded_slots_of_a_pool(monkeypatch):
    arguments = call(B=3, T=80, initial_state=torch.zeros(4, HV, 128, 128, device=DEVICE))
    whole, _ = run(arguments | {"initial_state": None}, monkeypatch)
    indices = torch.tensor([2, -1, 0], device=DEVICE, dtype=torch.int32)
    o, _ = run(arguments | {"ssm_state_indices": indices, "output_final_state": False}, monkeypatch)
    assert torch.equal(o[[0, 2]], whole[[0, 2]])
    assert bool((o[1] == 0).all())
