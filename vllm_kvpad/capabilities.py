"""What a KV connector does with the KV cache, and who says so.

:func:`resolve` answers two questions about the configured connector:

* does it *register* the device KV cache with a transport (RDMA)? Then every layer
  region must lie in one physical allocation;
* does it *export* the cache to another process through legacy CUDA IPC handles?
  Those do not exist for VMM memory, so kvpad must step aside.

A connector's author states both on the class::

    class MyConnector(KVConnectorBase_V1):
        REGISTERS_DEVICE_MEMORY = True
        EXPORTS_CUDA_IPC = False

Either attribute may also be a classmethod that takes the ``KVTransferConfig`` and
returns a bool. Who answers, nearest first:

1. the operator, ``additional_config.kvpad.registers_device_memory`` (first question
   only);
2. the attribute on the class or on the first of its bases, in method resolution
   order, that has one, provided the built-in table knows no *nearer* class. A class
   that both declares and is in the table is answered by its declaration;
3. a third-party package's hook (:mod:`vllm_kvpad.hookspecs`);
4. the built-in table (:mod:`vllm_kvpad.connector_table`), for the nearest class in
   method resolution order that it knows;
5. nobody. Then the connector is treated as registering, because padding costs
   address space and a silently broken registration costs a day, and as not
   exporting.

So ``class Mine(NixlConnector)`` registers without a word, ``REGISTERS_DEVICE_MEMORY
= False`` on ``Mine`` or on a mixin listed before ``NixlConnector`` wins over the
table, and the same attribute on a mixin listed after it, or on a common root, does
not: the table's word about ``NixlConnector`` is nearer.

This module imports neither vLLM nor torch; :func:`resolve` imports vLLM's connector
factory when called, and does without it where it can.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy

from vllm_kvpad import hookspecs
from vllm_kvpad.config import KvpadConfigError, nearest
from vllm_kvpad.connector_table import (
    BASE_CLASS,
    MULTI_CONNECTOR,
    Row,
    Verdict,
    qualified_name,
    row_of_class,
    row_of_name,
)
from vllm_kvpad.log import get_logger
from vllm_kvpad.time_limit import within

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

logger = get_logger(__name__)

OVERRIDE_KEY = "additional_config.kvpad.registers_device_memory"

TIME_LIMIT_SECONDS = 120.0
"""How long an import or an answer of another package may take. Large libraries on a
slow file system take half a minute; what takes longer waits for something."""


@dataclass(frozen=True)
class ConnectorCapabilities:
    """The answers for one configured connector. Immutable.

    Attributes:
        name: The configured name (``kv_connector``), or None without a connector.
        registers_device_memory: Whether layer regions must each lie in one physical
            allocation.
        source: Where that answer comes from, for people.
        exports_cuda_ipc: Whether the connector needs legacy CUDA IPC handles of the
            cache.
        exports_source: Where that answer comes from.
        declared: False if nobody, the built-in table included, answered the first
            question.
        brings_memory_pool: Why the cache will live in the connector's own memory
            pool, or None if it will not.
        unsupported: Why kvpad cannot serve this connector at all, or None.
        off_on_rocm: Whether the extensible cache is off on ROCm for this connector.
        children: The answers for the children of a ``MultiConnector``, in order.
    """

    name: str | None
    registers_device_memory: bool
    source: str
    exports_cuda_ipc: bool = False
    exports_source: str = ""
    declared: bool = True
    brings_memory_pool: str | None = None
    unsupported: str | None = None
    off_on_rocm: bool = False
    children: tuple[ConnectorCapabilities, ...] = ()

    def reasons_to_step_aside(self, *, rocm: bool) -> tuple[str, ...]:
        """Each reason this connector gives to leave vLLM stock; empty if none.

        Args:
            rocm: Whether the platform is ROCm.
        """
        reasons = []
        if self.exports_cuda_ipc:
            reasons.append(
                f"{self.name} hands the KV cache out through legacy CUDA IPC handles, "
                f"which VMM memory does not have ({self.exports_source})"
            )
        if self.brings_memory_pool:
            reasons.append(
                f"{self.name} brings its own memory pool for the KV cache "
                f"({self.brings_memory_pool})"
            )
        if self.unsupported:
            reasons.append(f"{self.name}: {self.unsupported}")
        if rocm and self.off_on_rocm:
            reasons.append(f"{self.name} on ROCm")
        return tuple(reasons)

    def describe(self) -> str:
        """The first answer and its source in one line, for logs."""
        if self.name is None:
            return "no KV connector"
        verb = "registers" if self.registers_device_memory else "does not register"
        return f"KV connector {self.name} {verb} device memory: {self.source}"


def resolve(
    kv_transfer_config: KVTransferConfig | None,
    *,
    overrides: Mapping[str, bool] | None = None,
) -> ConnectorCapabilities:
    """Say what the configured connector does with the device KV cache.

    The order of precedence is in the module's docstring. A ``MultiConnector``
    registers, exports, or brings a pool if any of its children does, at any depth,
    unless it (that is, a subclass) declares otherwise.

    Args:
        kv_transfer_config: vLLM's; None, or one without ``kv_connector``, means no
            connector, which registers nothing.
        overrides: The operator's map from configured connector name (children
            included) to whether it registers.

    Raises:
        KvpadConfigError: ``overrides`` names a connector that is not configured, or
            the children of a ``MultiConnector`` are not a list of mappings.
        TypeError: A malformed declaration, which names class and attribute, or a
            connector that is not a class.
        RuntimeError: A declaring classmethod raised; names class and attribute, with
            the exception as its cause. Or the connector's module ended the import by
            something that is no Exception, such as SystemExit.
        TimeoutError: An import or a classmethod of the connector took longer than
            :data:`TIME_LIMIT_SECONDS`; names it.
        Exception: What vLLM's factory raises for a connector it cannot load, if the
            built-in table does not know the name either.
    """
    overrides = dict(overrides or {})
    if kv_transfer_config is None or not kv_transfer_config.kv_connector:
        if overrides:
            raise KvpadConfigError(
                f"{OVERRIDE_KEY}: names {_quoted(overrides)}, but no KV connector is "
                "configured"
            )
        return ConnectorCapabilities(
            name=None,
            registers_device_memory=False,
            source="no KV connector is configured",
            exports_source="no KV connector is configured",
        )
    configured = list(_configured_names(kv_transfer_config))
    for name in overrides:
        if name not in configured:
            match = nearest(name, configured)
            hint = f"did you mean {match!r}? " if match else ""
            raise KvpadConfigError(
                f"{OVERRIDE_KEY}: {name!r} is not a configured KV connector; {hint}"
                f"configured: {_quoted(configured)}"
            )
    return _resolve_one(kv_transfer_config, overrides)


def _resolve_one(
    config: KVTransferConfig, overrides: Mapping[str, bool]
) -> ConnectorCapabilities:
    name = config.kv_connector
    assert name is not None
    connector_class = _load_class(config)
    index, row = _nearest_row(connector_class, config)
    children: tuple[ConnectorCapabilities, ...] = ()
    if row is not None and row.wraps_children:
        children = tuple(
            _resolve_one(child, overrides) for child in _child_configs(config)
        )

    registers = _declaration(_REGISTERS, connector_class, config, index)
    if name in overrides:
        registers = _Answer(overrides[name], f"the operator, {OVERRIDE_KEY}")
    elif registers is None:
        registers = _hook(_REGISTERS, connector_class, config)
    exports = _declaration(_EXPORTS, connector_class, config, index)
    if exports is None:
        exports = _hook(_EXPORTS, connector_class, config)

    declared = True
    if registers is None:
        if children:
            registers = _any_child(children, "registers_device_memory", "source")
            declared = all(child.declared for child in children)
        elif row is not None:
            registers = _table(row, row.registers(config))
        else:
            registers = _Answer(True, "undeclared, treated as registering")
            declared = False
            if connector_class is not None:
                _tell_how_to_declare(connector_class)
    if exports is None:
        if children:
            exports = _any_child(children, "exports_cuda_ipc", "exports_source")
        elif row is not None:
            exports = _table(row, row.exports(config))
        else:
            exports = _Answer(False, "undeclared, treated as not exporting")

    return ConnectorCapabilities(
        name=name,
        registers_device_memory=registers.value,
        source=registers.source,
        exports_cuda_ipc=exports.value,
        exports_source=exports.source,
        declared=declared,
        brings_memory_pool=_memory_pool(connector_class, config, index, row)
        or _joined(children, "brings_memory_pool"),
        unsupported=(row.unsupported if row else None)
        or _joined(children, "unsupported"),
        off_on_rocm=bool(row and row.off_on_rocm)
        or any(child.off_on_rocm for child in children),
        children=children,
    )


@dataclass(frozen=True)
class _Answer:
    value: bool
    source: str


@dataclass(frozen=True)
class _Question:
    attribute: str
    hook: str


_REGISTERS = _Question("REGISTERS_DEVICE_MEMORY", "kvpad_registers_device_memory")
_EXPORTS = _Question("EXPORTS_CUDA_IPC", "kvpad_exports_cuda_ipc")


def _load_class(config: KVTransferConfig) -> type | None:
    """The class vLLM will instantiate, or None if only the table can answer.

    A connector of vLLM's own whose library is missing, or a vLLM that does not
    import, is not for kvpad to report: vLLM will. Anything else that fails to load
    raises as in vLLM.
    """
    try:
        return import_connector_class(config)
    except Exception as error:
        if not is_known(config):
            raise
        # vLLM will wait for it, too, and say nothing.
        level = logging.WARNING if isinstance(error, TimeoutError) else logging.DEBUG
        logger.log(
            level,
            "KV connector %s does not load here: %s",
            config.kv_connector,
            str(error),
        )
        return None


def is_known(config: KVTransferConfig) -> bool:
    """Whether the table can answer without the class of the connector."""
    return (
        not config.kv_connector_module_path
        and row_of_name(str(config.kv_connector)) is not None
    )


def import_connector_class(config: KVTransferConfig) -> type:
    """The class that vLLM will instantiate, by vLLM's own factory.

    Raises:
        TimeoutError: Importing it took longer than :data:`TIME_LIMIT_SECONDS`.
        TypeError: What was found is not a class.
        Exception: What importing it raises. What is no ``Exception`` (a module that
            ends the process) becomes a ``RuntimeError``.
    """
    module = config.kv_connector_module_path
    what = f"KV connector {config.kv_connector}"
    what += f" of module {module}" if module else ""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import (
            KVConnectorFactory,
        )

        loaded: object = within(
            TIME_LIMIT_SECONDS,
            f"importing {what}",
            lambda: KVConnectorFactory.get_connector_class(config),
        )
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise RuntimeError(f"importing {what} raised {error!r}") from error
    if not isinstance(loaded, type):
        raise TypeError(f"{what}: expected a class, found {loaded!r}")
    return loaded


def _nearest_row(
    connector_class: type | None, config: KVTransferConfig
) -> tuple[int, Row | None]:
    """Index in the MRO of the nearest class the table knows, and its row.

    Without a class the row is found by the configured name; without a row the index
    is that of the end of the MRO.
    """
    if connector_class is None:
        return 0, row_of_name(str(config.kv_connector))
    for index, cls in enumerate(connector_class.__mro__):
        row = row_of_class(cls)
        if row is not None:
            return index, row
    return len(connector_class.__mro__), None


def _declaration(
    question: _Question,
    connector_class: type | None,
    config: KVTransferConfig,
    row_index: int,
) -> _Answer | None:
    """The class's own word, unless the table knows a class nearer than it."""
    if connector_class is None:
        return None
    for cls in connector_class.__mro__[: row_index + 1]:
        if question.attribute in vars(cls):
            value, spelling = _evaluate(question, cls, connector_class, config)
            source = f"{connector_class.__name__}.{question.attribute}{spelling}"
            if cls is not connector_class:
                source += f", inherited from {qualified_name(cls)}"
            return _Answer(value, source)
    return None


