"""The plugin's flags of the server's command line, as keys of ``--additional-config``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from loraforge.runtime.vllm.options import FLAGS


def extend(engine_args: Any, then: Callable[[], None] = lambda: None) -> None:
    """Have the engine's argument class take the flags too, once. then: called where arguments are read, so in the
    process that will answer requests and in no worker."""
    if hasattr(engine_args, "loraforge_flags"):
        return
    engine_args.loraforge_flags = True
    add, read = engine_args.add_cli_args, engine_args.from_cli_args.__func__

    def add_cli_args(parser: Any) -> Any:
        parser = add(parser)
        group = parser.add_argument_group(title="LoRAForge")
        for flag, (key, options) in FLAGS.items():
            group.add_argument(flag, dest=key, default=None, **options)
        return parser

    def from_cli_args(cls: type, args: Namespace) -> Any:
        given = {key: getattr(args, key, None) for key, _ in FLAGS.values()}
        given = {key: value for key, value in given.items() if value is not None}
        if given:
            args.additional_config = {**(getattr(args, "additional_config", None) or {}), **given}
        then()
        return read(cls, args)

    engine_args.add_cli_args = staticmethod(add_cli_args)
    engine_args.from_cli_args = classmethod(from_cli_args)
