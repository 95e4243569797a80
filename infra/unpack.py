"""Start eval.pyz, of which this is the __main__: unpack it once into the user's cache, and run eval.py there.

Inside an archive the verifier's workers, which import their modules from files, would find none.
"""

import hashlib
import os
import sys
import tempfile
import zipfile
from pathlib import Path


def unpack(archive: Path, cache: Path) -> Path:
    """Return the folder with the files of an archive, named by the archive's hash.

    Each file is moved there whole, so several that start at once do not disturb each other, and a file that a
    clean-up of the cache has taken comes back.
    """
    folder = cache / f"eval-{hashlib.sha256(archive.read_bytes()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive) as files, tempfile.TemporaryDirectory(dir=cache) as fresh:
        for name in files.namelist():
            path = folder / name
            if not path.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                os.replace(files.extract(name, fresh), path)
    return folder


def main() -> None:
    archive = Path(__file__).parent
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = unpack(archive, Path(cache, "winnow"))
    except OSError as error:
        print(f"error: {archive.name} cannot unpack itself: {error}; set XDG_CACHE_HOME to a folder that can "
              "be written", file=sys.stderr)
        sys.exit(2)
    os.execv(sys.executable, [sys.executable, str(folder / "eval.py"), *sys.argv[1:]])


if __name__ == "__main__":
    main()
