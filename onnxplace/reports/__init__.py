"""Human-readable results: tables and summaries as text, and reports as HTML pages."""
