"""Drafts without a state for every token: what a call records, the commit of accepted tokens, and drafts as trees."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import kda_core
from kda_core._plugins import registry
from kda_core.capabilities import Feature
from kda_core.request import DATA, CommitRequest
from kda_core.testing.cases import BF16, FP16, FP32, Case
from kda_core.testing.inputs import Call, guards, indices, placed, same_bits
from kda_core.testing.marks import requires
from kda_core.testing.subject import Subject

RECORDED = requires(Feature.RECURRENT, Feature.PAGED_STATE, Feature.NO_STATE_UPDATE, Feature.DRAFT_RECORDS)
TABLES = requires(Feature.SPEC_DECODE, Feature.FINAL_STATE_INDICES)  # Today's drafts, which records are compared with
SLOTS = 6


def draft(kda: Subject, slots: Tensor, T: int = 4, **fields) -> Call:
    """Sequences of T tokens (of ``lengths``), which start from these slots of a pool of SLOTS."""
    name = " ".join(["records", str(T), *map(str, fields.values())])
    layout = {"T": sum(fields["lengths"]) + 2} if fields.get("lengths") else {"B": len(slots), "T": T}
    case = Case(name=name, op="fused_recurrent_kda", final_state=False, **({"state": FP32} | layout | fields))
    return kda.near(case, lambda near: near.call().in_pool(slots, SLOTS)).call().in_pool(slots, SLOTS)


def _arguments(kda: Subject, call: Call, records: Tensor, counts: Tensor, **changes) -> dict[str, Tensor]:
    """The tensors of a commit into a call's pool, on the device."""
    given = {
        "pool": call.tensors["initial_state"], "records": records, "num_accepted": counts,
        "state_indices": call.tensors["ssm_state_indices"], "cu_seqlens": call.tensors.get("cu_seqlens"),
    } | changes  # fmt: skip
    return {n: placed(t, kda.device) for n, t in given.items() if t is not None}


def commit_unchecked(kda: Subject, call: Call, records: Tensor, counts: Tensor, **changes) -> Tensor:
    """The pool after a commit whose numbers nobody has checked, as on a device."""
    request = CommitRequest(**_arguments(kda, call, records, counts, **changes))
    registry.named(kda.name).call("kda_core_commit", request=request)
    return request.pool.cpu()


def commit(kda: Subject, call: Call, records: Tensor, counts: Tensor, pool: Tensor | None = None, **changes) -> Tensor:
    """The pool after a commit; nothing else is written, nor a slot of no accepted token."""
    pool = call.tensors["initial_state"] if pool is None else pool
    tensors = _arguments(kda, call, records, counts, pool=pool, **changes)
    before = {n: guards(t).clone() for n, t in tensors.items()}
    options = {n: call.options[n] for n in ("state_v_first", "pad_slot_id") if n in call.options}
    kda_core.commit_kda(**tensors, **options, backend=kda.name)
    for name, t in tensors.items():
        assert name == "pool" or torch.equal(guards(t), before[name]), name
    found = tensors["pool"].cpu()
    slots = tensors["state_indices"].tolist()
    kept = set(range(len(pool))) - {s for s, c in zip(slots, counts.tolist(), strict=True) if s >= 0 and c > 0}
    assert same_bits(found[sorted(kept)], pool[sorted(kept)])
    return found


def expect_commit_and_draft(kda: Subject, call: Call, earlier: Tensor, counts: Tensor, **path: Tensor) -> None:
    """A draft that begins with a commit has the bits of the two calls, and writes nothing else."""
    pool = commit(kda, call, earlier, counts, **path)
    expected = kda.run(call.having(initial_state=pool))
    given = call.tensors | {"commit": earlier, "num_committed": counts} | {f"commit_{n}": t for n, t in path.items()}
    tensors = {n: placed(t, kda.device) for n, t in given.items()}
    before = {n: guards(t).clone() for n, t in tensors.items()}
    o, _ = call(tensors, kda.name)
    found = (o, tensors["records"], tensors["initial_state"])
    assert all(same_bits(x.cpu(), y) for x, y in zip(found, (expected["o"], expected["records"], pool), strict=True))
    kda.expect_untouched(before, tensors, ("records", "initial_state"))


def _states(kda: Subject, call: Call) -> tuple[Tensor, Tensor]:
    """The output of a draft with a slot for every token, and the states [N, L, ...] after each."""
    N, T = len(call.lengths()), max(call.lengths())
    results = kda.check(call.written_elsewhere(torch.arange(N * T, dtype=torch.int32).view(N, T), N * T))
    return results["o"], results["pool"].unflatten(0, (N, T))


