"""The index over committed bags: INDEX.sha256, which `sha256sum -c` reads too.

One line ``sha256  <target>/<bag>/tagmanifest-sha256.txt`` a bag; a tag manifest covers its bag's every byte. A
comment ``# current <target> <host> <bag>`` says which bag of a target and host counts: the newest.
"""

from __future__ import annotations

from pathlib import Path

from loraforge.errors import InputError
from loraforge.evidence.bag import Bag, find_bags, split_name
from loraforge.files import sha256_file, write_text

INDEX = "INDEX.sha256"
_HEADER = "# LoRAForge evidence, version 1; check with: sha256sum -c INDEX.sha256\n"


def render(root: Path) -> str:
    """The index that the bags below ``root`` call for."""
    lines, newest = [], dict[tuple[str, str], str]()
    for bag in find_bags(root):
        target, name = bag.path.parent.name, bag.path.name
        lines.append(f"{bag.manifest_sha256}  {target}/{name}/tagmanifest-sha256.txt\n")
        if parts := split_name(name):
            newest[target, parts[1]] = name  # bags come sorted by name, so by date
    current = [f"# current {target} {host} {name}\n" for (target, host), name in sorted(newest.items())]
    return _HEADER + "".join(lines) + "".join(current)


def write_index(root: Path) -> Path:
    """Rewrite INDEX.sha256 from the bags there are, atomically."""
    path = Path(root) / INDEX
    write_text(path, render(root))
    return path


def parse(text: str) -> tuple[dict[str, str], dict[tuple[str, str], str]]:
    """(sha256 by bag path, current bag by target and host) of an index. Raises ValueError on a strange line."""
    hashes: dict[str, str] = {}
    current: dict[tuple[str, str], str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if words[:2] == ["#", "current"] and len(words) == 5:
            current[words[2], words[3]] = words[4]
        elif line.startswith("#") or not words:
            continue
        elif len(words) == 2 and words[1].endswith("/tagmanifest-sha256.txt"):
            bag = words[1].removesuffix("/tagmanifest-sha256.txt")
            if bag in hashes:
                raise ValueError(f"line {number} lists {bag} again")
            hashes[bag] = words[0]
        else:
            raise ValueError(f"line {number} is not an entry of the index")
    return hashes, current


def current_bags(root: Path) -> dict[tuple[str, str], str]:
    """Name of the current bag by target and host. Raises InputError where ``root`` has no index that can be read."""
    path = Path(root) / INDEX
    try:
        return parse(path.read_bytes().decode())[1]
    except FileNotFoundError as error:
        remedy = f"restore the evidence, or write its index with `loraforge evidence index {root}`"
        raise InputError("the index of the evidence is missing", path=path, remedy=remedy) from error
    except (OSError, ValueError) as error:
        remedy = f"write it anew with `loraforge evidence index {root}`"
        raise InputError(f"not a readable index ({error})", path=path, remedy=remedy) from error


def problems(root: Path) -> list[tuple[Path, str]]:
    """What the index of ``root`` gets wrong, as (file, claim that failed); empty where it holds."""
    path = Path(root) / INDEX
    try:
        hashes, current = parse(path.read_bytes().decode())
    except FileNotFoundError:
        return [(path, "the index is missing; write it with `loraforge evidence index`")]
    except (OSError, ValueError) as error:
        return [(path, f"not a readable index ({error})")]
    found: list[tuple[Path, str]] = []
    present: dict[str, Bag] = {f"{bag.path.parent.name}/{bag.path.name}": bag for bag in find_bags(root)}
    for name, bag in present.items():
        manifest = bag.path / "tagmanifest-sha256.txt"
        if name not in hashes:
            found.append((bag.path, f"bag is not in {INDEX}"))
        elif not manifest.is_file():
            found.append((manifest, f"file listed in {INDEX} is missing"))
        elif (digest := sha256_file(manifest)) != hashes[name]:
            found.append((manifest, f"SHA-256 is {digest[:12]}…, {INDEX} says {hashes[name][:12]}…"))
    found += [(path, f"lists {name}, but there is no such bag") for name in hashes if name not in present]
    newest: dict[tuple[str, str], str] = {}
    for name in sorted(present):
        target, _, leaf = name.partition("/")
        if parts := split_name(leaf):
            newest[target, parts[1]] = leaf
    for key in sorted(newest.keys() | current.keys()):
        if newest.get(key) != current.get(key):
            says, should = current.get(key, "nothing"), newest.get(key, "nothing")
            found.append((path, f"current bag of {key[0]} on {key[1]} is {says}, the newest is {should}"))
    return found
