"""What a user can tell kvpad: one key of vLLM's ``--additional-config``.

``--additional-config '{"kvpad": {"strict": true}}'`` reaches every vLLM process
as ``vllm_config.additional_config``; :meth:`KvpadConfig.from_additional_config`
reads it. One environment variable, ``VLLM_KVPAD_DISABLE``, is for people who
cannot change arguments (:func:`disabled_by_environment`).

Wrong input is a :class:`KvpadConfigError` that names the key, what was found and
what was expected, raised before anything is patched or allocated.
"""

from __future__ import annotations

import difflib
import mmap
import os
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    ValidationError,
    field_validator,
)

ADDITIONAL_CONFIG_KEY = "kvpad"
"""The key of vLLM's ``additional_config`` that belongs to kvpad."""

DISABLE_VARIABLE = "VLLM_KVPAD_DISABLE"
"""Environment variable that turns kvpad off; see :func:`disabled_by_environment`."""

DEFAULT_MARGIN_BYTES = 150 * 2**20
"""Physical device memory kvpad leaves unused, in bytes.

The same 150 MiB that vLLM's own suggestion for ``--kv-cache-memory-bytes`` keeps
back: allocations after start-up (a longer NCCL channel, a lazily loaded kernel)
still find something.
"""

_MOST_GRANULE_BYTES = 1 << 30

_SWITCH_WORDS = {"1": True, "true": True, "yes": True, "on": True}
_SWITCH_WORDS |= {"": False, "0": False, "false": False, "no": False, "off": False}


class KvpadConfigError(ValueError):
    """The configuration is wrong; the message says what to change."""


