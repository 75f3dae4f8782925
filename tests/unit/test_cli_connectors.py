"""``vllm-kvpad connectors``: every connector, what it does, and who says so."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("typer")

from cli_programs import assert_fits_a_screen, assert_one_line_of_error, run
from typer.testing import CliRunner

from vllm_kvpad import capabilities
from vllm_kvpad.cli import app

NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"


def connectors(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["connectors", *arguments])


def answer(*arguments: str, status: int = 0) -> dict[str, Any]:
    done = connectors(*arguments, "--json")
    assert done.exit_code == status, done.output
    parsed: dict[str, Any] = json.loads(done.stdout)
    assert parsed["schema"] == 1
    return parsed


def configured(status: int = 0, *more: str, **fields: Any) -> dict[str, Any]:
    config = json.dumps({"kv_role": "kv_both", **fields})
    found: dict[str, Any] = answer(
        "--kv-transfer-config", config, *more, status=status
    )["configured"]
    return found


@pytest.fixture
def out_of_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of connectors that are not vLLM's."""
    (tmp_path / "author_of_connectors.py").write_text(
        f"from {NIXL} import NixlConnector\n"
        "from vllm.distributed.kv_transfer.kv_connector.v1.base import (\n"
        "    KVConnectorBase_V1)\n"
        "class _Base(KVConnectorBase_V1):\n"
        "    def __init__(self, vllm_config, role, kv_cache_config): ...\n"
        "class Copies(_Base):\n"
        "    REGISTERS_DEVICE_MEMORY = False\n"
        "class Quiet(_Base): ...\n"
        "class Mine(NixlConnector): ...\n"
        "class Wrong(_Base):\n"
        "    REGISTERS_DEVICE_MEMORY = 'yes'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield "author_of_connectors"
    sys.modules.pop("author_of_connectors", None)


def test_every_connector_of_the_factory_is_listed_with_its_source() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    listed = answer()["connectors"]
    assert [each["name"] for each in listed] == sorted(KVConnectorFactory._registry)
    for each in listed:
        assert each["capabilities"]["source"].startswith("built-in table"), each
        # A class that loads here is shown with the classes the answer is looked up in.
        assert (each["load_error"] is None) == bool(each["mro"])
    by_name = {each["name"]: each["capabilities"] for each in listed}
    assert by_name["NixlConnector"]["registers_device_memory"]
    assert not by_name["OffloadingConnector"]["registers_device_memory"]
    assert by_name["FlexKVConnectorV1"]["exports_cuda_ipc"]


def test_a_connector_that_does_not_import_is_listed_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"
    monkeypatch.setitem(sys.modules, module, None)
    (found,) = [
        each for each in answer()["connectors"] if each["name"] == "OffloadingConnector"
    ]
    assert module in found["load_error"]
    assert found["capabilities"]["source"].startswith("built-in table")
    assert "does not load here" in connectors().stdout


def test_the_screen_fits() -> None:
    done = connectors()
    assert_fits_a_screen(done.stdout)
    assert "NixlConnector" in done.stdout


def test_a_subclass_is_answered_along_its_bases(out_of_tree: str) -> None:
    found = configured(kv_connector="Mine", kv_connector_module_path=out_of_tree)
    assert found["capabilities"]["registers_device_memory"]
    assert "NixlPullConnector" in found["capabilities"]["source"]
    assert found["mro"][0] == f"{out_of_tree}.Mine"
    assert any(name.endswith("NixlPullConnector") for name in found["mro"])
    assert found["mro"][-1].endswith("KVConnectorBase_V1")


def test_a_declaration_and_its_absence_show(out_of_tree: str) -> None:
    copies = configured(kv_connector="Copies", kv_connector_module_path=out_of_tree)
    assert not copies["capabilities"]["registers_device_memory"]
    assert copies["capabilities"]["source"] == "Copies.REGISTERS_DEVICE_MEMORY = False"
    quiet = configured(kv_connector="Quiet", kv_connector_module_path=out_of_tree)
    assert quiet["capabilities"]["registers_device_memory"]
    assert not quiet["capabilities"]["declared"]


def test_the_operator_has_the_last_word() -> None:
    found = configured(
        0,
        "--additional-config",
        '{"kvpad": {"registers_device_memory": {"NixlConnector": false}}}',
        kv_connector="NixlConnector",
    )
    assert not found["capabilities"]["registers_device_memory"]
    assert found["capabilities"]["source"].startswith("the operator")


def test_children_are_shown_and_one_that_exports_ends_in_status_1() -> None:
    children = [
        {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
        {"kv_connector": "FlexKVConnectorV1", "kv_role": "kv_both"},
    ]
    fields = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": children},
    }
    found = configured(1, **fields)
    shown = found["capabilities"]["children"]
    assert [each["name"] for each in shown] == ["NixlConnector", "FlexKVConnectorV1"]
    (reason,) = found["reasons_to_step_aside"]
    assert "FlexKV" in reason
    config = json.dumps({"kv_role": "kv_both", **fields})
    done = connectors("--kv-transfer-config", config)
    assert done.exit_code == 1
    assert_fits_a_screen(done.stdout)
    assert "  NixlConnector" in done.stdout
    assert "kvpad steps aside" in done.stdout


@pytest.mark.parametrize(
    ("name", "words"),
    [("Wrong", "Wrong.REGISTERS_DEVICE_MEMORY"), ("Absent", "Absent not found")],
)
def test_a_connector_without_an_answer_is_shown_with_the_reason(
    out_of_tree: str, name: str, words: str
) -> None:
    found = configured(1, kv_connector=name, kv_connector_module_path=out_of_tree)
    assert found["capabilities"] is None
    assert words in found["error"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kv-transfer-config", "{"], "not JSON"),
        (["--kv-transfer-config", "[]"], "expected a JSON object"),
        (["--kv-transfer-config", "{}"], "names no kv_connector"),
        (
            ["--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_rol": 1}'],
            "vLLM does not accept it",
        ),
        (["--additional-config", "nonsense"], "not JSON"),
        (["--additional-config", '{"kvpad": {"strictt": true}}'], "'strict'"),
        (
            [
                "--additional-config",
                '{"kvpad": {"registers_device_memory": {"X": true}}}',
            ],
            "without --kv-transfer-config",
        ),
        (
            [
                *("--kv-transfer-config", '{"kv_connector": "NixlConnector",'),
                *("--additional-config", "{}"),
            ],
            "not JSON",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], words: str) -> None:
    done = connectors(*arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert words in line


def test_an_override_of_another_connector_is_a_mistake() -> None:
    done = connectors(
        *(
            "--kv-transfer-config",
            '{"kv_connector":"NixlConnector","kv_role":"kv_both"}',
        ),
        "--additional-config",
        '{"kvpad": {"registers_device_memory": {"NixlConector": false}}}',
    )
    assert done.exit_code == 2
    assert "did you mean 'NixlConnector'" in done.stderr


def test_without_vllm_the_table_answers() -> None:
    config = json.dumps(
        {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "connectors": [{"kv_connector": "MooncakeConnector"}]
            },
        }
    )
    done = run(
        *("connectors", "--json", "--kv-transfer-config", config),
        without=["vllm", "torch"],
    )
    assert done.returncode == 0, done.stderr
    parsed = json.loads(done.stdout)
    assert parsed["vllm"] is None
    names = {each["name"] for each in parsed["connectors"]}
    assert {"NixlConnector", "MooncakeConnector", "OffloadingConnector"} <= names
    assert parsed["configured"]["capabilities"]["registers_device_memory"]
    screen = run("connectors", without=["vllm", "torch"])
    assert_fits_a_screen(screen.stdout)
    assert "no vLLM here" in screen.stdout


def test_what_stands_for_a_transfer_config_is_answered_as_the_real_one() -> None:
    from vllm.config import KVTransferConfig

    from vllm_kvpad.capabilities import resolve
    from vllm_kvpad.cli.connectors import _Config

    # Which device the buffer is on by default is the platform's, unknown without vLLM.
    children = [
        {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cuda",
        }
    ]
    for fields in (
        {"kv_connector": "NixlConnector", "kv_buffer_device": "cuda"},
        {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"},
        {"kv_connector": "MooncakeStoreConnector"},
        {"kv_connector": "LMCacheMPConnector"},
        {
            "kv_connector": "MultiConnector",
            "kv_connector_extra_config": {"connectors": children},
        },
    ):
        fields = {"kv_role": "kv_both", **fields}
        assert resolve(_Config(**fields)) == resolve(KVTransferConfig(**fields))


def test_a_broken_vllm_is_named_and_the_table_answers(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise RuntimeError('torn apart')\n")
    done = run("connectors", "--json", path=tmp_path)
    assert done.returncode == 0, done.stderr
    parsed = json.loads(done.stdout)
    assert parsed["vllm"] == "does not import: RuntimeError: torn apart"
    assert all(each["capabilities"] for each in parsed["connectors"])


def test_an_unknown_option_is_one_line() -> None:
    done = run("connectors", "--jsn", without=["vllm"])
    assert_one_line_of_error(done, "--jsn", "vllm-kvpad connectors --help")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise SystemExit(0)", "SystemExit(0)"),
        ("raise SystemExit('bye')", "bye"),
        ("class Panic(BaseException): ...\nraise Panic('lost')", "lost"),
        ("import time; time.sleep(600)", "did not come back within 0.5 s"),
    ],
    ids=["exits", "exits with words", "panics", "hangs"],
)
def test_a_module_that_ends_the_process_or_hangs_is_an_answer_with_status_1(
    source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capabilities, "TIME_LIMIT_SECONDS", 0.5)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_connectors.py").write_text(source + "\n")
    importlib.invalidate_caches()
    found = configured(
        1, kv_connector="Mine", kv_connector_module_path="broken_connectors"
    )
    sys.modules.pop("broken_connectors", None)
    assert found["capabilities"] is None
    assert said in found["error"]


@pytest.mark.parametrize("option", ["--kv-transfer-config", "--additional-config"])
def test_json_that_is_nested_without_end_is_one_line_of_error(option: str) -> None:
    done = run("connectors", "--kv-transfer-config", "{}", option, "[" * 100_000)
    assert_one_line_of_error(done, option, "is not JSON")
