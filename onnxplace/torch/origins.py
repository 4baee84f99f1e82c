"""Where a node comes from: the phase of the step, the module, the parameter."""

from __future__ import annotations

from dataclasses import dataclass

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


@dataclass(frozen=True)
class Origin:
    """The phase, module and parameter of a node, as its metadata says.

    >>> Origin(BACKWARD, "layers.0").prefix
    'layers.0/backward/'
    """

    phase: str = FORWARD
    """`forward`, `backward` or `update`."""
    module: str = ""
    """The path of the innermost module, as in `named_modules`; empty for the module itself and for the loss."""
    parameter: str = ""
    """The only parameter whose gradient or update the node computes."""
    micro_batch: str = ""
    """The number of the micro-batch with gradient accumulation; else empty."""

    @property
    def prefix(self) -> str:
        """The beginning of the names of nodes."""
        parts = [
            self.parameter if self.phase == UPDATE else self.module,
            f"micro_batch_{self.micro_batch}" if self.micro_batch else "",
            self.phase if self.phase != FORWARD else "",
        ]
        return "".join(f"{part}/" for part in parts if part)

    def describe(self) -> dict[str, str]:
        """Return the metadata of a node, without empty entries."""
        entries = {"phase": self.phase, "module": self.module, "parameter": self.parameter}
        return {f"onnxplace.{key}": text for key, text in entries.items() if text}
