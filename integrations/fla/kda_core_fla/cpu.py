"""The modules around KDA in fla's layer and models, in plain torch for CPU tensors: fla has Triton kernels only."""

import torch
import torch.nn.functional as F
from fla.backends import BaseBackend
from fla.modules.activations.ops import swiglu_linear
from fla.modules.causal_conv1d import ops as conv
from fla.modules.fused_cross_entropy import ops as entropy
from fla.modules.fused_linear_cross_entropy.ops import fused_linear_cross_entropy_bwd
from fla.modules.norm import fused_norm_gate as gated
from fla.modules.norm import layernorm as plain

from kda_core.nn import short_convolution


class Torch(BaseBackend):
    """Serves CPU tensors; fla's kernels go on serving every other device."""

    backend_type, env_var, priority = "kda_core_torch", "KDA_FLA", 9

    def verify(self, function_name, *args, **kwargs):
        devices = {t.device.type for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)}
        return devices == {"cpu"}, "serves CPU tensors"


def gradients(f, inputs, outputs_grad):
    """The gradients of f at those inputs that are tensors, by torch's autograd; None for the others."""
    leaves = [t if t is None else t.detach().requires_grad_() for t in inputs]
    with torch.enable_grad():
        outputs, given = zip(
            *((o, d) for o, d in zip(f(*leaves), outputs_grad, strict=True) if d is not None), strict=True
        )
    got = iter(torch.autograd.grad(outputs, [t for t in leaves if t is not None], given, allow_unused=True))
    return tuple(t if t is None else next(got) for t in leaves)


def convolve(x, weight, bias, residual, initial_state, activation, cu_seqlens, **_layout):
    """Depthwise causal convolution of [B, T, D] with weight [D, W]; the state [N, D, W] is the last W inputs."""
    before = None if initial_state is None else initial_state.transpose(1, 2)
    # Our state has an input less than there are taps: a tap of 0 makes it fla's. float32: one rounding, at the end.
    y, state = short_convolution(
        x.float(), F.pad(weight, (1, 0)), bias, before, output_final_state=True, cu_seqlens=cu_seqlens,
        silu=activation is not None,
    )  # fmt: skip
    return (y if residual is None else y + residual).to(x.dtype), state.transpose(1, 2).to(x.dtype).contiguous()


def conv_fwd(x, output_final_state=False, **given):
    y, state = convolve(x.flatten(2), **given)
    return y.view(x.shape), state if output_final_state else None


def conv_bwd(x, dy, dht, weight, bias, residual, initial_state, **given):
    f = lambda x, *t: convolve(x.flatten(2), *t, **given)  # noqa: E731
    return gradients(f, (x, weight, bias, residual, initial_state), (dy.flatten(2), dht))


def conv_update(x, cache, residual=None, weight=None, bias=None, activation=None):
    one = x.reshape(len(cache), 1, -1)
    y, state = convolve(
        one, weight, bias, residual if residual is None else residual.view_as(one), cache, activation, None
    )
    return y.view(x.shape), cache.copy_(state)


def scaled(n, g, weight, bias, activation, groups):
    """Normed rows, scaled and gated; weight and bias have a part for each of the groups that the rows alternate in."""
    y = n.view(-1, groups, n.shape[-1])
    y = y if weight is None else y * weight.float().view(groups, -1)
    y = (y if bias is None else y + bias.float().view(groups, -1)).view(n.shape)
    return y if g is None else y * (torch.sigmoid(g.float()) if activation == "sigmoid" else F.silu(g.float()))


def norm_fwd(x, weight, bias, eps, residual, residual_dtype, is_rms_norm, g=None, activation=None, num_groups=1):
    total = x.float() if residual is None else x.float() + residual.float()
    mean = None if is_rms_norm else total.mean(-1)
    n = total if mean is None else total - mean[:, None]
    rstd = torch.rsqrt(n.square().mean(-1) + eps)
    y = scaled(n * rstd[:, None], g, weight, bias, activation, num_groups)
    return y.to(x.dtype), mean, rstd, total.to(residual_dtype or x.dtype)


def norm_bwd(dy, x, weight, bias, mean, rstd, has_residual, x_dtype, g=None, activation=None, num_groups=1, **given):
    n = (x.float() if mean is None else x.float() - mean[:, None]) * rstd[:, None]
    f = lambda *t: (scaled(*t, activation, num_groups),)  # noqa: E731
    dn, dg, dw, db = gradients(f, (n, g, weight, bias), (dy.float(),))
    dx = dn - n * (dn * n).mean(-1, keepdim=True)
    dx = (dx if mean is None else dx - dn.mean(-1, keepdim=True)) * rstd[:, None]
    of_sum = given.get("dres", given.get("dresidual"))
    dx = dx if of_sum is None else dx + of_sum
    return dx.to(x_dtype), *(() if g is None else (dg,)), dw, db, dx.to(x.dtype) if has_residual else None


def losses(
    logits,
    target,
    label_smoothing=0.0,
    logit_scale=1.0,
    lse_square_scale=0.0,
    logit_softcapping=None,
    ignore_index=-100,
):
    z = logits.float() * logit_scale
    z = z if logit_softcapping is None else logit_softcapping * torch.tanh(z / logit_softcapping)
    lse = z.logsumexp(-1)
    z_loss = (lse_square_scale * lse.square()).masked_fill(target == ignore_index, 0)
    own = F.cross_entropy(z, target, reduction="none", ignore_index=ignore_index, label_smoothing=label_smoothing)
    return own + z_loss, z_loss, lse


def entropy_fwd(logits, target, process_group=None, **options):
    if process_group is not None:
        raise NotImplementedError("fla's cross entropy on a CPU: process_group is not served")
    return *losses(logits, target, **options), logits.shape[-1], 0


def entropy_bwd(logits, target, dloss, lse, total_classes, class_start_idx, inplace_backward=False, **options):
    (found,) = gradients(lambda t: losses(t, target, **options)[:1], (logits,), (dloss,))
    return logits.copy_(found) if inplace_backward else found


IMPLEMENTATIONS = {
    conv.causal_conv1d_fwd: conv_fwd,
    conv.causal_conv1d_bwd: conv_bwd,
    conv.causal_conv1d_update: conv_update,
    plain.layer_norm_fwd: norm_fwd,
    plain.layer_norm_bwd: norm_bwd,
    gated.layer_norm_gated_fwd: norm_fwd,
    gated.layer_norm_gated_bwd: norm_bwd,
    swiglu_linear: lambda x, y, weight, bias: F.linear((F.silu(x.float()) * y.float()).to(x.dtype), weight, bias),
    entropy.cross_entropy_fwd: entropy_fwd,
    entropy.cross_entropy_bwd: entropy_bwd,
    fused_linear_cross_entropy_bwd: lambda do, dx, dw, db: tuple(t if t is None else t * do for t in (dx, dw, db)),
}
"""fla's entry points, and what serves them."""
