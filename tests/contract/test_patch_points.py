"""Every point of vLLM that kvpad patches or calls is as kvpad expects it.

Checked against the vLLM that is installed here, and against the CUDA wheel whose
site folder ``KVPAD_CUDA_VLLM_SITE`` names (``tox`` unpacks one; importing it needs
no GPU). A new vLLM that fails here is one that kvpad would step aside for;
``python -m vllm_kvpad.hosts`` shows what changed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.contract

_REPORT = """
import json, vllm
from vllm_kvpad.hosts import select_host
from vllm_kvpad.plugin import creation_patches, front_end_patches
host = select_host()
sets = [front_end_patches, *creation_patches(), *host.patch_sets()]
print("REPORT" + json.dumps({
    "version": vllm.__version__,
    "host": host.name,
    "points": sorted({point.target for each in sets for point in each.points}),
    "problems": sorted({line for each in sets for line in each.problems()}),
}))
"""


def report(site: str | None) -> dict[str, object]:
    """Look at the patch points in a fresh process that has ``site`` first."""
    environment = dict(os.environ)
    if site is not None:
        environment["PYTHONPATH"] = site
    done = subprocess.run(
        [sys.executable, "-c", _REPORT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(x for x in done.stdout.splitlines() if x.startswith("REPORT"))
    return json.loads(line.removeprefix("REPORT"))


def test_installed_vllm_has_every_patch_point() -> None:
    found = report(None)
    assert found["problems"] == []
    assert found["host"] == "supply"


def test_cuda_wheel_has_every_patch_point() -> None:
    site = os.environ.get("KVPAD_CUDA_VLLM_SITE")
    if site is None or not Path(site, "vllm").is_dir():
        if os.environ.get("KVPAD_REQUIRE_ENGINES"):
            pytest.fail(f"KVPAD_CUDA_VLLM_SITE={site!r} holds no vLLM")
        pytest.skip("KVPAD_CUDA_VLLM_SITE does not name a folder with a vLLM")
    found = report(site)
    assert found["version"] == "0.33.0"
    assert found["problems"] == []
    assert found["host"] == "supply"


def test_the_maintainers_command_shows_the_host_and_every_point() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vllm_kvpad.hosts"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "host supply" in done.stdout
    for target in report(None)["points"]:
        assert f"  ok  {target} (" in done.stdout
    # Why the others are not it.
    assert "no registers_kv_cache_memory" in done.stdout
    assert "align_extensible_kv_cache_capacity: not found" in done.stdout


def test_a_point_that_is_missing_is_reported_by_name() -> None:
    """The two tests above can fail."""
    from vllm_kvpad.patching import Patch, PatchPoint, PatchSet

    points = [
        PatchPoint("vllm.v1.worker.gpu_worker:Worker.no_such_method", ("self",)),
        PatchPoint("vllm.v1.worker.no_such_module:function", ()),
        PatchPoint("vllm.v1.worker.gpu_worker:Worker.shutdown", ("self", "force")),
    ]
    problems = PatchSet([Patch(point, lambda original: original) for point in points])
    lines = problems.problems()
    assert [line.split(": ")[0] for line in lines] == [p.target for p in points]
    assert "takes (self), expected (self, force)" in lines[2]
