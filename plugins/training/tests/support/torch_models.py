"""Small networks of PyTorch with what trains them; sizes are arguments, so that benchmarks can use larger ones.

Only tests in `plugins/training/tests/torch` may import it: it needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class TrainingCase:
    """A module, its loss, and a function that draws batches."""

    module: nn.Module
    loss: Callable[..., Any]
    draw: Callable[[int], Any]
    """Returns a batch of a given size, as `export_training_step` takes it."""
    batch: int = 8

    def example(self) -> Any:
        torch.manual_seed(1)
        return self.draw(self.batch)


OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


def mlp(width: int = 16, depth: int = 3, classes: int = 5, batch: int = 8) -> TrainingCase:
    """A multilayer perceptron that classifies."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    module = nn.Sequential(*layers, nn.Linear(width, classes))
    return TrainingCase(
        module, nn.CrossEntropyLoss(), lambda n: (torch.randn(n, width), torch.randint(classes, (n,))), batch
    )


class ConvolutionNetwork(nn.Module):
    """Convolutions of all kinds, batch normalisation, pooling, a residual block."""

    def __init__(self, width: int = 8, classes: int = 5, size: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)  # a bias would have no effect before a norm
        self.norm = nn.BatchNorm2d(width)
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.strided = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False)
        self.block_norm = nn.BatchNorm2d(2 * width)
        self.grouped = nn.Conv2d(2 * width, 2 * width, 3, padding=2, dilation=2, groups=2)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        value = functional.relu(self.norm(self.stem(image)), inplace=True)
        value = functional.relu(value + self.depthwise(value))
        value = functional.relu(self.block_norm(self.strided(value)))
        value = self.pool(functional.relu(value + self.grouped(value)))
        return self.head(value.mean((2, 3)))


def cnn(width: int = 8, size: int = 12, classes: int = 5, batch: int = 8) -> TrainingCase:
    """A convolutional network with batch normalisation, whose running statistics are states."""
    return TrainingCase(
        ConvolutionNetwork(width, classes, size),
        nn.CrossEntropyLoss(),
        lambda n: (torch.randn(n, 3, size, size), torch.randint(classes, (n,))),
        batch,
    )


class Block(nn.Module):
    """A block of a transformer: causal attention and a perceptron, each added to its input."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width, bias=False)  # a bias of keys has no effect
        self.projection = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = value.shape
        parts = self.attention(self.first_norm(value)).split(width, dim=2)
        query, key, content = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2) for part in parts
        )
        rate = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, content, dropout_p=rate, is_causal=self.causal)
        value = value + self.drop(self.projection(mixed.transpose(1, 2).reshape(batch, tokens, width)))
        hidden = functional.gelu(self.up(self.second_norm(value)), approximate="tanh")
        return value + self.drop(self.down(hidden))


class Gpt(nn.Module):
    """A small language model; the head has the weights of the embedding."""

    def __init__(self, vocabulary: int, tokens: int, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.layers = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        value = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for layer in self.layers:
            value = layer(value)
        return self.head(self.norm(value))


def next_token_loss(module: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
    """The mean cross entropy of all tokens, and the share of right ones as metric."""
    logits = module(tokens)
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss, {"accuracy": (logits.argmax(-1) == labels).float().mean()}


def gpt(
    *,
    vocabulary: int = 17,
    tokens: int = 6,
    width: int = 16,
    layers: int = 2,
    heads: int = 2,
    dropout: float = 0.0,
    batch: int = 4,
) -> TrainingCase:
    """A small GPT: embedding, causal attention, layer normalisation, GELU, tied head."""

    def draw(size: int) -> dict[str, torch.Tensor]:
        text = torch.randint(vocabulary, (size, tokens + 1))
        return {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}

    return TrainingCase(Gpt(vocabulary, tokens, width, layers, heads, dropout), next_token_loss, draw, batch)


class TwoTower(nn.Module):
    """Two towers whose outputs of one pair shall be alike."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()

        def tower() -> nn.Sequential:
            return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))

        self.left, self.right = tower(), tower()
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        ends = functional.normalize(self.left(left), dim=-1), functional.normalize(self.right(right), dim=-1)
        return ends[0] @ ends[1].T * self.temperature.exp()


def contrastive_loss(module: nn.Module, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Each left is to be next to its right, among all of the batch."""
    similarity = module(left, right)
    target = torch.arange(similarity.shape[0])
    return (functional.cross_entropy(similarity, target) + functional.cross_entropy(similarity.T, target)) / 2


def two_tower(width: int = 16, depth: int = 2, batch: int = 8) -> TrainingCase:
    """Two independent towers with a contrastive loss over the batch."""
    return TrainingCase(
        TwoTower(width, depth),
        contrastive_loss,
        lambda n: {"left": torch.randn(n, width), "right": torch.randn(n, width)},
        batch,
    )


class Recurrent(nn.Module):
    """A recurrent network that classifies sequences."""

    def __init__(self, kind: type[nn.RNNBase], inputs: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.recurrent = kind(inputs, width, layers, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        states, _ = self.recurrent(sequence)
        return self.head(states[:, -1])


def lstm(
    kind: type[nn.RNNBase] = nn.LSTM,
    *,
    inputs: int = 6,
    width: int = 8,
    layers: int = 1,
    steps: int = 5,
    classes: int = 4,
    batch: int = 8,
) -> TrainingCase:
    """A recurrent network, unrolled over time."""
    return TrainingCase(
        Recurrent(kind, inputs, width, layers, classes),
        nn.CrossEntropyLoss(),
        lambda n: (torch.randn(n, steps, inputs), torch.randint(classes, (n,))),
        batch,
    )
