"""Run bundles: trials, comparison with the whole model, observed devices and memory."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.evaluation.compare import (
        OutputDifference as OutputDifference,
        Times as Times,
        alternate as alternate,
        output_lineages as output_lineages,
        reference as reference,
        rounds_to_few_values as rounds_to_few_values,
        verify as verify,
    )
    from onnxplace.evaluation.device_usage import Observed as Observed, Traced as Traced, observe as observe
    from onnxplace.evaluation.memory_use import RUNS as RUNS, Process as Process, process_memory as process_memory
    from onnxplace.evaluation.step_inputs import Carrying as Carrying, Steps as Steps, steps_of as steps_of
    from onnxplace.evaluation.trial import (
        Trial as Trial,
        doubtful as doubtful,
        replace_manifest as replace_manifest,
        too_few_cores as too_few_cores,
        tried as tried,
        try_out as try_out,
        untried as untried,
    )

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "compare": "OutputDifference Times alternate output_lineages reference rounds_to_few_values verify",
        "device_usage": "Observed Traced observe",
        "memory_use": "Process RUNS process_memory",
        "step_inputs": "Carrying Steps steps_of",
        "trial": "Trial doubtful replace_manifest too_few_cores tried try_out untried",
    },
)