def _expect(kda: Subject, call: Call, got: Tensor, expected: Tensor, what: str) -> None:
    """A float32 state has the bits of another; others, and those of the oracle, which records in float32, nearly so."""
    if kda.name == "reference" or expected.dtype != torch.float32:
        last = call.having(records=None, update_state=None)
        kda.expect(last, "final_state", got[None], expected[None], what)
    else:
        assert same_bits(got, expected), what


MODEL = {"gate": "lower bound", "beta": "sigmoid", "l2norm": True}
KINDS = [
    pytest.param({}, id="plain"),
    pytest.param({"dtype": BF16, **MODEL}, id="model"),
    pytest.param({"state": BF16, "V": 64, "HV": 6, "options": {"state_v_first": True}}, id="bfloat16 V first"),
    pytest.param({"state": FP16, "gate": "softplus", "l2norm": True}, id="float16"),
    pytest.param({"K": 20, "V": 12}, id="odd"),
    pytest.param({"decay": "isolated", "l2norm": True}, id="isolated decay"),
    pytest.param({"state": BF16, "K": 128, "dtype": BF16, **MODEL}, id="bfloat16, 128 channels"),
]
LENGTHS = [
    pytest.param({"lengths": (3, 1, 5)}, id="packed"),
    pytest.param({"T": 1}, id="one token"),
    pytest.param({"T": 16, "l2norm": True}, id="sixteen tokens"),
]


@RECORDED
@TABLES
@pytest.mark.parametrize("fields", KINDS + LENGTHS)
def test_commit_has_the_bits_of_the_states_of_tokens(kda, fields: dict):
    """For every number of accepted tokens; over float32 pools outputs have the bits of today's draft as well."""
    call = draft(kda, indices(4, 0, 2), **fields)
    o, states = _states(kda, call)
    results = kda.check(call.recorded())
    assert states.dtype != torch.float32 or same_bits(results["o"], o)
    assert not results["records"][call.computed_rows()].isnan().any()
    lengths = call.lengths()
    for most in range(max(lengths) + 1):
        counts = torch.tensor([min(most, lengths[0]), min(max(most - 1, 0), lengths[1]), lengths[2]])
        pool = commit(kda, call, results["records"], counts)
        for n, (slot, count) in enumerate(zip((4, 0, 2), counts.tolist(), strict=True)):
            if count:
                _expect(kda, call, pool[slot], states[n, count - 1], f"{count} tokens of sequence {n}")


@RECORDED
def test_rows_of_skipped_sequences_are_not_recorded(kda):
    """Nor those behind the last sequence; a sequence that starts from the same slot as another is recorded."""
    call = draft(kda, indices(4, -1, 4), lengths=(3, 1, 5))
    kda.check(call.recorded())
    call = draft(kda, indices(0, 3, 1)).having(pad_slot_id=0)
    results = kda.check(call.recorded())
    pool = commit(kda, call, results["records"], torch.tensor([0, 2, 4]))
    assert not same_bits(pool[3], call.tensors["initial_state"][3])


@RECORDED
@requires(Feature.SPEC_DECODE)
def test_records_from_the_slot_of_the_last_accepted_token(kda):
    """A table of slots is read as in other drafts, and not written."""
    call = draft(kda, indices(0, 1, 2))
    table = indices([0, 4], [5, 1], [2, 3])
    kda.check(call.in_pool(table, SLOTS, indices(2, 1, 2)).recorded())


@RECORDED
@requires(Feature.HAS_INITIAL_STATE)
def test_records_of_fresh_sequences(kda):
    """A sequence that starts from zero reads no slot."""
    kda.check(draft(kda, indices(4, 0, 2)).having(has_initial_state=torch.tensor([False, True, False])).recorded())


@RECORDED
@requires(Feature.STRIDED_INPUT)
def test_records_in_a_larger_buffer(kda):
    """Slices along batch, tokens and heads; the rest of the buffer stays as it was."""
    call = draft(kda, indices(4, 0, 2)).recorded()
    expected = kda.run(call)["records"]
    tensors = {n: placed(t, kda.device) for n, t in call.tensors.items()}
    B, T, HV, row = expected.shape
    buffer = torch.full((B + 1, T + 2, HV + 1, row), float("nan"), device=kda.device)
    tensors["records"] = buffer[1:, 1:-1, :HV]
    call(tensors, kda.name)
    assert same_bits(tensors["records"].cpu(), expected)
    assert int(buffer.isnan().sum()) == buffer.numel() - expected.numel()
    pool = tensors["initial_state"].clone()
    counts = torch.tensor([1, 4, 2], device=kda.device)
    kda_core.commit_kda(pool, tensors["records"], counts, tensors["ssm_state_indices"], backend=kda.name)
    assert same_bits(pool.cpu(), commit(kda, call, expected, counts.cpu()))


