"""Train a small byte-level language model with Kimi Delta Attention, then let it write.

    pip install -r requirements/demo.txt                          # beside kda-core and a backend
    python examples/train_lm.py                                   # on text that every Python carries
    python examples/train_lm.py --text book.txt                   # on any file
    python examples/train_lm.py --generate-only --prompt "The "   # from the checkpoint

Writes checkpoint.pt and loss.png into the output folder. byte_lm.py is the model, training.py the
rest.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from byte_lm import ByteLM, ModelConfig
from cores import usable_cores
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from training import ExampleError, Parser, Text, Trainer, TrainingConfig, number, python_help_text, read_checkpoint

import kda_core

VALIDATIONS = 9
VALIDATION_WINDOWS = 32

console = Console(highlight=False)


def idle_cores(busy: Sequence[float]) -> int:
    """Cores that other programs leave idle, by the percentages in which each is ``busy``; at least 1.

    OpenMP's threads wait for each other: one thread more than there are idle cores makes a step several times slower.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    allowed = range(len(busy)) if affinity is None else affinity(0)
    return max(1, round(sum(1 - busy[core] / 100 for core in allowed)))


def chosen_backend(model: ByteLM, device: torch.device) -> str | None:
    """Name of the backend that will serve the model's mixers."""
    config = model.config
    x = torch.zeros(1, 1, config.heads, config.head_dim, device=device)
    return kda_core.explain(x, x, x, x, x[..., 0]).chosen


def train(trainer: Trainer, folder: Path) -> None:
    """Train to the end with a progress bar, validating and writing a checkpoint now and then."""
    config = trainer.config
    every = max(1, config.steps // VALIDATIONS)
    checkpoint = folder / "checkpoint.pt"
    started, first = time.perf_counter(), trainer.step
    figures = TextColumn("loss {task.fields[loss]:.3f}, {task.fields[speed]:,.0f} bytes/s,")
    columns = TextColumn("training"), BarColumn(), MofNCompleteColumn(), figures, TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=config.steps, completed=first, loss=float("nan"), speed=0)
        for loss in trainer.train():
            seconds = time.perf_counter() - started
            speed = (trainer.step - first) * config.batch_size * config.context / seconds
            progress.update(task, advance=1, loss=loss, speed=speed)
            if trainer.step % every == 0 and trainer.step < config.steps:
                validation = trainer.validate(VALIDATION_WINDOWS)
                trainer.save(checkpoint)
                progress.print(f"step {trainer.step:>5}   training loss {loss:.3f}   validation loss {validation:.3f}")
        validation = trainer.validate()
    trainer.save(checkpoint)
    trainer.draw_losses(folder / "loss.png")
    seconds = time.perf_counter() - started
    console.print(f"validation loss {validation:.4f} nats a byte over the whole held-out tail, after {seconds:.0f} s")
    console.print(f"wrote {escape(str(checkpoint))} and {escape(str(folder / 'loss.png'))}")


def write(model: ByteLM, prompt: str, length: int, temperature: float, top_k: int, seed: int) -> None:
    """Stream ``prompt`` and its continuation to the terminal."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    console.rule("generated text")
    sys.stdout.write(prompt)
    started = time.perf_counter()
    for byte in model.generate(prompt.encode(), length, temperature, top_k, seed):
        # A model of bytes may emit any control code; the terminal gets none but line feed and tab.
        sys.stdout.write("".join(c if c.isprintable() or c in "\n\t" else "�" for c in decoder.decode(bytes([byte]))))
        sys.stdout.flush()
    speed = length / (time.perf_counter() - started)
    sys.stdout.write("\n")
    console.rule(f"{length} bytes, {speed:,.0f} a second")


def usable_device(name: str) -> torch.device:
    """The device of that name, if this machine has it."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ExampleError(f"--device: {error}") from error


