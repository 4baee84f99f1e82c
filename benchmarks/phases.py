"""Prompts and tokens on different devices, planned next to published figures: python benchmarks/phases.py.

A decoder of the size of Llama-3.2-1B with weights of 4 bits is planned with `--llm` on the machines of two
publications: by the peaks of the catalogue, and with rates that the publications' own figures of single devices give.
Its weights are holes of a file, so that nothing is downloaded. Nothing runs.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx
from machines import declared_weights, halve, place_weights
from onnx import TensorProto, helper

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))


from decoder import decoder
from onnxplace.driver.plan import Plan, PlannedStrategy, plan_model
from onnxplace.facts import Profile
from onnxplace.model.decoders import recognise_decoder
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.problem import predict_single_device_seconds
from onnxplace.state import State
from onnxplace.target.machines import parse_machine
from onnxplace.target.target import Device, Target

CASCADIA = "https://github.com/labscommunity/cascadia/pull/107"
LLAMA_CPP = "https://github.com/ggml-org/llama.cpp/pull/26235"
BLOCK, BITS = 32, 4


@dataclass(frozen=True)
class Rates:
    """What a device was measured to reach: seconds of a prompt and of a token."""

    prompt_seconds: float
    token_seconds: float


@dataclass(frozen=True)
class Case:
    """Devices of a machine, with requests as they were published."""

    title: str
    machine: str
    devices: tuple[str, ...]
    prompt: int
    tokens: int
    """Tokens that follow a prompt."""
    rates: Mapping[str, Rates] = field(default_factory=dict)
    """By device: replaces the peaks of the catalogue."""


def make_cases() -> list[Case]:
    """Return each machine by its peaks, then with rates as published.

    llama-bench gives tokens a second over a prompt of 512 and 128 tokens: three sums of four unknown times, of which
    the prompt on the processor is assumed to take 0.6 s. The ratios of the sums do not depend on that.
    """
    intel = ("Core Ultra 258V, NPU and processor", "AI-PC-NPU", ("openvino/npu:0", "cpu:0"), 435, 100)
    desktop = ("desktop with UHD 770", "Desktop-UHD-770", ("webgpu:0", "cpu:0"), 512, 128)
    total = 512 + 128
    both, processor, graphics, assumed = total / 306.6, total / 95.3, total / 130.6, 0.6
    token = (both - assumed) / 128
    measured_desktop = {
        "cpu:0": Rates(assumed, (processor - assumed) / 128),
        "webgpu:0": Rates(graphics - 128 * token, token),
    }
    # Tokenwise on the processor, a prompt of 435 took 22.923 s, which is the time of so many tokens. The NPU's own
    # tokens were not published there: an independent run on this processor had 2.07 a second.
    measured_intel = {
        "cpu:0": Rates(1.629, 22.923 / 435),
        "openvino/npu:0": Rates(0.687, 1 / 2.07),
    }
    everything = ("Core Ultra 258V, all three", "AI-PC-NPU", ("openvino/npu:0", "webgpu:0", "cpu:0"), 435, 100)
    return [
        Case(*intel),
        Case(*intel, rates=measured_intel),
        Case(*everything),
        Case(*desktop),
        Case(*desktop, rates=measured_desktop),
    ]


def write_decoder(folder: Path) -> Path:
    """Write the decoder, of float16 with weights of 4 bits; return its path."""
    with declared_weights():
        model = halve(decoder(layers=16, hidden=2048, heads=32, vocab=128256, positions=1024))
    weights = {item.name: item for item in model.graph.initializer if item.data_location == TensorProto.EXTERNAL}
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] in weights:
            _quantise(model, node, weights[node.input[1]])
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    place_weights(model, folder)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def _quantise(model: onnx.ModelProto, node: onnx.NodeProto, weight: TensorProto) -> None:
    """Let a product read a weight of 4 bits, with a scale for each block."""
    rows, columns = weight.dims
    node.op_type, node.domain = "MatMulNBits", "com.microsoft"
    for name, value in (("K", rows), ("N", columns), ("bits", BITS), ("block_size", BLOCK)):
        node.attribute.append(helper.make_attribute(name, value))
    blocks = rows // BLOCK
    scales = TensorProto(
        name=f"{weight.name}/scales",
        dims=[columns * blocks],
        data_type=TensorProto.FLOAT16,
        data_location=TensorProto.EXTERNAL,
    )
    node.input.append(scales.name)
    model.graph.initializer.append(scales)
    del weight.dims[:]
    weight.dims.extend([columns, blocks, BLOCK * BITS // 8])
    weight.data_type = TensorProto.UINT8


def make_target(path: Path, case: Case) -> Target:
    """Return the devices of a case, with rates that give the times that were measured.

    Operations are so fast that the prompt takes its time; each kernel takes so long that a token takes its own.
    """
    target = parse_machine(case.machine).to_target().choose_devices(case.devices)
    devices = [
        calibrate(path, case.prompt, device, case.rates[device.id]) if case.rates else device
        for device in target.devices
    ]
    return replace(target, devices=tuple(devices))


def calibrate(path: Path, prompt: int, device: Device, rates: Rates) -> Device:
    """Return a device with the rate of operations and the time of a kernel that explain two measured times."""
    model = load(path, may_lack_weights=True)
    decoder = recognise_decoder(model, (), {"past": prompt})
    token, whole = (
        Pipeline.parse("optimize").run(State(Target((device,))).with_facts(bind(decoder.model, sizes, {})))[0]
        for sizes in (decoder.complete({"past": prompt}), *decoder.list_prompt_sizes({"past": prompt}))
    )
    profile = Pipeline.parse("profile{estimate=true}")

    def predict(start: State, rate: float, kernel_seconds: float) -> tuple[float, int]:
        own = set_rates(device, rate, kernel_seconds)
        state, _ = profile.run(replace(start, target=Target((own,))))
        return float(predict_single_device_seconds(state)[0]), len(state[Profile].graph)

    low, high, kernel = 1e11, 1e14, 0.0
    for _ in range(16):
        rate = math.sqrt(low * high)
        seconds, nodes = predict(token, rate, 1e-9)
        kernel = max(rates.token_seconds - seconds, 0.0) / nodes + 1e-9
        is_slow = predict(whole, rate, kernel)[0] > rates.prompt_seconds
        low, high = (rate, high) if is_slow else (low, rate)
    return set_rates(device, high, kernel)


def set_rates(device: Device, rate: float, kernel_seconds: float) -> Device:
    """Return a device with one rate of operations for all types, and the least time of a kernel."""
    return replace(device, type_operations_per_second={}, operations_per_second=rate, kernel_seconds=kernel_seconds)


def plan_case(path: Path, case: Case) -> Plan:
    """Plan a prompt and a token for the devices of a case."""
    target = make_target(path, case)
    return plan_model(path, target=target, shape={"past": case.prompt}, llm=True, estimate=True, effort="low")


def answer_seconds(item: PlannedStrategy, tokens: int) -> float:
    """Return what a prompt takes, with so many tokens after it."""
    token, prompt = item.steps
    return prompt + item.move_seconds + tokens * token


def format_case(case: Case, plan: Plan) -> str:
    """Return the best set of plans for the answers of a case, the best pair of devices, and each device alone."""
    ranked = sorted(plan.sets, key=lambda item: answer_seconds(item, case.tokens))
    names = [set(item.plans) for item in ranked]
    best, alone = ranked[0], [item for item, used in zip(ranked, names) if len(used) == item.devices == 1]
    pairs = [item for item, used in zip(ranked, names) if len(used) == 2 and used <= set(case.devices)]
    basis, rows = "rates as published" if case.rates else "peaks", []
    for item in {item.name: item for item in (best, *pairs[:1], *alone)}.values():
        token, prompt = item.steps
        seconds = answer_seconds(item, case.tokens)
        cells = (
            *item.plans[::-1],
            f"{(prompt + item.move_seconds) * 1e3:,.0f} ms",
            f"{1 / token:.1f}",
            f"{item.move_seconds * 1e3:.2g} ms",
            f"{(item.peak_bytes or 0) / 1e9:.1f} GB",
            f"{seconds:.2f} s",
            f"{seconds / answer_seconds(best, case.tokens):.2f}",
        )
        rows.append(f"| {case.title} | {basis} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="Cases whose machine begins so.")
    only = parser.parse_args(arguments).only
    columns = ("prompt on", "tokens on", "first token", "tokens/s", "move", "memory", "an answer", "/ best")
    header = ("devices", "by", *columns)
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    with tempfile.TemporaryDirectory() as folder:
        path = write_decoder(Path(folder))
        for case in (case for case in make_cases() if case.machine.startswith(only)):
            print(format_case(case, plan_case(path, case)), flush=True)
    print(f"\nAn answer is a prompt and the tokens after it. Published: {CASCADIA}, {LLAMA_CPP}")


if __name__ == "__main__":
    main()
