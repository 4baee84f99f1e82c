"""The checks by name, in the order in which they run on their devices."""

from __future__ import annotations

from onnxplace.doctor.context import Check
from onnxplace.doctor.contract import check_contract
from onnxplace.doctor.copies import check_copies
from onnxplace.doctor.environment import check_compiler, check_environment, check_find, check_open
from onnxplace.doctor.faults import check_faults
from onnxplace.doctor.memory import check_memory
from onnxplace.doctor.operators import check_operators
from onnxplace.doctor.order import check_order
from onnxplace.doctor.speed import check_call, check_link, check_prediction
from onnxplace.doctor.states import check_states

# The first use on a machine compiles loops, on slow machines for minutes.
FIRST_USE_SECONDS = 300.0
# Profiling and calibration open many sessions.
SLOW_SECONDS = 180.0

MACHINE_CHECKS = (Check("environment", check_environment), Check("compiler", check_compiler, FIRST_USE_SECONDS))
KIND_CHECKS = (Check("find", check_find),)
OPEN_CHECKS = (Check("open", check_open),)
DEVICE_CHECKS = (
    Check("operators", check_operators),
    Check("contract", check_contract),
    Check("call", check_call),
)
PAIR_CHECKS = (
    Check("copies", check_copies),
    Check("contract", check_contract),
    Check("order", check_order),
    Check("states", check_states),
    Check("faults", check_faults),
    Check("memory", check_memory),
    Check("link", check_link, SLOW_SECONDS),
    Check("prediction", check_prediction, SLOW_SECONDS),
)
# Also on a single device if there is no other one.
LONE_CHECKS = tuple(check for check in PAIR_CHECKS if check.name not in ("contract", "memory", "link"))
CHECKS = {check.name: check for check in (*MACHINE_CHECKS, *KIND_CHECKS, *OPEN_CHECKS, *DEVICE_CHECKS, *PAIR_CHECKS)}
# Those that use the seconds of their context.
TIMED_CHECKS = ("call", "order", "link")
