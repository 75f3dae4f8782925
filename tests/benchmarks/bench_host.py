"""Placement, byte ranges and host commits by number of layers (pytest-benchmark).

Not collected by ``pytest tests``: its name does not begin with ``test``. Run by
``tests/benchmarks/run.py host``, or by naming this file to pytest. What is looked at
is the growth: time per layer must not rise with the number of layers. Nothing here
asserts a time.
"""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vllm_kvpad import placement
from vllm_kvpad.cli.geometry import Geometry, Layer, Placement
from vllm_kvpad.kv_cache import ExtensibleKVCache
from vllm_kvpad.reservation import Reservation, intersect, merge, subtract
from vllm_kvpad.vmm import HostVmmDriver

LAYERS = (10, 100, 1_000, 10_000)
GRANULE = 2 << 20
BLOCKS = 1331
PAGE_OF_4_KIB = Layer(num_kv_heads=1, head_bytes=256)
"""A small page, so that 10,000 layers fit a host: 4 KiB for 16 tokens."""


def placed(layers: int, tensor_per_layer: bool, blocks: int = BLOCKS) -> Placement:
    """``layers`` equal layers with 20 KiB pages: one tensor for all, or one each."""
    layer = Layer(num_kv_heads=5, head_bytes=256)
    whole = Geometry(layers=[layer] * layers).place(blocks, use_vllm=True)
    if not tensor_per_layer:
        return whole
    (tensor,) = whole.config.kv_cache_tensors
    tensors = [
        dataclasses.replace(
            tensor, layers=[name], offset=tensor.offset + index * tensor.layer_stride
        )
        for index, name in enumerate(tensor.layers)
    ]
    config = dataclasses.replace(whole.config, kv_cache_tensors=tensors)
    return Placement(config, whole.layout)


each_count = pytest.mark.parametrize("layers", LAYERS)
each_shape = pytest.mark.parametrize(
    "tensor_per_layer", [False, True], ids=["one_tensor", "tensor_per_layer"]
)


def timed(benchmark: Any, function: Callable[[], Any], layers: int) -> Any:
    """Time ``function``, and note by how many layers to divide."""
    benchmark.extra_info["layers"] = layers
    return benchmark.pedantic(
        function, rounds=5 if layers >= 1_000 else 50, warmup_rounds=1
    )


@each_shape
@each_count
def test_kv_cache_segments(benchmark: Any, layers: int, tensor_per_layer: bool) -> None:
    plain = placed(layers, tensor_per_layer)
    segments = timed(
        benchmark,
        lambda: placement.kv_cache_segments(plain.config, plain.layout),
        layers,
    )
    assert len(segments) == layers


@each_shape
@each_count
def test_pad_kv_cache_segments(
    benchmark: Any, layers: int, tensor_per_layer: bool
) -> None:
    plain = placed(layers, tensor_per_layer)
    padded = timed(
        benchmark,
        lambda: placement.pad_kv_cache_segments(plain.config, plain.layout, GRANULE),
        layers,
    )
    assert placement.padding_bytes(plain.config, padded) > 0


@each_count
def test_blocks_within(benchmark: Any, layers: int) -> None:
    plain = placed(layers, False)
    padded = placement.pad_kv_cache_segments(plain.config, plain.layout, GRANULE)
    segments = placement.kv_cache_segments(padded, plain.layout)
    budget = placement.allocation_bytes(plain.config)
    found = timed(
        benchmark,
        lambda: placement.blocks_within(segments, budget, GRANULE),
        layers,
    )
    assert 0 < found < BLOCKS


@each_count
def test_ranges_missing_from_chunks(benchmark: Any, layers: int) -> None:
    """What a growing commit computes: which granules are not mapped yet."""
    chunks = [(index * 10, index * 10 + 4) for index in range(layers)]
    wanted = [(index * 10, index * 10 + 8) for index in range(layers)]

    def compute() -> Any:
        return subtract(merge(wanted), chunks), intersect(wanted, chunks)

    missing, present = timed(benchmark, compute, layers)
    assert len(missing) == len(present) == layers


@pytest.fixture
def many_files(layers: int) -> Iterator[None]:
    """Each chunk of host memory is a file; allow as many as the system does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if layers + 100 > hard:
        pytest.skip(f"{layers} chunks take more files than the {hard} allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@each_count
@pytest.mark.usefixtures("many_files")
def test_defragmenting_commit_on_the_host(benchmark: Any, layers: int) -> None:
    """One block of a page each: bookkeeping and system calls, hardly any memory."""
    driver = HostVmmDriver(granularity=4096)
    plain = Geometry(layers=[PAGE_OF_4_KIB] * layers).place(2, use_vllm=True)
    cache = ExtensibleKVCache(plain.config, plain.layout, "cpu", driver)

    def again() -> tuple[tuple[()], dict[str, Any]]:
        cache.commit(0, shrink=True)
        return (), {}

    benchmark.extra_info["layers"] = layers
    benchmark.pedantic(lambda: cache.commit(1, defragment=True), setup=again, rounds=3)
    assert cache.num_chunks == layers
    cache.free()


@each_count
@pytest.mark.usefixtures("many_files")
def test_giving_chunks_back_on_the_host(benchmark: Any, layers: int) -> None:
    driver = HostVmmDriver(granularity=4096)
    reservation = Reservation(driver, layers * 2 * 4096)
    ranges = [(index * 8192, index * 8192 + 4096) for index in range(layers)]

    def map_again() -> tuple[tuple[()], dict[str, Any]]:
        reservation.grow(ranges)
        return (), {}

    benchmark.extra_info["layers"] = layers
    benchmark.pedantic(reservation.clear, setup=map_again, rounds=3)
    assert reservation.num_chunks == 0
    reservation.free()
