"""kda_core in fla's registries: its operators on every device, and on CPUs, in torch, what stands around them."""

from inspect import signature

import torch
import torch.nn.functional as F
from fla.backends import BaseBackend, _function_registries, _operation_registries
from fla.modules.norm.layernorm import group_norm_ref
from fla.ops import attnres, kda

from kda_core import KdaError, chunk_kda, fused_recurrent_kda, kda_gate, supports
from kda_core.integrations import advance_convolution, gradients, named
from kda_core.nn import short_convolution

OPERATORS = {"chunk_kda": chunk_kda, "fused_recurrent_kda_fwd": fused_recurrent_kda, "fused_kda_gate": kda_gate}
# fla ignores names that it does not know. It had transpose_state_layout, which kda_core refuses.
TAKEN = {name: {*signature(f).parameters, "transpose_state_layout"} for name, f in OPERATORS.items()}


class KdaCore(BaseBackend):  # its methods have the names of the functions of fla that they serve
    backend_type, env_var, priority = "kda_core", "KDA_FLA", 1  # before FlashKDA (3)

    def taken(self, name, call):
        """The arguments of a call of fla's as kda_core takes them; fla does not read what has no effect."""
        given = {n: x for n, x in call.items() if n in TAKEN[name]}
        given |= {} if given.get("use_gate_in_kernel", True) else {"A_log": None, "dt_bias": None}
        given |= {"intermediate_states_dtype": given["k"].dtype} if given.get("return_intermediate_states") else {}
        if name == "fused_recurrent_kda_fwd":
            given["allow_neg_eigval"] = bool(given["use_beta_sigmoid_in_kernel"] and given["allow_neg_eigval"])
            given["output_final_state"] |= given["inplace_final_state"]
            if given["ssm_state_indices"] is not None and not given["inplace_final_state"]:
                raise ValueError("inplace_final_state: kda_core advances a pool in place only")
            if given["initial_state"] is not None and not given["inplace_final_state"]:
                given["initial_state"] = given["initial_state"].float()  # fla returns float32
        return given

    def verify(self, name, *args, **kwargs):
        on_cpu = {t.device.type for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)} == {"cpu"}
        known = kwargs.get("chunk_size", 64) in (32, 64) if name in OPERATORS else on_cpu and name in NAMED
        if on_cpu or not known:  # on CPUs the call itself says what is wrong
            return known, "kda_core has the operators, with a chunk_size of 32 or 64"
        try:
            return supports(OPERATORS[name].__name__, **self.taken(name, NAMED[name](*args, **kwargs)))
        except (TypeError, ValueError, KdaError) as error:
            return False, str(error)

    def get_implementation(self, name):
        return lambda *args, **kwargs: self.serve(name, NAMED[name](*args, **kwargs))

    def serve(self, name, call):
        result = OPERATORS[name](**self.taken(name, call)) if name in OPERATORS else getattr(self, name)(**call)
        return result.to(call["output_dtype"]) if "output_dtype" in call else result

    def causal_conv1d_fwd(self, x, weight, bias, residual, initial_state, activation, cu_seqlens=None, **rest):
        """fla's state [N, D, W] has an input more than kda_core's: a tap of 0 makes up for it."""
        before = None if initial_state is None else initial_state.transpose(1, 2)
        options = {"output_final_state": True, "cu_seqlens": cu_seqlens, "silu": activation is not None}
        y, state = short_convolution(x.flatten(2).float(), F.pad(weight, (1, 0)), bias, before, **options)
        y = (y.view(x.shape) if residual is None else y.view(x.shape) + residual).to(x.dtype)
        return y, state.transpose(1, 2).to(x.dtype).contiguous() if rest.get("output_final_state", True) else None

    def causal_conv1d_bwd(self, dy, dht, **call):
        return gradients(self.causal_conv1d_fwd, call, ("x", "weight", "bias", "residual", "initial_state"), (dy, dht))

    def causal_conv1d_update(self, x, cache, residual, weight, bias, activation):
        y = advance_convolution(x.float().reshape(*cache.shape[:2], 1), cache, weight, bias, activation is not None)
        return (y.view(x.shape) if residual is None else y.view(x.shape) + residual).to(x.dtype), cache

    def layer_norm_fwd(self, x, weight, bias, is_rms_norm, eps=None, residual=None, num_groups=1, g=None, **more):
        total = x.float() if residual is None else x.float() + residual
        weight = total.new_ones(num_groups * x.shape[-1]) if weight is None else weight
        rows = total.view(-1, len(weight))  # rows alternate in the groups
        # The backward function gets no epsilon: it comes in the place of the deviations, which are computed anew.
        deviations = more["rstd"] if "rstd" in more else torch.tensor(eps, dtype=torch.float64)
        y = group_norm_ref(rows, weight, bias, num_groups, None, float(deviations), is_rms_norm).view(x.shape)
        y = y if g is None else y * (F.sigmoid if more["activation"] == "sigmoid" else F.silu)(g.float())
        return y.to(more.get("out_dtype") or x.dtype), None, deviations, total.to(more.get("residual_dtype") or x.dtype)

    def layer_norm_bwd(self, dy, has_residual, recompute_output, dres=None, dresidual=None, **call):
        given = dy, None, None, dres if dresidual is None else dresidual
        dx, *others = gradients(self.layer_norm_fwd, call, ("x", "g", "weight", "bias"), given)
        found = dx, *others, dx if has_residual else None
        return (*found, self.layer_norm_fwd(**call)[0].to(dy.dtype)) if recompute_output else found

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

    def powglu_fwd(self, x, y, power=None, weight=None, bias=None, **_):
        rows = x.float()  # with a power, gates above 0 grow less; without one it is SwiGLU
        above = rows.where(rows > 0, 1)
        gate = rows if power is None else rows.where(rows <= 0, above ** (power / (above.sqrt() + 1)))
        z = (gate * rows.sigmoid() * y.float()).to(x.dtype)
        return z if weight is None else F.linear(z, weight, bias)  # fla's own has no gradients under CPUs' autocast

    def powglu_fwdbwd(self, g, use_weight, **call):
        found = gradients(self.powglu_fwd, call, ("x", "y"), [g])
        return (*found, self.powglu_fwd(**call)) if use_weight else found

    layer_norm_gated_fwd, layer_norm_gated_bwd = layer_norm_fwd, layer_norm_bwd
    swiglu_fwd, swiglu_fwdbwd, swiglu_linear, powglu_linear = powglu_fwd, powglu_fwdbwd, powglu_fwd, powglu_fwd
    fused_attnres = staticmethod(lambda checkpoint_level, **call: attnres.naive_attnres(**call))
    fused_linear_cross_entropy_bwd = staticmethod(lambda do, **d: [t if t is None else t * do for t in d.values()])


SERVED = {f: r for f, r in _function_registries.items() if f.__name__ in OPERATORS or hasattr(KdaCore, f.__name__)}
STOCK = *SERVED, kda.fused_recurrent.fused_recurrent_kda_fwd, kda.gate.fused_kda_gate, attnres.fused_attnres
NAMED = {f.__name__: named(f) for f in STOCK}
REGISTRIES = *SERVED.values(), _operation_registries["kda"], _operation_registries["attnres"]
