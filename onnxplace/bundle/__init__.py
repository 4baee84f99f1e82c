"""Bundles: the manifest, the files, and how they are put in place and checked."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.bundle.bundle import (
        COSTS as COSTS,
        MANIFEST as MANIFEST,
        SEGMENTS as SEGMENTS,
        WEIGHTS as WEIGHTS,
        WHOLE as WHOLE,
        Bundle as Bundle,
        Check as Check,
        link_record as link_record,
    )
    from onnxplace.bundle.manifest import (
        SCHEMA_VERSION as SCHEMA_VERSION,
        DeviceRecord as DeviceRecord,
        DiagnosticRecord as DiagnosticRecord,
        FileRecord as FileRecord,
        InputRecord as InputRecord,
        Manifest as Manifest,
        OutputRecord as OutputRecord,
        Predicted as Predicted,
        RepeatRecord as RepeatRecord,
        SegmentRecord as SegmentRecord,
        StateRecord as StateRecord,
        Step as Step,
        TargetRecord as TargetRecord,
        TrialRecord as TrialRecord,
        ValueRecord as ValueRecord,
        json_schema as json_schema,
    )
    from onnxplace.bundle.simulate_bundle import simulate_manifest as simulate_manifest
    from onnxplace.bundle.slices import alone as alone, crossings as crossings, recording as recording
    from onnxplace.bundle.staging import (
        Staging as Staging,
        prepare as prepare,
        require_free as require_free,
        staged as staged,
    )

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "bundle": "Bundle COSTS Check MANIFEST SEGMENTS WEIGHTS WHOLE link_record",
        "manifest": (
            "DeviceRecord DiagnosticRecord FileRecord InputRecord Manifest OutputRecord Predicted RepeatRecord "
            "SCHEMA_VERSION SegmentRecord StateRecord Step TargetRecord TrialRecord ValueRecord json_schema"
        ),
        "simulate_bundle": "simulate_manifest",
        "slices": "alone crossings recording",
        "staging": "Staging prepare require_free staged",
    },
)
