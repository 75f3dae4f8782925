from vllm_kvpad.hookspecs import hookimpl


@hookimpl
def kvpad_registers_devicememory(connector_class: type) -> bool:
    return False
