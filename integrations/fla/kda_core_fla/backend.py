"""kda_core in fla's registries: its operators on every device, and on CPUs, in torch, what stands around them."""

from functools import partial
from inspect import signature, unwrap

import torch
import torch.nn.functional as F
from fla.backends import BaseBackend, register  # noqa: F401 - for install
from fla.modules.activations.ops import swiglu_linear
from fla.modules.causal_conv1d import ops as conv
from fla.modules.fused_cross_entropy import ops as entropy
from fla.modules.fused_linear_cross_entropy.ops import fused_linear_cross_entropy_bwd
from fla.modules.norm import fused_norm_gate, layernorm
from fla.ops.kda import chunk, fused_recurrent, gate

import kda_core
from kda_core.nn import short_convolution

STOCK = chunk.chunk_kda, fused_recurrent.fused_recurrent_kda_fwd, gate.fused_kda_gate
THEIRS = {f.__name__: [*signature(unwrap(f)).parameters] for f in STOCK}
OURS = dict(zip(THEIRS, (kda_core.chunk_kda, kda_core.fused_recurrent_kda, kda_core.kda_gate), strict=True))
# fla ignores names that it does not know. It had transpose_state_layout, which kda_core refuses.
TAKEN = {name: {*signature(f).parameters, "transpose_state_layout"} for name, f in OURS.items()}


def by_name(name, args, kwargs):
    """The arguments of a call of fla's as kda_core takes them."""
    given = {n: x for n, x in (dict(zip(THEIRS[name], args)) | kwargs).items() if n in TAKEN[name]}  # noqa: B905
    if name != "fused_kda_gate" and not given.get("use_gate_in_kernel"):  # fla does not read what has no effect
        given["A_log"] = given["dt_bias"] = None
    if given.get("return_intermediate_states"):
        given["intermediate_states_dtype"] = given["k"].dtype
    if name == "fused_recurrent_kda_fwd":
        given["allow_neg_eigval"] = bool(given.get("use_beta_sigmoid_in_kernel") and given.get("allow_neg_eigval"))
        if given.setdefault("inplace_final_state", True):
            given["output_final_state"] = True
        elif given.get("ssm_state_indices") is not None:
            raise ValueError("inplace_final_state: kda_core advances a pool in place only")
        elif given.get("initial_state") is not None:
            given["initial_state"] = given["initial_state"].float()  # fla returns float32
    return given


class KdaCore(BaseBackend):
    backend_type, env_var, priority = "kda_core", "KDA_FLA", 1  # before FlashKDA (3)

    def verify(self, function_name, *args, **kwargs):
        on_cpu = {t.device.type for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)} == {"cpu"}
        if self.implementation or function_name not in OURS or kwargs.get("chunk_size", 64) not in (32, 64):
            return bool(self.implementation) and on_cpu, "kda_core has the operators, with a chunk_size of 32 or 64"
        try:
            given = by_name(function_name, args, kwargs)
            return (True, None) if on_cpu else kda_core.supports(OURS[function_name].__name__, **given)
        except (TypeError, ValueError, kda_core.KdaError) as error:
            return on_cpu, str(error)  # the call raises it again

    def get_implementation(self, function_name):
        return self.implementation or partial(self.call, function_name)

    def call(self, function_name, *args, **kwargs):
        dtype = (dict(zip(THEIRS[function_name], args)) | kwargs).get("output_dtype")  # noqa: B905
        result = OURS[function_name](**by_name(function_name, args, kwargs))
        return result if dtype is None else result.to(dtype)


def gradients(f, inputs, given):
    """The gradients of f at those inputs that are tensors, None for the others, from those given for its results."""
    leaves = [t if t is None else t.detach().requires_grad_() for t in inputs]
    with torch.enable_grad():
        pairs = [pair for pair in zip(f(*leaves), given, strict=True) if pair[1] is not None]
    torch.autograd.backward(*zip(*pairs, strict=True))
    return tuple(t if t is None else t.grad for t in leaves)


def convolve(x, weight, bias, residual=None, initial_state=None, output_final_state=True, activation=None, cu_seqlens=None, **layout):  # fmt: skip # noqa: E501
    """fla's state [N, D, W] has an input more than kda_core's: a tap of 0 makes up for it."""
    before = None if initial_state is None else initial_state.transpose(1, 2)
    options = {"output_final_state": True, "cu_seqlens": cu_seqlens, "silu": activation is not None}
    y, state = short_convolution(x.flatten(2).float(), F.pad(weight, (1, 0)), bias, before, **options)
    y = y.view(x.shape) if residual is None else y.view(x.shape) + residual
    return y.to(x.dtype), state.transpose(1, 2).to(x.dtype).contiguous() if output_final_state else None


