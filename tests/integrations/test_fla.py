"""fla's operators, layer and models on kda_core, on a CPU, where fla's own kernels do not run."""

from __future__ import annotations

from types import SimpleNamespace

import installed
import layer
import pages
import pytest
import torch
import torch.nn.functional as F

installed.need_backend("cpu")
installed.need_package("kda_core_fla", "./integrations/fla")

import kda_core_fla
from fla import backends
from fla.layers.kda import KimiDeltaAttention
from fla.models.kda import KDAConfig, KDAForCausalLM
from fla.modules import FusedLinearCrossEntropyLoss, GatedMLP, LayerNorm, RMSNorm, ShortConvolution
from fla.modules.fused_norm_gate import FusedRMSNormGated, FusedRMSNormSwishGateLinear
from fla.modules.norm.layernorm import RMSNormLinear
from fla.ops.kda import chunk_kda, fused_recurrent_kda
from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
from fla.ops.kda.gate import fused_kda_gate, naive_kda_gate
from fla.ops.kda.naive import naive_recurrent_kda

from kda_core import nn
from kda_core._plugins import registry
from kda_core.errors import UnsupportedStack
from kda_core.hookspecs import hookimpl

pytestmark = [pytest.mark.end_to_end, pytest.mark.filterwarnings("ignore")]


def entries() -> dict[object, dict[str, object]]:
    """The backends in every registry of fla."""
    every = {**backends._function_registries, **backends._operation_registries}
    return {key: dict(registry._backends) for key, registry in every.items()}


@pytest.fixture(autouse=True)
def adapter():
    torch.manual_seed(0)
    assert kda_core_fla.install()
    yield
    kda_core_fla.uninstall()


def draw(B=2, T=70, H=2, HV=4, K=16, V=32):
    q, k = (F.normalize(torch.randn(B, T, H, K), dim=-1) for _ in range(2))
    v, g, beta = torch.randn(B, T, HV, V), -torch.rand(B, T, HV, K), torch.rand(B, T, HV)
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta}


def close(actual, expected, tolerance=2e-6):
    assert actual.dtype == expected.dtype
    assert float((actual - expected).norm() / expected.norm()) < tolerance


def small_model(**changes) -> KDAForCausalLM:
    config = {"hidden_size": 64, "head_dim": 16, "num_heads": 2, "num_v_heads": 4, "num_hidden_layers": 2}
    return KDAForCausalLM(KDAConfig(**{**config, "vocab_size": 99, "intermediate_size": 96, **changes}))


def test_registries_are_as_they_were():
    kda_core_fla.uninstall()
    before = entries()
    assert kda_core_fla.install()
    assert kda_core_fla.install()
    assert entries() != before
    kda_core_fla.uninstall()
    after = entries()
    assert after.keys() == before.keys()
    for key, held in before.items():
        assert after[key].keys() == held.keys()
        assert all(after[key][name] is backend for name, backend in held.items())


def test_kda_core_comes_before_flash_kda():
    first = backends._function_registries[backends.unwrap(chunk_kda)]._get_sorted_backends()[0]
    assert first.backend_type == "kda_core"
    assert first.priority < 3


def test_the_variable_switches_it_off(monkeypatch):
    monkeypatch.setenv("KDA_FLA", "0")
    with pytest.raises(Exception, match="active drivers"):  # fla's own kernels
        chunk_kda(**draw())
    kda_core_fla.uninstall()
    before = entries()
    assert not kda_core_fla.install()
    assert entries() == before


