"""The decoding loop: one forward pass over the prompts, then one a token with a key-value cache."""
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from engine.algo.sampling import keyed_uniforms, sample_tokens
from engine.experience import PromptBatch, Rollout, position_ids
from engine.rollout.base import SamplingConfig

CHECK_EVERY = 8  # tokens between two questions to the host whether all rows have ended


@torch.no_grad()
def decode(model: nn.Module, prompts: PromptBatch, sampling: SamplingConfig,
           find_stop: Callable[[list[int]], int | None], any_alive: Callable[[bool], bool]) -> Rollout:
    """Sample one response for each prompt.

    Args:
        model: a Hugging Face causal language model, with or without ZeRO's hooks.
        prompts: on the model's device.
        find_stop: the number of tokens up to and including the first stop string, or None.
        any_alive: told whether a row of this rank is still alive, answers whether to go on; where forward passes are
            collective it asks all ranks.

    Tokens drawn beyond a stop string before it was noticed are cut off; since each token's random number is its own,
    this changes nothing else.
    """
    rows, longest = len(prompts), sampling.max_new_tokens
    device = prompts.input_ids.device
    stops = torch.tensor(sampling.stop_token_ids, device=device)
    responses = torch.full((rows, longest), sampling.pad_token_id, device=device)
    lengths = torch.full((rows,), longest, device=device)
    alive = torch.ones(rows, dtype=torch.bool, device=device)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    mask, cache, inputs = prompts.attention_mask, None, prompts.input_ids
    for step in range(longest):
        named = {"input_ids": inputs, "attention_mask": mask, "past_key_values": cache, "use_cache": True,
                 "logits_to_keep": 1}
        if takes_positions:
            named["position_ids"] = position_ids(mask)[:, -inputs.shape[1]:]
        output = model(**named)
        cache = output.past_key_values
        uniforms = keyed_uniforms(sampling.seed, prompts.indices, prompts.samples, step)
        tokens = sample_tokens(output.logits[:, -1, :sampling.vocabulary_size], uniforms, sampling.temperature)
        responses[:, step] = torch.where(alive, tokens, sampling.pad_token_id)
        ending = alive & torch.isin(tokens, stops)
        lengths = torch.where(ending, step + 1, lengths)
        alive = alive & ~ending
        if (step + 1) % CHECK_EVERY == 0 or step + 1 == longest:
            if sampling.stop_strings:
                lengths, alive = _cut_at_strings(responses, lengths, alive, step + 1, find_stop)
            if not any_alive(bool(alive.any())):
                break
        inputs = tokens.unsqueeze(1)
        mask = torch.cat([mask, torch.ones_like(inputs)], dim=1)
    return _as_rollout(prompts, responses, lengths, ~alive, sampling.pad_token_id)


def _cut_at_strings(responses: Tensor, lengths: Tensor, alive: Tensor, drawn: int,
                    find_stop: Callable[[list[int]], int | None]) -> tuple[Tensor, Tensor]:
    """Lengths and living rows once rows that hold a stop string have ended with it."""
    lengths, alive = lengths.clone(), alive.clone()
    for row, tokens in enumerate(responses[:, :drawn].tolist()):
        end = find_stop(tokens[:min(int(lengths[row]), drawn)])
        if end is not None and end <= lengths[row]:
            lengths[row], alive[row] = end, False
    return lengths, alive


def _as_rollout(prompts: PromptBatch, responses: Tensor, lengths: Tensor, ended: Tensor, pad_token_id: int) -> Rollout:
    width = int(lengths.max())
    response_mask = torch.arange(width, device=lengths.device) < lengths.unsqueeze(1)
    responses = torch.where(response_mask, responses[:, :width], pad_token_id)
    return Rollout(torch.cat([prompts.input_ids, responses], 1),
                   torch.cat([prompts.attention_mask, response_mask.long()], 1),
                   response_mask, ended, prompts.indices, prompts.samples)


def stop_finder(tokenizer, strings: tuple[str, ...]) -> Callable[[list[int]], int | None]:
    """For `decode`: where the first of these strings is complete in a list of tokens."""
    def find(tokens: list[int]) -> int | None:
        def holds(count: int) -> bool:
            text = tokenizer.decode(tokens[:count])
            return any(string in text for string in strings)

        if not strings or not holds(len(tokens)):
            return None
        low, high = 1, len(tokens)  # the shortest prefix that holds one: once complete, a string stays in the text
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle + 1, high)
        return low

    return find
