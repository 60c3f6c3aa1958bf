"""Spectra of a cached fleet as records."""

from __future__ import annotations

from typing import Any

from loraforge.factor.cache import CachedAdapter


def spectra_records(fleet: list[CachedAdapter]) -> list[dict[str, Any]]:
    """Records of target ``spectra``: one a module, and one with the time that building the entries took.

    The timing is that of the build itself, kept beside each entry, so that a run which finds entries in the
    cache states the same; ``seconds`` is the sum and ``passes`` its single pass. Where a timing was lost, no
    timing record is written.
    """
    found: list[dict[str, Any]] = []
    for cached in fleet:
        for name, module in cached.modules.items():
            found.append(
                {
                    "adapter": cached.adapter,
                    "module": name,
                    "kind": name.rpartition(".")[2],
                    "layer": next((int(part) for part in name.split(".") if part.isdigit()), None),
                    "rank": module.rank,
                    "scale": module.scale,
                    "sigma": cached.spectrum(name).tolist(),
                    "path": module.path,
                    "action_error": module.action_error,
                    "spectrum_error": module.spectrum_error,
                }
            )
    timings = [timing for cached in fleet if (timing := cached.timing) is not None]
    if len(timings) == len(fleet):
        seconds = sum(timing.seconds for timing in timings)
        found.append({"record": "timing", "name": "factor", "seconds": seconds, "passes": [seconds]})
    return found
