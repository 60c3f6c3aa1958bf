"""Workloads: what is asked, of whom and when, made once from a seed, hashed, replayed to every arm (paper B.4, B.5).

A workload file is JSON Lines: a header that states the declared load and the hashes, then one request a line. All draws
are inverse transforms of :mod:`random`, whose sequence Python guarantees, in one stream a purpose: the same seed gives
the same bytes everywhere, another offered rate leaves requests and routing as they are, and another distribution of
output lengths leaves arrivals as they are.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from loraforge.errors import InputError, IntegrityError
from loraforge.files import canonical_json, read_jsonl, sha256_file, write_jsonl

SCHEMA = "loraforge.workload/1"
_DIGITS = 6  # of an arrival in seconds: below a microsecond, libraries of mathematics differ
_OWN = "{adapter}"  # in a path of prompts
_Item = TypeVar("_Item")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Fixed(_Strict):
    """Every length is ``tokens``."""

    kind: Literal["fixed"]
    tokens: int = Field(ge=1)

    @property
    def longest(self) -> int:
        """The greatest length in tokens."""
        return self.tokens

    def at(self, u: float) -> int:
        """Length in tokens at quantile ``u`` in (0, 1)."""
        return self.tokens


class Uniform(_Strict):
    """Integers from ``low`` to ``high``, both included."""

    kind: Literal["uniform"]
    low: int = Field(ge=1)
    high: int = Field(ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Uniform:
        return _ordered(self)

    @property
    def longest(self) -> int:
        """The greatest length in tokens."""
        return self.high

    def at(self, u: float) -> int:
        """Length in tokens at quantile ``u`` in (0, 1)."""
        return min(self.low + int(u * (self.high - self.low + 1)), self.high)


class LogNormal(_Strict):
    """Log-normal of arithmetic mean ``mean`` tokens before it is rounded and cut to ``low`` .. ``high``."""

    kind: Literal["lognormal"]
    mean: float = Field(gt=0, allow_inf_nan=False)
    sigma: float = Field(gt=0, le=4, description="standard deviation of the logarithm")
    low: int = Field(1, ge=1)
    high: int = Field(ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> LogNormal:
        return _ordered(self)

    @property
    def longest(self) -> int:
        """The greatest length in tokens."""
        return self.high

    def at(self, u: float) -> int:
        """Length in tokens at quantile ``u`` in (0, 1)."""
        location = math.log(self.mean) - self.sigma**2 / 2
        drawn = math.exp(location + self.sigma * NormalDist().inv_cdf(u))
        return max(self.low, min(round(drawn), self.high))


_Range = TypeVar("_Range", Uniform, LogNormal)


def _ordered(lengths: _Range) -> _Range:
    if lengths.low > lengths.high:
        raise ValueError(f"low {lengths.low} is above high {lengths.high}")
    return lengths


Lengths = Annotated[Fixed | Uniform | LogNormal, Field(discriminator="kind")]


class Vocabulary(_Strict):
    """Prompts of token ids drawn evenly from ``low`` .. ``high`` - 1, of drawn lengths: no two share a prefix."""

    low: int = Field(0, ge=0)
    high: int = Field(ge=1, description="one above the largest token id")
    tokens: Lengths = Field(description="lengths of prompts")

    @model_validator(mode="after")
    def _not_empty(self) -> Vocabulary:
        if self.low >= self.high:
            raise ValueError(f"no token id is in {self.low} .. {self.high - 1}")
        return self


class FleetLoad(_Strict):
    """One fleet's adapters, prompts and output lengths."""

    adapters: tuple[str | None, ...] = Field(
        min_length=1, description="names the server knows; null is the base model"
    )
    vocabulary: Vocabulary | None = Field(None, description="prompts of drawn token ids")
    prompts: Path | None = Field(
        None,
        description="or JSON Lines of {prompt: text or token ids, adapter: its name; without one, for all}; a path with"
        " {adapter} in it stands for one such file an adapter",
    )
    output_tokens: Lengths
    share: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="part of the requests, relative to the other fleets'"
    )

    @model_validator(mode="after")
    def _one_source(self) -> FleetLoad:
        if (self.vocabulary is None) == (self.prompts is None):
            raise ValueError("needs either vocabulary or prompts")
        if len(set(self.adapters)) != len(self.adapters):
            raise ValueError("names an adapter twice")
        if None in self.adapters and self.prompts is not None and _OWN in str(self.prompts):
            raise ValueError(f"prompts with {_OWN} leave the base model without any")
        return self

    def prompt_files(self) -> dict[str | None, Path]:
        """The file of each adapter's prompts; empty where they are drawn token ids."""
        if self.prompts is None:
            return {}
        text = str(self.prompts)
        return {adapter: Path(text.replace(_OWN, adapter or "")) for adapter in self.adapters}


