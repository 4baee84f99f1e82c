"""Measure the devices and links of this machine."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.calibration.calibrator import (
        SECONDS as SECONDS,
        SIZES as SIZES,
        Calibration as Calibration,
        LinkMeasured as LinkMeasured,
        calibrate as calibrate,
    )

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "calibrator": "Calibration LinkMeasured SECONDS SIZES calibrate",
    },
)
