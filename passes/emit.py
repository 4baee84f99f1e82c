"""Write the bundle."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

from onnxplace.bundle import BatchingRecord, require_output_free, stage_output
from onnxplace.errors import Diagnostic, format_count
from onnxplace.facts import Emitted, Placement, Profile, Recomputation, Schedule, Segments, Shards, Streaming
from onnxplace.model import Model, require_unchanged
from onnxplace.passes.batching import find_batch_axes
from onnxplace.passes.cost_files import format_costs
from onnxplace.passes.segments import KnownValues, write_bundle_files
from onnxplace.passes.sharding import infer_shapes_and_values
from onnxplace.state import Pass, State
from onnxplace.utils import disk_error, format_path


@dataclass(frozen=True)
class Emit(Pass):
    """Write segments, weights and manifest to a folder.

    The folder is hidden, next to `path`, and is renamed when it is complete.
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
        model, profile = _find_whole(state)
        costs, batching = format_costs(profile), BatchingRecord(**asdict(find_batch_axes(model)))
        with stage_output(path, self.force) as staging:
            try:
                written = write_bundle_files(
                    state, staging.folder, self.pipeline, costs, linkable_folder, batching, _list_sizes(state)
                )
            except OSError as error:
                raise disk_error(error, format_path(path)) from None
            require_unchanged(state[Model])
            staging.place(staging.folder)
        if written.copied:
            count = format_count(len(written.copied), "part")
            message = (
                f"{count} of weights were copied, such as {written.copied[0]!r}: they are not contiguous in the file"
            )
            state = state.with_notes(Diagnostic("N011", message, where=state[Model].name))
        if self.link_weights and not written.is_linked:
            message = "there is nothing to link to: the model has no weights file of its own"
            state = state.with_notes(Diagnostic("N011", message, where=state[Model].name))
        return state.with_facts(Emitted(path)).with_notes(*written.notes)


def _list_sizes(state: State) -> list[KnownValues]:
    """Return what follows from each of the compiled sizes, if a device needs static shapes."""
    if not any(device.needs_static_shapes for device in state.target.devices):
        return []
    model = state[Model]
    others = (replace(model, dimensions=sizes, samples={}) for sizes in model.other_sizes)
    return [KnownValues(*infer_shapes_and_values(item)) for item in (model, *others)]


def _find_whole(state: State) -> tuple[Model, Profile]:
    """Return model and costs as they were given: before weights streamed, nodes ran twice, or operators were split."""
    model, profile = state[Model], state[Streaming].whole_profile if Streaming in state else state[Profile]
    facts: list[Recomputation | Shards] = [state[Recomputation]] if Recomputation in state else []
    for fact in (*facts, *([state[Shards]] if Shards in state else [])):
        model, profile = fact.whole or model, fact.whole_profile or profile
    return model, profile
