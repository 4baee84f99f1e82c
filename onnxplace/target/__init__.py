"""Devices and links: what a placement is made for, and its text forms."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.target.target import (
        KINDS as KINDS,
        LINK_MODELS as LINK_MODELS,
        MAX_SECONDS as MAX_SECONDS,
        REQUEST_SECONDS as REQUEST_SECONDS,
        SEGMENT_OVERHEAD_SECONDS as SEGMENT_OVERHEAD_SECONDS,
        WAKING_SECONDS as WAKING_SECONDS,
        Device as Device,
        Link as Link,
        LinkModel as LinkModel,
        Shared as Shared,
        Target as Target,
        default_link as default_link,
        format_target as format_target,
        parse_bytes as parse_bytes,
        parse_device_ids as parse_device_ids,
        parse_memory as parse_memory,
        read_target as read_target,
        require_device_limit as require_device_limit,
    )

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "target": (
            "Device KINDS LINK_MODELS Link LinkModel MAX_SECONDS REQUEST_SECONDS SEGMENT_OVERHEAD_SECONDS Shared "
            "Target WAKING_SECONDS default_link format_target parse_bytes parse_device_ids parse_memory "
            "read_target require_device_limit"
        ),
    },
)
