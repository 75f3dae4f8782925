"""Import and registration, each time in a fresh process, stock and kvpad in turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from functools import partial
from typing import Any

from results import Recorder, Series, in_turn

IMPORTS = ("vllm_kvpad", "vllm_kvpad.plugin", "vllm_kvpad.placement", "vllm_kvpad.cli")

_IMPORT = """
    import sys, time
    began = time.perf_counter()
    import {module}
    print(time.perf_counter() - began)
    heavy = sorted({{"vllm", "torch"}} & set(sys.modules))
    assert not heavy, heavy
"""

_REGISTRATION = """
    import json, os, sys, time
    {before}
    from vllm.plugins import load_general_plugins

    def seconds(plugins):
        reading, writing = os.pipe()
        if not os.fork():
            os.environ["VLLM_PLUGINS"] = plugins
            began = time.perf_counter()
            load_general_plugins()
            os.write(writing, json.dumps(time.perf_counter() - began).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as answer:
            found = json.loads(answer.read())
        assert os.wait()[1] == 0
        return found

    samples = {{"stock": [], "kvpad": []}}
    for _ in range({rounds}):
        samples["stock"].append(seconds(""))
        samples["kvpad"].append(seconds("kvpad"))
    print(json.dumps(samples))
"""

_SERVER = "import vllm.entrypoints.openai.api_server"
_INSPECTION = "import vllm.model_executor.models.registry"

STAGES = {
    # What each of vLLM's processes has imported when it loads its plugins. kvpad has
    # them import vllm.v1.worker.worker_base; where they do so anyway a little later,
    # that is time moved, and the second line is what is added.
    "API server": _SERVER,
    "API server, beyond what it imports next": (f"{_SERVER}, vllm.v1.engine.async_llm"),
    "process that inspects a model": _INSPECTION,
    "process that inspects a model, beyond what it imports next": (
        f"{_INSPECTION}, vllm.model_executor.models.llama"
    ),
    "engine core": "import vllm.v1.engine.core",
    "worker": "import vllm.v1.worker.worker_base",
}


def printed(program: str) -> Any:
    """What ``program`` prints last, as JSON, from a process of its own.

    Raises:
        RuntimeError: It failed; the message ends with what it wrote.
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{program}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def import_seconds(module: str) -> float:
    """Seconds to import ``module`` without vLLM and torch, its bytecode compiled."""
    return float(printed(_IMPORT.format(module=module)))


def registration_seconds(before: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of vLLM's ``load_general_plugins``, stock and kvpad in turn.

    Each time in a process that has done ``before`` and nothing else: forked, since
    importing vLLM takes most of a minute on a small machine.
    """
    samples: dict[str, list[float]] = printed(
        _REGISTRATION.format(before=before, rounds=rounds)
    )
    return samples


def main(rounds: int = 7) -> None:
    recorder = Recorder("processes")
    for module in IMPORTS:
        import_seconds(module)  # compile and read the files once
        recorder.add(
            Series(
                name=f"import {module}",
                unit="s",
                reference="kvpad",
                samples=in_turn(3 * rounds, {"kvpad": partial(import_seconds, module)}),
            )
        )
    for stage, before in STAGES.items():
        recorder.add(
            Series(
                name=f"load_general_plugins(), {stage}",
                unit="s",
                reference="stock",
                samples=registration_seconds(before, 3 * rounds),
            )
        )
