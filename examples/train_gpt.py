"""Train a small GPT on text that this example makes, on two CPU devices, next to torch.

    python examples/train_gpt.py --steps 300 --plot gpt.png

It exports the training step, compiles it, trains, resumes from a checkpoint, compares each loss with torch's, and lets
the trained module write.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

from _training import Task, count_parameters, read_options, train_and_compare

WIDTH, LAYERS, HEADS, TOKENS, BATCH = 64, 2, 4, 32, 16
SUBJECTS = ("the cat", "a fox", "the old robot", "my neighbour", "the moon")
VERBS = ("sees", "follows", "paints", "repairs", "likes")
OBJECTS = ("the garden", "a red door", "two small boats", "the river", "an empty house")


def make_text(sentences: int, seed: int = 0) -> str:
    """Return sentences of a small grammar."""
    draw = random.Random(seed)
    return " ".join(f"{draw.choice(SUBJECTS)} {draw.choice(VERBS)} {draw.choice(OBJECTS)}." for _ in range(sentences))


class Block(nn.Module):  # type: ignore[misc, unused-ignore]
    """Attention and a feed-forward network, each after a normalisation, added to their input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.forward_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value after this block, [batch, tokens, width]."""
        batch, tokens, _ = value.shape
        parts = self.queries(self.attention_norm(value)).reshape(batch, tokens, 3, HEADS, WIDTH // HEADS)
        query, key, content = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, content, is_causal=True)
        value = value + self.output(mixed.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return value + self.down(functional.gelu(self.up(self.forward_norm(value))))


class Gpt(nn.Module):  # type: ignore[misc, unused-ignore]
    """A language model of characters whose last layer shares the weights of its embedding."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(TOKENS, WIDTH)
        for embedding in (self.embedding, self.positions):
            nn.init.normal_(embedding.weight, std=0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next characters, [batch, tokens, vocabulary]."""
        value = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            value = block(value)
        return functional.linear(self.norm(value), self.embedding.weight)


def compute_loss(module: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the next characters."""
    scores = module(tokens)
    return functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), labels.reshape(-1))


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Return what trains the module."""
    return torch.optim.AdamW(module.parameters(), lr=3e-3)


def write_text(module: Gpt, characters: str, start: str, count: int) -> str:
    """Continue a text with the most likely characters."""
    text = start
    with torch.no_grad():
        for _ in range(count):
            tokens = torch.tensor([[characters.index(item) for item in text[-TOKENS:]]])
            text += characters[int(module(tokens)[0, -1].argmax())]
    return text


def main() -> None:
    """Train, compare, and write a sentence."""
    options = read_options("Train a small GPT on two devices, next to torch.", steps=120)
    text = make_text(2000)
    characters = "".join(sorted(set(text)))
    data = torch.tensor([characters.index(item) for item in text])
    torch.manual_seed(0)
    module = Gpt(len(characters))

    def draw(step: int) -> Mapping[str, torch.Tensor]:
        starts = torch.randint(len(data) - TOKENS - 1, (BATCH,), generator=torch.Generator().manual_seed(step))
        rows = torch.stack([data[start : start + TOKENS + 1] for start in starts.tolist()])
        return {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}

    print(f"{count_parameters(module)} parameters, {len(text)} characters of text")
    trained = train_and_compare(Task("GPT on made sentences", module, compute_loss, draw, make_optimizer), options)
    assert isinstance(trained, Gpt)
    print("it writes:", write_text(trained, characters, "the ", 60))


if __name__ == "__main__":
    main()
