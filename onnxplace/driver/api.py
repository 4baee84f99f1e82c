"""The Python interface: compile a model, plan, report; `onnxplace/session/` runs what was compiled."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxplace.bundle.bundle import Bundle
from onnxplace.driver.compile import compile_model, compile_with
from onnxplace.driver.plan import plan_model
from onnxplace.driver.settings import CompileSettings
from onnxplace.driver.trials import Compiled
from onnxplace.reports.page_rendering import write_report
from onnxplace.utils.keywords import checks_arguments, takes_fields_of

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["Compiled", "compile", "compile_model", "plan", "report"]


@takes_fields_of(CompileSettings)
def compile(model: str | Path | ModelProto | Any, settings: CompileSettings) -> Bundle:  # noqa: A001
    """Compile a model for several devices; return the bundle.

    The model is an ONNX file or object, a folder with one, or with the extra `[torch]` a program of `torch.export`, its
    file (`.pt2`), or a torch module with `example_inputs` (docs/models.md). The bundle is written to `output`, by
    default the model's path with the ending `.bundle`. Options are those of `onnxplace compile`:

    - `devices`: "cuda:0,cuda:1" or a list, of this machine; or `target`: devices of any machine, or their file; or
      `machine`: "8xH100-NVLink", a name of docs/machines.md; `max_memory`: "16GiB", or "cuda:0=16GiB,cpu:0=64GiB", or
      with "host=32GiB" too, the host's memory for weights that stream.
    - `shape`: {"batch": 8}, sizes of symbolic dimensions; or several, [{"batch": 1}, ({"batch": 8}, 0.1)], each maybe
      with a weight, how often it is, for which the bundle gets at most `plans` plans (docs/sizes.md); {"batch": [1, 4]}
      is short for several; `fixed_sizes`: take these sizes alone, as NPUs like it; `inputs`: arrays by name, for
      measurements.
    - `placer`: may carry options, "auto{seconds=10}"; default: the one for the `objective` ("latency", "throughput",
      "fit", "worst-ratio"); `budget_seconds`: limit of its search; `seed`; `pipeline`: text of all passes, which
      replaces these.
    - `effort`: "low": estimates and little search; "default"; "high": the whole model is measured even where layers
      repeat, the search takes all of its time, and the trial more steps (docs/costs.md).
    - `device_map`: {"encoder.*": "cpu:0"} or a file, `colocate`: regular expressions, `strict`: fail if a device
      is idle.
    - `shard`: "auto", "off", or how many devices may share an operator; `shard_map`: {"layers.*": "columns"} or a
      file (docs/sharding.md); `shard_metadata`: write the layouts into the bundle's whole model too.
    - `recompute`: "auto", "off", "always", or a size: compute values again instead of keeping them, by default where
      nothing fits otherwise.
    - `stream`: "auto", "off", "always": weights come in time for the runs that read them, by default where no device
      holds the model; `pool`: "2GiB", the memory of each device for them (docs/streaming.md).
    - `providers`: further execution providers for the hardware of the devices, such as `["openvino"]`: the fastest runs
      each segment. With them, and with `max_error`, one session on all cores is considered, too.
    - `max_error`: 1e-3, the largest error of an output, relative to its largest magnitude; it bounds what less precise
      devices compute (docs/correctness.md).
    - `costs`: a cost file; `save_costs`: path of a new one; `cache`: whether earlier measurements may be used; `trial`:
      whether the bundle is run for a moment, so that predictions use measured segments (docs/costs.md).
    - `state`: outputs that are inputs of the next call, {"present.*": "past.*"} or texts "OUT=IN", each `*` standing
      for the same text on both sides.
    - `link_weights`: leave the weights in the model's own files; `output` must be in their folder or above it; `force`:
      replace the bundle at `output`.
    - `custom_op_libraries`: shared libraries with operators that ONNX Runtime does not have.
    - `observer`: called before each pass with its name, its position from 0 and the number of passes; also before
      the steps around them, each of which is one of one.

    Raises OnnxplaceError, and leaves no files then.

    >>> bundle = onnxplace.compile("model.onnx", devices="cpu:0,cpu:1")  # doctest: +SKIP
    """
    return compile_with(model, settings).bundle


plan = checks_arguments(plan_model, "plan")
report = checks_arguments(write_report, "report")
