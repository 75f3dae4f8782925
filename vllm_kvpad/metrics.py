"""kvpad's Prometheus metrics, on ``/metrics`` beside vLLM's own.

What there is to say is known in the worker processes; ``/metrics`` is served by the
front end, of which there may be several. Between them lies a folder: the worker of
rank 0 of each engine keeps one small JSON file there, replaced whole whenever
something changed (start-up, sleep, wake-up), and a collector in the front end reads
the files when it is scraped. The first process of a server makes the folder and names
it in the environment (:data:`DIRECTORY_VARIABLE`), which all its processes inherit.

With several API servers vLLM turns on ``prometheus_client``'s multiprocess mode, in
which ``/metrics`` shows what lies in files of that library's own format and asks no
collector. The worker then writes such files too.

Why this way, on vLLM 0.32 and 0.33:

- Nothing of vLLM is patched: the collector joins ``prometheus_client.REGISTRY``, which
  is what vLLM serves with one API server.
- Multiprocess mode is not there with one API server, and turning it on would change
  vLLM's own metrics. Where it is on, the library's metric classes do not see it in
  workers that were forked, hence the files.
- vLLM's group of entry points for stat loggers would be loaded, and would turn
  statistics on, where ``VLLM_PLUGINS`` is unset and kvpad is to be absent. It runs in
  the front end anyway, without the facts.
- What workers return to the engine core goes no further. ``collective_rpc`` from the
  front end waits for the step in progress, and asks one of several engines only.

An engine speaks through rank 0: its blocks are every rank's, and its bytes, chunks and
commits are those of one device, the first. With tensor parallelism all ranks have the
same; a pipeline's other stages may have other bytes. Engines on other machines than
the front end, and workers that Ray started, do not share the folder and are missing.

Nothing here may keep vLLM from starting or ``/metrics`` from answering: a failure
costs the metrics and one warning.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import fcntl
import functools
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic
from prometheus_client.metrics_core import (
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.registry import REGISTRY, Collector

from vllm_kvpad.log import get_logger

if TYPE_CHECKING:
    from vllm_kvpad.capabilities import ConnectorCapabilities
    from vllm_kvpad.kv_cache import ExtensibleKVCache

logger = get_logger(__name__)

DIRECTORY_VARIABLE = "KVPAD_METRICS_DIR"
"""Names the folder; set by kvpad itself, not by operators. It does not begin with
``VLLM_``, because vLLM warns of such variables when it does not know them."""


class Mode(enum.StrEnum):
    """What kvpad does to an engine."""

    SUPPLIED = "supplied"  # the whole KV cache is kvpad's
    PADDED = "padded"  # vLLM's own extensible cache, padded instead of rounded
    CAPABILITIES_ONLY = "capabilities_only"  # vLLM pads; kvpad answers for connectors
    STEPPED_ASIDE = "stepped_aside"  # vLLM runs as stock


class CacheFigures(pydantic.BaseModel, frozen=True):
    """One worker's KV cache in numbers.

    Attributes:
        committed_blocks: Blocks that are backed; 0 while asleep.
        capacity_blocks: Blocks that there are addresses for.
        physical_bytes: Bytes of physical memory held, whole granules.
        padding_bytes: Bytes of address space that padding added.
        chunks: Physical allocations behind the cache.
        commits: How many times memory was mapped.
        commit_seconds: What that took in all.
    """

    committed_blocks: int
    capacity_blocks: int
    physical_bytes: int
    padding_bytes: int
    chunks: int
    commits: int
    commit_seconds: float

    @classmethod
    def of(cls, cache: ExtensibleKVCache, padding_bytes: int) -> CacheFigures:
        """The figures of ``cache`` as it is now."""
        return cls(
            committed_blocks=cache.num_committed_blocks,
            capacity_blocks=cache.capacity_blocks,
            physical_bytes=cache.physical_bytes,
            padding_bytes=padding_bytes,
            chunks=cache.num_chunks,
            commits=cache.num_commits,
            commit_seconds=cache.commit_seconds,
        )


class EngineReport(pydantic.BaseModel, frozen=True):
    """What one engine has to say.

    Attributes:
        model_name: As vLLM's label of that name.
        engine: Likewise: the data-parallel rank.
        mode: What kvpad does to it.
        reason: Why kvpad stepped aside, else empty.
        connector: The configured KV connector, empty if there is none.
        registers_device_memory: ``true`` or ``false``; empty without a connector.
        source: Who says so.
        cache: The KV cache, where kvpad has one.
    """

    model_name: str = ""
    engine: str = ""
    mode: Mode
    reason: str = ""
    connector: str = ""
    registers_device_memory: str = ""
    source: str = ""
    cache: CacheFigures | None = None

    @classmethod
    def of_worker(
        cls,
        worker: Any,
        mode: Mode,
        capabilities: ConnectorCapabilities | None,
        *,
        reason: str = "",
        cache: CacheFigures | None = None,
    ) -> EngineReport:
        """A report in the name of ``worker``'s engine (a vLLM ``WorkerBase``)."""
        config = worker.vllm_config
        about_connector = {}
        if capabilities is not None and capabilities.name is not None:
            registers = str(capabilities.registers_device_memory).lower()
            about_connector = {
                "connector": capabilities.name,
                "registers_device_memory": registers,
                "source": capabilities.source,
            }
        return cls(
            model_name=config.model_config.served_model_name,
            # Not data_parallel_rank: that is 0 in every engine of a dense model.
            engine=str(config.parallel_config.data_parallel_index),
            mode=mode,
            reason=reason,
            cache=cache,
            **about_connector,
        )


