"""kda_core in fla's registries: its operators on every device, and on CPUs, in torch, what stands around them."""

from functools import partialmethod
from inspect import signature

import torch
import torch.nn.functional as F
from fla.backends import BaseBackend, _function_registries, _operation_registries
from fla.modules.norm.layernorm import group_norm_ref
from fla.ops.attnres.naive import naive_attnres
from fla.ops.kda import chunk, fused_recurrent, gate

import kda_core
from kda_core.nn import short_convolution

STOCK = chunk.chunk_kda, fused_recurrent.fused_recurrent_kda_fwd, gate.fused_kda_gate
THEIRS = {f.__name__: [*signature(f).parameters] for f in STOCK}
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


def operator(backend, name, *args, **kwargs):
    dtype = (dict(zip(THEIRS[name], args)) | kwargs).get("output_dtype")  # noqa: B905
    result = OURS[name](**by_name(name, args, kwargs))
    return result if dtype is None else result.to(dtype)


def gradients(f, given, *inputs, **others):
    """The gradients of f at those inputs that are tensors, None for the others, from those given for its results."""
    leaves = [t if t is None else t.detach().requires_grad_() for t in inputs]
    with torch.enable_grad():
        results = f(*leaves, **others)
    pairs = [pair for pair in zip(results, given) if pair[1] is not None]  # noqa: B905
    torch.autograd.backward(*zip(*pairs, strict=True))
    return tuple(t if t is None else t.grad for t in leaves)