def test_another_version_is_refused(tmp_path, monkeypatch):
    kda_core_fla.uninstall()
    before = entries()
    (tmp_path / "fla_core-0.7.0.dist-info").mkdir()
    (tmp_path / "fla_core-0.7.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: fla-core\nVersion: 0.7.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnsupportedStack, match=r"fla-core 0.7.0 is installed; pip install 'fla-core==0.6.0'"):
        kda_core_fla.install()
    monkeypatch.undo()
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    with pytest.raises(UnsupportedStack, match="FLA_DISABLE_BACKEND_DISPATCH=1"):
        kda_core_fla.install()
    assert entries() == before


def test_operators_agree_with_flas_reference():
    call = draw()
    h0 = torch.randn(2, 4, 16, 32)
    tensors = [t.requires_grad_() for t in (*call.values(), h0)]
    expected = naive_recurrent_kda(**call, initial_state=h0, output_final_state=True)
    given = [torch.randn_like(t) for t in expected]
    gradients = torch.autograd.grad(expected, tensors, given)
    found = chunk_kda(**call, initial_state=h0, output_final_state=True)
    for a, b in zip((*found, *torch.autograd.grad(found, tensors, given)), (*expected, *gradients), strict=True):
        close(a, b, 1e-5)
    for a, b in zip(fused_recurrent_kda(**call, initial_state=h0, output_final_state=True), expected, strict=True):
        close(a, b)


def test_a_recurrent_call_as_fla_reads_it():
    """In place by default, flags without effect ignored, other states returned in float32."""
    call = {name: t[:, :1].contiguous() for name, t in draw().items()}
    state = torch.randn(2, 4, 16, 32)
    expected = fused_recurrent_kda(**call, initial_state=state, output_final_state=True)
    own = state.clone()
    o, final = fused_recurrent_kda_fwd(**call, initial_state=own, allow_neg_eigval=True, A_log=torch.ones(4))
    assert final is own
    close(o, expected[0])
    close(own, expected[1])
    _, final = fused_recurrent_kda(**call, initial_state=state.bfloat16(), output_final_state=True)
    assert final.dtype == torch.float32
    pool = torch.cat([torch.zeros(1, 4, 16, 32), state.flip(0)])
    o, final = fused_recurrent_kda_fwd(**call, initial_state=pool, ssm_state_indices=torch.tensor([2, 1]))
    assert final is pool
    close(o, expected[0])
    close(pool[1:].flip(0), expected[1])
    with pytest.raises(ValueError, match="in place only"):
        fused_recurrent_kda_fwd(
            **call, initial_state=pool, ssm_state_indices=torch.tensor([2, 1]), inplace_final_state=False
        )


def test_states_of_chunks_have_the_dtype_of_k():
    call = {name: t.bfloat16() for name, t in draw().items()}
    with torch.inference_mode():
        _, _, h = chunk_kda(**call, return_intermediate_states=True)
    assert (h.dtype, h.shape) == (torch.bfloat16, (2, 2, 4, 16, 32))


def test_the_gate():
    g, A_log, bias = torch.randn(2, 9, 4, 16), torch.randn(1, 1, 4, 1), torch.randn(64)
    tensors = [t.requires_grad_() for t in (g, A_log, bias)]
    found, expected = (f(g, A_log, dt_bias=bias) for f in (fused_kda_gate, naive_kda_gate))
    close(found, expected)
    assert torch.equal(fused_kda_gate(g, A_log, bias, None, torch.bfloat16), found.bfloat16())
    given = torch.randn_like(g)
    for a, b in zip(*(torch.autograd.grad(y, tensors, given) for y in (found, expected)), strict=True):
        close(a, b)


def test_refused_calls_go_on_to_fla():
    """Judged by meta tensors, which are on no CPU."""
    backend = backends._function_registries[backends.unwrap(chunk_kda)]._backends["kda_core"]
    call = {name: t.to("meta") for name, t in draw().items()}
    assert backend.verify("chunk_kda", **call)[0]
    assert backend.verify("chunk_kda", **call, use_graph=True, a_name_that_fla_does_not_know=1)[0]
    for name, change in {
        "transpose_state_layout": {"transpose_state_layout": True},
        "chunk_size": {"chunk_size": 16},
        "beta": {"beta": call["v"]},
    }.items():
        served, reason = backend.verify("chunk_kda", **{**call, **change})
        assert not served
        assert name in reason
    assert not backend.verify("chunk_kda_bwd_wy_dqkg_fused", **call)[0]
    with pytest.raises(ValueError, match="must be either 32 or 64 for KDA"):  # fla's words
        chunk_kda(**draw(), chunk_size=16)
    with pytest.raises(ValueError, match="q: expected"):  # no other kernel can serve it: the error of kda_core
        chunk_kda(**{**draw(), "q": torch.randn(2, 70, 16)})


@pytest.mark.parametrize("case", ["RMSNorm", "LayerNorm", "residual", "gated", "swish", "powlu", "entropy"])
def test_modules_agree_with_torch(case):
    """Values and gradients; an epsilon that counts."""
    x, other = (torch.randn(3, 5, 16, requires_grad=True) for _ in range(2))
    labels = torch.randint(0, 16, (15,)).index_fill(0, torch.tensor([3]), -100)
    if case == "entropy":
        weight = torch.randn(16, 16, requires_grad=True)
        found = FusedLinearCrossEntropyLoss(label_smoothing=0.1)(x.view(15, 16), labels, weight)
        expected = F.cross_entropy(x.view(15, 16) @ weight.T, labels, label_smoothing=0.1)
        compare(found, expected, (x, weight))
        return
    if case in ("swish", "powlu"):
        for fuse in (True, False):
            mlp = GatedMLP(16, intermediate_size=24, hidden_act=case, fuse_swiglu=fuse)
            gate = mlp.gate_proj(x)
            above = gate.clamp(min=1e-9)
            powered = torch.where(gate > 0, above ** (3 / (above.sqrt() + 1)), gate) * gate.sigmoid()
            expected = mlp.down_proj((F.silu(gate) if case == "swish" else powered) * mlp.up_proj(x))
            compare(mlp(x), expected, (x, *mlp.parameters()))
        return
    norm = {"LayerNorm": LayerNorm, "gated": FusedRMSNormGated}.get(case, RMSNorm)(16, eps=0.3)
    torch.nn.init.normal_(norm.weight)
    if case == "gated":
        compare(norm(x, other), F.rms_norm(x, (16,), norm.weight, 0.3) * F.silu(other), (x, other, norm.weight))
    elif case == "LayerNorm":
        compare(norm(x), F.layer_norm(x, (16,), norm.weight, norm.bias, 0.3), (x, norm.weight))
    elif case == "residual":
        y, total = norm(x, other, True)
        expected = torch.cat([F.rms_norm(x + other, (16,), norm.weight, 0.3), x + other])
        compare(torch.cat([y, total]), expected, (x, other, norm.weight))
    else:
        compare(norm(x), F.rms_norm(x, (16,), norm.weight, 0.3), (x, norm.weight))


@pytest.mark.parametrize("kind", [RMSNormLinear, FusedRMSNormSwishGateLinear])
def test_a_norm_before_a_linear_layer_agrees_with_torch(kind):
    """fla computes the norm's result again for the gradient of the linear weight."""
    norm = kind(16, eps=0.3)
    torch.nn.init.normal_(norm.weight)
    x, gate, weight = (torch.randn(n, 16, requires_grad=True) for n in (5, 5, 8))
    gates = () if kind is RMSNormLinear else (gate,)
    y = F.rms_norm(x, (16,), norm.weight, 0.3)
    expected = F.linear(y * F.silu(gate) if gates else y, weight)
    compare(norm(x, *gates, weight, None), expected, (x, *gates, weight, norm.weight))


def compare(found, expected, tensors):
    close(found, expected)
    given = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad(y, tensors, given) for y in (found, expected)), strict=True):
        close(a, b)


