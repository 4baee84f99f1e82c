from onnxplace.hosts.connection import (
    INSTALL_HINT as INSTALL_HINT,
    Connection as Connection,
    find_launcher as find_launcher,
    find_mpi_cause as find_mpi_cause,
    find_rank_end as find_rank_end,
    is_this_machine as is_this_machine,
)
from onnxplace.hosts.describe_host import (
    describe_error as describe_error,
    list_versions as list_versions,
    require_versions as require_versions,
)
from onnxplace.hosts.host_lists import (
    HostSlots as HostSlots,
    parse_hosts as parse_hosts,
    parse_slots as parse_slots,
)
from onnxplace.hosts.survey import (
    DEFAULT_SECONDS as DEFAULT_SECONDS,
    HostDescription as HostDescription,
    HostLink as HostLink,
    HostSurvey as HostSurvey,
    survey_hosts as survey_hosts,
)
