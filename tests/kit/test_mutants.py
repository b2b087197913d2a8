"""The conformance kit finds deliberately wrong backends (tests/support/*mutants.py), and passes a faultless copy."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import installed
import pytest

from kda_core.testing.plugin import MODE_VARIABLE

installed.need_backend("cpu")

import environments
import mutants
import run_mutants

pytestmark = pytest.mark.end_to_end

# The fast tier of this repository tries these; the slow one tries all.
FAST = (
    "dropped-decay", "decay-after-the-update", "transposed-state", "wrong-head", "negative-eigenvalues-ignored",
    "scale-ignored", "bound-ignored", "leaked-neighbour", "tail-unwritten", "state-of-the-chunk-before",
    "beta-missing-in-the-backward", "bias-gradient-of-the-wrong-head", "padding-slot-written", "bfloat16-accumulation",
    "non-deterministic-sum", "input-modified", "one-wrong-row", "first-slot-read", "backward-left-to-autograd",
    "slot-of-index-minus-one-written", "bias-dropped-by-the-gate-without-rate", "zero-scale-is-the-default",
    "bias-gradient-of-the-first-row", "pairs-of-three", "pool-written-by-the-draft", "records-one-token-off",
    "commit-of-one-too-many", "trees-are-chains", "path-ignored", "inputs-one-token-off",
)  # fmt: skip
# Faults that users of other libraries reported, or fear, and the test that must find each.
REPORTED = {
    "later-gates-reach-outputs": "test_later_tokens_change_no_earlier_gradient",
    "later-gates-reach-gradients": "test_later_tokens_change_no_earlier_gradient",
    "inverse-in-half-precision": "test_collinear_keys",
    "steps-overflow": "test_gate_of_real_models",
    "tuned-by-the-packing": "test_compiled_code_does_not_depend_on_packing",
    "naive-decay": "test_decay",
    "intermediate-states-off-by-one": "test_intermediate_state_is_a_final_state",
    "another-kernel-for-many-sequences": "test_packed_in_any_company",
    "batch-invariance-not-kept": "test_batch_invariant",
    "batch-invariance-of-outputs-alone": "test_batch_invariant",
    "saved-in-a-workspace": "test_two_forwards_before_their_backwards",
    "gradient-in-a-workspace": "test_two_forwards_before_their_backwards",
    "rate-kept-by-address": "test_inputs_changed_in_place",
    "slots-kept-by-address": "test_inputs_changed_in_place",
    "empty-state-is-the-initial-one": "test_results_alias_nothing",
    "gradients-by-heads": "test_backward",
    "nan-rate-lost": "test_nan_is_seen",
    "nan-gradient-lost": "test_nan_is_seen_in_gradients",
}
ALL = tuple(mutant().name for mutant in run_mutants.every_mutant())


def run(file: Path, *names: str) -> dict[str, str]:
    """The test that found each of the named mutants, from the kit's fast tier in a process of its own."""
    environment = {n: v for n, v in os.environ.items() if not n.startswith("PYTEST_")} | {MODE_VARIABLE: "fast"}
    environments.run(sys.executable, run_mutants.__file__, file, *names, env=environment, cwd=file.parent)
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def found_fast(tmp_path_factory):
    reported = [f"{name}={test}" for name, test in REPORTED.items() if name in ALL]
    return run(tmp_path_factory.mktemp("mutants") / "found.json", *FAST, *reported)


@pytest.fixture(scope="module")
def found_all(tmp_path_factory):
    return run(tmp_path_factory.mktemp("mutants") / "found.json")


@pytest.mark.parametrize("name", FAST)
def test_mutant_is_found(found_fast, name: str):
    assert name in found_fast


@pytest.mark.parametrize("name", [name for name in REPORTED if name in ALL])
def test_a_reported_fault_is_found_by_its_test(found_fast, name: str):
    assert found_fast[name].startswith(f"{REPORTED[name]}[")


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_every_mutant_is_found(found_all, name: str):
    assert name in found_all


@pytest.mark.slow
def test_faultless_backend_passes(found_all):
    """The kit finds the mutants by their faults, not by the way that they are made."""
    assert mutants.Faultless().name not in found_all
