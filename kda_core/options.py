"""The table of arguments: every argument of the public functions, stated once, and the features that they need.

Read from it at run time: the arguments of the torch operators (``schemas``), flags and their checks (``checks``), the
features that a call needs (``request``), the router's key (``signature``), and the options of ``kda explain``.

Written out from it by ``python tools/signatures.py``, for editors, type checkers and ``inspect.signature``: the
signatures, the docstrings' arguments and the requests in ``api``, the fields of ``Request``, and the table in
``docs/arguments.md``.

To add an option: add its feature and a row at the end (``since``: one above ``schemas.SCHEMA_VERSION``), run that
script, and implement the option in ``reference`` and in the backends that declare its feature. Any other backend
refuses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

Function = Literal["chunk_kda", "fused_recurrent_kda", "kda_gate"]

REQUIRED: Any = object()
"""The default of an argument without one."""

CHUNK: frozenset[Function] = frozenset({"chunk_kda"})
RECURRENT: frozenset[Function] = frozenset({"fused_recurrent_kda"})
GATE: frozenset[Function] = frozenset({"kda_gate"})
BOTH = CHUNK | RECURRENT


class Feature(Enum):
    """One promise that a test of the conformance kit can check.

    A backend declares the features that it serves. Any other is closed: a call that needs it is
    refused before the backend is asked, so that a backend which is older than a feature refuses it
    rather than ignores it. The value is the text that users see in refusals.
    """

    CHUNK = "chunk_kda"
    RECURRENT = "fused_recurrent_kda"
    GATE = "kda_gate"
    BACKWARD = "gradients of chunk_kda"
    RECURRENT_BACKWARD = "gradients of fused_recurrent_kda"
    GATE_BACKWARD = "gradients of kda_gate"
    VARLEN = "packed sequences (cu_seqlens)"
    GVA = "grouped value attention (HV > H)"
    UNEQUAL_HEAD_DIMS = "different key and value head dimensions (K != V)"
    ODD_HEAD_DIMS = "head dimensions that are no power of two"
    INITIAL_STATE = "an initial state"
    FINAL_STATE = "a final state (output_final_state)"
    STATE_GRADIENT = "gradients through the initial and the final state"
    STATE_V_FIRST = "states stored V first (state_v_first)"
    BF16_STATE = "bfloat16 states"
    INTERMEDIATE_STATES = "intermediate states (return_intermediate_states)"
    PAGED_STATE = "a pool of states, advanced in place (ssm_state_indices, inplace_final_state)"
    SPEC_DECODE = "a slot for every token (ssm_state_indices [N, 1+S], num_accepted_tokens)"
    QK_L2NORM = "q/k normalisation (use_qk_l2norm_in_kernel)"
    SOFTPLUS_GATE = "the softplus gate (use_gate_in_kernel)"
    LOWER_BOUND_GATE = "the lower-bound gate (use_gate_in_kernel with lower_bound)"
    BETA_SIGMOID = "raw beta logits (use_beta_sigmoid_in_kernel)"
    NEG_EIGVAL = "negative eigenvalues (allow_neg_eigval)"
    SAFE_GATE = "the bounded-decay hint (safe_gate)"
    CHUNK_32 = "chunk_size=32"
    DISABLE_RECOMPUTE = "saving instead of recomputing (disable_recompute)"
    OUT = "the caller's output buffer (out)"
    STRIDED_INPUT = "inputs that are not contiguous"
    CONTEXT_PARALLEL = "a sequence spread over devices (cp_context)"


@dataclass(frozen=True, eq=False, kw_only=True)
class Argument:
    """One argument.

    Attributes:
        name: its name.
        type: its annotation.
        default: its default, or ``REQUIRED``.
        functions: the public functions that take it.
        needs: the feature that a call with it needs (a flag that is set, or a value that is not None).
        beside: name of a flag that must be set when this flag is set.
        in_request: it is a field of ``Request``; the others are resolved before there is one.
        filled_in: None stands for a default that depends on the call; the field of ``Request`` is never None.
        in_schema: it is an argument of the functional operators, whose order the table's order gives.
        since: ``schemas.SCHEMA_VERSION`` that it came with; operators take later arguments at their end.
        in_steps: its meaning for ``fused_recurrent_kda``, where that differs or is shorter; the docstring there lists
            only arguments that have one, or that ``chunk_kda`` does not take.
        meaning: for users; the docstring's text for ``chunk_kda``.
    """

    name: str
    type: str
    default: Any
    functions: frozenset[Function] = BOTH
    needs: Feature | None = None
    beside: str | None = None
    in_request: bool = True
    filled_in: bool = False
    in_schema: bool = True
    since: int = 1
    in_steps: str = ""
    meaning: str = ""

    @property
    def is_tensor(self) -> bool:
        return self.type.startswith("Tensor")

    @property
    def is_flag(self) -> bool:
        return self.type == "bool"

    @property
    def is_number(self) -> bool:
        """A float that NumPy's scalars and large integers are converted to."""
        return self.type.startswith("float")

    @property
    def is_plain(self) -> bool:
        """A flag or a number: neither a tensor nor an object."""
        return not self.is_tensor and self.type != "Any"


