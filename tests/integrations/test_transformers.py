"""transformers' KDA models on kda_core: the logits, gradients and text of transformers' own torch code."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import installed
import pages
import pytest
import torch
from environments import run
from toys import Watcher

installed.need_backend("cpu")
installed.need_package("kda_core_transformers", "./integrations/transformers")

import kda_core_transformers
from hf_models import MODELS, classes_of, config_of, module_of

from kda_core.errors import UnsupportedStack

pytestmark = [pytest.mark.end_to_end, pytest.mark.filterwarnings("ignore")]

WITH_TEXT = [name for name in MODELS if len(classes_of(name)) > 1]
OWN = Path(__file__).with_name("transformers_own.py")


@pytest.fixture(autouse=True)
def switched_off_at_the_end():
    yield
    kda_core_transformers.uninstall()


@pytest.fixture(autouse=True)
def their_torch_code(monkeypatch: pytest.MonkeyPatch):
    """Where fla or causal_conv1d is installed transformers calls their GPU kernels, with tensors on a CPU, too."""
    if find_spec("fla") or find_spec("causal_conv1d"):
        for model in MODELS:
            for name in (*kda_core_transformers.OPERATORS, kda_core_transformers.UPDATE):
                monkeypatch.setattr(module_of(model), name, inspect.unwrap(getattr(module_of(model), name)))


def functions(model: str) -> list[object]:
    return [getattr(module_of(model), name) for name in kda_core_transformers.OPERATORS]


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


@pytest.fixture
def model(name):
    """A small model of each architecture; the first output is its logits, or its hidden states without a head."""
    torch.manual_seed(0)
    return classes_of(name)[-1](config_of(name)).eval()


@pytest.fixture
def text():
    return torch.randint(3, 256, (2, 90), generator=torch.Generator().manual_seed(1))


def apart(a, b) -> float:
    return float((a - b).norm() / b.norm())


def step(model, text):
    """The outputs and, in one row, the gradients of a training step."""
    model.zero_grad()
    result = model(text, use_cache=False)[0]
    result.square().mean().backward()
    return result.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_training_steps_agree(model, text):
    expected = step(model, text)
    assert expected[1].norm() > 1e-3
    assert kda_core_transformers.install()
    assert max(map(apart, step(model, text), expected)) < 5e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["silu", None, "gelu"])
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_the_convolution_of_a_token(dtype, activation, tokens, bias):
    """Results and states are transformers' own; calls that are not served are transformers' own, too."""
    module = module_of("kimi_linear")
    x, state, weight = torch.randn(3, 20, tokens), torch.randn(3, 20, 4), torch.randn(20, 4)
    given = (x.to(dtype), weight.to(dtype), torch.randn(20, dtype=dtype) if bias else None, activation)
    found = []
    for install in (False, True):
        if install:
            assert kda_core_transformers.install("kimi_linear")
        own = state.to(dtype, copy=True)
        with torch.no_grad():
            y = module.causal_conv1d_update(given[0], own, weight=given[1], bias=given[2], activation=given[3])
        assert y.dtype == dtype
        found.append((y, own))
    kda_core_transformers.uninstall()
    assert "kda_core" not in module.causal_conv1d_update.__code__.co_filename
    (expected, expected_state), (y, advanced) = found
    assert torch.equal(advanced, expected_state)
    limits = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}
    assert apart(y.double(), expected.double()) < limits[dtype]
    if activation != "gelu" and tokens == 1:
        wide = torch.cat([state.to(dtype), given[0]], -1)[..., 1:].double()
        exact = (wide * given[1].double()).sum(-1, keepdim=True) + (given[2].double()[:, None] if bias else 0)
        exact = torch.nn.functional.silu(exact) if activation else exact
        assert apart(y.double(), exact) < (4e-3 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "bound"), [("kimi_linear", None), ("glm5_next", None), ("glm5_next", -5.0)])
def test_the_decay_of_a_gate(name, bound, dtype):
    """Values and gradients are transformers' own; those of large gates are finite, where transformers' are NaN."""
    (kind,) = {*vars(module_of(name))}.intersection(kda_core_transformers.GATES)
    config = SimpleNamespace(hidden_size=24, linear_num_heads=3, linear_head_dim=8, linear_lower_bound=bound)
    gate = getattr(module_of(name), kind)(config)
    for p in gate.parameters():
        torch.nn.init.normal_(p, std=0.5)
    gate.to(dtype)
    stock, x, given = type(gate).forward, torch.randn(2, 5, 24), torch.randn(2, 5, 3, 8)

    def decays(scale):
        inputs = (scale * x).to(dtype).requires_grad_()
        decay = gate(inputs)
        return [decay, *torch.autograd.grad(decay, [inputs, *gate.parameters()], given)]

    expected, large = decays(1), decays(1e4)
    assert kda_core_transformers.install(name)
    for own, theirs in zip(decays(1), expected, strict=True):
        assert own.dtype == theirs.dtype
        assert apart(own.float(), theirs.float()) < (1e-6 if dtype == torch.float32 else 1e-2)
    assert large[1].isnan().any() == (bound is None)
    assert all(t.isfinite().all() for t in decays(1e4))
    kda_core_transformers.uninstall()
    assert type(gate).forward is stock


def test_a_token_advances_the_caches_state_in_place():
    """Its copy over the cache is then no copy; with gradients the state is not written."""
    assert kda_core_transformers.install("kimi_linear")
    recurrent = module_of("kimi_linear").recurrent_kimi_delta_attention
    q, beta = torch.randn(2, 1, 2, 16), torch.rand(2, 1, 2)
    state = torch.randn(2, 2, 16, 16)
    before = state.clone()
    options = {"g": -q.abs(), "beta": beta, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    o, after = recurrent(q, q, q, initial_state=state, **options)
    assert torch.equal(state, before)
    with torch.no_grad():
        again, last = recurrent(q, q, q, initial_state=state, **options)
        assert last is state
        assert torch.equal(again, o)
        assert torch.equal(last, after)
        assert recurrent(q, q, q, initial_state=None, **options)[1] is not None


def test_a_prompt_in_pieces(model, text):
    """Several tokens on top of a cache, then single ones, against all at once on transformers' code."""
    with torch.no_grad():
        expected = model(text)[0]
        assert kda_core_transformers.install()
        cache, pieces = None, []
        for piece in text.split([70, 17, 1, 1, 1], dim=1):
            result = model(piece, past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            pieces.append(result[0])
    assert apart(torch.cat(pieces, dim=1), expected) < 5e-6


def test_bfloat16(model, text):
    """As far from float32 as transformers' code, which computes in it."""
    with torch.no_grad():
        exact = model(text)[0]
        model.bfloat16()
        expected = apart(model(text)[0].float(), exact)
        assert kda_core_transformers.install()
        assert apart(model(text)[0].float(), exact) < 1.3 * expected < 0.15


@pytest.mark.parametrize(
    "way",
    [
        {"do_sample": False},
        {"do_sample": False, "use_cache": False},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": True, "num_return_sequences": 2},
        {"do_sample": True, "num_beams": 2},
    ],
    ids=lambda way: "-".join(f"{name}={value}" for name, value in way.items()),
)
@pytest.mark.parametrize("name", WITH_TEXT, indirect=True)
def test_text_is_the_same(model, text, way):
    """The ways of transformers' own tests of text; the first row is padded on the left."""
    text[0, :13] = 0

    def write():
        torch.manual_seed(2)
        return model.generate(text, attention_mask=(text > 0).long(), max_new_tokens=8, min_new_tokens=8, **way)

    expected = write()
    assert kda_core_transformers.install()
    assert torch.equal(write(), expected)


def test_layers_call_kda_core(model, text, name):
    """Both linear layers, one token at a time when they write."""
    assert kda_core_transformers.install(name)
    with Watcher() as requests, torch.no_grad():
        cache = model(text, use_cache=True).past_key_values
        model(text[:, :1], past_key_values=cache, use_cache=True)
    assert [r.op for r in requests] == ["chunk_kda"] * 2 + ["fused_recurrent_kda"] * 2


@pytest.mark.parametrize("bounds", ["cu_seqlens", "cu_seq_lens_q"])
def test_packed_documents_share_no_state(bounds):
    """The name of the boundaries since transformers 5.23, and the one before."""
    torch.manual_seed(3)
    kda_core_transformers.install("kimi_linear")
    chunk, _ = functions("kimi_linear")
    q, k, v = (torch.randn(1, 50, 2, 16) for _ in range(3))
    g, beta = -torch.rand(1, 50, 2, 16), torch.rand(1, 50, 2)
    flags = {"output_final_state": False, "use_qk_l2norm_in_kernel": True, "an_argument_of_the_model": 1}
    o, _ = chunk(q, k, v, g=g, beta=beta, **flags, **{bounds: torch.tensor([0, 20, 50], dtype=torch.int32)})
    parts = zip(*(x.split([20, 30], dim=1) for x in (o, q, k, v, g, beta)), strict=True)
    for own, a, b, c, decay, rate in parts:
        alone, _ = chunk(a, b, c, g=decay, beta=rate, **flags)
        torch.testing.assert_close(own, alone)


def test_packed_documents_without_boundaries_are_refused():
    """As transformers' collator gives them with ``return_seq_idx`` alone: states would go on across documents."""
    assert kda_core_transformers.install("kimi_linear")
    q, rate, documents = torch.randn(1, 50, 2, 16), torch.rand(1, 50, 2), torch.arange(50)[None] // 20
    chunk, _ = functions("kimi_linear")
    with pytest.raises(ValueError, match="seq_idx: packed documents need their boundaries, too"):
        chunk(q, q, q, g=-q.abs(), beta=rate, seq_idx=documents)
    bounds = torch.tensor([0, 20, 40, 50], dtype=torch.int32)
    o, _ = chunk(q, q, q, g=-q.abs(), beta=rate, seq_idx=documents, cu_seq_lens_q=bounds)
    torch.testing.assert_close(o[:, 20:40], chunk(*[q[:, 20:40]] * 3, g=-q[:, 20:40].abs(), beta=rate[:, 20:40])[0])


def test_every_function_comes_back(name):
    before = functions(name)
    assert kda_core_transformers.install()
    assert kda_core_transformers.install(name)
    for function, operator, stock in zip(
        functions(name), kda_core_transformers.OPERATORS.values(), before, strict=True
    ):
        assert function is not stock
        assert inspect.getclosurevars(function).nonlocals["operator"] is operator
    kda_core_transformers.uninstall()
    assert all(now is stock for now, stock in zip(functions(name), before, strict=True))


def test_a_module_that_has_transformers_functions_again_is_bound_anew():
    """As after a reload: ``install`` said that its functions were in use, and they were not."""
    stock = functions("kimi_linear")
    assert kda_core_transformers.install("kimi_linear")
    for name, function in zip(kda_core_transformers.OPERATORS, stock, strict=True):
        setattr(module_of("kimi_linear"), name, function)
    assert kda_core_transformers.install("kimi_linear")
    assert not any(now is own for now, own in zip(functions("kimi_linear"), stock, strict=True))
    kda_core_transformers.uninstall()
    assert functions("kimi_linear") == stock


def test_what_is_not_served_is_refused_before_anything_changes(tmp_path, monkeypatch):
    before = functions("kimi_linear")
    with pytest.raises(UnsupportedStack, match=r"model 'qwen3_next' is not served; .* kimi_linear, glm5_next"):
        kda_core_transformers.install("kimi_linear", "qwen3_next")
    monkeypatch.setenv("KDA_TRANSFORMERS", "0")
    assert not kda_core_transformers.install()
    monkeypatch.delenv("KDA_TRANSFORMERS")
    dist = tmp_path / "transformers-5.25.0.dist-info"
    dist.mkdir()
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.25.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnsupportedStack, match=r"transformers 5.25.0 is installed; pip install 'transformers<5.25"):
        kda_core_transformers.install()
    assert functions("kimi_linear") == before


