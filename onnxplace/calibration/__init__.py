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
    from onnxplace.calibration.link_fit import LinkFit as LinkFit, fit_link as fit_link

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "calibrator": "Calibration DEFAULT_SECONDS LinkMeasurement TRANSFER_SIZES_BYTES calibrate",
        "link_fit": "LinkFit fit_link",
    },
)
