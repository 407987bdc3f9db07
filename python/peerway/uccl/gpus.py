"""Which GPU an index means.

``PEERWAY_GPU_MAP`` names a GPU for each index, by its number, its UUID or its PCI address: with ``0,0`` the indices 0
and 1 both mean GPU 0, so that programs for two GPUs run on one. An index that it does not name means the GPU of that
number.

Only who names an index asks for a GPU: without one the driver is left alone unless something in the process uses it
already.
"""

import os

import peerway
from peerway import _native


def device(index: int | None) -> "peerway.Gpu | None":
    """The GPU of that index; None where there is none, or none was asked for.

    Raises ``ValueError`` for a map that names what is not there.
    """
    names = _map()
    if index is None and not _native.gpu_in_use():
        return None
    try:
        found = peerway.gpus()
    except peerway.GpuError:
        return None
    wanted = index or 0
    if wanted >= len(names):
        return found[wanted] if wanted < len(found) else None
    name = names[wanted]
    for gpu in found:
        if name in (str(gpu.index), gpu.uuid.lower(), gpu.bus_id):
            return gpu
    there = ", ".join(f"{gpu.index} ({gpu.uuid}, {gpu.bus_id})" for gpu in found)
    raise ValueError(f"PEERWAY_GPU_MAP names GPU {name[:64]!r}, but the process sees {there}")


def _map() -> list[str]:
    asked = os.environ.get("PEERWAY_GPU_MAP", "").strip()
    names = [name.strip().lower() for name in asked.split(",")] if asked else []
    if not all(names):
        raise ValueError(f"PEERWAY_GPU_MAP must be GPUs separated by commas, such as 0,0, not {asked[:64]!r}")
    return names
