"""What kvpad shows on ``/metrics``, and what a failure may cost."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, Gauge, generate_latest, multiprocess
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import REGISTRY

from vllm_kvpad import metrics
from vllm_kvpad.capabilities import ConnectorCapabilities
from vllm_kvpad.metrics import CacheFigures, EngineReport, Mode

FIGURES = CacheFigures(
    committed_blocks=1456,
    capacity_blocks=1500,
    physical_bytes=1_132_462_080,
    padding_bytes=58_982_400,
    chunks=30,
    commits=2,
    commit_seconds=0.25,
)
EXPECTED = {
    "vllm:kvpad_committed_blocks": 1456,
    "vllm:kvpad_capacity_blocks": 1500,
    "vllm:kvpad_physical_bytes": 1_132_462_080,
    "vllm:kvpad_padding_bytes": 58_982_400,
    "vllm:kvpad_chunks": 30,
    "vllm:kvpad_commit_seconds_count": 2,
    "vllm:kvpad_commit_seconds_sum": 0.25,
}
NIXL = ConnectorCapabilities("NixlConnector", True, "built-in table: registers")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where reports go."""
    monkeypatch.setenv(metrics.DIRECTORY_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("vllm.kvpad")
    logger.addHandler(caplog.handler)
    logger.propagate = False
    yield caplog
    logger.propagate = True
    logger.removeHandler(caplog.handler)


@pytest.fixture
def unserved(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in which nothing has been registered."""
    monkeypatch.setattr(metrics, "_collector", None)
    monkeypatch.delenv(metrics.DIRECTORY_VARIABLE, raising=False)
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setattr(metrics.atexit, "register", lambda *args, **kwargs: None)
    yield
    if metrics._collector is not None:
        REGISTRY.unregister(metrics._collector)
        shutil.rmtree(metrics._collector._folder, ignore_errors=True)


def worker(engine: int = 0, model_name: str = "model") -> Any:
    """What of a worker a report is made from."""
    return SimpleNamespace(
        rank=0,
        vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(served_model_name=model_name),
            parallel_config=SimpleNamespace(data_parallel_index=engine),
        ),
    )


def supplied(engine: int = 0) -> EngineReport:
    return EngineReport.of_worker(worker(engine), Mode.SUPPLIED, NIXL, cache=FIGURES)


def samples(text: str) -> dict[tuple[str, str], tuple[dict[str, str], float]]:
    """Labels and value of every kvpad sample, by name and engine."""
    return {
        (sample.name, sample.labels.get("engine", "")): (sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("vllm:kvpad_")
    }


def scrape(folder: Path) -> dict[tuple[str, str], tuple[dict[str, str], float]]:
    registry = CollectorRegistry(auto_describe=True)
    registry.register(metrics.EngineReportCollector(folder))
    return samples(generate_latest(registry).decode())


def test_a_supplied_cache_has_every_metric_under_vllms_labels(folder: Path) -> None:
    metrics.publish(supplied)
    found = scrape(folder)
    for name, value in EXPECTED.items():
        assert found.pop((name, "0")) == ({"model_name": "model", "engine": "0"}, value)
    ((labels, value),) = found.values()
    assert value == 1
    assert labels == {
        "model_name": "model",
        "engine": "0",
        "mode": "supplied",
        "reason": "",
        "connector": "NixlConnector",
        "registers_device_memory": "true",
        "source": "built-in table: registers",
    }


def test_an_engine_that_kvpad_left_alone_has_the_reason_and_no_numbers(
    folder: Path,
) -> None:
    reason = 'Worker.sleep: takes ("self"),\nexpected (self, level)'
    report = EngineReport.of_worker(worker(), Mode.STEPPED_ASIDE, NIXL, reason=reason)
    metrics.publish(lambda: report)
    (((name, _), (labels, value)),) = scrape(folder).items()
    assert (name, value) == ("vllm:kvpad_info", 1)
    assert labels["mode"] == "stepped_aside"
    assert labels["reason"] == reason


def test_without_a_connector_nothing_is_said_about_one() -> None:
    none = ConnectorCapabilities(None, False, "no KV connector")
    report = EngineReport.of_worker(worker(), Mode.SUPPLIED, none)
    assert report.connector == report.registers_device_memory == report.source == ""


def test_each_data_parallel_engine_has_its_own_samples(folder: Path) -> None:
    for engine in (0, 3):
        metrics.publish(lambda engine=engine: supplied(engine))
    found = scrape(folder)
    assert {engine for _, engine in found} == {"0", "3"}
    assert len(found) == 2 * (len(EXPECTED) + 1)


def test_the_last_report_counts(folder: Path) -> None:
    metrics.publish(supplied)
    asleep = FIGURES.model_copy(update={"committed_blocks": 0, "physical_bytes": 0})
    metrics.publish(lambda: supplied().model_copy(update={"cache": asleep}))
    found = scrape(folder)
    assert found["vllm:kvpad_committed_blocks", "0"][1] == 0
    assert found["vllm:kvpad_physical_bytes", "0"][1] == 0
    assert found["vllm:kvpad_capacity_blocks", "0"][1] == 1500
    assert os.listdir(folder) == ["engine-0.json"]


def test_nothing_is_shown_before_there_is_a_report(folder: Path) -> None:
    assert scrape(folder) == {}


@pytest.mark.parametrize("damage", [b"", b"{", b'{"mode": "odd"}', b"\xff"])
def test_a_damaged_report_costs_its_own_samples_and_one_warning(
    folder: Path, damage: bytes, log: pytest.LogCaptureFixture
) -> None:
    metrics.publish(supplied)
    (folder / "engine-1.json").write_bytes(damage)
    for _ in range(3):
        assert {engine for _, engine in scrape(folder)} == {"0"}
    (record,) = log.records
    assert record.levelno == logging.WARNING
    assert "engine-1.json" in record.getMessage()


def test_a_report_that_cannot_be_made_or_written_is_a_warning(
    folder: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = SimpleNamespace(rank=0, vllm_config=SimpleNamespace())
    metrics.publish(lambda: EngineReport.of_worker(odd, Mode.SUPPLIED, NIXL))
    monkeypatch.setenv(metrics.DIRECTORY_VARIABLE, str(folder / "gone"))
    metrics.publish(supplied)
    assert [record.levelno for record in log.records] == [logging.WARNING] * 2
    assert "model_config" in log.records[0].getMessage()
    assert "FileNotFoundError" in log.records[1].getMessage()


@pytest.mark.usefixtures("unserved")
def test_the_default_registry_shows_the_reports_and_survives_vllms_cleaning() -> None:
    pytest.importorskip("vllm")
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    metrics.serve()
    metrics.serve()
    metrics.publish(supplied)
    unregister_vllm_metrics()
    found = samples(generate_latest(REGISTRY).decode())
    assert {name for name, _ in found} == {*EXPECTED, "vllm:kvpad_info"}


@pytest.mark.usefixtures("unserved")
def test_a_server_started_by_another_has_a_folder_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(metrics.DIRECTORY_VARIABLE, str(tmp_path))
    metrics.serve()
    own = Path(os.environ[metrics.DIRECTORY_VARIABLE])
    assert own != tmp_path
    assert own.is_dir()
    metrics._remove(own, owner=os.getpid() + 1)
    assert own.is_dir()  # a fork does not take it away
    metrics._remove(own, owner=os.getpid())
    assert not own.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_next_server_removes_the_folder_of_one_that_was_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    """And leaves those of servers that live."""
    monkeypatch.setattr(metrics.tempfile, "tempdir", str(tmp_path))
    program = "from vllm_kvpad import metrics; metrics.serve(); print(); input()"
    server = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with server:
        assert server.stdout is not None
        server.stdout.readline()
        (folder,) = tmp_path.iterdir()
        metrics._remove_orphans()
        assert folder.is_dir()
        server.send_signal(number)
    assert folder.is_dir()
    metrics._remove_orphans()
    assert not folder.exists()


@pytest.mark.usefixtures("unserved")
def test_a_process_of_the_server_uses_its_folder(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(metrics.multiprocessing, "parent_process", object)
    monkeypatch.setenv(metrics.DIRECTORY_VARIABLE, str(folder))
    metrics.serve()
    assert os.environ[metrics.DIRECTORY_VARIABLE] == str(folder)
    metrics.publish(supplied)
    assert os.listdir(folder) == ["engine-0.json"]


@pytest.mark.parametrize("reports", [1, 2])
def test_several_api_servers_show_the_reports_beside_vllms_metrics(
    folder: Path, monkeypatch: pytest.MonkeyPatch, reports: int
) -> None:
    """In multiprocess mode; what this process counted itself is left out."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
    for _ in range(reports):  # the last one counts, and is not added up
        metrics.publish(lambda: supplied(1))
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    merged = generate_latest(registry).decode()
    assert samples(merged) == scrape(folder)
    assert samples(merged)["vllm:kvpad_commit_seconds_count", "1"][1] == 2
    for text in ("# HELP vllm:kvpad_chunks Phys", "kvpad_commit_seconds summary"):
        assert text in merged


def test_in_multiprocess_mode_an_old_reason_is_not_shown_beside_the_new(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
    for reason in ("one", "two"):
        aside = EngineReport(mode=Mode.STEPPED_ASIDE, reason=reason)
        metrics.publish(lambda report=aside: report)
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    text = generate_latest(registry).decode()
    assert 'reason="two"' in text
    assert 'reason="one"' not in text


@pytest.mark.usefixtures("unserved")
def test_a_machine_without_room_for_a_folder_costs_the_metrics_and_one_warning(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    def mkdtemp(**_: Any) -> str:
        raise OSError("no space left on device")

    monkeypatch.setattr(metrics.tempfile, "mkdtemp", mkdtemp)
    metrics.serve()
    metrics.publish(supplied)
    (record,) = [each for each in log.records if each.levelno >= logging.WARNING]
    assert "no space left" in record.getMessage()


def test_names_do_not_collide_with_vllms() -> None:
    """A second metric of a name would end the registration."""
    registry = CollectorRegistry(auto_describe=True)
    registry.register(metrics.EngineReportCollector(Path("none")))
    with pytest.raises(ValueError, match="Duplicated"):
        Gauge("vllm:kvpad_chunks", "", registry=registry)
