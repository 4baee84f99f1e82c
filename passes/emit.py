"""Write the bundle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from onnxplace.bundle.staging import require_output_free, stage_output
from onnxplace.facts import Emitted, Original, Placement, Prediction, Profile, Schedule, Segments
from onnxplace.model.loading import require_unchanged
from onnxplace.model.model import Model
from onnxplace.passes.batching.batch_flow import find_batch_axes
from onnxplace.passes.cost_files.cost_file import format_costs
from onnxplace.passes.segments.segment_predictions import predict_bundle
from onnxplace.passes.segments.write_segments import write_bundle_files
from onnxplace.passes.sharding.space.known_shapes import infer_shapes_and_values
from onnxplace.state import Pass, State
from onnxplace.utils.files import disk_error, format_path


@dataclass(frozen=True)
class Emit(Pass):
    """Write segments, weights and manifest to a folder.

    The folder is hidden, next to `path`, and is renamed when it is complete. What the manifest states of times and
    memory is that of the pass `predict`, whether the pipeline has it or not.
    """

    name: ClassVar[str] = "emit"
    requires: ClassVar[tuple[type, ...]] = (Model, Profile, Placement, Schedule, Segments)
    provides: ClassVar[tuple[type, ...]] = (Emitted,)

    path: str = "bundle"
    """Where the bundle goes."""
    force: bool = False
    """Replace an existing bundle."""
    pipeline: str = ""
    """The text of the whole pipeline, for the record."""
    link_weights: bool = False
    """Refer to the model's own weights files, next to which `path` must be, instead of copying them."""

    def run(self, state: State) -> State:
        path = Path(self.path)
        require_output_free(path, self.force)
        linkable_folder = path.absolute().parent if self.link_weights else None
        original = Original.of(state)
        predicted = state if Prediction in state else state.with_facts(predict_bundle(state))
        costs, batching = format_costs(original.profile), find_batch_axes(original.model)
        needs_sizes = any(device.needs_static_shapes for device in state.target.devices)
        shapes, values = infer_shapes_and_values(state[Model]) if needs_sizes else ({}, {})
        with stage_output(path, self.force) as staging:
            try:
                notes = write_bundle_files(
                    predicted, staging.folder, self.pipeline, costs, linkable_folder, batching, shapes, values
                )
            except OSError as error:
                raise disk_error(error, format_path(path)) from None
            require_unchanged(state[Model])
            staging.place(staging.folder)
        return state.with_facts(Emitted(path)).with_notes(*notes)