def convolve_bwd(x, dy, dht, weight, bias, residual, initial_state, **given):
    return gradients(partial(convolve, **given), (x, weight, bias, residual, initial_state), (dy.view(x.shape), dht))


def convolve_step(x, cache, residual=None, weight=None, bias=None, activation=None):
    one = x.reshape(len(cache), 1, -1)
    y, state = convolve(one, weight, bias, None if residual is None else residual.view_as(one), cache, True, activation)
    return y.view(x.shape), cache.copy_(state)


def norm(x, weight, bias, eps, residual, residual_dtype, is_rms_norm, g=None, activation=None, num_groups=1):
    total = x.float() if residual is None else x.float() + residual.float()
    weight = total.new_ones(num_groups * x.shape[-1]) if weight is None else weight
    rows = total.view(-1, weight.shape[-1])  # rows alternate in the groups
    y = layernorm.group_norm_ref(rows, weight, bias, num_groups, eps=eps, is_rms_norm=is_rms_norm, upcast=True)
    factor = 1 if g is None else (F.sigmoid if activation == "sigmoid" else F.silu)(g.float())
    # The backward function gets no epsilon: it comes in the place of the deviations, which are computed anew.
    y = (y.view(x.shape) * factor).to(x.dtype)
    return y, None, torch.tensor(eps, dtype=torch.float64), total.to(residual_dtype or x.dtype)


def norm_bwd(dy, x, weight, bias, rstd, has_residual, is_rms_norm, x_dtype, g=None, activation=None, num_groups=1, dres=None, dresidual=None, **others):  # fmt: skip # noqa: E501
    kind = {"residual_dtype": None, "is_rms_norm": is_rms_norm, "activation": activation, "num_groups": num_groups}
    f = lambda x, weight, bias, g: norm(x, weight, bias, float(rstd), None, g=g, **kind)[:1]  # noqa: E731
    dx, dw, db, dg = gradients(f, (x.float(), weight, bias, g), (dy.float(),))
    dx = sum((d for d in (dres, dresidual) if d is not None), dx)
    return dx.to(x_dtype), *(() if g is None else (dg,)), dw, db, dx.to(x.dtype) if has_residual else None


def losses(logits, target, process_group=None, label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0, logit_softcapping=None, ignore_index=-100):  # fmt: skip # noqa: E501
    if process_group is not None:
        raise NotImplementedError("fla's cross entropy on a CPU: process_group is not served")
    z = logits.float() * logit_scale
    z = z if logit_softcapping is None else logit_softcapping * torch.tanh(z / logit_softcapping)
    lse = z.logsumexp(-1)
    z_loss = (lse_square_scale * lse.square()).masked_fill(target == ignore_index, 0)
    own = F.cross_entropy(z, target, reduction="none", ignore_index=ignore_index, label_smoothing=label_smoothing)
    return own + z_loss, z_loss, lse, logits.shape[-1], 0


def losses_bwd(logits, target, dloss, lse, total_classes, class_start_idx, inplace_backward=False, **options):
    (found,) = gradients(lambda t: losses(t, target, **options)[:1], (logits,), (dloss,))
    return logits.copy_(found) if inplace_backward else found


SERVED = {
    chunk.chunk_kda: KdaCore, "kda": KdaCore,
    conv.causal_conv1d_fwd: convolve, conv.causal_conv1d_bwd: convolve_bwd, conv.causal_conv1d_update: convolve_step,
    layernorm.layer_norm_fwd: norm, layernorm.layer_norm_bwd: norm_bwd,
    fused_norm_gate.layer_norm_gated_fwd: norm, fused_norm_gate.layer_norm_gated_bwd: norm_bwd,
    swiglu_linear: lambda x, y, weight, bias: F.linear((F.silu(x.float()) * y.float()).to(x.dtype), weight, bias),
    entropy.cross_entropy_fwd: losses, entropy.cross_entropy_bwd: losses_bwd,
    fused_linear_cross_entropy_bwd: lambda do, dx, dw, db: tuple(t if t is None else t * do for t in (dx, dw, db)),
}  # fmt: skip
"""The operators, and what stands around them on CPUs."""
