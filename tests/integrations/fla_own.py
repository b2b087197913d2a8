"""A pytest plugin: fla's own tests/ops/test_kda.py on a CPU, with kda_core in fla's registries (make fla-own-tests)."""

from __future__ import annotations

import math
import os

import fla.utils
import kda_core_fla
import pytest

WRONG = "test_gate[B1-T2-H2-D12-a_logTrue-biasFalse-lowerbound-5.0]"
"""Its float32 reference of A_log's gradient is 2.0e-4 from float64; kda_core's is 1.3e-6 from it."""

OF_OTHERS = ("test_flash_kda_chunk", "test_triton_ascend_backend_routing")
"""Three tests of FlashKDA, three of its packed sequences, one of Ascend. All others must pass."""

LARGEST = float(os.environ.get("FLA_LARGEST") or math.inf)
"""Elements of the states of all tokens in a test that runs; fla's reference keeps several such tensors."""

passed = set()


def pytest_configure() -> None:
    assert kda_core_fla.install()
    # Names that the test file imports. fla takes the first of CUDA's where there is no GPU.
    fla.utils.device, fla.utils.IS_NVIDIA = "cpu", True


def size(item: pytest.Item) -> int:
    """The elements of the states of all tokens in a test; 0 for one whose parameters do not say."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    tokens = given["cu_seqlens"][-1] if "cu_seqlens" in given else given.get("B", 0) * given.get("T", 1)
    return tokens * given.get("HV", given.get("H", 0)) * given.get("D", 0) ** 2


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    (wrong,) = (item for item in items if item.name == WRONG)
    wrong.add_marker(pytest.mark.xfail(strict=True, reason="the test's reference is wrong"))
    config.hook.pytest_deselected(items=[item for item in items if size(item) > LARGEST])
    items[:] = [item for item in items if size(item) <= LARGEST]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        passed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    expected = {item.nodeid for item in session.items if not item.name.startswith((*OF_OTHERS, WRONG))}
    if exitstatus == 0 and expected != passed:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nexpected to pass: {sorted(expected - passed)}")
