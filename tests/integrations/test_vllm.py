"""vLLM's functions for KDA on kda_core, beside the recurrence in plain torch; vLLM's own kernels need a GPU."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import installed
import pages
import pytest
import recurrence
import torch
from torch import Tensor

installed.need_backend("cpu")
installed.need_package("kda_core_vllm", "./integrations/vllm")
installed.need_package("vllm")

import kda_core_vllm

from kda_core.errors import UnsupportedStack

pytestmark = [pytest.mark.end_to_end, pytest.mark.filterwarnings("ignore")]

K3 = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
GLM = "vllm.models.glm5next.nvidia.ops.third_party.kda"
BAILING = "vllm.third_party.flash_linear_attention.ops.kda"
NAMES = {
    K3: ("chunk_kda_with_fused_gate", "fused_recurrent_kda", "fused_recurrent_kda_packed_decode"),
    GLM: ("chunk_kda_with_fused_gate", "fused_recurrent_kda"),
    BAILING: ("chunk_kda", "fused_recurrent_kda", "fused_recurrent_kda_fwd"),
}
H, D, SLOTS = 2, 16, 9

# The package of glm5next imports its whole model, which needs torchvision: only its kernels are wanted.
_root = Path(importlib.util.find_spec("vllm").origin).parent
sys.modules["vllm.models.glm5next"] = ModuleType("vllm.models.glm5next")
sys.modules["vllm.models.glm5next"].__path__ = [str(_root / "models" / "glm5next")]

from toys import Watcher
from vllm_layers import SITES, Layer, StateCopies


def bound() -> dict[tuple[str, str], object]:
    return {(home, n): getattr(importlib.import_module(home), n) for home, names in NAMES.items() for n in names}


@pytest.fixture(autouse=True)
def switched_off_at_the_end():
    yield
    kda_core_vllm.uninstall()


@pytest.fixture
def ours():
    """The functions of a module after ``install``."""
    assert kda_core_vllm.install(*kda_core_vllm.MODELS)
    return importlib.import_module


def draw(tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Rows of a batch of packed requests, with the parameters of the gate."""
    torch.manual_seed(tokens)
    rows = {n: torch.randn(1, tokens, H, D, dtype=dtype) for n in ("q", "k", "v", "g")}
    return rows | {
        "beta": torch.randn(1, tokens, H, dtype=dtype),
        "A_log": torch.randn(1, 1, H, 1),
        "bias": torch.randn(H * D),
        "pool": torch.randn(SLOTS, H, D, D),
    }


def gate(x: dict[str, Tensor], lower_bound: float | None) -> tuple[Tensor, Tensor]:
    """Decays and beta of the raw ones."""
    return recurrence.gate(x["g"], x["beta"], x["A_log"], x["bias"], lower_bound)


def recur(
    x: dict[str, Tensor], decays: Tensor, beta: Tensor, rows: slice, state: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Outputs of one request's tokens, and the state [H, V, K] after each."""
    outputs, states = recurrence.recur(*(t[0, rows] for t in (x["q"], x["k"], x["v"], decays, beta)), state)
    return outputs, states[1:]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected.to(found.dtype), atol=2e-5, rtol=2e-5)


def test_every_function_is_bound_and_given_back():
    before = bound()
    assert kda_core_vllm.install(*kda_core_vllm.MODELS)
    assert kda_core_vllm.install()
    assert not any(f is before[place] for place, f in bound().items())
    kda_core_vllm.uninstall()
    assert all(f is before[place] for place, f in bound().items())


