"""Train a small byte-level language model with Kimi Delta Attention, then let it write.

    pip install -r requirements/demo.txt                          # beside kda-core and a backend
    python examples/train_lm.py                                   # on text that every Python carries
    python examples/train_lm.py --text book.txt                   # on any file
    python examples/train_lm.py --generate-only --prompt "The "   # from the checkpoint

Writes checkpoint.pt and loss.png into the output folder. byte_lm.py is the model, training.py the
rest.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer
from byte_lm import ByteLM, ModelConfig
from cores import usable_cores
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from training import ExampleError, Text, Trainer, TrainingConfig, python_help_text, read_checkpoint

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
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}, {task.fields[speed]:,.0f} bytes/s,"),
        TimeRemainingColumn(),
    )
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
        raise typer.BadParameter(str(error), param_hint="--device") from error


def given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def main(
    text: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, readable=True, help="File to learn from; default: Python's help texts."
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder of the checkpoint and the picture.")] = Path("demo-output"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the folder's checkpoint.")] = False,
    generate_only: Annotated[bool, typer.Option("--generate-only", help="Only write, from the checkpoint.")] = False,
    steps: Annotated[int | None, typer.Option(min=1, show_default=str(TrainingConfig.steps))] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, show_default=str(TrainingConfig.batch_size))] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Bytes in a window.", show_default=str(TrainingConfig.context))
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(min=0.0, show_default=str(TrainingConfig.learning_rate))
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, show_default=str(TrainingConfig.seed))] = None,
    dim: Annotated[int | None, typer.Option(min=1, help="Width.", show_default=str(ModelConfig.dim))] = None,
    layers: Annotated[int | None, typer.Option(min=1, show_default=str(ModelConfig.layers))] = None,
    heads: Annotated[int | None, typer.Option(min=1, show_default=str(ModelConfig.heads))] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, show_default=str(ModelConfig.head_dim))] = None,
    mlp_dim: Annotated[int | None, typer.Option(min=1, show_default=str(ModelConfig.mlp_dim))] = None,
    prompt: Annotated[str, typer.Option(help="What the generated text begins with.")] = "The ",
    length: Annotated[int, typer.Option(min=0, help="Bytes to generate.")] = 600,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest byte.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among the likeliest k bytes; 0: all.")] = 40,
    device: Annotated[str | None, typer.Option(help="Default: the best that an installed backend serves.")] = None,
    backend: Annotated[str | None, typer.Option(help="Name of a kda_core backend; default: by device.")] = None,
) -> None:
    """Train a small byte-level language model with Kimi Delta Attention, then let it write."""
    model_options = given(dim=dim, layers=layers, heads=heads, head_dim=head_dim, mlp_dim=mlp_dim)
    training_options = given(
        steps=steps, batch_size=batch_size, context=context, learning_rate=learning_rate, seed=seed
    )
    if not prompt:
        raise typer.BadParameter("at least one character is needed", param_hint="--prompt")
    if "OMP_NUM_THREADS" not in os.environ:
        idle = idle_cores(psutil.cpu_percent(interval=0.2, percpu=True))
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores(), idle))
    checkpoint = read_checkpoint(output / "checkpoint.pt") if resume or generate_only else None
    saved_model = ModelConfig() if checkpoint is None else checkpoint["model_config"]
    model_config = replace(saved_model, **model_options)
    if checkpoint is not None and model_config != saved_model:
        raise ExampleError(f"The checkpoint holds another model: {saved_model}; leave the model's options out.")
    config = replace(TrainingConfig() if checkpoint is None else checkpoint["training_config"], **training_options)

    with kda_core.use_backend(backend) if backend else contextlib.nullcontext():
        target = usable_device(device) if device else kda_core.default_device()
        torch.manual_seed(config.seed)
        model = ByteLM(model_config)
        console.print(
            f"kda_core {kda_core.__version__}, device {target}, backend {chosen_backend(model, target)}, "
            f"{sum(p.numel() for p in model.parameters()):,} parameters"
        )
        if generate_only:
            model.load_state_dict(checkpoint["model"])
            model.to(target)
        else:
            data = python_help_text() if text is None else text.read_bytes()
            trainer = Trainer(model, config, Text.of(data, config.context), target)
            console.print(f"text: {len(data):,} bytes, of which {len(trainer.text.held_out):,} are held out")
            if checkpoint is not None:
                trainer.restore(checkpoint)
                if trainer.step >= config.steps:
                    raise ExampleError(f"The checkpoint has made {trainer.step} steps; give a larger --steps.")
            output.mkdir(parents=True, exist_ok=True)
            try:
                train(trainer, output)
            except KeyboardInterrupt:
                trainer.save(output / "checkpoint.pt")
                console.print(f"stopped after {trainer.step} steps; --resume goes on from there")
                raise
        write(model, prompt, length, temperature, top_k, config.seed)


def run(arguments: list[str] | None = None) -> None:
    """Run the command line; errors that the user can fix are one line, not a traceback."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    try:
        app(arguments, prog_name="train_lm.py")
    except (ExampleError, kda_core.KdaError, OSError) as error:
        Console(stderr=True, highlight=False).print(f"[red]error:[/red] {escape(str(error))}")
        sys.exit(1)


if __name__ == "__main__":
    run()
