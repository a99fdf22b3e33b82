"""Devices that are not here: topologies to compile for, on a machine without an accelerator.

What comes out is a compiled program with its schedule, not a run time. The TPU side needs the extra
`aot-tpu`, the GPU side `aot-gpu`.
"""

import os

import jax
from jax.experimental import topologies

# From the public specifications of the cards; what the compiler asks of a target.
_HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  core_count: 132 fpus_per_core: 128 l2_cache_size: {l2_cache_size}
  memory_bandwidth: {memory_bandwidth} clock_rate_ghz: {clock_rate_ghz}
  device_memory_size: {device_memory_size} cuda_compute_capability {{ major: 9 }}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 }} runtime_version {{ major: 13 }}
device_description_str: "{name}"
"""
GPUS: dict[str, dict[str, object]] = {
    "h100": {
        "name": "NVIDIA H100 80GB HBM3",
        "memory_bandwidth": 3_352_320_000_000,
        "l2_cache_size": 52_428_800,
        "clock_rate_ghz": 1.98,
        "device_memory_size": 84_978_434_048,
    },
    "h200": {
        "name": "NVIDIA H200",
        "memory_bandwidth": 4_814_848_000_000,
        "l2_cache_size": 62_914_560,
        "clock_rate_ghz": 1.98,
        "device_memory_size": 150_110_011_392,
    },
}


def tpu_devices(topology: str) -> list[jax.Device]:
    """Returns the devices of a TPU topology, such as "v5e:2x2", to compile for.

    Raises:
        RuntimeError: if libtpu is not installed or does not know the topology.
    """
    # Silence the search for a real TPU, and the lock that lets one process load libtpu.
    for name, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("TPU_ACCELERATOR_TYPE", "v5litepod-4"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
    ):
        os.environ.setdefault(name, value)
    return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)


def gpu_devices(kind: str, hosts: int = 1, per_host: int = 1) -> list[jax.Device]:
    """Returns the devices of `hosts` machines with `per_host` GPUs each, to compile for.

    Args:
        kind: one of `GPUS`.
        hosts: machines.
        per_host: GPUs of each.

    Raises:
        ValueError: for an unknown kind.
        RuntimeError: if the CUDA plug-in is not installed.
    """
    if kind not in GPUS:
        raise ValueError(f"No target {kind!r}: choose one of {', '.join(GPUS)}.")
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=_HOPPER.format(**GPUS[kind]),
        topology=f"1x{hosts}x{per_host}",
    )
    return list(topology.devices)
