"""The operator's configuration: what is accepted, and what an error tells them."""

from __future__ import annotations

import mmap

import pytest

from vllm_kvpad.config import (
    DEFAULT_MARGIN_BYTES,
    KvpadConfig,
    KvpadConfigError,
    disabled_by_environment,
    misspelt_key,
)


def read(section: object) -> KvpadConfig:
    return KvpadConfig.from_additional_config({"kvpad": section})


class SupportsHash:
    """What vLLM accepts in place of a dict: an object with ``compute_hash``."""

    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)

    def compute_hash(self) -> str:
        return "0"


@pytest.mark.parametrize(
    "additional_config",
    [None, {}, {"other_plugin": {"enabled": False}}, {"kvpad": None}, SupportsHash()],
    ids=["none", "empty", "another plugin's", "null", "object without kvpad"],
)
def test_without_a_kvpad_section_the_defaults_hold(additional_config: object) -> None:
    config = KvpadConfig.from_additional_config(additional_config)
    assert config.enabled
    assert not config.strict
    assert config.registers_device_memory == {}
    assert config.margin_bytes == DEFAULT_MARGIN_BYTES
    assert config.host_granule_bytes is None


def test_every_key_is_read() -> None:
    config = read(
        {
            "enabled": False,
            "strict": True,
            "registers_device_memory": {"AcmeConnector": False},
            "margin_bytes": 0,
            "host_granule_bytes": 65536,
        }
    )
    assert config == KvpadConfig(
        enabled=False,
        strict=True,
        registers_device_memory={"AcmeConnector": False},
        margin_bytes=0,
        host_granule_bytes=65536,
    )


@pytest.mark.parametrize("section", [{"strict": True}, KvpadConfig(strict=True)])
def test_an_object_in_place_of_the_dict_is_read_by_attribute(section: object) -> None:
    assert KvpadConfig.from_additional_config(SupportsHash(kvpad=section)).strict


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("strct", "strict"),
        ("Enabled", "enabled"),
        ("margin", "margin_bytes"),
        ("host_granule", "host_granule_bytes"),
        ("register_device_memory", "registers_device_memory"),
    ],
)
def test_an_unknown_key_names_the_nearest_valid_one(typo: str, meant: str) -> None:
    with pytest.raises(KvpadConfigError, match=rf"kvpad\.{typo}: .*'{meant}'"):
        read({typo: True})


def test_an_unknown_key_like_nothing_else_lists_the_valid_ones() -> None:
    with pytest.raises(KvpadConfigError) as error:
        read({"zzz": 1})
    assert "did you mean" not in str(error.value)
    assert all(key in str(error.value) for key in KvpadConfig.model_fields)


@pytest.mark.parametrize(
    ("section", "path", "expected", "found"),
    [
        (5, "kvpad", "a mapping", "5 (int)"),
        ([], "kvpad", "a mapping", "[] (list)"),
        ({"enabled": "yes"}, "kvpad.enabled", "true or false", "'yes' (str)"),
        ({"strict": 1}, "kvpad.strict", "true or false", "1 (int)"),
        ({"margin_bytes": -1}, "kvpad.margin_bytes", "at least 0", "-1 (int)"),
        ({"margin_bytes": 1.5}, "kvpad.margin_bytes", "a whole number", "1.5 (float)"),
        ({"margin_bytes": True}, "kvpad.margin_bytes", "a whole number", "True (bool)"),
        ({"margin_bytes": "1G"}, "kvpad.margin_bytes", "a whole number", "'1G' (str)"),
        (
            {"registers_device_memory": ["A"]},
            "kvpad.registers_device_memory",
            "a mapping",
            "['A'] (list)",
        ),
        (
            {"registers_device_memory": {"A": "no"}},
            "kvpad.registers_device_memory.A",
            "true or false",
            "'no' (str)",
        ),
        (
            {"host_granule_bytes": 3 * mmap.PAGESIZE},
            "kvpad.host_granule_bytes",
            "a power of two",
            f"{3 * mmap.PAGESIZE} (int)",
        ),
        (
            {"host_granule_bytes": 1 << 31},
            "kvpad.host_granule_bytes",
            "at most 1073741824 bytes",
            f"{1 << 31} (int)",
        ),
        (
            {"host_granule_bytes": 0},
            "kvpad.host_granule_bytes",
            "a power of two",
            "0 (int)",
        ),
        (
            {"host_granule_bytes": mmap.PAGESIZE // 2},
            "kvpad.host_granule_bytes",
            f"pages of {mmap.PAGESIZE} bytes",
            f"{mmap.PAGESIZE // 2} (int)",
        ),
    ],
)
def test_a_wrong_value_says_where_what_was_expected_and_what_was_found(
    section: object, path: str, expected: str, found: str
) -> None:
    with pytest.raises(KvpadConfigError) as error:
        read(section)
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"additional_config.{path}: expected ")
    assert expected in line
    assert line.endswith(f"found {found}")


def test_every_problem_is_reported_at_once_one_a_line() -> None:
    with pytest.raises(KvpadConfigError) as error:
        read({"strct": True, "enabled": 0, "margin_bytes": -5})
    lines = str(error.value).splitlines()
    assert {line.split(":")[0].rsplit(".", 1)[1] for line in lines} == {
        "strct",
        "enabled",
        "margin_bytes",
    }
    assert "pydantic" not in str(error.value)


def test_a_configuration_error_is_a_value_error() -> None:
    # vLLM's argument handling turns ValueErrors into messages for the user.
    assert issubclass(KvpadConfigError, ValueError)


def test_a_configuration_cannot_be_changed_after_validation() -> None:
    with pytest.raises(ValueError, match="frozen"):
        read({}).strict = True  # type: ignore[misc]


@pytest.mark.parametrize("value", ["1", "true", "True", "YES", "on", " 1 "])
def test_the_variable_turns_kvpad_off(value: str) -> None:
    assert disabled_by_environment({"VLLM_KVPAD_DISABLE": value})


@pytest.mark.parametrize(
    "environ", [{}] + [{"VLLM_KVPAD_DISABLE": v} for v in ("", "0", "false", "No")]
)
def test_the_variable_leaves_kvpad_on(environ: dict[str, str]) -> None:
    assert not disabled_by_environment(environ)


def test_an_ambiguous_variable_is_an_error_not_a_guess() -> None:
    with pytest.raises(KvpadConfigError, match=r"VLLM_KVPAD_DISABLE: .*'maybe'"):
        disabled_by_environment({"VLLM_KVPAD_DISABLE": "maybe"})


def test_the_process_environment_is_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_KVPAD_DISABLE", "1")
    assert disabled_by_environment()
    monkeypatch.delenv("VLLM_KVPAD_DISABLE")
    assert not disabled_by_environment()


# A key beside it that was meant to be it.


@pytest.mark.parametrize(
    "key",
    ["kvapd", "kvpd", "kpad", "kvpadd", "kvpda", "KVPAD", "kv-pad", "vllm_kvpad"],
)
def test_a_slip_in_the_key_itself_is_noticed(key: str) -> None:
    assert misspelt_key({"other": 1, key: {"strict": True}}) == key


@pytest.mark.parametrize(
    "additional_config",
    [
        None,
        {},
        {"kvpad": {}},
        {"kvpad": {}, "kvapd": {}},
        {"kvcached": {}, "kv": 1, "ascend_scheduler_config": {}, 3: 4},
        object(),
    ],
)
def test_what_belongs_to_others_is_left_to_them(additional_config: object) -> None:
    assert misspelt_key(additional_config) is None
