"""kvpad over the vLLM whose own cache rounds block counts."""

from __future__ import annotations

import logging
from typing import Any

import native_engine as engines
import pytest
from native_engine import Start, foreign, make_config, transfer_config
from scenario import COUNTS, check_registrable, check_start
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_kvpad.hosts import select_host

pytestmark = pytest.mark.usefixtures("rounding")

REGISTERING = [transfer_config("NixlConnector"), foreign("RegisteringConnector")]
COPYING = [
    transfer_config(
        "OffloadingConnector", kv_connector_extra_config={"cpu_bytes_to_use": 1 << 20}
    ),
    foreign("CopyingConnector"),
]


def name_of(config: Any) -> str:
    return "no connector" if config is None else str(config.kv_connector)


def releases(engine: Any) -> int:
    """How often a worker's cache was remapped, its contents discarded."""
    (worker,) = engines.workers(engine)
    count: int = worker.model_runner.extensible_kv_cache.buffer.num_releases
    return count


def test_this_vllm_is_recognised() -> None:
    assert select_host().name == "pad_native"


@pytest.mark.parametrize("blocks", COUNTS)
@pytest.mark.parametrize("connector", REGISTERING, ids=name_of)
def test_registering_connector_gets_every_measured_block_in_one_chunk_each(
    connector: Any, blocks: int, start: Start
) -> None:
    engine = start(make_config(connector, blocks=blocks))
    check_registrable(engines.facts_of(engine), blocks)
    # What fits the granule that warm-up mapped is in one chunk already.
    assert releases(engine) == (0 if COUNTS[blocks] == 1 else 1)


@pytest.mark.parametrize("blocks", COUNTS)
@pytest.mark.parametrize("connector", [*COPYING, None], ids=name_of)
def test_other_connectors_get_every_block_and_pay_nothing(
    connector: Any, blocks: int, start: Start
) -> None:
    engine = start(make_config(connector, blocks=blocks))
    check_start(engines.facts_of(engine), blocks)
    assert releases(engine) == 0
    (worker,) = engines.workers(engine)
    cache = worker.model_runner.extensible_kv_cache
    assert cache.size == cache.capacity_blocks * cache.bytes_per_block


def test_capacity_is_as_planned(start: Start) -> None:
    engine = start(make_config(REGISTERING[0], blocks=102))
    (worker,) = engines.workers(engine)
    cache = worker.model_runner.extensible_kv_cache
    assert cache.capacity_blocks == engines.CAPACITY_BLOCKS


def test_the_engines_own_configurations_are_not_padded(start: Start) -> None:
    engine = start(make_config(REGISTERING[0], blocks=102))
    for config in (engine.kv_cache_config, *engine.worker_kv_cache_configs):
        (size,) = {tensor.size for tensor in config.kv_cache_tensors}
        assert size == engines.CAPACITY_BLOCKS * engines.LAYERS * engines.PAGE


def test_what_the_connector_is_told_describes_its_regions(start: Start) -> None:
    engine = start(make_config(REGISTERING[0], blocks=102))
    (worker,) = engines.workers(engine)
    told = worker.model_runner.kv_connector.kv_connector.kv_cache_config
    assert told.num_blocks == 102
    assert {tensor.offset for tensor in told.kv_cache_tensors} == {0}
    assert {tensor.size // 102 for tensor in told.kv_cache_tensors} == {
        engines.LAYERS * engines.PAGE
    }


@pytest.mark.parametrize("layout", [KVCacheLayout.BLHNC, KVCacheLayout.BLNHC])
def test_block_outermost_layouts_have_nothing_to_pad(
    layout: KVCacheLayout, start: Start
) -> None:
    engine = start(make_config(REGISTERING[0], blocks=102, layout=layout))
    (worker,) = engines.workers(engine)
    cache = worker.model_runner.extensible_kv_cache
    # One segment of 80 KiB blocks: 4 granules hold 102.4 of them.
    assert engine.kv_cache_config.num_blocks == 102
    assert cache.buffer.num_segments == 1
    assert cache.buffer.segments_backed_by_one_chunk([102 * cache.bytes_per_block])


@pytest.mark.parametrize("blocks", COUNTS)
def test_engine_core_and_worker_in_one_process(blocks: int, start: Start) -> None:
    config = make_config(REGISTERING[0], blocks=blocks, one_context=True)
    check_registrable(engines.facts_of(start(config)), blocks)


def test_all_ranks_pad(start: Start) -> None:
    engine = start(make_config(REGISTERING[0], blocks=102, workers=2))
    for rank in (0, 1):
        check_registrable(engines.facts_of(engine, rank), 102)


def test_sleep_brings_back_one_chunk_each_at_the_same_addresses(start: Start) -> None:
    engine = start(make_config(REGISTERING[0], blocks=102))
    (worker,) = engines.workers(engine)
    before = engines.regions_of(worker)
    worker.sleep()
    assert worker.model_runner.extensible_kv_cache.physical_bytes == 0
    worker.wake_up()
    assert engines.regions_of(worker) == before
    check_registrable(engines.facts_of(engine), 102)


