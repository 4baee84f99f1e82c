"""Options of the command `export` that belong to single formats, by the argument of the format's function.

Only click is imported, since the help of `export` needs them.
"""

from pathlib import Path

import click

TRITON_OPTIONS = {
    "name": click.Option(
        ["--name"],
        default="",
        metavar="NAME",
        help="triton: the model that clients call; by default that of the bundle.",
    ),
    "layout": click.Option(
        ["--layout"],
        default="auto",
        metavar="auto|ensemble|python",
        show_default=True,
        help="triton: one model for each segment, or one that runs the bundle.",
    ),
    "max_batch": click.Option(
        ["--max-batch"], type=int, default=0, metavar="N", help="triton: join requests, up to N rows."
    ),
}
GENAI_OPTIONS = {
    "config": click.Option(
        ["--config"],
        type=click.Path(path_type=Path),
        metavar="F",
        help="ort-genai: genai_config.json of the whole model.",
    ),
}