@RECORDED
def test_commit_into_another_pool(kda):
    """The records are of the inputs: states of other slots, in other numbers, advance alike."""
    call = draft(kda, indices(4, 0, 2))
    records = kda.run(call.recorded())["records"]
    counts, pool = torch.tensor([2, 0, 4]), call.tensors["initial_state"]
    expected = commit(kda, call, records, counts)
    moved = torch.cat([pool[[2, 5, 4]], pool])
    found = commit(kda, call, records, counts, moved, state_indices=torch.tensor([2, -1, 0]))
    assert same_bits(found[[2, 0]], expected[[4, 2]])


def needs_unchecked_values(kda) -> None:
    if kda.device.type == "cpu" and not kda.target.interpreted:
        pytest.skip("values on the CPU are checked before any backend sees them")


@RECORDED
@pytest.mark.parametrize("lengths", [(), (3, 1, 4)], ids=["dense", "packed"])
def test_values_out_of_range_where_nothing_reads_them(kda, lengths):
    """Counts are clamped, slots past the pool are skipped: no memory outside of the tensors is read or written."""
    needs_unchecked_values(kda)
    call = draft(kda, indices(4, 0, 2), lengths=lengths)
    records = kda.run(call.recorded())["records"]
    last = call.lengths()[2]
    expected = commit(kda, call, records, torch.tensor([0, 1, last]), state_indices=indices(4, -1, 2))
    for far in (SLOTS, 2**30):
        counts = torch.tensor([-3, 1, 2**20])
        assert same_bits(commit_unchecked(kda, call, records, counts, state_indices=indices(4, far, 2)), expected)


@RECORDED
@pytest.mark.parametrize("fields", [*KINDS[:3], pytest.param({"T": 1, "K": 20, "V": 12}, id="one token")])
def test_commit_and_draft_in_one_call(kda, fields: dict):
    """It has the bits of the two calls, counts of 0 and skipped sequences among them."""
    first, slots = draft(kda, indices(4, 0, 2), **fields), indices(4, -1, 2)
    earlier = kda.run(first.recorded())["records"]
    call = first.having(ssm_state_indices=slots).recorded()
    for counts in ((1, 1, 0), (first.tensors["q"].shape[1], 0, 1)):
        expect_commit_and_draft(kda, call, earlier, indices(*counts))


@RECORDED
@pytest.mark.parametrize("fields", [KINDS[0], KINDS[-1]])
def test_a_longer_draft_is_committed_by_a_shorter_one(kda, fields: dict):
    """It has the bits of the two calls, whatever kernel takes so many records."""
    earlier = kda.run(draft(kda, indices(4, 0, 2), 12, **fields).recorded())["records"]
    call = draft(kda, indices(4, -1, 2), 3, **fields).recorded()
    expect_commit_and_draft(kda, call, earlier, indices(12, 3, 0))


# Outputs and records of every token of a tree, and the commit of a path, beside drafts of the path.

TREES = requires(Feature.DRAFT_TREES)

FORKED = ((-1, 0, 0, 1, 1, 2, 4), (-1, -1, 0, 0, 1, 3, -1), (-1, 0, 1, 2, 3, 4, 5))
"""A tree with a fork at two depths, one with three roots, and a chain."""


def _tree(kda: Subject, parents: tuple[tuple[int, ...], ...], slots: Tensor | None = None, **fields) -> Call:
    """Drafts with these trees, which leave records."""
    slots = indices(4, 0, 2) if slots is None else slots
    call = draft(kda, slots, len(parents[0]), **fields).recorded()
    return call.having(parents=torch.tensor(parents, dtype=torch.int32))


def _path(parents: tuple[int, ...], token: int) -> list[int]:
    """The tokens from the root to this one."""
    return [*_path(parents, parents[token]), token] if token >= 0 else []


@RECORDED
@TREES
@pytest.mark.parametrize("fields", KINDS)
def test_a_token_has_the_bits_of_a_draft_of_its_ancestors(kda, fields: dict):
    """And a commit of its path those of a commit of that draft, for every token of the trees."""
    call = _tree(kda, FORKED, **fields)
    found = kda.check(call)
    for token in range(len(FORKED[0])):
        paths = [_path(parents, token) for parents in FORKED]
        longest = max(map(len, paths))
        # Behind a shorter path its last token again, which nothing before it depends on.
        filled = torch.tensor([path + path[-1:] * (longest - len(path)) for path in paths])
        of_path = {n: torch.stack([x[i] for x, i in zip(call.tensors[n], filled, strict=True)]) for n in DATA}
        plain = call.having(**of_path, parents=None).recorded()
        expected = kda.run(plain)
        counts = torch.tensor([len(path) for path in paths])
        for n, path in enumerate(paths):
            for name in ("o", "records"):
                assert same_bits(found[name][n, path], expected[name][n, : len(path)]), (name, n, path)
        pool = commit(kda, call, found["records"], counts, path=filled.int())
        assert same_bits(pool, commit(kda, plain, expected["records"], counts))


