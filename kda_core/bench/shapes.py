"""The shapes that are timed, and how the command line spells them."""

from __future__ import annotations

from dataclasses import dataclass

RAGGED = (1300, 547, 2048, 963, 271, 3063)
"""Lengths of uneven sequences that are packed into 8192 tokens."""

SYNTAX = "B,T,H,K[,V][:hv=N][:packed=16x512|3+5+8][:pool]"


@dataclass(frozen=True)
class Shape:
    """Sizes of a call.

    Attributes:
        B, T, H, K: batch, tokens, query/key heads, key channels.
        V: value channels (0: K). HV: value heads (0: H).
        lengths: tokens of every packed sequence; empty: B sequences of T tokens.
        pool: states lie in a pool of slots and are advanced in place (inference only).
    """

    B: int
    T: int
    H: int
    K: int
    V: int = 0
    HV: int = 0
    lengths: tuple[int, ...] = ()
    pool: bool = False

    def __post_init__(self) -> None:
        # A frozen dataclass writes its own defaults this way.
        object.__setattr__(self, "V", self.V or self.K)
        object.__setattr__(self, "HV", self.HV or self.H)
        if min(self.B, self.T, self.H, self.K, self.V, self.HV, *self.lengths) < 1:
            raise ValueError(f"expected sizes of 1 and more, got {self}")
        if self.HV % self.H:
            raise ValueError(f"hv: expected a multiple of H = {self.H}, got {self.HV}")
        if self.lengths and (self.B != 1 or sum(self.lengths) != self.T):
            raise ValueError(
                f"packed: expected B = 1 and lengths that add up to T = {self.T}, "
                f"got B = {self.B} and {sum(self.lengths)}"
            )

    @property
    def N(self) -> int:
        """Number of sequences."""
        return len(self.lengths) or self.B

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths, default=self.T)

    def __str__(self) -> str:
        words = [",".join(map(str, (self.B, self.T, self.H, self.K, *([self.V] if self.V != self.K else []))))]
        words += [f"hv={self.HV}"] if self.HV != self.H else []
        words += [f"packed={_spelled(self.lengths)}"] if self.lengths else []
        words += ["pool"] if self.pool else []
        return ":".join(words)


def _spelled(lengths: tuple[int, ...]) -> str:
    even = len(set(lengths)) == 1
    return f"{len(lengths)}x{lengths[0]}" if even else "+".join(map(str, lengths))


def parse(text: str) -> Shape:
    """The shape that ``text`` spells, as ``str`` of a shape does.

    Raises:
        ValueError: it spells none.
    """
    sizes, *words = text.split(":")
    try:
        numbers = [int(n) for n in sizes.split(",")]
        if len(numbers) not in (4, 5):
            raise ValueError(f"{len(numbers)} sizes")
        options: dict[str, object] = {}
        for word in words:
            name, _, value = word.partition("=")
            if name == "hv":
                options["HV"] = int(value)
            elif name == "packed" and "x" in value:
                count, length = value.split("x")
                options["lengths"] = (int(length),) * int(count)
            elif name == "packed":
                options["lengths"] = tuple(int(n) for n in value.split("+"))
            elif word == "pool":
                options["pool"] = True
            else:
                raise ValueError(f"{word!r} is no word of it")
        return Shape(*numbers, **options)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"shape: expected {SYNTAX}, got {text!r} ({error})") from None


def _parsed(*texts: str) -> tuple[Shape, ...]:
    return tuple(map(parse, texts))


_PACKED_RAGGED = "packed=" + "+".join(map(str, RAGGED))

HEADLINE_INFERENCE = _parsed(
    "1,8192,96,128",
    "1,8192,32,128",
    "1,8192,4,128",
    "1,2048,12,128",
    "1,512,64,128",
    "8,1024,32,128",
    "1,8192,32,128:packed=16x512",
)
HEADLINE_TRAINING = _parsed(
    "1,8192,96,128",
    "1,8192,32,128",
    "2,16384,16,128",
    "1,8192,8,128",
    "1,2048,12,128",
)
SERVING = _parsed(
    "1,8192,32,128:packed=16x512:pool",
    "1,8192,32,128:packed=256x32:pool",
    "1,16384,32,128:packed=4x4096:pool",
    "1,8192,4,128:packed=16x512:pool",
    "1,8192,4,128:packed=256x32:pool",
    "1,16384,4,128:packed=4x4096:pool",
    f"1,8192,96,128:{_PACKED_RAGGED}",
    # A decoding step batched with the prefill of one prompt.
    "1,2049,32,128:packed=1+2048:pool",
    "64,128,32,128",
    "1,8192,12,128",
    "1,8192,4,128",
    "1,16384,4,128",
    "1,32768,4,128",
    "1,512,64,128",
)
FULL_INFERENCE = _parsed(
    "1,8192,96,128",
    "1,8192,64,128",
    "2,8192,64,128",
    "1,1024,64,128",
    "1,131072,32,128",
    "1,65536,8,128",
    "8,1024,32,128",
    "8,1024,8,64",
    "8,2048,32,256",
    "1,8192,16,128:hv=32",
)
FULL_TRAINING = _parsed(
    f"1,8192,96,128:{_PACKED_RAGGED}",
    "4,2048,16,128",
    "4,4096,64,128",
    "4,4096,8,128",
    "1,4096,32,128",
    "1,65536,32,128",
    "1,65536,4,128",
    "1,65536,8,128",
    "8,2048,32,256",
    "8,1024,8,64",
    "1,8192,16,128:hv=32",
)
CPU_INFERENCE = _parsed("1,512,8,128", "1,2048,8,128", "1,2048,8,64", "8,64,4,64")
CPU_TRAINING = _parsed("1,512,8,128", "1,512,8,64")
QUICK_INFERENCE = _parsed("1,64,2,32", "1,66,2,32:packed=40+1+25:pool")
QUICK_TRAINING = _parsed("1,64,2,32", "1,66,2,32:packed=40+1+25")


def named(name: str, training: bool, gpu: bool) -> tuple[Shape, ...]:
    """The shapes of a set: "headline", "full", "serving" or "quick".

    Raises:
        ValueError: a set of shapes that are too large for a CPU.
    """
    if name == "quick":
        return QUICK_TRAINING if training else QUICK_INFERENCE
    if not gpu and name != "headline":
        raise ValueError(f"set: expected headline on a CPU, got {name}; any shapes can be named by --shapes")
    if not gpu:
        return CPU_TRAINING if training else CPU_INFERENCE
    sets = {
        "headline": HEADLINE_TRAINING if training else HEADLINE_INFERENCE,
        "full": (*HEADLINE_TRAINING, *FULL_TRAINING) if training else (*HEADLINE_INFERENCE, *FULL_INFERENCE, *SERVING),
        "serving": () if training else SERVING,
    }
    return tuple(dict.fromkeys(sets[name]))


SETS = ("headline", "full", "serving")
