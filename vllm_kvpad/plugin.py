"""The ``vllm.general_plugins`` entry point.

vLLM calls :func:`register` in every process it starts: front end, engine core and
workers. It is cheap there: one patch on ``WorkerBase.__init__``, so that only a
process that really builds a worker imports the rest, and only once the engine's
configuration is known.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from typing import Any

from vllm_kvpad.log import get_logger
from vllm_kvpad.patching import Patch, PatchError, PatchPoint, PatchSet

logger = get_logger(__name__)

PLUGIN_NAME = "kvpad"


def register() -> None:
    """Arrange for every worker of this process to get its KV cache from kvpad.

    Does nothing unless ``VLLM_PLUGINS`` names ``kvpad`` (vLLM loads every installed
    plugin when the variable is unset; kvpad asks to be named), and nothing when
    ``VLLM_KVPAD_DISABLE=1``. Calling it again changes nothing. A vLLM that it does
    not recognise runs as stock, after one warning.

    Raises:
        KvpadConfigError: ``VLLM_KVPAD_DISABLE`` is neither on nor off.
    """
    if not _is_switched_on():
        return
    try:
        worker_creation_patches.apply()
    except PatchError as error:
        # Every process of the engine gets here; the first one speaks for all.
        if multiprocessing.parent_process() is None:
            _warn_stepped_aside(str(error))


def _is_switched_on() -> bool:
    from vllm_kvpad.config import disabled_by_environment

    if disabled_by_environment():
        logger.debug("switched off by VLLM_KVPAD_DISABLE")
        return False
    named = os.environ.get("VLLM_PLUGINS")
    if named is None or PLUGIN_NAME not in (name.strip() for name in named.split(",")):
        logger.debug("not switched on: VLLM_PLUGINS does not name %s", PLUGIN_NAME)
        return False
    return True


def _watch_worker_creation(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        take_charge_of(self)

    return __init__


worker_creation_patches = PatchSet(
    [
        Patch(
            PatchPoint(
                "vllm.v1.worker.worker_base:WorkerBase.__init__",
                (
                    "self",
                    "vllm_config",
                    "local_rank",
                    "rank",
                    "distributed_init_method",
                    "is_driver_worker",
                ),
            ),
            _watch_worker_creation,
        )
    ]
)


def take_charge_of(worker: Any) -> None:
    """Give ``worker`` (a vLLM ``WorkerBase``) a KV cache from kvpad, or step aside.

    Raises:
        KvpadConfigError: ``additional_config["kvpad"]`` is not valid.
        RuntimeError: kvpad would have to step aside and ``strict`` is set.
    """
    from vllm_kvpad.capabilities import resolve
    from vllm_kvpad.config import KvpadConfig
    from vllm_kvpad.hosts import StepAside, select_host

    vllm_config = worker.vllm_config
    config = KvpadConfig.from_additional_config(vllm_config.additional_config)
    if not config.enabled:
        logger.debug("switched off by additional_config")
        return
    capabilities = resolve(
        vllm_config.kv_transfer_config, overrides=config.registers_device_memory
    )
    try:
        select_host().install(worker, config, capabilities)
    except (StepAside, PatchError) as error:
        step_aside(worker, config, str(error))
        return
    if worker.rank == 0:
        logger.info("kvpad supplies the KV cache; %s", capabilities.describe())


def step_aside(worker: Any, config: Any, reason: str) -> None:
    """Say once per engine why vLLM runs as stock.

    Raises:
        RuntimeError: ``strict`` is set.
    """
    if config.strict:
        raise RuntimeError(
            f"kvpad cannot supply the KV cache and strict is set: {reason}. "
            "Remove the cause, unset strict, or set VLLM_KVPAD_DISABLE=1."
        )
    if worker.rank == 0:
        _warn_stepped_aside(reason)


def _warn_stepped_aside(reason: str) -> None:
    logger.warning("kvpad steps aside, vLLM runs as stock: %s", reason)