def test_a_model_that_took_the_functions_by_name_is_bound_anew(monkeypatch):
    """vLLM imports a model's module behind its plugins; ``install`` may also come later."""
    home = importlib.import_module(BAILING)
    user = type(home)("vllm.model_executor.models.bailing_moe_v3")
    user.chunk_kda = home.chunk_kda
    monkeypatch.setitem(sys.modules, user.__name__, user)
    stock = home.chunk_kda
    assert kda_core_vllm.install()
    assert user.chunk_kda is home.chunk_kda is not stock
    later = type(home)("vllm.model_executor.models.bailing_moe_v4")
    later.chunk_kda = home.chunk_kda
    monkeypatch.setitem(sys.modules, later.__name__, later)
    kda_core_vllm.uninstall()
    assert user.chunk_kda is later.chunk_kda is home.chunk_kda is stock


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("home", [K3, GLM])
def test_prompts(ours, home, lower_bound):
    x, bounds = draw(100), torch.tensor([0, 3, 70, 100], dtype=torch.int32)
    decays, beta = gate(x, lower_bound)
    options = {"g_bias": x["bias"], "initial_state": x["pool"][[4, 2, 7]], "output_final_state": True}
    options |= {"A_log": x["A_log"], "use_qk_l2norm_in_kernel": True, "cu_seqlens": bounds}
    if home == K3:
        out = torch.empty(1, 100, H, D)
        options |= {"raw_beta": x["beta"], "lower_bound": lower_bound, "out": out}
    else:
        options |= {"beta": beta, "safe_gate": lower_bound is not None, "lower_bound": -5.0}
    o, last = ours(home).chunk_kda_with_fused_gate(x["q"], x["k"], x["v"], raw_g=x["g"], **options)
    for n, slot in enumerate([4, 2, 7]):
        rows = slice(bounds[n], bounds[n + 1])
        expected, states = recur(x, decays, beta, rows, x["pool"][slot])
        close(o[0, rows], expected)
        close(last[n], states[-1])
    assert home != K3 or o is out


@pytest.mark.parametrize("safe_gate", [False, True])
def test_prompts_of_given_decays(ours, safe_gate):
    x, bounds = draw(40), torch.tensor([0, 40], dtype=torch.int32)
    decays, beta = gate(x, -5.0)
    o, last = ours(BAILING).chunk_kda(
        x["q"], x["k"], x["v"], decays, beta, initial_state=x["pool"][:1], output_final_state=True,
        use_qk_l2norm_in_kernel=True, safe_gate=safe_gate, lower_bound=-5.0, cu_seqlens=bounds,
    )  # fmt: skip
    expected, states = recur(x, decays, beta, slice(0, 40), x["pool"][0])
    close(o[0], expected)
    close(last[0], states[-1])


def expect_steps(x, decays, beta, o, pool, slots) -> None:
    """One token of each request; a slot of 0 or below is no request's."""
    expected = x["pool"].clone()
    for n, slot in enumerate(slots):
        if slot > 0:
            own, states = recur(x, decays, beta, slice(n, n + 1), x["pool"][slot])
            close(o[0, n : n + 1], own)
            expected[slot] = states[-1]
    close(pool, expected)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_from_packed_rows(ours, lower_bound, dtype):
    """Rows of the convolution's result in a wider buffer; the last is padding of a captured batch."""
    x, slots = draw(4, dtype), torch.tensor([3, 8, 1, 0], dtype=torch.int32)
    wide = torch.cat([*(x[n].reshape(4, -1) for n in ("q", "k", "v")), torch.full((4, 5), torch.nan)], 1).to(dtype)
    pool = x["pool"].clone()
    pool[0] = torch.nan
    out = torch.full((1, 4, H, D), 7.0, dtype=dtype)
    o, same = ours(K3).fused_recurrent_kda_packed_decode(
        wide[:, :-5], x["g"], x["beta"], x["A_log"], x["bias"], lower_bound, pool, slots, out=out
    )
    assert o is out
    assert same is pool
    assert pool[0].isnan().all()
    pool[0] = x["pool"][0]
    if dtype == torch.float32:
        expect_steps(x, *gate(x, lower_bound), o, pool, slots.tolist())
    else:
        assert o.isfinite().all()
        torch.testing.assert_close(pool[3], recur(x, *gate(x, lower_bound), slice(0, 1), x["pool"][3])[1][0])


