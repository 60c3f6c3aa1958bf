"""The plugin's options on the engine's command line: ``--loraforge-pool-bytes`` and ``--loraforge-pool``.

They end in the engine's ``additional_config``, which is part of what it hashes for its cache of compiled code, and
which its Python interface takes as it is.
"""

from __future__ import annotations

import argparse
from typing import Any

from loraforge.runtime.vllm import unloading

POOL = "loraforge_pool"  # keys of additional_config
POOL_BYTES = "loraforge_pool_bytes"
POOLS = ("ragged", "shadow")


def add() -> None:
    """Have the engine's parsers know the options, and its arguments take them; does nothing the second time."""
    from vllm.engine.arg_utils import EngineArgs

    if getattr(EngineArgs.add_cli_args, "loraforge", False):
        return
    declare, take = EngineArgs.add_cli_args, EngineArgs.from_cli_args.__func__

    def add_cli_args(parser: Any) -> Any:
        return add_options(declare(parser))

    def from_cli_args(kind: type, arguments: argparse.Namespace) -> Any:
        unloading.complete()  # the process that parses is the one that answers
        return take(kind, merged(arguments))

    add_cli_args.loraforge = True  # type: ignore[attr-defined]
    EngineArgs.add_cli_args = staticmethod(add_cli_args)
    EngineArgs.from_cli_args = classmethod(from_cli_args)


def add_options(parser: Any) -> Any:
    """Add the options to a parser, and return it."""
    group = parser.add_argument_group("LoRAForge", "Serving by live ranks (loraforge.runtime.vllm).")
    group.add_argument(
        "--loraforge-pool-bytes",
        type=_bytes,
        metavar="BYTES",
        help="room for adapters' live directions; default: that of the largest rank in every slot",
    )
    group.add_argument(
        "--loraforge-pool",
        choices=POOLS,
        help="ragged (default): live directions alone; shadow: the engine's pool, and compact factors beside it",
    )
    return parser


def merged(arguments: argparse.Namespace) -> argparse.Namespace:
    """Parsed arguments with the options that were given inside ``additional_config``, over what it says itself."""
    values = vars(arguments)
    given = {key: values[key] for key in (POOL, POOL_BYTES) if values.get(key) is not None}
    if not given:
        return arguments
    return argparse.Namespace(
        **{**values, "additional_config": {**(values["additional_config"] or {}), **given}}
    )


def _bytes(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of bytes")
    return count
