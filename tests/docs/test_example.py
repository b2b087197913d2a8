"""The example: generation agrees with training, and its command line does what it says."""

from __future__ import annotations

import os
import sys
from dataclasses import astuple
from pathlib import Path

import pytest
import torch
from environments import run
from torch.optim.optimizer import register_optimizer_step_post_hook

pytestmark = pytest.mark.end_to_end

EXAMPLES = Path(__file__).parents[2] / "examples"

import train_lm
from byte_lm import ByteLM, ModelConfig, sample
from training import Text, Trainer, TrainingConfig, python_help_text, read_checkpoint

TINY = ModelConfig(dim=24, layers=2, heads=2, head_dim=12, mlp_dim=32)
TINY_OPTIONS = ["--dim=24", "--layers=2", "--heads=2", "--head-dim=12", "--mlp-dim=32", "--device=cpu"]
SHORT_RUN = ["--batch-size=4", "--context=80", "--learning-rate=0.02", "--length=20"]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
WORDS = b"the quick brown fox jumps over the lazy dog and comes back again\n"


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(WORDS * 200)
    return path


def tiny_model() -> ByteLM:
    torch.manual_seed(7)
    return ByteLM(TINY)


def test_prefill_and_decoding_equal_the_whole_text_at_once():
    """A prompt through chunk_kda and a token at a time through fused_recurrent_kda, against one chunk_kda."""
    model = tiny_model().double()
    tokens = torch.randint(256, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens)
        caches = model.new_caches()
        # Two pieces of prompt, the first past a chunk of 64; then single tokens.
        pieces = [tokens[:, :70], tokens[:, 70:81], *tokens[:, 81:].split(1, dim=1)]
        actual = torch.cat([model(piece, caches) for piece in pieces], dim=1)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_the_model_runs_in_half_precision_autocast():
    """As on an accelerator: q, k, v and the gates reach the operator in bfloat16, the loss hardly changes."""
    model = tiny_model()
    tokens = torch.randint(256, (2, 100), generator=torch.Generator().manual_seed(1))
    expected = model(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        actual = model(tokens)
    assert actual.dtype == torch.bfloat16
    # A few roundings in a row, of 2^-8 each.
    assert (actual - expected).norm() < 8 * torch.finfo(torch.bfloat16).eps / 2 * expected.norm()


def test_generation_takes_the_likeliest_byte_of_the_whole_text_at_temperature_zero():
    model = tiny_model().double()
    prompt = b"The text so far"
    made = bytes(model.generate(prompt, length=12, temperature=0.0, top_k=0, seed=0))
    with torch.no_grad():
        logits = model(torch.tensor([list(prompt + made)]))[0]
    assert bytes(logits[len(prompt) - 1 : -1].argmax(-1).tolist()) == made


@pytest.mark.parametrize(("busy", "idle"), [([3.0, 8.0], 2), ([100.0, 4.0], 1), ([100.0, 97.0], 1), ([60.0, 70.0], 1)])
def test_training_takes_the_cores_that_other_programs_leave_idle(monkeypatch, busy, idle):
    """With a thread more, a step waits for a thread that is not running (docs/cpu.md)."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    assert train_lm.idle_cores(busy) == idle


def test_generation_repeats_with_the_same_seed_and_changes_with_another():
    model = tiny_model()
    runs = [bytes(model.generate(b"a", length=16, temperature=1.0, top_k=0, seed=seed)) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_top_k_draws_only_from_the_likeliest():
    logits = torch.arange(256.0)
    generator = torch.Generator().manual_seed(0)
    drawn = {sample(logits, temperature=50.0, top_k=3, generator=generator) for _ in range(200)}
    assert drawn == {253, 254, 255}


def test_held_out_paragraphs_of_the_help_text_are_not_in_the_training_part():
    text = Text.of(python_help_text(), context=256)
    paragraphs = [bytes(part.tolist()).split(b"\n\n") for part in (text.train, text.held_out)]
    # The first and the last paragraph of a part may be cut by the split.
    assert not set(paragraphs[0]) & set(paragraphs[1][1:])


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path):
    text = Text.of(WORDS * 200, context=32)
    config = TrainingConfig(steps=6, batch_size=2, context=32)
    whole = Trainer(tiny_model(), config, text, torch.device("cpu"))
    losses = list(whole.train())

    interrupted = Trainer(tiny_model(), config, text, torch.device("cpu"))
    steps = interrupted.train()
    for _ in range(3):
        next(steps)
    interrupted.save(tmp_path / "checkpoint.pt")
    torch.manual_seed(99)
    resumed = Trainer(ByteLM(TINY), config, text, torch.device("cpu"))
    resumed.restore(read_checkpoint(tmp_path / "checkpoint.pt"))
    assert [*losses[:3], *resumed.train()] == losses == resumed.history
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_command_line_trains_resumes_and_generates(text_file: Path, tmp_path: Path):
    """As a person runs it, in processes of their own."""
    folder = tmp_path / "out"

    def example(*arguments: str) -> str:
        command = (sys.executable, EXAMPLES / "train_lm.py", f"--output={folder}", *arguments)
        # One thread: threads that wait for each other are slow on a machine that runs other tests beside this one.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
        return run(*command, cwd=tmp_path, env=environment, timeout=300)

    shown = example(f"--text={text_file}", "--steps=12", "--prompt=the quick ", *SHORT_RUN, *TINY_OPTIONS)
    checkpoint = read_checkpoint(folder / "checkpoint.pt")
    assert len(checkpoint["history"]) == 12
    assert checkpoint["history"][-1] < checkpoint["history"][0] - 1
    assert "validation loss" in shown
    assert "the quick " in shown
    assert (folder / "loss.png").read_bytes().startswith(PNG_SIGNATURE)

    example(f"--text={text_file}", "--resume", "--steps=16", "--length=0")
    resumed = read_checkpoint(folder / "checkpoint.pt")
    assert resumed["history"][:12] == checkpoint["history"]
    assert len(resumed["history"]) == 16
    assert astuple(resumed["model_config"]) == astuple(TINY)

    written = example("--generate-only", "--prompt=Once ", "--length=30", "--seed=5").splitlines()
    assert any(line.startswith("Once ") for line in written)
    assert read_checkpoint(folder / "checkpoint.pt")["history"] == resumed["history"]


def refused(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        train_lm.run([str(a) for a in arguments])
    return int(stopped.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text=missing.txt"], "does not exist"), (["--text=."], "is a directory"), (["--text=empty.txt"], "0 bytes"),
        (["--text=short.txt"], "longer file"), (["--generate-only"], "no checkpoint"), (["--resume"], "no checkpoint"),
        (["--steps=0"], "--steps"), (["--prompt="], "--prompt"), (["--device=toaster"], "--device"),
        (["--backend=toaster"], "not installed"), (["--output=short.txt"], "short.txt"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_bad_input_ends_with_a_message_and_a_status(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("short.txt").write_bytes(b"too short")
    assert refused(*arguments) != 0
    shown = " ".join(capsys.readouterr().err.split())
    assert message in shown
    assert "Traceback" not in shown


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture):
    for damage in (b"", b"not a checkpoint", b"PK\x03\x04 cut short"):
        (tmp_path / "checkpoint.pt").write_bytes(damage)
        assert refused("--generate-only", f"--output={tmp_path}") == 1
        assert "is no checkpoint" in " ".join(capsys.readouterr().err.split())


def test_a_checkpoint_of_another_model_is_refused(text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    trainer = Trainer(tiny_model(), TrainingConfig(steps=1), Text.of(WORDS * 200, 32), torch.device("cpu"))
    trainer.save(tmp_path / "checkpoint.pt")
    assert refused("--resume", "--dim=48", f"--text={text_file}", f"--output={tmp_path}") == 1
    assert "another model" in " ".join(capsys.readouterr().err.split())


def test_an_interrupted_run_leaves_a_checkpoint(text_file: Path, tmp_path: Path, request: pytest.FixtureRequest):
    steps = []

    def interrupt(*_):
        steps.append(0)
        if len(steps) == 2:
            raise KeyboardInterrupt

    request.addfinalizer(register_optimizer_step_post_hook(interrupt).remove)
    assert refused(f"--text={text_file}", f"--output={tmp_path}", "--steps=4", *SHORT_RUN, *TINY_OPTIONS) != 0
    assert len(read_checkpoint(tmp_path / "checkpoint.pt")["history"]) == 1