def _evaluate(
    question: _Question, cls: type, connector_class: type, config: KVTransferConfig
) -> tuple[bool, str]:
    """The value of a declaration, and how to spell it in a source."""
    raw = vars(cls)[question.attribute]
    where = f"{qualified_name(cls)}.{question.attribute}"
    expected = "expected a bool, or a classmethod that takes the KVTransferConfig"
    if type(raw) is bool:
        return raw, f" = {raw}"
    if not isinstance(raw, classmethod):
        raise TypeError(f"{where}: {expected}, found {raw!r} ({type(raw).__name__})")
    try:
        bound = raw.__get__(None, connector_class)
        inspect.signature(bound).bind(config)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{where}: {expected}, found a classmethod that cannot be called with one "
            f"({error})"
        ) from None
    try:
        value = within(TIME_LIMIT_SECONDS, where, lambda: bound(config))
    except (KeyboardInterrupt, TimeoutError):
        raise
    except BaseException as error:
        raise RuntimeError(
            f"{where} raised {type(error).__name__}: {error}; it must return a bool "
            "for every KVTransferConfig"
        ) from error
    if inspect.iscoroutine(value):
        value.close()  # else Python warns of it some time later
    if type(value) is not bool:
        raise TypeError(
            f"{where}: expected it to return a bool, it returned {value!r} "
            f"({type(value).__name__})"
        )
    return value, "(...)"


