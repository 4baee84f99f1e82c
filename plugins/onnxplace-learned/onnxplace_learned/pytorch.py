"""PyTorch, which training needs, and placing with `hierarchical` or `go`."""

from __future__ import annotations

from typing import Any

from onnxplace.errors import UsageError


def require_torch() -> Any:
    """Return torch; raises UsageError with what to install if it is missing."""
    try:
        import torch
    except ImportError:
        hint = "pip install 'onnxplace-learned[learn]'"
        raise UsageError(
            "U110",
            "training policies, and placing with hierarchical or go, needs torch: it is not installed",
            hint=hint,
        ) from None
    return torch