def test_steps_of_the_other_models(ours):
    """The table of slots is longer than the batch."""
    x, slots = draw(3), torch.tensor([5, 0, 2, 0, 0], dtype=torch.int32)
    bounds, (decays, beta) = torch.arange(4, dtype=torch.int32), gate(x, -5.0)
    common = {"cu_seqlens": bounds, "ssm_state_indices": slots, "use_qk_l2norm_in_kernel": True}
    pool = x["pool"].clone()
    o, _ = ours(GLM).fused_recurrent_kda(
        x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], initial_state=pool, sigmoid_beta=True, a_log=x["A_log"],
        g_bias=x["bias"], compute_gate=True, lower_bound=-5.0, **common,
    )  # fmt: skip
    expect_steps(x, decays, beta, o, pool, [5, 0, 2])
    pool = x["pool"].clone()
    o, _ = ours(BAILING).fused_recurrent_kda(
        x["q"], x["k"], x["v"], g=decays, beta=beta, initial_state=pool, safe_gate=True, lower_bound=-5.0, **common
    )
    expect_steps(x, decays, beta, o, pool, [5, 0, 2])


@pytest.mark.parametrize("home", [K3, GLM, BAILING])
def test_drafts_start_from_the_last_accepted_token(ours, home):
    x, slots = draw(6), torch.tensor([[1, 2, 3], [4, 5, 6], [0, 0, 0]], dtype=torch.int32)
    accepted, bounds = torch.tensor([2, 1, 1, 1], dtype=torch.int32), torch.tensor([0, 3, 6], dtype=torch.int32)
    decays, beta = gate(x, -5.0)
    pool, rows = x["pool"].clone(), (x["q"], x["k"], x["v"])
    common = {"initial_state": pool, "cu_seqlens": bounds, "ssm_state_indices": slots, "num_accepted_tokens": accepted}
    if home == K3:
        o, _ = ours(K3).fused_recurrent_kda(*rows, x["g"], x["beta"], x["A_log"], x["bias"], -5.0, **common)
    elif home == GLM:
        gated = {"a_log": x["A_log"], "g_bias": x["bias"], "compute_gate": True, "sigmoid_beta": True}
        o, _ = ours(GLM).fused_recurrent_kda(*rows, g=x["g"], beta=x["beta"], lower_bound=-5.0, **gated, **common)
    else:
        own = {"g": decays, "beta": beta, "scale": D**-0.5, "use_qk_l2norm_in_kernel": True}
        o, _ = ours(BAILING).fused_recurrent_kda_fwd(*rows, **own, **common)
    expected = x["pool"].clone()
    for n, first in enumerate([2, 4]):
        out, states = recur(x, decays, beta, slice(3 * n, 3 * n + 3), x["pool"][first])
        close(o[0, 3 * n : 3 * n + 3], out)
        expected[slots[n].long()] = torch.stack(states)
    close(pool, expected)


def arguments(name, x, lower_bound):
    """Gate and beta as a layer's ``_forward`` takes them: Bailing (Ling) computes both before."""
    return gate(x, lower_bound) if name == "bailing_moe_v3" else (x["g"], x["beta"])


def copying(state: Tensor, indices: Tensor, has_initial_state: Tensor) -> Tensor:
    """vLLM's ``gather_initial_states`` in plain torch."""
    return torch.where(has_initial_state[:, None, None, None], state[indices], 0)


IN_PLACE = [(name, False) for name in SITES if name != "bailing_moe_v3"]


