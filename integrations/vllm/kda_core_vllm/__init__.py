"""vLLM on kda_core: ``kda_core_vllm.install()``; ``uninstall()`` takes it back.

vLLM runs ``install`` itself in each process, as a plugin of the group ``vllm.general_plugins``. It replaces the Triton
kernels that models run with ``--kda-prefill-backend triton --kda-decode-backend triton``. ``KDA_VLLM=0`` switches it
off, ``KDA_VLLM=kimi_k3,glm5next`` names models. States stay in vLLM's pool, V first; slots of 0 and below are padding.
"""

import importlib
import os
import sys
from functools import cache, partial, update_wrapper, wraps
from inspect import signature

from torch import Tensor

import kda_core
from kda_core.integrations import admit, expect_models, named

__version__ = "0.1.0"
RENAMED = {"raw_g": "g", "raw_beta": "beta", "g_bias": "dt_bias", "a_log": "A_log"}
RENAMED |= {"compute_gate": "use_gate_in_kernel", "sigmoid_beta": "use_beta_sigmoid_in_kernel"}
RENAMED |= dict.fromkeys(("chunk_indices", "chunk_offsets", "uniform_sequence_length", "fuse_gate"), "hint")
_bound: list = []


class Rows:
    """A prompt's states ``state[indices]``: kda_core reads them in the pool, and others get vLLM's copy of them."""

    def __init__(self, gather, state, indices, has_initial_state):
        self.pool, self.slots, self.has_initial_state = state, indices, has_initial_state
        self.gathered = cache(partial(gather, state, indices, has_initial_state))

    def __getattr__(self, name):
        return getattr(self.gathered(), name)


class Written:
    """States that kda_core has written to the pool: vLLM's ``pool[slots] = states`` has nothing left to do."""

    def __init__(self, pool):
        self.pool = pool

    to = lambda self, dtype: self  # noqa: E731

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is not Tensor.__setitem__ or args[2].pool is not args[0]:
            raise TypeError("kda_core wrote these states to vLLM's pool: they cannot be used elsewhere")


def scatter_states(stock):
    scatter = lambda state, src, *rest: getattr(src, "pool", None) is state or stock(state, src, *rest)  # noqa: E731
    return update_wrapper(scatter, stock, ("register_warmup",), ())


def serve(operator, stock):
    """A function with the arguments and defaults of vLLM's, and an operator inside."""
    taken, arguments = signature(stock).parameters, named(stock)
    # A raw argument has no switch beside it, nor has a norm of q and k that is always applied.
    fixed = {"use_gate_in_kernel": "raw_g" in taken, "use_beta_sigmoid_in_kernel": "raw_beta" in taken}
    fixed |= {"use_qk_l2norm_in_kernel": "use_qk_l2norm_in_kernel" not in taken, "state_v_first": True}

    @wraps(stock)
    def function(*args, **kwargs):
        given = fixed | {RENAMED.get(n, n): x for n, x in arguments(*args, **kwargs).items()}
        given.pop("hint", None)  # it changes no result
        bound = given.get("lower_bound") if given.pop("safe_gate", given["use_gate_in_kernel"]) else None
        return operator(**given | {"lower_bound": bound, "safe_gate": bound is not None})

    return function


def prefill(initial_state=None, output_final_state=False, **given):
    given["batch_invariant"] = os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1"
    if not isinstance(initial_state, Rows):
        return kda_core.chunk_kda(initial_state=initial_state, output_final_state=output_final_state, **given)
    given |= {"ssm_state_indices": initial_state.slots, "has_initial_state": initial_state.has_initial_state}
    o, _ = kda_core.chunk_kda(initial_state=initial_state.pool, pad_slot_id=0, update_state=output_final_state, **given)
    return o, Written(initial_state.pool)


def decode(q, initial_state, ssm_state_indices, cu_seqlens=None, num_accepted_tokens=None, **given):
    if not given.pop("inplace_final_state", True):
        raise ValueError("inplace_final_state: expected True, kda_core advances a pool in place only")
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    given |= {"initial_state": initial_state, "ssm_state_indices": ssm_state_indices[:N], "cu_seqlens": cu_seqlens}
    given["num_accepted_tokens"] = None if num_accepted_tokens is None else num_accepted_tokens[:N]
    return kda_core.fused_recurrent_kda(q, pad_slot_id=0, **given)[0], initial_state


def packed_decode(mixed_qkv, g, beta, initial_state, state_indices, out=None, **given):
    _, H, V, K = initial_state.shape
    q, k, v = (x.view(len(x), 1, H, -1) for x in mixed_qkv.split_with_sizes([H * K, H * K, H * V], -1))
    out = mixed_qkv.new_empty(1, len(q), H, V) if out is None else out
    given |= {"g": g.transpose(0, 1), "beta": beta.transpose(0, 1), "out": out.transpose(0, 1)}
    decode(q, initial_state, state_indices, k=k, v=v, **given)
    return out, initial_state


CHUNK, STEP, PACKED = (partial(serve, operator) for operator in (prefill, decode, packed_decode))
GLM = {"chunk_kda_with_fused_gate": CHUNK, "fused_recurrent_kda": STEP}
MODELS = {  # Kimi-K3 and Kimi-Linear; Bailing (Ling); GLM-5, on demand: importing its kernels imports its whole model
    "kimi_k3": ("models.kimi_k3.{}.ops.third_party.kda", GLM | {"fused_recurrent_kda_packed_decode": PACKED}),
    "bailing_moe_v3": ("third_party.flash_linear_attention.ops.kda",
                       {"chunk_kda": CHUNK, "fused_recurrent_kda": STEP, "fused_recurrent_kda_fwd": STEP}),
    "glm5next": ("models.glm5next.{}.ops.third_party.kda", GLM),
}  # fmt: skip
COPY = "model_executor.layers.mamba.ops"
COPIES = [(f"{COPY}.gather_initial_states", {"gather_initial_states": lambda stock: partial(Rows, stock)}),
          (f"{COPY}.scatter_states", {"scatter_states": scatter_states})]  # fmt: skip


def install(*models: str) -> bool:
    """Let the models of this process with KDA layers call kda_core, models that are built already as well.

    Args:
        *models: names in ``MODELS``; those of ``KDA_VLLM``, or kimi_k3 and bailing_moe_v3, when left out.

    Returns:
        Whether they do: False where ``KDA_VLLM=0`` switches it off.

    Raises:
        UnsupportedStack: vLLM is missing, or another version, or there is no such model; nothing has changed.
    """
    if not admit("vllm"):
        return False
    models = models or tuple(filter(None, os.environ.get("KDA_VLLM", "").split(","))) or tuple(MODELS)[:2]
    expect_models("vllm", models, MODELS)
    from vllm.platforms import current_platform

    places = [*map(MODELS.get, models), *COPIES]
    vendor = "amd" if current_platform.is_rocm() else "nvidia"
    homes = [(importlib.import_module("vllm." + home.format(vendor)), makers) for home, makers in places]
    found = [(getattr(home, name), name, make) for home, makers in homes for name, make in makers.items()]
    for stock, name, make in found:  # all are there: now something may change
        if not any(stock in (old, new) for old, _, new in _bound):
            _bound.append((stock, name, make(stock)))
            _bind(*_bound[-1])
    return True


def uninstall() -> None:
    """Give the modules back the functions that they had, those also that were imported since."""
    while _bound:
        _bind(*reversed(_bound.pop()))


def _bind(old, name, new):
    for module in [m for m in list(sys.modules.values()) if getattr(m, "__dict__", {}).get(name) is old]:
        setattr(module, name, new)
