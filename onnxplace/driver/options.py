"""The options of `onnxplace.compile`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from onnxplace.driver.choose_target import require_one_target
from onnxplace.errors import UsageError, format_value
from onnxplace.feeds import Array
from onnxplace.model import StateRequest
from onnxplace.pipeline import Objective, Observer, Pipeline
from onnxplace.target import Target, parse_bytes

# No target has as many devices as more digits say.
_WAYS = re.compile(r"[0-9]{1,4}")


@dataclass(frozen=True)
class CompileSettings:
    """The arguments of `onnxplace.compile`, which documents them, behind the model."""

    output: str | Path | None = None
    _: KW_ONLY
    devices: str | Sequence[str] | None = None
    target: Target | str | Path | None = None
    max_memory: str | int | None = None
    shape: Mapping[str, int] | None = None
    inputs: Mapping[str, Array] | None = None
    state: StateRequest = ()
    costs: str | Path | None = None
    save_costs: str | Path | None = None
    cache: bool = True
    trial: bool = True
    placer: str | None = None
    objective: Objective = "latency"
    budget_seconds: float | None = None
    pipeline: str | Pipeline | None = None
    device_map: str | Path | Mapping[str, str | int] | None = None
    colocate: Sequence[str] = ()
    shard: str | int = "auto"
    shard_map: str | Path | Mapping[str, str] | None = None
    shard_metadata: bool = False
    recompute: str = "auto"
    seed: int = 0
    strict: bool = False
    force: bool = False
    link_weights: bool = False
    custom_op_libraries: Sequence[str | Path] = ()
    observer: Observer | None = None

    @property
    def device_map_text(self) -> str:
        """Return the device map as text: a path, JSON, or nothing."""
        if isinstance(self.device_map, Mapping):
            return json.dumps(dict(self.device_map))
        return str(self.device_map or "")

    @property
    def shard_map_text(self) -> str:
        """Return the shard map as text: a path, JSON, or nothing."""
        if isinstance(self.shard_map, Mapping):
            return json.dumps(dict(self.shard_map))
        return str(self.shard_map or "")

    @property
    def shard_ways(self) -> int | None:
        """Return the most devices that may share an operator: 1 for none, 0 for all, None to choose.

        Raises UsageError for other words and numbers.
        """
        text = str(self.shard)
        if text == "auto":
            return 0 if self.shard_map_text else None
        if text == "off":
            return 1
        if _WAYS.fullmatch(text) and int(text) > 0:
            return int(text)
        hint = "--shard 2 splits operators over two devices; auto splits them where that is faster"
        message = f"expected auto, off or a number of devices, got {format_value(text)}"
        raise UsageError("U073", message, where="--shard", hint=hint)

    @property
    def chooses_sharding(self) -> bool:
        """Return whether placing and sharding are compared: where the user left both open."""
        is_open = self.pipeline is None and self.placer is None and not self.device_map_text and not self.colocate
        return is_open and self.shard_ways is None and self.objective not in ("throughput", "step")

    @property
    def chooses_strategy(self) -> bool:
        """Return whether strategies for throughput are compared: where the user left open how to use the devices."""
        is_open = self.pipeline is None and self.placer is None and not self.device_map_text
        return is_open and self.shard_ways in (None, 1) and self.objective == "throughput"

    @property
    def chooses_step(self) -> bool:
        """Return whether strategies for a training step are compared: where the user left open how to use devices."""
        is_open = self.pipeline is None and self.placer is None and not self.device_map_text and not self.colocate
        return is_open and self.shard_ways is None and self.objective == "step"

    @property
    def sets_pass_options(self) -> bool:
        """Return whether options are given that a pipeline would hold itself."""
        files = self.costs or self.save_costs or self.device_map_text
        return bool(files or not self.cache or self.colocate or self.seed)

    def check(self) -> None:
        """Raise UsageError for options that exclude each other."""
        require_one_target(self.devices, self.target)
        if self.pipeline is not None and (
            self.placer or self.objective != "latency" or self.budget_seconds is not None
        ):
            message = "--pipeline excludes --placer, --objective and --budget"
            raise UsageError("U044", message, hint="name the placer in the pipeline, as in auto{seconds=10}")
        self._check_sharding()
        self._check_recomputation()

    def _check_recomputation(self) -> None:
        if self.recompute in ("auto", "off"):
            return
        hint = "auto: where nothing fits otherwise; always; or the memory that one device would have, such as 4GiB"
        if not isinstance(self.recompute, str):
            message = f"expected auto, off, always or a size, got {format_value(self.recompute)}"
            raise UsageError("L073", message, where="--recompute", hint=hint)
        if self.recompute != "always":
            try:
                parse_bytes(self.recompute)
            except UsageError:
                message = f"expected auto, off, always or a size, got {format_value(self.recompute)}"
                raise UsageError("L073", message, where="--recompute", hint=hint) from None
        if self.pipeline is not None:
            hint = "name the pass after profile: optimize,profile,recompute{limit=4GiB},coplace,..."
            raise UsageError("L074", "--pipeline excludes --recompute", where="--recompute", hint=hint)

    def _check_sharding(self) -> None:
        ways = self.shard_ways
        if self.shard_map_text and ways == 1:
            message = "--shard-map says how to split operators, and --shard off not to"
            raise UsageError("U074", message, where="--shard-map", hint="omit one of the two")
        if ways in (None, 1):
            return
        if self.pipeline is not None:
            hint = "name the pass after profile: optimize,profile,shard{ways=2},coplace,..."
            raise UsageError("U074", "--pipeline excludes --shard and --shard-map", hint=hint)
        if self.device_map_text or self.colocate:
            message = (
                "--shard and --shard-map exclude --device-map and --colocate: parts of operators have their devices"
            )
            raise UsageError("U074", message, hint="omit one of the two")
