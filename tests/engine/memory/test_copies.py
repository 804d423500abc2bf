"""What auto decides for made-up machines: which models have whole copies, which have one that ranks hold together."""

from dataclasses import replace

import pytest

from engine.memory.copies import Copies, CopyNeed, place_copies

GB = 10**9
ROLES = ("actor", "critic", "reference", "reward")
ACTOR, CRITIC, REFERENCE, REWARD = range(4)
ALL = (ACTOR, CRITIC, REFERENCE, REWARD)
CACHE, GRADIENTS = 2 * GB, GB  # keys and values; of actor and critic each: 4 GB that come later


def needs(large: int, small: int, groups: tuple[int, ...], stage: int = 3) -> list[CopyNeed]:
    """Actor and reference of `large` GB, critic and reward model of `small`, which groups of ranks may divide."""
    sizes = {role: large if role in ("actor", "reference") else small for role in ROLES}
    return [
        CopyNeed(
            role,
            stage,
            role in ("actor", "reference"),
            size * GB,
            GRADIENTS if role in ("actor", "critic") else 0,
            {ranks: size * GB // ranks for ranks in groups},
            None if groups else "no plan",
        )
        for role, size in sizes.items()
    ]


# By hand. Of the free memory 0.2 is for copies of each model's own with the 4 GB that come later, 0.4 for shared ones
# that stay while there is training of which nothing is known, 0.8 for those that do not.
MACHINES = {
    # 4 x 14 + 4 = 60 of 80 GB
    "two of 7B, much": (400, 14, 14, (2, 4, 8), Copies(ALL, "", shared=False)),
    # 60 of 20 are too much; 2 x 14 + 4 = 32 of 40
    "two of 7B, enough": (100, 14, 14, (2, 4, 8), Copies(ALL, "")),
    # 32 of 20 are too much; of 40; the actor's stays, 14 + 4 = 18
    "two of 7B, tight": (50, 14, 14, (2, 4, 8), Copies(ALL, "", freed=(CRITIC, REWARD))),
    # 32 of 32, but not 18 of 16
    "two of 7B, tighter": (40, 14, 14, (2, 4, 8), Copies(ALL, "", between_steps="free")),
    # of 89.6: 140 do not fit, 140 / 2 = 70 with 14 and 4 do, 88
    "70B and 7B on 141 GB": (112, 140, 14, (2, 4, 8), Copies((1, 3), "", True, "free", (0, 2), 2)),
    # of 48: 70 do not fit; 35 with 14 and 4 are 53, so the small ones are divided too: 35 + 3.5 + 4 = 42.5
    "70B and 7B on 80 GB": (60, 140, 14, (2, 4, 8), Copies((), "", True, "free", ALL, 4)),
    # of 16: 140 / 8 = 17.5 do not fit; 14 / 2 + 4 = 11 do, of which 8 would stay
    "70B and 7B on 40 GB": (20, 140, 14, (2, 4, 8), Copies((), "", True, "free", (1, 3), 2)),
    # of 48: 14 + 4 = 18, of which 24 may stay; 2 x 14 + 4 = 32 are more than 12
    "70B without a plan": (60, 140, 14, (), Copies((1, 3), "")),
    # of 4: nothing but what comes later
    "nothing free": (5, 140, 14, (2, 4, 8), Copies((), "", between_steps="free", ranks=1)),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_copies_are_whole_then_divided_then_none(machine):
    free, large, small, groups, expected = MACHINES[machine]
    found = place_copies(needs(large, small, groups), CACHE, free * GB, "keep")
    assert replace(found, why="") == expected


# By hand. What training takes, the 2 GB of keys and values, and what stays may have 0.9 of the free memory.
TRAININGS = {
    # 4 x 14 + 2 + 300 = 358 of 360 GB
    "of each model's own": (400, 300, Copies(ALL, "", shared=False)),
    # 361 are too much; 2 x 14 + 2 + 303 = 333
    "not of its own": (400, 303, Copies(ALL, "")),
    # 28 + 2 + 59 = 89 of 90
    "all": (100, 59, Copies(ALL, "")),
    # 91; 14 + 2 + 61 = 77
    "the actor's": (100, 61, Copies(ALL, "", freed=(CRITIC, REWARD))),
    # 14 + 2 + 75 = 91
    "none": (100, 75, Copies(ALL, "", between_steps="free")),
    # 28 + 4 are not in 0.8 of 36, 28.8, but 28 + 2 + 2 are in 0.9 of it, 32.4
    "what would not fit else": (36, 2, Copies(ALL, "")),
}


@pytest.mark.parametrize("kept", TRAININGS)
def test_what_training_leaves_room_for_stays(kept):
    free, training, expected = TRAININGS[kept]
    found = place_copies(needs(14, 14, ()), CACHE, free * GB, "keep", training=training * GB)
    assert replace(found, why="") == expected
    assert [found.kept(place) for place in (ACTOR, CRITIC)] == [kept != "none", kept not in ("none", "the actor's")]
    told = f"given back while training: training takes {training:.1f} of {free:.1f} GB free"
    assert (told in found.why) == (kept in ("none", "the actor's"))


@pytest.mark.parametrize(
    "machine, why",
    [
        (
            "70B and 7B on 141 GB",
            "a whole copy for models of one shape, and one of actor and reference that 2 ranks hold together, takes "
            "88.00 GB {room}, and is given back while training: {unknown}; with whole ones it would be 158.00 GB",
        ),
        (
            "70B and 7B on 80 GB",
            "a copy of actor and critic and reference and reward that 4 ranks hold together takes 42.50 GB {room}, and "
            "is given back while training: {unknown}; with whole ones it would be 158.00 GB",
        ),
        (
            "70B without a plan",
            "a whole copy for models of one shape takes 18.00 GB {room}; so it is with critic and reward, while actor "
            "and reference compute through partitions: with all models it would be 158.00 GB; no group of ranks can "
            "hold the actor: no plan; no group of ranks can hold the reference: no plan",
        ),
    ],
)
def test_the_bytes_are_told(machine, why):
    free, large, small, groups, _ = MACHINES[machine]
    room = f"with keys, values and gradients, of {free:.1f} GB free on each rank"
    unknown = "what training takes is not known, so no more than 0.4 of the free may stay"
    found = place_copies(needs(large, small, groups), CACHE, free * GB, "keep").why
    assert found == why.format(room=room, unknown=unknown)


def test_how_models_divide_is_asked_only_where_whole_copies_do_not_fit():
    asked: list[int] = []

    def divide(place: int):
        asked.append(place)
        return {2: 7 * GB}, None

    assert place_copies(needs(14, 14, ()), CACHE, 100 * GB, "keep", divide).divided == () and not asked
    found = place_copies(needs(14, 14, ()), CACHE, 32 * GB, "keep", divide)  # 25.6: 14 + 7 with what comes later
    assert (found.models, found.divided, asked) == ((0, 2), (1, 3), [0, 1, 2, 3])


def test_models_at_other_stages_compute_themselves():
    # 2 + 51 GB of 54; 2 + 53 of them
    for training, between_steps in ((51, "keep"), (53, "free")):
        found = place_copies(needs(140, 14, (2,), stage=2), CACHE, 60 * GB, "keep", training=training * GB)
        assert found.models == ALL and not found.divided and found.between_steps == between_steps
