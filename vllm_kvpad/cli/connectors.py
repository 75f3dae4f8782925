"""``vllm-kvpad connectors``: what each KV connector does with the cache, says who."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any

import pydantic
import typer
from rich.table import Table

from vllm_kvpad.capabilities import (
    ConnectorCapabilities,
    import_connector_class,
    is_known,
    resolve,
)
from vllm_kvpad.cli import output
from vllm_kvpad.config import KvpadConfig, KvpadConfigError
from vllm_kvpad.connector_table import BASE_CLASS, ROWS, qualified_name


@dataclass(frozen=True)
class Answer:
    """What is known about one connector.

    Attributes:
        name: The configured name.
        capabilities: None if nobody can answer; ``error`` says why.
        load_error: Why its class cannot be imported here, or None.
        error: Why there are no capabilities, or None.
        mro: Qualified names from the class down to vLLM's base class.
    """

    name: str
    capabilities: ConnectorCapabilities | None = None
    load_error: str | None = None
    error: str | None = None
    mro: tuple[str, ...] = ()


def connectors(
    kv_transfer_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON", help="As vLLM's: the connector that would be configured."
        ),
    ] = None,
    additional_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON", help="As vLLM's: kvpad's overrides are read from it."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> None:
    """What each KV connector does with the KV cache, and who says so.

    RDMA: it registers device memory with a transport, so that each layer must lie in
    one physical allocation. IPC: it exports the cache through CUDA IPC handles, so that
    kvpad steps aside. Status 1 if the connector that would be configured has no answer
    or makes kvpad step aside.
    """
    with output.stdout_kept_clean():
        overrides = _overrides(additional_config)
        if overrides and kv_transfer_config is None:
            output.fail(
                "--additional-config without --kv-transfer-config: there is no "
                "connector to override"
            )
        configured = None
        if kv_transfer_config is not None:
            configured = _configured(_parse(kv_transfer_config), overrides)
        known = [_ask(_config(kv_connector=name)) for name in _names()]
        rocm = _is_rocm()
        version = _vllm_version()
    if as_json:
        output.print_json(
            {
                "schema": 1,
                "vllm": version,
                "configured": configured and _as_json(configured, rocm),
                "connectors": [_as_json(answer, rocm) for answer in known],
            }
        )
    else:
        _print(configured, known, version, rocm)
    if configured is not None and (
        configured.capabilities is None
        or configured.capabilities.reasons_to_step_aside(rocm=rocm)
    ):
        raise typer.Exit(1)


# --- What vLLM has -------------------------------------------------------------------


def _vllm_version() -> str | None:
    if importlib.util.find_spec("vllm") is None:
        return None
    try:
        import vllm
    except Exception as error:
        return f"does not import: {output.describe(error)}"
    version: str = vllm.__version__
    return version


def _is_rocm() -> bool:
    try:
        from vllm.platforms import current_platform
    except Exception:  # a vLLM that does not import is reported with its version
        return False
    return bool(current_platform.is_rocm())


def _names() -> list[str]:
    """The names of the installed vLLM's factory, or of the built-in table."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import (
            KVConnectorFactory,
        )
    except Exception:  # reported with the version
        names = {name for row in ROWS for name in (row.name, *row.registered_names)}
        return sorted(name for name in names if "." not in name)
    return sorted(KVConnectorFactory._registry)


def _config(**fields: Any) -> Any:
    """A ``KVTransferConfig``, or what stands for one without vLLM.

    Raises:
        ValueError: vLLM does not accept the fields (pydantic's error is one).
    """
    fields = {"kv_role": "kv_both", **fields}
    try:
        from vllm.config import KVTransferConfig
    except Exception:  # reported with the version
        return _Config(**fields)
    return KVTransferConfig(**fields)


class _Config(SimpleNamespace):
    """The fields of ``KVTransferConfig`` that :mod:`vllm_kvpad.capabilities` reads."""

    def __init__(self, **fields: Any) -> None:
        defaults: dict[str, Any] = {
            "kv_connector": None,
            "kv_connector_module_path": None,
            "kv_connector_extra_config": {},
            "kv_buffer_device": "cuda",
            "kv_role": None,
            "engine_id": None,
        }
        super().__init__(**{**defaults, **fields})


# --- Answers -------------------------------------------------------------------------


