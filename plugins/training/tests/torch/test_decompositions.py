"""Our rules for taking operators apart compute what torch's kernels compute."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; .ci/training has it")

from onnxplace_training.torch.decompositions import RULES, aten, decompositions

WHOLE, DIVISORS = torch.arange(-7, 8), torch.tensor([-3, 2, 5]).repeat(5)
FRACTIONS = torch.tensor([-1e30, -3.5, -1.0, -1e-6, -0.0, 0.0, 1e-6, 0.5, 2.0, 40.0])
ROWS, COLUMNS = torch.tensor([[0, -1], [2, 2]]), torch.tensor([1, -2])


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def convolve(x, weight, stride=1, padding=0, dilation=1, transposed=False, output_padding=0, groups=1):
    """The arguments of `convolution_backward`."""
    rest = ([stride], [padding], [dilation], transposed, [output_padding], groups)
    gradient = aten.convolution(x, weight, None, *rest)
    return gradient + 1, x, weight, [weight.shape[0]], *rest, [True, True, True]


def average(x, *window):
    """The arguments of `avg_pool2d_backward` or `avg_pool3d_backward`."""
    pool = aten.avg_pool2d if len(window[0]) == 2 else aten.avg_pool3d
    return pool(x, *window) + 1, x, *window, None


IMAGES = draw(2, 4, 9, 8)
CUBES = [2, 2, 2], [1, 1, 1], [0, 0, 0]
NORM = (draw(4), draw(4), draw(4), draw(4).abs())
CASES = {
    "log1p": (aten.log1p.default, FRACTIONS.abs()),
    "log1p of whole numbers": (aten.log1p.default, WHOLE.abs()),
    "expm1": (aten.expm1.default, FRACTIONS),
    # Without negative zeros, whose quadrants ONNX cannot tell from those of zero.
    "atan2": (aten.atan2.default, FRACTIONS.view(-1, 1) + 0.0, FRACTIONS.clamp(-50, 50) + 0.0),
    "erfc": (aten.erfc.default, draw(9)),
    "log2": (aten.log2.default, draw(9).abs()),
    "log10": (aten.log10.default, draw(9).abs()),
    "rsqrt": (aten.rsqrt.default, draw(9).abs()),
    "trunc": (aten.trunc.default, FRACTIONS),
    **{f"power {n}": (aten.pow.Tensor_Scalar, draw(9).abs(), n) for n in (-1, -0.5, 0.5, 1, 2, 3)},
    "power of whole numbers": (aten.pow.Tensor_Scalar, WHOLE, 2.0),
    "quotients": (aten.div.Tensor_mode, draw(9, 1), draw(9), {"rounding_mode": "floor"}),
    "quotients to zero": (aten.div.Scalar_mode, draw(9), 0.3, {"rounding_mode": "trunc"}),
    "quotients of whole numbers": (aten.div.Tensor_mode, WHOLE, DIVISORS, {"rounding_mode": "floor"}),
    "remainder": (aten.remainder.Tensor, draw(9, 1), draw(9)),
    "unequal": (aten.ne.Tensor, WHOLE, DIVISORS),
    "sorted": (aten.sort.stable, draw(3, 9), {"stable": True, "dim": 0, "descending": True}),
    "largest": (aten.max.dim, draw(3, 9), 1),
    "smallest": (aten.min.dim, draw(3, 9), 0, True),
    "any": (aten.any.dim, WHOLE.view(3, 5) > 5, 1, True),
    "any of all": (aten.any.default, WHOLE == 9),
    "any of axes": (aten.any.dims, (IMAGES > 3).int(), [0, 2]),
    "variance": (aten.var_mean.correction, IMAGES, [1, 3], {"correction": 1, "keepdim": True}),
    "variance of all": (aten.var.correction, IMAGES, None, {"correction": 0}),
    "batch norm": (aten._native_batch_norm_legit_functional.default, IMAGES, *NORM, True, 0.1, 1e-5),
    "batch norm by statistics": (aten._native_batch_norm_legit_no_training.default, IMAGES, *NORM, 0.1, 1e-5),
    "group norm": (aten.native_group_norm.default, IMAGES, *NORM[:2], 2, 4, 72, 2, 1e-5),
    "convolution": (aten.convolution_backward.default, *convolve(IMAGES, draw(6, 4, 3, 2), stride=3, padding=1)),
    "dilated": (aten.convolution_backward.default, *convolve(IMAGES, draw(6, 2, 3, 2), 2, 2, dilation=2, groups=2)),
    "transposed": (aten.convolution_backward.default, *convolve(IMAGES, draw(4, 3, 3, 2), 2, 1, 1, True, 1, 2)),
    "tiles": (aten.avg_pool2d_backward.default, *average(IMAGES, [3, 2], [], [0, 0], False, True)),
    "windows": (aten.avg_pool2d_backward.default, *average(IMAGES, [3, 3], [2, 2], [1, 1], False, False)),
    "cut windows": (aten.avg_pool2d_backward.default, *average(IMAGES, [3, 2], [2, 3], [1, 0], True, True)),
    "in space": (aten.avg_pool3d_backward.default, *average(draw(2, 3, 5, 6, 7), *CUBES, True, True)),
    "adaptive": (aten._adaptive_avg_pool2d.default, IMAGES, [4, 3]),
    "adaptive, equal windows": (aten._adaptive_avg_pool2d.default, IMAGES, [3, 4]),
    "adaptive, backward": (aten._adaptive_avg_pool2d_backward.default, draw(2, 4, 4, 3), IMAGES),
    "slice": (aten.slice_scatter.default, IMAGES, draw(2, 4, 3, 8), 2, -4, -1),
    "slice with steps": (aten.slice_scatter.default, IMAGES, draw(2, 4, 3, 8), 2, 1, 7, 2),
    "whole slice": (aten.slice_scatter.default, IMAGES, IMAGES + 1, 1),
    "diagonal": (aten.diagonal.default, IMAGES, -2, 1, -1),
    "written diagonal": (aten.diagonal_scatter.default, IMAGES, draw(2, 4, 6), 2, 2, 3),
    "written diagonal below": (aten.diagonal_scatter.default, IMAGES, draw(4, 9, 1), -1, 0, 3),
    "windows along an axis": (aten.unfold.default, IMAGES, -2, 4, 2),
    "embedding": (aten.embedding_dense_backward.default, draw(2, 2, 5), ROWS.abs(), 3, 2, False),
    "picked": (aten.index.Tensor, IMAGES, [ROWS[0], None, ROWS]),
    "picked from neighbours": (aten.index.Tensor, IMAGES, [None, ROWS, COLUMNS]),
    "written": (aten.index_put.default, IMAGES, [None, ROWS[0], COLUMNS], draw(2, 1, 8)),
    "added": (aten.index_put.default, IMAGES, [None, ROWS, None, COLUMNS], draw(2, 2, 2, 9), True),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_rule_computes_what_torch_computes(name):
    operator, *arguments = CASES[name]
    options = arguments.pop() if isinstance(arguments[-1], dict) else {}
    results = [function(*arguments, **options) for function in (RULES[operator], operator)]
    torch.testing.assert_close(
        *(tuple(r) if isinstance(r, (list, tuple)) else r for r in results), rtol=1e-5, atol=1e-5
    )


def test_functions_are_exact_near_zero():
    small = torch.tensor([1e-7, -1e-7, 3e-5])
    for operator in (aten.log1p.default, aten.expm1.default):
        torch.testing.assert_close(RULES[operator](small), operator(small), rtol=1e-6, atol=0)


def test_every_rule_is_tested_and_replaces_that_of_torch():
    tested = {operator.overloadpacket for operator, *_ in CASES.values()}
    assert {operator.overloadpacket for operator in RULES} == tested
    assert all(decompositions()[operator] is rule for operator, rule in RULES.items())