def test_a_function_that_is_missing_leaves_all_as_they_were(monkeypatch):
    before = functions("kimi_linear")
    with monkeypatch.context() as patched:
        patched.delattr(module_of("glm5_next"), "recurrent_kimi_delta_attention")
        with pytest.raises(AttributeError, match="recurrent_kimi_delta_attention"):
            kda_core_transformers.install("kimi_linear", "glm5_next")
    assert functions("kimi_linear") == before
    assert not kda_core_transformers._bound


def test_their_own_tests_of_models_give_what_they_give_without_kda_core(tmp_path):
    """Saving and loading, embeddings, checkpointing, outputs, attention's implementations and more, test by test."""
    if "TRANSFORMERS_TESTS" not in os.environ:
        pytest.skip("transformers' own tests are not in its wheel: make integrations-test fetches them")

    def outcomes(on: str) -> dict[str, list[str]]:
        report, variables = tmp_path / f"own{on}.xml", {"KDA_OWN": on, "HF_HUB_OFFLINE": "1"}
        options = ("-q", "--noconftest", "-o", "addopts=", "-p", "no:cacheprovider", f"--junitxml={report}")
        command, found = [sys.executable, "-m", "pytest", *options, OWN], {}
        done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
        assert done.returncode in (0, 1), done.stdout + done.stderr
        for case in ElementTree.parse(report).iter("testcase"):
            marks = [part.tag for part in case if part.tag in ("skipped", "failure", "error")]
            found.setdefault(f"{case.get('classname')}.{case.get('name')}", []).extend(marks or ["passed"])
        return found

    with ThreadPoolExecutor() as pool:
        stock, ours = pool.map(outcomes, ("", "1"))
    assert ours == stock
    assert list(ours.values()).count(["passed"]) > 70 * len(MODELS)


@pytest.mark.parametrize("page", ["README.md", "docs/integrations/transformers.md"])
def test_the_line_of_the_page(page):
    before = functions("kimi_linear")
    exec(pages.one_line(page, "kda_core_transformers"), {})
    assert all(now is not stock for now, stock in zip(functions("kimi_linear"), before, strict=True))


def test_the_example():
    options = ("--tokens=20", "--repeats=1", "--device=cpu")
    # "without fla", as it asks for.
    code = "import runpy, sys; sys.modules['fla'] = None; sys.argv.pop(0); runpy.run_path(sys.argv[0], {}, '__main__')"
    shown = run(sys.executable, "-c", code, pages.ROOT / "examples/kimi_linear.py", *options, timeout=300)
    for action in ("training step", "prefill", "32 tokens"):
        assert action in shown
    assert "0.0e+00" in shown  # the same text
