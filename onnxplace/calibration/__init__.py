"""Measure the devices and links of this machine."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.calibration.calibrator import (
        DEFAULT_SECONDS as DEFAULT_SECONDS,
        TRANSFER_SIZES_BYTES as TRANSFER_SIZES_BYTES,
        Calibration as Calibration,
        LinkMeasurement as LinkMeasurement,
        calibrate as calibrate,
    )

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "calibrator": "Calibration DEFAULT_SECONDS LinkMeasurement TRANSFER_SIZES_BYTES calibrate",
    },
)