@pytest.mark.parametrize("bias", [False, True])
def test_the_convolution_agrees_with_torch(bias):
    conv = ShortConvolution(24, 4, bias=bias, activation="silu")
    x = torch.randn(2, 9, 24, requires_grad=True)
    found, state = conv(x, output_final_state=True)
    plain = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), conv.weight, conv.bias, groups=24)
    compare(found, F.silu(plain).transpose(1, 2), (x, *conv.parameters()))
    assert torch.equal(state, x[:, -4:].transpose(1, 2))
    with torch.no_grad():  # in pieces, packed, and one token at a time, in place
        first, state = conv(x[:, :5], output_final_state=True)
        rest = [first]
        for t in range(5, 9):
            y, written = conv(x[:, t : t + 1], cache=state, output_final_state=True)
            assert written is state
            rest.append(y)
        close(torch.cat(rest, 1), found.detach())
        assert torch.equal(state, x[:, -4:].transpose(1, 2))
        added = torch.randn(2, 9, 24)
        close(conv(x, residual=added)[0], found.detach() + added)
        before = x[:, 4:8].transpose(1, 2).contiguous()
        close(conv(x[:, 8:], residual=added[:, 8:], cache=before)[0], found[:, 8:].detach() + added[:, 8:])
        packed, states = conv(x.view(1, 18, 24), cu_seqlens=torch.tensor([0, 9, 18]), output_final_state=True)
        close(packed.view(2, 9, 24), found.detach())
        assert torch.equal(states, state)


