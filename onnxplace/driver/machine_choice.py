"""Choose between machines: rows of their plans that meet goals, with the price of a million requests."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from onnxplace.driver.plan import Plan, PlannedStrategy
from onnxplace.errors import MAX_SHOWN, TargetError, UsageError, format_value
from onnxplace.target.machines import Machine, parse_machine
from onnxplace.target.target_file import read_toml
from onnxplace.utils.quantities import format_milliseconds

SECONDS_PER_HOUR, REQUESTS = 3600, 1_000_000


@dataclass(frozen=True)
class Goals:
    """What a machine has to reach."""

    latency_seconds: float = math.inf
    """The most that a request of any size may take."""
    rate: float = 0.0
    """Requests per second that have to be answered."""

    def are_met(self, item: PlannedStrategy) -> bool:
        """Return whether a strategy fits into memory and reaches all of it."""
        if item.step_seconds is None or item.interval_seconds is None:
            return False
        return item.step_seconds <= self.latency_seconds and item.interval_seconds * self.rate <= 1

    def describe(self) -> str:
        """Return them in a few words; empty if there are none."""
        latency = [format_milliseconds(self.latency_seconds)] if self.latency_seconds < math.inf else []
        return " and ".join([*latency, *([f"{self.rate:.4g} requests/s"] if self.rate else [])])


@dataclass(frozen=True)
class MachineRow:
    """A strategy on a machine, with its price."""

    machine: str
    strategy: PlannedStrategy
    price_per_hour: float | None = None
    """Of the machine, in the currency of the price file."""
    requests_price: float | None = None
    """Of a million requests: at the rate that is asked for, else as many as the machine can answer."""

    def rank(self) -> tuple[float, ...]:
        """Return what decides between rows, the best one first: the price per hour, then that of requests."""
        devices = len(parse_machine(self.machine).to_target().devices)
        numbers = self.price_per_hour, self.requests_price, self.strategy.step_seconds, devices
        # Digits that only tell errors of rounding do not decide.
        return tuple(math.inf if number is None else float(f"{number:.6g}") for number in numbers)


def list_machine_rows(plans: Mapping[str, Plan], goals: Goals, prices: Mapping[str, float] | None) -> list[MachineRow]:
    """Return the strategies of least latency and of most requests for each machine, of those that meet the goals.

    They are in the order of the machines; with prices, the cheapest machine comes first.

    Args:
        plans: By name of machine.
        goals: What a row has to meet.
        prices: Per hour, by name of machine; None if they are unknown.
    """
    rows = []
    for machine, plan in plans.items():
        meeting = [item for item in (plan.sets if plan.others else plan.strategies) if goals.are_met(item)]
        best = replace(plan, strategies=tuple(meeting)).find_best()
        for item in (item for item in meeting if item in best):
            price = prices[machine] if prices else None
            answered = goals.rate or 1 / (item.interval_seconds or math.inf)
            cost = None if price is None or not answered else price / SECONDS_PER_HOUR / answered * REQUESTS
            rows.append(MachineRow(machine, item, price, cost))
    return sorted(rows, key=MachineRow.rank) if prices else rows


def read_prices(path: str | Path, machines: Mapping[str, Machine]) -> dict[str, float]:
    """Read prices per hour (TOML, docs/machines.md#prices); return that of each machine.

    A price of a machine counts; else that of its device, times their number.

    Raises TargetError for a file that is wrong, or lacks a machine.
    """
    hint = 'write prices per hour below [per_hour], such as "8xH100-NVLink" = 20.0 or "H100-SXM" = 2.5'
    data, where = read_toml(path, "T015", hint), str(path)
    listed = data.get("per_hour")
    if not isinstance(listed, dict) or len(data) > 1:
        raise TargetError("T015", "expected one table [per_hour]", where=where, hint=hint)
    prices = {}
    for name, price in listed.items():
        if isinstance(price, bool) or not isinstance(price, (int, float)) or not 0 <= price < math.inf:
            message = f"expected a price of 0 or more for {format_value(name)}, got {format_value(price)}"
            raise TargetError("T015", message, where=where, hint=hint)
        if (machine_name := parse_machine(name, where).name) in prices:
            message = f"{format_value(name)} is one more price for {machine_name}"
            raise TargetError("T015", message, where=where, hint="name each machine and device once")
        prices[machine_name] = float(price)
    machine_prices = {}
    for name, machine in machines.items():
        device = prices.get(machine.device.name)
        price = prices.get(machine.name, None if device is None else device * machine.devices * machine.hosts)
        if price is None:
            names = dict.fromkeys((machine.name, machine.device.name))
            hint = "add {} below [per_hour]".format(" or ".join(f'"{item}"' for item in names))
            raise TargetError("T015", f"there is no price for {machine.name}", where=where, hint=hint)
        machine_prices[name] = price
    return machine_prices


def parse_goals(latency: str | None, rate: str | None) -> Goals:
    """Parse `20ms` and `500/s`; raises UsageError that names the option."""
    seconds = _parse_amount(latency, "--latency", "20ms", {"s": 1.0, "ms": 1e-3, "us": 1e-6})
    per_second = _parse_amount(rate, "--rate", "500/s", {"": 1.0, "/s": 1.0, "/min": 1 / 60, "/h": 1 / 3600})
    return Goals(math.inf if seconds is None else seconds, per_second or 0.0)


def _parse_amount(text: str | None, option: str, example: str, units: Mapping[str, float]) -> float | None:
    """Return a positive number with a unit, in the first unit; None for None."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z/]*)\s*", text[:MAX_SHOWN])
    amount = float(match[1]) * units[match[2]] if match and match[2] in units else 0.0
    if not 0 < amount < math.inf:
        message = f"expected a number above 0 with a unit of {', '.join(filter(None, units))}, got {format_value(text)}"
        raise UsageError("U005", message, where=option, hint=f"as in {option} {example}")
    return amount
