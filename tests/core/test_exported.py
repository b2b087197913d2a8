"""Programs of ``torch.export`` that were kept must load and run for ever after, with the results of a direct call."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from exported_programs import DATA, PROGRAMS, export, inputs
from packaging.version import Version

from kda_core import _schemas
from kda_core._plugins import registry

KEPT = sorted(DATA.glob("*.pt2"))

# SHA-256 of every file: files are added, never replaced.
DIGESTS = {
    "chunk_kda_dense.v1.pt2": "827236f2ec6ce71c5e0b81a0462c2d089fd8409a53886aeb5a547e21d776bc7f",
    "chunk_kda_packed.v1.pt2": "600e263caf092d67ac661f032250fe946f587c12be323769b18d9c5dcd9c2603",
    "fused_recurrent_kda_pool.v1.pt2": "82954df818bc9842ecc3d262becb1fcef1a8986c48b6ed7fec1cf91aac408fa2",
    "kda_gate.v1.pt2": "90bee75dc1f93f6ad10b202654423a6dc7e496b153d6996c924e830d252568c3",
    "chunk_kda_dense.v2.pt2": "d0477b8fd036369523e6e1ecdd35c2cfc2e19b4d60d7ff7e70dbced2b1fec85a",
    "chunk_kda_packed.v2.pt2": "976b3247c7461e66051c8ae4bbb1842ba3b3eaba08579a757f968160994c6fe5",
    "fused_recurrent_kda_pool.v2.pt2": "d4d8805ab4d03c02697d871c6770cb7fdd5977ccec1884b0d073ba9b8f388abe",
    "kda_gate.v2.pt2": "24f446dea911bb50b069a67acd75dd7eb4b93d28eb44712a939d54fd7052ec5e",
    "chunk_kda_dense.v3.pt2": "302249ad0d3671115032b89b426e1e01c5e4faa2a588a384063817bb56000c47",
    "chunk_kda_packed.v3.pt2": "17e56d99972575d91dcdc337ea3606b3ec39fb2bdf8a0131106712dabcabe16c",
    "fused_recurrent_kda_pool.v3.pt2": "97f7472707fce6ecafe0fb5d1f27fea3d183878a4972eb53351ccb914fd216c5",
    "kda_gate.v3.pt2": "ed10c14c3ccdea64e396a5fc0ac82e547785b056591b0eb9937c317d8753e28c",
}


def graph_of(path: Path) -> dict:
    with zipfile.ZipFile(path) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("models/model.json")]
        return json.loads(archive.read(name))


def load(path: Path) -> torch.nn.Module:
    written, own = Version(graph_of(path)["torch_version"]), Version(torch.__version__)
    if own.release < written.release:
        pytest.skip(f"torch {own} reads no programs of torch {written}: its format only grows")
    return torch.export.load(path).module()


def compare(program, name: str, seed: int) -> None:
    """Run a program and the function that it was exported from: the same results, the same writes."""
    arguments, others = inputs(name, seed), inputs(name, seed)
    with torch.no_grad():
        found, expected = program(*arguments), PROGRAMS[name](*others)
    found, expected = ((x,) if isinstance(x, torch.Tensor) else tuple(x) for x in (found, expected))
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, arguments, others))


def test_programs_of_every_schema_version_are_kept():
    names = {path.name for path in KEPT}
    versions = range(1, _schemas.SCHEMA_VERSION + 1)
    assert names == {f"{name}.v{version}.pt2" for name in PROGRAMS for version in versions}
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in KEPT} == DIGESTS


@pytest.mark.parametrize("path", KEPT, ids=lambda p: p.name)
def test_a_kept_program_runs(path: Path):
    name = path.name.partition(".")[0]
    program = load(path)
    for seed in (0, 1):  # those that it was exported with, and others
        compare(program, name, seed)


def test_a_kept_program_takes_other_lengths():
    program = load(DATA / "chunk_kda_dense.v1.pt2")
    arguments = inputs("chunk_kda_dense")
    longer = [torch.cat([t] * 9, 1) for t in arguments[:5]]
    with torch.no_grad():
        found, expected = (f(*longer, *arguments[5:]) for f in (program, PROGRAMS["chunk_kda_dense"]))
    assert all(map(torch.equal, found, expected))


def test_a_program_that_other_versions_of_the_backends_exported_runs(tmp_path: Path):
    """The backend's name in a graph carries versions, for compilers that keep graphs on disk; they bind nothing."""
    original, changed = DATA / "chunk_kda_dense.v1.pt2", tmp_path / "changed.pt2"
    versions = [f"{b.info.name} {b.info.version}" for b in registry.backends]
    replaced = 0
    with zipfile.ZipFile(original) as source, zipfile.ZipFile(changed, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith("models/model.json"):
                calls = json.loads(content)["graph_module"]["graph"]["nodes"]
                (names,) = [i["arg"]["as_string"] for c in calls for i in c["inputs"] if i.get("name") == "backend"]
                assert names.startswith("@")
                replaced = content.count(names.encode())
                content = content.replace(names.encode(), b"@gone 0.0.1, cpu 99.0")
            target.writestr(name, content)
    assert replaced == 1
    assert not any("99.0" in v or "gone" in v for v in versions)
    compare(load(changed), "chunk_kda_dense", 0)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_survives_its_file(name: str, tmp_path: Path):
    path = tmp_path / "program.pt2"
    torch.export.save(export(name), path)
    compare(torch.export.load(path).module(), name, 1)


# A package holds C++ that was compiled for one machine and one torch, so that none can be kept as a file: what is kept
# is the program, of which every version of torch must be able to make one.
@pytest.mark.end_to_end
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("path", [p for p in KEPT if "gate" not in p.name], ids=lambda p: p.name)
def test_a_kept_program_becomes_an_aotinductor_package(path: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    load(path)
    package = str(tmp_path / "package.pt2")
    torch._inductor.aoti_compile_and_package(torch.export.load(path), package_path=package)
    name = path.name.partition(".")[0]
    program = torch._inductor.aoti_load_package(package)
    for seed in (0, 1):
        compare(program, name, seed)
