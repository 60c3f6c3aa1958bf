"""The command line that serves a fleet of adapters in SGLang; what it is made of is decided as for vLLM."""

from __future__ import annotations

import json
from collections.abc import Sequence

from loraforge.runtime.sglang import BACKEND, SWITCH
from loraforge.serving.engines import SGLANG_SERVER, lora_path
from loraforge.serving.launch import Launch, refuse_decided

BASE_SLOTS = 1  # of those of a batch, the one that requests of the base model take
# engine arguments that contradict what is decided here -> what to do instead
_OURS = {
    "--model": "pass --base before the --",
    "--model-path": "pass --base before the --",
    "--host": "pass it before the --",
    "--port": "pass it before the --",
    "--max-loras-per-batch": "pass --slots before the --",
    "--lora-paths": "put the adapters into one folder",
}
_PLUGINS = {
    "--lora-backend": f"set {SWITCH}=0 to serve by another one",
    "--loraforge-pool-bytes": "pass --pool-bytes before the --",
}
_OTHERS = ("--loraforge-pool",)


def command(launch: Launch, python: str, extra: Sequence[str] = ()) -> list[str]:
    """The server's command line. launch: its slots are the engine's, the base model's among them. extra: further
    arguments, last, so that they win.

    Raises UsageError for an argument that is decided here.
    """
    refuse_decided(extra, _OURS | (_PLUGINS if launch.ranks is not None else {}), "sglang", _OTHERS)
    line = [python, "-m", SGLANG_SERVER, "--model-path", launch.base]
    line += ["--served-model-name", launch.served_name, "--host", launch.host, "--port", str(launch.port)]
    line += ["--enable-lora", "--max-loras-per-batch", str(launch.slots)]
    line += ["--max-lora-rank", str(launch.max_rank)]
    if launch.ranks is not None:
        line += ["--lora-backend", BACKEND]
        if launch.pool_bytes is not None:
            line += ["--loraforge-pool-bytes", str(launch.pool_bytes)]
        line += ["--loraforge-ranks", json.dumps(dict(launch.ranks), sort_keys=True)]
    line += ["--lora-paths", *(lora_path(name, folder) for name, folder in launch.adapters.items())]
    return [*line, *extra]
