"""torch.func over the public functions: the gradients of autograd, the results of a loop, or one sentence."""

from __future__ import annotations

import re

import pytest
import torch
from packaging.version import Version
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, functionalize, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils._pytree import tree_leaves

import kda_core
from kda_core.nn import KimiDeltaAttention

n, B, T, H, HV, K, V = 3, 2, 5, 1, 2, 4, 3
ALL = ("chunk_kda", "fused_recurrent_kda", "kda_gate")
OPS = ALL[:2]
PARAMETERS = ("A_log", "dt_bias")
IN_THE_OPERATOR = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}

Tensors = dict[str, Tensor]


def samples(op: str, N: int = B, B: int = B, T: int = T) -> Tensors:
    """Arguments with a leading dimension of n samples."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, HV, V), "g": (B, T, HV, K), "beta": (B, T, HV),
        "A_log": (HV,), "dt_bias": (HV * K,), "initial_state": (N, HV, K, V),
    }  # fmt: skip
    names = ("g", *PARAMETERS) if op == "kda_gate" else shapes
    return {name: torch.randn(n, *shapes[name], generator=generator) for name in names}


def function(op: str, **options):
    """A public function of its tensors, with everything in the operator."""
    if op == "kda_gate":
        return lambda a: kda_core.kda_gate(**a)
    given = {**IN_THE_OPERATOR, "output_final_state": True, **options}
    return lambda a: getattr(kda_core, op)(**a, **given)


def loss(op: str, **options):
    call = function(op, **options)

    def of(a: Tensors) -> Tensor:
        results = call(a)
        results = (results,) if isinstance(results, Tensor) else results
        return sum((t * t * torch.linspace(-1, 1, t.shape[-1])).sum() for t in results if t is not None)

    return of


def by_autograd(of, a: Tensors) -> Tensors:
    leaves = {name: t.detach().clone().requires_grad_() for name, t in a.items()}
    return dict(zip(leaves, torch.autograd.grad(of(leaves), list(leaves.values())), strict=True))


def shared(a: Tensors, names) -> tuple[Tensors, dict]:
    """The first sample's tensors under these names for all samples, and in_dims."""
    dims = {name: None if name in names else 0 for name in a}
    return {name: t[0] if name in names else t for name, t in a.items()}, dims


def looped(of, a: Tensors, dims: dict):
    """The loop that vmap stands for."""
    results = [of({name: t if dims[name] is None else t[i] for name, t in a.items()}) for i in range(n)]
    if isinstance(results[0], dict):
        return {name: torch.stack([r[name] for r in results]) for name in results[0]}
    if isinstance(results[0], tuple):
        return tuple(torch.stack(r) for r in zip(*results, strict=True))
    return torch.stack(results)


SHARED = {
    "nothing": (),
    "the parameters": PARAMETERS,
    "all but v or g": ("q", "k", "beta", "initial_state", *PARAMETERS),
    "the data": ("q", "k", "v", "g", "beta", "initial_state"),
}


@pytest.mark.parametrize("op", ALL)
def test_grad_is_that_of_autograd(op: str):
    a = {name: t[0] for name, t in samples(op).items()}
    torch.testing.assert_close(grad(loss(op))(a), by_autograd(loss(op), a), rtol=0, atol=0)


@pytest.mark.parametrize("op", ALL)
def test_vjp_and_jacrev_are_those_of_autograd(op: str):
    a = {name: t[0][:1, :2] if t.dim() > 3 else t[0] for name, t in samples(op).items()}
    a = {name: t[:1] if name == "initial_state" else t for name, t in a.items()}

    def of(g: Tensor) -> Tensor:
        results = function(op)(a | {"g": g})
        return results if op == "kda_gate" else results[0]

    expected = torch.autograd.functional.jacobian(of, a["g"])
    # Folded into a batch, an element may fall into another lane of a vectorised loop: one unit in the last place.
    torch.testing.assert_close(jacrev(of)(a["g"]), expected, rtol=2 * torch.finfo(expected.dtype).eps, atol=0)
    o, back = vjp(of, a["g"])
    cotangent = torch.randn_like(o)
    found = (cotangent[..., None, None, None, None] * expected).sum(tuple(range(o.dim())))
    torch.testing.assert_close(back(cotangent)[0], found)