@functools.cache
def plugin_manager() -> pluggy.PluginManager:
    """The third-party packages that answer, loaded from their entry points once.

    A plugin that cannot be loaded in time, has an unknown hook, or one with arguments
    that the hook does not have, is logged with its name and traceback and left out.
    """
    manager = _new_manager()
    for entry_point in importlib.metadata.entry_points(group=hookspecs.PROJECT_NAME):
        name = entry_point.name
        try:
            if entry_point.dist is not None:
                name += f" ({entry_point.dist.name} {entry_point.dist.version})"
            plugin = within(
                TIME_LIMIT_SECONDS,
                f"importing {entry_point.value}, entry point {entry_point.name},",
                entry_point.load,
            )
            # A rehearsal, because pluggy keeps the hooks it registered before the
            # one it rejects.
            rehearsal = _new_manager()
            rehearsal.register(plugin)
            rehearsal.check_pending()
            if not manager.is_registered(plugin):
                manager.register(plugin, name=name)
        except KeyboardInterrupt:
            raise
        except BaseException:  # SystemExit, a panic of a Rust extension, ...
            logger.exception(
                "kvpad ignores plugin %s (entry point %s): it does not load",
                name,
                entry_point.value,
            )
    return manager


def _new_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT_NAME)
    manager.add_hookspecs(hookspecs)
    return manager


