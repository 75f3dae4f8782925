"""What differs between vLLM's two model runners and between 0.32 and 0.33.

Every function takes a ``GPUModelRunner`` of either kind (V1:
``vllm.v1.worker.gpu_model_runner``, V2: ``vllm.v1.worker.gpu.model_runner``).
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def kv_cache_planner(runner: Any) -> Callable[[int], KVCacheConfig]:
    """Return what plans a cache of n blocks for this worker as the engine core would.

    Args:
        runner: A model runner whose layers are loaded.
    """
    vllm_config = runner.vllm_config
    spec = runner.get_kv_cache_spec()
    if importlib.util.find_spec("vllm.v1.core.kv_cache_config_builder") is not None:
        from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder
        from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups

        builder = get_kv_cache_config_builder(vllm_config)
        # The engine core's own function: it also marks draft groups and retained
        # tokens, without which its plan would never equal this one.
        groups = get_global_kv_cache_groups(vllm_config, [spec])
        return functools.partial(_plan_with_builder, builder, vllm_config, groups)

    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

    groups = get_kv_cache_groups(vllm_config, spec)
    return functools.partial(_plan_with_override, vllm_config, groups)


def _plan_with_builder(
    builder: Any, vllm_config: Any, groups: Any, num_blocks: int
) -> KVCacheConfig:
    return builder.get_kv_cache_config_from_groups(
        vllm_config, groups, num_blocks=num_blocks
    )


def _plan_with_override(
    vllm_config: Any, groups: Any, num_blocks: int
) -> KVCacheConfig:
    """vLLM 0.32 plans for a number of bytes; a number of blocks overrides it."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

    cache_config = vllm_config.cache_config
    saved = cache_config.num_gpu_blocks_override
    cache_config.num_gpu_blocks_override = num_blocks
    try:
        return get_kv_cache_config_from_groups(vllm_config, groups, available_memory=0)
    finally:
        cache_config.num_gpu_blocks_override = saved


def rebind_kv_cache(runner: Any, kv_cache_config: KVCacheConfig) -> None:
    """Bind views of the final size to an initialised runner and register them.

    The counterpart of the end of ``initialize_kv_cache``: everything before it
    (attention back ends, block tables, graphs) stands and must not be made again,
    because captured graphs hold its addresses.
    """
    # The runner's copy may have gained groups and layers of its own (encoder-only
    # layers, layers that share another's cache), so its groups stay.
    for field in dataclasses.fields(kv_cache_config):
        if field.name != "kv_cache_groups":
            setattr(
                runner.kv_cache_config,
                field.name,
                getattr(kv_cache_config, field.name),
            )
    if runner.vllm_config.use_v2_model_runner:
        _rebind_v2(runner)
    else:
        _rebind_v1(runner)


def _rebind_v2(runner: Any) -> None:
    from vllm.v1.worker.gpu.attn_utils import init_kv_cache
    from vllm.v1.worker.gpu.kv_connector import get_kv_connector

    attention_groups = runner.attn_groups + getattr(
        runner.speculator, "attn_groups", []
    )
    kv_caches = init_kv_cache(
        runner.compilation_config.static_forward_context,
        runner.kv_cache_config,
        runner.device,
        runner.kernel_block_sizes,
        runner.vllm_config,
        block_tables=runner.block_tables,
        attn_groups=(group for groups in attention_groups for group in groups),
    )
    runner.kv_caches = [
        cache for cache in kv_caches.values() if cache.device == runner.device
    ]
    runner.kv_connector = get_kv_connector(runner.vllm_config, kv_caches)


def _rebind_v1(runner: Any) -> None:
    from vllm.distributed.kv_transfer import (
        get_kv_transfer_group,
        has_kv_transfer_group,
    )
    from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks

    runner.kv_caches.clear()
    kv_caches = runner.initialize_kv_cache_tensors(
        runner.kv_cache_config, runner._kernel_block_sizes
    )
    if has_kv_transfer_group():
        connector = get_kv_transfer_group()
        connector.register_kv_caches(kv_caches)
        connector.set_host_xfer_buffer_ops(copy_kv_blocks)


def drop_kv_cache(runner: Any) -> None:
    """Undo ``initialize_kv_cache`` and graph capture, keeping the weights.

    What stock does after it has estimated the memory of CUDA graphs.
    """
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.v1.worker.workspace import unlock_workspace

    # The end of warm-up froze the heap, graphs in reference cycles included, and
    # locked the workspace that a second warm-up may have to grow.
    gc.unfreeze()
    unlock_workspace()
    CUDAGraphWrapper.clear_all_graphs()
    BreakableCUDAGraphWrapper.clear_all_graphs()
    if runner.vllm_config.use_v2_model_runner:
        _drop_v2(runner)
    else:
        _drop_v1(runner)
    _use_a_fresh_graph_pool()


def _drop_v2(runner: Any) -> None:
    from vllm.v1.worker.gpu.cudagraph_utils import (
        CudaGraphManager,
        _teardown_profiling_state,
    )

    if runner.speculator is not None:
        for name, value in list(vars(runner.speculator).items()):
            if isinstance(value, CudaGraphManager):
                setattr(runner.speculator, name, None)
    _teardown_profiling_state(runner)


def _drop_v1(runner: Any) -> None:
    for keys in runner.cudagraph_dispatcher.cudagraph_keys.values():
        keys.clear()
    runner.cudagraph_dispatcher.keys_initialized = False
    runner.encoder_cudagraph_manager = None
    runner.maybe_remove_all_loras(runner.lora_config)
    runner._cleanup_profiling_kv_cache()


def _use_a_fresh_graph_pool() -> None:
    """Have graphs captured from now on into a pool that none was discarded from.

    PyTorch can refuse to capture into a pool whose graphs are gone (vLLM profiles
    into a throw-away pool for that reason).
    """
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.platforms import current_platform

    type(current_platform)._global_graph_pool = None
    pool = current_platform.get_global_graph_pool()
    for wrapper in (
        *CUDAGraphWrapper._all_instances,
        *BreakableCUDAGraphWrapper._all_instances,
    ):
        wrapper.graph_pool = pool


def release_cached_memory() -> None:
    """Return the caching allocator's unused blocks to the driver."""
    import torch

    torch.accelerator.empty_cache()