@pytest.mark.parametrize("names", SHARED)
@pytest.mark.parametrize("op", ALL)
def test_vmap_is_a_loop(op: str, names: str):
    a, dims = shared(samples(op), SHARED[names])
    if op == "kda_gate" and names == "the data":
        dims["g"], a["g"] = None, samples(op)["g"][0]
    torch.testing.assert_close(vmap(function(op), in_dims=(dims,))(a), looped(function(op), a, dims))


@pytest.mark.parametrize("names", SHARED)
@pytest.mark.parametrize("op", ALL)
def test_gradients_of_each_sample(op: str, names: str):
    """Also where the samples share a tensor: each has a gradient of its own."""
    a, dims = shared(samples(op), SHARED[names])
    found = vmap(grad(loss(op)), in_dims=(dims,))(a)
    torch.testing.assert_close(found, looped(lambda s: by_autograd(loss(op), s), a, dims))


@pytest.mark.parametrize("names", SHARED)
@pytest.mark.parametrize("op", ALL)
def test_a_gradient_of_all_samples(op: str, names: str):
    """grad over vmap: gradients of what the samples share are sums."""
    a, dims = shared(samples(op), SHARED[names])
    expected = {
        name: t.sum(0) if dims[name] is None else t
        for name, t in looped(lambda s: by_autograd(loss(op), s), a, dims).items()
    }

    def of(a: Tensors) -> Tensor:
        return vmap(loss(op), in_dims=(dims,))(a).sum()

    torch.testing.assert_close(grad(of)(a), expected)
    torch.testing.assert_close(by_autograd(of, a), expected)  # autograd below vmap, without a level of its own


def test_samples_lie_where_in_dims_say_and_come_out_where_out_dims_say():
    a = samples("chunk_kda")
    moved = {name: t.movedim(0, -1) for name, t in a.items()}
    found = vmap(function("chunk_kda"), in_dims=-1, out_dims=(2, 1), randomness="different")(moved)
    expected = looped(function("chunk_kda"), a, dict.fromkeys(a, 0))
    torch.testing.assert_close(found, (expected[0].movedim(0, 2), expected[1].movedim(0, 1)))


@pytest.mark.parametrize("op", OPS)
def test_nested_and_chunked_vmap(op: str):
    a = samples(op)
    twice = {name: torch.stack([t, t + 0.1]) for name, t in a.items()}
    o, state = vmap(vmap(function(op)), chunk_size=1)(twice)
    for i in range(2):
        expected = looped(function(op), {name: t[i] for name, t in twice.items()}, dict.fromkeys(a, 0))
        torch.testing.assert_close((o[i], state[i]), expected)


