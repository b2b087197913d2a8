"""Text, optimisation, checkpoints and the loss curve of the example; knows nothing of KDA."""

from __future__ import annotations

import argparse
import math
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from byte_lm import ByteLM, ModelConfig
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

HELD_OUT_PART = 10  # one byte in ten: the tail of the text
WARMUP_STEPS = 20
FINAL_LEARNING_RATE = 0.1
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
MAX_GRADIENT_NORM = 1.0


class ExampleError(Exception):
    """An error that the user can fix; the message says how."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def __init__(self, program: str, text: str) -> None:
        super().__init__(prog=program, description=text, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def number(least: int, most: int = 2**31, kind: type = int) -> Callable[[str], Any]:
    """The type of an option that is a number from ``least`` to ``most``."""

    def number(text: str) -> Any:
        if not least <= kind(text) <= most:
            raise argparse.ArgumentTypeError(f"expected {least} to {most}, got {text}")
        return kind(text)

    return number


@dataclass(frozen=True)
class TrainingConfig:
    """How a model is trained."""

    steps: int = 900
    batch_size: int = 4  # windows of text in a step
    context: int = 256  # bytes in a window
    learning_rate: float = 3e-3  # the highest; it rises over the first steps, then falls along a cosine to a tenth
    seed: int = 0  # of the weights and of the windows' places


@dataclass(frozen=True)
class Text:
    """Bytes to train on and the tail that is held out, both [length] uint8."""

    train: Tensor
    held_out: Tensor

    @classmethod
    def of(cls, data: bytes, context: int) -> Text:
        """Split ``data``; it must be long enough for one window of ``context`` bytes in the tail."""
        needed = HELD_OUT_PART * (context + 1)
        if len(data) < needed:
            raise ExampleError(
                f"The text has {len(data):,} bytes; a context of {context} needs at least {needed:,}, "
                f"since a part in {HELD_OUT_PART} is held out. Give a longer file with --text, or a smaller --context."
            )
        held_out = len(data) // HELD_OUT_PART
        whole = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return cls(*whole.split([len(data) - held_out, held_out]))


def python_help_text() -> bytes:
    """The language reference behind Python's ``help()``, every paragraph once.

    Its topics quote each other at length; without the repetitions, training sees at most single lines of the
    held-out tail.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ExampleError("This Python carries no pydoc_data; give a file with --text.") from error
    paragraphs = "\n\n".join(topics.values()).split("\n\n")
    return "\n\n".join(dict.fromkeys(paragraphs)).encode()


class Trainer:
    """A model in training, with everything that a checkpoint stores."""

    def __init__(self, model: ByteLM, config: TrainingConfig, text: Text, device: torch.device) -> None:
        self.model, self.config, self.text, self.device = model.to(device), config, text, device
        matrices, others = ([p for p in model.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=BETAS)
        self.history: list[float] = []  # training loss of every step, in nats a byte
        self.validations: dict[int, float] = {}  # by step

    @property
    def step(self) -> int:
        """Steps made so far."""
        return len(self.history)

    def train(self) -> Iterator[float]:
        """Make the steps that are left, yielding the loss after each."""
        self.model.train()
        for step in range(self.step, self.config.steps):
            for group in self.optimizer.param_groups:
                group["lr"] = self._learning_rate(step)
            loss = self._loss(self._windows(step))
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT_NORM)
            self.optimizer.step()
            self.history.append(loss.item())
            yield self.history[-1]

    @torch.no_grad()
    def validate(self, max_windows: int | None = None) -> float:
        """Mean loss over the held-out tail, or over ``max_windows`` windows spread evenly over it."""
        windows = self.text.held_out.unfold(0, self.config.context + 1, self.config.context)
        if max_windows is not None and max_windows < len(windows):
            windows = windows[torch.linspace(0, len(windows) - 1, max_windows).long()]
        losses = [self._loss(batch).item() * len(batch) for batch in windows.split(self.config.batch_size)]
        loss = sum(losses) / len(windows)
        self.validations[self.step] = loss
        return loss

    def _windows(self, step: int) -> Tensor:
        """Windows for one step. They depend on the step alone, so that a resumed run sees the same ones."""
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + step)
        places = len(self.text.train) - self.config.context
        starts = torch.randint(places, (self.config.batch_size,), generator=generator)
        return self.text.train[starts[:, None] + torch.arange(self.config.context + 1)]

    def _loss(self, windows: Tensor) -> Tensor:
        """Cross entropy in nats a byte of windows [B, context + 1]."""
        tokens = windows.to(self.device, torch.int64)
        # KDA keeps its state in float32 whatever the precision of the projections.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type != "cpu"):
            logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def _learning_rate(self, step: int) -> float:
        warmup = min(1.0, (step + 1) / WARMUP_STEPS)
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.config.steps))
        return self.config.learning_rate * warmup * (FINAL_LEARNING_RATE + (1 - FINAL_LEARNING_RATE) * cosine)

    def save(self, path: Path) -> None:
        """Write a checkpoint; an older one at the same path stays complete until this one is."""
        unfinished = path.with_suffix(".unfinished")
        configs = {"model_config": asdict(self.model.config), "training_config": asdict(self.config)}
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(configs | states | {"history": self.history, "validations": self.validations}, unfinished)
        os.replace(unfinished, path)

    def restore(self, checkpoint: dict) -> None:
        """Continue from a checkpoint (from ``read_checkpoint``)."""
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.history, self.validations = checkpoint["history"], checkpoint["validations"]

    def draw_losses(self, path: Path) -> None:
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel="loss (nats a byte)", title="Byte-level model with KDA")
        axes.plot(range(1, self.step + 1), self.history, color="tab:blue", alpha=0.5, linewidth=1, label="training")
        steps = sorted(self.validations)
        losses = [self.validations[step] for step in steps]
        axes.plot(steps, losses, color="tab:orange", marker="o", markersize=4, label="validation (held-out tail)")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(path, dpi=120)


def read_checkpoint(path: Path) -> dict:
    """Load what ``Trainer.save`` wrote; its tensors are on the CPU."""
    if not path.is_file():
        raise ExampleError(f"There is no checkpoint at {path}; train a model first, or name its folder with --output.")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        checkpoint["model_config"] = ModelConfig(**checkpoint["model_config"])
        checkpoint["training_config"] = TrainingConfig(**checkpoint["training_config"])
    except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError, TypeError) as error:
        raise ExampleError(f"{path} is no checkpoint of this example ({error}).") from error
    return checkpoint