def _data(name: str, meaning: str, functions: frozenset[Function] = BOTH, in_steps: str = "") -> Argument:
    return Argument(name=name, type="Tensor", default=REQUIRED, functions=functions, in_steps=in_steps, meaning=meaning)


def _tensor(name: str, meaning: str, **more: Any) -> Argument:
    return Argument(name=name, type="Tensor | None", default=None, meaning=meaning, **more)


def _flag(name: str, meaning: str, needs: Feature | None = None, **more: Any) -> Argument:
    return Argument(name=name, type="bool", default=False, needs=needs, meaning=meaning, **more)


ARGUMENTS = (
    _data(
        "q",
        "[B, T, H, K], bfloat16, float16, float32 (or float64 where the backend takes it).",
        in_steps="as in ``chunk_kda``; so are k, v, g and beta.",
    ),
    _data("k", "[B, T, H, K], dtype of q; of unit norm, or with ``use_qk_l2norm_in_kernel``."),
    _data("v", "[B, T, HV, V], dtype of q."),
    _data(
        "g",
        "[B, T, HV, K] ([..., HV, K] in ``kda_gate``), any floating dtype: natural-log decay <= 0, from the caller's "
        "gate; or the raw gate input with ``use_gate_in_kernel`` and in ``kda_gate``.",
        BOTH | GATE,
    ),
    _data("beta", "[B, T, HV], any floating dtype: in [0, 1]; or logits with ``use_beta_sigmoid_in_kernel``."),
    _tensor("A_log", "[HV], log of the gate's rate; optional with ``lower_bound``.", functions=BOTH | GATE),
    _tensor("dt_bias", "[HV * K] or [HV, K], added to g in the gate.", functions=BOTH | GATE),
    Argument(
        name="scale",
        type="float | None",
        default=None,
        filled_in=True,
        meaning="factor of the output: 0, or a normal number of float32 (of float64 with float64 q); None: K ** -0.5.",
    ),
    _tensor(
        "initial_state",
        "[N, HV, K, V] float32 or bfloat16 (float64 with float64 q): state before the first token; None: zero. With "
        "``ssm_state_indices`` a pool [slots, HV, K, V], read and advanced in place.",
        needs=Feature.INITIAL_STATE,
        in_steps="[N, HV, K, V]; a pool [slots, HV, K, V] with ``ssm_state_indices``.",
    ),
    _flag("output_final_state", "return the state after the last token.", Feature.FINAL_STATE),
    _flag(
        "use_qk_l2norm_in_kernel",
        "replace q and k by x / sqrt(sum x^2 + 1e-6), computed in float32.",
        Feature.QK_L2NORM,
    ),
    _flag(
        "use_gate_in_kernel",
        "g is raw; the decay is ``-exp(A_log) * softplus(g + dt_bias)``, or with ``lower_bound`` b: "
        "``b * sigmoid(exp(A_log) * (g + dt_bias))``.",
    ),
    _flag("use_beta_sigmoid_in_kernel", "beta holds logits; its sigmoid is used.", Feature.BETA_SIGMOID),
    _flag(
        "allow_neg_eigval",
        "use 2 * sigmoid(beta); needs ``use_beta_sigmoid_in_kernel``.",
        Feature.NEG_EIGVAL,
        beside="use_beta_sigmoid_in_kernel",
    ),
    _flag(
        "safe_gate",
        "a promise that decays lie within [lower_bound, 0) ([-5, 0) without a bound); a backend may use it for speed. "
        "A broken promise may give wrong results (decays below the bound may count as the bound), but never NaN. With "
        "``use_gate_in_kernel`` it needs ``lower_bound``.",
        Feature.SAFE_GATE,
        functions=CHUNK,
    ),
    Argument(
        name="lower_bound",
        type="float | None",
        default=None,
        functions=BOTH | GATE,
        meaning="negative, as ``scale``; chooses the bounded gate, or with ``safe_gate`` alone is the hint's bound.",
    ),
    _flag(
        "disable_recompute",
        "save what the chunks' backward would compute again: faster, more memory, the same gradients. In fla it saves "
        "every intermediate. Here a backend may save only some, or none: its ``kda_core_saved_spec`` says which, and "
        "the guide to training lists them.",
        Feature.DISABLE_RECOMPUTE,
        functions=CHUNK,
    ),
    _flag(
        "return_intermediate_states",
        "also return the state at the start of every chunk; not differentiable.",
        Feature.INTERMEDIATE_STATES,
        functions=CHUNK,
    ),
    _flag("state_v_first", "states are stored [..., V, K].", Feature.STATE_V_FIRST),
    _tensor(
        "cu_seqlens",
        "[N+1] int32 or int64, on the device of q: boundaries of packed sequences (B = 1), from 0, not decreasing. A "
        "sequence may be empty (its state passes through); the last boundary may lie before T. Rows behind it may hold "
        "anything; their output is zero, and so are their gradients.",
        needs=Feature.VARLEN,
    ),
    _tensor(
        "cu_seqlens_cpu",
        "[N+1] copy of ``cu_seqlens`` on the CPU; lets a backend plan without waiting. On other devices "
        "``return_intermediate_states`` needs it.",
        functions=CHUNK,
    ),
    Argument(
        name="cp_context",
        type="Any",
        default=None,
        functions=CHUNK,
        needs=Feature.CONTEXT_PARALLEL,
        in_schema=False,
        meaning="context parallelism; refused unless a backend declares it.",
    ),
    Argument(
        name="chunk_size",
        type="int",
        default=64,
        functions=CHUNK,
        meaning="32 or 64: distance of the intermediate states, and a backend's block size.",
    ),
    _tensor(
        "ssm_state_indices",
        "[N] or [N, 1], int32 or int64, any stride: each sequence's slot of the pool. ``fused_recurrent_kda`` also "
        "takes [N, 1+S], a slot for every token.",
        needs=Feature.PAGED_STATE,
        in_schema=False,
        in_steps="[N], the slot of each sequence, read before its first token and written after its last; or, for "
        "speculative decoding, [N, 1+S]: slot [n, i] is written after token i, and the first is read unless "
        "``num_accepted_tokens`` says otherwise. On the CPU, an index past the pool or a slot that two rows use raises "
        "ValueError; on other devices nothing is read back to check it, an index past the pool is the caller's error "
        "and rows that share a slot race.",
    ),
    _tensor(
        "num_accepted_tokens",
        "[N], from 1 to 1+S: sequence n starts from slot [n, accepted - 1]. Out of range: ValueError on the CPU; "
        "clamped into the range on other devices.",
        functions=RECURRENT,
        needs=Feature.SPEC_DECODE,
        in_schema=False,
    ),
    _flag(
        "inplace_final_state",
        "write the final state over ``initial_state`` [N, HV, K, V] (a pool always is advanced in place).",
        Feature.PAGED_STATE,
        functions=RECURRENT,
        in_schema=False,
    ),
    Argument(
        name="pad_slot_id",
        type="int",
        default=-1,
        in_schema=False,
        in_steps="a row that starts at this index, or at any negative one, is skipped: its output is zero and no slot "
        "is touched; such an index for a later token means that its state is dropped.",
        meaning="a sequence with this index, or any negative one, is skipped: its output is zero and no slot is "
        "touched.",
    ),
    _tensor(
        "out",
        "[B, T, HV, V], dtype of q: written in full and returned as ``o``; no overlap with the inputs.",
        needs=Feature.OUT,
        in_schema=False,
    ),
    Argument(
        name="backend",
        type="str | None",
        default=None,
        functions=BOTH | GATE,
        in_request=False,
        in_schema=False,
        meaning="name of the backend; never falls back to another. None: ``use_backend``, then ``KDA_BACKEND``, then "
        "the best one for the tensors' device.",
    ),
)
"""All arguments, in the order of ``fused_recurrent_kda``'s."""

IN_REQUEST = tuple(a for a in ARGUMENTS if a.in_request)
"""The arguments that are fields of ``Request``."""

DATA = tuple(a.name for a in ARGUMENTS if a.default is REQUIRED)
"""Names of the arguments that every call has: q, k, v, g and beta."""

TENSORS = tuple(a.name for a in ARGUMENTS if a.is_tensor)
FLAGS = tuple(a.name for a in IN_REQUEST if a.is_flag)
NUMBERS = tuple(a.name for a in IN_REQUEST if a.is_number)
PLAIN = tuple(a.name for a in IN_REQUEST if a.is_plain)
"""Fields of ``Request`` that are flags or numbers."""


def arguments_of(function: Function) -> tuple[Argument, ...]:
    """The arguments of a public function, in its order.

    ``chunk_kda`` takes the gate's parameters before ``chunk_size``, as fla's function does.
    """
    found = [a for a in ARGUMENTS if function in a.functions]
    if function == "chunk_kda":
        late = [a for a in found if a.name in ("A_log", "dt_bias")]
        found = [a for a in found if a not in late]
        place = [a.name for a in found].index("chunk_size")
        found[place:place] = late
    return tuple(found)
