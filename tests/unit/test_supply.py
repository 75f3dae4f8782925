"""What is patched hands over to the supply where there is one, and to stock else."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from bare_worker import make_worker, take_charge, vllm_put_back
from small_caches import LBHNC, planned
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker
from vmm_probes import FaultyHostDriver

from vllm_kvpad import plugin
from vllm_kvpad.capabilities import ConnectorCapabilities
from vllm_kvpad.config import KvpadConfig
from vllm_kvpad.hosts import StepAside, select_host, supply
from vllm_kvpad.hosts.supplied_cache import (
    current_supply,
    graphs_are_captured_before_sizing,
)

REGISTERING = ConnectorCapabilities("Mine", True, "the test")
SILENT = ConnectorCapabilities(None, False, "the test")


@pytest.fixture(autouse=True)
def stock_vllm() -> Iterator[None]:
    with vllm_put_back():
        yield


# --- Where kvpad steps aside


def refused(worker: Any, capabilities: ConnectorCapabilities = SILENT) -> str:
    with pytest.raises(StepAside) as caught:
        supply.step_aside_where_unsupported(worker, capabilities)
    return str(caught.value)


def test_what_is_supported_is_not_refused() -> None:
    supply.step_aside_where_unsupported(make_worker(), REGISTERING)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda config: setattr(config.attention_config, "hisparse_config", {}),
            "HiSparse",
        ),
        (
            lambda config: setattr(config.parallel_config, "enable_elastic_ep", True),
            "elastic expert parallelism",
        ),
        (
            lambda config: setattr(config.aux_output_config, "enabled", True),
            "auxiliary output connector",
        ),
    ],
)
def test_a_feature_that_cannot_be_served_is_named(
    change: Callable[[Any], None], said: str
) -> None:
    worker = make_worker()
    change(worker.vllm_config)
    assert said in refused(worker)


def test_another_platform_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = type(current_platform)
    monkeypatch.setattr(platform, "is_cpu", lambda self: False)
    monkeypatch.setattr(platform, "device_name", "abacus", raising=False)
    assert refused(make_worker()) == "platform abacus is not supported"


def test_a_worker_of_somebody_elses_is_named() -> None:
    class TheirWorker:
        vllm_config = make_worker().vllm_config

    assert "TheirWorker is not vLLM's own" in refused(TheirWorker())


def test_what_the_connector_brings_is_named() -> None:
    pool = ConnectorCapabilities("Mine", True, "", brings_memory_pool="it says so")
    assert "own memory pool for the KV cache (it says so)" in refused(
        make_worker(), pool
    )
    never = ConnectorCapabilities("Mine", True, "", unsupported="it cannot be")
    assert refused(make_worker(), never) == "Mine: it cannot be"


def test_sleep_is_refused_where_the_connector_would_stay_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sleep_of_0_32(self: Any, level: int = 1) -> None: ...

    def sleep_of_0_33(self: Any, level: int = 1) -> None:
        self.connector.unregister_kv_caches()

    worker = make_worker()
    worker.vllm_config.model_config.enable_sleep_mode = True
    monkeypatch.setattr(Worker, "sleep", sleep_of_0_32)
    assert "does not let Mine unregister" in refused(worker, REGISTERING)
    supply.step_aside_where_unsupported(worker, SILENT)
    monkeypatch.setattr(Worker, "sleep", sleep_of_0_33)
    supply.step_aside_where_unsupported(worker, REGISTERING)


def test_a_vllm_with_an_extensible_cache_of_another_shape_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert select_host().name == "supply"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(StepAside, match="none that this version of kvpad knows"):
        select_host()


def test_a_worker_that_asks_for_nothing_gets_nothing() -> None:
    worker = make_worker(additional_config={"kvpad": {"enabled": False}})
    stock = Worker.determine_available_memory
    assert not take_charge(worker)
    assert Worker.determine_available_memory is stock


def test_a_worker_is_taken_charge_of_when_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(plugin, "take_charge_of", made.append)
    wrapped = plugin._watch_worker_creation(lambda self, rank: self.append(rank))
    worker: list[int] = []
    wrapped(worker, rank=3)
    assert worker == [3]
    assert made == [worker]


# --- Handing over


@pytest.fixture
def supplied() -> tuple[Any, Any]:
    """A worker, and what supplies it."""
    worker = make_worker()
    assert take_charge(worker)
    return worker, supply.supply_of(worker)


def test_worker_methods_go_to_the_supply_until_it_steps_aside(
    supplied: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, its_supply = supplied
    method = supply._method_of_supply("determine_available_memory")(lambda self: 1)
    its_supply.determine_available_memory = lambda worker, stock: stock() + 1
    assert method(worker) == 2
    assert method(make_worker()) == 1  # nobody supplies this one
    its_supply.stepped_aside = True
    assert method(worker) == 1


def test_the_sleep_backend_is_extended_once_there_is_a_cache(
    supplied: tuple[Any, Any],
) -> None:
    worker, its_supply = supplied
    backend = object()
    extended = supply._sleep_mode_backend(property(lambda self: backend))
    assert extended.fget is not None
    assert extended.fget(worker) is backend
    its_supply.cache = object()
    assert extended.fget(worker)._backend is backend
    its_supply.cache = None


def test_shutting_down_is_stocks_first_and_closes_the_supply(
    supplied: tuple[Any, Any],
) -> None:
    worker, its_supply = supplied
    order: list[str] = []
    its_supply.close = lambda: order.append("supply")
    shutdown = supply._shutdown(lambda self: order.append("stock"))
    shutdown(worker)
    shutdown(worker)
    assert order == ["stock", "supply", "stock"]
    assert supply.supply_of(worker) is None


def test_functions_hand_over_to_the_supply_in_charge_and_else_to_stock() -> None:
    def stock(*args: Any) -> Any:
        return ("stock", *args)

    allocate = supply._allocate_kv_cache(stock)
    connector = supply._ensure_kv_transfer_initialized(stock)
    created: list[Any] = []
    in_charge: Any = SimpleNamespace(
        views=lambda *args: ("supply", *args),
        create_connector=lambda *args: created.append(args),
    )
    assert allocate(1, "cpu", 2) == ("stock", 1, "cpu", 2, None)
    connector(1, 2)
    token = current_supply.set(in_charge)
    try:
        assert allocate(1, "cpu", 2, [8]) == ("supply", 1, 2, [8])
        connector(1, 2)
    finally:
        current_supply.reset(token)
    assert created == [(stock, 1, 2)]


def test_a_runner_is_rebound_while_the_final_size_is_adopted_and_only_then() -> None:
    ran: list[Any] = []
    initialize = supply._initialize_kv_cache(lambda self, config: ran.append("stock"))
    in_charge: Any = SimpleNamespace(
        is_adopting=False, rebind=lambda runner, config: ran.append("rebind")
    )
    runner = GPUModelRunner.__new__(GPUModelRunner)
    initialize(runner, None)
    token = current_supply.set(in_charge)
    try:
        initialize(runner, None)
        in_charge.is_adopting = True
        initialize(runner, None)
    finally:
        current_supply.reset(token)
    assert ran == ["stock", "stock", "rebind"]


def test_graphs_are_not_estimated_once_they_are_to_be_captured_first() -> None:
    estimate = supply._profile_cudagraph_memory(lambda self: 5)
    assert estimate(None) == 5
    token = graphs_are_captured_before_sizing.set(True)
    assert estimate(None) == 0
    graphs_are_captured_before_sizing.reset(token)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_given_size_whose_addresses_are_refused_is_left_to_stock(
    supplied: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    worker, its_supply = supplied
    worker.rank, worker.device = rank, torch.device("cpu")
    driver = FaultyHostDriver()
    driver.fail(1)
    said: list[str] = []
    monkeypatch.setattr(plugin, "_warn_stepped_aside", said.append)
    initialized: list[Any] = []
    config = planned()
    its_supply._initialize_given(worker, initialized.append, config, driver, LBHNC)
    assert initialized == [config]
    assert its_supply.stepped_aside
    assert its_supply.cache is None
    (reason,) = said
    assert "cannot be placed: injected: reserve" in reason


def test_a_reason_of_many_lines_is_one_in_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(plugin, "_warn_stepped_aside", said.append)
    reason = "Mine raised ValidationError: 1 error\n  field\n    missing"
    plugin.step_aside(make_worker(), KvpadConfig(), reason, None, speaks=True)
    assert said == ["Mine raised ValidationError: 1 error field missing"]
    with pytest.raises(RuntimeError, match="1 error field missing"):
        plugin.step_aside(
            make_worker(), KvpadConfig(strict=True), reason, None, speaks=True
        )
