"""Drawing tokens: pure functions of logits and of random numbers that belong to one sample."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch

from common.messages import Sampling


def sample_uniforms(seed: int, step: int, sample: int, count: int) -> npt.NDArray[np.float64]:
    """``count`` numbers in [0, 1), a function of (seed, step, sample) alone: Philox (Salmon et al. 2011)."""
    key = np.array([seed, (step << 32) | sample], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def sample_seed(seed: int, step: int, sample: int) -> int:
    """A seed of 63 bits for engines that draw their own random numbers, a function of (seed, step, sample) alone."""
    return int.from_bytes(blake2b(f"{seed}/{step}/{sample}".encode(), digest_size=8).digest(), "big") >> 1


def filter_logits(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Sets logits outside the top-k tokens and outside the top-p nucleus (Holtzman et al. 2019) to -inf.

    logits [R, V] float32, already divided by the temperature. The most likely token always stays. Ties at the k-th
    place are kept in the order of a stable sort.
    """
    if top_k == 0 and top_p >= 1.0:
        return logits
    ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if 0 < top_k < logits.shape[-1]:
        keep[:, top_k:] = False
    if top_p < 1.0:
        probabilities = torch.softmax(ordered.masked_fill(~keep, -torch.inf), dim=-1)
        before = probabilities.cumsum(-1) - probabilities
        keep &= before < top_p
        keep[:, 0] = True
    return torch.full_like(logits, -torch.inf).scatter(-1, order, ordered.masked_fill(~keep, -torch.inf))


def draw(logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Next token and its logprob for each row.

    logits [R, V] any float dtype; uniforms [R] float64 -> ids [R] int64, logprobs [R] float32 of the distribution that
    is sampled (after temperature, top-k and top-p). Greedy rows take the most likely token of that same distribution.
    The draw inverts the cumulative distribution in float64, so that one number decides one token.
    """
    logprobs = torch.log_softmax(
        filter_logits(logits.float() / sampling.temperature, sampling.top_k, sampling.top_p), dim=-1
    )
    if sampling.greedy:
        ids = logprobs.argmax(-1)
    else:
        cumulative = logprobs.double().exp().cumsum(-1)
        threshold = (uniforms * cumulative[:, -1]).unsqueeze(-1)
        ids = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
        ids = ids.clamp_(max=logits.shape[-1] - 1)
    return ids, logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
