"""``vllm-kvpad doctor``: each finding, and environments in which little works."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("typer")

from cli_programs import assert_fits_a_screen, run
from typer.testing import CliRunner

from vllm_kvpad.cli import app, doctor
from vllm_kvpad.cli.doctor import Finding, Status
from vllm_kvpad.vmm import CudaVmmDriver, VmmOutOfMemoryError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("VLLM_PLUGINS", "VLLM_KVPAD", "UCX_", "PYTORCH_")):
            monkeypatch.delenv(name)
    # Imports are remembered for a run of the doctor; a test is one.
    doctor._import.cache_clear()


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A device in the place of this machine's; what it can do is the test's choice."""
    cuda = pytest.importorskip("vllm_kvpad.vmm.cuda")
    properties = SimpleNamespace(
        allocFlags=SimpleNamespace(gpuDirectRDMACapable=1),
        requestedHandleTypes=SimpleNamespace(
            name="CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"
        ),
    )
    device = cuda._Device(
        bindings=None,
        index=0,
        name="NVIDIA H200",
        context=None,
        properties=properties,
        granularity=2 << 20,
    )
    driver = object.__new__(CudaVmmDriver)
    driver._device = device
    monkeypatch.setattr(CudaVmmDriver, "free_memory", lambda self: 5 << 30)
    monkeypatch.setattr(doctor, "_open_driver", lambda: driver)
    monkeypatch.setattr(doctor, "_is_on_gpu", lambda torch: True)
    return properties


def only(findings: Any) -> Finding:
    (finding,) = findings
    return finding


def by_name(parsed: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["check"]: each for each in parsed["findings"]}


# --- the whole


def test_json_has_a_stable_form() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    parsed = json.loads(done.stdout)
    assert set(parsed) == {"schema", "kvpad", "status", "summary", "findings"}
    assert parsed["schema"] == 1
    for finding in parsed["findings"]:
        assert set(finding) == {"check", "status", "detail", "advice", "facts"}
        assert finding["status"] in {"ok", "warning", "problem"}
        # What is not in order says what to do about it.
        assert finding["status"] == "ok" or finding["advice"]
    assert set(by_name(parsed)) >= {
        *("switch", "plugins", "vllm", "host", "patch_points", "platform", "memory"),
        *("rdma_devices", "transports", "ucx", "allocator"),
    }


def test_this_machine_is_in_order_once_kvpad_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "kvpad")
    done = CliRunner().invoke(app, ["doctor", "--json"])
    parsed = json.loads(done.stdout)
    findings = by_name(parsed)
    for name in ("switch", "vllm", "host", "patch_points", "platform", "memory"):
        assert findings[name]["status"] == "ok", findings[name]
    assert findings["switch"]["facts"]["on"] is True
    assert findings["host"]["facts"]["name"] == "supply"
    assert findings["memory"]["facts"]["granule_bytes"] == 2 << 20
    if findings["plugins"]["status"] == "ok":
        assert done.exit_code == 0
        assert parsed["summary"].startswith("kvpad would supply the KV cache here")


def test_the_screen_fits_and_says_what_the_json_says() -> None:
    runner = CliRunner()
    screen = runner.invoke(app, ["doctor"]).stdout
    parsed = json.loads(runner.invoke(app, ["doctor", "--json"]).stdout)
    assert_fits_a_screen(screen)
    assert len(screen.splitlines()) <= 40
    assert parsed["summary"] in screen
    for name in by_name(parsed):
        assert name.replace("_", " ") in screen


def test_nothing_is_patched() -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    stock = WorkerBase.__init__
    CliRunner().invoke(app, ["doctor"])
    assert WorkerBase.__init__ is stock


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise OSError("no such device")

    monkeypatch.setattr(doctor, "_rdma_devices", broken)
    findings = {each.check: each for each in doctor.examine()}
    assert findings["broken"].status is Status.WARNING
    assert "OSError: no such device" in findings["broken"].detail
    assert "memory" in findings


def test_a_vllm_whose_workers_do_not_import_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "vllm.v1.worker.gpu_worker":
                raise RuntimeError("operator torchvision::nms does not exist")

    doctor._import.cache_clear()
    monkeypatch.delitem(sys.modules, "vllm.v1.worker.gpu_worker", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken, *sys.meta_path])
    found = only(doctor._patch_points())
    doctor._import.cache_clear()
    assert found.status is Status.PROBLEM
    assert "vllm.v1.worker.gpu_worker does not import" in found.detail
    assert "torchvision::nms" in found.detail


# --- environments in which little works


