"""What a restart puts into each of the three optimizers."""

from types import SimpleNamespace

import pytest
import torch

from engine.optim import TensorFlowAdam
from engine.zero.shards import MOMENTS, moment_of, set_steps, settle, steps_of


def adams(parameter) -> dict[str, torch.optim.Optimizer]:
    return {
        "fused": torch.optim.AdamW([parameter], lr=0.1, fused=True),
        "plain": torch.optim.AdamW([parameter], lr=0.1, foreach=False),
        "tensorflow": TensorFlowAdam([parameter], lr=0.1),
    }


@pytest.mark.parametrize("form", ["fused", "plain", "tensorflow"])
def test_a_state_that_is_made_is_what_a_step_would_have_made(form):
    """Same names, dtypes and shapes; a step with a gradient of 0 leaves moments of 0, and counts."""
    stepped, fresh = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    one, other = adams(stepped)[form], adams(fresh)[form]
    stepped.grad = torch.zeros(3)
    one.step()
    assert steps_of(one, stepped) == 1 and steps_of(other, fresh) == 0
    assert moment_of(other, fresh, "exp_avg") is None and fresh not in other.state  # looking leaves no trace
    set_steps(other, fresh, 1)
    assert other.state[fresh].keys() == one.state[stepped].keys() == {"step", *MOMENTS}
    for name, value in one.state[stepped].items():
        made = other.state[fresh][name]
        assert torch.equal(made, value) and (made.dtype, made.device) == (value.dtype, value.device)
        assert not made.requires_grad
    set_steps(other, fresh, 7)
    assert steps_of(other, fresh) == 7
    set_steps(other, fresh, 0)
    assert steps_of(other, fresh) == 0 and fresh not in other.state
    settle(other, 7)  # nothing to do


def test_deepspeeds_cpu_adam_goes_through_the_steps_that_are_behind_it():
    """Its C++ multiplies the powers of beta up; what they are after 3 steps, in float32, another way would round."""
    parameter, powers = torch.zeros(4), {"step": 0, "first": torch.tensor(1.0), "second": torch.tensor(1.0)}

    def adam_update(opt_id, step, lr, first, second, eps, decay, bias_correction, weight, *_):
        assert (opt_id, lr, decay, bias_correction) == (5, 0.0, 0.0, True) and len(weight) == 1
        assert step == powers["step"] + 1
        powers.update(step=step, first=powers["first"] * first, second=powers["second"] * second)

    group = {"params": [parameter], "betas": (0.9, 0.95), "eps": 1e-8}
    update = SimpleNamespace(adam_update=adam_update)
    adam = SimpleNamespace(state={parameter: {}}, param_groups=[group], opt_id=5, ds_opt_adam=update)
    set_steps(adam, parameter, 3)
    assert adam.state[parameter]["step"] == 3 and type(adam.state[parameter]["step"]) is int
    settle(adam, 3)
    assert powers["step"] == 3
    assert powers["first"].item() == pytest.approx(0.729) and powers["second"].item() == pytest.approx(0.857375)
