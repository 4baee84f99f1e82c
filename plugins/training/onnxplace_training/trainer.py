"""The trainer: runs a bundle of a training step, step after step, and keeps its states."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NoReturn

import numpy as np

from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.manifest import Manifest, TrainingRecord
from onnxplace.errors import ExecutionError, FeedError, UsageError
from onnxplace.feeds.feeds import Array, Declared, numpy_type
from onnxplace.runtime.interface import Result, choose_closing_timeout, unpicklable_error
from onnxplace.session.inference_session import InferenceSession, load
from onnxplace_training.batches import prefetch_batches
from onnxplace_training.checkpoints import (
    Checkpoint,
    check_states,
    list_state_specs,
    read_checkpoint,
    write_checkpoint,
)

STEP_KEY, SEED_KEY = "trainer.step", "trainer.seed"
"""Entries of `state_dict` that are not tensors of the model."""


@dataclass(frozen=True)
class StepResult:
    """What a step returned."""

    loss: float
    metrics: Mapping[str, Any]
    """Metrics by name: floats, or arrays where they are not scalars."""
    step: int
    """Number of the step, 1 for the first one."""
    learning_rate: float | None = None
    """None for the default of the model."""
    outputs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Further outputs of the model, such as gradients."""
    seconds: float = 0.0