@pytest.mark.parametrize(("name", "copies"), [*IN_PLACE, *((name, True) for name in SITES)])
def test_prompts_of_a_layer_stay_in_the_pool(ours, monkeypatch, name, copies):
    """A new request whose slot holds NaN, and one that goes on; vLLM's copies, where they are put back, are found.

    Bailing (Ling) copies always: its code indexes the pool, and calls no function that could be replaced.
    """
    x, slots = draw(40), torch.tensor([4, 2], dtype=torch.int32)
    pool = x["pool"].clone()
    pool[[0, 4]] = torch.nan
    layer = Layer(name, x, -5.0, pool, monkeypatch)
    if copies and name != "bailing_moe_v3":
        monkeypatch.setattr(layer.site, "gather_initial_states", copying)
        monkeypatch.setattr(
            layer.site, "scatter_states", lambda pool, rows, at: pool.index_put_((at,), rows), raising=False
        )
    with StateCopies(pool) as counted:
        o = layer(
            *arguments(name, x, -5.0), monkeypatch, num_prefills=2, num_prefill_tokens=40,
            has_initial_state=torch.tensor([False, True]), non_spec_state_indices_tensor=slots,
            non_spec_query_start_loc=torch.tensor([0, 17, 40], dtype=torch.int32),
        )  # fmt: skip
    assert (counted.bytes > 0) == copies
    assert copies or [p is pool for p in counted.pools] == [True]
    decays, beta = gate(x, -5.0)
    expected = x["pool"].clone()
    for rows, start, slot in [(slice(0, 17), torch.zeros(H, D, D), 4), (slice(17, 40), x["pool"][2], 2)]:
        own, states = recur(x, decays, beta, rows, start)
        close(o[0, rows], own)
        expected[slot] = states[-1]
    close(pool[1:], expected[1:])
    assert pool[0].isnan().all()


@pytest.mark.parametrize("name", SITES)
def test_steps_and_drafts_of_a_layer_stay_in_the_pool(ours, monkeypatch, name):
    x = draw(6)
    pool = x["pool"].clone()
    decays, beta = gate(x, -5.0)
    given = *arguments(name, x, -5.0), monkeypatch
    layer = Layer(name, x, -5.0, pool, monkeypatch)
    with StateCopies(pool) as counted:
        o = layer(
            *given, num_decodes=6, num_decode_tokens=6, non_spec_query_start_loc=torch.arange(7, dtype=torch.int32),
            non_spec_state_indices_tensor=torch.tensor([3, 8, 1, 5, 2, 0], dtype=torch.int32),
        )  # fmt: skip
    expect_steps(x, decays, beta, o, pool, [3, 8, 1, 5, 2, 0])
    pool.copy_(x["pool"])
    slots = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    with counted:
        o = layer(
            *given, num_spec_decodes=2, num_spec_decode_tokens=6, spec_state_indices_tensor=slots,
            spec_query_start_loc=torch.tensor([0, 3, 6], dtype=torch.int32), spec_token_indx=torch.arange(6),
            non_spec_token_indx=torch.arange(0), spec_sequence_masks=torch.tensor([True, True]),
            num_accepted_tokens=torch.tensor([2, 1], dtype=torch.int32),
        )  # fmt: skip
    for n, first in enumerate([2, 4]):
        own, states = recur(x, decays, beta, slice(3 * n, 3 * n + 3), x["pool"][first])
        close(o[0, 3 * n : 3 * n + 3], own)
        close(pool[slots[n].long()], torch.stack(states))
    assert counted.bytes == 0
    assert all(p.data_ptr() == pool.data_ptr() for p in counted.pools)
    assert len(counted.pools) == 2


@pytest.mark.parametrize("invariant", [False, True])
def test_prompts_on_amd_gpus_stay_in_the_pool(monkeypatch, invariant: bool):
    """ROCm's layer goes through ``chunk_kda_prefill``, which takes the function and the gather by name.

    vLLM's own switch asks for bits that do not depend on the batch.
    """
    from vllm.models.kimi_k3.amd.ops.kda_prefill import chunk_kda_prefill
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_rocm", lambda self: True)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(invariant)))
    assert kda_core_vllm.install("kimi_k3")
    x, out = draw(20), torch.empty(1, 20, H, D)
    pool = x["pool"].clone()
    with StateCopies(pool) as counted, Watcher() as requests:
        chunk_kda_prefill(
            x["q"], x["k"], x["v"], x["g"], x["beta"], x["A_log"], x["bias"], lower_bound=-5.0, state_cache=pool,
            state_indices=torch.tensor([3]), has_initial_state=torch.tensor([True]), out=out,
            use_qk_l2norm_in_kernel=True, cu_seqlens=torch.tensor([0, 20], dtype=torch.int32),
            chunk_indices=torch.zeros(1, 2), chunk_offsets=torch.zeros(2),
        )  # fmt: skip
    own, states = recur(x, *gate(x, -5.0), slice(0, 20), x["pool"][3])
    close(out[0], own)
    close(pool[3], states[-1])
    assert counted.bytes == 0
    assert [r.batch_invariant for r in requests] == [invariant]


