"""The watch thread while ranks join, and when a step takes too long after a request to end."""

import time
from unittest import mock

from training.runtime import watch
from training.runtime.processes import place
from training.runtime.stopping import Followed, Reason, StopRequest


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


def test_a_rank_that_is_late_tells_the_others_and_ends_alone_if_none_answers(monkeypatch):
    ended = []
    monkeypatch.setattr(watch, "end", lambda *told: ended.append(told))
    one = watch.Watch(StopRequest(4.0, followed=Followed.AT_BORDER), timeout_minutes=5.0)
    one.reporter = mock.Mock()
    one.request.ask(Reason.SIGTERM)
    one._follow()
    assert not one.reporter.say.called
    one.request.deadline = time.monotonic() - 1
    one._follow()
    late = "SIGTERM: the step was not finished within --grace_seconds 4, and "
    assert one.reporter.say.call_args.kwargs["trouble"].startswith(late) and not ended
    one.request.deadline -= 60
    one._follow()
    assert ended[0][0] == watch.STOPPED and ended[0][1].startswith(late)
