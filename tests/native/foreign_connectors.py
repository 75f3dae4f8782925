"""Connectors that no list of vLLM's has: one registers memory, one only copies."""

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1


class RegisteringConnector(KVConnectorBase_V1):
    REGISTERS_DEVICE_MEMORY = True
    EXPORTS_CUDA_IPC = False


class CopyingConnector(KVConnectorBase_V1):
    REGISTERS_DEVICE_MEMORY = False
    EXPORTS_CUDA_IPC = False


class ExportingConnector(KVConnectorBase_V1):
    REGISTERS_DEVICE_MEMORY = False
    EXPORTS_CUDA_IPC = True
