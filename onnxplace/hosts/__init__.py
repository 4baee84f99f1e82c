"""Several hosts: what each has, and how long messages between them take."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.hosts.connection import (
        Connection as Connection,
        is_this_machine as is_this_machine,
    )
    from onnxplace.hosts.describe_host import list_versions as list_versions
    from onnxplace.hosts.host_lists import (
        HostSlots as HostSlots,
        parse_hosts as parse_hosts,
        parse_slots as parse_slots,
    )
    from onnxplace.hosts.mpi_launchers import INSTALL_HINT as INSTALL_HINT, find_launcher as find_launcher
    from onnxplace.hosts.rank_ends import find_mpi_cause as find_mpi_cause, find_rank_end as find_rank_end
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
        "connection": "Connection is_this_machine",
        "describe_host": "list_versions",
        "host_lists": "HostSlots parse_hosts parse_slots",
        "mpi_launchers": "INSTALL_HINT find_launcher",
        "rank_ends": "find_mpi_cause find_rank_end",
        "survey": "DEFAULT_SECONDS HostDescription HostLink HostSurvey survey_hosts",
    },
)
