"""Devices and links: what a placement is made for, and its text forms."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.target.target import (
        APART_SECONDS as APART_SECONDS,
        KINDS as KINDS,
        LINK_MODELS as LINK_MODELS,
        MOST_SECONDS as MOST_SECONDS,
        REQUEST_SECONDS as REQUEST_SECONDS,
        WAKING_SECONDS as WAKING_SECONDS,
        Device as Device,
        Link as Link,
        LinkModel as LinkModel,
        Shared as Shared,
        Target as Target,
        default_link as default_link,
        parse_bytes as parse_bytes,
        parse_device_ids as parse_device_ids,
        parse_memory as parse_memory,
        read_target as read_target,
        require_few as require_few,
        target_text as target_text,
    )

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "target": (
            "APART_SECONDS Device KINDS LINK_MODELS Link LinkModel MOST_SECONDS REQUEST_SECONDS Shared Target "
            "WAKING_SECONDS default_link parse_bytes parse_device_ids parse_memory read_target require_few "
            "target_text"
        ),
    },
)