def test_others_find_copies_where_kda_core_finds_the_pool(ours, monkeypatch):
    """Kernels of vLLM that kda_core does not replace gather the states, once, and what is written stays where it is."""
    home = importlib.import_module("vllm.model_executor.layers.mamba.ops.gather_initial_states")
    gathers, pool = [], torch.randn(SLOTS, H, D, D)
    stock = lambda *place: gathers.append(1) or copying(*place)  # noqa: E731
    kda_core_vllm.uninstall()
    monkeypatch.setattr(home, "gather_initial_states", stock)
    kda_core_vllm.install()
    slots = torch.tensor([3, 5])
    rows = home.gather_initial_states(pool, slots, torch.tensor([True, False]))
    assert gathers == []
    assert rows.contiguous()[0].equal(pool[3])
    assert rows.shape == (2, H, D, D)
    assert gathers == [1]
    written, before = kda_core_vllm.Written(pool), pool.clone()
    pool[slots] = written.to(torch.bfloat16)
    assert pool.equal(before)
    for wrong in (lambda: pool.clone().__setitem__(slots, written), lambda: torch.add(pool, written)):
        with pytest.raises(TypeError, match="they cannot be used elsewhere"):
            wrong()


def test_a_pool_that_is_not_advanced_in_place_is_refused(ours):
    x = draw(1)
    with pytest.raises(ValueError, match="inplace_final_state: expected True"):
        ours(BAILING).fused_recurrent_kda(
            x["q"], x["k"], x["v"], x["g"], x["beta"], initial_state=x["pool"], inplace_final_state=False,
            cu_seqlens=torch.tensor([0, 1]), ssm_state_indices=torch.tensor([1]),
        )  # fmt: skip


def test_the_variable_switches_it_off(monkeypatch):
    before = bound()
    monkeypatch.setenv("KDA_VLLM", "0")
    assert not kda_core_vllm.install()
    assert all(f is before[place] for place, f in bound().items())


def test_another_version_is_refused(tmp_path, monkeypatch):
    (tmp_path / "vllm-0.32.0.dist-info").mkdir()
    (tmp_path / "vllm-0.32.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = bound()
    with pytest.raises(UnsupportedStack, match=r"vllm: vllm 0\.32\.0 is installed; pip install 'vllm==0\.33\.0'"):
        kda_core_vllm.install()
    assert all(f is before[place] for place, f in bound().items())


def test_a_function_that_is_missing_leaves_all_as_they_were(monkeypatch):
    """As in a build of vLLM without it: the functions of the first model are not bound alone."""
    before = bound()
    with monkeypatch.context() as patched:
        patched.delattr(importlib.import_module(BAILING), "fused_recurrent_kda_fwd")
        with pytest.raises(AttributeError, match="fused_recurrent_kda_fwd"):
            kda_core_vllm.install()
    assert bound() == before
    assert not kda_core_vllm._bound


def test_the_variable_names_models(monkeypatch):
    before = bound()
    monkeypatch.setenv("KDA_VLLM", "glm5next")
    assert kda_core_vllm.install()
    assert {home for (home, n), f in bound().items() if f is not before[home, n]} == {GLM}
    kda_core_vllm.uninstall()
    monkeypatch.setenv("KDA_VLLM", "kimi_k3,kimi")
    with pytest.raises(UnsupportedStack, match="model 'kimi' is not served; take kimi_k3, bailing_moe_v3, glm5next"):
        kda_core_vllm.install()
    assert bound() == before


def test_vllm_finds_the_plugin():
    from vllm.plugins import load_plugins_by_group

    assert load_plugins_by_group("vllm.general_plugins")["kda_core"] is kda_core_vllm.install


@pytest.mark.parametrize("page", ["README.md", "docs/integrations/vllm.md"])
def test_the_line_of_the_page(page):
    before = bound()
    exec(pages.one_line(page, "kda_core_vllm"), {})
    assert bound() != before
