"""What the server's command line takes: the backend's name, and the plugin's flags."""

from __future__ import annotations

import os
from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from typing import Any

from loraforge.errors import UsageError
from loraforge.runtime.sglang import BACKEND
from loraforge.runtime.sglang.options import FLAGS, Options


def extend(parser: ArgumentParser, problem: str | None) -> None:
    """Have ``--lora-backend`` take ``loraforge`` too, or say why it cannot, and add the plugin's flags.

    problem: why the installed engine is refused. Raises LookupError where the parser has no such argument.
    """
    action = next(action for action in parser._actions if action.dest == "lora_backend")
    action.choices = [*(action.choices or ()), BACKEND]
    if problem:
        action.type = _refusing(problem)
        return
    group = parser.add_argument_group(title="LoRAForge")
    for flag, (variable, options) in FLAGS.items():
        group.add_argument(flag, action=_ToEnvironment, dest=variable.lower(), **options)


def _refusing(problem: str) -> Callable[[str], str]:
    def backend(value: str) -> str:
        if value == BACKEND:
            raise ArgumentTypeError(problem)
        return value

    return backend


class _ToEnvironment(Action):
    """Leaves the value where the processes that the engine starts find it, if it means something."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, flag: Any = None) -> None:
        try:
            Options.of({self.dest.upper(): values})
        except UsageError as error:
            parser.error(str(error))
        os.environ[self.dest.upper()] = values
