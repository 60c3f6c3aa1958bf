"""``python -m loraforge`` is the ``loraforge`` command."""

from loraforge.cli import main

main()
