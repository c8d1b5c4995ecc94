"""What two models say of the same tokens: how surprised each is, how far apart they are, and whether they agree.

Everything starts from log-probabilities in fp32 or better. The rows are independent of each other, so a caller may show
as few at a time as its memory bears.
"""

from __future__ import annotations

import torch
from torch import Tensor

# T tokens that are predicted, V entries of the vocabulary.


def log_probabilities(logits_TV: Tensor) -> Tensor:
    """Log-softmax over the vocabulary, in float64 where the device has it, else in fp32."""
    # fp32 is off by 1e-6 in each row's normaliser, which is all that an 8-bit model may differ by.
    dtype = torch.float32 if logits_TV.device.type == "mps" else torch.float64
    return logits_TV.to(dtype).log_softmax(dim=-1)


def losses(log_q_TV: Tensor, targets_T: Tensor) -> Tensor:
    """How surprising each token was, in nats: `-log q(target)`, [T]."""
    return -log_q_TV.gather(1, targets_T[:, None])[:, 0]


def divergences(log_p_TV: Tensor, log_q_TV: Tensor) -> Tensor:
    """`KL(p || q)`, the sum over V of `p (log p - log q)`, of each token: [T]. What p rules out does not count."""
    p_TV = log_p_TV.exp()
    ruled_out_TV = p_TV == 0  # both may be -inf there, whose difference is no number
    return (log_p_TV - log_q_TV).mul_(p_TV).masked_fill_(ruled_out_TV, 0).sum(dim=-1)


def agreements(log_p_TV: Tensor, log_q_TV: Tensor) -> Tensor:
    """Whether both find the same token likeliest, bool [T]."""
    return log_p_TV.argmax(dim=-1) == log_q_TV.argmax(dim=-1)