class Trainer:
    """Train with a bundle that was compiled from a training step; a context manager.

    Parameters, moments and buffers stay on their devices between steps. The trainer counts the steps and feeds their
    number, the learning rate and the seed.

    >>> with onnxplace_training.Trainer("step.bundle") as trainer:  # doctest: +SKIP
    ...     for result in trainer.train(loader, steps=1000, learning_rate=1e-3):
    ...         print(result.step, result.loss)
    ...     trainer.save("checkpoint.safetensors")

    Args:
        bundle: A bundle, or its path.
        runtime: Name of the runtime; it must keep states.
        seed: Seed of the random numbers of the step, such as those of dropout.
        on_nan: Whether a loss that is NaN or infinite raises an error.
        protect: Whether the states before the last step are kept until the next one, so that a failed step and one with
            a NaN loss change nothing. By default, if every device has memory for a second set of its states.
        custom_op_libraries: Shared libraries with operators that ONNX Runtime does not have.

    Raises:
        UsageError: the bundle is not one of a training step, or an option is wrong.
    """

    def __init__(
        self,
        bundle: Bundle | str | Path,
        *,
        runtime: str = "onnxruntime",
        seed: int = 0,
        on_nan: Literal["stop", "continue"] = "stop",
        protect: bool | None = None,
        custom_op_libraries: Iterable[str | Path] = (),
    ) -> None:
        self.bundle = bundle if isinstance(bundle, Bundle) else load(bundle)
        self._training = require_training_step(self.bundle)
        if on_nan not in ("stop", "continue"):
            raise UsageError("U005", f"expected on_nan 'stop' or 'continue', got {on_nan!r}", where="Trainer")
        self.on_nan = on_nan
        self.seed = check_seed(seed)
        self._specs = list_state_specs(self.bundle.manifest)
        self.is_protected = has_room_for_copies(self.bundle.manifest) if protect is None else protect
        self._session = InferenceSession(
            self.bundle, runtime=runtime, custom_op_libraries=list(custom_op_libraries), max_in_flight=1
        )
        if self.is_protected:
            try:
                self._session.protect_states()
            except BaseException:
                self._session.close()
                raise
        self._loaded: Mapping[str, Array] = {}
        """States by input that replace those of the session in the next step."""
        self._first_step = 0
        """Number of the step after which the session began to count."""
        self._future: Future[Result] | None = None
        self.last_result: StepResult | None = None
        """Result of the last step that counts, also of one that Ctrl-C interrupted, which returned none."""
        self._spoiled = ""
        """Why the states are not to be used; empty if they are sound."""
        inputs = {item.name: item for item in self.bundle.inputs}
        self._own_inputs = {
            role: inputs[name]
            for role in ("learning_rate", "step", "seed")
            if (name := getattr(self._training, role)) and name in inputs
        }

    # --- steps ---

    @property
    def step_count(self) -> int:
        """Return the number of the last step; 0 before the first one."""
        return self._first_step + self._session.count_state_changes()

    def step(
        self, feeds: Mapping[str, Any], learning_rate: float | None = None, *, timeout: float | None = None
    ) -> StepResult:
        """Run one step on a batch.

        A step that Ctrl-C interrupts is completed first, so that nothing is lost. With a `timeout` in seconds, it is
        abandoned.

        Args:
            feeds: The inputs of the batch, by name.
            learning_rate: The learning rate; by default, that of the model.
            timeout: Seconds.

        Raises:
            FeedError: the feeds do not fit; nothing has changed.
            ExecutionError: the step failed, or its loss is NaN or infinite. The states are as before if
                `is_protected`; otherwise the last checkpoint has to be loaded.
            RunTimeoutError: it takes more than `timeout` seconds; the states are as above.
        """
        self._require_sound_states()
        number = self.step_count + 1
        all_feeds = {**self._check_feeds(feeds), **self._make_own_feeds(number, learning_rate), **self._loaded}
        self._future = None
        try:
            return self._accept(self._run(all_feeds, timeout), number, learning_rate)
        except (KeyboardInterrupt, SystemExit):
            self._complete_interrupted(number, learning_rate)
            raise
        except FeedError as problem:
            if problem.code == "S007":
                self._spoiled = f"a step before step {number} failed and lost the states"
                self._require_sound_states()
            raise
        except ExecutionError as problem:
            if problem.code == "L045":
                raise
            raise self._describe_failure(problem, number) from problem

    def train(
        self,
        loader: Iterable[Mapping[str, Any]],
        steps: int | None = None,
        learning_rate: float | Schedule | None = None,
        *,
        prefetch: int = 2,
    ) -> Generator[StepResult, None, None]:
        """Yield the result of a step for each batch of a loader.

        A thread draws up to `prefetch` batches while a step runs; 0 for no thread. It ends with the generator. With
        `steps`, a loader that can be iterated again, such as a list or torch's DataLoader, begins again at its end.

        Args:
            loader: Yields the feeds of each step.
            steps: Number of steps; by default, as many as the loader has batches.
            learning_rate: A number, or a function of the number of the step.
            prefetch: Number of batches.

        Raises:
            FeedError: a batch does not fit, or the loader has no batches. Errors of the loader are raised as they are.
        """
        steps = None if steps is None else check_count(steps, "a number of steps", "train")
        prefetch = check_count(prefetch, "a number of batches to prefetch", "train")
        with prefetch_batches(loader, prefetch, repeats=steps is not None) as batches:
            for feeds in islice(batches, steps):
                rate = learning_rate(self.step_count + 1) if callable(learning_rate) else learning_rate
                yield self.step(feeds, rate)

    # --- states ---

    def state_dict(self) -> dict[str, Array]:
        """Return copies of parameters, moments (`layers.0.weight.exp_avg`) and buffers by name, and of step and seed.

        Raises ExecutionError if a step has lost them.
        """
        entries = {STEP_KEY: np.array(self.step_count), SEED_KEY: np.array(self.seed)}
        # Arrays that were loaded are fed to the next step, and may be mapped from a file.
        return {**{name: np.array(array) for name, array in self._read_states().items()}, **entries}

    def load_state_dict(self, states: Mapping[str, Any], *, strict: bool = True) -> None:
        """Take states as `state_dict` returns them, or other arrays of these names; without `strict`, some of them.

        Raises InputError if they are not those of this model, naming the first that differs.
        """
        arrays = {name: np.asarray(value) for name, value in states.items()}
        number, given_seed = arrays.pop(STEP_KEY, None), arrays.pop(SEED_KEY, None)
        step = None if number is None else check_count(number, f"a step ({STEP_KEY!r})", "load_state_dict")
        seed = None if given_seed is None else check_count(given_seed, f"a seed ({SEED_KEY!r})", "load_state_dict")
        check_states(arrays, self._specs, "load_state_dict", strict)
        current = {} if len(arrays) == len(self._specs) else self._read_states()
        kept = {name: np.array(array) for name, array in {**current, **arrays}.items()}
        self._replace_states(kept, self.step_count if step is None else step)
        self.seed = self.seed if seed is None else seed

    def save(self, path: str | Path, notes: Mapping[str, str] | None = None) -> None:
        """Write all states, step and seed to a file that is replaced at once: `checkpoint.safetensors`.

        `notes` are texts that `load` returns.

        Raises UsageError or ExecutionError if it cannot be written; an older file is then as it was.
        """
        checkpoint = Checkpoint(self._read_states(), self.step_count, self.seed, notes or {})
        write_checkpoint(Path(path), checkpoint, self.bundle.manifest.model)

    def load(self, path: str | Path) -> Mapping[str, str]:
        """Continue from a checkpoint: the next steps are those that would have followed it, bit for bit.

        Returns the notes of `save`. Raises InputError for a checkpoint of another model, naming the first tensor that
        differs, and for a damaged one; nothing has changed then.
        """
        checkpoint = read_checkpoint(Path(path), self._specs)
        self._replace_states(checkpoint.states, checkpoint.step)
        self.seed = checkpoint.seed
        return checkpoint.notes

    def load_into(self, module: Any) -> None:
        """Copy parameters and buffers into a torch module that has them by the same names.

        Raises UsageError, and copies nothing, if a name or shape differs.
        """
        from onnxplace_training.trained_models import copy_into_module

        states = self._read_states()
        names = [item.name for item in (*self._training.parameters, *self._training.buffers)]
        copy_into_module({name: states[name] for name in names}, module)

    def export(self, path: str | Path) -> None:
        """Write a model for inference: the forward part of the step up to what the module returns, with its parameters.

        Raises UsageError if the step does not say what that is, or computes something else than inference does.
        """
        from onnxplace_training.trained_models import write_inference_model

        write_inference_model(Path(path), self.bundle, self._training, self._read_states())

    # --- the end ---

    def close(self, timeout: float | None = None) -> None:
        """End all threads after a step in progress. May be called twice."""
        self._session.close(timeout)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(choose_closing_timeout(kind))

    def __reduce__(self) -> NoReturn:
        raise unpicklable_error("a Trainer")

    # --- parts of a step ---

    def _run(self, feeds: Mapping[str, Any], timeout: float | None) -> Result:
        """Return the result of a request."""
        if timeout is not None:
            return self._session.run_timed(feeds, timeout=timeout)
        self._future = self._session.submit(feeds)
        return self._future.result()

    def _accept(self, result: Result, number: int, rate: float | None) -> StepResult:
        """Return the result of a step; raises ExecutionError for a loss that is not finite."""
        loss = float(np.asarray(result.outputs[self._training.loss]).item())
        if not math.isfinite(loss) and self.on_nan == "stop":
            self._refuse_loss(loss, number)
        self._loaded = {}
        metrics = {name: to_number(result.outputs[name]) for name in self._training.metrics if name in result.outputs}
        known = {self._training.loss, *metrics}
        others = {name: value for name, value in result.outputs.items() if name not in known}
        self.last_result = StepResult(loss, metrics, number, rate, others, result.seconds)
        return self.last_result

    def _complete_interrupted(self, number: int, rate: float | None) -> None:
        """Wait for a step that was interrupted; if it has changed the states, its result counts."""
        if self.step_count < number or (self.last_result is not None and self.last_result.step == number):
            return
        self._loaded = {}
        if self._future is not None:
            with suppress(ExecutionError):  # a NaN loss, whose step is undone
                self._accept(self._future.result(), number, rate)

    def _describe_failure(self, problem: ExecutionError, number: int) -> ExecutionError:
        """Return the error of a failed step, with what has become of the states."""
        if self.is_protected:
            text = f"the states are those after step {number - 1}"
        elif self._has_loaded_all():
            text = "the states are those that were loaded"
        else:
            self._spoiled = f"step {number} failed"
            text = "its states are lost: load the last checkpoint"
        hint = f"{problem.hint}; {text}" if problem.hint else text
        return type(problem)(problem.code, problem.message, where=problem.where, hint=hint)

    def _refuse_loss(self, loss: float, number: int) -> NoReturn:
        """Raise the error for a loss that is not finite; protected states are those before its step."""
        text = "infinite" if math.isinf(loss) else "NaN"
        hint = "lower the learning rate, or clip gradients; on_nan='continue' trains on"
        if self.is_protected or self._has_loaded_all():
            if self.is_protected:
                self._session.restore_states()
            else:
                self._first_step -= 1  # the loaded states are fed once more
            message = f"the loss is {text} in step {number}; the states are those after step {number - 1}"
        else:
            self._spoiled = f"the loss was {text} in step {number}"
            message = f"the loss is {text} in step {number}, which has changed the states: load the last checkpoint"
        raise ExecutionError("L045", message, where=self.bundle.manifest.model, hint=hint)

    def _make_own_feeds(self, number: int, learning_rate: float | None) -> dict[str, Array]:
        """Return the inputs that the trainer feeds by itself."""
        feeds: dict[str, Array] = {}
        if learning_rate is not None:
            rate = check_rate(learning_rate)
            if "learning_rate" not in self._own_inputs:
                hint = "leave it out, or export the step with an input for it"
                raise UsageError("U005", "this step has no input for a learning rate", where="step", hint=hint)
            feeds |= _fill(self._own_inputs["learning_rate"], rate)
        for role, value in (("step", number), ("seed", self.seed)):
            if role in self._own_inputs:
                feeds |= _fill(self._own_inputs[role], value)
        return feeds

    def _check_feeds(self, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the feeds of a user; raises FeedError if they have what the trainer feeds."""
        if not isinstance(feeds, Mapping):
            message = f"expected a mapping from input names to arrays, got {type(feeds).__name__}"
            raise FeedError("U054", message, where="step")
        states = {spec.input for spec in self._specs.values()}
        for name in feeds:
            if name in states:
                hint = "set states by load_state_dict"
                raise FeedError("F001", f"{name!r} is a state, which the step keeps", where="step", hint=hint)
            if any(item.name == name for item in self._own_inputs.values()):
                hint = "leave it out; the learning rate is an argument of step and train"
                raise FeedError("F001", f"the trainer feeds {name!r} by itself", where="step", hint=hint)
        return feeds

    # --- states ---

    def _read_states(self) -> dict[str, Array]:
        """Return the current states by the names of users."""
        self._require_sound_states()
        stored = {} if self._has_loaded_all() else self._session.read_states()
        states = {**stored, **self._loaded}
        return {name: states[spec.input] for name, spec in self._specs.items() if spec.input in states}

    def _has_loaded_all(self) -> bool:
        """Return whether the next step begins with loaded states only."""
        return len(self._loaded) == len(self._specs)

    def _replace_states(self, states: Mapping[str, Array], step: int) -> None:
        """Let the next step begin with these states; all are there."""
        self._session.reset_state()
        self._loaded = {self._specs[name].input: array for name, array in states.items()}
        self._first_step = step - self._session.count_state_changes()
        self._spoiled, self.last_result = "", None

    def _require_sound_states(self) -> None:
        if self._spoiled:
            hint = "trainer.load(checkpoint), or open a new trainer"
            where = self.bundle.manifest.model
            raise ExecutionError("L047", f"{self._spoiled}: load a checkpoint", where=where, hint=hint)


def _fill(declared: Declared, number: float) -> dict[str, Array]:
    """Return the feed of an input of one number: a scalar, or a vector of one element."""
    shape = [size if isinstance(size, int) else 1 for size in declared.shape or ()]
    return {declared.name: np.full(shape, number, numpy_type(declared.dtype) or np.float32)}


# Checks of what users give to the trainer.


def require_training_step(bundle: Bundle) -> TrainingRecord:
    """Return the training step of a bundle; raises UsageError if it is none."""
    if bundle.manifest.training is None:
        hint = "compile the model of a training step, such as onnxplace_training.export_training_step writes"
        raise UsageError("L040", "this bundle is not one of a training step", where=str(bundle.path), hint=hint)
    return bundle.manifest.training


def check_seed(seed: int) -> int:
    """Return a seed; raises UsageError unless it is a whole number that int64 has, of 0 or more."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 1 << 63:
        raise UsageError("U005", f"expected a seed of 0 or more, below 2**63, got {seed!r}", where="Trainer")
    return int(seed)


def check_count(number: Any, what: str, where: str) -> int:
    """Return a number of steps or batches; raises UsageError unless it is a whole number of 0 or more."""
    array = np.asarray(number)
    if array.dtype.kind not in "iu" or array.size != 1 or not 0 <= int(array.item()) < 1 << 63:
        raise UsageError("U005", f"expected {what} of 0 or more, got {number!r}", where=where)
    return int(array.item())


def check_rate(rate: Any) -> float:
    """Return a learning rate; raises UsageError unless it is a finite number of 0 or more."""
    try:
        number = math.nan if isinstance(rate, (str, bytes)) else float(rate)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        message = f"expected a learning rate of 0 or more, got {rate!r}"
        raise UsageError("U005", message, where="learning_rate", hint="give a number such as 1e-3")
    return number


def to_number(value: Any) -> Any:
    """Return one number as a float, and any other array as it is."""
    array = np.asarray(value)
    return float(array.item()) if array.size == 1 else array


# Whether devices have memory for a second set of their states.


def has_room_for_copies(manifest: Manifest) -> bool:
    """Return whether every device can keep its old states while a step computes new ones, within its limit."""
    states: Counter[str] = Counter()
    for state in manifest.states:
        states[state.device] += manifest.values[state.input].bytes if state.input in manifest.values else 0
    needed = {item.id: item.peak_bytes + states[item.id] for item in manifest.devices}
    has_room = all(needed[item.id] <= item.limit_bytes for item in manifest.devices)
    pools = (sum(needed[name] for name in pool.devices) <= pool.memory_bytes for pool in manifest.target.pools)
    return has_room and all(pools)


# Learning rates over the steps of a run.

Schedule = Callable[[int], float]
"""From the number of a step, 1 for the first one, to its learning rate."""

ScheduleName = Literal["constant", "cosine", "linear"]


def make_schedule(name: ScheduleName, rate: float, steps: int, warmup: int = 0) -> Schedule:
    """Return a schedule: a linear rise over `warmup` steps, then constant, or a fall to zero after `steps`.

    >>> [make_schedule("linear", 1.0, 4)(step) for step in (1, 2, 3, 4)]
    [1.0, 0.75, 0.5, 0.25]
    >>> [make_schedule("constant", 1.0, 4, warmup=2)(step) for step in (1, 2, 3)]
    [0.5, 1.0, 1.0]
    """

    def compute_rate(step: int) -> float:
        if step <= warmup:
            return rate * step / warmup
        progress = min((step - 1 - warmup) / max(steps - warmup, 1), 1.0)
        if name == "cosine":
            return rate * 0.5 * (1 + math.cos(math.pi * progress))
        return rate * (1 - progress) if name == "linear" else rate

    return compute_rate
