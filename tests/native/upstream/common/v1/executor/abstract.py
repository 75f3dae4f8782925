"""Stands for ``vllm.v1.executor.abstract``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class Executor(ABC):
    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self._init_executor()

    @abstractmethod
    def _init_executor(self) -> None: ...

    @abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[[Any], Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]: ...

    def get_kv_cache_specs(self) -> list[Any]:
        return self.collective_rpc("get_kv_cache_spec")

    def set_kv_cache_layout(self, layout_name: str) -> None:
        self.collective_rpc("set_kv_cache_layout", args=(layout_name,))

    def determine_available_memory(self) -> list[int]:
        return self.collective_rpc("determine_available_memory")

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        self.collective_rpc("initialize_from_config", args=(kv_cache_configs,))

    def compile_or_warm_up_model(self) -> list[Any]:
        return self.collective_rpc("compile_or_warm_up_model")

    def resolve_extensible_kv_cache(self, kv_cache_specs: list[Any]) -> None:
        reasons = self.collective_rpc("extensible_kv_cache_unsupported_reason")
        if any(reasons):
            self.vllm_config.cache_config.enable_extensible_kv_cache = False
            self.collective_rpc("disable_extensible_kv_cache")

    def extend_kv_cache(self, num_blocks: int) -> None:
        self.collective_rpc("extend_kv_cache", args=(num_blocks,))
