"""No damaged checkpoint is used, and none ends in a trace."""

import shutil

import pytest

from scripts.harness.point_damages import DAMAGES, tried
from training.checkpoints.files import points_in


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_point_is_passed_over_and_refused_by_its_name(chain, tmp_path, name):
    older, newest = points_in(chain["ppo"])
    places = [tmp_path / "checkpoints" / point.name for point in (newest, older)]
    for point, place in zip((newest, older), places):
        shutil.copytree(point, place)
    DAMAGES[name](*places)
    assert not tried(tmp_path, *places).startswith("FAILED")


def test_points_that_nothing_happened_to_are_used(chain, tmp_path):
    older, newest = points_in(chain["ppo"])
    assert tried(chain["ppo"], newest, older) == f"FAILED: {newest.name} was used"
