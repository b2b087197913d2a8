"""kda_core's functions as a backend of fla's ``chunk_kda``, ``fused_recurrent_kda_fwd`` and ``fused_kda_gate``."""

from inspect import signature, unwrap

import torch
from fla.backends import BaseBackend
from fla.ops.kda.chunk import chunk_kda
from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
from fla.ops.kda.gate import fused_kda_gate

import kda_core

THEIRS = {
    f.__name__: tuple(signature(unwrap(f)).parameters) for f in (chunk_kda, fused_recurrent_kda_fwd, fused_kda_gate)
}
OURS = dict(zip(THEIRS, (kda_core.chunk_kda, kda_core.fused_recurrent_kda, kda_core.kda_gate), strict=True))
# fla's chunk_kda takes some arguments by **kwargs. Every call of kda_core can be captured: use_graph and max_num_seqs
# change nothing. fla ignores names that it does not know.
TAKEN = {
    name: {*THEIRS[name], "A_log", "dt_bias", "chunk_size"} & {*signature(f).parameters} for name, f in OURS.items()
}


def _call(name, args, kwargs):
    """The arguments of a call of fla's, by name, as kda_core takes them."""
    given = dict(zip(THEIRS[name], args)) | kwargs  # noqa: B905 - fewer arguments than names
    if "transpose_state_layout" in given:
        raise ValueError("transpose_state_layout: fla 0.6 renamed it to state_v_first")
    given = {n: value for n, value in given.items() if n in TAKEN[name]}
    if name != "fused_kda_gate" and not given.get("use_gate_in_kernel"):  # fla does not read what has no effect
        given["A_log"] = given["dt_bias"] = None
    if name == "fused_recurrent_kda_fwd":
        given["allow_neg_eigval"] = given.get("use_beta_sigmoid_in_kernel", False) and given.get(
            "allow_neg_eigval", False
        )
        if given.setdefault("inplace_final_state", True):
            given["output_final_state"] = True
        elif given.get("ssm_state_indices") is not None:
            raise ValueError("inplace_final_state: kda_core advances a pool in place only")
        elif given.get("initial_state") is not None:
            given["initial_state"] = given["initial_state"].float()  # fla returns float32
    return given


class KdaCore(BaseBackend):
    """Stands before FlashKDA (priority 3) in the registry of ``chunk_kda`` and in that of the operation "kda"."""

    backend_type, env_var, priority = "kda_core", "KDA_FLA", 1

    def verify(self, function_name, *args, **kwargs):
        if function_name not in OURS:
            return False, "kda_core serves whole operators"
        if kwargs.get("chunk_size", 64) not in (32, 64):
            return False, "chunk_size"  # fla refuses it in its own words
        if next(t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)).device.type == "cpu":
            return True, None
        try:
            return kda_core.supports(OURS[function_name].__name__, **_call(function_name, args, kwargs))
        except (ValueError, kda_core.KdaError) as error:
            return False, str(error)

    def chunk_kda(self, *args, **kwargs):
        o, final_state, *h = kda_core.chunk_kda(**_call("chunk_kda", args, kwargs))
        return o, final_state, *(t.to(o.dtype) for t in h)  # fla's h has the dtype of k

    def fused_recurrent_kda_fwd(self, *args, **kwargs):
        return kda_core.fused_recurrent_kda(**_call("fused_recurrent_kda_fwd", args, kwargs))

    def fused_kda_gate(self, *args, output_dtype=torch.float32, **kwargs):
        return kda_core.kda_gate(**_call("fused_kda_gate", args, kwargs)).to(output_dtype)
