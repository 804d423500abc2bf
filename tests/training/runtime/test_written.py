"""An output folder of a stranger's: its list of files, manifests and links reach nothing outside of it."""

import json

import pytest

from training.checkpoints.files import point_folder
from training.runtime import output_folder
from training.runtime.output_folder import POINTS, Written


def listed(folder, *files: str, **models: list[str]) -> None:
    """Put a list into the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "written.json").write_text(json.dumps({"files": files, "models": models}))


@pytest.fixture
def folder(tmp_path):
    """OUT/inner -> OTHER, with a file in each that is somebody's."""
    folder, other = tmp_path / "out", tmp_path / "other"
    for path in (folder / "samples", other / "step_000001"):
        path.mkdir(parents=True)
        (path / "manifest.json").write_text('{"files": {}}')
    (folder / "inner").symlink_to(other)
    (folder / "checkpoints").symlink_to(other)
    return folder


def test_nothing_is_removed_that_a_list_names_elsewhere(tmp_path):
    folder, theirs = tmp_path / "out", tmp_path / "theirs"
    theirs.write_text("theirs")
    names = [str(theirs), "../theirs", "../*", "samples/../../theirs"]
    listed(folder, *names, **{".": names, "..": ["theirs"], str(tmp_path): ["theirs"]})
    output_folder.remove_earlier(folder)
    output_folder.remove_other_models(folder, kept=[])
    assert theirs.is_file() and Written.read(folder) == Written(folder)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"files": 1, "models": {}}', '{"files": [], "models": {"": 5}}'])
def test_a_list_that_is_none_names_nothing(text, tmp_path):
    (tmp_path / "written.json").write_text(text)
    assert Written.read(tmp_path) == Written(tmp_path)


def test_nothing_is_removed_through_a_link(folder):
    listed(
        folder, "inner/step_000001/*", "inner/*", "samples/*", "", "**x", POINTS, inner=["step_000001/manifest.json"]
    )
    output_folder.remove_earlier(folder)
    output_folder.remove_other_models(folder, kept=[])
    assert not (folder / "samples").exists()
    assert (folder / "inner" / "step_000001" / "manifest.json").is_file()


def test_nothing_is_removed_that_a_manifest_names_elsewhere(folder):
    (folder / "checkpoints").unlink()
    point, theirs = point_folder(folder, 1), folder / "inner" / "step_000001" / "manifest.json"
    (point / "actor").mkdir(parents=True)
    (point / "actor" / "rank_00000.safetensors").write_text("ours")
    (point / "critic").symlink_to(theirs.parent)
    names = (
        str(theirs),
        "../../inner/step_000001/manifest.json",
        "critic/manifest.json",
        "actor/rank_00000.safetensors",
    )
    (point / "manifest.json").write_text(json.dumps({"files": dict.fromkeys(names)}))
    listed(folder, POINTS)
    output_folder.remove_earlier(folder)
    assert theirs.is_file()
    assert [path.name for path in point.iterdir()] == ["critic"]