@pytest.mark.parametrize("h", [False, True])
def test_packed_samples_share_their_boundaries(h: bool):
    a, cu_seqlens = samples("chunk_kda", N=3, B=1, T=70), torch.tensor([0, 20, 20, 68])
    of = function("chunk_kda", cu_seqlens=cu_seqlens, return_intermediate_states=h)
    torch.testing.assert_close(vmap(of)(a), looped(of, a, dict.fromkeys(a, 0)))
    if not h:
        of = loss("chunk_kda", cu_seqlens=cu_seqlens)
        torch.testing.assert_close(
            vmap(grad(of))(a), looped(lambda s: by_autograd(of, s), a, dict.fromkeys(a, 0)), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_and_dtypes(v_first: bool, dtype: torch.dtype):
    a = {name: t if name in ("A_log", "dt_bias") else t.to(dtype) for name, t in samples("chunk_kda").items()}
    if v_first:
        a["initial_state"] = a["initial_state"].mT.contiguous()
    of = function("chunk_kda", state_v_first=v_first, return_intermediate_states=True, lower_bound=-5.0)
    found = vmap(of)(a)
    expected = looped(of, a, dict.fromkeys(a, 0))
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("names", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("op", ALL)
def test_no_samples_give_results_without_samples(op: str, names: tuple):
    a, dims = shared(samples(op), names)
    none = {name: t if dims[name] is None else t[:0] for name, t in a.items()}

    def gradients(a: Tensors) -> Tensors:  # without sums, which torch cannot make of no samples
        results, pull_back = vjp(function(op), a)
        return pull_back(results)[0]

    for of in (function(op), gradients):
        found, some = (tree_leaves(vmap(of, in_dims=(dims,))(x)) for x in (none, a))
        assert [(t.shape, t.dtype) for t in found] == [((0, *t.shape[1:]), t.dtype) for t in some]


@pytest.mark.parametrize("op", OPS)
def test_no_samples_in_autocast_of_another_16_bit_dtype(op: str):
    a = {name: t[:0].half() for name, t in samples(op).items() if name not in PARAMETERS}
    with torch.autocast("cpu", torch.bfloat16):
        o, state = vmap(lambda a: getattr(kda_core, op)(**a, output_final_state=True))(a)
    assert (o.dtype, len(o), len(state)) == (torch.float16, 0, 0)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(("rows", "tokens"), [(0, 0), (0, 3), (2, 0)])
@pytest.mark.parametrize("op", OPS)
def test_the_jacobian_of_an_empty_result(op: str, rows: int, tokens: int, backend: str):
    a = {name: t[0, :rows] for name, t in samples(op).items() if name not in ("A_log", "dt_bias")}
    a = {name: t if name == "initial_state" else t[:, :tokens] for name, t in a.items()}

    def of(a: Tensors) -> Tensor:
        return getattr(kda_core, op)(**a, output_final_state=True, backend=backend)

    for result in (0, 1):
        out, jacobian = of(a)[result], jacrev(lambda a, result=result: of(a)[result])(a)
        assert {name: t.shape for name, t in jacobian.items()} == {n: (*out.shape, *t.shape) for n, t in a.items()}
    if rows and not tokens:  # the state passes through
        state, numel = a["initial_state"], a["initial_state"].numel()
        torch.testing.assert_close(jacobian["initial_state"].view(numel, numel), torch.eye(numel, dtype=state.dtype))


def test_the_jacobian_of_an_empty_gate():
    g, A_log = torch.randn(0, 2, 4), torch.zeros(2)
    assert jacrev(kda_core.kda_gate)(g, A_log).shape == (0, 2, 4, 0, 2, 4)
    assert jacrev(kda_core.kda_gate, argnums=1)(g, A_log).shape == (0, 2, 4, 2)


def test_gradients_of_each_sample_of_a_layer():
    """The recipe of torch.func: vmap(grad(loss)) of functional_call."""
    torch.manual_seed(0)
    layer = KimiDeltaAttention(hidden_size=6, num_heads=2, head_dim=4)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    x = torch.randn(n, T, 6)

    def of(parameters: Tensors, x: Tensor) -> Tensor:
        return functional_call(layer, parameters, (x[None],)).square().sum()

    found = vmap(grad(of), in_dims=(None, 0))(parameters, x)
    for i in range(n):
        layer.zero_grad()
        layer(x[i][None]).square().sum().backward()
        expected = {name: p.grad for name, p in layer.named_parameters()}
        torch.testing.assert_close({name: t[i] for name, t in found.items()}, expected)


@pytest.mark.parametrize("op", OPS)
def test_vmap_of_a_backward_operator_with_its_defaults(op: str):
    a = {name: t for name, t in samples(op).items() if name not in (*PARAMETERS, "initial_state")}
    a["g"], a["grad_o"] = -a["g"].abs(), torch.ones_like(a["v"])

    def of(a: Tensors) -> tuple[Tensor, ...]:
        return getattr(torch.ops.kda_core, f"{op}_backward")(**a)[:5]

    torch.testing.assert_close(vmap(of)(a), looped(of, a, dict.fromkeys(a, 0)))


def test_functionalize():
    a = {name: t[0] for name, t in samples("chunk_kda").items()}
    torch.testing.assert_close(functionalize(function("chunk_kda"))(a), function("chunk_kda")(a), rtol=0, atol=0)


def test_wrong_arguments_are_refused_in_the_words_of_a_sample():
    a = samples("chunk_kda")
    with pytest.raises(ValueError, match=re.escape(f"beta: expected shape [B, T, HV] = [{B}, {T}, {HV}], got")):
        vmap(function("chunk_kda"))(a | {"beta": a["beta"][..., :1]})


def test_boundaries_of_each_sample_are_refused():
    a = samples("chunk_kda", N=2, B=1)
    bounds = torch.tensor([[0, 2, 5], [0, 3, 5], [0, 1, 4]])
    with pytest.raises(ValueError, match=r"^cu_seqlens: expected the same boundaries for every sample .*; pack the"):
        vmap(lambda a, c: function("chunk_kda", cu_seqlens=c)(a))(a, bounds)


def written(name: str) -> dict:
    """Options with which a call writes to its caller's memory."""
    if name == "out":
        return {"out": torch.zeros(B, 1, HV, V)}
    return {"initial_state": torch.zeros(B, HV, K, V), name: torch.tensor([1, 0]) if "indices" in name else True}


@pytest.mark.parametrize("transform", [vmap, grad])
@pytest.mark.parametrize("name", ["out", "ssm_state_indices", "inplace_final_state"])
def test_writes_to_the_callers_memory_are_refused(name: str, transform):
    a = {k: t[:, :, :1] if t.dim() > 3 else t for k, t in samples("chunk_kda").items() if k != "initial_state"}
    options = written(name)
    before = {k: t.clone() for k, t in options.items() if isinstance(t, Tensor)}

    def of(a: Tensors) -> Tensor:
        return kda_core.fused_recurrent_kda(**a, **IN_THE_OPERATOR, **options)[0].sum()

    a = a if transform is vmap else {k: t[0] for k, t in a.items()}
    with pytest.raises(ValueError, match=f"^{name}: expected no "):
        transform(of)(a)
    assert all(torch.equal(t, options[k]) for k, t in before.items())


def test_a_pool_that_no_transform_sees_is_advanced():
    """Decoding inside of a function whose gradient is asked for, of which the pool is no part."""
    a = {k: t[0][:, :1] if t.dim() > 3 else t[0] for k, t in samples("chunk_kda").items() if k != "initial_state"}
    pools = torch.zeros(2, 4, HV, K, V)

    def step(pool: Tensor) -> Tensor:
        # The indices are made under the transform, which wraps them.
        options = {"initial_state": pool, "ssm_state_indices": torch.tensor([2, 0])}
        return kda_core.fused_recurrent_kda(**a, **IN_THE_OPERATOR, **options)[0]

    x = torch.randn(B, 1, HV, V)
    expected = step(pools[0])
    found = grad(lambda x: (x * step(pools[1])).sum())(x)
    assert torch.equal(found, expected)
    assert torch.equal(*pools)
    assert pools[0].flatten(1).any(1).tolist() == [True, False, True, False]


@pytest.mark.parametrize("wrap", [lambda of: grad(lambda a: vmap(of)(a).sum()), lambda of: vmap(grad(of))])
def test_intermediate_states_have_no_gradient(wrap):
    def of(a: Tensors) -> Tensor:
        return function("chunk_kda", return_intermediate_states=True)(a)[0].sum()

    with pytest.raises(ValueError, match=r"^return_intermediate_states: expected no gradient to be needed"):
        wrap(of)(samples("chunk_kda"))


def first(op: str):
    """A function of g alone."""
    a = {name: t[0] for name, t in samples(op).items()}
    return lambda g: loss(op)({**a, "g": g}), a["g"]


# Compilers of earlier versions (2.7 was seen) put an error of their own in the place of the function's.
COMPILERS_PASS_ERRORS_ON = Version(torch.__version__).release >= (2, 13)


def with_some_slow(cases, fast):
    """Every operator with every case; those that compile are slow, a few aside."""
    return [
        pytest.param(op, how, marks=() if "compiled" not in how or (op, how) in fast else pytest.mark.slow)
        for op in ALL
        for how in cases
    ]


FORWARD_MODE = {
    "jvp": lambda of, x: jvp(of, (x,), (x,)),
    "jacfwd": lambda of, x: jacfwd(of)(x),
    "hessian": lambda of, x: hessian(of)(x),
    "linearize": lambda of, x: linearize(of, x),
    "jvp of a gradient": lambda of, x: jvp(grad(of), (x,), (x,)),
    "jvp of vmap": lambda of, x: jvp(vmap(of), (torch.stack([x, x]),), (torch.stack([x, x]),)),
    "compiled jvp": lambda of, x: torch.compile(lambda x: jvp(of, (x,), (x,)), backend="aot_eager")(x),
}


@pytest.mark.parametrize(("op", "how"), with_some_slow(FORWARD_MODE, fast=[("kda_gate", "compiled jvp")]))
def test_forward_mode_says_what_to_do(op: str, how: str):
    if "compiled" in how and not COMPILERS_PASS_ERRORS_ON:
        pytest.skip(f"the compiler of torch {torch.__version__} has an error of its own here")
    with pytest.raises(RuntimeError, match=rf"{op}: forward-mode differentiation is not supported; use reverse mode"):
        FORWARD_MODE[how](*first(op))


@pytest.mark.parametrize("op", ALL)
def test_forward_mode_of_operators_and_gradients_is_refused_not_ignored(op: str):
    of, g = first(op)
    refused = rf"{op}: forward-mode differentiation is not supported"
    a = {name: t[0] for name, t in samples(op).items()} | {"dt_bias": torch.zeros(HV, K)}
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(g, g)
        with pytest.raises(RuntimeError, match=refused):
            of(dual)
        with pytest.raises(RuntimeError, match=refused):
            getattr(torch.ops.kda_core, op)(**a | {"g": dual}, **({} if op == "kda_gate" else IN_THE_OPERATOR))
        if COMPILERS_PASS_ERRORS_ON:
            torch._dynamo.reset()
            with pytest.raises(RuntimeError, match=refused):
                torch.compile(of, backend="aot_eager")(dual)
    y = of(g.clone().requires_grad_())
    x = g.clone().requires_grad_()
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=refused):
        torch.autograd.grad(of(x), x, forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y)))


