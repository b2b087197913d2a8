"""``tools/compare_machine_code.py``: which changes of assembler text it passes, and which it reports."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TOOL = Path(__file__).parents[2] / "tools" / "compare_machine_code.py"

PTX = """//
.version 9.4
.target sm_90a
.visible .entry name(
	.param .u64 .ptr .global .align 1 name_param_0,
	.param .u32 name_param_1
)
{
	.reg .b32 	%r<3>;
	.loc	1 20 30                         // file.py:20:30
	ld.param.b32 	%r1, [name_param_1];
	add.s32 	%r2, %r1, 4608;
	mul.lo.s32 	%r3, %r1, %r2;
	ret;
}
	.file	1 "/somewhere/file.py"
	.section	.debug_abbrev
	{
.b8 1                                   // Abbreviation Code
	}
"""

AMDGCN = """	.amdgcn_target "amdgpu9.42-amd-amdhsa-unknown-gfx942"
	.globl	name                      ; -- Begin function name
	.type	name,@function
name:                             ; @name
	s_load_dwordx2 s[2:3], s[0:1], 0x8
	v_add_f32 v1, v2, v3
	s_endpgm
	.amdgpu_metadata
    .name:           name
    .vgpr_count:     196
	.end_amdgpu_metadata
"""


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("compare_machine_code", TOOL)
    module = importlib.util.module_from_spec(spec)
    # The workers' function is found by its module's name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _found(tool, before: str, after: str, kind: str, names: tuple[str, str] = ("name", "name")) -> tuple:
    text = {"ptx": tool.text_of_ptx, "amdgcn": tool.text_of_amdgcn}[kind]
    return tool.differences(
        *({name: tool.hashes(text(x, name))} for x, name in zip((before, after), names, strict=True))
    )


def test_debug_information_and_names_are_left_out(tool):
    """Line numbers, files, comments, the kernel's name."""
    lines = tool.text_of_ptx(PTX, "name")
    assert not [line for line in lines if "name" in line or "file" in line or "debug" in line or "//" in line]
    moved = PTX.replace("1 20 30", "1 99 1").replace("file.py", "moved.py").replace("name", "other")
    assert _found(tool, PTX, moved, "ptx", ("name", "other")) == ([], ["renamed: name -> other"])
    assert "name" not in "".join(tool.text_of_amdgcn(AMDGCN, "name"))


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("ptx", "name_param_1", "name_param_3"),
        ("ptx", "%r2", "%r7"),
        ("amdgcn", "0x8", "0x10"),
    ],
)
def test_another_signature_is_no_difference(tool, kind: str, old: str, new: str):
    text = {"ptx": PTX, "amdgcn": AMDGCN}[kind]
    assert _found(tool, text, text.replace(old, new), kind) == ([], ["another signature: name"])


@pytest.mark.parametrize(
    ("kind", "old", "new", "how"),
    [
        ("ptx", "add.s32", "sub.s32", "instructions differ"),
        ("ptx", "4608", "4609", "operands or order differ"),
        ("ptx", "%r1, %r2;", "%r2, %r1;", "operands or order differ"),
        ("amdgcn", "v2, v3", "v3, v2", "operands or order differ"),
        ("amdgcn", "vgpr_count:     196", "vgpr_count:     197", "operands or order differ"),
        ("amdgcn", "v_add_f32", "v_sub_f32", "instructions differ"),
    ],
)
def test_other_machine_code_is_reported(tool, kind: str, old: str, new: str, how: str):
    text = {"ptx": PTX, "amdgcn": AMDGCN}[kind]
    assert old in text
    (line,), harmless = _found(tool, text, text.replace(old, new), kind)
    assert line.startswith(f"{how}: name")
    assert not harmless


def test_missing_and_new_kernels_are_reported(tool):
    old, new = (tool.hashes(tool.text_of_ptx(text, "name")) for text in (PTX, PTX.replace("add", "sub")))
    assert tool.differences({"a": old}, {"b": new}) == (["new: b", "gone: a"], [])


@pytest.mark.end_to_end
def test_a_kernel_is_compiled_and_compared(tool, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The same sources give the same hashes; a stored hash that differs is reported with exit status 1."""
    pytest.importorskip("kda_core_amd")
    stored = tmp_path / "before.json"
    chosen = ["amd", "--quick", "--only", "finish_kernel bf16", "--jobs", "1"]
    assert tool.main([*chosen, "--out", str(stored)]) == 0
    assert tool.main([*chosen, "--against", str(stored)]) == 0
    assert "the same machine code" in capsys.readouterr().out
    content = json.loads(stored.read_text())
    for kernel in content["kernels"].values():
        kernel["body"] = "another"
    stored.write_text(json.dumps(content))
    assert tool.main([*chosen, "--against", str(stored)]) == 1
