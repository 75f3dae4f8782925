from vllm_kvpad.hookspecs import hookimpl


@hookimpl
def kvpad_registers_device_memory(connector_class: type) -> bool:
    raise SystemExit("this machine has no Acme licence")
