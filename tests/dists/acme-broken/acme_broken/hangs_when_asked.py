import time

from vllm_kvpad.hookspecs import hookimpl


@hookimpl
def kvpad_exports_cuda_ipc(connector_class: type) -> bool:
    time.sleep(600)  # for the Acme daemon
    return True
