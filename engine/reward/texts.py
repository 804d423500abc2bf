"""What prompts and responses say, as text."""

from functools import partial

import torch

from engine.experience import Rollout


def decoded(rollout: Rollout, tokenizer, special_tokens: bool = False) -> tuple[list[str], list[str]]:
    """The prompts as they were given to the policy (a long one has lost its beginning) and the responses.

    Special tokens are left out, EOS and a chat template's among them, unless they are asked for; padding always is. A
    stop string stands in the response it ended.
    """
    decode = partial(tokenizer.decode, skip_special_tokens=not special_tokens)
    real = rollout.attention_mask[:, : rollout.prompt_length].bool()
    prompts, responses = [], []
    for row in range(len(rollout)):
        prompt, response = rollout.prompts[row][real[row]], rollout.responses[row][rollout.response_mask[row]]
        text = decode(prompt)
        # Decoded behind its prompt, because many tokenizers drop the space that a text begins with.
        whole = decode(torch.cat([prompt, response]))
        prompts.append(text)
        responses.append(whole[len(text) :] if whole.startswith(text) else decode(response))
    return prompts, responses
