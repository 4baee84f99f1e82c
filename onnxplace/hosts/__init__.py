"""Several hosts: what each has, and how long messages between them take."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.hosts.connection import Connection as Connection
    from onnxplace.hosts.host_lists import parse_hosts as parse_hosts
    from onnxplace.hosts.survey import (
        DEFAULT_SECONDS as DEFAULT_SECONDS,
        HostDescription as HostDescription,
        HostLink as HostLink,
        HostSurvey as HostSurvey,
        survey_hosts as survey_hosts,
    )

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "connection": "Connection",
        "host_lists": "parse_hosts",
        "survey": "DEFAULT_SECONDS HostDescription HostLink HostSurvey survey_hosts",
    },
)
