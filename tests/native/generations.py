"""Put a generation of upstream's doubles in the place of the installed vLLM's modules.

The files are run in the order in which upstream's history has them: what both have,
then ``rounding``, then ``padding`` on top of it. A file is run while the module that it
replaces is still in place, so that it can take over from there what stays.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

UPSTREAM = Path(__file__).with_name("upstream")

_ROUNDING = (
    "common/utils/vmm_driver",
    "common/utils/extensible_tensor",
    "rounding/utils/extensible_tensor",
    "rounding/v1/core/kv_cache_utils",
    "rounding/v1/worker/extensible_kv_cache",
    "common/v1/worker/gpu/model_runner",
    "rounding/v1/worker/gpu_worker",
    "common/v1/executor/abstract",
    "rounding/v1/engine/core",
)
_PADDING = (
    *_ROUNDING,
    "padding/v1/core/kv_cache_utils",
    "padding/v1/worker/extensible_kv_cache",
    "common/v1/worker/gpu/model_runner",  # again: it imports the cache by name
    "padding/v1/worker/gpu_worker",
    "padding/v1/engine/core",
)
FILES = {"rounding": _ROUNDING, "padding": _PADDING}

# What a generation no longer has.
_REMOVED = {
    "rounding": (),
    "padding": ("granule_aligned_blocks", "granule_block_alignment"),
}


def modules_of(generation: str) -> list[str]:
    """Names of the modules of ``vllm`` that a generation replaces."""
    return list(dict.fromkeys(_module_name(file) for file in FILES[generation]))


def install(generation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``vllm`` look like one whose own extensible cache is of ``generation``."""
    for file in FILES[generation]:
        name = _module_name(file)
        _replace(name, _load(name, UPSTREAM / f"{file}.py"), monkeypatch)
    for symbol in _REMOVED[generation]:
        monkeypatch.delattr(sys.modules["vllm.utils.extensible_tensor"], symbol)


def _module_name(file: str) -> str:
    _, _, path = file.partition("/")
    return f"vllm.{path.replace('/', '.')}"


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _replace(name: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, module)
    package, _, last = name.rpartition(".")
    monkeypatch.setattr(importlib.import_module(package), last, module, raising=False)
