"""Records of drafts and their commit: through operators, on meta tensors, under KDA_CHECK, in kernels' places."""

from __future__ import annotations

import draft_mutants
import pytest
import torch
from example_arguments import drawn
from toys import Toy, installed

import kda_core
from kda_core import reference
from kda_core.errors import CheckFailed, UnsupportedCall
from kda_core.request import CommitRequest

N, T, H, K, V, SLOTS = 3, 4, 2, 16, 8, 5


def draft(**more) -> dict:
    made = drawn(B=N, T=T, H=H, K=K, V=V)
    pool = torch.randn(SLOTS, H, K, V, generator=torch.Generator().manual_seed(0))
    return made | {"initial_state": pool, "ssm_state_indices": torch.tensor([4, 0, 2]), "scale": 0.3} | more


def verified(x: dict, records: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    o, _ = kda_core.fused_recurrent_kda(**x, use_qk_l2norm_in_kernel=True, records=records)
    kda_core.commit_kda(x["initial_state"], records, counts, x["ssm_state_indices"])
    return o


def test_a_compiled_draft_and_commit_have_the_bits_of_eager_ones():
    torch._dynamo.reset()
    compiled = torch.compile(verified, backend="aot_eager", fullgraph=True)
    found = []
    for function in (verified, compiled):
        x, records = draft(), kda_core.empty_records(N, T, H, K, V)
        with torch.no_grad():
            found.append((function(x, records, torch.tensor([1, 0, 4])), x["initial_state"], records))
    assert all(map(torch.equal, *found))


def verified_tree(x: dict, records: torch.Tensor, parents: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """A tree, the commit of a path of it, and a call that commits another."""
    o, _ = kda_core.fused_recurrent_kda(**x, records=records, parents=parents)
    counts, slots, more = torch.tensor([2, 0, 1]), x["ssm_state_indices"], torch.empty_like(records)
    kda_core.commit_kda(x["initial_state"], records, counts, slots, path=path)
    following, _ = kda_core.fused_recurrent_kda(
        **x, records=more, commit=records, num_committed=counts, commit_path=path.flip(1), parents=parents
    )
    return torch.cat([o, following])


def test_compiled_trees_have_the_bits_of_eager_ones():
    torch._dynamo.reset()
    compiled = torch.compile(verified_tree, backend="aot_eager", fullgraph=True)
    parents = torch.tensor([[-1, 0, 0, 2], [-1, -1, 1, 0], [-1, 0, 1, 2]])
    found = []
    for function in (verified_tree, compiled):
        x, records = draft(), kda_core.empty_records(N, T, H, K, V)
        with torch.no_grad(), kda_core.checked_calls():
            found.append((function(x, records, parents, torch.tensor([[0, 2], [1, 3], [3, 0]])), x["initial_state"]))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("wrong", [draft_mutants.trees_are_chains, draft_mutants.path_ignored])
def test_checked_trees(wrong):
    """KDA_CHECK finds a tree that was taken for a chain, and a path that was not."""
    x, records, subject = draft(), kda_core.empty_records(N, T, H, K, V), wrong()
    parents, path = torch.tensor([[-1, 0, 0, 2], [-1, -1, 1, 0], [-1, 0, 1, 2]]), torch.tensor([[0, 2], [1, 3], [3, 0]])

    def serve():
        kda_core.fused_recurrent_kda(**x, records=records, parents=parents, backend=subject.name)
        counts, slots = torch.tensor([2, 0, 1]), x["ssm_state_indices"]
        kda_core.commit_kda(x["initial_state"], records, counts, slots, path=path, backend=subject.name)

    found = pytest.raises(CheckFailed, match=r"_kda(, forward,)? on backend .*\n  (o|pool): ")
    with installed(subject), kda_core.checked_calls(), found:
        serve()


def test_the_operator_is_a_right_one():
    records = kda_core.empty_records(N, T, H, K, V)
    x = draft()
    verified(x, records, torch.zeros(N, dtype=torch.int64))
    arguments = (x["initial_state"], records, torch.tensor([1, 0, 4]), x["ssm_state_indices"])
    torch.library.opcheck(torch.ops.kda_core.commit_kda_.default, arguments)


def test_writes_are_counted():
    """A stale use of the pool in a backward is found."""
    x, records = draft(), kda_core.empty_records(N, T, H, K, V)
    before = [t._version for t in (x["initial_state"], records)]
    kda_core.fused_recurrent_kda(**x, records=records)
    between = [t._version for t in (x["initial_state"], records)]
    assert between[0] == before[0]
    assert between[1] > before[1]
    kda_core.commit_kda(x["initial_state"], records, torch.tensor([1, 0, 4]), x["ssm_state_indices"])
    assert x["initial_state"]._version > between[0]
    assert records._version == between[1]


def test_meta_tensors():
    x = {n: t.to("meta") if isinstance(t, torch.Tensor) else t for n, t in draft().items()}
    o = verified(x, kda_core.empty_records(N, T, H, K, V, device="meta"), torch.zeros(N, device="meta").long())
    assert o.shape == (N, T, H, V)


def test_a_commit_is_not_differentiable():
    x, records = draft(), kda_core.empty_records(N, T, H, K, V)
    kda_core.fused_recurrent_kda(**x, records=records)
    for name in ("pool", "records"):
        given = {"pool": x["initial_state"].clone(), "records": records.clone()}
        given[name].requires_grad_()
        with pytest.raises(ValueError, match=f"{name}: commit_kda is not differentiable"):
            kda_core.commit_kda(**given, num_accepted=torch.tensor([1, 1, 1]), state_indices=torch.tensor([0, 1, 2]))


def test_memory_that_is_shared_is_refused():
    x = draft(scale=0.7)  # looked at in the first call of a kind
    buffer = torch.zeros(SLOTS * H * K * V)
    records = buffer[: N * T * H * (2 * K + V)].view(N, T, H, 2 * K + V)
    x["initial_state"] = buffer[: SLOTS * H * K * V].view(SLOTS, H, K, V)
    with pytest.raises(ValueError, match="records: expected memory of its own, got the memory of initial_state"):
        kda_core.fused_recurrent_kda(**x, records=records)
    with pytest.raises(ValueError, match="pool: expected memory of its own, got the memory of records"):
        kda_core.commit_kda(
            x["initial_state"], records, torch.tensor([1, 1, 1]), x["ssm_state_indices"], pad_slot_id=-9
        )


def test_a_backend_without_the_feature_refuses_both_by_name():
    x, records = draft(), kda_core.empty_records(N, T, H, K, V)
    given = x["initial_state"], records, torch.ones(3, dtype=torch.int64), x["ssm_state_indices"]
    with installed(Toy("older")):
        for call in (
            lambda: kda_core.fused_recurrent_kda(**x, records=records, backend="older"),
            lambda: kda_core.commit_kda(*given, backend="older"),
        ):
            with pytest.raises(UnsupportedCall, match=r"does not serve records of a draft instead of"):
                call()


def test_the_reference_commits_no_token_of_an_empty_sequence():
    """As kernels do, which nobody checks the values for: not the row of another sequence."""
    counts, path = torch.tensor([1, 1]), torch.tensor([[0], [2]])
    r = CommitRequest(
        pool=torch.ones(2, 1, 2, 2), records=torch.ones(1, 3, 1, 6), num_accepted=counts, path=path,
        state_indices=torch.tensor([0, 1]), cu_seqlens=torch.tensor([0, 0, 3]),
    )  # fmt: skip
    assert list(reference.committed(r)) == [1]


def test_a_checked_path_may_be_longer_than_the_draft():
    """It replays a token again; the rounding that is allowed is that of its own length."""
    generator = torch.Generator().manual_seed(0)
    records = torch.rand(N, 1, H, 2 * K + V, generator=generator)
    records[..., :K] *= 0.1
    pool, path = torch.randn(SLOTS, H, K, V, generator=generator), torch.zeros(N, 400, dtype=torch.int64)
    with kda_core.checked_calls():
        kda_core.commit_kda(pool, records, torch.full((N,), 400), torch.arange(N), path=path)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checked_commits(v_first: bool, dtype: torch.dtype):
    x = draft(state_v_first=v_first)
    x["initial_state"] = (x["initial_state"].mT if v_first else x["initial_state"]).to(dtype).contiguous()
    records = kda_core.empty_records(N, T, H, K, V)
    arguments = (x["initial_state"], records, torch.tensor([1, 0, 4]), x["ssm_state_indices"], None, v_first)
    with kda_core.checked_calls():
        kda_core.fused_recurrent_kda(**x, use_qk_l2norm_in_kernel=True, records=records)
        kda_core.commit_kda(*arguments)
        for wrong in (draft_mutants.commit_of_one_too_many, draft_mutants.commit_of_rows_of_the_batch):
            found = pytest.raises(CheckFailed, match=r"commit_kda on backend .*\n  pool: ")
            with installed(wrong()) as name, found:
                kda_core.commit_kda(*arguments, backend=name)
