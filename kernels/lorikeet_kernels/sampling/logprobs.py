"""Log-probabilities of given tokens and of the most likely ones.

    logprob[b] = log_softmax(logits[b])[token_ids[b]],   and the num_top largest entries of the same

Shapes: logits [B, V] any float dtype, token_ids [B] int64; results [B] float32, [B, num_top] int64, [B,
num_top] float32, most likely first. They are the model's own: temperature and cuts do not enter.
"""

import torch


def token_logprobs_reference(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `token_logprobs`."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    top_logprobs, top_ids = logprobs.topk(num_top, dim=-1)
    return chosen, top_ids, top_logprobs


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tokens' log-probabilities, and the top ids with theirs."""
    if not 0 <= num_top <= logits.shape[-1]:
        raise ValueError(f"token_logprobs: num_top {num_top} is not within the vocabulary {logits.shape[-1]}")
    return token_logprobs_reference(logits, token_ids, num_top)