class Even(_Strict):
    """Exactly ``requests`` requests an adapter, in a drawn order (paper B.9: 20)."""

    kind: Literal["even"]
    requests: int = Field(ge=1)


class Zipf(_Strict):
    """``requests`` independent draws; the i-th adapter of a drawn order has weight i**-s. s = 0 is uniform."""

    kind: Literal["zipf"]
    requests: int = Field(ge=1)
    s: float = Field(ge=0, le=10)


class LoadSpec(_Strict):
    """A declared load: what ``loraforge bench workload`` reads from YAML.

    .. code-block:: yaml

        fleets:
          smol:
            adapters: [city_country, es_conj, null]    # null: the base model
            vocabulary: {low: 100, high: 49000, tokens: {kind: lognormal, mean: 200, sigma: 0.5, high: 1500}}
            output_tokens: {kind: uniform, low: 8, high: 64}
        popularity: {kind: zipf, requests: 1000, s: 1.0}    # or {kind: even, requests: 20}, of each adapter
    """

    fleets: dict[str, FleetLoad] = Field(min_length=1)
    popularity: Even | Zipf = Field(discriminator="kind")

    @model_validator(mode="after")
    def _shares_of_all_or_none(self) -> LoadSpec:
        given = [fleet.share is not None for fleet in self.fleets.values()]
        if any(given) and not (all(given) and isinstance(self.popularity, Zipf)):
            raise ValueError("a share is for every fleet, under zipf popularity: even popularity fixes them")
        return self


