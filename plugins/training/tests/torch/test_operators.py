"""Layers and functions of torch, with their gradients, at several batch sizes."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; .ci/training has it")

from torch import nn
from torch.nn import functional

from plugins.training.tests.support.torch_models import TrainingCase
from plugins.training.tests.support.torch_steps import compare_training

# Lazy layers warn that they may change; the sizes of their inputs are not what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules")
INDEX = torch.tensor([2, 0, 0])


def check(case):
    compare_training(case, "momentum", steps=3, sizes=(case.batch, case.batch + 3, 2)).check()


def image_case(*layers, size=10):
    module = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(4))
    module(torch.randn(2, 3, size, size))
    return TrainingCase(
        module, nn.CrossEntropyLoss(), lambda n: (torch.randn(n, 3, size, size), torch.randint(4, (n,))), 4
    )


def function_case(function, shape=(6, 8)):
    """A linear layer, and a function of its result."""
    module = Composed(function, nn.Linear(shape[-1], shape[-1]))
    result = module(torch.randn(4, *shape))
    return TrainingCase(module, nn.MSELoss(), lambda n: (torch.randn(n, *shape), torch.randn(n, *result.shape[1:])), 4)


class Composed(nn.Module):
    def __init__(self, function, *parts):
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, *values):
        return self.function(*(part(value) for part, value in zip(self.parts, values)))


IMAGE_LAYERS = {
    "depthwise": lambda: [nn.Conv2d(3, 6, 3, groups=3)],
    "strided": lambda: [nn.Conv2d(3, 6, 3, stride=2), nn.ReLU(), nn.Conv2d(6, 4, 2, stride=3, padding=1)],
    "dilated": lambda: [nn.Conv2d(3, 6, 3, dilation=2, padding=1), nn.Tanh(), nn.Conv2d(6, 4, 3, stride=2, dilation=2)],
    "same padding": lambda: [nn.Conv2d(3, 6, 5, padding="same")],
    "reflected": lambda: [nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3, padding=1, padding_mode="reflect")],
    "circular": lambda: [nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3, padding=1, padding_mode="circular")],
    "grouped": lambda: [nn.Conv2d(3, 6, 3), nn.Conv2d(6, 9, (2, 3), groups=3, stride=(1, 2), padding=(0, 1))],
    "transposed": lambda: [nn.ConvTranspose2d(3, 6, 3, 2, 1, output_padding=1), nn.ConvTranspose2d(6, 4, 3)],
    "transposed, grouped": lambda: [nn.ConvTranspose2d(3, 6, 3, groups=3, dilation=2)],
    "average pooling": lambda: [nn.Conv2d(3, 6, 3), nn.AvgPool2d(2)],
    "padded average pooling": lambda: [nn.Conv2d(3, 6, 3), nn.AvgPool2d(3, 2, 1)],
    "average pooling without padding": lambda: [nn.Conv2d(3, 6, 3), nn.AvgPool2d(3, 2, 1, count_include_pad=False)],
    "average pooling, ceil": lambda: [nn.Conv2d(3, 6, 3), nn.AvgPool2d(3, 2, ceil_mode=True)],
    "overlapping max pooling": lambda: [nn.Conv2d(3, 6, 3), nn.MaxPool2d(3, 2, 1)],
    "max pooling, ceil": lambda: [nn.Conv2d(3, 6, 3), nn.MaxPool2d(3, 2, ceil_mode=True)],
    "global pooling": lambda: [nn.Conv2d(3, 6, 3), nn.AdaptiveAvgPool2d(1)],
    "adaptive pooling": lambda: [nn.Conv2d(3, 6, 3), nn.AdaptiveAvgPool2d((4, 3))],
    "group norm": lambda: [nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.ReLU()],
    "instance norm": lambda: [nn.Conv2d(3, 6, 3), nn.InstanceNorm2d(6, affine=True), nn.ReLU()],
    "nearest": lambda: [nn.Conv2d(3, 6, 3), nn.Upsample(scale_factor=2)],
    "bilinear": lambda: [nn.Conv2d(3, 6, 3), nn.Upsample(size=(11, 9), mode="bilinear", align_corners=True)],
    "pixel shuffle": lambda: [nn.Conv2d(3, 8, 3), nn.PixelShuffle(2)],
}  # fmt: skip


@pytest.mark.parametrize("name", IMAGE_LAYERS)
def test_image_layers(name):
    check(image_case(*IMAGE_LAYERS[name]()))


ACTIVATIONS = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.PReLU,
    nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.GLU,
)  # fmt: skip


def test_activations():
    parts = [nn.Sequential(nn.Linear(8, 8), kind()) for kind in ACTIVATIONS]
    parts += [nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)), nn.Sequential(nn.Linear(8, 8), nn.LogSoftmax(-1))]
    module = Composed(lambda *values: torch.cat(values, -1), *parts)
    size = module(*[torch.randn(1, 8)] * len(parts)).shape[-1]
    case = TrainingCase(
        module,
        lambda net, x, y: functional.mse_loss(net(*[x] * len(parts)), y),
        lambda n: {"x": torch.randn(n, 8), "y": torch.randn(n, size)},
        4,
    )
    check(case)


FUNCTIONS = {
    "rows before the batch": lambda x: x.permute(1, 2, 0)[torch.tensor([0, 2, 2, 5])].permute(2, 0, 1),
    "pieces": lambda x: torch.cat([part * index for index, part in enumerate(x.chunk(3, 1))], 2),
    "repeated indices": lambda x: x[:, INDEX] + x[:, INDEX, torch.tensor([1, 3, -1])][..., None],
    "slices with steps": lambda x: x[:, 1:5:2, ::3] * x[:, -3:-1, 2:5],
    "flip and roll": lambda x: x.flip(1) * x.roll(2, 1),
    "orders": lambda x: x.sort(-1)[0] + x.topk(1, -1)[0] + x.max(1, keepdim=True)[0] + x.amin((1, 2), keepdim=True),
    "statistics": lambda x: x.std(1, keepdim=True) + x.norm(dim=-1, keepdim=True) + x.logsumexp(-1, keepdim=True) + x,
    "sums": lambda x: x.cumsum(1) - x.mean(0) + x / (x.var((0, 1)) + 1),
    "windows": lambda x: x.unfold(1, 3, 1).sum(-1),
    "diagonals": lambda x: x.tril() + x.diagonal(0, 1, 2)[..., None],
    "padding": lambda x: functional.pad(x, (1, 2, 0, 1), value=1.0).repeat(1, 2, 1),
    "products": lambda x: torch.einsum("bij,bkj->bik", x, x) @ x.repeat_interleave(2, -1),
    "gathered": lambda x: x.gather(1, torch.ones(x.shape[0], 2, 8, dtype=torch.int64)),
    "chosen": lambda x: torch.where(x > 0, x, x.sin()) + x.clamp(-0.5, 0.5) + x.masked_fill(x > 0.3, 0.0),
    "exact near zero": lambda x: x.expm1() + x.abs().log1p() + (x.abs() + 1).log2() + torch.atan2(x, x.exp()),
    "powers": lambda x: x.abs().add(1).pow(1.5) + 2**x + x**3 + (x.abs() + 1).rsqrt() + x.erf(),
    "extremes": lambda x: torch.maximum(x, x.flip(1)) + torch.minimum(x, x * 2) + torch.stack([x, x.exp()], 1).sum(1),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    check(function_case(FUNCTIONS[name]))


def change_in_place(value):
    copy = value.clone()
    copy[:, 1:3].zero_()
    copy[:, 4] = value[:, 0] * 3
    return copy.mul_(2).add_(1)


def test_changes_in_place():
    check(function_case(change_in_place))


LOSSES = {
    "bce with logits": (nn.BCEWithLogitsLoss(), lambda n: torch.rand(n, 6)),
    "huber": (nn.HuberLoss(), lambda n: torch.randn(n, 6)),
    "l1": (nn.L1Loss(), lambda n: torch.randn(n, 6)),
    "smoothed labels": (nn.CrossEntropyLoss(label_smoothing=0.1), lambda n: torch.randint(6, (n,))),
    "weighted classes": (nn.CrossEntropyLoss(weight=torch.arange(1.0, 7.0)), lambda n: torch.randint(6, (n,))),
    "ignored labels": (nn.CrossEntropyLoss(ignore_index=0), lambda n: torch.arange(1, n + 1) % 3),
    "probabilities": (nn.CrossEntropyLoss(), lambda n: torch.rand(n, 6).softmax(-1)),
    "sums": (nn.MSELoss(reduction="sum"), lambda n: torch.randn(n, 6)),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    loss, target = LOSSES[name]
    check(TrainingCase(nn.Linear(5, 6), loss, lambda n: (torch.randn(n, 5), target(n)), 4))


SEQUENCES = {
    "attention": lambda: Sequence(nn.MultiheadAttention(8, 2, batch_first=True, bias=False), 3),
    "encoder": lambda: Sequence(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 1),
    "gru": lambda: Sequence(nn.GRU(8, 8, batch_first=True), 1),
    "recurrent": lambda: Sequence(nn.RNN(8, 8, batch_first=True), 1),
    "two lstms in both directions": lambda: Sequence(nn.LSTM(8, 4, 2, bidirectional=True, batch_first=True), 1),
    "rms norm": lambda: Sequence(nn.RMSNorm(8), 1),
    "plain layer norm": lambda: Sequence(nn.LayerNorm((5, 8), elementwise_affine=False), 1),
    "batch norm without statistics": lambda: Sequence(nn.BatchNorm1d(5, track_running_stats=False), 1),
    "batch norm in evaluation": lambda: Sequence(nn.BatchNorm1d(5).eval(), 1),
    "convolution": lambda: Sequence(nn.Sequential(nn.Conv1d(5, 5, 3, padding=1), nn.MaxPool1d(2), nn.Upsample(8)), 1),
}  # fmt: skip


class Sequence(nn.Module):
    """A layer between two linear ones."""

    def __init__(self, layer, count):
        super().__init__()
        self.before, self.layer, self.after, self.count = nn.Linear(8, 8), layer, nn.Linear(8, 8), count

    def forward(self, value):
        result = self.layer(*[self.before(value)] * self.count)
        return self.after(result[0] if isinstance(result, tuple) else result)


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequence_layers(name):
    case = TrainingCase(SEQUENCES[name](), nn.MSELoss(), lambda n: (torch.randn(n, 5, 8), torch.randn(n, 5, 8)), 4)
    check(case)


def test_embeddings_with_padding_and_masks():
    def forward(module, tokens, mask, target):
        value = module(tokens)
        mixed = functional.scaled_dot_product_attention(value, value, value, attn_mask=mask[:, None])
        return functional.mse_loss(mixed, target)

    def draw(n):
        # Some rows are masked completely: torch gives zeros there.
        mask = torch.rand(n, 7) > 0.3
        mask[0] = False
        return {"tokens": torch.randint(9, (n, 7)), "mask": mask, "target": torch.randn(n, 7, 6)}

    check(TrainingCase(nn.Embedding(9, 6, padding_idx=2), forward, draw, 4))


def test_three_dimensional_convolution():
    module = nn.Sequential(nn.Conv3d(2, 4, 3), nn.MaxPool3d(2), nn.Flatten(), nn.Linear(32, 4))
    draw = lambda n: (torch.randn(n, 2, 6, 6, 6), torch.randint(4, (n,)))  # noqa: E731
    check(TrainingCase(module, nn.CrossEntropyLoss(), draw, 4))
