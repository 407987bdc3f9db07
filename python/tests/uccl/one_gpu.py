"""Runs a program for several GPUs on one GPU: every ``cuda:N`` of torch means ``cuda:0``.

    python one_gpu.py script.py [arguments]

This is for programs that select torch's GPU by rank. ``PEERWAY_GPU_MAP`` does the same for
endpoints.
"""

import os
import runpy
import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class OneGpu(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), keywords: Any = None) -> Any:
        keywords = dict(keywords or {})
        if str(keywords.get("device", "")).startswith("cuda"):
            keywords["device"] = "cuda:0"
        return function(*args, **keywords)


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    torch.cuda.set_device = lambda _device: None
    with OneGpu():
        runpy.run_path(sys.argv[0], run_name="__main__")
