"""Profiles a step: the time of every op and of its kernels, and the op's bytes and FLOPs.

After a warm-up the step runs several times without a profiler, to measure its time. It runs once to count the bytes and
FLOPs of every op. It runs once under torch's profiler with a range around each op; a kernel belongs to the range in
which it was launched. The step must run the same ops in the same order each time.
"""

import json
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fastenc.profiling.costs import CountWork, LabelOps
from fastenc.profiling.roofline import Ceilings
from fastenc.profiling.timing import call_seconds, synchronize

WARM_UP, TIMED = 3, 5
LAUNCHES = ("cuda_runtime", "cuda_driver")
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass
class Row:
    """All calls of an op with the same shapes.

    Fields:
        seconds: on a GPU, time of the op's kernels; on a CPU, time of the op.
        floor_seconds: the least time that the roofline allows (:class:`Ceilings`).
        kernels: {name: (launches, seconds)} on a GPU.
    """

    op: str
    shapes: str
    calls: int = 0
    seconds: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0
    floor_seconds: float = 0.0
    kernels: dict[str, tuple[int, float]] = field(default_factory=dict)

    @property
    def percent_of_roofline(self) -> float:
        return 100 * self.floor_seconds / self.seconds if self.seconds else 0.0


@dataclass
class Profile:
    """A step's profile.

    Fields:
        rows: ops by descending time.
        step_seconds: median time of steps without a profiler. If it is more than the sum of the rows, the device waited
            for the host.
        peak_bytes: largest allocated memory during a step on a GPU; None on a CPU.
    """

    rows: list[Row]
    step_seconds: float
    ceilings: dict[str, Any]
    peak_bytes: int | None

    @property
    def busy_seconds(self) -> float:
        return sum(row.seconds for row in self.rows)


def profile_step(
    step: Callable[[], object], device: torch.device, ceilings: Ceilings, trace: Path
) -> Profile:
    """Profile ``step`` and write its timeline to ``trace``, a JSON file that https://ui.perfetto.dev opens.

    Raises: RuntimeError if the step runs other ops from call to call, or if the profiler recorded nothing.
    """
    for _ in range(WARM_UP):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = statistics.median(call_seconds(step, device, TIMED))
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    with CountWork() as counted:
        step()
    synchronize(device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # Without acc_events, torch 2.11 warns that it clears the events after each cycle; there is only one cycle here.
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler, LabelOps():
        step()
        synchronize(device)
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    spans = _kernels(events) if device.type == "cuda" else _cpu_ops(events)
    rows: dict[tuple[str, str], Row] = {}
    for number, op_call in enumerate(counted.calls):
        row = rows.setdefault((op_call.name, op_call.shapes), Row(op_call.name, op_call.shapes))
        row.calls += 1
        row.bytes += op_call.work.bytes
        row.flops += op_call.work.flops
        row.floor_seconds += ceilings.floor(op_call.work)
        for label, kernel, duration in spans.pop(number, []):
            if label != op_call.name:
                raise RuntimeError(
                    f"a step must run the same ops in every call, got {op_call.name} and then {label} as op {number}: "
                    "remove what depends on earlier calls"
                )
            row.seconds += duration
            if device.type == "cuda":
                launches, total = row.kernels.get(kernel, (0, 0.0))
                row.kernels[kernel] = launches + 1, total + duration
    if spans:
        raise RuntimeError(
            f"a step must run the same ops in every call, got {len(spans)} more in the second call: "
            "remove what depends on earlier calls"
        )
    if not any(row.seconds for row in rows.values()):
        raise RuntimeError(
            "the profiler recorded none of the step's ops: is its access to the device denied?"
        )
    ordered = sorted((r for r in rows.values() if r.seconds), key=lambda r: -r.seconds)
    return Profile(ordered, seconds, ceilings.as_json(), peak)


Spans = dict[int, list[tuple[str, str, float]]]  # {number of an op: (op, kernel, seconds)}


class _Labels:
    """The ranges that LabelOps recorded, for each thread in the order of time."""

    def __init__(self, events: list[dict]):
        ranges_of = defaultdict(list)
        for event in events:
            number, _, op = event.get("name", "").partition(" ")
            if event.get("cat") == "user_annotation" and number.isdigit():
                end = event["ts"] + event["dur"]
                ranges_of[event["tid"]].append((event["ts"], end, int(number), op))
        self.ranges = {thread: sorted(ranges) for thread, ranges in ranges_of.items()}
        self.starts = {thread: [r[0] for r in ranges] for thread, ranges in self.ranges.items()}

    def at(self, thread: int, time: float) -> tuple[int, str] | None:
        """(number, op) of the range that contains this time, or None."""
        index = bisect_right(self.starts.get(thread, []), time) - 1
        if index < 0 or self.ranges[thread][index][1] < time:
            return None
        return self.ranges[thread][index][2:]


def _cpu_ops(events: list[dict]) -> Spans:
    """The time of each range's first op. It is the outermost one, so its time includes the ops that it calls."""
    labels, spans = _Labels(events), {}
    ops = (event for event in events if event.get("cat") == "cpu_op")
    for event in sorted(ops, key=lambda event: event["ts"]):
        label = labels.at(event["tid"], event["ts"])
        if label is not None and label[0] not in spans:
            spans[label[0]] = [(label[1], label[1], event["dur"] / 1e6)]
    return spans


def _kernels(events: list[dict]) -> Spans:
    """The kernels of each range: those whose launch lies in it."""
    labels, spans = _Labels(events), defaultdict(list)
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {})
    }
    for event in events:
        if event.get("cat") in DEVICE_WORK:
            launch = launches.get(event["args"].get("correlation"))
            label = labels.at(launch["tid"], launch["ts"]) if launch else None
            if label is not None:
                spans[label[0]].append((label[1], event["name"], event["dur"] / 1e6))
    return dict(spans)