def test_without_vllm_and_torch() -> None:
    done = run("doctor", "--json", without=["vllm", "torch"], VLLM_PLUGINS="kvpad")
    assert done.returncode == 1, done.stderr
    findings = by_name(json.loads(done.stdout))
    assert findings["vllm"]["status"] == "problem"
    assert "not installed" in findings["vllm"]["detail"]
    assert findings["platform"]["status"] == "problem"
    assert findings["memory"]["status"] in {"ok", "problem"}
    assert "host" not in findings
    assert not done.stderr
    assert_fits_a_screen(run("doctor", without=["vllm", "torch"]).stdout)


def test_with_a_vllm_that_does_not_import(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text(
        "print('on stdout')\nraise OSError('libtorch.so:\\n undefined symbol [x]')\n"
    )
    done = run("doctor", "--json", path=tmp_path)
    assert done.returncode == 1
    found = by_name(json.loads(done.stdout))["vllm"]
    assert found["detail"] == (
        "does not import: OSError: libtorch.so: undefined symbol [x]"
    )
    assert "Traceback" not in done.stderr
    screen = run("doctor", path=tmp_path)
    assert screen.returncode == 1
    assert "undefined symbol [x]" in " ".join(screen.stdout.split())


def test_with_a_vllm_that_exits(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise SystemExit(7)\n")
    done = run("doctor", "--json", path=tmp_path)
    assert done.returncode == 1
    assert "exits: 7" in by_name(json.loads(done.stdout))["vllm"]["detail"]


def test_with_a_vllm_of_another_shape(tmp_path: Path) -> None:
    """A vLLM that has none of what kvpad would patch."""
    for folder in ("vllm", "vllm/v1", "vllm/v1/worker", "vllm/platforms"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "vllm/__init__.py").write_text("__version__ = '9.9.9'\n")
    (tmp_path / "vllm/platforms/__init__.py").write_text(
        "class current_platform:\n"
        "    device_name = 'cpu'\n"
        "    is_cpu = staticmethod(lambda: True)\n"
        "    is_cuda = staticmethod(lambda: False)\n"
        "    is_cuda_alike = staticmethod(lambda: False)\n"
    )
    done = run("doctor", "--json", path=tmp_path)
    assert done.returncode == 1
    findings = by_name(json.loads(done.stdout))
    assert findings["vllm"]["status"] == "warning"
    assert "9.9.9" in findings["vllm"]["detail"]
    points = findings["patch_points"]
    assert points["status"] == "problem"
    assert len(points["facts"]["problems"]) == points["facts"]["points"] > 10


def test_with_a_vllm_that_has_its_own_extensible_cache(tmp_path: Path) -> None:
    for folder in ("vllm", "vllm/v1", "vllm/v1/worker"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "vllm/__init__.py").write_text("__version__ = '0.34.0'\n")
    (tmp_path / "vllm/v1/worker/extensible_kv_cache.py").write_text("")
    done = run("doctor", "--json", path=tmp_path)
    assert done.returncode == 1
    found = by_name(json.loads(done.stdout))["host"]
    assert found["status"] == "problem"
    assert "none that this version of kvpad knows" in found["detail"]


@pytest.mark.skipif(
    importlib.util.find_spec("cuda") is not None, reason="cuda-bindings is installed"
)
def test_without_cuda_bindings_but_with_an_nvidia_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "_nvidia_driver", lambda: "580.95.05")
    monkeypatch.setitem(sys.modules, "torch", None)
    found = only(doctor._memory())
    assert found.status is Status.PROBLEM
    assert "needs the package cuda-bindings" in found.detail
    assert "pip install cuda-bindings" in found.advice


# --- switched on?


@pytest.mark.parametrize(
    ("environment", "status", "words", "is_on"),
    [
        ({}, "warning", "VLLM_PLUGINS is not set", False),
        ({"VLLM_PLUGINS": "kvpad"}, "ok", "on: VLLM_PLUGINS=kvpad", True),
        ({"VLLM_PLUGINS": "other,kvpad"}, "ok", "on", True),
        ({"VLLM_PLUGINS": "other"}, "warning", "does not name kvpad", False),
        ({"VLLM_PLUGINS": ""}, "warning", "does not name kvpad", False),
        ({"VLLM_PLUGINS": "other, kvpad"}, "problem", "spaces", False),
        (
            {"VLLM_PLUGINS": "kvpad", "VLLM_KVPAD_DISABLE": "1"},
            "warning",
            "VLLM_KVPAD_DISABLE is set",
            False,
        ),
        ({"VLLM_KVPAD_DISABLE": "ture"}, "problem", "ture", False),
    ],
)
def test_the_switch(
    environment: dict[str, str],
    status: str,
    words: str,
    is_on: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = only(doctor._switch())
    assert found.status == status
    assert words in found.detail
    assert found.facts["on"] is is_on
    assert found.status is Status.OK or found.advice


def test_vllm_takes_spaces_as_part_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    # What the doctor calls a problem is vLLM's own parsing.
    import vllm.envs

    monkeypatch.setenv("VLLM_PLUGINS", "other, kvpad")
    assert "kvpad" not in vllm.envs.VLLM_PLUGINS


def test_a_plugin_that_is_named_but_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "kvpad,absent")
    found = only(doctor._plugins(False))
    assert found.status is Status.WARNING
    assert "absent" in found.detail


def installed_plugin(folder: Path, source: str) -> None:
    """A distribution with a vLLM plugin, as pip leaves it."""
    (folder / "meddling.py").write_text(source)
    info = folder / "meddling-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: meddling\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nmeddling = meddling:register\n"
    )


