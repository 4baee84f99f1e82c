"""The command `onnxplace merge`."""

from __future__ import annotations

from pathlib import Path

import click

from onnxplace.cli.completers import BUNDLE_PATH
from onnxplace.cli.options import as_json, describe_note, print_json, print_notes, print_text, show_progress


@click.command(short_help="Put a bundle back together as one model.")
@click.argument("bundle", type=BUNDLE_PATH)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="F.onnx", required=True, help="The file of the model."
)
@click.option(
    "--external-data", is_flag=True, help="Write the weights to F.onnx.data, as is always done if they exceed 1 GiB."
)
@click.option("--force", is_flag=True, help="Replace the files if they exist.")
@as_json
def merge(bundle: Path, output: Path, *, external_data: bool, force: bool, json_: bool) -> None:
    """Put BUNDLE back together as one ONNX model.

    Where whole operators were placed, the model computes what the bundle computes bit for bit. Split operators stay
    split: it has a node for each part.
    """
    from onnxplace.export import describe_merged, merge_bundle

    with show_progress(json_, "writing the model"):
        merged = merge_bundle(bundle, output, external_data=external_data, force=force)
    print_notes(merged.diagnostics)
    if json_:
        print_json({**vars(merged), "diagnostics": [describe_note(note) for note in merged.diagnostics]})
    else:
        print_text(describe_merged(merged))
