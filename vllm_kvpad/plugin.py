"""The ``vllm.general_plugins`` entry point.

vLLM calls :func:`register` in every process it starts: front end, engine core and
workers. It is cheap there: two patches on how workers are made, so that only a
process that really builds a worker imports the rest, and only once the engine's
configuration is known. In a front end a third patch checks that configuration, so
that a mistake ends the start before a model is looked at, and a collector of metrics
waits to be scraped. Where vLLM has an extensible KV cache of its own, whose block
counts the engine core decides on, ``Executor.__init__`` is patched too: an executor is
made where an engine core is, before any worker.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any

from vllm_kvpad.hosts import native_cache
from vllm_kvpad.log import get_logger
from vllm_kvpad.patching import (
    Patch,
    PatchError,
    PatchPoint,
    PatchSet,
    apply_together,
)

if TYPE_CHECKING:
    from vllm_kvpad.capabilities import ConnectorCapabilities
    from vllm_kvpad.config import KvpadConfig

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
    from vllm_kvpad import metrics

    metrics.serve()
    # vLLM imports this module where it parses arguments, and loads plugins there
    # before it makes a configuration of them. Elsewhere it would cost seconds.
    if _ARGUMENTS in sys.modules:
        try:
            front_end_patches.apply()
        except PatchError as error:
            # The worker checks too; only the message would come earlier.
            logger.debug("settings are not checked in the front end: %s", error)
    try:
        apply_together(creation_patches())
    except PatchError as error:
        # Every process of the engine gets here; the first one speaks for all.
        if multiprocessing.parent_process() is None:
            reason = str(error)
            _warn_stepped_aside(reason)
            # Of no engine in particular: none of them is known here.
            metrics.publish(
                lambda: metrics.EngineReport(
                    mode=metrics.Mode.STEPPED_ASIDE, reason=reason
                )
            )


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


def _announce_after_init_device(original: Any) -> Any:
    @functools.wraps(original)
    def init_device(self: Any) -> None:
        from vllm_kvpad.hosts import agreement

        original(self)
        agreement.announce(_objections.get(self.worker))

    return init_device


def _check_settings_first(original: Any) -> Any:
    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_kvpad.config import KvpadConfig

        KvpadConfig.from_additional_config(self.additional_config)
        return original(self, *args, **kwargs)

    return create_engine_config


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
        ),
        Patch(
            PatchPoint(
                "vllm.v1.worker.worker_base:WorkerWrapperBase.init_device", ("self",)
            ),
            _announce_after_init_device,
        ),
    ]
)

_ARGUMENTS = "vllm.engine.arg_utils"

front_end_patches = PatchSet(
    [
        Patch(
            PatchPoint(
                f"{_ARGUMENTS}:EngineArgs.create_engine_config",
                ("self", "usage_context", "headless"),
            ),
            _check_settings_first,
        )
    ]
)

_objections: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Workers of this process that kvpad left to stock vLLM, and why."""


