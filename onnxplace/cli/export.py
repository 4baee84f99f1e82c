"""The commands `onnxplace merge` and `onnxplace export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from onnxplace.cli.completion import BUNDLE_PATH, PATH, EntryChoice
from onnxplace.cli.help import list_added_options
from onnxplace.cli.shared_options import as_json, print_notes, print_result, show_progress


@click.command(short_help="Put a bundle back together as one model.")
@click.argument("bundle", type=BUNDLE_PATH)
@click.option("-o", "--output", type=PATH, metavar="F.onnx", required=True, help="The file of the model.")
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
    from onnxplace.export.merging import describe_merged, merge_bundle

    with show_progress(json_, "writing the model"):
        merged = merge_bundle(bundle, output, external_data=external_data, force=force)
    print_result(json_, vars(merged), describe_merged(merged))
    print_notes(merged.diagnostics)


class ExportCommand(click.Command):
    """A command whose options include those of all formats, which are looked for only when it is used."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, with the options of formats before `--json`."""
        own = super().get_params(ctx)
        end = next(index for index, item in enumerate(own) if item.name == "json_")
        return [*own[:end], *self.list_format_options().values(), *own[end:]]

    def list_format_options(self) -> dict[str, click.Option]:
        """Return the options of all formats, by the argument of the format."""
        groups = list_added_options(self, "export_options").values()
        return {name: option for group in groups for name, option in group.items()}


@click.command(cls=ExportCommand, short_help="Write a bundle in the format of another program.")
@click.argument("bundle", type=BUNDLE_PATH)
@click.option("--to", type=EntryChoice("export_formats"), required=True, help="The format (docs/export.md).")
@click.option("-o", "--output", type=PATH, metavar="DIR", required=True, help="A new folder.")
@click.option("--force", is_flag=True, help="Replace an earlier export in this folder.")
@as_json
def export(bundle: Path, *, to: str, output: Path, force: bool, json_: bool, **options: Any) -> None:
    """Write BUNDLE to a folder in the format of another program.

    \b
    stages         plain ONNX files, and a script that needs ONNX Runtime and numpy only
    triton         a model repository of Triton Inference Server
    ort-genai      stages of a decoder for ONNX Runtime GenAI
    ort-layers     one model for one session of ONNX Runtime, which assigns its nodes
    onnx-metadata  one model whose nodes name their devices, as ONNX describes them
    """  # noqa: D301 - \b tells click to keep the line breaks
    from onnxplace.export.exporting import export_bundle

    known = export.list_format_options()
    given = {name: options[str(option.name)] for name, option in known.items()}
    changed = {name: value for name, value in given.items() if value not in (None, known[name].default)}
    with show_progress(json_, "writing the files"):
        exported = export_bundle(bundle, to, output, force=force, options=changed)
    print_result(json_, vars(exported), f"{exported.path}: {', '.join(exported.files)}")
    print_notes(exported.diagnostics)
