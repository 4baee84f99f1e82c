"""What commands print: the only place that writes to a terminal, except for live progress."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from onnxplace.errors import shorten


def print_text(text: str, err: bool = False) -> None:
    """Print lines for people; names in them can neither control a terminal nor fill it."""
    click.echo("\n".join(map(shorten, text.split("\n"))), err=err)


def print_json(data: Mapping[str, Any]) -> None:
    """Print a result as JSON on stdout; names in it are whole, in ASCII."""
    click.echo(json.dumps(data, indent=1, default=str))
