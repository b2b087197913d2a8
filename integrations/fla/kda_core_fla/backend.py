"""kda_core in fla's registries: its operators on every device, and on CPUs, in torch, what stands around them."""

from inspect import signature

import torch
import torch.nn.functional as F
from fla.backends import BaseBackend, _function_registries, _operation_registries
from fla.modules.norm.layernorm import group_norm_ref
from fla.ops.attnres import fused_attnres, naive_attnres
from fla.ops.kda import fused_recurrent, gate

import kda_core
from kda_core.integrations import advance_convolution, gradients, named
from kda_core.nn import short_convolution

OPERATORS = {"chunk_kda": kda_core.chunk_kda, "fused_recurrent_kda_fwd": kda_core.fused_recurrent_kda}
OPERATORS |= {"fused_kda_gate": kda_core.kda_gate}
# fla ignores names that it does not know. It had transpose_state_layout, which kda_core refuses.
TAKEN = {name: {*signature(f).parameters, "transpose_state_layout"} for name, f in OPERATORS.items()}


def operator_call(name, call):
    """The arguments of a call of fla's as kda_core takes them."""
    given = {n: x for n, x in call.items() if n in TAKEN[name]}
    if not given.get("use_gate_in_kernel", True):  # fla does not read what has no effect
        given |= {"A_log": None, "dt_bias": None}
    if given.get("return_intermediate_states"):
        given["intermediate_states_dtype"] = given["k"].dtype
    if name == "fused_recurrent_kda_fwd":
        given["allow_neg_eigval"] = bool(given["use_beta_sigmoid_in_kernel"] and given["allow_neg_eigval"])
        if given["inplace_final_state"]:
            given["output_final_state"] = True
        elif given["ssm_state_indices"] is not None:
            raise ValueError("inplace_final_state: kda_core advances a pool in place only")
        elif given["initial_state"] is not None:
            given["initial_state"] = given["initial_state"].float()  # fla returns float32
    return given


