from onnxplace.target.catalogue import Catalogue as Catalogue, read_catalogue as read_catalogue
from onnxplace.target.hosts import require_host_name as require_host_name, split_host as split_host
from onnxplace.target.limits import MAX_SECONDS as MAX_SECONDS, require_device_limit as require_device_limit
from onnxplace.target.machines import Machine as Machine, parse_machine as parse_machine
from onnxplace.target.parsing import (
    DeviceSpec as DeviceSpec,
    parse_bytes as parse_bytes,
    parse_device_spec as parse_device_spec,
    parse_devices as parse_devices,
    parse_memory as parse_memory,
)
from onnxplace.target.target import (
    DATA_TYPES as DATA_TYPES,
    LINK_MODELS as LINK_MODELS,
    PRECISIONS as PRECISIONS,
    SEGMENT_OVERHEAD_SECONDS as SEGMENT_OVERHEAD_SECONDS,
    Device as Device,
    Link as Link,
    LinkModel as LinkModel,
    Shared as Shared,
    Target as Target,
    default_link as default_link,
    request_overhead_seconds as request_overhead_seconds,
)
from onnxplace.target.target_file import (
    format_target as format_target,
    read_target as read_target,
    read_toml as read_toml,
)
