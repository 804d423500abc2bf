"""The watch thread while ranks join."""

import time

from training.runtime import watch
from training.runtime.processes import place
from training.runtime.stopping import StopRequest


def test_a_clock_that_is_set_does_not_end_the_time_to_join(monkeypatch):
    ended, late = [], time.time() + 1e6
    for name, value in (("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(watch, "end", lambda *told: ended.append(told))
    one = watch.Watch(StopRequest(1.0), timeout_minutes=5.0)
    monkeypatch.setattr(one._meeting_point, "failure", lambda: None)
    before = place.phase
    place.enter(watch.JOINING)
    try:
        monkeypatch.setattr(time, "time", lambda: late)
        one._look_for_the_absent()
        assert not ended
        monkeypatch.setattr(place, "entered", place.entered - 301)
        one._look_for_the_absent()
        assert len(ended) == 1
    finally:
        place.enter(before)
