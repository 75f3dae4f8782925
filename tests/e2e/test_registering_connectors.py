"""Every connector that registers and runs on a CPU: two engines, handed-over text.

For each, a stock pair and a kvpad pair answer the same prompts; prefilled in one
engine, decoded in the other. (NIXL by pull has ``test_handover.py`` to itself.) What
cannot run here, and where its source says so:

- OffloadingConnector: ``v1/kv_offload/cpu/spec.py`` refuses platforms other than CUDA,
  ROCm and XPU.
- SimpleCPUOffloadConnector: runs on the CPU engine as long as it has nothing to do
  (prefix caching off); otherwise ``v1/simple_kv_offload/worker.py`` makes CUDA streams.
- MooncakeConnector, MooncakeStoreConnector: ask torch for an accelerator's number and
  for CUDA events; ``connectors/cpu_mooncake.py`` answers that and leaves them the rest.
- MoRIIOConnector: its library has builds for ROCm only.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fleet import PROBE, Fleet, probe_environment, registered_regions
from mappings import kvpad_memory, mappings, straddling

from engines import BLOCK_SIZE, Engine, EngineSpec, free_ports
from mooncake_segments import mooncake_environment
from prompts import prompts

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

ROOT = Path(__file__).parents[2]
CONNECTORS = Path(__file__).parent / "connectors"
LAYERS = 30
BUNDLED_LIBRARIES = "mooncake_transfer_engine_non_cuda.libs"
PROMPTS = [0, 3, 4, 6]
MAX_TOKENS = 12

Handover = Callable[[Engine, Engine, str], str]


@dataclass(frozen=True)
class Case:
    """A connector, and how a router passes a request on.

    Attributes:
        kv_transfer: ``--kv-transfer-config``, without the role.
        hand_over: Prefills in one engine, decodes in the other, returns the text.
        source: What kvpad must log as the source of its answer; a regular expression.
        env: For both engines.
        args: For both engines.
    """

    kv_transfer: Callable[[str], dict[str, Any]]
    hand_over: Handover
    source: str
    env: Mapping[str, str]
    args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a pair of engines did.

    Attributes:
        texts: In the prompts' order.
        tokens_received: Prompt tokens that the decode engine took from outside.
        prompt_tokens: All prompt tokens.
        num_blocks: Of both engines.
        failures: Log lines of either engine about failed transfers.
        supplied: What kvpad logged, by engine; empty on a stock pair.
        regions: By engine, what it registered within kvpad's memory (all that it
            registered, on a stock pair).
        straddling: Complaints about regions that lie in several mappings.
    """

    texts: list[str]
    tokens_received: int
    prompt_tokens: int
    num_blocks: tuple[int, int]
    failures: list[str]
    supplied: list[dict[str, Any]]
    regions: list[list[tuple[int, int]]]
    straddling: list[str]


def with_params_passed_on(prefill: Engine, decode: Engine, prompt: str) -> str:
    """As NIXL wants it: what the prefill engine returns goes to the decode engine."""
    name = uuid.uuid4().hex  # pushing engines find each other's requests by it
    offered = prefill.complete(
        prompt, 1, kv_transfer_params={"do_remote_decode": True}, request_id=name
    )
    params = offered.kv_transfer_params
    assert params
    return decode.complete(prompt, MAX_TOKENS, params, request_id=name).text


def with_transfer_id(prefill: Engine, decode: Engine, prompt: str) -> str:
    """As Mooncake wants it: the router names the transfer and the prefill engine."""
    transfer = str(uuid.uuid4())
    prefill.complete(
        prompt,
        max_tokens=1,
        kv_transfer_params={"do_remote_decode": True, "transfer_id": transfer},
    )
    assert prefill.spec.kv_transfer is not None
    address = f"http://127.0.0.1:{prefill.spec.env['VLLM_MOONCAKE_BOOTSTRAP_PORT']}"
    return decode.complete(
        prompt,
        MAX_TOKENS,
        {
            "do_remote_prefill": True,
            "transfer_id": transfer,
            "remote_engine_id": prefill.spec.kv_transfer["engine_id"],
            "remote_bootstrap_addr": address,
        },
    ).text


def after_a_reset(prefill: Engine, decode: Engine, prompt: str) -> str:
    """Handed over twice: computed, then loaded by the other child and handed over."""
    with_params_passed_on(prefill, decode, prompt)
    prefill.reset_prefix_cache()
    decode.reset_prefix_cache(external=True)
    return with_params_passed_on(prefill, decode, prompt)


def push() -> Case:
    return Case(
        lambda role: {
            "kv_connector": "NixlPushConnector",
            "kv_role": role,
            "kv_buffer_device": "cpu",
        },
        with_params_passed_on,
        source=r"built-in table, NixlPushConnector: .*",
        env={},
    )