class KvpadConfig(BaseModel):
    """The value of ``additional_config["kvpad"]``. Immutable.

    Attributes:
        enabled: False leaves vLLM exactly as stock.
        strict: True turns each reason to step aside into a start-up error.
        registers_device_memory: The operator's override of what a KV connector
            declares, by configured connector name (children of a
            ``MultiConnector`` included): does it register the device KV cache
            with a transport?
        margin_bytes: Physical device memory left unused when the KV cache is
            sized by measuring, in bytes. It does not apply where the size is
            given (CPU engines, ``--kv-cache-memory-bytes``,
            ``--num-gpu-blocks-override``).
        host_granule_bytes: Granule of the host driver in bytes, a power of two
            and a whole number of OS pages, at most 1 GiB (each layer of a cache
            that is registered takes whole granules); None for the driver's default.
            Devices with a real granule ignore it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: StrictBool = True
    strict: StrictBool = False
    registers_device_memory: dict[str, StrictBool] = Field(default_factory=dict)
    margin_bytes: Annotated[StrictInt, Field(ge=0)] = DEFAULT_MARGIN_BYTES
    host_granule_bytes: StrictInt | None = None

    @field_validator("host_granule_bytes")
    @classmethod
    def _is_a_granule(cls, value: int | None) -> int | None:
        if value is None:
            return None
        if value <= 0 or value & (value - 1):
            raise ValueError("a power of two, in bytes")
        if value % mmap.PAGESIZE:
            raise ValueError(
                f"a whole number of this machine's pages of {mmap.PAGESIZE} bytes"
            )
        if value > _MOST_GRANULE_BYTES:
            raise ValueError(f"at most {_MOST_GRANULE_BYTES} bytes (1 GiB)")
        return value

    @classmethod
    def from_additional_config(cls, additional_config: object) -> KvpadConfig:
        """Read the configuration out of ``vllm_config.additional_config``.

        Args:
            additional_config: A mapping (what ``--additional-config`` gives), or
                the platform's own object (vLLM allows any hashable one), in which
                case its ``kvpad`` attribute is used if it has one; None and a
                missing key mean the defaults.

        Raises:
            KvpadConfigError: An unknown key (the message names the nearest valid
                one), a wrong type or a value out of range; every problem is
                listed, one a line.
        """
        if isinstance(additional_config, Mapping):
            section = additional_config.get(ADDITIONAL_CONFIG_KEY)
        else:
            section = getattr(additional_config, ADDITIONAL_CONFIG_KEY, None)
        if section is None:
            return cls()
        if isinstance(section, cls):
            return section
        if not isinstance(section, Mapping):
            raise KvpadConfigError(
                f"additional_config.{ADDITIONAL_CONFIG_KEY}: expected a mapping such as"
                f' {{"strict": true}}, found {_shown(section)}'
            )
        try:
            return cls.model_validate(dict(section))
        except ValidationError as error:
            lines = [_explain(cls, problem) for problem in error.errors()]
            # The pydantic dump would repeat the same facts less readably.
            raise KvpadConfigError("\n".join(lines)) from None


def misspelt_key(additional_config: object) -> str | None:
    """A key of ``additional_config`` that was probably meant to be ``kvpad``.

    Other keys belong to others, so an unknown one is no error; but one that differs
    from ``kvpad`` by a slip would otherwise have no effect and no trace. None if
    ``kvpad`` itself is there, or nothing is like it.
    """
    if not isinstance(additional_config, Mapping):
        return None
    keys = [key for key in additional_config if isinstance(key, str)]
    if ADDITIONAL_CONFIG_KEY in keys:
        return None
    for key in keys:
        letters = "".join(filter(str.isalnum, key.casefold()))
        likeness = difflib.SequenceMatcher(None, letters, ADDITIONAL_CONFIG_KEY)
        # One letter dropped, doubled, changed or swapped; or a prefix ("vllm_kvpad").
        if likeness.ratio() >= 0.8 or ADDITIONAL_CONFIG_KEY in letters:
            return key
    return None


def disabled_by_environment(environ: Mapping[str, str] | None = None) -> bool:
    """Whether ``VLLM_KVPAD_DISABLE`` turns kvpad off.

    ``1``, ``true``, ``yes`` and ``on`` (any case) turn it off; unset, empty, ``0``,
    ``false``, ``no`` and ``off`` do not.

    Args:
        environ: The environment; the process's own if None.

    Raises:
        KvpadConfigError: Any other value. Guessing would either leave on what
            somebody meant to turn off, or the reverse, without a trace.
    """
    value = (os.environ if environ is None else environ).get(DISABLE_VARIABLE, "")
    try:
        return _SWITCH_WORDS[value.strip().lower()]
    except KeyError:
        raise KvpadConfigError(
            f"{DISABLE_VARIABLE}: expected 1 (kvpad off) or 0 (kvpad on), "
            f"found {value!r}"
        ) from None


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The entry of ``valid`` most like ``name``, or None if nothing is close."""
    by_folded = {candidate.casefold(): candidate for candidate in valid}
    matches = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.5)
    return by_folded[matches[0]] if matches else None


def _explain(model: type[BaseModel], problem: Any) -> str:
    """One line for one of pydantic's error dicts."""
    location = problem["loc"]
    path = ".".join(("additional_config", ADDITIONAL_CONFIG_KEY, *map(str, location)))
    if problem["type"] == "extra_forbidden":
        key = str(location[-1])
        match = nearest(key, model.model_fields)
        hint = f"did you mean {match!r}? " if match else ""
        return f"{path}: unknown key; {hint}valid keys: {', '.join(model.model_fields)}"
    found = _shown(problem["input"])
    if problem["type"] == "value_error":
        return f"{path}: expected {problem['ctx']['error']}, found {found}"
    expected = {
        "bool_type": "true or false",
        "int_type": "a whole number",
        "dict_type": 'a mapping such as {"NixlConnector": true}',
        "greater_than_equal": "a number of bytes, at least 0",
    }.get(problem["type"], problem["msg"])
    return f"{path}: expected {expected}, found {found}"


def _shown(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"
