"""Maps GPU indices to GPUs.

``PEERWAY_GPU_MAP`` names a GPU for each index, by its number, its UUID or its PCI address. With
``0,0`` the indices 0 and 1 both mean GPU 0, so that programs for two GPUs run on one. An index
beyond the map means the GPU with that number.

Without an index, this does not initialise the driver: it looks for a GPU only if the process
already uses one.
"""

import os

import peerway
from peerway import _native


def device(index: int | None) -> "peerway.Gpu | None":
    """The GPU with this index. None if there is none, or if no index is given and no GPU is in use.

    Raises ``ValueError`` for a map that names a GPU that does not exist.
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
        raise ValueError(f"PEERWAY_GPU_MAP must be a list of GPUs with commas, such as 0,0, not {asked[:64]!r}")
    return names