def test_one_line_at_info_and_no_more(
    start: Start, kvpad_log: pytest.LogCaptureFixture
) -> None:
    start(make_config(REGISTERING[0], blocks=102, workers=2))
    (record,) = kvpad_log.records
    assert record.levelno == logging.INFO
    assert "pads vLLM's own extensible KV cache" in record.getMessage()
    assert "NixlConnector registers device memory" in record.getMessage()


# --- without kvpad, or where it must not act: these double upstream's behaviour too


def rounded_start(start: Start, connector: Any, **options: Any) -> None:
    """Upstream's own: 102 blocks become none, 1331 become 1024."""
    engine = start(make_config(connector, blocks=1331, **options))
    assert engine.kv_cache_config.num_blocks == 1024
    with pytest.raises(ValueError, match="No available memory"):
        start(make_config(connector, blocks=102, **options))


def test_without_kvpad_this_vllm_rounds_and_remaps_for_all(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KVPAD_DISABLE", "1")
    rounded_start(start, COPYING[0])
    engine = start(make_config(COPYING[0], blocks=1331))
    assert releases(engine) == 1


def test_switched_off_in_the_configuration(start: Start) -> None:
    rounded_start(start, REGISTERING[0], kvpad={"enabled": False})


def test_users_choice_wins(start: Start, kvpad_log: pytest.LogCaptureFixture) -> None:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.gpu_worker import Worker

    stock = (EngineCore._initialize_kv_caches, Worker.initialize_from_config)
    config = make_config(
        REGISTERING[0], blocks=102, enable=False, kvpad={"strict": True}
    )
    engine = start(config)
    assert engine.kv_cache_config.num_blocks == engines.CAPACITY_BLOCKS
    assert stock == (EngineCore._initialize_kv_caches, Worker.initialize_from_config)
    (record,) = kvpad_log.records
    assert record.levelno == logging.INFO
    assert "enable_extensible_kv_cache" in record.getMessage()


def test_a_driver_without_memory_management_wins(start: Start) -> None:
    """vLLM finds out after kvpad took charge: its cache is then as stock."""
    config = make_config(REGISTERING[0], blocks=102, unsupported="no VMM")
    engine = start(config)
    assert engine.kv_cache_config.num_blocks == engines.CAPACITY_BLOCKS
    (worker,) = engines.workers(engine)
    assert worker.model_runner.extensible_kv_cache is None
    placed, planned = worker.model_runner.kv_cache_config, engine.kv_cache_config
    assert placed.kv_cache_tensors == planned.kv_cache_tensors


def test_a_worker_that_is_not_in_charge_has_vllm_round_for_all(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_kvpad.hosts import pad_native

    def only_rank_0(worker: Any) -> bool | None:
        return True if worker.worker.rank == 0 else None

    monkeypatch.setattr(pad_native, "padding_of", only_rank_0)
    engine = start(make_config(REGISTERING[0], blocks=1331, workers=2))
    assert engine.kv_cache_config.num_blocks == 1024
    for rank in (0, 1):
        check_registrable(engines.facts_of(engine, rank), 1024)


def test_workers_that_cannot_be_asked_have_vllm_round(
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    kvpad_log: pytest.LogCaptureFixture,
) -> None:
    from vllm_kvpad.hosts import pad_native

    def fails(worker: Any) -> None:
        raise RuntimeError("cannot be shipped")

    monkeypatch.setattr(pad_native, "padding_of", fails)
    rounded_start(start, COPYING[0])
    assert "could not be asked" in kvpad_log.text
    with pytest.raises(RuntimeError, match="cannot be shipped"):
        start(make_config(COPYING[0], blocks=102, kvpad={"strict": True}))


def test_what_cannot_be_padded_is_rounded(
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    kvpad_log: pytest.LogCaptureFixture,
) -> None:
    from vllm_kvpad.hosts import pad_native

    def refuse(*args: Any) -> None:
        raise ValueError("tensors interleave")

    monkeypatch.setattr(pad_native, "pad_kv_cache_segments", refuse)
    engine = start(make_config(REGISTERING[0], blocks=1331))
    assert engine.kv_cache_config.num_blocks == 1024
    check_registrable(engines.facts_of(engine), 1024)
    assert "cannot be padded: tensors interleave" in kvpad_log.text
    with pytest.raises(RuntimeError, match="tensors interleave"):
        start(make_config(REGISTERING[0], blocks=1331, kvpad={"strict": True}))


def test_exporting_connector_is_left_to_vllm(
    start: Start, kvpad_log: pytest.LogCaptureFixture
) -> None:
    rounded_start(start, foreign("ExportingConnector"))
    assert "kvpad steps aside" in kvpad_log.text
    assert "legacy CUDA IPC handles" in kvpad_log.text


def test_an_engine_that_kvpad_leaves_alone_rounds_after_one_that_it_pads(
    start: Start,
) -> None:
    """Two engines in one process: patched for one, without effect on the other."""
    engine = start(make_config(REGISTERING[0], blocks=102))
    check_registrable(engines.facts_of(engine), 102)
    rounded_start(start, COPYING[0], kvpad={"enabled": False})
