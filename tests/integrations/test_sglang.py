"""SGLang's kernel class for KDA on kda_core, beside the recurrence in plain torch; SGLang's own kernels need a GPU."""

from __future__ import annotations

import ast
import importlib
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
installed.need_package("kda_core_sglang", "./integrations/sglang")
installed.need_package("sglang")

import kda_core_sglang
import sglang
import sglang_backend
from sglang.srt.plugins.hook_registry import HookRegistry

from kda_core.errors import UnsupportedStack

pytestmark = [pytest.mark.end_to_end, pytest.mark.filterwarnings("ignore")]

home = importlib.import_module(kda_core_sglang.HOME)
# In a list: SGLang replaces the class wherever a module has a name for it.
STOCK = [home.TritonKDAKernel]
H, HV, D, SLOTS = 2, 4, 16, 9


@pytest.fixture(autouse=True)
def switched_off_at_the_end():
    yield
    kda_core_sglang.uninstall()


@pytest.fixture
def kernel():
    """An object of the class that SGLang's backends make after ``install``."""
    assert kda_core_sglang.install()
    return home.TritonKDAKernel()


def draw(tokens: int) -> dict[str, Tensor]:
    """Rows of a batch of packed requests, with the parameters of the gate."""
    torch.manual_seed(tokens)
    rows = {n: torch.randn(1, tokens, H, D) for n in ("q", "k")}
    return rows | {
        **{n: torch.randn(1, tokens, HV, D) for n in ("v", "a")},
        "b": torch.randn(1, tokens, HV),
        "A_log": torch.randn(1, 1, HV, 1),
        "dt_bias": torch.randn(HV * D),
        "pool": torch.randn(SLOTS, HV, D, D),
    }


def gate(x: dict[str, Tensor], lower_bound: float | None) -> tuple[Tensor, Tensor]:
    """Decays and beta of the raw ones."""
    return recurrence.gate(x["a"], x["b"], x["A_log"], x["dt_bias"], lower_bound)


