"""``python -m vllm_kvpad.hosts``: what the installed vLLM has of what kvpad relies on.

For the maintainer who meets a new vLLM. Prints the host that was chosen, what each of
the others misses (``--``), and the points of vLLM that kvpad relies on: ``ok``, or
``!!`` and what was found instead. Where no host fits, the points of all are shown.
Ends with 1 if there is no host, or if a point of the chosen one is not as expected.
"""

from __future__ import annotations

import sys

from vllm_kvpad.hosts import Host, StepAside, hosts, select_host
from vllm_kvpad.patching import PatchError, PatchPoint
from vllm_kvpad.plugin import creation_patches, front_end_patches


def main() -> int:
    """Print the report and return the exit status."""
    import vllm

    chosen: Host | None = None
    try:
        chosen = select_host()
    except StepAside as reason:
        print(reason)
    else:
        print(f"vLLM {vllm.__version__}: host {chosen.name}")
    print("\nwhere kvpad learns of settings, workers and engine cores")
    sets = [front_end_patches, *creation_patches()]
    problems = _report([point for each in sets for point in each.points])
    for host in hosts():
        is_chosen = chosen is not None and host.name == chosen.name
        print(f"\n{host.name}{' (chosen)' if is_chosen else ''}")
        for line in host.missing():
            print(f"  --  {line}")
        if chosen is not None and host.missing():
            continue
        try:
            points = [point for each in host.patch_sets() for point in each.points]
        except PatchError as error:
            print(f"  !!  {error}")
            found = 1
        else:
            found = _report(points)
        problems += found if is_chosen else 0
    return 1 if chosen is None or problems else 0


def _report(points: list[PatchPoint]) -> int:
    """Print one line for each point; return how many are not as expected."""
    problems = 0
    for point in points:
        try:
            point.resolve()
        except PatchError as error:
            problems += 1
            print(f"  !!  {error}")
        else:
            print(f"  ok  {point.target} {point.expected}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
