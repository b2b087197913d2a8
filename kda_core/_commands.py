"""The commands of ``kda``: ``info``, ``explain``, ``verify`` and ``bench``. Needs the extra ``cli`` (typer and rich).

Exit status: 0 when all is well, 1 when a call is not served or a check fails, 2 for bad arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand

import kda_core
from kda_core import _cli, _explain, _plugins, platforms
from kda_core._cli import MOST_BYTES, example_call, example_context
from kda_core._ledger import Explanation
from kda_core.call_plan import CallPlan
from kda_core.capabilities import Available, Unavailable
from kda_core.errors import KdaError, UnsupportedCall
from kda_core.request import Request

EXIT_NOT_SERVED = 1
NARROWEST = 40
"""Columns of a table on a narrower terminal, which breaks its lines."""
CPU_WHEEL = platforms.WHEEL_OF_RUNTIME["cpu"]
OPS = {f.__name__: f for f in (kda_core.chunk_kda, kda_core.fused_recurrent_kda, kda_core.kda_gate)}
TYPES: dict[str, Any] = {"bool": bool, "int": int, "float | None": float | None}
"""The command line's types of flags and numbers, by the annotations of the public functions."""
PASSED = tuple(
    f.name
    for f in dataclasses.fields(Request)[: list(inspect.signature(Request).parameters).index("save_for_backward")]
    if f.type == "Tensor | None" and f.name not in ("A_log", "cu_seqlens", "ssm_state_indices")
)
"""Optional tensors that have a flag each: the others follow from other options."""
STYLES = {
    **dict.fromkeys(("chosen", "available", "passed", "ready"), "green"),
    **dict.fromkeys(("refused", "untested", "unavailable", "not installed", "switched off", "unsupported"), "yellow"),
    **dict.fromkeys(("broken", "incompatible", "conflict", "FAILED"), "red"),
}

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    # The rich help cuts long option names off on a narrow terminal.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Kimi Delta Attention: what is installed, which backend serves a call, and whether it is right.",
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
BackendName = Annotated[str | None, typer.Option(help="Name of the backend; no other one is tried.")]
DeviceName = Annotated[str | None, typer.Option(help="A torch device; the best one when left out.")]


def _print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2, allow_nan=False))