def recur(x: dict[str, Tensor], lower_bound: float | None, rows: slice, state: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Outputs of one request's tokens, and the state [HV, V, K] before the first and after each."""
    tensors = x["q"], x["k"], x["v"], *gate(x, lower_bound)
    return recurrence.recur(*(t[0, rows] for t in tensors), state)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_the_class_is_replaced_and_given_back():
    assert kda_core_sglang.install()
    assert kda_core_sglang.install()
    assert home.TritonKDAKernel is not STOCK[0]
    assert issubclass(home.TritonKDAKernel, STOCK[0])
    assert len(HookRegistry._hooks[kda_core_sglang.TARGET]) == 1
    kda_core_sglang.uninstall()
    assert home.TritonKDAKernel is STOCK[0]
    assert kda_core_sglang.install()
    assert home.TritonKDAKernel is not STOCK[0]


@pytest.mark.parametrize("user", ["layers.attention.linear.kda_backend", "models.glm5_next", "models.bailing_moe_v3"])
def test_a_module_that_took_the_class_by_name_is_bound_anew(user, monkeypatch):
    """Modules of these names that stand for SGLang's own: those import packages of a GPU server."""
    module = ModuleType(f"sglang.srt.{user}")
    module.TritonKDAKernel = STOCK[0]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert kda_core_sglang.install()
    assert module.TritonKDAKernel is home.TritonKDAKernel is not STOCK[0]
    kda_core_sglang.uninstall()
    assert module.TritonKDAKernel is STOCK[0]


@pytest.mark.parametrize("model", ["kimi_linear", "glm5_next", "bailing_moe_v3"])
def test_models_reach_the_kernels_through_the_class_alone(model):
    """None imports a kernel for KDA, only norms: each goes to the backend, which makes objects of the class."""
    tree = ast.parse((Path(sglang.__file__).parent / "srt" / "models" / f"{model}.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in imports for alias in node.names if "ops.attention" in node.module}
    assert {"RadixLinearAttention", "KimiDeltaAttention"} & {alias.name for node in imports for alias in node.names}
    assert not any("kda" in name or "recurrent" in name or "chunk" in name for name in names)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("wanted", ["outputs", "states", "snapshots", "both"])
def test_prompts(kernel, lower_bound, wanted):
    """The states at the starts of chunks, and snapshots of some of them in float32."""
    x, lengths, slots = draw(200), [3, 130, 67], torch.tensor([4, 2, 7], dtype=torch.int32)
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    pool, track = x["pool"].clone(), torch.full((3, HV, D, D), torch.nan)
    options = {"return_intermediate_states": wanted in ("states", "both"), "extend_seq_lens_cpu": lengths}
    if wanted in ("snapshots", "both"):
        tracked = torch.tensor([-1, 2, 1], dtype=torch.int32)
        options |= {"track_state": track, "track_chunk_idx": tracked, "extend_seq_lens_cpu": None}
    found = kernel.extend(
        x["q"], x["k"], x["v"], x["a"], x["b"], ssm_states=pool, cache_indices=slots, query_start_loc=bounds,
        A_log=x["A_log"], dt_bias=x["dt_bias"], lower_bound=lower_bound, beta_is_raw=True, **options,
    )  # fmt: skip
    o, h = found if options["return_intermediate_states"] else (found, None)
    assert (h is None) == (wanted != "states")  # SGLang reads snapshots where it has asked for them
    expected, before, states = x["pool"].clone(), [], []
    for n, slot in enumerate(slots.tolist()):
        own, after = recur(x, lower_bound, slice(bounds[n], bounds[n + 1]), x["pool"][slot])
        close(o[0, bounds[n] : bounds[n + 1]], own)
        expected[slot] = after[-1]
        states.append(after)
        before += after[:-1:64]
    close(pool, expected)
    if h is not None:
        close(h[0], torch.stack(before))
    if "track_state" in options:
        close(track[1], states[1][128])
        close(track[2], states[2][64])
        assert track[0].isnan().all()


def test_snapshots_of_final_states_need_no_others(kernel):
    """SGLang asks for the states at all chunks, and then takes the final ones from the pool."""
    x = draw(130)
    pool = x["pool"].clone()
    o, h = kernel.extend(
        x["q"], x["k"], x["v"], x["a"], x["b"], ssm_states=pool, cache_indices=torch.tensor([4]), A_log=x["A_log"],
        query_start_loc=torch.tensor([0, 130]), dt_bias=x["dt_bias"], beta_is_raw=True,
        return_intermediate_states=True, track_ssm_h_src=torch.tensor([], dtype=torch.int64),
    )  # fmt: skip
    own, after = recur(x, None, slice(0, 130), x["pool"][4])
    assert h is None
    close(o[0], own)
    close(pool[4], after[-1])


def test_prompts_of_a_graph(kernel):
    """Tables and rows have places for more requests and tokens; lengths are on the device alone."""
    x, slots = draw(200), torch.tensor([4, 2, -1, -1], dtype=torch.int32)
    pool, track = x["pool"].clone(), torch.full((4, HV, D, D), torch.nan)
    bounds = torch.tensor([0, 130, 197, 197, 197], dtype=torch.int32)
    o = kernel.extend(
        x["q"], x["k"], x["v"], x["a"], x["b"], ssm_states=pool, cache_indices=slots, query_start_loc=bounds,
        A_log=x["A_log"], dt_bias=x["dt_bias"], beta_is_raw=True, extend_seq_lens_cpu=None, track_state=track,
        track_chunk_idx=torch.tensor([2, 1, -1, -1], dtype=torch.int32), return_intermediate_states=False,
    )  # fmt: skip
    expected = x["pool"].clone()
    for n, (slot, place) in enumerate([(4, 128), (2, 64)]):
        own, after = recur(x, None, slice(bounds[n], bounds[n + 1]), x["pool"][slot])
        close(o[0, bounds[n] : bounds[n + 1]], own)
        close(track[n], after[place])
        expected[slot] = after[-1]
    close(pool, expected)
    assert track[2:].isnan().all()


@pytest.mark.parametrize("wanted", [False, True])
def test_snapshots_of_a_bfloat16_pool_are_float32(kernel, wanted):
    """They went to SGLang's own kernels; what is returned has the dtype of the pool."""
    x, slots = draw(130), torch.tensor([4], dtype=torch.int32)
    pool, track = x["pool"].bfloat16(), torch.full((1, HV, D, D), torch.nan)
    given = pool[4].float()
    found = kernel.extend(
        x["q"], x["k"], x["v"], x["a"], x["b"], ssm_states=pool, cache_indices=slots, A_log=x["A_log"],
        query_start_loc=torch.tensor([0, 130], dtype=torch.int32), dt_bias=x["dt_bias"], beta_is_raw=True,
        track_state=track, track_chunk_idx=torch.tensor([2]), extend_seq_lens_cpu=[130],
        return_intermediate_states=wanted,
    )  # fmt: skip
    _, after = recur(x, None, slice(0, 130), given)
    close(track[0], after[128])
    assert not wanted or found[1] is None


def test_prompts_of_given_decays(kernel):
    x, pool = draw(40), None
    pool = x["pool"].clone()
    decays, beta = gate(x, None)
    o = kernel.extend(
        x["q"], x["k"], x["v"], decays, beta, ssm_states=pool, cache_indices=torch.tensor([3]),
        query_start_loc=torch.tensor([0, 40]),
    )  # fmt: skip
    own, after = recur(x, None, slice(0, 40), x["pool"][3])
    close(o[0], own)
    close(pool[3], after[-1])


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("packed", [False, True])
def test_steps(kernel, lower_bound, packed):
    """The last row is padding of a captured batch."""
    x, slots, pool = draw(4), torch.tensor([3, 8, 1, -1], dtype=torch.int32), None
    pool = x["pool"].clone()
    common = {"A_log": x["A_log"], "dt_bias": x["dt_bias"], "ssm_states": pool, "cache_indices": slots}
    if packed:
        rows = torch.cat([x[n].reshape(4, -1) for n in ("q", "k", "v")], 1)
        a, b = x["a"].reshape(4, -1), x["b"].view(4, 1, HV)
        common |= {"scale": D**-0.5, "num_v_heads": HV, "head_v_dim": D}
        o = kernel.packed_decode(rows, a, b, lower_bound=lower_bound, **common)
    else:
        bounds = torch.arange(5, dtype=torch.int32)
        o = kernel.decode(
            x["q"], x["k"], x["v"], x["a"], x["b"], query_start_loc=bounds, lower_bound=lower_bound, **common
        )
    assert o.shape == (1, 4, HV, D)
    expected = x["pool"].clone()
    for n, slot in enumerate([3, 8, 1]):
        own, after = recur(x, lower_bound, slice(n, n + 1), x["pool"][slot])
        close(o[0, n : n + 1], own)
        expected[slot] = after[-1]
    close(pool, expected)


@pytest.mark.parametrize("method", ["extend", "decode"])
def test_rows_that_pad_a_batch_share_slot_0(kernel, method):
    """As SGLang pads eager batches (``MambaAttnBackendBase._forward_metadata``): the slot is left alone."""
    x, slots = draw(4), torch.tensor([3, 8, 0, 0], dtype=torch.int32)
    pool = x["pool"].clone()
    pool[0] = torch.nan
    lengths = [1, 3, 0, 0] if method == "extend" else [1, 1, 1, 1]
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    rows = x["q"], x["k"], x["v"], x["a"], x["b"]
    common = {"ssm_states": pool, "cache_indices": slots, "A_log": x["A_log"], "dt_bias": x["dt_bias"]}
    more = {"extend_seq_lens_cpu": lengths, "beta_is_raw": True} if method == "extend" else {}
    o = getattr(kernel, method)(*rows, query_start_loc=bounds, **common, **more)
    assert o.isfinite().all()
    assert pool[0].isnan().all()
    for n, slot in enumerate([3, 8]):
        own, after = recur(x, None, slice(bounds[n], bounds[n + 1]), x["pool"][slot])
        close(o[0, bounds[n] : bounds[n + 1]], own)
        close(pool[slot], after[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drafts_leave_the_pool_and_fill_the_buffer(kernel, dtype):
    x, slots = draw(6), torch.tensor([5, 2, -1], dtype=torch.int32)
    pool, buffer = x["pool"].clone(), torch.full((4, 3, HV, D, D), 7.0, dtype=dtype)
    o = kernel.target_verify(
        x["A_log"], x["dt_bias"], x["q"], x["k"], x["v"], x["a"], x["b"], ssm_states=pool, cache_indices=slots,
        query_start_loc=torch.tensor([0, 3, 6, 6], dtype=torch.int32), intermediate_states_buffer=buffer,
        intermediate_state_indices=torch.tensor([2, 0, 1], dtype=torch.int32), cache_steps=3,
        retrieve_parent_token=None, lower_bound=-5.0,
    )  # fmt: skip
    assert torch.equal(pool, x["pool"])
    assert (buffer[[1, 3]] == 7).all()
    for n, (slot, place) in enumerate([(5, 2), (2, 0)]):
        own, after = recur(x, -5.0, slice(3 * n, 3 * n + 3), x["pool"][slot])
        close(o[0, 3 * n : 3 * n + 3], own)
        torch.testing.assert_close(
            buffer[place], torch.stack(after[1:]).to(dtype), atol=2e-2 * (dtype != torch.float32) or 2e-5, rtol=1e-2
        )


def test_a_buffer_of_states_that_would_be_copied_is_refused(kernel):
    """The states went to the copy, and were lost."""
    x, buffer = draw(3), torch.zeros(4, 5, HV, D, D)[:, :3]
    with pytest.raises(RuntimeError, match="view size"):
        kernel.target_verify(
            x["A_log"], x["dt_bias"], x["q"], x["k"], x["v"], x["a"], x["b"], ssm_states=x["pool"],
            cache_indices=torch.tensor([5]), query_start_loc=torch.tensor([0, 3]), intermediate_states_buffer=buffer,
            intermediate_state_indices=torch.tensor([2]), cache_steps=3, retrieve_parent_token=None, lower_bound=-5.0,
        )  # fmt: skip


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("method", ["extend", "decode", "verify"])
def test_sglangs_own_backend_calls_it(monkeypatch, method, lower_bound):
    """From the rows of a layer; all but convolutions is SGLang's own code, and takes the class as others do."""
    own = sglang_backend.module(kda_core_sglang.HOME, monkeypatch)
    assert kda_core_sglang.install()
    length = {"extend": 40, "decode": 1, "verify": 3}[method]
    x, slots = draw(3 * length), torch.tensor([5, 2, 7], dtype=torch.int32)
    pool, buffer, bounds = x["pool"].clone(), torch.zeros(4, 3, HV, D, D), torch.arange(4, dtype=torch.int32) * length
    backend = sglang_backend.Backend(own, x, pool, slots, bounds, lower_bound, buffer)
    assert type(backend.backend.kernel_dispatcher.triton_kernel) is home.TritonKDAKernel is not STOCK[0]
    places = torch.tensor([2, 0, 1], dtype=torch.int32)
    o = backend.verify(3, places) if method == "verify" else getattr(backend, method)()
    for n, (slot, place) in enumerate(zip(slots.tolist(), places.tolist(), strict=True)):
        rows = slice(n * length, (n + 1) * length)
        outputs, after = recur(x, lower_bound, rows, x["pool"][slot])
        close(o[0, rows], outputs)
        close(pool[slot], x["pool"][slot] if method == "verify" else after[-1])
        if method == "verify":
            close(buffer[place], torch.stack(after[1:]))


@pytest.mark.parametrize("method", ["extend", "packed_decode", "target_verify"])
def test_what_kda_core_cannot_say_goes_to_sglangs_own_kernels(kernel, method, monkeypatch):
    seen = []
    monkeypatch.setattr(STOCK[0], method, lambda self, *a, **kw: seen.append(kw) or "stock")
    x = draw(4)
    pool, slots, bounds = x["pool"], torch.tensor([1, 2]), torch.tensor([0, 2, 4])
    gates = {"A_log": x["A_log"], "dt_bias": x["dt_bias"]}
    common = {"ssm_states": pool, "cache_indices": slots, "query_start_loc": bounds}
    if method == "extend":
        wanted = {"return_intermediate_states": True, "layer_id": 3}
        rows = x["q"], x["k"], x["v"], x["a"], x["b"]
        assert kernel.extend(*rows, **gates, **common, **wanted) == "stock"
        assert [s["layer_id"] for s in seen] == [3]
    elif method == "packed_decode":
        ring = {"replayssm_d": pool, "num_v_heads": HV, "head_v_dim": D, "scale": 1.0}
        assert kernel.packed_decode(x["a"], x["a"], x["b"], **gates, **common, **ring) == "stock"
        assert seen[0]["replayssm_d"] is pool
    else:
        buffers = {"intermediate_states_buffer": pool[:, None], "intermediate_state_indices": slots, "cache_steps": 1}
        rows = x["A_log"], x["dt_bias"], x["q"], x["k"], x["v"], x["a"], x["b"]
        assert kernel.target_verify(*rows, **common, **buffers, retrieve_parent_token=slots) == "stock"
        assert kernel.target_verify(*rows, **common, **buffers, retrieve_parent_token=None, cache_ring=True) == "stock"


def test_the_variable_switches_it_off(monkeypatch):
    monkeypatch.setenv("KDA_SGLANG", "0")
    assert not kda_core_sglang.install()
    assert home.TritonKDAKernel is STOCK[0]


def test_another_version_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "sglang-0.5.22.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.22\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnsupportedStack, match=r"sglang 0\.5\.22 is installed; pip install 'sglang==0\.5\.23'"):
        kda_core_sglang.install()
    assert home.TritonKDAKernel is STOCK[0]


def test_a_class_that_another_plugin_has_replaced_is_left_to_it(monkeypatch):
    """SGLang replaces a class once: ``install`` would say that ours is in use."""
    before = dict(HookRegistry._hooks)
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched | {kda_core_sglang.TARGET})
    with pytest.raises(UnsupportedStack, match=r"another plugin has replaced .*TritonKDAKernel: install"):
        kda_core_sglang.install()
    assert before == HookRegistry._hooks
    assert home.TritonKDAKernel is STOCK[0]


def test_sglang_runs_the_plugin():
    """SGLang applies hooks itself, when all plugins have run."""
    from sglang.srt import plugins

    assert plugins.load_plugins_by_group("sglang.srt.plugins")["kda_core"][0] is kda_core_sglang.install
    plugins.load_plugins()
    assert home.TritonKDAKernel is not STOCK[0]


@pytest.mark.parametrize("page", ["README.md", "docs/integrations/sglang.md"])
def test_the_line_of_the_page(page):
    exec(pages.one_line(page, "kda_core_sglang"), {})
    assert home.TritonKDAKernel is not STOCK[0]
