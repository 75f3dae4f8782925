"""What a region costs: registering it with NIXL, and telling every peer of it.

Real NIXL agents over UCX in a fresh process each time. Memory is laid out as kvpad
does: one chunk (memfd) for each region. On a machine without an RDMA NIC nothing is
pinned, so these are the costs of bookkeeping, which grow with the number of regions;
what a NIC adds grows with the bytes as well.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

from results import Recorder, Series

REGIONS = (1, 10, 100, 1_000, 10_000)
REGION_BYTES = 64 << 10
DESCRIPTORS = 20_000
"""Block descriptors that a decode rank prepares for a peer, over all regions."""


def fresh(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function`` in a new process that has done nothing else."""
    with concurrent.futures.ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        return pool.submit(function, *args).result()


def costs(
    regions: int, region_bytes: int = REGION_BYTES, descriptors: int = DESCRIPTORS
) -> dict[str, float]:
    """Register ``regions`` chunks with one agent, and introduce it to another.

    Returns:
        ``register``, ``deregister``: seconds, all regions; ``metadata``: bytes that
        each peer is sent; ``introduce``: seconds a peer takes to load them;
        ``prepare``: seconds to prepare about ``descriptors`` block descriptors of
        the peer; ``descriptors``: how many those were.
    """
    from nixl._api import nixl_agent, nixl_agent_config

    from vllm_kvpad.reservation import Reservation
    from vllm_kvpad.vmm import HostVmmDriver

    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")  # as vLLM sets it
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    driver = HostVmmDriver(granularity=4096)
    reservation = Reservation(driver, regions * region_bytes)
    ranges = [(i * region_bytes, (i + 1) * region_bytes) for i in range(regions)]
    reservation.remap(ranges, one_chunk_each=True)
    addresses = [reservation.address + start for start, _ in ranges]

    owner, peer = (
        nixl_agent(name, nixl_agent_config(capture_telemetry=True))
        for name in ("owner", "peer")
    )
    descs = owner.get_reg_descs(
        [(address, region_bytes, 0, "") for address in addresses], "DRAM"
    )
    spent: dict[str, float] = {}
    began = time.perf_counter()
    owner.register_memory(descs)
    spent["register"] = time.perf_counter() - began

    metadata = owner.get_agent_metadata()
    spent["metadata"] = len(metadata)
    began = time.perf_counter()
    name = peer.add_remote_agent(metadata)
    spent["introduce"] = time.perf_counter() - began

    blocks = max(1, descriptors // regions)
    size = region_bytes // blocks
    if not size:
        raise ValueError(f"{region_bytes} bytes cannot be cut into {blocks} blocks")
    listed = [
        (address + block * size, size, 0)
        for address in addresses
        for block in range(blocks)
    ]
    spent["descriptors"] = len(listed)
    transfer_descs = peer.get_xfer_descs(listed, "DRAM")
    began = time.perf_counter()
    handle = peer.prep_xfer_dlist(name, transfer_descs)
    spent["prepare"] = time.perf_counter() - began

    peer.release_dlist_handle(handle)
    peer.remove_remote_agent(name)
    began = time.perf_counter()
    owner.deregister_memory(descs)
    spent["deregister"] = time.perf_counter() - began
    del owner, peer
    reservation.free()
    return spent


def fit(points: dict[int, float]) -> dict[str, float]:
    """``fixed + each * n`` through the fewest and the most regions.

    Not least squares: the most would outweigh the fixed part, which few regions show.

    Raises:
        ValueError: More regions took less than fewer; the machine was too busy to tell.
    """
    few, many = min(points), max(points)
    if points[many] < points[few]:
        raise ValueError(
            f"{many} regions took less than {few} ({points[many]:.3g} and "
            f"{points[few]:.3g}): measure again on a quieter machine"
        )
    each = (points[many] - points[few]) / (many - few)
    return {"fixed": points[few] - few * each, "each": each}


def main(rounds: int = 5) -> None:
    recorder = Recorder("registration")
    found: dict[int, list[dict[str, float]]] = {regions: [] for regions in REGIONS}
    for _ in range(rounds):
        for regions in REGIONS:
            found[regions].append(fresh(costs, regions))
    # Agents poll in threads of their own, and whoever is scheduled last waits for
    # the others: the smallest of the rounds is what a call costs by itself.
    least: dict[str, dict[int, float]] = {}
    for quantity, unit in (
        ("register", "s"),
        ("introduce", "s"),
        ("metadata", "B"),
        ("deregister", "s"),
    ):
        samples = {
            f"{regions} regions": [each[quantity] for each in found[regions]]
            for regions in REGIONS
        }
        least[quantity] = {
            regions: min(samples[f"{regions} regions"]) for regions in REGIONS
        }
        recorder.add(
            Series(
                name=f"NIXL agent, {quantity}",
                unit=unit,
                reference=f"{REGIONS[0]} regions",
                samples=samples,
            )
        )
    each_descriptor = [
        each["prepare"] / each["descriptors"] for of in found.values() for each in of
    ]
    fits = {quantity: fit(points) for quantity, points in least.items()}
    recorder.note(
        region_bytes=REGION_BYTES,
        fits_through_smallest=fits,
        prepare_seconds_each_descriptor=statistics.median(each_descriptor),
    )
    for quantity, line in fits.items():
        print(f"{quantity}: {line['fixed']:.3g} + {line['each']:.3g} a region")


if __name__ == "__main__":
    main()
