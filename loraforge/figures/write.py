"""Write a figure of a bag: NAME.csv, NAME.svg, NAME.png and NAME.json, which ties them to the bag by hashes."""

from __future__ import annotations

import os
from pathlib import Path

from loraforge.errors import InputError
from loraforge.evidence.bag import Bag
from loraforge.evidence.tables import from_csv, to_csv
from loraforge.figures import FORMATS, SCHEMA, module_of, table_of
from loraforge.figures.style import Context, save
from loraforge.files import sha256_file, write_json, write_text


def write_figure(name: str, bag: Bag, out: Path) -> list[Path]:
    """Draw figure ``name`` from the records of ``bag`` into folder ``out``; the paths written, provenance last.

    The picture is drawn from the CSV as written, so that both show the same numbers. Raises UsageError for an
    unknown figure, InputError for a bag of another target or with bad records.
    """
    module = module_of(name)
    if name not in bag.target.figures:
        raise InputError(f"{name} is not a figure of a {bag.run.target} bag", path=bag.path)
    import matplotlib

    out = Path(out)
    csv, svg, png = (out / f"{name}.{ending}" for ending in FORMATS)
    text = to_csv(table_of(name, bag.records))
    write_text(csv, text)
    run = bag.run
    context = Context(run.fleet, run.host, bag.system.device(run.protocol), run.date, run.protocol)
    save(module.draw(from_csv(text, csv), context), svg, png)
    provenance = out / f"{name}.json"
    write_json(
        provenance,
        {
            "schema": SCHEMA,
            "figure": name,
            "bag": Path(os.path.relpath(bag.path.resolve(), out.resolve())).as_posix(),
            "bag_id": run.name,
            "bag_tagmanifest_sha256": bag.manifest_sha256,
            "files": {path.name: sha256_file(path) for path in (csv, svg, png)},
            "matplotlib": matplotlib.__version__,
        },
    )
    return [csv, svg, png, provenance]