@RECORDED
@TREES
def test_a_chain_has_the_bits_of_a_plain_draft(kda):
    """Sixteen tokens; any negative number says that the first has no parent."""
    call = draft(kda, indices(4, 0, 2), 16, l2norm=True).recorded()
    chain = torch.arange(-1, 15)[None].repeat(3, 1)
    chain[1, 0] = -7
    expected, found = kda.run(call), kda.check(call.having(parents=chain))
    assert all(same_bits(found[n], expected[n]) for n in ("o", "records"))


@RECORDED
@TREES
def test_a_tree_of_sixty_four_tokens(kda):
    """Deep and wide: ancestors at both ends of a number of 64 bits."""
    deep = [t - 1 for t in range(63)] + [61]
    wide = [-1] + [0] * 62 + [31]
    comb = [-1] + [t - 1 - (t % 3 == 0) for t in range(1, 64)]
    kda.check(_tree(kda, tuple(map(tuple, (deep, wide, comb))), gate="lower bound", l2norm=True))


@RECORDED
@TREES
@requires(Feature.STRIDED_INPUT)
def test_tables_of_any_strides(kda):
    """Parents and paths that are slices of wider tables, as a server's buffers are."""
    call = _tree(kda, FORKED)
    found = kda.run(call)
    strided = kda.run(replace(call, strided=frozenset({"parents"})))
    assert all(same_bits(strided[n], found[n]) for n in ("o", "records"))
    path, counts = torch.tensor([[0, 1, 4, 6], [0, 3, 5, 0], [0, 1, 2, 3]]), torch.tensor([4, 3, 2])
    expected = commit(kda, call, found["records"], counts, path=path)
    tensors = kda.on_device(call)
    pool, wide = tensors["initial_state"].clone(), placed(path, kda.device, strided=True)
    assert not wide.is_contiguous()
    slots, records = tensors["ssm_state_indices"], found["records"].to(kda.device)
    kda_core.commit_kda(pool, records, counts.to(kda.device), slots, path=wide, backend=kda.name)
    assert same_bits(pool.cpu(), expected)


@RECORDED
@TREES
@requires(Feature.HAS_INITIAL_STATE)
def test_branches_of_sequences_that_start_from_zero_or_are_skipped(kda):
    """Branches of a fresh sequence start from zero as well, and those of a skipped one leave no record."""
    call = _tree(kda, FORKED, indices(4, -1, 2))
    kda.check(call.having(has_initial_state=torch.tensor([False, True, True])))


@RECORDED
@TREES
@pytest.mark.parametrize("fields", [{}, {"state": BF16}], ids=["float32", "bfloat16"])
def test_a_path_is_committed_by_the_next_call(kda, fields: dict):
    """It has the bits of the two calls; a fresh sequence and a skipped one are among them, and branches start anew."""
    first = _tree(kda, FORKED, **fields)
    earlier = kda.run(first)["records"]
    path = indices([0, 1, 4, 6], [0, 3, 5, 0], [0, 1, 2, 3])
    call = first.having(ssm_state_indices=indices(4, -1, 2)).recorded()
    expect_commit_and_draft(kda, call, earlier, indices(4, 2, 0), path=path)


@RECORDED
@TREES
def test_numbers_out_of_range_where_nothing_reads_them(kda):
    """Parents that are no earlier token, paths and counts out of range are clamped: no other memory is touched."""
    needs_unchecked_values(kda)
    good, bad = ((-1, 0, 1, 1), (-1, -1, 1, 0), (-1, 0, 0, 2)), ((9, 0, 2**30, 1), (-3, -9, 5, 0), (0, 0, 0, 2**20))
    call = _tree(kda, good)
    expected = kda.run(call)
    tensors = {n: placed(t, kda.device) for n, t in call.having(parents=torch.tensor(bad)).tensors.items()}
    request = call.having(**tensors).request()
    result = registry.named(kda.name).call("kda_core_recurrent_forward", request=request)
    assert same_bits(result.o.cpu(), expected["o"])
    assert same_bits(tensors["records"].cpu(), expected["records"])
    records = expected["records"]
    counts, path = torch.tensor([3, 0, 2]), torch.tensor([[0, 3, 3], [1, 2, 0], [0, 2, 3]])
    committed = commit(kda, call, records, counts, path=path)
    far = torch.tensor([[-5, 9, 2**30], [1, 2, 0], [0, 2, 99]])
    assert same_bits(commit_unchecked(kda, call, records, torch.tensor([2**20, -1, 2]), path=far), committed)
