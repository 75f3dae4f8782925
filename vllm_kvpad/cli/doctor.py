"""``vllm-kvpad doctor``: what kvpad would do here, and what is in its way.

Every check stands alone and works with what is there: a missing or broken vLLM, torch
or driver is a finding, not a crash. Nothing is patched. vLLM and torch are imported;
the plugins of other packages are not run unless asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from vllm_kvpad import __version__, hookspecs
from vllm_kvpad.capabilities import TIME_LIMIT_SECONDS
from vllm_kvpad.cli import output
from vllm_kvpad.config import (
    DISABLE_VARIABLE,
    KvpadConfigError,
    disabled_by_environment,
)
from vllm_kvpad.patching import PatchError, PatchPoint
from vllm_kvpad.plugin import PLUGIN_NAME, creation_patches, front_end_patches
from vllm_kvpad.time_limit import within
from vllm_kvpad.vmm import VmmError, VmmOutOfMemoryError, VmmUnsupportedError

if TYPE_CHECKING:
    from vllm_kvpad.vmm import VmmDriver

TESTED_VLLM = ("0.32.0", "0.33.0")
"""Releases that kvpad's own tests run against."""


class Status(StrEnum):
    """How a finding stands; the worst of all is the exit status."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        check: What was looked at; stable, for programs.
        status: Whether it is in kvpad's way.
        detail: What was found, for people.
        advice: What to do about it; empty if nothing.
        facts: The same for programs.
    """

    check: str
    status: Status
    detail: str
    advice: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def doctor(
    load_plugins: Annotated[
        bool,
        typer.Option(
            "--load-plugins",
            help="Run the vllm.general_plugins that VLLM_PLUGINS allows in this "
            "process first, as vLLM would, and see what they changed.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> None:
    """What kvpad would do in this environment, and why.

    Run it where vLLM would run, with the same environment variables. Status 1 if
    something would keep kvpad from supplying the KV cache.
    """
    with output.stdout_kept_clean():
        findings = examine(load_plugins=load_plugins)
    status = _worst(findings)
    if as_json:
        output.print_json(
            {
                "schema": 1,
                "kvpad": __version__,
                "status": status.value,
                "summary": summary(findings),
                "findings": [dataclasses.asdict(each) for each in findings],
            }
        )
    else:
        _print(findings)
    if status is Status.PROBLEM:
        raise typer.Exit(1)


def examine(*, load_plugins: bool = False) -> list[Finding]:
    """Run every check; one that fails is a finding, too.

    Args:
        load_plugins: Run vLLM's general plugins in this process before looking at
            patch points.
    """
    checks: list[Callable[[], Iterator[Finding]]] = [
        _switch,
        functools.partial(_plugins, load_plugins),
        _vllm,
        _host,
        _patch_points,
        _platform,
        _memory,
        _rdma_devices,
        _transports,
        _ucx,
        _allocator,
        _connector_plugins,
    ]
    # A second import of a broken module can fail in another way than the first.
    _import.cache_clear()
    findings: list[Finding] = []
    for check in checks:
        try:
            findings.extend(check())
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit, a panic of a Rust extension, ...
            # A machine this was not tried on; the other checks still have a say.
            name = getattr(check, "func", check).__name__.strip("_")
            findings.append(
                Finding(
                    name,
                    Status.WARNING,
                    f"could not be examined: {output.describe(error)}",
                    "report this line to the authors of vllm-kvpad",
                )
            )
    return findings


def summary(findings: list[Finding]) -> str:
    """What would become of the KV cache, in one sentence."""
    problems = [each.check for each in findings if each.status is Status.PROBLEM]
    if problems:
        return f"kvpad would not supply the KV cache here: see {', '.join(problems)}"
    switch = next(each for each in findings if each.check == "switch")
    if not switch.facts.get("on"):
        return "kvpad could supply the KV cache here, but is not switched on"
    device = next(each for each in findings if each.check == "platform")
    given = device.facts.get("vllm_platform") == "cpu"
    return "kvpad would supply the KV cache here, " + (
        "at the size that is given" if given else "sized after warm-up"
    )


def _worst(findings: list[Finding]) -> Status:
    order = list(Status)
    return max((each.status for each in findings), key=order.index)


def _print(findings: list[Finding]) -> None:
    out = output.console()
    style = {Status.OK: "green", Status.WARNING: "yellow", Status.PROBLEM: "bold red"}
    made = output.table("", "", "")
    for each in findings:
        text = each.detail + (f"\n-> {each.advice}" if each.advice else "")
        made.add_row(
            Text(each.status.value, style[each.status]),
            each.check.replace("_", " "),
            text,
        )
    out.print(made)
    out.print()
    out.print(summary(findings), style="bold")


# --- Switched on? --------------------------------------------------------------------


def _switch() -> Iterator[Finding]:
    """``VLLM_KVPAD_DISABLE`` and ``VLLM_PLUGINS``, as the plugin and vLLM read them."""
    facts: dict[str, Any] = {
        "on": False,
        "VLLM_PLUGINS": os.environ.get("VLLM_PLUGINS"),
        DISABLE_VARIABLE: os.environ.get(DISABLE_VARIABLE),
    }

    def finding(status: Status, detail: str, advice: str = "") -> Finding:
        return Finding("switch", status, detail, advice, facts)

    try:
        disabled = disabled_by_environment()
    except KvpadConfigError as error:
        yield finding(Status.PROBLEM, str(error), "vLLM would not start; correct it")
        return
    named = os.environ.get("VLLM_PLUGINS")
    names = [] if named is None else named.split(",")
    if disabled:
        yield finding(
            Status.WARNING,
            f"off: {DISABLE_VARIABLE} is set",
            f"unset {DISABLE_VARIABLE} to use kvpad",
        )
    elif named is None:
        yield finding(
            Status.WARNING,
            "off: VLLM_PLUGINS is not set; vLLM then loads every plugin, and kvpad "
            "acts only when it is named",
            f"VLLM_PLUGINS={PLUGIN_NAME} turns it on; name other plugins you use too",
        )
    elif PLUGIN_NAME in names:
        facts["on"] = True
        yield finding(Status.OK, f"on: VLLM_PLUGINS={named}")
    elif PLUGIN_NAME in (name.strip() for name in names):
        # vLLM splits at commas and compares as is (vllm/envs.py, plugins/__init__.py).
        yield finding(
            Status.PROBLEM,
            f"off: VLLM_PLUGINS={named!r} has spaces, which vLLM takes as part of the "
            "names",
            "separate the names by commas alone",
        )
    else:
        yield finding(
            Status.WARNING,
            f"off: VLLM_PLUGINS={named!r} does not name {PLUGIN_NAME}",
            f"VLLM_PLUGINS={','.join([*filter(None, names), PLUGIN_NAME])}",
        )


def _plugins(load: bool) -> Iterator[Finding]:
    """Whether vLLM finds kvpad's entry point, and who else would run beside it."""
    found = importlib.metadata.entry_points(group="vllm.general_plugins")
    installed = {entry.name: _distribution_of(entry) for entry in found}
    facts: dict[str, Any] = {"installed": installed, "loaded_here": load}
    others = [f"{name} ({dist})" for name, dist in installed.items()]
    others = [each for each in others if not each.startswith(f"{PLUGIN_NAME} (")]
    if PLUGIN_NAME not in installed:
        yield Finding(
            "plugins",
            Status.PROBLEM,
            "vLLM does not find kvpad: no entry point in this environment",
            f"with this Python: {sys.executable} -m pip install vllm-kvpad",
            facts,
        )
        return
    named = os.environ.get("VLLM_PLUGINS")
    missing = [
        name
        for name in (named or "").split(",")
        if name and name not in installed and name not in _other_plugin_names()
    ]
    run = ""
    if load:
        try:
            _load_general_plugins()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            yield Finding(
                "plugins",
                Status.PROBLEM,
                f"a plugin keeps vLLM from starting: {output.describe(error)}",
                "leave it out of VLLM_PLUGINS, or tell its authors",
                facts,
            )
            return
        run = ", run in this process"
    if missing:
        yield Finding(
            "plugins",
            Status.WARNING,
            f"VLLM_PLUGINS names {', '.join(missing)}, not installed here",
            "correct the name, or install the package",
            facts,
        )
    elif others:
        not_run = run or ", not run here (--load-plugins does)"
        yield Finding(
            "plugins",
            Status.OK,
            f"kvpad; beside it {', '.join(sorted(others))}{not_run}",
            facts=facts,
        )
    else:
        yield Finding("plugins", Status.OK, f"kvpad alone{run}", facts=facts)


def _load_general_plugins() -> None:
    from vllm.plugins import load_general_plugins

    within(TIME_LIMIT_SECONDS, "loading vLLM's general plugins", load_general_plugins)


def _distribution_of(entry: importlib.metadata.EntryPoint) -> str:
    if entry.dist is None:
        return entry.value
    return f"{entry.dist.name} {entry.dist.version}"


def _other_plugin_names() -> set[str]:
    """Names that VLLM_PLUGINS selects among in vLLM's other plugin groups."""
    groups = ("platform", "io_processor", "stat_logger", "endpoint")
    return {
        entry.name
        for group in groups
        for entry in importlib.metadata.entry_points(group=f"vllm.{group}_plugins")
    }


# --- vLLM ----------------------------------------------------------------------------


@functools.cache
def _import(name: str) -> ModuleType | Exception | None:
    """The module; None if it is not installed; what its import raised otherwise."""
    try:
        if importlib.util.find_spec(name) is None:
            return None
        return importlib.import_module(name)
    except SystemExit as error:
        return RuntimeError(f"its import exits: {error}")
    except Exception as error:
        return error


def _vllm() -> Iterator[Finding]:
    vllm = _import("vllm")
    facts: dict[str, Any] = {"version": None}
    if vllm is None:
        yield Finding(
            "vllm",
            Status.PROBLEM,
            "not installed in this environment",
            f"run the doctor with vLLM's Python; this is {sys.executable}",
            facts,
        )
        return
    if isinstance(vllm, Exception):
        facts["import_error"] = output.describe(vllm)
        yield Finding(
            "vllm",
            Status.PROBLEM,
            f"does not import: {output.describe(vllm)}",
            "kvpad changes nothing before vLLM imports; often its torch does not match",
            facts,
        )
        return
    version = str(getattr(vllm, "__version__", "unknown"))
    facts["version"] = version
    if version.split("+")[0] in TESTED_VLLM:
        yield Finding("vllm", Status.OK, version, facts=facts)
    else:
        yield Finding(
            "vllm",
            Status.WARNING,
            f"{version}; kvpad's tests run with {' and '.join(TESTED_VLLM)}",
            "whether it fits shows under 'host' and 'patch points'",
            facts,
        )


def _vllm_imports() -> bool:
    return isinstance(_import("vllm"), ModuleType)


def _host() -> Iterator[Finding]:
    if not _vllm_imports():
        return
    from vllm_kvpad.hosts import StepAside, select_host

    try:
        host = select_host()
    except StepAside as reason:
        yield Finding(
            "host",
            Status.PROBLEM,
            f"kvpad steps aside: {reason}",
            f"use vLLM {' or '.join(TESTED_VLLM)}, or a newer kvpad",
            {"name": None},
        )
        return
    yield Finding(
        "host",
        Status.OK,
        f"{host.name}: kvpad {host.promise}",
        facts={"name": host.name},
    )


def _patch_points() -> Iterator[Finding]:
    """Whether all that kvpad would replace looks as expected, and whose it is now."""
    if not _vllm_imports():
        return
    from vllm_kvpad.hosts import StepAside, select_host

    try:
        sets = [front_end_patches, *creation_patches(), *select_host().patch_sets()]
    except StepAside:
        return  # reported as a problem under "host"
    except PatchError as error:
        yield Finding("patch_points", Status.PROBLEM, str(error), _UNKNOWN_VLLM)
        return
    points = [point for patches in sets for point in patches.points]
    for name in dict.fromkeys(point.target.partition(":")[0] for point in points):
        module = _import(name)
        # A module that is not there is one of the problems below.
        if isinstance(module, Exception) and not isinstance(module, ImportError):
            yield Finding(
                "patch_points",
                Status.PROBLEM,
                f"{name} does not import: {output.describe(module)}",
                "vLLM does not start here, with or without kvpad; mend that first",
            )
            return
    problems = [line for patches in sets for line in patches.problems()]
    foreign = [each for point in points if (each := _foreign(point)) is not None]
    facts = {"points": len(points), "problems": problems, "foreign": foreign}
    if problems:
        more = f" (and {len(problems) - 1} more: --json)" if len(problems) > 1 else ""
        yield Finding(
            "patch_points",
            Status.PROBLEM,
            f"{problems[0]}{more}",
            _UNKNOWN_VLLM,
            facts,
        )
    elif foreign:
        yield Finding(
            "patch_points",
            Status.WARNING,
            f"as expected, but already replaced by others: {'; '.join(foreign)}",
            "kvpad wraps what it finds; test the two together, or drop one",
            facts,
        )
    else:
        counted = f"all {len(points)} as expected"
        yield Finding("patch_points", Status.OK, counted, facts=facts)


_UNKNOWN_VLLM = "this vLLM is not one that kvpad knows: it would run as stock"

_NOT_FOREIGN = frozenset({"vllm", "torch", "vllm_kvpad", *sys.stdlib_module_names})


def _foreign(point: PatchPoint) -> str | None:
    """Whose code stands at ``point``, if not vLLM's; decorators are looked through."""
    try:
        _owner, _name, value = point.resolve()
    except PatchError:
        return None  # reported as a problem
    value = value.fget if isinstance(value, property) else value
    while value is not None:
        module = getattr(value, "__globals__", {}).get("__name__")
        module = module or type(value).__module__
        if module.partition(".")[0] not in _NOT_FOREIGN:
            return f"{point.target} by {module}"
        value = getattr(value, "__wrapped__", None)
    return None


# --- The device ----------------------------------------------------------------------


def _platform() -> Iterator[Finding]:
    torch = _import("torch")
    facts: dict[str, Any] = {"python": platform.python_version(), "torch": None}
    facts["nvidia_driver"] = _nvidia_driver()
    driver = f", NVIDIA driver {facts['nvidia_driver']}" * bool(facts["nvidia_driver"])
    if torch is None or isinstance(torch, Exception):
        why = "not installed" if torch is None else output.describe(torch)
        yield Finding(
            "platform",
            Status.PROBLEM,
            f"torch: {why}{driver}",
            "install the torch that your vLLM names as its requirement",
            facts,
        )
        return
    facts["torch"] = str(torch.__version__)
    built = f"torch {torch.__version__}, Python {facts['python']}{driver}"
    if not _vllm_imports():
        yield Finding("platform", Status.OK, built, facts=facts)
        return
    from vllm.platforms import current_platform

    name = current_platform.device_name or "no device"
    facts["vllm_platform"] = name
    if current_platform.is_cuda() or current_platform.is_cpu():
        yield Finding("platform", Status.OK, f"vLLM runs on {name}; {built}", "", facts)
        return
    yield Finding(
        "platform",
        Status.PROBLEM,
        f"vLLM runs on {name}, where kvpad steps aside; {built}",
        "kvpad supports NVIDIA GPUs and CPU engines"
        + (
            "; there is an NVIDIA driver: do CUDA_VISIBLE_DEVICES and torch's CUDA "
            "build match it?"
            if driver
            else ""
        ),
        facts,
    )


def _nvidia_driver() -> str | None:
    """Version of the kernel module, which is there without CUDA in this process."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return found.group(1) if found else None


def _open_driver() -> VmmDriver:
    """The driver of the memory that a worker here would use.

    Raises:
        VmmError: There is none.
    """
    from vllm_kvpad.vmm import HostVmmDriver, get_driver

    torch = _import("torch")
    if isinstance(torch, ModuleType):
        kind = "cuda" if _is_on_gpu(torch) else "cpu"
        return get_driver(kind)
    if _nvidia_driver() is None:
        return HostVmmDriver()
    # kvpad's driver itself needs no torch to be asked.
    from vllm_kvpad.vmm import CudaVmmDriver

    return CudaVmmDriver(0)


def _is_on_gpu(torch: Any) -> bool:
    if _vllm_imports():
        from vllm.platforms import current_platform

        return bool(current_platform.is_cuda_alike())
    return bool(torch.cuda.is_available())


def _memory() -> Iterator[Finding]:
    try:
        driver = _open_driver()
    except VmmOutOfMemoryError as error:
        yield Finding(
            "memory",
            Status.WARNING,
            f"the device is full: {error}",
            "run the doctor before the server",
        )
        return
    except VmmUnsupportedError as error:
        advice = "kvpad steps aside on such devices"
        if "cuda-bindings" in str(error):
            advice = "pip install cuda-bindings, of the major version of your CUDA"
        yield Finding("memory", Status.PROBLEM, str(error), advice)
        return
    except VmmError as error:
        yield Finding("memory", Status.PROBLEM, str(error), "see the driver's log")
        return
    facts: dict[str, Any] = {
        "driver": type(driver).__name__,
        "granule_bytes": driver.granularity,
        "gpu_direct_rdma": None,
        "handle_type": None,
        "free_bytes": driver.free_memory(),
    }
    from vllm_kvpad.vmm import CudaVmmDriver, HostVmmDriver

    status, advice = Status.OK, ""
    if not isinstance(driver, HostVmmDriver):
        assert isinstance(driver, CudaVmmDriver)
        facts["gpu_direct_rdma"] = driver.is_rdma_capable
        facts["handle_type"] = driver.handle_type
        if not driver.is_rdma_capable:
            status = Status.WARNING
            advice = (
                "a connector cannot register this memory with a NIC; NVLink, TCP and "
                "copies work"
            )
    yield Finding("memory", status, driver.description, advice, facts)


def _rdma_devices() -> Iterator[Finding]:
    folder = Path("/sys/class/infiniband")
    devices = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
    # One of two ways to register GPU memory; the other is dma-buf, which is the
    # kernel's own.
    peermem = Path("/sys/module/nvidia_peermem").is_dir()
    facts = {"devices": devices, "nvidia_peermem": peermem}
    if not devices:
        detail = "none: connectors transfer over TCP, shared memory or NVLink"
    else:
        detail = ", ".join(devices) + (", nvidia_peermem loaded" if peermem else "")
    yield Finding("rdma_devices", Status.OK, detail, facts=facts)


# --- Transports ----------------------------------------------------------------------

_TRANSPORTS = {
    "nixl": "NIXL",
    "nixl_rocm": "NIXL for ROCm",
    "mooncake": "Mooncake",
    "lmcache": "LMCache",
}


def _transports() -> Iterator[Finding]:
    """Packages by the module that vLLM imports, without importing it."""
    provided = importlib.metadata.packages_distributions()
    found = {}
    for module, name in _TRANSPORTS.items():
        if importlib.util.find_spec(module) is None:
            continue
        names = sorted(set(provided.get(module, ())))
        versions = [f"{each} {importlib.metadata.version(each)}" for each in names]
        found[name] = ", ".join(versions) or "version unknown"
    detail = "; ".join(f"{name} ({versions})" for name, versions in found.items())
    yield Finding(
        "transports",
        Status.OK,
        detail or "none found; connectors that copy blocks need none",
        facts={"found": found},
    )


@dataclass(frozen=True)
class _Ucx:
    version: str | None
    where: str


def _find_ucx() -> _Ucx | None:
    """The UCX that NIXL brings along, or else the system's."""
    for module in ("nixl_cu13", "nixl_cu12", "nixl", "nixl_rocm"):
        spec = importlib.util.find_spec(module)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            # Wheels keep the libraries they bring in a folder next to the package.
            bundled = Path(f"{folder}.libs")
            for library in sorted(bundled.glob("libucp*.so*")):
                return _Ucx(_ucx_version(library), f"in {module}")
    if program := shutil.which("ucx_info"):
        done = subprocess.run(
            [program, "-v"], capture_output=True, text=True, timeout=30, check=False
        )
        found = re.search(r"(\d+\.\d+\.\d+)", done.stdout)
        return _Ucx(found.group(1) if found else None, program)
    return None


def _ucx_version(library: Path) -> str | None:
    """What a libucp says of itself.

    The wheels state it nowhere else. Asked in another process, because loading UCX
    installs memory hooks.
    """
    program = (
        "import ctypes, sys\n"
        "ucp = ctypes.CDLL(sys.argv[1])\n"
        "ucp.ucp_get_version_string.restype = ctypes.c_char_p\n"
        "print(ucp.ucp_get_version_string().decode())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(library)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    found = re.search(r"(\d+\.\d+\.\d+)", done.stdout)
    return found.group(1) if found else None


def _older(version: str | None, than: str) -> bool | None:
    """Whether ``version`` is before ``than``; None if it is not known."""
    if version is None:
        return None
    found, limit = (tuple(map(int, text.split("."))) for text in (version, than))
    return found < limit


def _shortens(version: str | None) -> bool | None:
    """Whether this UCX cuts registrations short; see :func:`_ucx`."""
    # What its master calls 1.23.0 may have been built before the change or after.
    return None if version == "1.23.0" else _older(version, "1.22.1")


def _ucx() -> Iterator[Finding]:
    """UCX and its settings that matter for memory mapped in chunks.

    Sources, in openucx/ucx:

    * src/uct/cuda/cuda_copy/cuda_copy_md.c: with ``UCX_CUDA_COPY_REG_WHOLE_ALLOC``
      ``on``, or ``auto`` (the default) and a chunk of at most
      ``UCX_CUDA_COPY_MAX_REG_RATIO`` (0.1) of the device's memory, a registration is
      replaced by the chunk its first byte lies in, so that a range of several chunks
      is cut short. Pull request 11461 keeps the longer range; it is in the branch
      v1.22.x after 1.22.0, so in 1.22.1 at the earliest.
    * Pull request 11283, not merged: cuda_ipc maps the first chunk of a range only.
    * NEWS, 1.22.0: cuda_ipc takes POSIX file descriptors of VMM memory; before, it
      takes FABRIC handles only, and VMM memory without them does not go over NVLink.
    * src/ucp/core/ucp_context.c: ``UCX_TLS`` lists transports; without cuda_copy
      UCX takes GPU memory for host memory.
    """
    ucx = _find_ucx()
    settings = {name: os.environ[name] for name in sorted(os.environ) if name in _UCX}
    facts: dict[str, Any] = {
        "version": ucx.version if ucx else None,
        "where": ucx.where if ucx else None,
        "settings": settings,
    }
    if ucx is None:
        yield Finding("ucx", Status.OK, "not found", facts=facts)
        return
    notes: list[str] = []
    advice: list[str] = []
    shown = ", ".join(f"{name}={value}" for name, value in settings.items())
    whole = settings.get("UCX_CUDA_COPY_REG_WHOLE_ALLOC", "auto").lower()
    shortens = whole not in ("off", "n", "no", "0") and _shortens(ucx.version)
    facts["shortens_ranges_of_several_chunks"] = shortens
    if shortens or shortens is None:
        notes.append(
            "may cut registrations of several chunks to the first; kvpad gives each "
            "registered layer one"
        )
    torch = _import("torch")
    on_gpu = isinstance(torch, ModuleType) and _is_on_gpu(torch)
    transports = settings.get("UCX_TLS", "")
    if on_gpu and not _allows_cuda_copy(transports):
        advice.append(
            f"UCX_TLS={transports} leaves out cuda_copy, without which UCX takes GPU "
            "memory for host memory: add cuda_copy"
        )
    if settings.get("UCX_RCACHE_ENABLE", "").lower() in ("y", "yes", "1", "on"):
        # vLLM 0.33's NIXL connector turns it off for its agent when sleep mode is on
        # (nixl/base_worker.py), and the environment wins over that.
        advice.append(
            "with sleep mode, unset UCX_RCACHE_ENABLE: the cache of registrations "
            "would keep memory pinned that sleep gives back"
        )
    if on_gpu and _older(ucx.version, "1.22.0") and _exports_descriptors_only():
        advice.append(
            "between processes of one host, UCX before 1.22.0 moves this memory "
            "without NVLink (cuda_ipc takes FABRIC handles only): use a newer UCX"
        )
    detail = f"{ucx.version or 'version unknown'} ({ucx.where})"
    yield Finding(
        "ucx",
        Status.WARNING if advice else Status.OK,
        "; ".join(filter(None, [detail, shown, *notes])),
        "; ".join(advice),
        facts,
    )


_UCX = frozenset(
    {
        "UCX_CUDA_COPY_REG_WHOLE_ALLOC",
        "UCX_CUDA_COPY_MAX_REG_RATIO",
        "UCX_MEMTYPE_REG_WHOLE_ALLOC_TYPES",
        "UCX_MEMTYPE_CACHE",
        "UCX_RCACHE_ENABLE",
        "UCX_TLS",
    }
)


def _allows_cuda_copy(transports: str) -> bool:
    """Whether a value of UCX_TLS leaves cuda_copy in; a leading ^ negates the list."""
    negated = transports.startswith("^")
    names = {name.strip() for name in transports.lstrip("^").split(",") if name.strip()}
    if not names:
        return True
    if negated:
        return not names & {"cuda_copy", "cuda", "all"}
    return bool(names & {"cuda_copy", "cuda", "all"})


def _exports_descriptors_only() -> bool:
    try:
        driver = _open_driver()
    except VmmError:
        return False  # reported under memory
    return getattr(driver, "handle_type", None) == "POSIX_FILE_DESCRIPTOR"


# --- Other settings ------------------------------------------------------------------


def _allocator() -> Iterator[Finding]:
    """torch's allocator settings, in torch's order of precedence.

    vLLM refuses a KV connector while PYTORCH_CUDA_ALLOC_CONF has
    expandable_segments:True, unless its cumem allocator (sleep mode) is on: its
    memory could be remapped under a registration (config/vllm.py,
    _verify_kv_transfer_compat). It looks for that very text in that very variable.
    The cache that kvpad supplies is not torch's memory, so it is not in danger.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    settings = {name: os.environ[name] for name in names if os.environ.get(name)}
    facts = {"settings": settings}
    shown = ", ".join(f"{name}={value}" for name, value in settings.items())
    refused = "expandable_segments:True" in settings.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if refused:
        yield Finding(
            "allocator",
            Status.WARNING,
            f"{shown}: vLLM refuses to start a KV connector with this, except in sleep "
            "mode",
            "with a KV connector, unset it or add --enable-sleep-mode",
            facts,
        )
    else:
        yield Finding("allocator", Status.OK, shown or "torch's defaults", facts=facts)


def _connector_plugins() -> Iterator[Finding]:
    """Packages that answer for connectors (entry point group vllm_kvpad)."""
    from vllm_kvpad.capabilities import plugin_manager

    group = importlib.metadata.entry_points(group=hookspecs.PROJECT_NAME)
    wanted = [f"{entry.name} ({_distribution_of(entry)})" for entry in group]
    if not wanted:
        return
    loaded = [name for name, _plugin in plugin_manager().list_name_plugin()]
    broken = [name for name in wanted if name not in loaded]
    yield Finding(
        "connector_plugins",
        Status.WARNING if broken else Status.OK,
        ", ".join(wanted) + (f"; does not load: {', '.join(broken)}" if broken else ""),
        "its connectors are answered without it; update or remove it" * bool(broken),
        {"installed": wanted, "broken": broken},
    )