class KdaCore(BaseBackend):  # its methods have the names of the functions of fla that they serve
    backend_type, env_var, priority = "kda_core", "KDA_FLA", 1  # before FlashKDA (3)

    def verify(self, name, *args, **kwargs):
        on_cpu = {t.device.type for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)} == {"cpu"}
        known = kwargs.get("chunk_size", 64) in (32, 64) if name in OPERATORS else on_cpu and name in NAMED
        if on_cpu or not known:  # on CPUs the call itself says what is wrong
            return known, "kda_core has the operators, with a chunk_size of 32 or 64"
        try:
            return kda_core.supports(OPERATORS[name].__name__, **operator_call(name, NAMED[name](*args, **kwargs)))
        except (TypeError, ValueError, kda_core.KdaError) as error:
            return False, str(error)

    def get_implementation(self, name):
        def run(*args, **kwargs):
            call = NAMED[name](*args, **kwargs)
            if name not in OPERATORS:
                return getattr(self, name)(**call)
            result = OPERATORS[name](**operator_call(name, call))
            return result.to(call["output_dtype"]) if "output_dtype" in call else result

        return run

    def causal_conv1d_fwd(self, x, weight, bias, residual, initial_state, activation, cu_seqlens=None, **rest):
        """fla's state [N, D, W] has an input more than kda_core's: a tap of 0 makes up for it."""
        before = None if initial_state is None else initial_state.transpose(1, 2)
        options = {"output_final_state": True, "cu_seqlens": cu_seqlens, "silu": activation is not None}
        y, state = short_convolution(x.flatten(2).float(), F.pad(weight, (1, 0)), bias, before, **options)
        y = (y.view(x.shape) if residual is None else y.view(x.shape) + residual).to(x.dtype)
        return y, state.transpose(1, 2).to(x.dtype).contiguous() if rest.get("output_final_state", True) else None

    def causal_conv1d_bwd(self, dy, dht, **call):
        inputs = "x", "weight", "bias", "residual", "initial_state"
        return gradients(self.causal_conv1d_fwd, call, inputs, (dy, dht))

    def causal_conv1d_update(self, x, cache, residual, weight, bias, activation):
        token = x.float().reshape(*cache.shape[:2], 1)
        y = advance_convolution(token, cache, weight, bias, activation is not None).view(x.shape)
        return (y if residual is None else y + residual).to(x.dtype), cache

    def layer_norm_fwd(self, x, weight, bias, eps, residual, residual_dtype, is_rms_norm, num_groups=1, g=None, **more):
        total = x.float() if residual is None else x.float() + residual
        weight = total.new_ones(num_groups * x.shape[-1]) if weight is None else weight
        rows = total.view(-1, len(weight))  # rows alternate in the groups
        y = group_norm_ref(rows, weight, bias, num_groups, None, eps, is_rms_norm, upcast=True).view(x.shape)
        if g is not None:
            y = y * (F.sigmoid if more["activation"] == "sigmoid" else F.silu)(g.float())
        # The backward function gets no epsilon: it comes in the place of the deviations, which are computed anew.
        deviations, dtype = torch.tensor(eps, dtype=torch.float64), more.get("out_dtype") or x.dtype
        return y.to(dtype), None, deviations, total.to(residual_dtype or x.dtype)

    def layer_norm_bwd(self, dy, x, rstd, has_residual, x_dtype, recompute_output, dres=None, dresidual=None, **call):
        call |= {"x": x.float(), "eps": float(rstd), "residual": None, "residual_dtype": None}
        inputs = [name for name in ("x", "g", "weight", "bias") if name in call]
        given = dy, None, None, dres if dresidual is None else dresidual
        dx, *others = gradients(self.layer_norm_fwd, call, inputs, given)
        found = dx.to(x_dtype or x.dtype), *others, dx.to(x.dtype) if has_residual else None
        return (*found, self.layer_norm_fwd(**call)[0].to(dy.dtype)) if recompute_output else found

    layer_norm_gated_fwd, layer_norm_gated_bwd = layer_norm_fwd, layer_norm_bwd

    def cross_entropy_fwd(self, logits, target, logit_scale, logit_softcapping, lse_square_scale, **given):
        if given.get("process_group") is not None:
            raise NotImplementedError("fla's cross entropy on a CPU: process_group is not served")
        z = logits.float() * logit_scale
        z = z if logit_softcapping is None else logit_softcapping * torch.tanh(z / logit_softcapping)
        options = {name: given[name] for name in ("ignore_index", "label_smoothing")}
        lse, own = z.logsumexp(-1), F.cross_entropy(z, target, reduction="none", **options)
        z_loss = (lse_square_scale * lse.square()).masked_fill(target == given["ignore_index"], 0)
        return own + z_loss, z_loss, lse, logits.shape[-1], 0

    def cross_entropy_bwd(self, dloss, inplace_backward, **call):
        (found,) = gradients(self.cross_entropy_fwd, call, ["logits"], [dloss])
        return call["logits"].copy_(found) if inplace_backward else found

    def powglu_fwd(self, x, y, power=None, **_):
        """fla's PowGLU, whose gates above 0 grow less; without a power SwiGLU."""
        rows = x.float()
        above = rows.where(rows > 0, 1)
        gate = rows if power is None else rows.where(rows <= 0, above ** (power / (above.sqrt() + 1)))
        return (gate * rows.sigmoid() * y.float()).to(x.dtype)

    def powglu_fwdbwd(self, g, use_weight, **call):
        found = gradients(lambda **given: [self.powglu_fwd(**given)], call, ("x", "y"), [g])
        return (*found, self.powglu_fwd(**call)) if use_weight else found

    def powglu_linear(self, weight, bias, **call):  # fla's own has no gradients on a CPU under autocast
        return F.linear(self.powglu_fwd(**call), weight, bias)

    swiglu_fwd, swiglu_fwdbwd, swiglu_linear = powglu_fwd, powglu_fwdbwd, powglu_linear

    def fused_attnres(self, checkpoint_level, **call):
        return naive_attnres(**call)

    def fused_linear_cross_entropy_bwd(self, do, **found):
        return tuple(t if t is None else t * do for t in found.values())


SERVED = {f: r for f, r in _function_registries.items() if f.__name__ in OPERATORS or hasattr(KdaCore, f.__name__)}
STOCK = *SERVED, fused_recurrent.fused_recurrent_kda_fwd, gate.fused_kda_gate, fused_attnres
NAMED = {f.__name__: named(f) for f in STOCK}
REGISTRIES = *SERVED.values(), _operation_registries["kda"], _operation_registries["attnres"]
