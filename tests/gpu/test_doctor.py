"""The doctor on a machine with a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from vllm_kvpad.vmm.base import format_bytes


def test_the_doctor_describes_this_gpu() -> None:
    # In a process of its own, because the driver makes a CUDA context.
    done = subprocess.run(
        [sys.executable, "-m", "vllm_kvpad.cli", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "VLLM_PLUGINS": "kvpad"},
        check=False,
    )
    assert done.returncode == 0, done
    answer = json.loads(done.stdout)
    findings = {each["check"]: each for each in answer["findings"]}
    assert answer["summary"].endswith("sized after warm-up")
    memory = findings["memory"]
    assert memory["facts"]["driver"] == "CudaVmmDriver"
    assert memory["facts"]["handle_type"] in {
        "FABRIC",
        "POSIX_FILE_DESCRIPTOR",
        "NONE",
    }
    assert format_bytes(memory["facts"]["granule_bytes"]) in memory["detail"]
    with_rdma = "with GPUDirect RDMA" in memory["detail"]
    assert memory["facts"]["gpu_direct_rdma"] is with_rdma
    assert findings["platform"]["facts"]["nvidia_driver"] is not None