def existing_file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text} {'is a directory' if Path(text).is_dir() else 'does not exist'}")
    return Path(text)


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """The options; those of ``ModelConfig`` and ``TrainingConfig`` only where they are given."""
    parser = Parser("train_lm.py", __doc__)
    parser.add_argument("--text", type=existing_file, help="file to learn from; default: Python's help texts")
    parser.add_argument("--output", type=Path, default="demo-output", help="folder of the checkpoint and the picture")
    parser.add_argument("--resume", action="store_true", help="go on from the folder's checkpoint")
    parser.add_argument("--generate-only", action="store_true", help="only write, from the checkpoint")
    for f in (*fields(TrainingConfig), *fields(ModelConfig)):
        kind = number(0 if f.name in ("seed", "learning_rate") else 1, kind=type(f.default))
        name, default = f"--{f.name.replace('_', '-')}", f"default: {f.default}, or the checkpoint's"
        parser.add_argument(name, type=kind, default=argparse.SUPPRESS, help=default)
    parser.add_argument("--prompt", default="The ", help="what the generated text begins with")
    parser.add_argument("--length", type=number(0), default=600, help="bytes to generate")
    parser.add_argument("--temperature", type=number(0, kind=float), default=0.8, help="0: always the likeliest byte")
    parser.add_argument("--top-k", type=number(0), default=40, help="choose among the likeliest k bytes; 0: all")
    parser.add_argument("--device", help="default: the best that an installed backend serves")
    parser.add_argument("--backend", help="name of a kda_core backend; default: by device")
    options = parser.parse_args(arguments)
    if not options.prompt:
        parser.error("--prompt: at least one character is needed")
    return options


def given(config: type, options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a dataclass that are among the options."""
    return {f.name: getattr(options, f.name) for f in fields(config) if hasattr(options, f.name)}


def main(options: argparse.Namespace) -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        idle = idle_cores(psutil.cpu_percent(interval=0.2, percpu=True))
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores(), idle))
    saved = options.output / "checkpoint.pt"
    checkpoint = read_checkpoint(saved) if options.resume or options.generate_only else {}
    saved_model = checkpoint.get("model_config", ModelConfig())
    model_config = replace(saved_model, **given(ModelConfig, options))
    if checkpoint and model_config != saved_model:
        raise ExampleError(f"The checkpoint holds another model: {saved_model}; leave the model's options out.")
    config = replace(checkpoint.get("training_config", TrainingConfig()), **given(TrainingConfig, options))

    with kda_core.use_backend(options.backend) if options.backend else contextlib.nullcontext():
        target = usable_device(options.device) if options.device else kda_core.default_device()
        torch.manual_seed(config.seed)
        model = ByteLM(model_config)
        console.print(
            f"kda_core {kda_core.__version__}, device {target}, backend {chosen_backend(model, target)}, "
            f"{sum(p.numel() for p in model.parameters()):,} parameters"
        )
        if options.generate_only:
            model.load_state_dict(checkpoint["model"])
            model.to(target)
        else:
            data = python_help_text() if options.text is None else options.text.read_bytes()
            trainer = Trainer(model, config, Text.of(data, config.context), target)
            console.print(f"text: {len(data):,} bytes, of which {len(trainer.text.held_out):,} are held out")
            if checkpoint:
                trainer.restore(checkpoint)
                if trainer.step >= config.steps:
                    raise ExampleError(f"The checkpoint has made {trainer.step} steps; give a larger --steps.")
            options.output.mkdir(parents=True, exist_ok=True)
            try:
                train(trainer, options.output)
            except KeyboardInterrupt:
                trainer.save(saved)
                console.print(f"stopped after {trainer.step} steps; --resume goes on from there")
                sys.exit(130)
        write(model, options.prompt, options.length, options.temperature, options.top_k, config.seed)


def run(arguments: list[str] | None = None) -> None:
    """Run the command line; errors that the user can fix are one line, not a traceback."""
    try:
        main(options_of(arguments))
    except (ExampleError, kda_core.KdaError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run()
