"""``python -m loraforge`` is the ``loraforge`` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run :func:`loraforge.cli.main`; its imports, too, may be interrupted without a traceback."""
    try:
        from loraforge.cli import main as run

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