class Request(_Strict):
    """One request of a workload."""

    id: int = Field(ge=0)
    arrival_s: float = Field(ge=0, allow_inf_nan=False, description="seconds after the start of the replay")
    fleet: str
    adapter: str | None = Field(description="null for the base model")
    prompt: str | tuple[int, ...]
    output_tokens: int = Field(ge=1, description="exact length, or the cap of a natural stop")


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival, and the header that a file has for them (``sha256`` covers both)."""

    header: Mapping[str, Any]
    requests: tuple[Request, ...]

    @property
    def sha256(self) -> str:
        """Content hash of the whole: what records quote."""
        return str(self.header["sha256"])

    def first(self, count: int) -> Workload:
        """The first ``count`` requests under the same header: a warm-up, never a measurement."""
        return Workload(self.header, self.requests[:count])


def copy_of(adapter: str, number: int, copies: int) -> str:
    """The ``number``-th name of an adapter that a server has under so many; its own where that is one."""
    return adapter if copies == 1 else f"{adapter}~{number}"


def load_spec(path: Path) -> LoadSpec:
    """Read a declared load. Paths in it are relative to its folder. Raises InputError that names the key."""
    try:
        value = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        spec = LoadSpec.model_validate(value)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read ({error})", path=path) from error
    except yaml.YAMLError as error:
        raise InputError(f"not YAML ({' '.join(str(error).split())})", path=path) from error
    except ValidationError as error:
        raise _first(error, path) from error
    fleets = {
        name: fleet.model_copy(update={"prompts": Path(path).parent / fleet.prompts})
        if fleet.prompts is not None
        else fleet
        for name, fleet in spec.fleets.items()
    }
    return spec.model_copy(update={"fleets": fleets})


def make_workload(
    spec: LoadSpec,
    seed: int,
    rate: float,
    outputs: Mapping[int, int] | None = None,
    source: str | None = None,
) -> Workload:
    """Draw a workload.

    seed: of all streams. rate: offered requests a second, Poisson. outputs: request id -> output tokens of an earlier
    run of the same requests, in place of drawn ones; ``source`` is the SHA-256 of its records. Raises InputError for a
    rate that is not one, an adapter without a prompt, and outputs of other requests.
    """
    if not (math.isfinite(rate) and rate > 0):
        raise InputError(f"{rate} is no rate", key="rate", remedy="give requests a second, above 0")
    routing = _route(spec, seed)
    if outputs is not None and outputs.keys() != set(range(len(routing))):
        raise InputError(
            f"the earlier run has outputs of {len(outputs)} requests, this workload {len(routing)} requests",
            key="outputs",
            remedy="take a run of this load, whole and without failures",
        )
    prompts = {name: _Prompts(name, fleet, seed) for name, fleet in spec.fleets.items()}
    lengths, gaps = Random(f"{seed}/outputs"), Random(f"{seed}/arrivals")
    arrivals = list(accumulate(-math.log1p(-gaps.random()) for _ in routing))  # at one a second
    if not math.isfinite(arrivals[-1] / rate):
        raise InputError(f"{rate} is no rate", key="rate", remedy="give one under which requests arrive")
    requests = []
    for number, ((name, adapter), arrival) in enumerate(zip(routing, arrivals, strict=True)):
        drawn = spec.fleets[name].output_tokens.at(_inside(lengths))
        requests.append(
            Request(
                id=number,
                arrival_s=round(arrival / rate, _DIGITS),
                fleet=name,
                adapter=adapter,
                prompt=prompts[name].draw(adapter),
                output_tokens=drawn if outputs is None else outputs[number],
            )
        )
    declared = {
        "schema": SCHEMA,
        "seed": seed,
        "rate": rate,
        "load": _declared(spec),
        "outputs_from": source,
    }
    return Workload(_sealed(declared, requests), tuple(requests))


def write_workload(path: Path, workload: Workload) -> None:
    """Write a workload file atomically."""
    write_jsonl(path, [dict(workload.header), *(_row(request) for request in workload.requests)])


def read_workload(path: Path) -> Workload:
    """Read a workload file. Raises InputError for another schema or a bad line, IntegrityError for a changed byte."""
    rows = read_jsonl(path)
    header = next(rows, None)
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        raise InputError(
            f"is no workload of schema {SCHEMA}", path=path, remedy="make one with loraforge bench workload"
        )
    requests = []
    for row in rows:
        try:
            requests.append(Request.model_validate(row))
        except ValidationError as error:
            raise _first(error, path) from error
    stated = {key: value for key, value in header.items() if not key.endswith("sha256")}
    for key, computed in _sealed(stated, requests).items():
        if header.get(key) != computed:
            raise IntegrityError(
                f"holds {computed}, its header says {header.get(key)}",
                path=path,
                key=key,
                remedy="take the file as it was written, or make it anew",
            )
    if [request.id for request in requests] != list(range(len(requests))):
        raise InputError("numbers its requests otherwise than from 0", path=path, key="id")
    return Workload(header, tuple(requests))


def _row(request: Request) -> dict[str, Any]:
    return request.model_dump(mode="json")


def _declared(spec: LoadSpec) -> dict[str, Any]:
    """The load as a header states it: files by what they hold, not by where they lie."""
    load = spec.model_dump(mode="json")
    for name, fleet in spec.fleets.items():
        stated = load["fleets"][name]
        if fleet.share is None:
            del stated["share"]  # as workloads were before there were shares, so that their hashes stay
        files = fleet.prompt_files()
        if len(hashes := [sha256_file(file) for file in dict.fromkeys(files.values())]) == 1:
            stated["prompts"] = f"sha256:{hashes[0]}"
        elif hashes:
            stated["prompts"] = f"sha256:{_digest(hashes)}"
    return load


def _sealed(header: Mapping[str, Any], requests: Sequence[Request]) -> dict[str, Any]:
    """The header with its hashes: of what is asked, of when, of how long the answers are, and of all there is."""
    rows = [_row(request) for request in requests]
    asked = [[row["id"], row["fleet"], row["adapter"], row["prompt"]] for row in rows]
    sealed = {
        **header,
        "count": len(rows),
        "requests_sha256": _digest(asked),
        "arrivals_sha256": _digest(row["arrival_s"] for row in rows),
        "outputs_sha256": _digest(row["output_tokens"] for row in rows),
    }
    return {**sealed, "sha256": _digest([sealed, *rows])}


def _digest(values: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for value in values:
        digest.update(canonical_json(value).encode() + b"\n")
    return digest.hexdigest()


def _first(error: ValidationError, path: Path) -> InputError:
    first = error.errors()[0]
    return InputError(first["msg"], path=path, key=".".join(map(str, first["loc"])) or None)


def _inside(stream: Random) -> float:
    """A draw from (0, 1): ``random`` gives 0 too, where a quantile may be infinite."""
    return stream.random() or 0.5


def _shuffled(items: Sequence[_Item], stream: Random) -> list[_Item]:
    """A drawn order. Not Random.shuffle, whose algorithm Python does not guarantee."""
    keyed = [(stream.random(), place) for place in range(len(items))]
    return [items[place] for _, place in sorted(keyed)]


def _route(spec: LoadSpec, seed: int) -> list[tuple[str, str | None]]:
    """Fleet and adapter of every request, in order of arrival."""
    stream = Random(f"{seed}/routing")
    known = [(name, adapter) for name, fleet in spec.fleets.items() for adapter in fleet.adapters]
    if isinstance(spec.popularity, Even):
        return _shuffled(known * spec.popularity.requests, stream)
    zipf = spec.popularity
    shares = [fleet.share for fleet in spec.fleets.values() if fleet.share is not None]
    if not shares:
        ranked = _Ranked(_shuffled(known, stream), zipf.s)
        return [ranked.pick(stream.random()) for _ in range(zipf.requests)]
    edges = list(accumulate(shares))
    fleets = [
        _Ranked(_shuffled([pair for pair in known if pair[0] == name], stream), zipf.s)
        for name in spec.fleets
    ]
    return [fleets[_below(edges, stream.random())].pick(stream.random()) for _ in range(zipf.requests)]


class _Ranked:
    """Items in an order, drawn with weights rank**-s."""

    def __init__(self, order: Sequence[tuple[str, str | None]], s: float) -> None:
        self.order = order
        self.edges = list(accumulate((place + 1) ** -s for place in range(len(order))))

    def pick(self, u: float) -> tuple[str, str | None]:
        return self.order[_below(self.edges, u)]


def _below(edges: Sequence[float], u: float) -> int:
    """The first place whose edge is above ``u`` in [0, 1) of the last."""
    return next((place for place, edge in enumerate(edges) if u * edges[-1] < edge), len(edges) - 1)


class _Prompts:
    """Draws the prompts of one fleet."""

    def __init__(self, name: str, fleet: FleetLoad, seed: int) -> None:
        self.stream = Random(f"{seed}/prompts/{name}")
        self.vocabulary = fleet.vocabulary
        self.texts: dict[str | None, list[str | tuple[int, ...]]] = {}
        files = fleet.prompt_files()
        rows = {file: list(_read_prompts(file)) for file in dict.fromkeys(files.values())}
        for adapter, file in files.items():
            self.texts[adapter] = [prompt for prompt, owner in rows[file] if owner in (None, adapter)]
            if not self.texts[adapter]:
                raise InputError(f"has no prompt for {adapter or 'the base model'!r}", path=file)

    def draw(self, adapter: str | None) -> str | tuple[int, ...]:
        if self.vocabulary is None:
            texts = self.texts[adapter]
            return texts[int(self.stream.random() * len(texts))]
        low, width = self.vocabulary.low, self.vocabulary.high - self.vocabulary.low
        count = self.vocabulary.tokens.at(_inside(self.stream))
        return tuple(low + int(self.stream.random() * width) for _ in range(count))


class _PromptRow(BaseModel):
    """A line of a prompt file; what else it says is for other readers."""

    prompt: str | tuple[int, ...] = Field(min_length=1)
    adapter: str | None = None


def _read_prompts(path: Path) -> Iterator[tuple[str | tuple[int, ...], str | None]]:
    for row in read_jsonl(path):
        try:
            parsed = _PromptRow.model_validate(row)
        except ValidationError as error:
            raise _first(error, path) from error
        yield parsed.prompt, parsed.adapter