class KdaCore(BaseBackend):  # its methods have the names of the functions of fla that they serve
    backend_type, env_var, priority = "kda_core", "KDA_FLA", 1  # before FlashKDA (3)

    def verify(self, name, *args, **kwargs):
        on_cpu = {t.device.type for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)} == {"cpu"}
        known = kwargs.get("chunk_size", 64) in (32, 64) if name in OURS else on_cpu and hasattr(self, name)
        if on_cpu or not known:  # on CPUs the call itself says what is wrong
            return known, "kda_core has the operators, with a chunk_size of 32 or 64"
        try:
            return kda_core.supports(OURS[name].__name__, **by_name(name, args, kwargs))
        except (TypeError, ValueError, kda_core.KdaError) as error:
            return False, str(error)

    chunk_kda, fused_recurrent_kda_fwd, fused_kda_gate = (partialmethod(operator, name) for name in OURS)

    def causal_conv1d_fwd(self, x, weight, bias, residual=None, initial_state=None, output_final_state=True, activation=None, cu_seqlens=None, **layout):  # fmt: skip # noqa: E501
        """fla's state [N, D, W] has an input more than kda_core's: a tap of 0 makes up for it."""
        before = None if initial_state is None else initial_state.transpose(1, 2)
        options = {"output_final_state": True, "cu_seqlens": cu_seqlens, "silu": activation is not None}
        y, state = short_convolution(x.flatten(2).float(), F.pad(weight, (1, 0)), bias, before, **options)
        y = y.view(x.shape) if residual is None else y.view(x.shape) + residual
        return y.to(x.dtype), state.transpose(1, 2).to(x.dtype).contiguous() if output_final_state else None

    def causal_conv1d_bwd(self, x, dy, dht, weight, bias, residual, initial_state, **given):
        inputs = x, weight, bias, residual, initial_state
        return gradients(self.causal_conv1d_fwd, (dy.view(x.shape), dht), *inputs, **given)

    def causal_conv1d_update(self, x, cache, residual=None, weight=None, bias=None, activation=None):
        one, other = (t if t is None else t.reshape(len(cache), 1, -1) for t in (x, residual))
        y, state = self.causal_conv1d_fwd(one, weight, bias, other, cache, True, activation)
        return y.view(x.shape), cache.copy_(state)

    def layer_norm_fwd(self, x, weight, bias, g=None, *, eps, residual=None, residual_dtype=None, is_rms_norm, activation=None, num_groups=1):  # fmt: skip # noqa: E501
        total = x.float() if residual is None else x.float() + residual
        weight = total.new_ones(num_groups * x.shape[-1]) if weight is None else weight
        rows = total.view(-1, len(weight))  # rows alternate in the groups
        y = group_norm_ref(rows, weight, bias, num_groups, None, eps, is_rms_norm, upcast=True).view(x.shape)
        if g is not None:
            y = y * (F.sigmoid if activation == "sigmoid" else F.silu)(g.float())
        # The backward function gets no epsilon: it comes in the place of the deviations, which are computed anew.
        return y.to(x.dtype), None, torch.tensor(eps, dtype=torch.float64), total.to(residual_dtype or x.dtype)

    def layer_norm_bwd(self, dy, x, weight, bias, rstd, has_residual, x_dtype, g=None, dres=None, dresidual=None, mean=None, **kind):  # fmt: skip # noqa: E501
        kind["eps"] = float(rstd)
        given = dy, None, None, dres if dresidual is None else dresidual
        dx, dw, db, dg = gradients(self.layer_norm_fwd, given, x.float(), weight, bias, g, **kind)
        return dx.to(x_dtype), *(() if g is None else (dg,)), dw, db, dx.to(x.dtype) if has_residual else None

    layer_norm_gated_fwd, layer_norm_gated_bwd = layer_norm_fwd, layer_norm_bwd

    def cross_entropy_fwd(self, logits, target, process_group=None, label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0, logit_softcapping=None, ignore_index=-100):  # fmt: skip # noqa: E501
        if process_group is not None:
            raise NotImplementedError("fla's cross entropy on a CPU: process_group is not served")
        z = logits.float() * logit_scale
        z = z if logit_softcapping is None else logit_softcapping * torch.tanh(z / logit_softcapping)
        lse = z.logsumexp(-1)
        z_loss = (lse_square_scale * lse.square()).masked_fill(target == ignore_index, 0)
        own = F.cross_entropy(z, target, reduction="none", ignore_index=ignore_index, label_smoothing=label_smoothing)
        return own + z_loss, z_loss, lse, logits.shape[-1], 0

    def cross_entropy_bwd(self, logits, target, dloss, lse, total_classes, class_start_idx, inplace_backward=False, **options):  # fmt: skip # noqa: E501
        (found,) = gradients(self.cross_entropy_fwd, (dloss,), logits, target=target, **options)
        return logits.copy_(found) if inplace_backward else found

    def powglu_fwd(self, x, y, power=3.0, output_contiguous=False):
        """fla's PowGLU, whose gates above 0 grow less; without a power SwiGLU."""
        rows = gate = x.float()
        if power is not None:
            above = rows.where(rows > 0, 1)
            gate = rows.where(rows <= 0, above ** (power / (above.sqrt() + 1)))
        return (gate * rows.sigmoid() * y.float()).to(x.dtype)

    def powglu_fwdbwd(self, x, y, g, power=3.0, use_weight=False, output_contiguous=False):
        found = gradients(lambda *rows: (self.powglu_fwd(*rows, power),), (g,), x, y)
        return (*found, self.powglu_fwd(x, y, power)) if use_weight else found

    # fla's own function has no gradients on a CPU under autocast.
    def powglu_linear(self, x, y, weight, bias, power=3.0):
        return F.linear(self.powglu_fwd(x, y, power), weight, bias)

    GLU = powglu_fwd, powglu_fwdbwd, powglu_linear
    swiglu_fwd, swiglu_fwdbwd, swiglu_linear = (partialmethod(f, power=None) for f in GLU)

    def fused_attnres(self, *args, checkpoint_level=1, **given):
        return naive_attnres(*args[:7], **given)

    def fused_linear_cross_entropy_bwd(self, do, dx, dw, db):
        return tuple(t if t is None else t * do for t in (dx, dw, db))


REGISTRIES = _operation_registries["kda"], _operation_registries["attnres"]
REGISTRIES += (*(r for f, r in _function_registries.items() if hasattr(KdaCore, f.__name__)),)
