"""Second moments of the inputs of a base model's linear maps: collected once, kept as one hashed file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from loraforge.errors import InputError, IntegrityError, UsageError
from loraforge.files import canonical_json, read_jsonl, sha256_text, write_with
from loraforge.fleet.base_model import tensors_sha256
from loraforge.fleet.offline import offline_imports
from loraforge.progress import progress
from loraforge.tensor_file import contents_sha256, write_self_hashed

SCHEMA = "loraforge.moments/1"
_REMEDY = "collect it again with `loraforge moments`"


@dataclass(frozen=True)
class Moments:
    """Second moments on disk.

    Parameters
    ----------
    path: the safetensors file: of every distinct input, the lower triangle of its moments, row by row, float32.
    sha256: hex digest of its tensors; what depends on the moments is named by it.
    base_sha256: digest of the base model's tensors (:func:`~loraforge.fleet.base_model.tensors_sha256`).
    tokens: how many positions were averaged.
    inputs: the tensor that holds each module's moments; projections that share an input share one.
    """

    path: Path
    sha256: str
    base_sha256: str
    tokens: int
    inputs: Mapping[str, str]

    def second_moment(self, module: str, d_in: int) -> Tensor:
        """C = E[x x^T] of the inputs of ``module`` at length sqrt(d_in), float64 [d_in, d_in].

        Raises InputError where there is none, or one of another size.
        """
        key = self.inputs.get(module)
        if key is None:
            raise InputError("no moments of this module's inputs", path=self.path, key=module, remedy=_REMEDY)
        packed = self._handle.get_tensor(key).double()
        if len(packed) != d_in * (d_in + 1) // 2:
            raise InputError(
                f"moments of {len(packed)} entries are not those of {d_in} inputs",
                path=self.path,
                key=module,
                remedy="collect them from the base model of the adapters",
            )
        found = torch.zeros(d_in, d_in, dtype=torch.float64)
        row, column = torch.tril_indices(d_in, d_in)
        found[row, column] = packed
        found[column, row] = packed
        return found

    @cached_property
    def _handle(self) -> Any:
        return safe_open(str(self.path), framework="pt")


def load_moments(path: Path) -> Moments:
    """Open a file of moments, every byte checked.

    Raises InputError for a file that is missing or none, IntegrityError for one whose bytes have changed.
    """
    try:
        sha256, metadata = contents_sha256(path)
        header = json.loads(metadata["loraforge"])
        stated, whole = header.pop("header_sha256"), header["schema"] == SCHEMA
        moments = Moments(path, header["tensors_sha256"], header["base"], header["tokens"], header["inputs"])
    except (OSError, LookupError, AttributeError, TypeError, ValueError) as error:
        raise InputError(f"not a file of moments ({error})", path=path, remedy=_REMEDY) from error
    if not whole or sha256 != moments.sha256 or stated != sha256_text(canonical_json(header)):
        raise IntegrityError("its bytes are not those that were written", path=path, remedy=_REMEDY)
    return moments


def read_texts(paths: Sequence[Path], *, limit: int | None = None) -> list[str]:
    """Calibration texts: ``prompt`` or ``text`` of every JSON line, or every line of any other file; no labels.

    ``limit``: the first so many of each file. Raises InputError where a file has none.
    """
    found: list[str] = []
    for path in paths:
        if path.suffix == ".jsonl":
            texts = [str(record.get("prompt", record.get("text", ""))) for record in read_jsonl(path)]
        else:
            try:
                texts = path.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(f"cannot be read ({error})", path=path) from error
        texts = [text for text in texts if text.strip()][:limit]
        if not texts:
            raise InputError("holds no text", path=path, remedy='write lines of text, or of {"prompt": ...}')
        found += texts
    return found


def collect_moments(
    base: Path,
    texts: Sequence[str],
    out: Path,
    *,
    device: str = "cpu",
    batch_size: int = 16,
    max_tokens: int = 512,
) -> Moments:
    """Run the base model of folder ``base`` over ``texts`` and write the moments of its linear maps to ``out``.

    Every input counts at length sqrt(d). Sums are taken over real tokens, never over padding, in FP32 within a batch
    and FP64 between. The first ``max_tokens`` of a text count. The output layer is left out.
    """
    if not texts:
        raise UsageError("no calibration texts", remedy="name files of texts")
    with offline_imports():
        from transformers import AutoModelForCausalLM, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).to(device).eval()
    encoded = sorted(
        (tokenizer(text, add_special_tokens=False)["input_ids"][:max_tokens] for text in texts), key=len
    )
    encoded = [ids for ids in encoded if ids]
    batches = [encoded[start : start + batch_size] for start in range(0, len(encoded), batch_size)]
    sums = _Sums()
    with torch.inference_mode(), _watched(model, sums), progress("moments", len(batches)) as ticker:
        for rows in batches:
            width = max(map(len, rows))
            ids = torch.zeros(len(rows), width, dtype=torch.long)
            mask = torch.zeros(len(rows), width, dtype=torch.long)
            for row, tokens in enumerate(rows):
                ids[row, : len(tokens)] = torch.tensor(tokens)
                mask[row, : len(tokens)] = 1
            sums.begin(mask.bool().to(device))
            model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False)
            ticker.advance(f"{width} tokens")
    return _write(out, sums, tensors_sha256(base / "model.safetensors"))


class _Sums:
    """Sums of x x^T by distinct input, every x taken at length sqrt(d). Projections of the very same tensor share one.

    A few positions of every text (the first above all) have inputs hundreds of times as long as the rest, which no
    answer hangs on; as they are, they would decide what C is.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.inputs: dict[str, str] = {}
        self.sums: dict[str, Tensor] = {}
        self._mask: Tensor | None = None
        self._last: tuple[Tensor | None, str] = (None, "")

    def begin(self, mask: Tensor) -> None:
        """The next forward pass has real tokens where ``mask`` [batch, width] is true."""
        self._mask, self._last = mask, (None, "")
        self.tokens += int(mask.sum())

    def see(self, name: str, x: Tensor) -> None:
        """Module ``name`` is called with ``x`` [batch, width, d_in]."""
        last, key = self._last
        if x is last and self.inputs.get(name, key) == key:
            self.inputs[name] = key
            return
        self._last = (x, name)
        self.inputs[name] = name
        rows = x[self._mask].float()
        length = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        rows = rows * (rows.shape[1] ** 0.5 / torch.where(length > 0, length, 1.0))
        total = (rows.mT @ rows).double()
        self.sums[name] = total if name not in self.sums else self.sums[name].add_(total)


@contextmanager
def _watched(model: Any, sums: _Sums) -> Iterator[None]:
    """Tell ``sums`` of every call of a linear map but the output layer's."""
    output = model.get_output_embeddings()
    handles = [
        module.register_forward_pre_hook(lambda _, args, name=name: sums.see(name, args[0]))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not output
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _write(out: Path, sums: _Sums, base_sha256: str) -> Moments:
    tensors: dict[str, Tensor] = {}
    for name, total in sums.sums.items():
        row, column = torch.tril_indices(*total.shape, device=total.device)
        tensors[name] = (total[row, column] / sums.tokens).float().cpu()
    header = {"schema": SCHEMA, "base": base_sha256, "tokens": sums.tokens, "inputs": sums.inputs}

    def metadata(sha256: str) -> dict[str, str]:
        stated = header | {"tensors_sha256": sha256}
        return {"loraforge": canonical_json(stated | {"header_sha256": sha256_text(canonical_json(stated))})}

    write_with(out, lambda temporary: write_self_hashed(temporary, tensors, metadata))
    return load_moments(out)
