"""The command line: info, explain, verify."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
import toys
from toys import installed, no_wheels
from typer.testing import CliRunner

from kda_core import _cli, _commands, platforms
from kda_core.__main__ import main
from kda_core._plugins import Registry
from kda_core.call_plan import CallPlan, PlannedBuffer, PlannedStep
from kda_core.capabilities import Available, Feature, Unavailable
from kda_core.hookspecs import CONTRACT_VERSION, hookimpl
from kda_core.reference import ReferenceBackend
from kda_core.request import ForwardResult

AVAILABLE = Available("a detail")
ORACLES = ReferenceBackend().kda_core_backend().capabilities.features
HOOKS_MISSING = {Feature.BACKWARD, Feature.RECURRENT_BACKWARD, Feature.GATE, Feature.GATE_BACKWARD}
ACCEPTED = ORACLES - HOOKS_MISSING | {Feature.CONTEXT_PARALLEL}


class Toy(toys.Toy):
    """A backend that accepts everything by default and remembers what it was asked about."""

    def __init__(self, availability=AVAILABLE, features=ACCEPTED, value=0.0, with_state=False):
        every = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        super().__init__("toy", None, features, availability=availability, value=value, dtypes=every)
        self.with_state = with_state

    @hookimpl
    def kda_core_chunk_forward(self, request):
        final_state = None
        if self.with_state:
            final_state = torch.full(request.state_shape, self.value, dtype=request.state_dtype)
        return ForwardResult(torch.full_like(request.v, self.value), final_state)

    @hookimpl
    def kda_core_recurrent_forward(self, request):
        return self.kda_core_chunk_forward(request)

    @hookimpl
    def kda_core_chunk_begin(self, request):
        raise NotImplementedError

    kda_core_chunk_begin_backward = kda_core_chunk_begin

    @hookimpl
    def kda_core_chunk_finish(self, request, kept, starts):
        raise NotImplementedError

    @hookimpl
    def kda_core_chunk_finish_backward(self, request, kept, ends):
        raise NotImplementedError


def run(*arguments):
    return CliRunner().invoke(_commands.app, [str(a) for a in arguments])


def run_json(*arguments):
    return json.loads(run(*arguments, "--json").stdout)


def test_info_shows_every_part_as_tables(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = run("info")
    assert result.exit_code == 0
    for text in ("Versions", "Devices", "Backends", "Entry points", "Environment", "Platform flags", "reference 1.0"):
        assert text in result.stdout


@pytest.mark.parametrize("columns", ["0", "1"])
def test_no_cell_is_lost_on_a_narrow_terminal(columns, monkeypatch):
    def letters(width):
        monkeypatch.setenv("COLUMNS", width)
        return sorted(run("info").stdout.translate(dict.fromkeys(map(ord, " \n|+-━─┃│┏┓┡┩┳╇└┘┴┼┌┐├┤┬╋"))))

    assert letters(columns) == letters("300")


def test_info_as_json(monkeypatch):
    monkeypatch.setenv("KDA_BACKEND", "reference")
    found = run_json("info")
    assert found["versions"]["plugin contract"] == str(CONTRACT_VERSION)
    assert found["versions"]["torch"] == metadata.version("torch")
    assert found["devices"][-1]["device"] == "cpu"
    assert found["environment"]["KDA_BACKEND"] == "reference"
    assert found["platform"].keys() == platforms.flags().keys()
    (oracle,) = (b for b in found["backends"] if b["name"] == "reference")
    assert oracle["state"] == "loaded"
    assert oracle["availability"] == [{"device": "cpu", "available": True, "detail": ""}]
    assert set(oracle["features"]) == {f.name for f in Feature} - {"CONTEXT_PARALLEL"}
    assert list(oracle["closed"]) == ["CONTEXT_PARALLEL"]


@pytest.mark.end_to_end
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("command", [["info"], ["info", "--json"]])
def test_a_full_disk_behind_the_output_is_said_in_a_line(command):
    with open("/dev/full", "w") as full:
        line = [sys.executable, "-m", "kda_core", *command]
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "kda: No space left on device\n")


@pytest.mark.end_to_end
def test_what_a_wheel_prints_when_it_is_imported_is_no_json(tmp_path):
    (tmp_path / "loud.py").write_text("print('hello')")
    facts = tmp_path / "loud-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: loud\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[kda_core.backends.v1]\nloud = loud\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "kda_core", "info", "--json"]
    options = {"env": os.environ | {"PYTHONPATH": path}, "capture_output": True, "text": True, "check": True}
    done = subprocess.run(command, **options)
    assert "loud" in [b["name"] for b in json.loads(done.stdout)["backends"]]
    assert done.stderr.startswith("hello")
    # A help text loads no backend.
    done = subprocess.run([*command[:-1], "--help"], **options)
    assert "--json" in done.stdout
    assert done.stderr == ""


def test_versions_come_from_the_distributions():
    assert _cli.version_of("pluggy") == metadata.version("pluggy")
    assert _cli.version_of("a-distribution-that-nobody-installed") is None


def test_info_names_wheels_that_are_not_installed():
    with no_wheels():
        (wheel,) = (b for b in run_json("info")["backends"] if b["name"] == "amd")
        assert "not installed" in run("info").stdout
    reason = "pip install ./backends/amd in a checkout of kda-core"
    assert wheel == {"name": "amd", "state": "not installed", "reason": reason}


class Hookless(Toy):
    kda_core_chunk_forward = None


def test_info_shows_a_broken_backend_with_its_reason():
    fresh = Registry(entry_points=())
    assert fresh.register(Hookless()).state == "broken"
    (found,) = (b for b in _cli.info(fresh)["backends"] if b["name"] == "toy")
    assert found["state"] == "broken"
    assert found["reason"] == "missing hooks: kda_core_chunk_forward"
    assert found["availability"] == []


@pytest.mark.parametrize(
    ("answer", "available", "detail"),
    [
        (Available("a detail"), True, "a detail"),
        (Unavailable("the driver is too old"), False, "the driver is too old"),
        (RuntimeError("no driver"), False, "kda_core_availability failed: RuntimeError: no driver"),
    ],
)
def test_info_says_whether_a_backend_can_run_here_even_when_its_hook_raises(answer, available, detail):
    with installed(Toy(availability=answer)):
        (toy,) = (b for b in run_json("info")["backends"] if b["name"] == "toy")
        assert toy["availability"] == [{"device": "cpu", "available": available, "detail": detail}]


def test_info_without_a_backend_says_what_to_install():
    with no_wheels():
        result = run("info")
    assert result.exit_code == 0
    assert "pip install ./backends/cpu in a checkout" in " ".join(result.stdout.split())


def test_explain_exits_with_0_when_the_call_is_served():
    result = run("explain", "--backend", "reference", "--shape", "2,7,2,8,8", "--device", "cpu")
    assert result.exit_code == 0
    assert "chunk_kda is served by reference" in result.stdout
    found = run_json("explain", "--backend", "reference", "--device", "cpu")
    assert found["chosen"] == "reference"
    assert {"backend": "reference", "status": "chosen", "reason": ""} in found["verdicts"]


def test_explain_exits_with_1_when_the_call_is_not_served(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = run("explain", "--device", "cpu", "--backend", "nochip")
    assert result.exit_code == 1
    assert "backend 'nochip' is not installed" in result.output


def test_explain_says_what_ranks_send():
    asked = ("explain", "--device", "cpu", "--cp-context", "4", "--shape", "2,128,4,64,32", "--hv", "8")
    each = 2 * 8 * 64 * (64 + 32) * 4
    found = run_json(*asked, "--backward", "--backend", "reference")
    assert found["chosen"] == "reference"
    for transfer, direction in zip(found["transfers"], ("forward", "backward"), strict=True):
        assert (transfer["direction"], transfer["collective"]) == (direction, "all_gather")
        assert (transfer["ranks"], transfer["nbytes"]) == (4, each)
    result = run(*asked)
    assert f"forward: all_gather among 4 ranks, {each:,} bytes of each: M and b" in result.stdout
    assert "backward" not in result.stdout
    assert run_json("explain", "--device", "cpu", "--cp-context", "1")["transfers"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cp-context", "2", "--varlen", "0,128"), "--varlen"),
        (("--cp-context", "2", "--op", "kda_gate"), "cp_context: not taken by kda_gate"),
        (("--op", "flash_kda"), "chunk_kda, fused_recurrent_kda, kda_gate"),
        (("--shape", "1,2,3"), "B,T,H,K,V"),
        (("--shape", "1,2,x,4,5"), "whole numbers"),
        (("--shape", "1,8,3,8,8", "--hv", "4"), "multiple of H = 3"),
        (("--dtype", "int8"), "bfloat16, float16, float32, float64"),
        (("--device", "abacus"), "--device"),
        (("--varlen", "0,9,5"), "do not decrease"),
        (("--varlen", "1,9"), "cu_seqlens"),
        (("--varlen", "0,9", "--shape", "2,9,1,8,8"), "B = 1"),
        (("--cu-seqlens-cpu",), "cu_seqlens"),
        (("--lower-bound", "1", "--use-gate-in-kernel"), "lower_bound"),
        (("--use-gate-in-kernel", "--no-a-log"), "A_log"),
        (("--chunk-size", "48"), "chunk_size"),
        (("--allow-neg-eigval",), "use_beta_sigmoid_in_kernel"),
        (("--num-accepted-tokens", "--slots", "4"), "num_accepted_tokens: not taken by chunk_kda"),
        (("--op", "kda_gate", "--safe-gate"), "safe_gate: not taken by kda_gate"),
        (("--return-intermediate-states", "--intermediate-states-dtype", "int8"), "intermediate_states_dtype"),
        (("--no-such-option",), "--no-such-option"),
    ],
)
def test_explain_exits_with_2_when_the_call_is_wrong(arguments, message):
    result = run("explain", "--device", "cpu", *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.output


def test_explain_has_every_option_and_every_tensor_of_the_public_functions():
    options = {name.lower() for name in inspect.signature(_commands.explain).parameters}
    named_otherwise = {"q", "k", "v", "g", "beta", "cu_seqlens", "ssm_state_indices"}
    for function in _commands.OPS.values():
        wanted = {name.lower() for name in inspect.signature(function).parameters} - named_otherwise
        assert wanted <= options, function.__name__


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--shape 2,9,2,8,16 --hv 4", {"B": 2, "T": 9, "H": 2, "HV": 4, "K": 8, "V": 16}),
        ("--dtype bfloat16", {"q.dtype": torch.bfloat16, "g.dtype": torch.bfloat16}),
        ("--dtype bfloat16 --gate-dtype float32", {"q.dtype": torch.bfloat16, "beta.dtype": torch.float32}),
        ("--strided", {"q.is_contiguous": False, "v.is_contiguous": False, "g.is_contiguous": True}),
        ("--varlen 0,3,3,7 --cu-seqlens-cpu", {"N": 3, "cu_seqlens_cpu.device": torch.device("cpu")}),
        ("--initial-state --state-dtype bfloat16", {"state_dtype": torch.bfloat16}),
        ("--initial-state --state-v-first", {"state_v_first": True, "initial_state.shape": (1, 2, 64, 32)}),
        ("--use-gate-in-kernel --dt-bias", {"A_log.shape": (2,), "dt_bias.shape": (2, 32), "lower_bound": None}),
        ("--use-gate-in-kernel --lower-bound -4 --safe-gate", {"A_log": None, "lower_bound": -4.0, "safe_gate": True}),
        ("--use-gate-in-kernel --lower-bound -4 --a-log", {"A_log.shape": (2,)}),
        ("--use-beta-sigmoid-in-kernel --allow-neg-eigval", {"allow_neg_eigval": True}),
        ("--use-qk-l2norm-in-kernel --scale 0.5", {"use_qk_l2norm_in_kernel": True, "scale": 0.5}),
        ("--output-final-state --return-intermediate-states", {"return_intermediate_states": True}),
        ("--disable-recompute --chunk-size 32", {"disable_recompute": True, "chunk_size": 32}),
        ("--batch-invariant", {"batch_invariant": True, "disable_recompute": False}),
        ("--slots 9 --pad-slot-id -7", {"ssm_state_indices.shape": (1, 1), "pad_slot_id": -7}),
        ("--slots 9 --has-initial-state", {"has_initial_state.dtype": torch.bool, "update_state": True}),
        (
            "--slots 9 --final-state-indices --final-state-pool",
            {"final_state_indices.shape": (1, 1), "final_state_pool.shape": (9, 2, 32, 64)},
        ),
        (
            "--return-intermediate-states --intermediate-states-dtype bfloat16 --initial-state --state-dtype float16",
            {"h_dtype": torch.bfloat16, "state_dtype": torch.float16},
        ),
        (
            "--op fused_recurrent_kda --shape 3,2,2,32,64 --slots 9 --records --commit --num-committed --commit-path",
            {"records.shape": (3, 2, 2, 128), "update_state": False, "commit_path.shape": (3, 2), "parents": None},
        ),
        (
            "--slots 9 --checkpoint-indices --checkpoint-every 128 --checkpoint-pool",
            {"checkpoint_indices.shape": (1, 1), "checkpoint_every": 128, "checkpoint_pool.shape": (9, 2, 32, 64)},
        ),
        ("--slots 9 --no-update-state", {"has_initial_state": None, "update_state": False}),
        ("--out", {"out.shape": (1, 128, 2, 64)}),
        ("--op fused_recurrent_kda --initial-state --inplace-final-state", {"inplace_final_state": True}),
        (
            "--op fused_recurrent_kda --shape 3,2,2,32,64 --slots 9 --slots-per-sequence 4 --num-accepted-tokens",
            {
                "ssm_state_indices.shape": (3, 4),
                "num_accepted_tokens.shape": (3,),
                "initial_state.shape": (9, 2, 32, 64),
            },
        ),
    ],
)
def test_explain_passes_every_option_on(arguments, expected):
    toy = Toy()
    with installed(toy):
        result = run("explain", "--shape", "1,128,2,32,64", "--device", "cpu", "--backend", "toy", *arguments.split())
        assert result.exit_code == 0, result.output
    (request,) = {id(r): r for r in toy.rejections}.values()
    for path, value in expected.items():
        found = request
        for name in path.split("."):
            found = getattr(found, name)
        assert (found() if callable(found) else found) == value, path


class Planner(Toy):
    """A toy that makes plans for one chip."""

    @hookimpl
    def kda_core_plan(self, request, chip):
        if chip not in (None, "one"):
            raise ValueError(f"chip: expected one, got {chip!r}")
        step = PlannedStep("multiply", (3, 1, 1), 4, 80)
        buffer = PlannedBuffer("o", tuple(request.v.shape), request.v.dtype, "result", (0, 0), 4096)
        return (CallPlan("forward", chip or "this", (step, PlannedStep("copy")), (buffer,), 300, 100, 50),)


PLAN = ("explain", "--plan", "--backend", "toy", "--device", "cpu")


def test_a_plan_is_shown(monkeypatch):
    """Steps, buffers, bytes against the floor; for this device, or for a chip."""
    monkeypatch.setenv("COLUMNS", "200")
    with installed(Planner()):
        shown = run(*PLAN)
        (plan,) = run_json(*PLAN, "--chip", "one")["plans"]
    assert shown.exit_code == 0
    for part in ("forward on this", "multiply", "at most 80", "4,096", "3.0 times the inputs and results"):
        assert part in " ".join(shown.stdout.split())
    assert plan["chip"] == "one"
    assert plan["steps"][0] == {"name": "multiply", "grid": [3, 1, 1], "num_warps": 4, "registers": 80}
    assert plan["buffers"][0]["dtype"] == "float32"
    assert (plan["bytes_moved"], plan["bytes_floor"], plan["peak_scratch"]) == (300, 100, 50)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--plan", "--backend", "toy", "--chip", "two"), 2, "chip: expected one, got 'two'"),
        (("--plan", "--chip", "one"), 2, "needs --plan and --backend"),
        (("--backend", "toy", "--chip", "one"), 2, "needs --plan and --backend"),
        (("--plan", "--backend", "reference"), 1, "backend 'reference' makes no plans"),
        (("--plan", "--backend", "nochip"), 1, "backend 'nochip' is not installed"),
        (("--plan", "--backend", "toy", "--chip", "one", "--shape", "1,5,2,8,8", "--backward"), 1, "refuses this call"),
        (("--plan", "--backend", "toy", "--shape", "1,2"), 2, "expected five sizes"),
    ],
)
def test_what_no_plan_is_made_for(arguments, status, message):
    with installed(Planner()):
        result = run("explain", "--device", "cpu", *arguments)
    assert result.exit_code == status
    assert message in result.output


def test_explain_of_a_call_of_any_size_takes_no_memory():
    found = run_json("explain", "--shape", "64,1048576,96,128,128", "--device", "cpu", "--backend", "reference")
    assert found["chosen"] == "reference"


@pytest.mark.end_to_end
def test_explain_of_a_device_that_torch_was_not_built_for_answers():
    """In a process of its own: autograd on such a device ends it."""
    options = "--device cuda --strided --backward --use-gate-in-kernel --dt-bias --initial-state --json"
    command = [sys.executable, "-m", "kda_core", "explain", *options.split()]
    # Not in the checkout, whose kda_core would be taken instead of the installed one.
    child = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    assert child.returncode in (0, 1), child.stderr
    assert json.loads(child.stdout)["op"] == "chunk_kda"


def verify(*arguments):
    """Two quick cases alone."""
    return run("verify", "--case", "one token", "--case", "K 60 V 36", *arguments)


def test_verify_compares_with_the_oracle():
    result = verify("--backend", "reference")
    assert result.exit_code == 0, result.output
    assert "reference on cpu" in result.stdout
    assert "4 outputs compared, 0 failures" in result.stdout
    found = json.loads(verify("--backend", "reference", "--json").stdout)
    assert found["passed"] is True
    compared = [row for row in found["backends"]["reference"] if row["output"]]
    assert [row["output"] for row in compared] == ["o", "final_state"] * 2
    assert all(row["error"] <= row["budget"] for row in compared)


def test_verify_prints_a_case_when_it_ends():
    """And not all of them at the end: here the second case never ends."""

    class Stopping(Toy):
        @hookimpl
        def kda_core_recurrent_forward(self, request):
            raise KeyboardInterrupt

    with installed(Stopping(with_state=True)):
        result = run("verify", "--backend", "toy", "--case", "one token", "--case", "decoding step")
    assert result.exit_code != 0
    lines = result.stdout.splitlines()
    assert lines[:2] == ["toy on cpu, against the float64 oracle", "  FAILED   one token"]


def test_verify_prints_failures_in_full_and_outputs_when_asked():
    with installed(Toy(value=0.0, with_state=True)):
        short, long = verify("--backend", "toy").stdout, verify("--backend", "toy", "-v").stdout
    place = r"at token 0 of sequence 0, head 0: got \[0, 0, 0\], expected \["
    assert re.search(rf"FAILED   one token\n.*\n +o: relative error 1 \(budget .*\), worst row .* {place}", short)
    assert "o: error" not in short
    assert re.search(r"\n +o: error 1.0e\+00, budget .*, [\d,.e+]+% used, FAILED", long)


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_verify_exits_with_1_when_a_result_is_wrong(value):
    with installed(Toy(value=value, with_state=True)):
        result, found = verify("--backend", "toy"), json.loads(verify("--backend", "toy", "--json").stdout)
    assert result.exit_code == 1
    assert "FAILED" in result.stdout
    assert found["passed"] is False
    assert not any(row["passed"] for row in found["backends"]["toy"] if row["output"] == "o")


def test_verify_exits_with_1_when_the_contract_is_broken(monkeypatch):
    """A final state was asked for and does not come."""
    monkeypatch.setenv("COLUMNS", "200")
    with installed(Toy()):
        result = verify("--backend", "toy")
    assert result.exit_code == 1
    assert "returned final_state: expected" in " ".join(result.stdout.split())


def test_verify_that_compared_nothing_has_not_passed():
    with installed(Toy(features=())):
        result = verify("--backend", "toy")
    assert result.exit_code == 1
    assert "0 outputs compared, 0 failures" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--backend", "nochip"), 1, "backend 'nochip' is not installed"),
        (("--backend", "reference", "--device", "meta"), 1, "serves tensors on cpu, not on meta"),
        (("--device", "abacus"), 2, "--device"),
        (("--case", "two tokens"), 2, "case: expected names of cases"),
    ],
)
def test_verify_says_why_it_cannot_run(arguments, status, message):
    result = run("verify", *arguments)
    assert result.exit_code == status
    assert message in result.output


def test_verify_takes_the_backend_that_the_environment_names(monkeypatch):
    """As every call does: otherwise a GPU's backend would seem to pass where the CPU's was compared."""
    monkeypatch.setenv("KDA_BACKEND", "reference")
    result = verify()
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("reference on cpu")
    monkeypatch.setenv("KDA_BACKEND", "nochip")
    assert verify().exit_code == 1
    assert "backend 'nochip' is not installed" in verify().output
    assert verify("--backend", "reference").exit_code == 0


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_extra_it_says_which_one_to_install(package, monkeypatch, capsys):
    for module in [m for m in sys.modules if m.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "kda_core._commands")
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert 'pip install ".[cli]" in a checkout' in capsys.readouterr().err


def test_an_import_that_fails_for_another_reason_is_not_taken_for_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "kda_core._cli", None)
    monkeypatch.delitem(sys.modules, "kda_core._commands")
    with pytest.raises(ModuleNotFoundError, match="_cli"):
        main()


def test_brackets_in_a_title_are_shown(capsys):
    """They are the mark-up of rich, which drops them."""
    _commands._print_table("the extra [bench] of [/] it", ("a",), [("[cli]",)])
    found = " ".join(capsys.readouterr().out.split())
    assert "the extra [bench] of [/] it" in found
    assert "[cli]" in found
