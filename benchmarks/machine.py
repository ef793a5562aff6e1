"""What every benchmark says: of its machine, of its targets, and in the JSON line that it ends with."""

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


class Targets:
    """name -> {"value", "target", "met"}, each printed as it is judged."""

    def __init__(self) -> None:
        self.judged: dict[str, dict[str, Any]] = {}

    def judge(self, name: str, value: float, target: float, *, at_most: bool = False) -> None:
        """at_most: the target is a ceiling, not a floor."""
        met = value <= target if at_most else value >= target
        self.judged[name] = {"value": float(f"{value:.4g}"), "target": target, "met": met}
        sign = "<=" if at_most else ">="
        print(f"  {name:52} {value:10.4g}   target {sign} {target:<5g} {'met' if met else 'MISSED'}", flush=True)


def report(name: str, results: Mapping[str, Any], targets: Mapping[str, Any]) -> None:
    """The last line of a benchmark, for programs. targets: name -> {"value", "target", "met"}."""
    print(json.dumps({"benchmark": name, "machine": machine(), "results": results, "targets": targets}))