# --- in the workers


def publish(make_report: Callable[[], EngineReport]) -> None:
    """Have the front end show the report from now on. Never raises.

    Args:
        make_report: Called for the report, so that it may fail without harm.
    """
    folder = os.environ.get(DIRECTORY_VARIABLE)
    if folder is None:
        logger.debug("no metrics: %s is not set", DIRECTORY_VARIABLE)
        return
    try:
        report = make_report()
        with _replacing(Path(folder, f"engine-{report.engine}.json")) as scratch:
            scratch.write_text(report.model_dump_json())
        if multiprocess_folder := os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            _write_for_multiprocess_mode(Path(multiprocess_folder), report)
    except Exception as error:
        # Whatever it is, it is about numbers: the engine must start regardless.
        logger.warning("kvpad: metrics are not up to date: %r", error)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a file to write, which then takes the place of ``path`` at once."""
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.unlink(missing_ok=True)
    yield scratch
    scratch.replace(path)


def _write_for_multiprocess_mode(folder: Path, report: EngineReport) -> None:
    """Write ``report`` where ``prometheus_client`` merges the files of processes.

    The name of such a file says the type and, where a process id would stand, who
    wrote it; ``mostrecent`` is how vLLM merges its gauges.
    """
    now = time.time()
    mapped_dict: Any = MmapedDict  # is not annotated
    metrics = metrics_of([report])
    for kind, prefix in (("gauge", "gauge_mostrecent"), ("summary", "summary")):
        path = folder / f"{prefix}_kvpad-{report.engine}.db"
        with (
            _replacing(path) as scratch,
            contextlib.closing(mapped_dict(str(scratch))) as values,
        ):
            for metric in metrics:
                for name, labels, value, *_ in metric.samples:
                    if metric.type == kind:
                        key = mmap_key(
                            metric.name,
                            name,
                            list(labels),
                            list(labels.values()),
                            metric.documentation,
                        )
                        values.write_value(key, value, now)


# --- in the front end

_FOLDER_PREFIX = "vllm-kvpad-"
_OWNER = "owner"


class EngineReportCollector(Collector):
    """Samples of all reports in ``folder``, read at each scrape."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def describe(self) -> Iterable[Metric]:
        """The metrics without samples; the registry asks before any report is there."""
        return metrics_of([])

    def collect(self) -> Iterator[Metric]:
        """The metrics that have samples."""
        return (
            metric for metric in metrics_of(list(self._reports())) if metric.samples
        )

    def _reports(self) -> Iterator[EngineReport]:
        for path in sorted(self._folder.glob("engine-*.json")):
            try:
                yield EngineReport.model_validate_json(path.read_bytes())
            except (OSError, ValueError) as error:
                _warn_unreadable(path, repr(error))