def _watch_engine_creation(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        take_charge_of_engine(vllm_config)
        original(self, vllm_config, *args, **kwargs)

    return __init__


engine_creation_patches = PatchSet(
    [
        Patch(
            PatchPoint(
                "vllm.v1.executor.abstract:Executor.__init__", ("self", "vllm_config")
            ),
            _watch_engine_creation,
        )
    ]
)


def creation_patches() -> tuple[PatchSet, ...]:
    """What :func:`register` applies to the installed vLLM."""
    if native_cache.is_installed():
        return worker_creation_patches, engine_creation_patches
    return (worker_creation_patches,)


def take_charge_of(worker: Any) -> None:
    """Give ``worker`` (a vLLM ``WorkerBase``) a KV cache from kvpad, or step aside.

    kvpad also steps aside where code that is neither its own nor vLLM's fails: the
    connector's, or that of a platform's ``additional_config``.

    Raises:
        KvpadConfigError: ``additional_config["kvpad"]`` is not valid.
        RuntimeError: kvpad would have to step aside and ``strict`` is set.
    """
    from vllm_kvpad.config import KvpadConfig
    from vllm_kvpad.hosts import NothingToDo, StepAside, check_in_use, select_host

    vllm_config = worker.vllm_config
    config = KvpadConfig()
    capabilities: ConnectorCapabilities | None = None
    try:
        config = _settings_of(vllm_config, warn=worker.rank == 0)
        if not config.enabled:
            raise NothingToDo("switched off by additional_config")
        check_in_use(vllm_config)
        capabilities = _capabilities_of(vllm_config, config)
        host = select_host()
        host.install(worker, config, capabilities)
    except NothingToDo as reason:
        _objections[worker] = str(reason)
        if worker.rank == 0:
            logger.info("kvpad does nothing: %s", reason)
        return
    except (StepAside, PatchError) as error:
        _objections[worker] = str(error)
        step_aside(worker, config, str(error), capabilities, speaks=worker.rank == 0)
        return
    if worker.rank == 0:
        from vllm_kvpad.metrics import EngineReport, publish

        logger.info("kvpad %s; %s", host.promise, capabilities.describe())
        publish(lambda: EngineReport.of_worker(worker, host.mode, capabilities))


def take_charge_of_engine(vllm_config: Any) -> None:
    """Prepare the process of an engine core, before its workers exist, or step aside.

    The workers say so if kvpad steps aside, and end the server if it must not.

    Raises:
        KvpadConfigError: ``additional_config["kvpad"]`` is not valid.
    """
    from vllm_kvpad.hosts import NothingToDo, StepAside, check_in_use, select_host

    try:
        config = _settings_of(vllm_config, warn=False)
        if not config.enabled:
            raise NothingToDo("switched off by additional_config")
        check_in_use(vllm_config)
        capabilities = _capabilities_of(vllm_config, config)
        select_host().install_in_engine(vllm_config, config, capabilities)
    except (NothingToDo, StepAside, PatchError) as reason:
        logger.debug("nothing is done to the engine core: %s", reason)


def _settings_of(vllm_config: Any, *, warn: bool) -> KvpadConfig:
    """The operator's settings.

    Raises:
        KvpadConfigError: They are not valid.
        StepAside: ``additional_config`` cannot be read.
    """
    from vllm_kvpad.config import (
        ADDITIONAL_CONFIG_KEY,
        KvpadConfig,
        KvpadConfigError,
        misspelt_key,
    )
    from vllm_kvpad.hosts import StepAside

    additional_config = vllm_config.additional_config
    try:
        config = KvpadConfig.from_additional_config(additional_config)
        misspelt = misspelt_key(additional_config)
    except KvpadConfigError:
        raise
    except Exception as error:  # an object of the platform's, with code of its own
        kind = type(additional_config).__qualname__
        raise StepAside(
            f"additional_config ({kind}) cannot be read: {_shown(error)}"
        ) from error
    if misspelt is not None and warn:
        logger.warning(
            "kvpad does not know the key %r of additional_config; did you mean %r?",
            misspelt,
            ADDITIONAL_CONFIG_KEY,
        )
    return config


def _capabilities_of(vllm_config: Any, config: KvpadConfig) -> ConnectorCapabilities:
    """What the configured connector does with the cache.

    Raises:
        KvpadConfigError: The operator's word on connectors is not valid.
        StepAside: The connector's own code failed.
    """
    from vllm_kvpad.capabilities import resolve
    from vllm_kvpad.config import KvpadConfigError
    from vllm_kvpad.hosts import StepAside

    transfer_config = vllm_config.kv_transfer_config
    try:
        return resolve(transfer_config, overrides=config.registers_device_memory)
    except KvpadConfigError:
        raise
    except Exception as error:  # the connector's code; vLLM meets it after us
        raise StepAside(
            f"KV connector {transfer_config.kv_connector}: {_shown(error)}"
        ) from error


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def step_aside(
    worker: Any,
    config: KvpadConfig,
    reason: str,
    capabilities: ConnectorCapabilities | None,
    *,
    speaks: bool,
) -> None:
    """Say once per engine, in the log and in the metrics, why vLLM runs as stock.

    Args:
        worker: One of the engine's.
        config: The operator's settings.
        reason: For the log.
        capabilities: Of the configured connector; None if they are not known.
        speaks: Whether it falls to this rank to speak for the engine.

    Raises:
        RuntimeError: ``strict`` is set.
    """
    reason = " ".join(reason.split())  # somebody's error may have many lines
    if config.strict:
        raise RuntimeError(
            f"kvpad cannot supply the KV cache and strict is set: {reason}. "
            "Remove the cause, unset strict, or set VLLM_KVPAD_DISABLE=1."
        )
    if speaks:
        from vllm_kvpad.metrics import EngineReport, Mode, publish

        _warn_stepped_aside(reason)
        publish(
            lambda: EngineReport.of_worker(
                worker, Mode.STEPPED_ASIDE, capabilities, reason=reason
            )
        )


def _warn_stepped_aside(reason: str) -> None:
    logger.warning("kvpad steps aside, vLLM runs as stock: %s", reason)
