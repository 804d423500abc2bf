"""What prompts and responses say, as text."""

import torch

from engine.experience import Rollout


def decoded(rollout: Rollout, tokenizer) -> tuple[list[str], list[str]]:
    """The prompts as they were given to the policy (a long one has lost its beginning) and the responses.

    Special tokens are left out, EOS and a chat template's among them. A stop string stands in the response it ended.
    """
    real = rollout.attention_mask[:, : rollout.prompt_length].bool()
    prompts, responses = [], []
    for row in range(len(rollout)):
        prompt, response = rollout.prompts[row][real[row]], rollout.responses[row][rollout.response_mask[row]]
        text = tokenizer.decode(prompt, skip_special_tokens=True)
        # Decoded behind its prompt, because many tokenizers drop the space that a text begins with.
        whole = tokenizer.decode(torch.cat([prompt, response]), skip_special_tokens=True)
        prompts.append(text)
        responses.append(
            whole[len(text) :] if whole.startswith(text) else tokenizer.decode(response, skip_special_tokens=True)
        )
    return prompts, responses
