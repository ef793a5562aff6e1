"""What every benchmark says of the machine it ran on, and the one JSON line that each ends with."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from typing import Any

import psutil


def physical_cores() -> int:
    return psutil.cpu_count(logical=False) or os.cpu_count() or 1


def machine() -> dict[str, Any]:
    import torch
    import transformers

    return {
        "cpu": cpu_name(),
        "physical_cores": physical_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            return next(line.partition(":")[2].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def report(name: str, results: Mapping[str, Any], targets: Mapping[str, Any]) -> None:
    """The last line of a benchmark, for programs. targets: name -> {"value", "target", "met"}."""
    print(json.dumps({"benchmark": name, "machine": machine(), "results": results, "targets": targets}))
