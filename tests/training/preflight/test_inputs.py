"""What a node finds of what a run reads from elsewhere."""

from scripts.harness import free_port
from tests.reward_server import serving
from training.preflight.inputs import looked_at


def test_a_reward_server_can_be_connected_to(monkeypatch):
    with serving() as server:
        assert not looked_at("reward_url", server.url).problem
        monkeypatch.setenv("http_proxy", server.url)
        monkeypatch.delenv("no_proxy", raising=False)
        assert not looked_at("reward_url", "http://rewards.invalid/score").problem  # the proxy is there
    url = f"http://127.0.0.1:{free_port()}/score"
    assert "refused" in looked_at("reward_url", url).problem
