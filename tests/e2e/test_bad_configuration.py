"""Wrong settings end the server before it allocates, and say what to change."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from fleet import Fleet, probe_environment

from engines import Engine, nixl

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def engines(fleet: Fleet) -> Iterator[dict[str, Engine]]:
    good = dataclasses.replace(
        fleet.spec("stock"), plugins=("kvpad",), kv_transfer=nixl("kv_producer")
    )

    def settings(**kvpad: Any) -> Any:
        return dataclasses.replace(good, additional={"kvpad": kvpad})

    probe = probe_environment(fleet.probe_dir("strict"), "missing_patch_point")
    specs = {
        "unknown-key": settings(stirct=True),
        "odd-granule": settings(host_granule_bytes=3_000_000),
        "strict": dataclasses.replace(
            settings(strict=True), plugins=("kvpad_probe", "kvpad"), env=probe
        ),
    }
    with fleet.engines(specs) as started:
        yield started


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("unknown-key", ["stirct", "did you mean", "strict"]),
        ("odd-granule", ["host_granule_bytes", "3000000", "power of two"]),
        ("strict", ["strict is set", "Worker.sleep_mode_backend: not found"]),
    ],
)
def test_the_server_ends_and_names_the_mistake(
    engines: dict[str, Engine], name: str, expected: list[str]
) -> None:
    engine = engines[name]
    assert engine.wait_exit() != 0
    log = engine.log_text()
    assert [text for text in expected if text not in log] == []
    assert "KV cache size" not in log


@pytest.mark.parametrize("name", ["unknown-key", "odd-granule"])
def test_wrong_settings_end_the_front_end_itself(
    engines: dict[str, Engine], name: str
) -> None:
    """No engine core, no worker and no model had to be loaded to find them."""
    engine = engines[name]
    assert engine.wait_exit() != 0
    assert "EngineCore" not in engine.log_text()