def test_a_process_group_is_refused_on_a_cpu():
    with pytest.raises(NotImplementedError, match="process_group"):
        FusedLinearCrossEntropyLoss(process_group=SimpleNamespace(size=lambda: 1))(
            torch.randn(3, 4), torch.zeros(3).long(), torch.randn(5, 4)
        )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"safe_gate": True, "lower_bound": -5.0},
        {"allow_neg_eigval": True},
        {"use_short_conv": False},
        {"num_v_heads": 2},
        {"fuse_swiglu": False, "fuse_norm": False},
        {"hidden_act": "powlu", "fuse_swiglu": False},
        {"attnres_block_size": 2},
    ],
    ids=lambda changes: "-".join(changes) or "defaults",
)
def test_a_model_trains_and_writes(changes):
    """Packed documents have the gradients of separate ones; a prompt in pieces, the logits of the whole."""
    model = small_model(**changes)
    for name, p in model.named_parameters():
        if "res_proj" in name:  # zero at first
            torch.nn.init.normal_(p)
    text = torch.randint(3, 99, (1, 110))
    loss = model(text, labels=text).loss
    loss.backward()
    # Before the first layer there is one residual, and nothing to choose.
    used = [p for n, p in model.named_parameters() if "layers.0.attn_res" not in n and not n.startswith("lm_head")]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in (*used, model.lm_head.weight))
    model.zero_grad()
    # No sum of squares: behind a norm that is the same for all inputs, and its gradients are rounding.
    given = torch.randn(1, 110, 64)
    model.model(text, cu_seqlens=torch.tensor([0, 40, 110])).last_hidden_state.backward(given)
    together = [p.grad for p in used]
    model.zero_grad()
    for part, grad in zip(text.split([40, 70], 1), given.split([40, 70], 1), strict=True):
        model.model(part).last_hidden_state.backward(grad)
    for a, b in zip(together, (p.grad for p in used), strict=True):
        close(a, b, 1e-5)
    model.eval()
    with torch.no_grad():
        whole, cache, pieces = model(text).logits, None, []
        for piece in text.split([80, 27, 1, 1, 1], 1):
            result = model(piece, past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            pieces.append(result.logits)
        close(torch.cat(pieces, 1), whole, 1e-5)
        padded = torch.cat([torch.zeros(1, 7, dtype=torch.long), text], 1)
        close(model(padded, attention_mask=(padded > 0).long()).logits[:, 7:], whole, 1e-5)
    written = model.generate(text, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert torch.equal(written[:, 110], whole[:, -1].argmax(-1))


@pytest.mark.parametrize("act", ["swish", "powlu"])
def test_a_model_trains_under_autocast(act):
    """fla's own linear functions behind a gate fail here: they know the autocast of GPUs alone."""
    model, text = small_model(hidden_act=act), torch.randint(3, 99, (1, 70))
    model(text, labels=text).loss.backward()
    expected = model.model.layers[0].mlp.down_proj.weight.grad
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(text, labels=text).loss
    loss.backward()
    close(model.model.layers[0].mlp.down_proj.weight.grad, expected, 0.05)


def test_layers_call_kda_core():
    """A prompt in chunks, then tokens by the recurrence."""
    called = []

    class Watch:
        @hookimpl(wrapper=True)
        def kda_core_chunk_forward(self, request):
            called.append(request.op)
            return (yield)

        @hookimpl(wrapper=True)
        def kda_core_recurrent_forward(self, request):
            called.append(request.op)
            return (yield)

    model, watch = small_model().eval(), Watch()
    registry.add_wrapper(watch)
    model.generate(torch.randint(3, 99, (1, 80)), max_new_tokens=3, min_new_tokens=3, do_sample=False)
    registry.remove_wrapper(watch)
    assert called == ["chunk_kda"] * 2 + ["fused_recurrent_kda"] * 4


def test_the_layer_of_the_benchmark_has_the_same_results(monkeypatch):
    ours = layer.KimiDeltaAttention(24, head_dim=8, num_heads=3)
    x = torch.randn(2, 70, 24)
    monkeypatch.setenv("KDA_FLA", "1")  # restored at the end
    first, ways = layer.runs_of(ours, x), layer.without_and_with_the_adapter(layer.runs_of(layer.fla_layer(ours), x))
    for _ in range(2):
        with pytest.raises(Exception, match="active drivers"):  # fla's own kernels
            ways["fla"]["forward"]()
        close(ways["fla, adapter"]["forward"](), first["forward"](), 1e-5)
        close(ways["fla, adapter"]["training step"]()[0], first["training step"]()[0], 1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_v_heads": 4, "expand_v": 2, "conv_bias": True, "conv_size": 3},
        {"safe_gate": True, "lower_bound": -3.0, "allow_neg_eigval": True},
        {"use_short_conv": False, "norm_eps": 0.01},
        {"mode": "fused_recurrent"},
    ],
    ids=str,
)
def test_a_layer_of_fla_computes_what_ours_does(options):
    """Random weights of theirs go to ours and back; outputs, gradients and padded rows are the same."""
    sizes = {"hidden_size": 32, "head_dim": 8, "num_heads": 2, **options}
    theirs, ours, back = KimiDeltaAttention(**sizes), nn.KimiDeltaAttention(**sizes), KimiDeltaAttention(**sizes)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours.load_state_dict(theirs.state_dict())
    back.load_state_dict(ours.state_dict())
    assert all(torch.equal(t, theirs.state_dict()[name]) for name, t in back.state_dict().items())
    x, given = torch.randn(2, 70, 32), torch.randn(2, 70, 32)
    results = ours(x), theirs(x)[0]
    close(*results)
    parameters = dict(ours.named_parameters()), dict(theirs.named_parameters())
    own, stock = (torch.autograd.grad(y, p.values(), given) for y, p in zip(results, parameters, strict=True))
    stock = dict(zip(parameters[1], stock, strict=True))
    for name, grad in zip(parameters[0], own, strict=True):
        close(grad, stock[name], 2e-5)
    for padding in slice(0, 9), slice(60, 70):
        mask = torch.ones(2, 70, dtype=torch.long)
        mask[1, padding] = 0
        with torch.no_grad():
            found, expected = ours(x, attention_mask=mask), theirs.eval()(x, attention_mask=mask)[0]
        close(found[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("page", ["README.md", "docs/integrations/fla.md"])
def test_the_line_of_the_page(page):
    kda_core_fla.uninstall()
    before = entries()
    exec(pages.one_line(page, "kda_core_fla"), {})
    assert entries() != before
