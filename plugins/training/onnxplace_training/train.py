"""The command `onnxplace train`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from onnxplace.cli.completion import BUNDLE_PATH, PATH
from onnxplace.cli.help import GroupedCommand
from onnxplace.cli.shared_options import (
    as_json,
    note_core_shortage,
    print_json,
    print_notes,
    print_text,
    with_operator_libraries,
)
from onnxplace.cli.terminal import print_aside, show_progress
from onnxplace.errors import Diagnostic, OnnxplaceError, UsageError, format_name
from onnxplace.utils.files import require_different_files, require_writable, write_each

if TYPE_CHECKING:
    from onnxplace_training import BatchSampler, LossCurve, Schedule, StepResult, Trainer


@dataclass(frozen=True)
class TrainOptions:
    """The options of the command."""

    data: Path
    steps: int
    lr: float | None
    schedule: Literal["constant", "cosine", "linear"]
    warmup: int
    batch: int
    seed: int | None
    save: Path | None
    save_every: int
    resume: Path | None
    log: Path | None
    plot: Path | None
    export: Path | None
    on_nan: Literal["stop", "continue"]


@click.command(cls=GroupedCommand)
@click.argument("bundle", type=BUNDLE_PATH)
@click.option("--data", required=True, type=PATH, metavar="F.npz",
              help="Arrays by input name, from numpy.savez; rows are their first axis.")  # fmt: skip
@click.option("--steps", required=True, type=click.IntRange(0), metavar="N",
              help="Train up to step N, those of a resumed run included.")  # fmt: skip
@click.option("--lr", type=float, metavar="RATE", help="Learning rate.  [default: that of the model]")
@click.option("--schedule", type=click.Choice(["constant", "cosine", "linear"]), default="constant", show_default=True,
              help="How the learning rate falls until step N.")  # fmt: skip
@click.option("--warmup", type=click.IntRange(0), default=0, show_default=True, metavar="N",
              help="Steps in which the learning rate rises from zero.")  # fmt: skip
@click.option("--batch", type=click.IntRange(1), metavar="B", help="Rows of a batch.  [default: as compiled]")
@click.option("--seed", type=click.IntRange(0), metavar="S",
              help="Seed of the order of rows and of dropout.  [default: 0, or that of --resume]")  # fmt: skip
@click.option("--save", type=PATH, metavar="F.safetensors", help="Write a checkpoint at the end, also after Ctrl-C.")
@click.option("--save-every", type=click.IntRange(1), metavar="N", help="Write it after every N steps, too.")
@click.option("--resume", type=PATH, metavar="F.safetensors", help="Continue from a checkpoint, bit for bit.")
@click.option("--log", type=PATH, metavar="F.csv", help="Write the loss of each step.")
@click.option("--plot", type=PATH, metavar="F.png", help="Draw the losses (PNG, SVG or PDF).")
@click.option("--export", type=PATH, metavar="F.onnx", help="Write the trained model for inference.")
@click.option("--on-nan", type=click.Choice(["stop", "continue"]), default="stop", show_default=True,
              help="What to do if the loss is NaN or infinite.")  # fmt: skip
@with_operator_libraries
@as_json
def train(bundle: Path, json_: bool, **options: Any) -> None:
    """Train with BUNDLE, which was compiled from a training step.

    Ctrl-C ends after the step in progress, and writes what was asked for. The same command with --resume continues.
    """
    from onnxplace.session.inference_session import load
    from onnxplace_training import BatchSampler, Trainer

    plan = TrainOptions(**{**options, "batch": options["batch"] or 0, "save_every": options["save_every"] or 0})
    _check_files(plan, bundle)
    opened = load(bundle)
    with Trainer(opened, seed=plan.seed or 0, on_nan=plan.on_nan) as trainer:
        notes = trainer.load(plan.resume) if plan.resume else {}
        if plan.seed is not None and plan.seed != trainer.seed:
            message = f"the checkpoint was trained with seed {trainer.seed}, got {plan.seed}"
            raise UsageError("U042", message, where="--seed", hint="leave --seed out")
        sampler = BatchSampler(opened, plan.data, plan.batch, trainer.seed)
        _Run(trainer, sampler, plan, json_).run(bundle)
    note_core_shortage(opened)
    _note_other_data(notes, sampler)


def _check_files(plan: TrainOptions, bundle: Path) -> None:
    """Raise UsageError for files that cannot be written, before any work is done."""
    from onnxplace_training import require_plot_format

    outputs = {"save": plan.save, "log": plan.log, "plot": plan.plot, "export": plan.export}
    require_different_files(**outputs)
    for name, path in outputs.items():
        if path is not None:  # a checkpoint may be continued and replaced
            read = [plan.data, *([plan.resume] if plan.resume and name != "save" else [])]
            require_writable(path, bundle, *read)
    if plan.plot:
        require_plot_format(plan.plot)
    if plan.save_every and not plan.save:
        raise UsageError("U042", "--save-every needs a file for checkpoints", where="--save", hint="add --save F")


def _note_other_data(notes: Any, sampler: BatchSampler) -> None:
    """Print a note if a resumed run has other batches than the one before."""
    for name, value in (("rows", sampler.rows), ("batch", sampler.batch)):
        if name in notes and notes[name] != str(value):
            message = f"the checkpoint was trained with {notes[name]} as number of {name}, this run has {value}"
            hint = "the batches are not those that would have followed"
            print_notes([Diagnostic("L058", message, where="--resume", hint=hint)])


class _Run:
    """One run of the command."""

    def __init__(self, trainer: Trainer, sampler: BatchSampler, plan: TrainOptions, json_: bool) -> None:
        from onnxplace_training import LossCurve

        self.trainer, self.sampler, self.plan, self.json = trainer, sampler, plan, json_
        self.curve: LossCurve = LossCurve()
        self.first_step = trainer.step_count
        self.seconds = 0.0
        self.last: StepResult | None = None
        self.first_loss = math.nan
        if plan.resume and plan.log:
            self.curve.read_before(plan.log, self.first_step)

    def run(self, bundle: Path) -> None:
        """Train, then write what was asked for, also after an interrupt or a failure."""
        try:
            with show_losses(self.json, self.first_step, self.plan.steps) as report:
                self._train(report)
        except BaseException as problem:
            self._write_after(problem)
            raise
        write_each(self._save, self._export, self._write_log, self._plot)
        with suppress(BrokenPipeError):
            self._print_summary(bundle)

    def _train(self, report: Callable[[StepResult], None]) -> None:
        """Run the steps up to the last one."""
        count, began = max(self.plan.steps - self.first_step, 0), time.perf_counter()
        schedule = self._make_schedule()
        batches = self.sampler.iterate(self.first_step + 1)
        for result in self.trainer.train(batches, count, schedule):
            self._record(result)
            self.seconds = time.perf_counter() - began
            report(result)
            if self.plan.save_every and result.step % self.plan.save_every == 0 and result.step < self.plan.steps:
                self._save()

    def _record(self, result: StepResult) -> None:
        self.last = result
        self.first_loss = result.loss if math.isnan(self.first_loss) else self.first_loss
        self.curve.add(result.step, result.loss, result.learning_rate, result.seconds, result.metrics)

    def _make_schedule(self) -> Schedule | None:
        """Return the learning rate of each step; None for the default of the model."""
        from onnxplace_training import make_schedule

        plan = self.plan
        if plan.lr is None and plan.schedule == "constant" and not plan.warmup:
            return None
        rate = plan.lr
        if rate is None:
            training = self.trainer.bundle.manifest.training
            known = training.optimizer.get("lr") if training else None
            if isinstance(known, bool) or not isinstance(known, (int, float)):
                message = "a schedule needs a learning rate, which the model does not name"
                raise UsageError("U042", message, where="--lr", hint="add --lr 1e-3")
            rate = known
        if not (math.isfinite(rate) and rate >= 0):
            raise UsageError("U005", f"expected a learning rate of 0 or more, got {rate}", where="--lr")
        return make_schedule(plan.schedule, rate, plan.steps, plan.warmup)

    def _save(self) -> None:
        if self.plan.save:
            notes = {"rows": str(self.sampler.rows), "batch": str(self.sampler.batch)}
            self.trainer.save(self.plan.save, notes)

    def _export(self) -> None:
        if self.plan.export:
            self.trainer.export(self.plan.export)

    def _write_log(self) -> None:
        if self.plan.log:
            self.curve.write(self.plan.log)

    def _plot(self) -> None:
        if self.plan.plot and self.curve.rows:
            self.curve.plot(self.plan.plot, self.trainer.bundle.manifest.model)

    def _write_after(self, problem: BaseException) -> None:
        """Write a checkpoint and the curve after an interrupt or failure, and say where the run stands."""
        result = self.trainer.last_result
        if result is not None and result.step > self.curve.last_step:  # an interrupt came in its course
            self._record(result)
        if isinstance(problem, (KeyboardInterrupt, SystemExit, OnnxplaceError)):
            print_aside(self._save_last())
        try:
            write_each(self._write_log, self._plot)
        except (OnnxplaceError, OSError) as failure:
            print_aside("\n".join((str(failure), *getattr(failure, "__notes__", ()))))

    def _save_last(self) -> str:
        """Write a checkpoint if there was a step; return where the run stands."""
        try:
            step = self.trainer.step_count
            saved = ""
            if self.plan.save and step > self.first_step:
                self._save()
                saved = f"; {self.plan.save} has it: continue with --resume {self.plan.save}"
            return f"ended after step {step} of {self.plan.steps}{saved}"
        except (OnnxplaceError, OSError) as failure:
            return f"the states after the last step cannot be saved: {failure}"

    def _print_summary(self, bundle: Path) -> None:
        plan, steps = self.plan, self.trainer.step_count - self.first_step
        loss = self.last.loss if self.last else math.nan
        files = {"save": plan.save, "log": plan.log, "plot": plan.plot, "export": plan.export}
        if self.json:
            data = {
                "bundle": str(bundle),
                "step": self.trainer.step_count,
                "steps": steps,
                "first_loss": self.first_loss,
                "loss": loss,
                "metrics": dict(self._list_metrics()),
                "seconds": self.seconds,
                "seconds_per_step": self.seconds / steps if steps else None,
                "batch": self.sampler.batch,
                "rows": self.sampler.rows,
                **{name: str(path) if path else None for name, path in files.items()},
            }
            print_json(data)
            return
        if not steps:
            print_text(f"nothing to do: the checkpoint is of step {self.first_step}, --steps is {plan.steps}")
        else:
            metrics = "".join(f", {format_name(name)} {value:.4g}" for name, value in self._list_metrics())
            print_text(
                f"step {self.trainer.step_count}: loss {loss:.6g} (first {self.first_loss:.6g}){metrics}, "
                f"{self.seconds / steps * 1e3:.3g} ms a step"
            )
        for name, path in files.items():
            if path is not None and (steps or name != "plot"):
                print_text(f"{name}  {path}")

    def _list_metrics(self) -> list[tuple[str, float]]:
        metrics = self.last.metrics if self.last else {}
        return [(name, value) for name, value in metrics.items() if isinstance(value, float)]


@contextmanager
def show_losses(json_: bool, first: int, steps: int) -> Iterator[Callable[[StepResult], None]]:
    """Show progress with the loss on stderr; yields a function that takes the result of each step."""
    with show_progress(json_, "train") as display:
        if display is None:
            yield lambda result: None
            return
        display.resume_at(first / max(steps, 1))

        def report(result: StepResult) -> None:
            display.advance(result.step / max(steps, 1), f"step {result.step} of {steps}, loss {result.loss:.6g}")

        yield report
