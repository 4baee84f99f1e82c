from onnxplace.bundle.bundle import (
    COSTS_FILE as COSTS_FILE,
    MANIFEST_FILE as MANIFEST_FILE,
    SEGMENTS_FOLDER as SEGMENTS_FOLDER,
    WEIGHTS_FILE as WEIGHTS_FILE,
    WHOLE_MODEL_FILE as WHOLE_MODEL_FILE,
    Bundle as Bundle,
    Check as Check,
    describe_linked_file as describe_linked_file,
)
from onnxplace.bundle.bundle_simulation import (
    SimulatedRequest as SimulatedRequest,
    SimulatedTransfer as SimulatedTransfer,
    SubmittedRequest as SubmittedRequest,
    build_segment_graph as build_segment_graph,
    predict_interval_seconds as predict_interval_seconds,
    predict_serial_seconds as predict_serial_seconds,
    simulate_manifest as simulate_manifest,
    simulate_requests as simulate_requests,
)
from onnxplace.bundle.manifest import (
    SCHEMA_VERSION as SCHEMA_VERSION,
    BatchingRecord as BatchingRecord,
    DeviceRecord as DeviceRecord,
    DiagnosticRecord as DiagnosticRecord,
    FileRecord as FileRecord,
    InitialRecord as InitialRecord,
    InputRecord as InputRecord,
    Manifest as Manifest,
    OutputRecord as OutputRecord,
    Predicted as Predicted,
    RepeatRecord as RepeatRecord,
    RouteRecord as RouteRecord,
    SegmentRecord as SegmentRecord,
    ShardedKindRecord as ShardedKindRecord,
    ShardingRecord as ShardingRecord,
    SplitStateRecord as SplitStateRecord,
    StateRecord as StateRecord,
    Step as Step,
    TargetRecord as TargetRecord,
    TrainingNodesRecord as TrainingNodesRecord,
    TrainingRecord as TrainingRecord,
    TrialRecord as TrialRecord,
    ValueRecord as ValueRecord,
    json_schema as json_schema,
)
from onnxplace.bundle.routes import (
    find_route_of_device as find_route_of_device,
    list_route_devices as list_route_devices,
    list_routes as list_routes,
    list_working_devices as list_working_devices,
    move_to_route as move_to_route,
    sum_device_seconds as sum_device_seconds,
)
from onnxplace.bundle.slices import (
    extract_device_part as extract_device_part,
    list_crossing_values as list_crossing_values,
    record_crossing_values as record_crossing_values,
)
from onnxplace.bundle.split_states import SplitStates as SplitStates
from onnxplace.bundle.staging import (
    EXPORT_FILE as EXPORT_FILE,
    EXPORT_FORMAT as EXPORT_FORMAT,
    Staging as Staging,
    prepare_output as prepare_output,
    require_output_free as require_output_free,
    stage_output as stage_output,
)
