from onnxplace.calibration.calibrator import (
    DEFAULT_SECONDS as DEFAULT_SECONDS,
    TRANSFER_SIZES_BYTES as TRANSFER_SIZES_BYTES,
    Calibration as Calibration,
    LinkMeasurement as LinkMeasurement,
    calibrate as calibrate,
)
from onnxplace.calibration.link_fit import LinkFit as LinkFit, fit_link as fit_link