def multi() -> Case:
    def kv_transfer(role: str) -> dict[str, Any]:
        children = [
            {
                "kv_connector": "NixlConnector",
                "kv_role": role,
                "kv_buffer_device": "cpu",
            },
            {
                "kv_connector": "NixlStoreConnector",
                "kv_connector_module_path": "nixl_store_connector",
                "kv_role": "kv_both",
            },
        ]
        return {
            "kv_connector": "MultiConnector",
            "kv_role": role,
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"connectors": children},
        }

    return Case(
        kv_transfer,
        after_a_reset,
        source=r"NixlConnector: built-in table.*; NixlStoreConnector: .*= True",
        env={"VLLM_SERVER_DEV_MODE": "1"},
        args=("--enable-prefix-caching",),
    )


def mooncake(libraries: str) -> Case:
    return Case(
        lambda role: {
            "kv_connector": "CpuMooncakeConnector",
            "kv_connector_module_path": "cpu_mooncake",
            "kv_role": role,
            "engine_id": f"mooncake-{role}",
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
        },
        with_transfer_id,
        source=r"built-in table, MooncakeConnector: .*",
        env={"LD_LIBRARY_PATH": libraries},
    )


@pytest.fixture(scope="module")
def mooncake_libraries(
    mooncake_installed: None, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """``LD_LIBRARY_PATH`` with which Mooncake's wheel loads."""
    folder = tmp_path_factory.mktemp("libraries")
    return mooncake_environment(folder)["LD_LIBRARY_PATH"]


@pytest.fixture(scope="module", params=["push", "multi", "mooncake"])
def outcomes(
    request: pytest.FixtureRequest, fleet: Fleet
) -> tuple[Case, Outcome, Outcome]:
    """The case, what a stock pair did and what a kvpad pair did."""
    match request.param:
        case "push":
            case = push()
        case "multi":
            case = multi()
        case _:
            case = mooncake(request.getfixturevalue("mooncake_libraries"))
    stock, kvpad = (
        outcome(fleet, f"{request.param}-{kind}", case, plugins)
        for kind, plugins in [
            ("stock", ("kvpad_probe",)),
            ("kvpad", ("kvpad_probe", "kvpad")),
        ]
    )
    return case, stock, kvpad


def outcome(fleet: Fleet, name: str, case: Case, plugins: tuple[str, ...]) -> Outcome:
    folder = fleet.probe_dir(name)
    specs = {
        f"{name}-{part}": EngineSpec(
            fleet.spec("stock").model,
            plugins=plugins,
            kv_transfer=case.kv_transfer(role),
            args=case.args,
            env={
                **probe_environment(folder),
                "PYTHONPATH": f"{PROBE}:{CONNECTORS}:{ROOT / 'examples'}",
                "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(free_ports(1)),
                **case.env,
            },
        )
        for part, role in [("prefill", "kv_producer"), ("decode", "kv_consumer")]
    }
    asked = [prompts()[i] for i in PROMPTS]
    with fleet.engines(specs) as started:
        pair = prefill, decode = tuple(started.values())
        for engine in pair:
            engine.wait_healthy()
        texts = [case.hand_over(prefill, decode, prompt) for prompt in asked]
        regions, complaints = [], []
        for engine in pair:
            ((pid, ranges),) = registered_regions(folder, engine.pids()).items()
            held = kvpad_memory(pid)
            mine = [
                (address, length)
                for address, length in ranges
                if not held or any(m.start <= address < m.end for m in held)
            ]
            regions.append(mine)
            complaints += straddling(mappings(pid), mine)
        return Outcome(
            texts=texts,
            tokens_received=int(decode.metric("vllm:external_prefix_cache_hits_total")),
            prompt_tokens=int(decode.metric("vllm:prompt_tokens_total")),
            num_blocks=(prefill.num_blocks(), decode.num_blocks()),
            failures=[line for engine in pair for line in failures(engine)],
            supplied=[facts for engine in pair for facts in engine.supplied()],
            regions=regions,
            straddling=complaints,
        )


def failures(engine: Engine) -> list[str]:
    """What the engine says of transfers that failed: its log, and its metrics."""
    found = [
        line
        for line in engine.log_text().splitlines()
        if re.search(r"\bERROR\b|\bWARNING\b.*(?i:nixl|mooncake|transfer )", line)
        and re.search(r"(?i)fail|error|timed out|expired", line)
    ]
    try:
        count = engine.metric("vllm:nixl_num_failed_transfers_total")
    except KeyError:
        return found  # not NIXL
    return found + [f"{engine.name}: {count} failed transfers"] * bool(count)


def test_decoded_text_is_the_stock_pairs(
    outcomes: tuple[Case, Outcome, Outcome],
) -> None:
    _, stock, kvpad = outcomes
    assert stock.texts[0].startswith(" Paris")
    assert kvpad.texts == stock.texts
    assert kvpad.num_blocks == stock.num_blocks


def test_the_decode_engine_receives_what_stocks_does_and_nothing_fails(
    outcomes: tuple[Case, Outcome, Outcome],
) -> None:
    _, stock, kvpad = outcomes
    assert kvpad.failures == []
    assert kvpad.tokens_received == stock.tokens_received
    assert kvpad.tokens_received == kvpad.prompt_tokens


def test_each_registered_region_lies_in_one_mapping_of_one_memfd(
    outcomes: tuple[Case, Outcome, Outcome],
) -> None:
    _, _, kvpad = outcomes
    assert kvpad.straddling == []
    for regions, blocks in zip(kvpad.regions, kvpad.num_blocks, strict=True):
        assert len(set(regions)) == LAYERS
        (length,) = {length for _, length in regions}
        assert length == blocks * BLOCK_SIZE * 2 * 3 * 64 * 2


def test_stock_regions_are_not_in_memfds(
    outcomes: tuple[Case, Outcome, Outcome],
) -> None:
    """The check above can fail."""
    _, stock, _ = outcomes
    assert stock.supplied == []
    assert stock.straddling != []


def test_the_log_says_who_answered(outcomes: tuple[Case, Outcome, Outcome]) -> None:
    case, _, kvpad = outcomes
    assert len(kvpad.supplied) == 2
    for facts in kvpad.supplied:
        assert facts["registers_device_memory"] is True
        assert re.fullmatch(case.source, facts["source"])
        assert facts["segments"] == facts["chunks"] == LAYERS


@pytest.fixture(scope="module")
def mooncake_master(
    mooncake_libraries: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A Mooncake master on loopback; yields the file that tells clients of it."""
    package = importlib.util.find_spec("mooncake")
    assert package is not None
    assert package.origin is not None
    folder = tmp_path_factory.mktemp("mooncake")
    program = folder / "mooncake_master"
    # A copy, since the wheel's need not be executable.
    shutil.copyfile(Path(package.origin).with_name("mooncake_master"), program)
    program.chmod(0o755)
    port, metrics = free_ports(1), free_ports(1)
    bundled = Path(package.origin).parent
    libraries = f"{mooncake_libraries}:{bundled}:{bundled.parent / BUNDLED_LIBRARIES}"
    with (folder / "master.log").open("w") as log:
        master = subprocess.Popen(
            [program, f"--rpc_port={port}", f"--metrics_port={metrics}"],
            env={**os.environ, "LD_LIBRARY_PATH": libraries},
            stdout=log,
            stderr=log,
        )
    try:
        wait_listening(port, master)
        config = folder / "client.json"
        config.write_text(
            json.dumps(
                {
                    "metadata_server": "P2PHANDSHAKE",
                    "master_server_address": f"127.0.0.1:{port}",
                    "protocol": "tcp",
                    "global_segment_size": "256MB",
                    "local_buffer_size": "64MB",
                }
            )
        )
        yield config
    finally:
        master.terminate()
        master.wait(timeout=10)


def wait_listening(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    pytest.fail(f"no Mooncake master on port {port}; status {server.poll()}")


def test_mooncake_store_serves_prefixes_after_a_reset(
    fleet: Fleet, mooncake_libraries: str, mooncake_master: Path
) -> None:
    folder = fleet.probe_dir("mooncake-store")
    spec = EngineSpec(
        fleet.spec("stock").model,
        plugins=("kvpad_probe", "kvpad"),
        kv_transfer={
            "kv_connector": "CpuMooncakeStoreConnector",
            "kv_connector_module_path": "cpu_mooncake",
            "kv_role": "kv_both",
        },
        args=("--enable-prefix-caching",),
        env={
            **probe_environment(folder),
            "PYTHONPATH": f"{PROBE}:{CONNECTORS}",
            "LD_LIBRARY_PATH": mooncake_libraries,
            "MOONCAKE_CONFIG_PATH": str(mooncake_master),
            "VLLM_SERVER_DEV_MODE": "1",
        },
    )
    with fleet.engines({"mooncake-store": spec}) as engines:
        engine = engines["mooncake-store"]
        engine.wait_healthy()
        for i in PROMPTS:
            engine.complete(prompts()[i], MAX_TOKENS)
        # Once more, from the prefix cache: computed in the same shapes as from the
        # store, which a near tie of two tokens can depend on.
        first = [engine.complete(prompts()[i], MAX_TOKENS).text for i in PROMPTS]
        time.sleep(10)  # it saves in the background, at its leisure on a busy machine
        engine.reset_prefix_cache()
        lengths = []
        for i, text in zip(PROMPTS, first, strict=True):
            again = engine.complete(prompts()[i], MAX_TOKENS)
            assert again.text == text
            lengths.append(again.prompt_tokens)
        hits = engine.metric("vllm:external_prefix_cache_hits_total")
        assert hits == sum((n - 1) // BLOCK_SIZE * BLOCK_SIZE for n in lengths)
        (facts,) = engine.supplied()
        assert facts["source"].startswith("built-in table, MooncakeStoreConnector")
        ((pid, ranges),) = registered_regions(folder, engine.pids()).items()
        assert len(ranges) == LAYERS
        assert straddling(mappings(pid), ranges) == []
        assert failures(engine) == []