def _hook(
    question: _Question, connector_class: type | None, config: KVTransferConfig
) -> _Answer | None:
    """The first third-party answer; one broken plugin does not silence the next."""
    if connector_class is None:
        return None
    manager = plugin_manager()
    hook = getattr(manager.hook, question.hook)
    # pluggy calls the implementation registered last first, and keeps them so.
    for implementation in reversed(hook.get_hookimpls()):
        others = [p for p in manager.get_plugins() if p is not implementation.plugin]
        try:
            value = within(
                TIME_LIMIT_SECONDS,
                f"plugin {implementation.plugin_name}",
                functools.partial(
                    manager.subset_hook_caller(question.hook, others),
                    connector_class=connector_class,
                    kv_transfer_config=config,
                ),
            )
            if value is None:
                continue
            if type(value) is not bool:
                raise TypeError(
                    f"expected a bool or None, it returned {value!r} "
                    f"({type(value).__name__})"
                )
        except KeyboardInterrupt:
            raise
        except BaseException:
            logger.exception(
                "kvpad ignores plugin %s: its %s failed for %s",
                implementation.plugin_name,
                question.hook,
                qualified_name(connector_class),
            )
            continue
        return _Answer(value, f"plugin {implementation.plugin_name}")
    return None


def _table(row: Row, verdict: Verdict) -> _Answer:
    return _Answer(verdict.value, f"built-in table, {row.name}: {verdict.why}")


def _any_child(
    children: tuple[ConnectorCapabilities, ...], value: str, source: str
) -> _Answer:
    """Any child decides; the source names those that do, or else all."""
    yes = [child for child in children if getattr(child, value)]
    sources = [f"{child.name}: {getattr(child, source)}" for child in yes or children]
    return _Answer(bool(yes), "; ".join(sources))


def _joined(children: tuple[ConnectorCapabilities, ...], reason: str) -> str | None:
    """The reasons that children give, each with the child's name; None if none do."""
    named = [(child.name, getattr(child, reason)) for child in children]
    return "; ".join(f"{name}: {why}" for name, why in named if why) or None


def _memory_pool(
    connector_class: type | None,
    config: KVTransferConfig,
    row_index: int,
    row: Row | None,
) -> str | None:
    """Why ``get_mem_pool_context`` will return a pool, or None."""
    nearer = connector_class.__mro__[:row_index] if connector_class else ()
    for cls in nearer:
        # An override this side of the table's class may return a pool; nothing short
        # of creating the connector can tell.
        if "get_mem_pool_context" in vars(cls) and qualified_name(cls) != BASE_CLASS:
            return f"{qualified_name(cls)} overrides get_mem_pool_context"
    return row.memory_pool(config) if row else None


def _child_configs(config: KVTransferConfig) -> Iterator[KVTransferConfig]:
    """The children of a ``MultiConnector``, as it builds them.

    Each is a mapping of ``KVTransferConfig`` arguments; ``engine_id`` defaults to
    the parent's.
    """
    where = f"{MULTI_CONNECTOR}: kv_connector_extra_config['connectors']"
    children: Any = (config.kv_connector_extra_config or {}).get("connectors", ())
    if not isinstance(children, (list, tuple)):
        raise KvpadConfigError(f"{where}: expected a list, found {children!r}")
    for child in children:
        if not isinstance(child, Mapping):
            raise KvpadConfigError(f"{where}: expected mappings, found {child!r}")
        yield type(config)(**{"engine_id": config.engine_id, **child})


def _configured_names(config: KVTransferConfig) -> Iterator[str]:
    yield str(config.kv_connector)
    row = _nearest_row(_load_class(config), config)[1]
    if row is not None and row.wraps_children:
        for child in _child_configs(config):
            yield from _configured_names(child)


@functools.cache
def _tell_how_to_declare(connector_class: type) -> None:
    """Once per class and process: the declaration that is missing."""
    logger.info(
        "KV connector %s does not say whether it registers device memory; kvpad "
        "treats it as registering. To declare it:\n"
        "class %s(...):\n"
        "    REGISTERS_DEVICE_MEMORY = True  # False if it only copies blocks",
        qualified_name(connector_class),
        connector_class.__name__,
    )


def _quoted(names: Any) -> str:
    return ", ".join(repr(name) for name in names)
