"""Bad arguments of drafts that leave records, of trees and of commits: refused by name before any backend runs."""

from __future__ import annotations

import pytest
import torch
from example_arguments import drawn
from torch import tensor
from toys import Watcher

import kda_core
from kda_core import fused_recurrent_kda

N, T, H, K, V, SLOTS = 3, 4, 2, 16, 8, 6
TREES = tensor([[-1, 0, 0, 1], [-1, -1, 1, 0], [-1, 0, 1, 2]])
PATHS = tensor([[0, 1, 3], [0, 2, 0], [0, 1, 2]])
ROWS = ("q", "k", "v", "g", "beta", "records")


def draft(device: str, **more) -> dict:
    slots, records = tensor([4, 0, 2]), torch.full((N, T, H, 2 * K + V), torch.nan)
    given = drawn(B=N, T=T, H=H, K=K, V=V) | {"initial_state": torch.randn(SLOTS, H, K, V), "records": records}
    return {n: t.to(device) for n, t in (given | {"ssm_state_indices": slots} | more).items()}


def following(device: str) -> dict:
    """A draft that begins with the commit of another's records."""
    return draft(device, commit=torch.zeros(N, T, H, 2 * K + V), num_committed=tensor([1, 0, 2]))


def tree(device: str) -> dict:
    return draft(device, parents=TREES)


def path(device: str) -> dict:
    return following(device) | tree(device) | {"commit_path": PATHS.to(device)}


def commit(device: str) -> dict:
    x = draft(device)
    given = {"records": torch.zeros_like(x["records"]), "num_accepted": tensor([1, 2, 3], device=device)}
    return given | {"pool": x["initial_state"], "state_indices": x["ssm_state_indices"]}


def commit_path(device: str) -> dict:
    return commit(device) | {"path": PATHS.to(device)}


def flat(x: dict) -> dict:
    """The rows of a draft as packed sequences."""
    rows = {n: x[n].flatten(0, 1)[None] for n in ROWS}
    return rows | {"cu_seqlens": torch.arange(0, N * T + 1, T, device=x["q"].device)}


def long(x: dict) -> dict:
    """A draft of more tokens than a tree may have."""
    return {n: x[n].repeat(1, 17, *[1] * (x[n].dim() - 2)) for n in (*ROWS, "parents")}


def gone(*names: str, **more):
    return lambda x: dict.fromkeys(names) | more


ANYWHERE = [
    # a call, the argument that the message begins with, what is changed
    (draft, "records", lambda x: {"records": x["records"][..., 1:]}),
    (draft, "records", lambda x: {"records": x["records"].half()}),
    (draft, "records", lambda x: {"records": x["records"][:1].expand_as(x["records"])}),
    (draft, "output_final_state", lambda x: {"output_final_state": True}),
    (draft, "final_state_indices", lambda x: {"final_state_indices": x["ssm_state_indices"]}),
    (draft, "ssm_state_indices", lambda x: {"ssm_state_indices": None, "initial_state": x["initial_state"][:3]}),
    (draft, "update_state", lambda x: {"update_state": 3}),
    (following, "records", gone("records", update_state=False)),
    (following, "num_committed", gone("num_committed")),
    (following, "commit", gone("commit")),
    (following, "commit", lambda x: {"commit": x["commit"][:, :, 1:]}),
    (following, "commit", lambda x: {"commit": x["commit"].double()}),
    (following, "num_committed", lambda x: {"num_committed": x["num_committed"][1:]}),
    (following, "cu_seqlens", flat),
    (tree, "records", gone("records", update_state=False)),
    (tree, "parents", lambda x: {"parents": x["parents"][:, 1:]}),
    (tree, "parents", lambda x: {"parents": x["parents"].float()}),
    (tree, "parents", lambda x: {"parents": x["parents"][0]}),
    (tree, "cu_seqlens", flat),
    (tree, "parents", long),
    (tree, "commit", lambda x: {"commit_path": x["parents"]}),
    (path, "commit_path", lambda x: {"commit_path": x["commit_path"][:2]}),
    (path, "commit_path", lambda x: {"commit_path": x["commit_path"].float()}),
    (path, "commit_path", lambda x: {"commit_path": x["commit_path"][0]}),
    (commit, "records", lambda x: {"records": x["records"][..., :-1]}),
    (commit, "records", lambda x: {"records": x["records"].half()}),
    (commit, "records", lambda x: {"records": x["records"][..., ::2]}),
    (commit, "num_accepted", lambda x: {"num_accepted": x["num_accepted"][:2]}),
    (commit, "num_accepted", lambda x: {"num_accepted": x["num_accepted"].float()}),
    (commit, "state_indices", lambda x: {"state_indices": x["state_indices"][:2]}),
    (commit, "pool", lambda x: {"pool": x["pool"][0]}),
    (commit, "pool", lambda x: {"pool": x["pool"].int()}),
    (commit, "pool", lambda x: {"pool": x["pool"][:1].expand(3, -1, -1, -1)}),
    (commit, "state_v_first", lambda x: {"state_v_first": 1}),
    (commit, "pad_slot_id", lambda x: {"pad_slot_id": 0.5}),
    (commit_path, "path", lambda x: {"path": x["path"][:2]}),
    (commit_path, "path", lambda x: {"path": x["path"][0]}),
    (commit_path, "path", lambda x: {"path": x["path"].float()}),
]
VALUES = [
    # Numbers are read on the CPU alone, and tensors on meta have no memory to share.
    (following, "records", lambda x: {"commit": x["records"]}),
    (following, "num_committed", lambda x: {"num_committed": tensor([1, 0, 5])}),
    (following, "ssm_state_indices", lambda x: {"ssm_state_indices": tensor([4, 4, 2])}),
    (tree, "parents", lambda x: {"parents": TREES.clamp_min(0)}),
    (path, "commit_path", lambda x: {"commit_path": PATHS + 7}),
    (path, "num_committed", lambda x: {"num_committed": tensor([8, 7, 9])}),
    (commit, "num_accepted", lambda x: {"num_accepted": tensor([1, 2, 5])}),
    (commit, "num_accepted", lambda x: {"num_accepted": tensor([-1, 2, 3])}),
    (commit, "state_indices", lambda x: {"state_indices": tensor([4, 0, SLOTS])}),
    (commit, "state_indices", lambda x: {"state_indices": tensor([4, 4, 2])}),
    (commit_path, "path", lambda x: {"path": PATHS + 7}),
    (commit_path, "path", lambda x: {"path": PATHS - 1}),
]
CALLS = [(device, *row) for device in ("cpu", "meta") for row in ANYWHERE] + [("cpu", *row) for row in VALUES]


@pytest.mark.parametrize("make", [draft, following, tree, path, commit, commit_path])
def test_the_calls_are_right_without_a_change(make):
    function = kda_core.commit_kda if make in (commit, commit_path) else fused_recurrent_kda
    function(**make("cpu"))


@pytest.mark.parametrize(("device", "make", "name", "change"), CALLS)
def test_bad_arguments_are_refused_before_any_backend_runs(device, make, name, change):
    """Nothing is written. On devices shapes and dtypes are known; numbers are not read there."""
    given = make(device)
    before = {n: t.clone() for n, t in given.items()}
    function = kda_core.commit_kda if make in (commit, commit_path) else fused_recurrent_kda
    with Watcher() as calls, pytest.raises((ValueError, TypeError), match=f"^{name}: expected"):
        function(**given | change(given))
    assert calls == []
    if device == "cpu":
        assert all(torch.equal(t.nan_to_num(9.0), before[n].nan_to_num(9.0)) for n, t in given.items())
