"""Numbers as points on smooth curves, for encoders that are trained from scratch.

With random embeddings each number is a separate word: "count from 17 to 134" teaches nothing about 18 or 135, and ten
thousand prompts are far too few to show every pair. So the embeddings of numbers are set here and fixed: close numbers
have close embeddings, and the encoder can interpolate between numbers. Without fixed embeddings, a small encoder
memorises the training prompts instead of learning to count.
"""

import math

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from predictor.tokenizer import NUMBERS

SCALE = 0.085  # about four times BERT's initial weights: a number's value outweighs its place in the sentence
PERIOD_MAX, PERIOD_MIN = 2000.0, 8.0


def number_features(numbers: Tensor, width: int) -> Tensor:
    """(n,) numbers, 0 to 1000 -> (n, width), each in [-1, 1].

    Waves with geometric periods give the fine detail, steps over the numbers give sums and differences, steps over
    their logarithms give products and quotients. Ones mark a token as a number. Half of the features are zero, to leave
    room for the context.
    """
    used = width // 2
    v = numbers.to(torch.float32)
    angle = 2 * math.pi * v.unsqueeze(1) / torch.logspace(math.log10(PERIOD_MAX), math.log10(PERIOD_MIN), used // 5)
    features = torch.cat(
        [torch.sin(angle), torch.cos(angle), _steps(v, 1000, used // 4), _steps(v.log1p(), math.log(1001), used // 4)],
        dim=1,
    )
    ones = torch.ones(len(v), used - features.shape[1])
    return torch.cat([features, ones, torch.zeros(len(v), width - used)], dim=1)


def fix_number_embeddings(embeddings: nn.Embedding, tokenizer: Tokenizer) -> None:
    """Set the embeddings of the numbers to their features, and exclude these rows from training."""
    rows = torch.tensor([tokenizer.token_to_id(number) for number in NUMBERS])
    with torch.no_grad():
        embeddings.weight[rows] = SCALE * number_features(torch.arange(len(NUMBERS)), embeddings.embedding_dim)
    trainable = torch.ones(embeddings.num_embeddings, 1)
    trainable[rows] = 0
    embeddings.weight.register_hook(lambda gradient: gradient * trainable.to(gradient.device))


def _steps(x: Tensor, high: float, count: int) -> Tensor:
    """(n,) -> (n, count): smooth steps of x at `count` marks from 0 to `high`."""
    return torch.tanh((x.unsqueeze(1) - torch.linspace(0, high, count)) / (0.75 * high / (count - 1)))
