"""A vLLM with an extensible KV cache of its own: is there one, and is it in use.

Read in vLLM's sources on the way to 0.34 (PR 56492), where the cache is the module
``vllm.v1.worker.extensible_kv_cache`` and ``CacheConfig.enable_extensible_kv_cache``
says whether an engine uses it: None until vLLM has resolved it, False if the user or
the platform turned it off. Any process of an engine can still turn it off before the
first allocation, so it is asked each time and never remembered.

This module imports neither vLLM nor torch.
"""

from __future__ import annotations

import importlib.util
from typing import Any

MODULE = "vllm.v1.worker.extensible_kv_cache"


def is_installed() -> bool:
    """Whether the installed vLLM has such a cache; cheap, imports packages only."""
    return importlib.util.find_spec(MODULE) is not None


def is_in_use(vllm_config: Any) -> bool:
    """Whether the engine of ``vllm_config`` uses it, as far as is known now."""
    return bool(vllm_config.cache_config.enable_extensible_kv_cache)