def test_another_plugin_is_listed_and_run_only_when_asked(tmp_path: Path) -> None:
    installed_plugin(
        tmp_path,
        "import functools\n"
        "def register():\n"
        "    from vllm.v1.worker.gpu_worker import Worker\n"
        "    stock = Worker.initialize_from_config\n"
        "    @functools.wraps(stock)\n"
        "    def initialize_from_config(self, kv_cache_config):\n"
        "        return stock(self, kv_cache_config)\n"
        "    Worker.initialize_from_config = initialize_from_config\n",
    )
    environment = {"VLLM_PLUGINS": "kvpad,meddling"}
    left = run("doctor", "--json", path=tmp_path, **environment)
    findings = by_name(json.loads(left.stdout))
    assert "meddling (meddling 1.0)" in findings["plugins"]["detail"]
    assert "not run here" in findings["plugins"]["detail"]
    assert findings["patch_points"]["facts"]["foreign"] == []

    loaded = run("doctor", "--json", "--load-plugins", path=tmp_path, **environment)
    found = by_name(json.loads(loaded.stdout))["patch_points"]
    assert found["status"] == "warning"
    assert found["facts"]["foreign"] == [
        "vllm.v1.worker.gpu_worker:Worker.initialize_from_config by meddling"
    ]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("def register(): raise SystemExit('no licence')", "SystemExit: no licence"),
        ("def register(): raise OSError('no daemon')", "OSError: no daemon"),
    ],
    ids=["exits at import", "exits", "raises"],
)
def test_a_plugin_that_keeps_vllm_from_starting_is_a_problem(
    tmp_path: Path, source: str, said: str
) -> None:
    installed_plugin(tmp_path, source + "\n")
    done = run(
        *("doctor", "--json", "--load-plugins"),
        path=tmp_path,
        VLLM_PLUGINS="kvpad,meddling",
    )
    assert done.returncode == 1
    found = by_name(json.loads(done.stdout))["plugins"]
    assert found["status"] == "problem"
    assert said in found["detail"]


def test_a_plugin_that_hangs_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TIME_LIMIT_SECONDS", 0.2)
    monkeypatch.setattr(
        "vllm.plugins.load_general_plugins", lambda: threading.Event().wait()
    )
    found = only(doctor._plugins(True))
    assert found.status is Status.PROBLEM
    assert "did not come back within 0.2 s" in found.detail


# --- the device


def test_memory_that_cannot_be_registered_is_a_warning(
    on_a_gpu: SimpleNamespace,
) -> None:
    assert only(doctor._memory()).status is Status.OK
    on_a_gpu.allocFlags.gpuDirectRDMACapable = 0
    found = only(doctor._memory())
    assert found.status is Status.WARNING
    assert found.facts["gpu_direct_rdma"] is False
    assert found.facts["handle_type"] == "POSIX_FILE_DESCRIPTOR"
    assert "without GPUDirect RDMA" in found.detail


def test_a_full_device_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> Any:
        raise VmmOutOfMemoryError("cuMemCreate failed")

    monkeypatch.setattr(doctor, "_open_driver", full)
    found = only(doctor._memory())
    assert found.status is Status.WARNING
    assert "cuMemCreate failed" in found.detail


# --- UCX


def ucx(version: str | None, monkeypatch: pytest.MonkeyPatch) -> Finding:
    monkeypatch.setattr(doctor, "_find_ucx", lambda: doctor._Ucx(version, "somewhere"))
    return only(doctor._ucx())


