"""What every other part may need: files, leases, compiled loops, other processes, guarded callbacks."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.utils.callbacks import (
        Callbacks as Callbacks,
        call_guarded as call_guarded,
        start_thread as start_thread,
    )
    from onnxplace.utils.docstrings import field_docs as field_docs
    from onnxplace.utils.files import (
        cannot_write as cannot_write,
        disk_error as disk_error,
        is_full as is_full,
        open_input as open_input,
        parse_json as parse_json,
        path_text as path_text,
        read_bytes as read_bytes,
        read_json as read_json,
        read_text as read_text,
        require_name as require_name,
        require_place as require_place,
        write_file as write_file,
    )
    from onnxplace.utils.jit import clock as clock, kernel as kernel, on_compiling as on_compiling, part as part
    from onnxplace.utils.leases import (
        OCCUPIED as OCCUPIED,
        OLD as OLD,
        Lease as Lease,
        leased as leased,
        moved_aside as moved_aside,
        sweep as sweep,
        temporary_folder as temporary_folder,
    )
    from onnxplace.utils.name_patterns import match_names as match_names, star_fits as star_fits
    from onnxplace.utils.renames import exchange as exchange, rename_new as rename_new
    from onnxplace.utils.subprocesses import in_child as in_child

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "callbacks": "Callbacks call_guarded start_thread",
        "docstrings": "field_docs",
        "files": (
            "cannot_write disk_error is_full open_input parse_json path_text read_bytes read_json read_text "
            "require_name require_place write_file"
        ),
        "jit": "clock kernel on_compiling part",
        "leases": "Lease OCCUPIED OLD leased moved_aside sweep temporary_folder",
        "name_patterns": "match_names star_fits",
        "renames": "exchange rename_new",
        "subprocesses": "in_child",
    },
)
