"""Options of single export formats."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class ExportOptions:
    """Options that only some formats have."""

    layout: str = "auto"
    """triton: `ensemble` (a model for each segment), `python` (one model that runs the bundle), or `auto`."""
    name: str = ""
    """triton: name of the model that clients call; by default that of the ONNX graph."""
    max_batch: int = 0
    """triton: the most rows of requests that one model joins; 0 joins none."""
    config: Path | None = None
    """ort-genai: the genai_config.json of the whole model, whose other fields are kept."""

    def list_given(self) -> list[str]:
        """Return the names of the options that differ from their defaults."""
        return [field.name for field in fields(self) if getattr(self, field.name) != field.default]
