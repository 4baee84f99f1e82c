"""Human-readable results: tables and summaries as text, and reports as HTML pages."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