@functools.cache
def _warn_unreadable(path: Path, error: str) -> None:
    """Once: a scrape comes every few seconds."""
    logger.warning("kvpad: metrics of %s are missing: %s", path, error)


_GAUGES = {
    "committed_blocks": "KV cache blocks that are backed by physical memory.",
    "capacity_blocks": "KV cache blocks that address space is reserved for.",
    "physical_bytes": "Physical memory that the KV cache of rank 0 holds, in bytes.",
    "padding_bytes": "Address space that padding added on rank 0, in bytes; nothing "
    "is behind it.",
    "chunks": "Physical allocations behind the KV cache of rank 0.",
}


def metrics_of(reports: list[EngineReport]) -> list[Metric]:
    """All of kvpad's metrics, with a sample of each for every report that has one.

    Named and labelled as vLLM's own: ``vllm:`` first, ``model_name`` and ``engine``.
    """
    labels = ["model_name", "engine"]
    about = ["mode", "reason", "connector", "registers_device_memory", "source"]
    info = GaugeMetricFamily(
        "vllm:kvpad_info", "What kvpad does to the engine.", labels=labels + about
    )
    gauges = {
        name: GaugeMetricFamily(f"vllm:kvpad_{name}", documentation, labels=labels)
        for name, documentation in _GAUGES.items()
    }
    commits = SummaryMetricFamily(
        "vllm:kvpad_commit_seconds",
        "Times that KV cache memory was mapped on rank 0, and seconds spent on it.",
        labels=labels,
    )
    for report in reports:
        engine = [report.model_name, report.engine]
        info.add_metric(engine + [getattr(report, name) for name in about], 1)
        if report.cache is None:
            continue
        for name, gauge in gauges.items():
            gauge.add_metric(engine, getattr(report.cache, name))
        commits.add_metric(
            engine,
            count_value=report.cache.commits,
            sum_value=report.cache.commit_seconds,
        )
    return [info, *gauges.values(), commits]


_collector: EngineReportCollector | None = None


def serve() -> None:
    """Show the reports of this server's engines on ``/metrics``. Never raises.

    To be called in every process; it cannot be told which of them will serve.
    Calling it again changes nothing.
    """
    global _collector
    if _collector is not None:
        return
    try:
        collector = EngineReportCollector(_folder_of_this_server())
        REGISTRY.register(collector)
    except (OSError, ValueError) as error:
        logger.warning("kvpad: no metrics: %s", error)
    else:
        _collector = collector


def _folder_of_this_server() -> Path:
    if multiprocessing.parent_process() is not None:
        inherited = os.environ.get(DIRECTORY_VARIABLE)
        if inherited is not None:
            return Path(inherited)
    # A value that is there already belongs to a server that started this one.
    _remove_orphans()
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
    os.environ[DIRECTORY_VARIABLE] = str(folder)
    atexit.register(_remove, folder, owner=os.getpid())
    # A file system without locks costs the clean-up after a crash, not the metrics.
    with contextlib.suppress(OSError):
        _hold(folder)
    return folder


def _hold(folder: Path) -> None:
    """Lock ``folder`` for as long as this process, or a fork of it, lives."""
    with _replacing(folder / _OWNER) as scratch:
        lock = os.open(scratch, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)


def _remove_orphans() -> None:
    """Remove the folders of servers that were killed, which nobody holds any more."""
    for owner in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*/{_OWNER}"):
        with contextlib.suppress(OSError), owner.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(owner.parent, ignore_errors=True)


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not a fork of it
        shutil.rmtree(folder, ignore_errors=True)
