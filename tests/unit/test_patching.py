"""Patches are applied whole or not at all, refuse the unknown, and go back."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from vllm_kvpad.patching import (
    ANY,
    Patch,
    PatchError,
    PatchPoint,
    PatchSet,
    absent,
    apply_together,
)

HOST = """
def allocate(size: int, device: str = "cpu") -> str:
    return f"stock allocate {size} on {device}"


class Engine:
    def start(self, size: int) -> str:
        return f"stock start {size}"

    def stop(self) -> str:
        return "stock stop"

    @property
    def state(self) -> str:
        return "stock state"


class Box:
    def __init__(self, size: int, lid: bool = True) -> None:
        self.volume = size**3
        self.contents = make(lid=lid)
"""


@pytest.fixture
def host() -> Iterator[Any]:
    """A module as another package would have it, fresh for each test."""
    module = types.ModuleType("kvpad_test_host")
    exec(HOST, vars(module))
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def point(name: str, *parameters: str) -> PatchPoint:
    return PatchPoint(f"kvpad_test_host:{name}", parameters)


def prefixed(original: Any) -> Any:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> str:
        return "kvpad, then " + original(*args, **kwargs)

    return replacement


def prefixed_property(original: property) -> property:
    return property(prefixed(original.fget))


def patches() -> PatchSet:
    return PatchSet(
        [
            Patch(point("allocate", "size", "device"), prefixed),
            Patch(point("Engine.start", "self", "size"), prefixed),
            Patch(point("Engine.state", "self"), prefixed_property),
        ],
        required=[point("Engine.stop", "self")],
    )


def snapshot(host: Any) -> dict[str, Any]:
    return {"allocate": host.allocate, **vars(host.Engine)}


def test_replaces_functions_methods_and_properties(host: Any) -> None:
    patches().apply()
    assert host.allocate(3) == "kvpad, then stock allocate 3 on cpu"
    assert host.Engine().start(4) == "kvpad, then stock start 4"
    assert host.Engine().state == "kvpad, then stock state"
    assert host.Engine().stop() == "stock stop"


def test_revert_puts_the_very_same_objects_back(host: Any) -> None:
    before = snapshot(host)
    applied = patches()
    applied.apply()
    applied.revert()
    assert snapshot(host) == before
    assert not applied.is_applied


def test_applying_twice_changes_nothing_more(host: Any) -> None:
    applied = patches()
    applied.apply()
    applied.apply()
    assert host.allocate(3) == "kvpad, then stock allocate 3 on cpu"


@pytest.mark.parametrize(
    ("break_host", "named"),
    [
        (lambda host: delattr(host, "allocate"), "kvpad_test_host:allocate: not found"),
        (
            lambda host: delattr(host.Engine, "stop"),
            "kvpad_test_host:Engine.stop: not found",
        ),
        (lambda host: delattr(host, "Engine"), "kvpad_test_host:Engine.start"),
        (
            lambda host: setattr(host.Engine, "start", lambda self, num_bytes: ""),
            "Engine.start: takes (self, num_bytes), expected (self, size)",
        ),
        (
            lambda host: setattr(host.Engine, "start", 3),
            "Engine.start: takes (<int>), expected (self, size)",
        ),
    ],
)
def test_one_unexpected_point_leaves_everything_alone_and_is_named(
    break_host: Any, named: str, host: Any
) -> None:
    break_host(host)
    before = {"allocate": getattr(host, "allocate", None)}
    engine_before = dict(vars(getattr(host, "Engine", object)))
    with pytest.raises(PatchError) as error:
        patches().apply()
    assert named in str(error.value)
    assert {"allocate": getattr(host, "allocate", None)} == before
    assert dict(vars(getattr(host, "Engine", object))) == engine_before


def test_a_missing_module_is_named() -> None:
    missing = PatchSet([Patch(PatchPoint("kvpad_no_such_module:f", ()), prefixed)])
    with pytest.raises(PatchError, match="kvpad_no_such_module:f: No module named"):
        missing.apply()


def test_a_failure_half_way_undoes_what_was_done(host: Any) -> None:
    before = snapshot(host)

    def broken(original: Any) -> Any:
        raise RuntimeError("cannot make this one")

    half = PatchSet(
        [
            Patch(point("allocate", "size", "device"), prefixed),
            Patch(point("Engine.start", "self", "size"), broken),
        ]
    )
    with pytest.raises(RuntimeError, match="cannot make this one"):
        half.apply()
    assert snapshot(host) == before


def test_composes_with_a_wrapper_that_was_there_before(host: Any) -> None:
    host.allocate = prefixed(host.allocate)
    patches().apply()
    assert host.allocate(1) == "kvpad, then kvpad, then stock allocate 1 on cpu"


def test_refuses_a_wrapper_that_hides_the_signature(host: Any) -> None:
    stock = host.allocate

    def opaque(*args: Any, **kwargs: Any) -> str:
        return stock(*args, **kwargs)

    host.allocate = opaque
    with pytest.raises(PatchError, match=r"takes \(args, kwargs\)"):
        patches().apply()
    assert host.allocate is opaque


def test_refuses_a_replacement_that_looks_alike_but_is_somebody_elses(
    host: Any,
) -> None:
    stock_state = host.Engine.state

    def allocate(size: int, device: str = "cpu") -> str:
        return "theirs"

    host.allocate = allocate
    with pytest.raises(PatchError, match=rf"allocate: replaced by {__name__}, by"):
        patches().apply()
    assert host.allocate is allocate
    assert host.Engine.state is stock_state


def test_says_who_put_another_signature_there(host: Any) -> None:
    host.Engine.start = lambda self, size, again: ""
    with pytest.raises(PatchError, match=rf"again\), expected .* by {__name__}$"):
        patches().apply()


def test_what_is_no_function_is_somebody_elses_too(host: Any) -> None:
    host.allocate = functools.partial(host.allocate, 3)
    with pytest.raises(PatchError, match=r"allocate: takes .*replaced by functools"):
        patches().apply()


def test_a_wrapper_put_on_top_later_is_no_loss(host: Any) -> None:
    applied = patches()
    applied.apply()
    host.allocate = prefixed(host.allocate)
    host.Engine.state = prefixed_property(host.Engine.state)
    assert applied.lost() == []
    applied.apply()
    assert host.allocate(1) == "kvpad, then kvpad, then stock allocate 1 on cpu"


def test_a_replacement_put_there_later_is_noticed_and_named(
    host: Any,
) -> None:
    applied = patches()
    applied.apply()
    host.Engine.start = lambda self, size: "theirs"
    (line,) = applied.lost()
    assert line.startswith(f"Engine.start (by {__name__}): replaced after")
    with pytest.raises(PatchError, match=r"Engine\.start"):
        applied.apply()
    del host.Engine.state
    assert [line.split(" ")[0] for line in applied.lost()] == [
        "Engine.start",
        "Engine.state",
    ]


def test_does_not_revert_under_somebody_elses_wrapper(host: Any) -> None:
    applied = patches()
    applied.apply()
    theirs = prefixed(host.allocate)
    host.allocate = theirs
    with pytest.raises(PatchError, match="allocate"):
        applied.revert()
    assert host.allocate is theirs
    assert applied.is_applied


def make(**contents: bool) -> dict[str, bool]:
    return contents


def test_any_stands_for_a_parameter_of_any_name(host: types.ModuleType) -> None:
    point("allocate", ANY, "device").resolve()
    with pytest.raises(PatchError, match=r"takes \(size, device\), expected \(\*\)"):
        point("allocate", ANY).resolve()


def test_more_parameters_are_fine_if_a_call_can_do_without(
    host: types.ModuleType,
) -> None:
    module = host.__name__
    PatchPoint(f"{module}:allocate", ("size",), and_more=True).resolve()
    expected = r"takes \(size, device\), expected \(\.\.\.\)"
    with pytest.raises(PatchError, match=expected):
        PatchPoint(f"{module}:allocate", (), and_more=True).resolve()


def test_a_class_is_a_point_with_the_parameters_of_making_one(
    host: types.ModuleType,
) -> None:
    point("Box", "size", "lid").resolve()
    with pytest.raises(PatchError, match=r"Box: takes \(size, lid\)"):
        point("Box", "size").resolve()


@pytest.mark.parametrize("name", ["volume", "contents", "lid", "size", "make"])
def test_code_mentions_attributes_parameters_and_keywords(
    name: str, host: types.ModuleType
) -> None:
    target = f"{host.__name__}:Box"
    PatchPoint(target, ("size", "lid"), mentions=(name,)).resolve()


def test_code_that_does_not_use_a_name_is_told_by_that_name(
    host: types.ModuleType,
) -> None:
    target = f"{host.__name__}:Box"
    with pytest.raises(PatchError, match=r"Box: its code does not use weight$"):
        PatchPoint(target, ("size", "lid"), mentions=("volume", "weight")).resolve()


@pytest.fixture
def user(host: types.ModuleType) -> Iterator[types.ModuleType]:
    """A module of the same package that imported a function by name."""
    module = types.ModuleType("kvpad_test_host.user")
    module.allocate = module.renamed = host.allocate
    stranger = types.ModuleType("kvpad_test_stranger")
    stranger.allocate = host.allocate
    sys.modules[module.__name__] = module
    sys.modules[stranger.__name__] = stranger
    yield module
    assert not hasattr(stranger.allocate, "__wrapped__")
    del sys.modules[module.__name__], sys.modules[stranger.__name__]


def everywhere() -> PatchSet:
    patch = Patch(point("allocate", "size", "device"), prefixed, everywhere=True)
    return PatchSet([patch])


def test_everywhere_is_wherever_its_package_imported_it(
    host: types.ModuleType, user: types.ModuleType
) -> None:
    stock = host.allocate
    patches = everywhere()
    patches.apply()
    for function in (host.allocate, user.allocate, user.renamed):
        assert function(1) == "kvpad, then stock allocate 1 on cpu"
    patches.revert()
    assert host.allocate is user.allocate is user.renamed is stock


def test_a_module_imported_in_between_is_reverted_too(
    host: types.ModuleType, user: types.ModuleType
) -> None:
    stock = host.allocate
    patches = everywhere()
    patches.apply()
    user.later = host.allocate
    patches.revert()
    assert user.later is stock


def test_several_sets_are_applied_together_or_not_at_all(
    host: types.ModuleType,
) -> None:
    before = snapshot(host)
    good, bad = patches(), PatchSet([Patch(point("nothing"), prefixed)])
    with pytest.raises(PatchError, match="nothing: not found"):
        apply_together([good, bad])
    assert snapshot(host) == before
    apply_together([good])
    apply_together([good])
    assert host.allocate(3) == "kvpad, then stock allocate 3 on cpu"


def test_a_set_that_fails_half_way_takes_the_others_back(
    host: types.ModuleType,
) -> None:
    before = snapshot(host)

    def broken(original: Any) -> Any:
        raise RuntimeError("cannot make this one")

    bad = PatchSet([Patch(point("Engine.stop", "self"), broken)])
    with pytest.raises(RuntimeError, match="cannot make this one"):
        apply_together([patches(), bad])
    assert snapshot(host) == before


def test_absent_tells_what_is_not_there_whatever_the_shape(
    host: types.ModuleType,
) -> None:
    there = point("allocate", "entirely", "different")
    (line,) = absent([there, point("nothing")])
    assert line == "kvpad_test_host:nothing: not found"