@pytest.mark.parametrize(
    ("version", "setting", "shortens"),
    [
        ("1.19.0", None, True),
        ("1.22.0", None, True),
        ("1.22.0", "on", True),
        ("1.22.0", "off", False),
        ("1.22.1", None, False),
        ("1.24.0", None, False),
        # Builds of UCX's master had this number before and after the change.
        ("1.23.0", None, None),
        (None, None, None),
    ],
)
def test_which_ucx_cuts_registrations_short(
    version: str | None,
    setting: str | None,
    shortens: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if setting is not None:
        monkeypatch.setenv("UCX_CUDA_COPY_REG_WHOLE_ALLOC", setting)
    found = ucx(version, monkeypatch)
    assert found.facts["shortens_ranges_of_several_chunks"] is shortens
    assert ("one" in found.detail) is (shortens is not False)


@pytest.mark.parametrize(
    ("transports", "is_fine"),
    [
        (None, True),
        ("all", True),
        ("rc,cuda", True),
        ("rc,cuda_copy", True),
        ("^cuda_ipc", True),
        ("rc,tcp", False),
        ("^cuda_copy", False),
        ("^cuda", False),
    ],
)
def test_ucx_without_cuda_copy_is_a_warning_on_a_gpu(
    transports: str | None,
    is_fine: bool,
    on_a_gpu: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if transports is not None:
        monkeypatch.setenv("UCX_TLS", transports)
    found = ucx("1.24.0", monkeypatch)
    assert (found.status is Status.OK) is is_fine
    assert is_fine or "cuda_copy" in found.advice


@pytest.mark.parametrize(
    ("version", "kind", "is_fine"),
    [
        ("1.21.0", "POSIX_FILE_DESCRIPTOR", False),
        ("1.21.0", "FABRIC", True),
        ("1.22.0", "POSIX_FILE_DESCRIPTOR", True),
    ],
)
def test_ucx_that_cannot_take_file_descriptors_over_nvlink(
    version: str,
    kind: str,
    is_fine: bool,
    on_a_gpu: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_a_gpu.requestedHandleTypes.name = f"CU_MEM_HANDLE_TYPE_{kind}"
    found = ucx(version, monkeypatch)
    assert (found.status is Status.OK) is is_fine
    assert is_fine or "NVLink" in found.advice


def test_a_cache_of_registrations_and_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_RCACHE_ENABLE", "y")
    found = ucx("1.24.0", monkeypatch)
    assert found.status is Status.WARNING
    assert "UCX_RCACHE_ENABLE" in found.advice


@pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu13") is None, reason="NIXL is not installed"
)
def test_the_ucx_that_nixl_brings_states_its_version() -> None:
    found = doctor._find_ucx()
    assert found is not None
    assert found.version is not None
    assert found.version.startswith("1.")


def test_the_systems_ucx_is_asked_where_nixl_brings_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "ucx_info"
    program.write_text("#!/bin/sh\necho '# Library version: 1.18.1'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for module in ("nixl_cu13", "nixl_cu12", "nixl", "nixl_rocm"):
        monkeypatch.setitem(sys.modules, module, None)
    assert doctor._find_ucx() == doctor._Ucx("1.18.1", str(program))


# --- torch's allocator


@pytest.mark.parametrize(
    ("name", "value", "is_refused"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64", False),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", False),
    ],
)
def test_expandable_segments_are_refused_as_vllm_refuses_them(
    name: str, value: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import VllmConfig

    monkeypatch.setenv(name, value)
    found = only(doctor._allocator())
    assert (found.status is Status.WARNING) is is_refused
    assert value in found.detail
    # vLLM's own check, on as much of a configuration as it reads.
    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector="NixlConnector"),
        model_config=SimpleNamespace(
            enable_cumem_allocator=False, enable_sleep_mode=False
        ),
    )
    if is_refused:
        with pytest.raises(ValueError, match="expandable_segments"):
            VllmConfig._verify_kv_transfer_compat(config)
    else:
        VllmConfig._verify_kv_transfer_compat(config)


# --- the command itself


def test_python_m_runs_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vllm_kvpad.cli", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("vllm-kvpad ")


def test_neither_the_package_nor_the_plugin_imports_the_commands() -> None:
    program = (
        "import sys\n"
        "import vllm_kvpad, vllm_kvpad.plugin\n"
        "vllm_kvpad.plugin.register()\n"
        "assert not {'typer', 'rich', 'vllm', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "VLLM_PLUGINS": "other"},
        check=True,
    )