DOUBLE = {
    "create_graph": lambda of, x: torch.autograd.grad(of(x), x, create_graph=True)[0].sum().backward(),
    "grad of grad": lambda of, x: grad(lambda x: grad(of)(x).sum())(x.detach()),
    "jacrev of grad": lambda of, x: jacrev(grad(of))(x.detach()),
    "compiled": lambda of, x: DOUBLE["create_graph"](torch.compile(of, backend="eager", fullgraph=True), x),
    "compiled grad of grad": lambda of, x: DOUBLE["grad of grad"](torch.compile(of, backend="eager"), x),
}


@pytest.mark.parametrize(("op", "how"), with_some_slow(DOUBLE, fast=[("kda_gate", "compiled")]))
def test_double_backward_says_what_to_do(op: str, how: str):
    of, g = first(op)
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=rf"{op}: double backward is not supported .*; leave out create_graph=True"):
        DOUBLE[how](of, g.clone().requires_grad_())


@pytest.mark.parametrize("op", ALL)
def test_double_backward_of_operators(op: str):
    _, g = first(op)
    a = {name: t[0] for name, t in samples(op).items()} | {"dt_bias": torch.zeros(HV, K), "g": g.requires_grad_()}
    options = {} if op == "kda_gate" else IN_THE_OPERATOR
    results = getattr(torch.ops.kda_core, op)(**a, **options, save_for_backward=True)
    o = results if op == "kda_gate" else results[0]
    (first_grad,) = torch.autograd.grad(o.square().sum(), g, create_graph=True)
    with pytest.raises(RuntimeError, match=f"{op}: double backward is not supported"):
        first_grad.sum().backward()


COMPILED = {
    "compiled grad": lambda of, dims: grad(lambda a: of({k: t[0] if dims[k] == 0 else t for k, t in a.items()})),
    "compiled vmap": lambda of, dims: vmap(of, in_dims=(dims,)),
    "compiled vmap of grad": lambda of, dims: vmap(grad(of), in_dims=(dims,)),
    "compiled grad of vmap": lambda of, dims: grad(lambda a: vmap(of, in_dims=(dims,))(a).sum()),
}


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    ("op", "how"),
    with_some_slow(COMPILED, fast=[("chunk_kda", "compiled vmap of grad"), ("kda_gate", "compiled grad")]),
)
def test_transforms_compile(op: str, how: str):
    torch._dynamo.reset()
    a, dims = shared(samples(op), PARAMETERS)
    of = COMPILED[how](loss(op), dims)
    found = torch.compile(of, backend="aot_eager", fullgraph=True)(a)
    torch.testing.assert_close(found, of(a))
