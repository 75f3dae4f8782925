from vllm_kvpad.hookspecs import hookimpl


@hookimpl
def kvpad_exports_cuda_ipc(connector_class: type) -> bool:
    return True


@hookimpl
def kvpad_registers_device_memory(connector_class: type, vllm_config: object) -> bool:
    return False