def _json(option: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        output.fail(f"{option} is not JSON: {error}")


def _parse(text: str) -> Any:
    fields = _json("--kv-transfer-config", text)
    if not isinstance(fields, Mapping):
        output.fail("--kv-transfer-config: expected a JSON object, as vLLM does")
    try:
        return _config(**fields)
    except (pydantic.ValidationError, TypeError, ValueError) as error:
        output.fail(
            f"--kv-transfer-config: vLLM does not accept it: {output.describe(error)}"
        )


def _overrides(text: str | None) -> dict[str, bool]:
    if text is None:
        return {}
    fields = _json("--additional-config", text)
    try:
        section = KvpadConfig.from_additional_config(fields)
    except KvpadConfigError as error:
        output.fail(str(error))
    return dict(section.registers_device_memory)


def _configured(config: Any, overrides: dict[str, bool]) -> Answer:
    if not config.kv_connector:
        output.fail("--kv-transfer-config names no kv_connector")
    try:
        return _ask(config, overrides)
    except KvpadConfigError as error:
        output.fail(str(error))


def _ask(config: Any, overrides: dict[str, bool] | None = None) -> Answer:
    """Everything about one configured connector; what fails becomes a text.

    Raises:
        KvpadConfigError: The operator's overrides or the children are wrong.
    """
    name = str(config.kv_connector)
    load_error: str | None = None
    mro: tuple[str, ...] = ()
    try:
        mro = _mro(import_connector_class(config))
    except Exception as error:
        # Any: it is the import of somebody's module.
        load_error = output.describe(error)
        if not is_known(config):
            return Answer(name, None, load_error, load_error, mro)
    try:
        capabilities = resolve(config, overrides=overrides)
    except KvpadConfigError:
        raise
    except Exception as error:
        return Answer(name, None, load_error, output.describe(error), mro)
    return Answer(name, capabilities, load_error, None, mro)


def _mro(cls: type) -> tuple[str, ...]:
    names = [qualified_name(each) for each in cls.__mro__]
    end = names.index(BASE_CLASS) + 1 if BASE_CLASS in names else len(names)
    return tuple(names[:end])


# --- Output --------------------------------------------------------------------------


def _as_json(answer: Answer, rocm: bool) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "name": answer.name,
        "class": answer.mro[0] if answer.mro else None,
        "mro": list(answer.mro),
        "load_error": answer.load_error,
        "error": answer.error,
        "capabilities": None,
        "reasons_to_step_aside": [],
    }
    if answer.capabilities is not None:
        shown["capabilities"] = dataclasses.asdict(answer.capabilities)
        shown["reasons_to_step_aside"] = list(
            answer.capabilities.reasons_to_step_aside(rocm=rocm)
        )
    return shown


def _print(
    configured: Answer | None, known: list[Answer], version: str | None, rocm: bool
) -> None:
    out = output.console()
    if configured is not None:
        made = _table("configured")
        for depth, each in _tree(configured.capabilities):
            _add(made, "  " * depth + str(each.name), each)
        if configured.capabilities is None:
            made.add_row(configured.name, "?", "?", f"no answer: {configured.error}")
        if configured.load_error and configured.capabilities is not None:
            made.add_row("", "", "", _not_loaded(configured.load_error))
        out.print(made)
        if configured.capabilities is not None:
            for reason in configured.capabilities.reasons_to_step_aside(rocm=rocm):
                out.print(f"kvpad steps aside: {reason}")
        out.print()
    where = f"of vLLM {version}" if version else "of kvpad's table (no vLLM here)"
    out.print(f"KV connectors {where}", style="bold", soft_wrap=True)
    made = _table("")
    for answer in known:
        if answer.capabilities is None:
            made.add_row(answer.name, "?", "?", f"no answer: {answer.error}")
            continue
        _add(made, answer.name, answer.capabilities)
        if answer.load_error and version:
            made.add_row("", "", "", _not_loaded(answer.load_error))
    out.print(made)


def _table(title: str) -> Table:
    made = output.table(title, "RDMA", "IPC", "says who")
    made.show_header = True
    return made


def _add(made: Table, name: str, capabilities: ConnectorCapabilities) -> None:
    # Of two answers the one that matters more: it makes kvpad step aside.
    source = (
        capabilities.exports_source
        if capabilities.exports_cuda_ipc
        else capabilities.source
    )
    if capabilities.unsupported:
        source = f"not supported: {capabilities.unsupported}"
    if capabilities.brings_memory_pool:
        source = f"brings a memory pool: {capabilities.brings_memory_pool}"
    # A row of the table is named where it is not the connector's own.
    source = source.replace(f"built-in table, {capabilities.name}: ", "table: ")
    source = source.replace("built-in table, ", "table, ")
    made.add_row(
        name,
        "yes" if capabilities.registers_device_memory else "no",
        "yes" if capabilities.exports_cuda_ipc else "no",
        source,
    )


def _tree(
    capabilities: ConnectorCapabilities | None, depth: int = 0
) -> Iterator[tuple[int, ConnectorCapabilities]]:
    if capabilities is None:
        return
    yield depth, capabilities
    for child in capabilities.children:
        yield from _tree(child, depth + 1)


def _not_loaded(error: str) -> str:
    return f"(its class does not load here: {error})"