def _print_table(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    table = Table(title=escape(title), title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(f"[{STYLES[cell]}]{cell}[/]" if cell in STYLES else escape(cell) for cell in row))
    _print(table)


def _print(shown: Table | str) -> None:
    console = Console()
    # Narrower tables lose cells: a COLUMNS of 0 is taken for a width.
    console.width = max(console.width, NARROWEST)
    console.print(shown)


class Command(TyperCommand):
    """A command that loads the backends before it runs, and does not for its help; errors give its exit status."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        # A wheel may print something when it is imported; that is no part of a command's output.
        with contextlib.redirect_stdout(sys.stderr):
            kda_core.backends()
        try:
            return super().invoke(ctx)
        except KdaError as error:
            message, status = str(error), EXIT_NOT_SERVED
        except (ValueError, TypeError) as error:
            message, status = str(error), _cli.EXIT_BAD_ARGUMENTS
        typer.echo(message, err=True)
        raise typer.Exit(status)


@app.command(cls=Command)
def info(as_json: AsJson = False) -> None:
    """Show versions, devices, every backend with its state and reason, entry points and environment variables."""
    found = _cli.info()
    if as_json:
        _print_json(found)
        return
    _print_table("Versions", ("what", "version"), [(n, v or "none") for n, v in found["versions"].items()])
    default = found["default_device"]
    devices = [(d["device"], d["name"], "default" if d["device"] == default else "") for d in found["devices"]]
    _print_table("Devices", ("device", "name", ""), devices)
    if default is None:
        _print(escape(found["default_device_reason"]))
    backends = [row for backend in found["backends"] for row in _backend_rows(backend)]
    _print_table("Backends", ("backend", "device", "state", "priority", "about"), backends)
    entry_points = [(e["name"], e["value"], e["distribution"] or "") for e in found["entry_points"]]
    _print_table("Entry points", ("name", "module", "distribution"), entry_points)
    adapters = [(i["name"], i["state"], i["distribution"], i["reason"] or i["supports"]) for i in found["integrations"]]
    if adapters:
        _print_table("Integrations", ("stack", "state", "wheel", "about"), adapters)
    variables = found["environment"].items()
    environment = [(n, "(unset)" if x is None else x, _cli.ENVIRONMENT_VARIABLES[n]) for n, x in variables]
    _print_table("Environment", ("variable", "value", "meaning"), environment)
    flags = ", ".join(name for name, value in found["platform"].items() if value)
    _print(f"Platform flags that are set: {flags or 'none'}")


def _backend_rows(backend: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row for each device that a loaded backend was asked about, or one with the reason why it is not loaded."""
    title = f"{backend['name']} {backend.get('version', '')}".rstrip()
    if backend["state"] != "loaded":
        return [(title, "", backend["state"], "", backend["reason"])]
    priority = "if named" if backend["priority"] is None else str(backend["priority"])
    state = {True: "available", False: "unavailable"}
    return [
        (title, answer["device"], state[answer["available"]], priority, answer["detail"] or backend["summary"])
        for answer in backend["availability"]
    ]


def _meanings(function: Callable[..., Any]) -> list[tuple[str, str]]:
    """The arguments in a function's docstring; none under ``python -OO``."""
    _, _, text = (inspect.getdoc(function) or "").partition("\nArgs:\n")
    found = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", text.partition("\n\n")[0], flags=re.M)
    return [(name, re.sub(r"\s+", " ", meaning.replace("``", ""))) for name, meaning in found]


def _with_call_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags, numbers and tensors of the public functions, in the place of its ``**given``."""
    own = inspect.signature(command, eval_str=True)
    parameters = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    taken = {n: p for f in OPS.values() for n, p in inspect.signature(f).parameters.items() if p.annotation in TYPES}
    meanings = {name: text for function in reversed(OPS.values()) for name, text in _meanings(function)}
    for name in (f.name for f in dataclasses.fields(Request) if f.name in taken):
        kind, default = TYPES[taken[name].annotation], taken[name].default
        flag = "--" + name.replace("_", "-")
        flag += flag.replace("--", "/--no-") if default is True else ""
        option = typer.Option(default, flag, help=meanings.get(name))
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind))
    for name in PASSED:
        option = typer.Option(False, "--" + name.replace("_", "-"), help=f"Pass {name}.")
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=bool))
    command.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return command


@app.command(cls=Command)
@_with_call_options
def explain(
    ctx: typer.Context,
    op: Annotated[str, typer.Option(help="chunk_kda, fused_recurrent_kda or kda_gate.")] = "chunk_kda",
    shape: Annotated[str, typer.Option(metavar="B,T,H,K,V", help="Sizes of the call.")] = "1,128,2,64,64",
    hv: Annotated[int | None, typer.Option(min=1, help="Value heads HV; H when left out.")] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of q, k and v: bfloat16, float16, float32 or float64.")] = "float32",
    gate_dtype: Annotated[str | None, typer.Option(help="Dtype of g and beta; that of q when left out.")] = None,
    state_dtype: Annotated[str, typer.Option(help="Dtype of the initial state or the pool.")] = "float32",
    device: DeviceName = None,
    strided: Annotated[bool, typer.Option("--strided", help="q, k and v are slices of wider tensors.")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="The inputs require a gradient.")] = False,
    varlen: Annotated[str | None, typer.Option(metavar="0,5,9", help="cu_seqlens of packed sequences.")] = None,
    slots: Annotated[int | None, typer.Option(min=0, help="Size of a pool, with ssm_state_indices.")] = None,
    slots_per_sequence: Annotated[int, typer.Option(min=1, help="Columns 1+S of ssm_state_indices.")] = 1,
    a_log: Annotated[bool | None, typer.Option(help="Pass A_log; left out: where the gate needs it.")] = None,
    intermediate_states_dtype: Annotated[str | None, typer.Option(help="Dtype of the intermediate states.")] = None,
    cp_context: Annotated[
        int | None,
        typer.Option(min=1, max=8192, metavar="RANKS", help="Ranks that share tokens; --shape is one's part."),
    ] = None,
    backend: BackendName = None,
    plan: Annotated[bool, typer.Option("--plan", help="Show what the call would allocate and launch.")] = False,
    chip: Annotated[
        str | None, typer.Option(metavar="sm_90", help="With --plan and --backend: plan for this chip, present or not.")
    ] = None,
    as_json: AsJson = False,
    **given: Any,
) -> None:
    """Say which backend would serve a call, and why the others would not; runs nothing.

    Exit status: 0 when a backend serves it, 1 when none does, 2 when the call itself is wrong.
    """
    if chip is not None and not (plan and backend):
        raise typer.BadParameter("needs --plan and --backend", param_hint="--chip")
    if op not in OPS:
        raise typer.BadParameter(f"expected one of {', '.join(OPS)}, got {op!r}", param_hint="--op")
    if a_log is None:
        a_log = (given["use_gate_in_kernel"] or op == "kda_gate") and given["lower_bound"] is None
    passed = {name: given.pop(name) for name in PASSED} | {"A_log": a_log, "cu_seqlens": varlen is not None}
    if slots is not None:
        passed |= {"initial_state": True, "ssm_state_indices": True}
    # Only what the user wrote is passed on, so that the defaults are those of the call itself.
    sources = {name: ctx.get_parameter_source(name) for name in given}
    written = {name: given[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}
    if intermediate_states_dtype is not None:
        # A name that is none of a dtype's reaches the call, which refuses it.
        written["intermediate_states_dtype"] = getattr(torch, intermediate_states_dtype, intermediate_states_dtype)
    if cp_context is not None:
        if varlen is not None:
            raise typer.BadParameter("does not go with --cp-context", param_hint="--varlen")
        written["cp_context"] = None
    sizes, where = _sizes(shape), _device(device, backend, planned=chip is not None)
    call = example_call(
        OPS[op], written, sizes=sizes, device=where, HV=hv, dtype=dtype, gate_dtype=gate_dtype,
        state_dtype=state_dtype, bounds=None if varlen is None else _integers(varlen, "--varlen"), slots=slots,
        slots_per_sequence=slots_per_sequence, strided=strided, backward=backward,
        present={n for n, given in passed.items() if given},
    )  # fmt: skip
    with contextlib.ExitStack() as ranks:
        if cp_context is not None:
            call["cp_context"] = ranks.enter_context(example_context(sizes, where, cp_context))
        if plan:
            _show_plans(_explain.plan(**call, op=op, backend=backend, chip=chip), as_json)
            return
        explanation = kda_core.explain(**call, op=op, backend=backend)
    _show_explanation(explanation, op, as_json)
    if explanation.chosen is None:
        raise typer.Exit(EXIT_NOT_SERVED)


def _show_explanation(explanation: Explanation, op: str, as_json: bool) -> None:
    if as_json:
        _print_json(dataclasses.asdict(explanation))
    else:
        title = f"{op} is served by {explanation.chosen}" if explanation.chosen else f"no backend serves this {op}"
        rows = [(v.backend, v.status, v.reason) for v in explanation.verdicts]
        _print_table(title, ("backend", "verdict", "reason"), rows)
        for transfer in explanation.transfers:
            typer.echo(transfer)


def _show_plans(plans: tuple[CallPlan, ...], as_json: bool) -> None:
    if as_json:
        found = [dataclasses.asdict(one) for one in plans]
        for buffer in (buffer for plan in found for buffer in plan["buffers"]):
            buffer["dtype"] = str(buffer["dtype"]).removeprefix("torch.")
        _print_json({"plans": found})
        return
    for one in plans:
        rows = []
        for n, step in enumerate(one.steps):
            registers = "" if step.registers is None else f"at most {step.registers}"
            rows.append((str(n), step.name, " x ".join(map(str, step.grid)), str(step.num_warps or ""), registers))
        _print_table(f"{one.name} on {one.chip}: steps", ("step", "name", "programs", "warps", "registers"), rows)
        buffers = []
        for b in one.buffers:
            dtype, held = str(b.dtype).removeprefix("torch."), f"{b.steps[0]} to {b.steps[1]}"
            buffers.append((b.name, b.role, " x ".join(map(str, b.shape)), dtype, f"{b.nbytes:,}", held))
        columns = ("buffer", "role", "shape", "dtype", "bytes", "held in steps")
        _print_table(f"{one.name} on {one.chip}: buffers", columns, buffers)
        share = f", {one.bytes_moved / one.bytes_floor:.1f} times the inputs and results" if one.bytes_floor else ""
        typer.echo(
            f"{one.bytes_moved:,} bytes pass between steps{share}; at most {one.peak_scratch:,} bytes of scratch"
        )


@app.command(cls=Command)
def verify(
    backend: BackendName = None,
    device: DeviceName = None,
    case: Annotated[list[str] | None, typer.Option(help="Run this case alone; may be given again.")] = None,
    as_json: AsJson = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print the error and the budget of outputs.")
    ] = False,
) -> None:
    """Compare a backend with the float64 oracle: every function, pools, drafts, the gate, forward and gradients.

    Prints a line for each case when it ends, and failures in full. Without --backend and KDA_BACKEND: every installed
    backend that can run on the device. Exit status: 0 when every output is within its budget, 1 when one is not or
    nothing could be run, 2 for bad arguments.
    """
    started = time.perf_counter()
    rows: dict[str, list[Any]] = {}
    names, where = _to_verify(_plugins.requested_name(backend), device)
    for name in names:
        if not as_json:
            typer.echo(f"{name} on {where}, against the float64 oracle")
        # Imported here: the kit's cases take longer to load than the other commands take to run.
        from kda_core.testing import verify as kit

        rows[name] = []
        for found in kit.by_case(name, where, case or ()):
            rows[name] += found
            for line in () if as_json else _case_lines(found, verbose):
                typer.echo(line)
    verdicts = Counter(row.verdict for name in names for row in rows[name])
    compared = sum(bool(row.output) for name in names for row in rows[name])
    if as_json:
        as_data = {name: [_json_row(row) for row in rows[name]] for name in names}
        passed = compared > 0 and not verdicts["FAILED"]
        _print_json({"device": str(where), "passed": passed, "verdicts": verdicts, "backends": as_data})
    else:
        seconds = time.perf_counter() - started
        typer.echo(
            f"{compared} outputs compared, {verdicts['FAILED']} failures, {verdicts['refused']} calls refused, "
            f"{verdicts['untested']} features or dtypes untested, in {seconds:.1f} s"
        )
    # A run without a comparison is a failure.
    if verdicts["FAILED"] or not compared:
        raise typer.Exit(EXIT_NOT_SERVED)


@app.command(cls=Command)
def bench(
    shape: Annotated[str, typer.Option(metavar="B,T,H,K[,V]", help="Sizes of the call.")] = "1,2048,16,128",
    dtype: Annotated[str | None, typer.Option(help="Dtype of all inputs; bfloat16, on a CPU float32.")] = None,
    gate: Annotated[str, typer.Option(help="bounded, softplus, or given: decays from the caller.")] = "bounded",
    device: DeviceName = None,
    backend: BackendName = None,
    seconds: Annotated[float, typer.Option(help="Seconds of timing each call.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Time a forward, a training step and a decoding step of one shape, beside fla where it is installed.

    Exit status: 0 when all of them are served, 1 when one is not, 2 for bad arguments.
    """
    # Imported here, as for verify: its inputs are the kit's.
    from kda_core import _bench as measured

    sizes = _sizes(shape, fewest=4, least=1)
    where = measured.device_for(device, backend)
    dtype = dtype or ("float32" if where.type == "cpu" else "bfloat16")
    for option, value, known in (("dtype", dtype, measured.DTYPES), ("gate", gate, measured.GATES)):
        if value not in known:
            raise ValueError(f"--{option}: expected one of {', '.join(known)}, got {value!r}")
    if not 0 < seconds < math.inf:
        raise ValueError(f"--seconds: expected a finite number above 0, got {seconds}")
    try:
        calls = measured.calls(sizes, measured.DTYPES[dtype], gate)
        rows = {name: measured.measure(call, backend, where, seconds) for name, call in calls.items()}
    # A call that is too large for the memory raises RuntimeError.
    except (KdaError, RuntimeError, MemoryError) as error:
        raise UnsupportedCall(measured.reason(error)) from None
    machine = _cli.device_name(where)
    if as_json:
        facts = {"device": machine, "shape": shape, "dtype": dtype, "gate": gate}
        versions = _cli.versions() | {"fla": _cli.version_of("fla-core")}
        _print_json(facts | {"versions": versions, "rows": rows})
        return
    table = []
    for name, row in rows.items():
        ours, theirs = (row["ms"].get(library) for library in ("kda_core", "fla"))
        beside = (f"{theirs:.4g}", f"{theirs / ours:.2f}") if theirs else ("", "")
        table.append((name, f"{ours:.4g}", *beside))
    columns = ("call", "kda_core ms", "fla ms", "fla / kda_core")
    _print_table(f"{shape}, {dtype}, {gate} gate, {machine}", columns, table)
    for note in dict.fromkeys(row["left_out"]["fla"] for row in rows.values() if row["left_out"]):
        typer.echo(f"without fla: {note}")


def _json_row(row: Any) -> dict[str, Any]:
    # JSON has no infinity, which is the error of a result that is not finite.
    fields = dataclasses.asdict(row) | {"passed": row.passed}
    return {n: None if isinstance(x, float) and not math.isfinite(x) else x for n, x in fields.items()}


def _case_lines(rows: list[Any], verbose: bool) -> Iterator[str]:
    """A case in a line; below it what failed, and all outputs if that is asked for."""
    outputs = [row for row in rows if row.output]
    # A limited backend refuses the case and passes the nearest one that it serves.
    shown = next((row for row in rows if not row.passed), (outputs or rows)[-1])
    facts = shown.note if not outputs and shown.passed else ""
    if outputs and shown.passed:
        facts = f"outputs: {len(outputs)}, at most {max(row.share for row in outputs):.0%} of the budget"
    yield f"  {typer.style(f'{shown.verdict:9}', fg=STYLES[shown.verdict])}{shown.case}{facts and ': '}{facts}"
    if not shown.passed:
        yield from (f"      {line}" for line in shown.note.splitlines())
    for row in rows if verbose else ():
        # The share is that of the worse of two errors, of which the relative one is shown.
        yield (
            f"      {row.output}: error {row.error:.1e}, budget {row.budget:.1e}, {row.share:.0%} used, {row.verdict}"
            if row.output
            else f"      {row.verdict}: {row.note}"
        )


def _to_verify(name: str | None, device: str | None) -> tuple[list[str], torch.device]:
    """Which backends to check, and where; UnsupportedCall when none can run there."""
    found = _plugins.registry.backends if name is None else (_plugins.registry.named(name),)
    wanted = _cli.machine_devices() if device is None else [_device(device)]
    reasons = []
    for where in wanted:
        answers = {b.info.name: b.availability(where) for b in found if name is not None or b.info.priority is not None}
        if able := [own for own, answer in answers.items() if isinstance(answer, Available)]:
            return able, where
        reasons += [f"{own} on {where}: {a.reason}" for own, a in answers.items() if isinstance(a, Unavailable)]
    raise UnsupportedCall("; ".join(reasons) or f"no backend is installed: {platforms.install_command(CPU_WHEEL)}")


def _integers(text: str, option: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option}: expected whole numbers with commas between them, got {text!r}") from None


def _sizes(text: str, fewest: int = 5, least: int = 0) -> tuple[int, int, int, int, int]:
    """B, T, H, K, V; V may be left out where four sizes are enough, and is K then."""
    numbers = _integers(text, "--shape")
    if not fewest <= len(numbers) <= 5 or min(numbers) < least or max(numbers) >= MOST_BYTES:
        count = "five" if fewest == 5 else "four or five"
        raise ValueError(f"--shape: expected {count} sizes B,T,H,K,V from {least} to below 2**62, got {text!r}")
    return (*numbers[:4], numbers[-1])  # type: ignore[return-value]  # the length was checked


def _device(name: str | None, backend: str | None = None, planned: bool = False) -> torch.device:
    """``planned``: where none is named, one that the backend is for, which this machine need not have."""
    if name is None and backend and planned:
        return torch.device(_plugins.registry.named(backend).info.device_types[0])
    if name is None:
        try:
            with kda_core.use_backend(backend) if backend else contextlib.nullcontext():
                return kda_core.default_device()
        except UnsupportedCall:
            return _cli.machine_devices()[0]
    try:
        return torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device: expected a torch device such as cpu or cuda:0, got {name!r}") from None
