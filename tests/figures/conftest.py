"""Figures are tested on the same synthetic records as evidence."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "evidence"))
